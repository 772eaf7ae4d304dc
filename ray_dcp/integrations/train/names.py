"""Names of the folders in which the checkpoints of a Ray Train run lie.

One is never used twice: Ray Train deletes by name, and a worker group that was killed may still
have a save under way. The number of the worker group comes first, so that of two checkpoints of
one step the later sorts last; the step comes last, where all of ray_dcp looks for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ray_dcp.errors import InvalidRequestError

__all__ = ["StepFolder", "check_folder", "check_step", "next_group", "parse"]

_NAME = re.compile(r"g(\d{4,9})-([0-9a-f]{6})-step-(\d{8,18})")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_STEP = 10**18


@dataclass(frozen=True, order=True)
class StepFolder:
    """The folder of one step, as one worker group saved it; sorted by age.

    Example:
        >>> folder = StepFolder(120, 3, "7f3c21")
        >>> folder.name, parse(folder.name) == folder
        ('g0003-7f3c21-step-00000120', True)
    """

    step: int
    group: int
    """Number of the worker group in the run, from 1."""
    word: str
    """Tells two groups of one number."""

    @property
    def name(self) -> str:
        """Of the folder."""
        return f"g{self.group:04d}-{self.word}-step-{self.step:08d}"


def parse(name: str) -> StepFolder | None:
    """Returns the step folder of a name; None for any other name.

    Args:
        name: Of a folder; only what follows the last slash counts.
    """
    found = _NAME.fullmatch(name.rstrip("/").rpartition("/")[2])
    return StepFolder(int(found[3]), int(found[1]), found[2]) if found else None


def next_group(names: Iterable[str]) -> int:
    """Returns the number of a new worker group, above all that have left folders.

    Example:
        >>> next_group(["g0002-7f3c21-step-00000120", "others"]), next_group([])
        (3, 1)
    """
    found = (parse(name) for name in names)
    return max((folder.group for folder in found if folder is not None), default=0) + 1


def check_folder(folder: object) -> str:
    """Returns a folder of the run after checking that it stays inside of it.

    Raises:
        InvalidRequestError: It is no name.

    Example:
        >>> check_folder("checkpoints")
        'checkpoints'
    """
    if not isinstance(folder, str) or _PART.fullmatch(folder) is None:
        raise InvalidRequestError(
            f"folder must be the name of a folder in the run's own storage (1 to 64 letters, "
            f"digits, '.', '_' or '-'), but is {folder!r}. Ray Train registers checkpoints inside "
            f"RunConfig(storage_path, name) only: choose the place there; for any other one use "
            f"ray_dcp.CheckpointManager",
            key="folder",
        )
    return folder


def check_step(step: object) -> int:
    """Returns a step after checking that it is one.

    Raises:
        InvalidRequestError: It is no whole number from 0.
    """
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < MAX_STEP:
        raise InvalidRequestError(
            f"a step must be a whole number from 0 to {MAX_STEP - 1}, but is {step!r}", key="step"
        )
    return step
