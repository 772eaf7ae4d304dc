"""Programs of tests as forks of one process that has torch, Ray and ray_dcp already.

An interpreter of its own takes 4 s of CPU before the first line of such a program. Here one process
imports all that once, and becomes each program by a fork: what a program prints, raises and ends
with is the same.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[3]
PRELOADED = (
    "ray", "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "ray_dcp.saving", "ray_dcp.worker_group",
)  # fmt: skip
"""Careful: nothing that draws one of Ray's ids, as in `forked_workers`."""

# Settings of this test run, or of a Ray around it, that a plain script would not have.
NOT_A_SCRIPT = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")


def plain_environment(**more: str) -> dict[str, str]:
    """Returns the environment of a script that knows nothing of tests, nor of Ray."""
    kept = {name: value for name, value in os.environ.items() if name not in NOT_A_SCRIPT}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo", **more}


LIMIT_S = 580.0
"""How long a program may take, in seconds."""


class Program:
    """A program that runs.

    Attributes:
        pid: Of its process.
        stdin: What it reads.
        stdout: What it prints.
    """

    def __init__(self, status: socket.socket, stdin: Any, stdout: Any) -> None:
        self.stdin, self.stdout = stdin, stdout
        self._socket, self._status = status, status.makefile()
        self.pid = int(self._status.readline())
        self._ended: int | None = None

    def wait(self) -> int:
        """Returns its exit status, negative for a signal.

        Raises:
            TimeoutError: It runs on.
        """
        if self._ended is None:
            self._socket.settimeout(LIMIT_S)
            self._ended = int(self._status.readline())
        return self._ended

    def kill(self) -> None:
        """Ends it, if it still runs, and closes its files when it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
        for file in (self.stdin, self.stdout, self._status, self._socket):
            file.close()


class Programs:
    """Starts programs, each given as the command line of an interpreter.

    That is `-m MODULE`, `-c CODE` or a path, and what follows.

    Args:
        **env: Variables of the process that is forked, besides those of this one: settings of Ray,
            which reads them when it is imported.
    """

    def __init__(self, **env: str) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # an abstract name that the kernel chooses
            listener.listen()
            self._name = listener.getsockname()
            passed = [theirs.fileno(), listener.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.programs.forks", *map(str, passed)],
                pass_fds=passed, stdin=subprocess.DEVNULL, cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            )  # fmt: skip

    def interpreter(self, path: Path) -> str:
        """Writes an executable file that runs what an interpreter would run, and returns its path.

        For code that starts `sys.executable`. A signal that is sent to it ends it alone.
        """
        path.write_text(f"#!{sys.executable} -IS\n{_INTERPRETER.format(name=self._name)}")
        path.chmod(0o755)
        return str(path)

    def start(self, *line: str, env: Mapping[str, str] | None = None) -> Program:
        """Starts a program whose standard input and output are pipes.

        Args:
            *line: Its command line.
            env: Its whole environment; by default that of this process.
        """
        (read, stdin), (stdout, write) = os.pipe(), os.pipe()
        with open(read), open(write, "w"):
            return self._started(line, env, (read, write, 2), open(stdin, "w"), open(stdout))

    def run(
        self,
        *line: str,
        ranks: int = 0,
        env: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs a program to its end; with ranks, as many of it at once, as torchrun does.

        Args:
            *line: Its command line.
            ranks: How many.
            env: Its whole environment; by default that of this process.
            imports: Modules that are imported once, for these and all later programs.
        """
        env = dict(os.environ if env is None else env)
        if ranks:
            with socket.create_server(("127.0.0.1", 0)) as free:
                env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
        places = [{"RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)] or [{}]
        ended = []
        with ExitStack() as stack:
            nothing = stack.enter_context(open(os.devnull))
            running = []
            for place in places:
                out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
                streams = (nothing.fileno(), out.fileno(), err.fileno())
                program = self._started(line, {**env, **place}, streams, nothing, nothing, imports)
                stack.callback(program.kill)
                running.append((program, out, err))
            for program, out, err in running:
                status = program.wait()
                out.seek(0)
                err.seek(0)
                said = out.read(), err.read()
                ended.append(subprocess.CompletedProcess(line, status, *said))
        return ended

    def _started(
        self,
        line: tuple[str, ...],
        env: Mapping[str, str] | None,
        streams: tuple[int, int, int],
        stdin: Any,
        stdout: Any,
        imports: Sequence[str] = (),
    ) -> Program:
        ours, theirs = socket.socketpair()
        order = {
            "line": line, "env": dict(os.environ if env is None else env), "imports": [*imports],
        }  # fmt: skip
        with theirs:
            socket.send_fds(self._orders, [json.dumps(order).encode()], [*streams, theirs.fileno()])
        return Program(ours, stdin, stdout)

    def close(self) -> None:
        """Ends the process that is forked; what it has started runs on."""
        self._orders.close()
        self._process.wait(60)


_INTERPRETER = """
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ours:
    ours.connect({name!r})
    order = {{"line": sys.argv[1:], "env": dict(os.environ)}}
    socket.send_fds(ours, [json.dumps(order).encode()], [0, 1, 2])
    ours.recv(99)  # its pid
    ended = int(ours.recv(99))
if ended < 0:
    os.kill(os.getpid(), -ended)
sys.exit(ended)
"""


def serve(orders: socket.socket, listener: socket.socket) -> list[str] | None:
    """Forks the programs that are asked for; returns the command line in one, None at the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([orders, listener], [], [])
        asked = ready[0] if ready[0] is orders else listener.accept()[0]
        text, descriptors, _, _ = socket.recv_fds(asked, 1 << 20, 4)
        if asked is not orders:
            descriptors.append(asked.detach())
        elif not text:
            return None
        order = json.loads(text)
        import_all(order.pop("imports", ()))
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders.close()
            listener.close()
            return become(order, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def import_all(names: Iterable[str]) -> None:
    """Imports modules that programs need."""
    new = [name for name in names if name not in sys.modules]
    for name in new:
        importlib.import_module(name)
    if new:
        # Else each fork looks through all that when it collects garbage, and copies its pages.
        gc.freeze()


def become(order: dict[str, Any], descriptors: list[int]) -> list[str]:
    """Returns the command line in the process of a program; its parent tells how that ended."""
    *streams, number = descriptors
    pid = os.fork()
    if pid:
        for stream in streams:
            os.close(stream)
        with socket.socket(fileno=number) as status:
            status.sendall(b"%d\n" % pid)
            ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            # Suppressed: nobody wants to know.
            with suppress(OSError):
                status.sendall(b"%d\n" % ended)
        os._exit(0)
    for own, stream in enumerate(streams):
        os.dup2(stream, own)
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["env"])
    line: list[str] = order["line"]
    return line


def run_line(line: list[str]) -> None:
    """Does what an interpreter with this command line does."""
    import numpy
    import torch

    # What these would have drawn in a process of their own.
    numpy.random.seed()
    torch.seed()
    kind, *arguments = line
    if kind not in ("-m", "-c"):
        sys.argv, sys.path[0] = line, os.path.dirname(kind)
        runpy.run_path(kind, run_name="__main__")
        return
    what, *more = arguments
    sys.argv = [kind, *more]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    import_all(PRELOADED)
    orders, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    with orders, listener:
        line = serve(orders, listener)
    if line is not None:
        run_line(line)
