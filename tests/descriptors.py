"""Which files this process has open."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def open_below(folder: Path) -> list[str]:
    """Returns the open files below a folder, and the folder itself where it is open.

    Why not a count of all descriptors: threads that other tests left may open some meanwhile.
    """
    return [path for path in _open_files() if f"{path}/".startswith(f"{folder}/")]


def _open_files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found
