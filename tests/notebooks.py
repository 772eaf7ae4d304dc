"""Executes the notebooks, each from a clean kernel: `python -m tests.notebooks [NAME...]`.

What they print or draw is dropped; `tests.notebook_shots` keeps it and looks at it.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "notebooks"
TIMEOUT_S = 600
"""Longest cell, in seconds."""


def paths(names: Sequence[str] = ()) -> list[Path]:
    """Returns the notebooks, or those whose names begin with one of some."""
    found = sorted(FOLDER.glob("*.ipynb"))
    chosen = [p for p in found if not names or any(p.name.startswith(n) for n in names)]
    if not chosen:
        raise SystemExit(f"no notebook of {[p.stem for p in found]} begins with {list(names)}")
    return chosen


def executed(path: Path) -> Any:
    """Returns a notebook with the outputs of all its cells.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed; the message has its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="nb.") as directory:
        # Why TMPDIR: what a notebook saves goes with it, and Ray's sockets need a short path.
        here = {"TMPDIR": directory, "PYTHONPATH": str(REPOSITORY), "RAY_AUTH_MODE": "disabled"}
        with _environment(here):
            NotebookClient(
                notebook, timeout=TIMEOUT_S, kernel_name="python3",
                resources={"metadata": {"path": directory}},
            ).execute()  # fmt: skip
    return notebook


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main(names: Sequence[str]) -> None:
    """Executes notebooks and says how long each took."""
    began_s, cpu_s = time.monotonic(), 0.0
    for path in paths(names):
        since_s = time.monotonic()
        executed(path)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s, before_s = used.ru_utime + used.ru_stime, cpu_s
        told = f"{time.monotonic() - since_s:.1f} s, {cpu_s - before_s:.1f} s CPU of its kernel"
        print(f"{path.name}: {told}", flush=True)
    print(f"all notebooks ran in {time.monotonic() - began_s:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
