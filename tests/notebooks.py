"""Executes the notebooks, each from a clean kernel: `python -m tests.notebooks [NAME...]`.

What they print or draw is dropped.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def main(names: Sequence[str]) -> int:
    """Executes notebooks and says how long each took; returns how many failed."""
    chosen = paths(names)
    if len(chosen) == 1:
        _run(chosen[0])
        return 0
    since_s = time.monotonic()
    # Why several at a time, each in a process: they wait for a Ray that starts half of the time.
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(_run_apart, chosen))
    print(f"{len(done) - sum(done)} of {len(done)} ran, {time.monotonic() - since_s:.1f} s")
    return sum(done)


def _run(path: Path) -> None:
    since_s = time.monotonic()
    executed(path)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    print(f"{path.name}: {time.monotonic() - since_s:.1f} s, {cpu_s:.1f} s CPU of its kernel")


def _run_apart(path: Path) -> bool:
    command = [sys.executable, "-m", "tests.notebooks", path.stem]
    done = subprocess.run(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    print(done.stdout, end="", flush=True)
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
