"""The supervisor process of a private Ray: starts it, and ends it when nobody uses it any more.

It also ends it when one of its daemons has died: Ray's processes would wait for that one for a
minute, and a rank for ever. Its lock on the directory shows the ranks that all daemons live.

It adopts every process of its tree that loses its parent, so that at the end it ends exactly its
own processes, by their ids. If it is killed itself, the kernel asks `ray start` to end.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from ray_dcp.errors import CheckpointError
from ray_dcp.runtime import ray_private
from ray_dcp.runtime.private_ray import (
    ATTACHING,
    READY,
    TOKEN,
    PrivateRay,
    SupervisorOrder,
    daemons_environment,
    try_lock,
)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_TERMINATE_S = 10.0
"""How long the tree may take to end by itself before it is killed, in seconds."""

_DEAF_S = 60.0
"""How long the control store may not answer before the tree is ended, in seconds: as long as Ray's
own processes wait for it."""

_LOOK_S = 0.25
"""How often to look whether all daemons live, in seconds."""

_DAEMONS = ("gcs_server", "raylet")
"""What they are called in the table of processes."""

_stop = threading.Event()


def keep(order: SupervisorOrder) -> None:
    """Runs a Ray until nobody has used it for the lease, or until SIGTERM; leaves nothing."""
    directory = Path(order.directory)
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    attaching = os.open(directory / ATTACHING, os.O_RDONLY | os.O_CREAT, 0o600)
    process, address = None, None
    try:
        process = _start(directory)
        address = _address(process, directory, order.start_timeout_s)
        if address is not None:
            token, machine = str(directory / TOKEN), platform.node()
            _publish(directory, PrivateRay(address, order.directory, token, os.getpid(), machine))
            _wait_until_unused(process, address, attaching, order.lease_s)
    finally:
        # Why first: the ranks are to know it before they lose what they wait for.
        os.close(lock)
        _end(process)
        if address is not None:
            shutil.rmtree(directory, ignore_errors=True)


def _start(directory: Path) -> subprocess.Popen[bytes]:
    options = {
        "port": 0,
        "node-manager-port": 0,
        "object-manager-port": 0,
        "min-worker-port": 0,
        "max-worker-port": 0,
        "dashboard-agent-listen-port": 0,
        "dashboard-agent-grpc-port": 0,
        "runtime-env-agent-port": 0,
        "metrics-export-port": 0,
        "include-dashboard": "false",
        "include-log-monitor": "false",
        "num-cpus": 1,  # for tasks of the user; our actors need none
        "num-gpus": 0,
        # Why not `directory`: Ray opens its temporary directory to every user.
        "temp-dir": directory / "r",
    }
    if ray_private.has_ray_client():
        options["ray-client-server-port"] = _free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--no-monitor", "--disable-usage-stats"]
    command += [f"--{name}={value}" for name, value in options.items()]
    return subprocess.Popen(  # noqa: S603 - our own interpreter, no input from outside
        command,
        stdin=subprocess.DEVNULL,
        env=daemons_environment(),
        preexec_fn=_end_with_parent,
    )


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _address(process: subprocess.Popen[bytes], directory: Path, timeout_s: float) -> str | None:
    """Returns where the control store listens; None when Ray did not start."""
    path = directory / "r" / "ray_current_cluster"
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s and process.poll() is None and not _stop.is_set():
        # Careful: the file appears before its line does.
        text = path.read_text().strip() if path.exists() else ""
        if ":" in text:
            return text
        _stop.wait(0.05)
    return None


def _publish(directory: Path, own: PrivateRay) -> None:
    unfinished = directory / f"{READY}.new"
    unfinished.write_text(own.encode())
    unfinished.rename(directory / READY)


def _wait_until_unused(
    process: subprocess.Popen[bytes], address: str, attaching: int, lease_s: float
) -> None:
    """Returns when nobody has used it for the lease, when a daemon has died, or at SIGTERM.

    At the end of the lease it takes the lock on `attaching`, so that nobody attaches any more, and
    looks once more: whoever attached just before is a driver by then.
    """
    daemons = _daemons()
    locked_s = None
    use = _Use(address)
    threading.Thread(target=use.watch, args=(min(1.0, lease_s / 4),), daemon=True).start()
    while process.poll() is None and not _stop.wait(min(_LOOK_S, lease_s / 4)):
        gone = [name for pid, name in daemons.items() if _name(pid) != name]
        silent_s = time.monotonic() - use.answered_s
        if gone or silent_s >= _DEAF_S:
            what = f"{gone} died" if gone else f"no answer for {silent_s:.0f} s"
            sys.stderr.write(f"Ray is ended: {what}\n")
            return
        if use.answered_s - use.used_s < lease_s:
            fcntl.flock(attaching, fcntl.LOCK_UN)
            locked_s = None
        elif locked_s is None:
            locked_s = time.monotonic() if try_lock(attaching, fcntl.LOCK_EX) else None
        elif use.answered_s > locked_s:
            return


class _Use:
    """When the control store answered last, and when somebody used the cluster.

    In a thread of its own: a question that it does not answer ends never.

    Args:
        address: Of the control store.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self.answered_s = self.used_s = time.monotonic()
        """When the last question was asked that had an answer, and the last that found a user."""

    def watch(self, look_s: float) -> None:
        """Looks for ever."""
        use = ray_private.ClusterUse(self._address)
        while True:
            asked_s = time.monotonic()
            try:
                in_use = use.in_use()
                self.used_s = asked_s if in_use else self.used_s
                self.answered_s = asked_s
            except (CheckpointError, RuntimeError, OSError) as error:
                sys.stderr.write(f"No answer from the control store: {error}\n")
            threading.Event().wait(look_s)


