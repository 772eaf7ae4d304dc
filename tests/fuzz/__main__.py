"""`python -m tests.fuzz --seconds N`: fuzzes every target in turn, and keeps files that it found.

The file that is being read is `running` in the folder, also after a process that died of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.run import limit_memory, run
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together")
    parser.add_argument("--target", choices=list(TARGETS), action="append")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    given = parser.parse_args()
    names, folder = given.target or list(TARGETS), Path(tempfile.mkdtemp(prefix="fuzz-"))
    end_s, seed, wrong = time.monotonic() + given.seconds, given.seed, 0
    limit_memory()
    while time.monotonic() < end_s:
        for name in names:
            found = run(name, given.seconds / len(names), seed, log=str(folder / "running"))
            print(f"{name:20} {found.cases:8} cases, {len(found.wrong)} wrong", flush=True)
            for line, data in found.wrong.items():
                file = folder / f"{name.replace(' ', '-')}-{seed}-{wrong}"
                file.write_bytes(data)
                print(f"  WRONG {line}  ({file})", flush=True)
                wrong += 1
        seed += 1
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
