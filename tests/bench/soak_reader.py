"""The reader of a soak: a process that is no rank and reads while others save."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Reading:
    """What was asked and what came."""

    how: str
    place: str
    seen: Any
    note: Any
    """What the asker wanted to remember."""


class Reader:
    """Asks a process of its own for one reading at a time.

    Args:
        log: File for what it says beside its answers.
        patience_s: How long a reading may take, in seconds.
    """

    def __init__(self, log: Path, patience_s: float = 60.0) -> None:
        self._patience_s = patience_s
        self._asked: tuple[str, str, Any] | None = None
        self._since_s = 0.0
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.soak_programs"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=REPOSITORY,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def idle(self) -> bool:
        """Nothing is asked for."""
        return self._asked is None

    def ask(self, how: str, place: str, note: Any = None) -> None:
        """Asks for a reading; there must be none under way."""
        self._asked, self._since_s = (how, place, note), time.monotonic()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"how": how, "path": place}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, wait: bool = False) -> Reading | None:
        """Returns the reading that was asked for, None while there is none.

        Args:
            wait: Wait for it.

        Raises:
            TimeoutError: It took too long, or the process is gone.
        """
        if self._asked is None:
            return None
        output = self._process.stdout
        assert output is not None
        left_s = max(0.0, self._since_s + self._patience_s - time.monotonic())
        ready, _, _ = select.select([output], [], [], left_s if wait else 0)
        if not ready:
            if left_s == 0:
                raise TimeoutError(f"no answer to {self._asked} within {self._patience_s:g} s")
            return None
        line = output.readline()
        if not line:
            raise TimeoutError(f"the reader ended while it was asked {self._asked}")
        (how, place, note), self._asked = self._asked, None
        return Reading(how, place, json.loads(line)["seen"], note)

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