def _daemons() -> dict[int, str]:
    """Returns the names of the daemons below this process, by process id."""
    names = {pid: _name(pid) for pid in _descendants(os.getpid())}
    return {pid: name for pid, name in names.items() if name in _DAEMONS}


def _name(pid: int) -> str:
    """Returns what a process is called; empty when it has ended."""
    entry = Path(f"/proc/{pid}")
    try:
        return (entry / "comm").read_text().strip() if _parent(entry) is not None else ""
    except OSError:
        return ""


def _end(process: subprocess.Popen[bytes] | None) -> None:
    """Ends every process of the tree: politely at first."""
    if process is not None:
        process.terminate()
        try:
            process.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            sys.stderr.write("Ray did not end by itself; killing its processes\n")
    end_s = time.monotonic() + _TERMINATE_S
    while time.monotonic() < end_s:
        tree = _descendants(os.getpid())
        for pid in tree:
            _signal(pid, signal.SIGKILL)
        if not tree and not _reap():
            return
        _reap()
        threading.Event().wait(0.05)


def _descendants(root: int) -> list[int]:
    """Returns all processes below one that are not zombies already."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = _parent(entry)
            if parent is not None:
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    level = children.get(root, [])
    while level:
        found += level
        level = [child for pid in level for child in children.get(pid, [])]
    return found


def _parent(entry: Path) -> int | None:
    try:
        # The name in parentheses may hold anything, also spaces.
        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return None if state == "Z" else int(parent)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _reap() -> bool:
    """Collects children that ended; returns whether there are children left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _on_signal(number: int, frame: FrameType | None) -> None:
    _stop.set()


def main(arguments: list[str]) -> None:
    """Runs the supervisor with a `SupervisorOrder` as JSON."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _on_signal)
    signal.signal(signal.SIGINT, _on_signal)
    keep(SupervisorOrder(**json.loads(arguments[0])))


if __name__ == "__main__":
    # Why not run from here: classes of __main__ would be others than those of the module.

    main(sys.argv[1:])
