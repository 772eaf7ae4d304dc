"""What an interrupted export has finished, which the repeated command takes over.

The folder is made beside the target, and moved there at the end.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray_dcp.core.checksums import digest_bytes
from ray_dcp.place.scratch import dead_scratch, scratch

_MADE = "made"


def _work_at(path: Path, work: str) -> str:
    """Returns what is made at a path, as 16 hex digits."""
    return digest_bytes(json.dumps([os.fspath(path), work]).encode()).hex()[:16]


def _is_moved(around: Path, path: Path) -> bool:
    """Returns whether what was made in a temporary directory has been moved to a path."""
    made = around / _MADE
    if not os.path.lexists(path):
        return False
    if not made.exists():
        return True
    return path.is_file() and all(one.name.endswith(".index.json") for one in made.iterdir())


@contextmanager
def temporary_directory(path: Path, work: str) -> Iterator[Path]:
    """Yields a new directory next to a path, and deletes it afterwards unless it was moved.

    The directory around it is deleted last, and its name says what is made: see `publishing`.
    """
    parent = next(folder for folder in path.absolute().parents if folder.is_dir())

    def is_kept(around: Path) -> bool:
        # Why: interrupted in between, and the repeated command would find another's file.
        return _is_moved(around, path)

    with scratch(parent, _work_at(path, work), is_kept=is_kept) as around:
        made = around / _MADE
        made.mkdir(mode=0o755)
        yield made


def publishing(path: Path, work: str) -> list[Path]:
    """Returns the temporary directories of dead processes that published the same work at a path.

    Why: such a process was killed before it could end, and its command is repeated.
    """
    parent = next((one for one in path.absolute().parents if one.is_dir()), None)
    if parent is None:
        return []
    return [one for one in dead_scratch(parent, _work_at(path, work)) if _is_moved(one, path)]


def take_over(path: Path, work: str) -> bool:
    """Ends the export of a process that was killed after it had published it; returns whether."""
    found = publishing(path, work)
    for one in found:
        shutil.rmtree(one, ignore_errors=True)
    return bool(found)
