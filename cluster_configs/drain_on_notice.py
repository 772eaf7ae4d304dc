"""Waits until the cloud says that this machine will be taken away, and then drains its Ray node.

Ray does not listen to the clouds by itself. A drained node gets no new work, and Ray Train tells
its workers, so that they save while there is time. Run it beside `ray start` on each spot worker:

    python cluster_configs/drain_on_notice.py --source aws

On Kubernetes it is the container's `preStop` hook, with `--source now`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone

HOSTS = {"aws": "169.254.169.254", "gcp": "metadata.google.internal"}
GCP_NOTICE_S = 30
"""What Google gives a preempted machine before it is off."""


def aws_seconds_left(answer: str, now: datetime) -> int:
    """Returns the seconds that an answer of `spot/instance-action` leaves.

    Args:
        answer: JSON with `action` and `time`.
        now: With its time zone.

    Example:
        >>> at = datetime(2030, 1, 1, 12, 0, tzinfo=timezone.utc)
        >>> aws_seconds_left('{"action": "terminate", "time": "2030-01-01T12:02:00Z"}', at)
        120
    """
    taken = datetime.fromisoformat(json.loads(answer)["time"].replace("Z", "+00:00"))
    return max(0, int((taken - now).total_seconds()))


def ask(host: str, method: str, path: str, headers: dict[str, str], timeout_s: float) -> str | None:
    """Returns a metadata server's answer; None when it has none, or can't be reached just now."""
    connection = http.client.HTTPConnection(host, timeout=timeout_s)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read().decode()
        return body if answer.status == 200 else None
    except (OSError, http.client.HTTPException) as error:
        print(f"{host} did not answer: {error}", file=sys.stderr, flush=True)
        return None
    finally:
        connection.close()


def wait_for_aws(host: str, interval_s: float) -> int:
    """Returns the seconds that are left once there is a notice."""
    while True:
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "300"}
        token = ask(host, "PUT", "/latest/api/token", ttl, 2)
        if token is not None:
            headers = {"X-aws-ec2-metadata-token": token}
            answer = ask(host, "GET", "/latest/meta-data/spot/instance-action", headers, 2)
            if answer is not None:
                return aws_seconds_left(answer, datetime.now(timezone.utc))
        time.sleep(interval_s)


def wait_for_gcp(host: str, interval_s: float) -> int:
    """Returns the seconds that are left once there is a notice."""
    path = "/computeMetadata/v1/instance/preempted"
    while ask(host, "GET", path, {"Metadata-Flavor": "Google"}, 2) != "TRUE":
        time.sleep(interval_s)
    return GCP_NOTICE_S


WAITS: dict[str, Callable[[str, float], int]] = {"aws": wait_for_aws, "gcp": wait_for_gcp}


def drain(seconds_left: int, address: str, node_id: str | None) -> int:
    """Drains a node, this one if none is named; returns the exit status of `ray drain-node`."""
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address,
        "--reason", "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message", f"the machine is taken away in {seconds_left} s",
        "--deadline-remaining-seconds", str(seconds_left),
        *(["--node-id", node_id] if node_id else []),
    ]  # fmt: skip
    return subprocess.run(command, check=False).returncode


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--source", choices=[*WAITS, "now"], required=True, help="who tells; now: this call does")
    add("--deadline", type=int, default=30, help="seconds that are left, with --source now")
    add("--wait", action="store_true", help="return only when they are over")
    add("--interval", type=float, default=2.0, help="seconds between questions")
    add("--address", default="auto", help="of the Ray cluster")
    add("--node-id", help="of the node to drain; this one if not given")
    add("--metadata-host", help="instead of the cloud's")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Waits and drains; returns an exit status."""
    chosen = make_parser().parse_args(arguments)
    if chosen.source == "now":
        left = chosen.deadline
    else:
        host = chosen.metadata_host or HOSTS[chosen.source]
        left = WAITS[chosen.source](host, chosen.interval)
    print(f"{left} s are left: draining the node", flush=True)
    until = time.monotonic() + left
    status = drain(left, chosen.address, chosen.node_id)
    if chosen.wait:
        time.sleep(max(0.0, until - time.monotonic()))
    return status


if __name__ == "__main__":
    sys.exit(main())
