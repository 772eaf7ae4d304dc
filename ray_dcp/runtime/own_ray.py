"""Starts a Ray of our own for a job that has none, as a process tree that outlives the caller.

The tree is a keeper (`keeper`, in a session of its own), which holds `ray start` and ends it when
nobody uses it. It listens on the loopback interface only, asks for a token, has its own temporary
directory, and takes whatever ports are free: two jobs on a machine do not meet.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ray_dcp.errors import DeadlineError, InvalidRequestError, ParticipantError
from ray_dcp.runtime import environment
from ray_dcp.runtime.naming import LEASE_S, check_lease

__all__ = ["KeeperOrder", "OwnRay", "start_own_ray"]

READY = "ready.json"
LOG = "keeper.log"
TOKEN = "token"  # noqa: S105 - a file name

_POLL_S = 0.05

_SLOW = "timed out during startup"
"""What Ray says when its own 30 s are over, which a busy machine needs to start its processes."""


@dataclass(frozen=True)
class OwnRay:
    """A Ray that was started here."""

    address: str
    """`host:port` of its control store."""
    directory: str
    """Everything it keeps on disk; the keeper removes it."""
    token_path: str
    """File with the token that drivers must show; only this user can read it."""
    keeper_pid: int
    """Process that ends it."""

    def encode(self) -> str:
        """Returns a text for `decode`; it holds no secret."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> OwnRay:
        """Returns what `encode` was given."""
        return OwnRay(**json.loads(text))


@dataclass(frozen=True)
class KeeperOrder:
    """What the keeper is to do."""

    directory: str
    lease_s: float
    num_cpus: int
    object_store_bytes: int | None
    start_timeout_s: float


def start_own_ray(
    *,
    lease_s: float = LEASE_S,
    num_cpus: int = 1,
    object_store_bytes: int | None = None,
    start_timeout_s: float = 120.0,
) -> OwnRay:
    """Starts a Ray on this machine's loopback interface and returns where it is.

    Nothing of it is left `lease_s` seconds after its last driver and its last actor have gone,
    whatever became of this process.

    Args:
        lease_s: How long it stays when it is unused, in seconds.
        num_cpus: CPUs it offers to tasks; our actors need none.
        object_store_bytes: Size of its object store; Ray's own default when None.
        start_timeout_s: How long it may take to start, in seconds.

    Raises:
        InvalidRequestError: An argument is out of range.
        ParticipantError: It did not start; the message ends with its log.
        DeadlineError: It did not start in time.
    """
    check_lease(lease_s)
    if num_cpus < 0 or start_timeout_s <= 0:
        raise InvalidRequestError(
            f"Expected num_cpus of at least 0 and start_timeout_s above 0, but found "
            f"{num_cpus!r} and {start_timeout_s!r}"
        )
    end_s = time.monotonic() + start_timeout_s
    while True:
        try:
            return _start(lease_s, num_cpus, object_store_bytes, end_s - time.monotonic())
        except ParticipantError as error:
            if _SLOW not in error.message or time.monotonic() >= end_s:
                raise


def _start(
    lease_s: float, num_cpus: int, object_store_bytes: int | None, timeout_s: float
) -> OwnRay:
    # Why /tmp and short: the paths of Ray's sockets below it must stay under 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="rdcp", dir="/tmp"))
    try:
        token = directory / TOKEN
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        order = KeeperOrder(str(directory), lease_s, num_cpus, object_store_bytes, timeout_s)
        process = _start_keeper(directory, token, order)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise ParticipantError(f"Expected to start a Ray in {directory}, but: {error}") from error
    return _wait(directory, process, timeout_s)


def _start_keeper(directory: Path, token: Path, order: KeeperOrder) -> subprocess.Popen[bytes]:
    with (directory / LOG).open("ab") as log:
        return subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "ray_dcp.runtime.keeper", json.dumps(asdict(order))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment.own_ray_environment(str(token)),
            cwd="/",
            start_new_session=True,
        )


def _wait(directory: Path, process: subprocess.Popen[bytes], timeout_s: float) -> OwnRay:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        ready = directory / READY
        if ready.exists():
            return OwnRay.decode(ready.read_text())
        log = _tail(directory / LOG)
        if process.poll() is not None:
            shutil.rmtree(directory, ignore_errors=True)
            raise ParticipantError(
                f"Expected a Ray to start on this machine, but it ended with status "
                f"{process.returncode}. Start one yourself (`ray start --head`) and set "
                f"RAY_ADDRESS. Its log ends with:\n{log}"
            )
        threading.Event().wait(_POLL_S)
    log = _tail(directory / LOG)
    process.terminate()
    raise DeadlineError(
        f"Expected a Ray to start on this machine within {timeout_s:g} s, but it did not. Start "
        f"one yourself (`ray start --head`) and set RAY_ADDRESS. Its log ends with:\n{log}"
    )


def _tail(path: Path, num_characters: int = 2000) -> str:
    try:
        return path.read_text(errors="replace")[-num_characters:]
    except OSError:
        return ""
