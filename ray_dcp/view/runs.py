"""Lists the step folders of a run by their names alone, newest first.

Which of them hold a checkpoint that stands is not looked at: the load that tries one finds out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ray_dcp.format.manifest import slot_of
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import open_storage

__all__ = ["PART_NAME", "Run", "StepFolder", "list_run", "step_of"]

_STEP = re.compile(r"(?:.*[^0-9])?(\d{1,18})", re.DOTALL)
PART_NAME = re.compile(r"rank-\d+-part-\d+\.safetensors")
"""Name of a part file of a safetensors save, in the sub-folder of its attempt."""
_MOST_SHOWN = 8


@dataclass(frozen=True)
class StepFolder:
    """A folder of a run that holds a checkpoint, or what a save left of one."""

    name: str
    """Of the folder, which lies directly in the run."""
    step: int
    """Number at the end of the name."""


@dataclass(frozen=True)
class Run:
    """What lies in a directory of checkpoints."""

    url: str
    """Absolute path or URL."""
    steps: tuple[StepFolder, ...]
    """Newest first; of equal steps, the name that sorts last comes first."""
    others: tuple[str, ...] = ()
    """What else lies directly in it; folders end in `/`."""
    is_checkpoint: bool = False
    """It is itself a checkpoint, or what a save left of one."""

    def checkpoint_id(self, name: str) -> str:
        """Returns the path or URL of a folder of the run."""
        return f"{self.url.rstrip('/')}/{name}"

    def in_words(self) -> str:
        """Returns what is there, for messages."""
        names = [f"{folder.name}/" for folder in self.steps] + list(self.others)
        if not names:
            return "nothing"
        more = f", … ({len(names)} in all)" if len(names) > _MOST_SHOWN else ""
        return ", ".join(names[:_MOST_SHOWN]) + more


def step_of(name: str) -> int | None:
    """Returns the number at the end of a folder's name, None if there is none.

    Args:
        name: Without slashes at its end.

    Example:
        >>> step_of("step-000120"), step_of("epoch=3-step=70"), step_of("final")
        (120, 70, None)
    """
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def list_run(run: AnyPlace) -> Run:
    """Returns the step folders of a run.

    A step folder lies directly in the run, its name ends in a number, and directly in it are
    files of a checkpoint. What a folder nests deeper is its own business.

    Args:
        run: Path or URL.

    Returns:
        Without steps when there are none, or no such directory.

    Raises:
        InvalidRequestError: `run` is no path and no URL that can be listed.
        StorageError: The storage refused to list.

    Complexity:
        One listing of all files at and below the run; nothing is read.
    """
    storage = open_storage(run)
    folders: dict[str, list[str]] = {}
    files = []
    for entry in storage.list():
        name, slash, rest = entry.key.partition("/")
        if slash:
            folders.setdefault(name, []).append(rest)
        else:
            files.append(name)
    steps, others = [], []
    for name, keys in folders.items():
        step = step_of(name)
        if step is not None and _is_checkpoint(keys):
            steps.append(StepFolder(name, step))
        else:
            others.append(f"{name}/")
    steps.sort(key=lambda folder: (folder.step, folder.name), reverse=True)
    return Run(storage.url, tuple(steps), (*sorted(others), *sorted(files)), _is_checkpoint(files))


def _is_checkpoint(keys: Iterable[str]) -> bool:
    return any(
        key == ".metadata"
        or slot_of(key) is not None
        or ("/" not in key and key.endswith((".distcp", ".safetensors")))
        or (key.count("/") == 1 and PART_NAME.fullmatch(key.rpartition("/")[2]) is not None)
        for key in keys
    )
