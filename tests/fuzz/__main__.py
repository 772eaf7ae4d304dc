"""`python -m tests.fuzz --seconds N`: fuzzes every target in turn, each in a process of its own.

Prints the number of cases and what was found; a file that did it is kept. A process that dies
leaves the file that it was reading.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together")
    parser.add_argument("--target", choices=list(TARGETS), action="append")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--keep", default=None, help="folder for files that were found")
    arguments = parser.parse_args()
    names = arguments.target or list(TARGETS)
    folder = Path(arguments.keep or tempfile.mkdtemp(prefix="fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + arguments.seconds
    slice_s = max(1.0, min(60.0, arguments.seconds / len(names)))
    wrong, seed = 0, arguments.seed
    while time.monotonic() < end_s:
        for name in names:
            if time.monotonic() >= end_s:
                break
            wrong += _round(name, slice_s, seed, folder)
        seed += 1
    print(f"{wrong} rounds found something; files in {folder}" if wrong else "nothing was found")
    if not wrong and arguments.keep is None:
        shutil.rmtree(folder)
    return bool(wrong)


def _round(name: str, seconds: float, seed: int, folder: Path) -> bool:
    command = [sys.executable, "-m", "tests.fuzz.run", name, str(seconds), str(seed), str(folder)]
    code = subprocess.run(command, check=False).returncode
    if code not in (0, 1):
        dead = folder / f"{name.replace(' ', '-')}-{seed}-died"
        shutil.copy(folder / "running", dead)
        print(f"  DIED {name} with {code}  ({dead})", flush=True)
    return code != 0


if __name__ == "__main__":
    sys.exit(main())
