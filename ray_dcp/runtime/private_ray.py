"""Starts a private Ray for a job that has none, as a process tree that outlives the caller.

The tree is a supervisor (`private_ray_supervisor`, in a session of its own), which holds
`ray start` and ends it when nobody uses it. It listens on the loopback interface only, requires a
token, has its own temporary directory, and takes any free ports: two jobs on a machine do not meet.

The supervisor holds a lock on the directory while every daemon of the tree lives. Each rank checks
that lock before it waits for Ray, which itself would wait for ever.

Ray takes its settings from the environment of each process: which cluster was named
(`RAY_ADDRESS`), and how a rank proves to a private Ray that it belongs to this job. Of the modules
below the entrypoints, this one reads and changes these variables.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import ray

from ray_dcp.core.checks import check_above_0
from ray_dcp.errors import DeadlineError, ParticipantError
from ray_dcp.runtime.actor_names import LEASE_S

READY = "ready.json"
LOG = "supervisor.log"
TOKEN = "token"  # noqa: S105 - a file name
ATTACHING = "attaching"
"""File with a shared lock of each process that attaches; the supervisor ends Ray with its own."""

_POLL_S = 0.05

_SLOW = "timed out during startup"
"""What Ray says when its own 30 s are over, which a busy machine needs to start its processes."""


@dataclass(frozen=True)
class PrivateRay:
    """A Ray that was started here."""

    address: str
    """`host:port` of its control store."""
    directory: str
    """Everything it keeps on disk; the supervisor removes it."""
    token_path: str
    """File with the token that drivers must show; only this user can read it."""
    supervisor_pid: int
    """Process that ends it."""
    machine: str = ""
    """Name of the machine that it runs on."""

    def encode(self) -> str:
        """Returns a text for `decode`; it holds no secret."""
        return json.dumps(asdict(self))

    @staticmethod
    def of_token(token_path: str) -> PrivateRay:
        """Returns the one whose token lies in a file."""
        return PrivateRay.decode(Path(token_path).with_name(READY).read_text())

    @staticmethod
    def decode(text: str) -> PrivateRay:
        """Returns what `encode` was given."""
        return PrivateRay(**json.loads(text))

    @property
    def is_lost(self) -> bool:
        """Whether one of its daemons has died, or its supervisor: then it never comes back.

        False on another machine, where that can't be known.
        """
        try:
            folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            is_here = self.machine in ("", platform.node())
            return is_here and isinstance(error, FileNotFoundError)
        try:
            return try_lock(folder, fcntl.LOCK_SH)
        finally:
            os.close(folder)

    def lost(self, rank: int | None = None) -> ParticipantError:
        """Returns the error of whoever needed it when it was lost.

        Args:
            rank: This rank.
        """
        return ParticipantError(
            f"Expected the Ray that this job started for itself to run at {self.address}, but it "
            f"was lost: its control store (gcs_server), its raylet or its supervisor (pid "
            f"{self.supervisor_pid}) died, most often for want of memory. Call again: the next "
            f"save or load starts another one. To use a cluster instead, start it "
            f"(`ray start --head`), and the job with RAY_ADDRESS set",
            rank=rank,
        )

    def check(self, rank: int | None = None) -> None:
        """Raises that error when it is lost."""
        if self.is_lost:
            raise self.lost(rank)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps the supervisor from ending it while this process attaches to it.

        *Why*: Ray ends a process that attaches while the raylet dies, and attaching may take longer
        than the lease on a busy machine.

        Raises:
            ParticipantError: It is lost, or about to be.
        """
        self.check()
        try:
            lock = os.open(Path(self.directory, ATTACHING), os.O_RDONLY)
        except FileNotFoundError:
            raise self.lost() from None
        try:
            while not try_lock(lock, fcntl.LOCK_SH):
                # The supervisor looks for a last time whether anybody is here.
                self.check()
                threading.Event().wait(_POLL_S)
            yield
        finally:
            os.close(lock)

    def remove(self) -> None:
        """Removes what it left on disk: its supervisor can't where that was killed."""
        shutil.rmtree(self.directory, ignore_errors=True)


