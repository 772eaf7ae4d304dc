"""Executes the notebooks, each from a clean kernel: `python -m tests.support.notebooks [NAME...]`.

Their outputs must be those that are stored, but for numbers that a machine measures and rounds its
own way, and for cells with the tag `varies`. `--write` stores those that differ.
"""

from __future__ import annotations

import difflib
import os
import re
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

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "notebooks"
TIMEOUT_S = 600
"""Longest cell, in seconds."""

_UNIT = r"(?: ?(?:[KMGT]?i?B|bytes|[num]?s|m|min|h|d)\b)"
_MEASURED = re.compile(rf"\d+(?:\.\d*(?:e[-+]?\d+)?{_UNIT}?|{_UNIT})")
_NUMBER = re.compile(rf"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?{_UNIT}?")


def paths(names: Sequence[str] = ()) -> list[Path]:
    """Returns the notebooks, or those whose names begin with one of some."""
    found = sorted(FOLDER.glob("*.ipynb"))
    chosen = [p for p in found if not names or any(p.name.startswith(n) for n in names)]
    if not chosen:
        raise SystemExit(f"no notebook of {[p.stem for p in found]} begins with {list(names)}")
    return chosen


def executed(path: Path) -> Any:
    """Returns a notebook with the outputs of all its cells, stripped of what no run has twice.

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
                resources={"metadata": {"path": directory}}, coalesce_streams=True,
            ).execute()  # fmt: skip
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.execution_count = None
                cell.outputs = [_stripped(one, directory) for one in cell.outputs if _stays(one)]
    return notebook


def _stays(output: Any) -> bool:
    return output.get("name") != "stderr"


def _stripped(output: Any, directory: str) -> Any:
    """Returns an output without paths, ids and addresses; of a picture the picture alone."""
    if "data" not in output:
        output.text = _nameless(output.text, directory)
        return output
    kind = "text/html" if "text/html" in output.data else "text/plain"
    output.data = {kind: _nameless(output.data[kind], directory)}
    if output.output_type == "execute_result":
        output.execution_count = None
    return output


def _nameless(text: str, directory: str) -> str:
    text = re.sub(rf"{re.escape(directory)}/\w+-\w{{8}}/?", "", text)
    text = re.sub(r"^\x1b\[\d+m\([^)]*\).*\n", "", text, flags=re.M)  # what Ray itself reports
    text = re.sub(r"\bpid \d+ on [\w.-]+", "pid 1234 on host", text)
    text = re.sub(r"\b(g\d{4})-[0-9a-f]{6}\b", r"\1-000000", text)  # folders of Ray Train runs
    return re.sub(r"\b[0-9a-f]{16}\b|0x[0-9a-f]{6,}", "0" * 16, text)


def _comparable(cell: Any) -> list[str]:
    """Returns the lines of a cell's outputs that are the same on all machines."""
    lines: list[str] = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        if "text/html" in data:
            # Why in order of the alphabet: what is drawn first may depend on the last digit.
            words = re.split(r"<[^>]*>", data["text/html"])
            lines += sorted({_NUMBER.sub("#", word).strip() for word in words})
        else:
            text = data.get("text/plain") or output.get("text", "")
            lines += _MEASURED.sub("#", text).splitlines()
    return lines


def _differences(stored: Any, found: Any) -> list[str]:
    """Returns the lines in which outputs differ from the stored ones."""
    differences: list[str] = []
    for number, (old, new) in enumerate(zip(stored.cells, found.cells, strict=True)):
        if "varies" not in new.metadata.get("tags", ()):
            before, now = _comparable(old), _comparable(new)
            where = f"cell {number}"
            differences += difflib.unified_diff(before, now, where, where, n=0, lineterm="")
    return differences


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main(arguments: Sequence[str]) -> int:
    """Executes notebooks and says how long each took; returns how many failed."""
    write = [one for one in arguments if one == "--write"]
    chosen = paths([one for one in arguments if one not in write])
    if len(chosen) == 1:
        return _run(chosen[0], write=bool(write))
    since_s = time.monotonic()
    # Why several at a time, each in a process: they wait for a Ray that starts half of the time.
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda path: _run_apart(path, write), chosen))
    print(f"{len(done) - sum(done)} of {len(done)} ran, {time.monotonic() - since_s:.1f} s")
    return sum(done)


def _run(path: Path, *, write: bool) -> int:
    since_s = time.monotonic()
    found = executed(path)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    print(f"{path.name}: {time.monotonic() - since_s:.1f} s, {cpu_s:.1f} s CPU of its kernel")
    stored = nbformat.read(path, as_version=4)
    if write:
        found.metadata = stored.metadata
        nbformat.write(found, path)
    elif differences := _differences(stored, found):
        print(
            *differences,
            f"{path.name}: store this by `python -m tests.support.notebooks --write`",
            sep="\n",
        )
        return 1
    return 0


def _run_apart(path: Path, write: Sequence[str]) -> bool:
    command = [sys.executable, "-m", "tests.support.notebooks", path.stem, *write]
    done = subprocess.run(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    print(done.stdout, end="", flush=True)
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
