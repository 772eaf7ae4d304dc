"""A rank of a plain script without Ray, as a launcher starts it; it obeys lines on stdin.

Usage: RANK=… WORLD_SIZE=… python -m tests.integration.own_ray_rank <file for the group> <lease_s>
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from pathlib import Path

import torch.distributed as dist

from ray_dcp.commit_protocol.messages import Exchange
from ray_dcp.runtime.attach import attached_address
from ray_dcp.runtime.session import Session, current_session


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def exchange(session: Session, timeout_s: float) -> str:
    outbox = dict.fromkeys(range(session.world_size), b"x")
    request = Exchange(
        session.next_key(), session.rank, session.world_size, "t", outbox, timeout_s
    )  # fmt: skip
    reply = session.call(request)
    return f"{type(reply).__name__} {getattr(reply, 'error', '')}"


def main(group_file: str, lease_s: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{group_file}", rank=rank, world_size=world_size)
    logged = io.StringIO()
    logging.basicConfig(stream=logged, level=logging.INFO)
    session = current_session(lease_s=float(lease_s))
    directory = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent
    ready = json.loads((directory / "ready.json").read_text())
    tell(
        session=session.name,
        address=attached_address(),
        directory=str(directory),
        supervisor_pid=ready["supervisor_pid"],
        exchanged=exchange(session, 60.0),
        logged=[line for line in logged.getvalue().splitlines() if "No Ray was named" in line],
    )
    for line in sys.stdin:
        if line.strip() == "exchange":
            tell(exchanged=exchange(session, 60.0))


if __name__ == "__main__":
    main(*sys.argv[1:])