def try_lock(descriptor: int, kind: int) -> bool:
    """Returns whether this process has got a lock on an open file, without waiting for it.

    Args:
        descriptor: Of the file.
        kind: `fcntl.LOCK_SH` or `fcntl.LOCK_EX`.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


_joined: list[PrivateRay] = []
"""Those that this process has been connected to; the last one may be lost, or left."""


def joined() -> PrivateRay | None:
    """Returns the private Ray that this process is connected to; None for any other, or none."""
    if not _joined or not ray.is_initialized():
        return None
    own = _joined[-1]
    return own if ray.get_runtime_context().gcs_address == own.address else None


def set_joined(own: PrivateRay) -> None:
    """Notes which private Ray this process is connected to; at its end, removes lost ones."""
    if not _joined:
        atexit.register(_remove_lost)
    _joined.append(own)


def _remove_lost() -> None:
    for own in _joined:
        if own.is_lost:
            own.remove()


@dataclass(frozen=True)
class SupervisorOrder:
    """What the supervisor is to do."""

    directory: str
    lease_s: float
    start_timeout_s: float


def start_private_ray(
    *,
    lease_s: float = LEASE_S,
    start_timeout_s: float = 120.0,
) -> PrivateRay:
    """Starts a Ray on this machine's loopback interface and returns where it is.

    Nothing of it is left `lease_s` seconds after its last driver and its last actor have gone,
    whatever became of this process.

    Args:
        lease_s: How long it stays when it is unused, in seconds.
        start_timeout_s: How long it may take to start, in seconds.

    Raises:
        InvalidRequestError: An argument is out of range.
        ParticipantError: It did not start; the message ends with its log.
        DeadlineError: It did not start in time.
    """
    check_above_0(lease_s, "lease_s")
    check_above_0(start_timeout_s, "start_timeout_s")
    end_s = time.monotonic() + start_timeout_s
    while True:
        try:
            return _start(lease_s, end_s - time.monotonic())
        except ParticipantError as error:
            if _SLOW not in error.message or time.monotonic() >= end_s:
                raise


def _start(lease_s: float, timeout_s: float) -> PrivateRay:
    # Why /tmp and short: the paths of Ray's sockets below it must stay under 107 bytes.
    try:
        directory = Path(tempfile.mkdtemp(prefix="rdcp", dir="/tmp"))
    except OSError as error:
        raise ParticipantError(
            f"Expected to start a Ray in /tmp, but: {error}. Make room there, or start Ray yourself"
        ) from error
    try:
        token = directory / TOKEN
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        order = SupervisorOrder(str(directory), lease_s, timeout_s)
        process = _start_supervisor(directory, token, order)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise ParticipantError(f"Expected to start a Ray in {directory}, but: {error}") from error
    return _wait(directory, process, timeout_s)


def _start_supervisor(
    directory: Path, token: Path, order: SupervisorOrder
) -> subprocess.Popen[bytes]:
    with (directory / LOG).open("ab") as log:
        return subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [
                sys.executable,
                "-m",
                "ray_dcp.runtime.private_ray_supervisor",
                json.dumps(asdict(order)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=private_ray_environment(str(token)),
            cwd="/",
            start_new_session=True,
        )


def _wait(directory: Path, process: subprocess.Popen[bytes], timeout_s: float) -> PrivateRay:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        ready = directory / READY
        if ready.exists():
            return PrivateRay.decode(ready.read_text())
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


def _tail(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[-2000:]
    except OSError:
        return ""


_NOT_INHERITED = ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_JOB_CONFIG_JSON_ENV_VAR")

_INLINE_BYTES = 256 << 20
_INLINE = {
    # Why: a process that is at the object store of a raylet when that dies is ended by Ray. So
    # messages travel without it; Ray's own limit for that is 100 KB.
    "RAY_max_direct_call_object_size": str(_INLINE_BYTES),
    "RAY_task_rpc_inlined_bytes_limit": str(_INLINE_BYTES),
}

_LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""After how many seconds without control store Ray ends a process that asks it; 60 by default."""
_YEAR_S = 365 * 24 * 3600

_token_paths: set[str] = set()
"""Tokens of our own that this process has used."""


def named_address() -> str | None:
    """Returns the cluster that the user named with `RAY_ADDRESS`, if any."""
    return os.environ.get("RAY_ADDRESS") or None


def token_environment(token_path: str) -> dict[str, str]:
    """Returns the variables that make a process use the token in a file.

    Empty when the user decided about authentication with `RAY_AUTH_MODE`.
    """
    is_ours = os.environ.get("RAY_AUTH_TOKEN_PATH") in _token_paths
    if os.environ.get("RAY_AUTH_MODE") and not is_ours:
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_path}


def private_ray_environment(token_path: str) -> dict[str, str]:
    """Returns the whole environment for the supervisor of a private Ray.

    Args:
        token_path: File with the token that its users must show.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    paths = [str(Path(__file__).parents[2]), *filter(None, [kept.get("PYTHONPATH")])]
    settings = {
        # Why: without it Ray replaces 127.0.0.1 by an address that other machines can reach.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Why: training fills the memory on purpose; Ray would kill the coordinator first.
        "RAY_memory_monitor_refresh_ms": kept.get("RAY_memory_monitor_refresh_ms", "0"),
        "RAY_USAGE_STATS_ENABLED": "0",
        **_INLINE,
        # Why: Ray would end the supervisor while that ends Ray.
        _LIMIT: str(_YEAR_S),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }
    return {**kept, **token_environment(token_path), **settings}


def daemons_environment() -> dict[str, str]:
    """Returns the whole environment for the daemons that this process, the supervisor, starts."""
    return {name: value for name, value in os.environ.items() if name != _LIMIT}


@contextmanager
def pinned_to_loopback(token_path: str) -> Iterator[dict[str, str]]:
    """Sets what `ray.init` needs to reach a private Ray; yields the token's variables.

    The token's variables stay set (Ray's processes of this rank read them again), the rest does
    not.
    """
    token = token_environment(token_path)
    os.environ.update(token)
    _token_paths.update({token_path} if token else ())
    settings = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Why: Ray ends a driver whose control store is gone for so many seconds (60), and one
        # whose raylet is gone if the process that it takes for the raylet is not there: here its
        # parent, without this. A rank must not end with a Ray that it never asked for.
        _LIMIT: str(_YEAR_S),
        "RAY_RAYLET_PID": str(os.getpid()),
        **_INLINE,
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield token
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def prefer_loopback_for_gloo() -> None:
    """Makes process groups of this process use the loopback interface, unless one was chosen."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
