"""Commands that are killed at a call of the operating system, and then repeated.

Each case is a fork of a process that has imported everything: a few hundredths of a second, where a
process of its own takes seconds. The child runs the command line, counts the calls that change or
open files below its folder, and sends itself a signal at one of them.

Runs as a program; reads cases as JSON lines from its input, and answers each with a line.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import ray_dcp
from tests.crash import interruptions
from tests.crash.interruptions import CALLS

__all__ = ["run_command", "serve"]


FUNCTIONS: dict[str, Callable[..., object]] = {
    "ray_dcp.copy": lambda source, target: ray_dcp.copy(source, target),
    "ray_dcp.export": lambda source, target: ray_dcp.export(source, target),
    "ray_dcp.average": lambda *places: ray_dcp.average(places[:-1], places[-1]),
}
"""What is called in place of a command line that begins with its name."""


class _Killing(interruptions._System):
    """Counts calls, and sends this process a signal before the n-th one.

    The n-th one is decided as it is counted: of several threads none may pass it by.
    """

    def __init__(self, folder: Path, at: int | None, number: int) -> None:
        super().__init__(folder, at, "before")
        self._number = number

    def _interrupt(self, name: str, real: Any, args: Any, kwargs: Any) -> Any:
        os.kill(os.getpid(), self._number)
        return real(*args, **kwargs)


def run_command(arguments: list[str], folder: Path, at: int | None, number: int) -> dict[str, Any]:
    """Runs a command line in a child, which gets a signal at a call.

    Args:
        arguments: The command line.
        folder: Calls below it count.
        at: Number of the call, from 0; None for no signal.
        number: Number of the signal.

    Returns:
        `status`: exit status, negative if it was killed by a signal. `calls`: number of calls
        that were made, if it ended by itself. `output`: what it printed.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        status = 70
        try:
            os.close(read)
            status = _in_child(arguments, folder, at, number, write)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as stream:
        said = stream.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls, _, output = said.partition("\n")
    return {"status": status, "calls": int(calls or 0), "output": output}


def _in_child(arguments: list[str], folder: Path, at: int | None, number: int, to: int) -> int:
    from ray_dcp.cli.main import main

    killing, text, status = _Killing(folder, at, number), io.StringIO(), 0
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(text))
        stack.enter_context(redirect_stderr(text))
        for name in (name for name in CALLS if hasattr(os, name)):
            stack.enter_context(mock.patch.object(os, name, killing.replaced(name)))
        try:
            if arguments[0] in FUNCTIONS:
                FUNCTIONS[arguments[0]](*arguments[1:])
            else:
                main(arguments, prog_name="ray-dcp")
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 0
    os.write(to, f"{len(killing.steps)}\n{text.getvalue()[-4000:]}".encode())
    return status


def serve() -> None:
    """Answers cases until its input ends."""
    import torch

    import ray_dcp.asynchronous
    import ray_dcp.cli.demo
    import ray_dcp.cli.listing
    import ray_dcp.cli.showing
    import ray_dcp.cli.writing
    import ray_dcp.manager
    import ray_dcp.transform.averaging
    import ray_dcp.transform.conversion
    import ray_dcp.worker_group  # noqa: F401 - imported before the forks

    torch.set_num_threads(1)
    assert threading.active_count() == 1, "a forked child would lack the other threads"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        case = json.loads(line)
        number = signal.Signals[case["signal"]]
        found = run_command(case["arguments"], Path(case["folder"]), case["at"], number)
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
