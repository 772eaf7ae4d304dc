"""One side of an exchange under another torch: `python -m tests.support.programs.exchange JOB...`.

A job is three words, LIBRARY ACTION DIR. LIBRARY is `stock` or `ours`. `save` writes checkpoints of
all cases into DIR, one a dtype and some more; `load` reads those that lie there and compares every
value. Each job prints one line of JSON: what failed or differed, by case. In the jobs of `ours`,
warnings are errors, as in the tests.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as stock

from tests.support.exchange_cases import DTYPES, blanks, differences, layouts, nested, objects


def cases() -> dict[str, dict[str, Any]]:
    """Returns state dicts by name: one for every dtype that this torch stores, and some more."""
    from ray_dcp.core.dtypes import ITEMSIZE

    storable = [name for name in DTYPES if name in ITEMSIZE and not name.startswith("bits")]
    states: dict[str, dict[str, Any]] = {
        f"dtype-{name}": layouts(getattr(torch, name)) for name in storable
    }
    states["objects"] = objects()
    states["nested"] = nested()
    return states


def library(name: str) -> Any:
    """Returns what has `save` and `load`."""
    if name == "stock":
        return stock
    import ray_dcp

    return ray_dcp


def save(library: Any, folder: Path) -> dict[str, str]:
    """Saves every case; returns errors by name of the case."""
    failed = {}
    for name, state in cases().items():
        try:
            library.save(state, checkpoint_id=folder / name, no_dist=True)
        except (Exception, stock.CheckpointException) as error:
            failed[name] = _told(error)
    return failed


def load(library: Any, folder: Path) -> dict[str, str]:
    """Loads every case that lies there; returns errors and differences by name of the case."""
    wrong = {}
    for name, state in cases().items():
        if not (folder / name / ".metadata").exists():
            continue
        into = blanks(state)
        try:
            library.load(into, checkpoint_id=folder / name, no_dist=True)
        except (Exception, stock.CheckpointException) as error:
            wrong[name] = _told(error)
        else:
            if found := differences(into, state):
                wrong[name] = f"differ: {', '.join(found)}"
    return wrong


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[-500:]}"


def do(library_name: str, action: str, folder: str) -> dict[str, str]:
    """Does one job."""
    with warnings.catch_warnings():
        warnings.simplefilter("error" if library_name == "ours" else "ignore")
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental", UserWarning)
        return {"save": save, "load": load}[action](library(library_name), Path(folder))


def main() -> None:
    """Does what the command line says; prints one line of JSON a job, and one about the process."""
    words = sys.argv[1:]
    for job in zip(words[::3], words[1::3], words[2::3], strict=True):
        print(json.dumps(do(*job)))
    print(json.dumps({"torch": torch.__version__, "ray": "ray" in sys.modules}))


if __name__ == "__main__":
    main()
