"""`python -m tests.chaos --all`: plays the chaos matrix on real processes and prints its table.

A cell whose blow was not seen to fall in its phase has failed, as has one that took too long, told
the ranks the wrong thing, or left a checkpoint that is not whole. The exit status is the number of
bad rows, 100 at most; 124 when a cell hung.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import closing, redirect_stdout

from tests.chaos.arena import Arena
from tests.chaos.cells import Cell, Result, chosen
from tests.chaos.matrix import CELLS, CI, NOT_PLAYED
from tests.chaos.scenes import margin_s

WATCHDOG_S = 300.0
"""After this a cell hangs, in seconds: every wait in it is shorter."""

TABLE = sys.stdout
WIDTH = max(len(cell.name) for cell in CELLS)


def main() -> int:
    # So that what was started is ended when this process is told to.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # Why: Ray prints into the standard output of its driver, in the middle of the table.
    with redirect_stdout(sys.stderr):
        return run(_arguments())


def say(line: str) -> None:
    """Prints a line of the table."""
    print(line, file=TABLE, flush=True)


def run(arguments: argparse.Namespace) -> int:
    cells = chosen(CELLS, *arguments.only or "*")
    if arguments.list:
        _list(cells)
        return 0
    rows = _play(cells * arguments.repeat)
    bad = sum(not result.ok for _, result in rows)
    for name, reason in NOT_PLAYED.items():
        say(f"{name:{WIDTH}}  not played: {reason}")
    say(f"{len(rows) - bad} of {len(rows)} passed, with {margin_s():.0f} s for the load")
    return min(bad, 100)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="play the cells")
    what.add_argument("--list", action="store_true", help="only say which there are")
    parser.add_argument(
        "--only", action="append", help="a part of the name, or a pattern with *; again: or these"
    )
    parser.add_argument("--repeat", type=int, default=1, help="play all of them so many times")
    return parser.parse_args()


def _list(cells: Sequence[Cell]) -> None:
    for cell in cells:
        say(f"{cell.name:{WIDTH}}  {cell.ceiling_s:3g} s{'  in CI' if cell.name in CI else ''}")
    for name, reason in NOT_PLAYED.items():
        say(f"{name:{WIDTH}}  not played: {reason}")


def _play(cells: Sequence[Cell]) -> list[tuple[str, Result]]:
    """Plays cells, in a new arena after one that failed."""
    rows: list[tuple[str, Result]] = []
    left = list(cells)
    say(f"{'cell':{WIDTH}}  hit     told   ceiling  result")
    while left:
        with closing(Arena()) as arena:
            while left:
                cell = left.pop(0)
                result = _watched(arena, cell)
                rows.append((cell.name, result))
                _tell(cell.name, result, cell.ceiling_s)
                if not result.ok:
                    break
            result = _nothing_left(arena)
            rows.append(("nothing is left", result))
            _tell("nothing is left", result, 30.0)
    return rows


def _watched(arena: Arena, cell: Cell) -> Result:
    """Plays a cell; when it hangs, ends everything that it started, and this process."""

    def hang() -> None:
        say(f"{cell.name:{WIDTH}}  HANGS after {WATCHDOG_S:g} s")
        faulthandler.dump_traceback(all_threads=True)
        arena.kill()
        os._exit(124)

    watchdog = threading.Timer(WATCHDOG_S, hang)
    watchdog.daemon = True
    watchdog.start()
    try:
        return cell.scene(arena, cell)
    except Exception as error:
        traceback.print_exc()
        return Result(False, None, "nothing", (f"the scene failed: {error!r}",))
    finally:
        watchdog.cancel()


def _nothing_left(arena: Arena) -> Result:
    started_s = time.monotonic()
    left = arena.leaks()
    return Result(True, time.monotonic() - started_s, "", tuple(left))


def _tell(name: str, result: Result, ceiling_s: float) -> None:
    seconds = "     -" if result.seconds is None else f"{result.seconds:6.2f}"
    word = "ok" if result.ok else "FAILED"
    hit = "yes" if result.hit else "NO "
    told = f": {result.outcome}" if result.outcome else ""
    say(f"{name:{WIDTH}}  {hit} {seconds} s  {ceiling_s:5g} s  {word}{told}")
    for problem in result.problems:
        say(f"    {problem}")


if __name__ == "__main__":
    sys.exit(main())
