"""`python -m tests.gpu`: what can be checked with one GPU, as one table.

Without a GPU the cases that mean something are run with a played driver, and reported as played.
Needs a checkout, any CUDA build of torch, and what ray_dcp needs but for ray, without which the
cases that need it say so. No setting of the device or of its driver is touched.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from ray_dcp.stage import staging_backend
from tests.gpu.cases import CASES, NotHere
from tests.gpu.machine import Machine, PlayedGpu, machine
from tests.gpu.rates import RATES, Rate

Row = tuple[str, str, str, str, str]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=8.0, help="length of the large state")
    parser.add_argument("--minutes", type=float, default=15.0, help="no case begins after this")
    parser.add_argument("--dir", default=None, help="where to write (default: the temp folder)")
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    on = machine(given.gigabytes)
    end_s = time.monotonic() + 60 * given.minutes
    rows: list[Row] = []
    for name, case in {**CASES, **RATES}.items():
        if given.only not in name:
            continue
        if time.monotonic() > end_s:
            rows.append((name, "-", "-", "not run", "no time was left"))
            continue
        rows += run(name, case, on, given.dir)
        print(f"{rows[-1][0]}: {rows[-1][3]}", file=sys.stderr)
    what = "played" if on.is_played else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, {what}\n")
    show(rows)
    return int(any(row[3] == "FAILED" for row in rows))


def run(
    name: str,
    case: Callable[[Machine, Path], str | list[Rate]],
    on: Machine,
    directory: str | None = None,
) -> list[Row]:
    """Returns the rows of a case: name, where, seconds, verdict, what was seen."""
    where = "played" if on.is_played else "GPU"
    room = Path(tempfile.mkdtemp(prefix="gpu-", dir=directory))
    # Why a new one: a played device knows its tensors by their places.
    here = PlayedGpu() if on.is_played else on
    began_s = time.perf_counter()
    try:
        with here:
            found = case(here, room)
    except NotHere as reason:
        return [(name, where, "-", "not run", str(reason))]
    except Exception as error:
        text = " ".join(str(error).split())
        took = f"{time.perf_counter() - began_s:.1f} s"
        return [(name, where, took, "FAILED", f"{type(error).__name__}: {text}"[:300])]
    finally:
        staging_backend._memory.clear()
        gc.collect()
        shutil.rmtree(room, ignore_errors=True)
    took = f"{time.perf_counter() - began_s:.1f} s"
    if isinstance(found, str):
        return [(name, where, took, "held", found)]
    words = {True: "met", False: "NOT MET", None: ""}
    return [(r.what, where, took, words[r.is_met], f"{r.seen} {r.limit}".strip()) for r in found]


def show(rows: list[Row]) -> None:
    titles = ("case", "on", "took", "verdict", "seen, and the limit")
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(4)]
    for row in [titles, tuple("-" * 4 for _ in titles), *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[4]]))


if __name__ == "__main__":
    sys.exit(main())
