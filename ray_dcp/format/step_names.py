"""Names of step folders: what a `CheckpointManager` writes, and what else it reads.

What `load_newest` takes for a step (any number at the end of a name) is in `view.runs`.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass, field

from ray_dcp.errors import InvalidRequestError

__all__ = ["STEP_NAME", "StepNames"]

STEP_NAME = "step-{step:08d}"
"""How a manager names the folder of a step, unless it is told otherwise."""

_MAX_STEP = 10**18
_PAD = re.compile(r"0?(\d{0,2})d?")


@dataclass(frozen=True)
class StepNames:
    """How steps are named in a root.

    Args:
        pattern: Of the folders that are written, with one `{step}` or `{step:08d}`.
        also: Further patterns of folders that are read.

    Raises:
        InvalidRequestError: A pattern is none, or two of them can't be told apart.

    Example:
        >>> names = StepNames(also=("{step}", "global_step{step}"))
        >>> names.name_of(500), names.step_of("global_step70"), names.step_of("final")
        ('step-00000500', 70, None)
    """

    pattern: str = STEP_NAME
    """Of the folders that are written."""
    also: tuple[str, ...] = ()
    """Further ones that are read."""
    _readers: tuple[re.Pattern[str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        also: object = self.also
        if not isinstance(also, tuple):
            raise InvalidRequestError(
                f"also_read must be a tuple of names, as ('{{step}}',), but is {also!r}",
                key="also_read",
            )
        readers = tuple(_reader(pattern) for pattern in (self.pattern, *self.also))
        object.__setattr__(self, "_readers", readers)

    def name_of(self, step: int) -> str:
        """Returns the folder name of a step.

        Raises:
            InvalidRequestError: The step is no whole number from 0.
        """
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < _MAX_STEP:
            raise InvalidRequestError(
                f"a step must be a whole number from 0 to {_MAX_STEP - 1}, but is {step!r}",
                key="step",
            )
        return self.pattern.format(step=step)

    def step_of(self, name: str) -> int | None:
        """Returns the step of a folder; None when its name is none of a step."""
        for reader in self._readers:
            found = reader.fullmatch(name)
            if found is not None:
                return int(found[1])
        return None


def _reader(pattern: object) -> re.Pattern[str]:
    """Returns what matches the names that a pattern gives."""
    said = InvalidRequestError(
        f"a name of step folders must be a text without slashes that has {{step}} or "
        f"{{step:08d}} once, as {STEP_NAME!r}, but is {pattern!r}",
        key="step_name",
    )
    if not isinstance(pattern, str) or "/" in pattern or pattern.startswith("."):
        raise said
    try:
        parts = list(string.Formatter().parse(pattern))
    except ValueError as error:
        raise said from error
    fields = [part for part in parts if part[1] is not None]
    if len(fields) != 1 or fields[0][1] != "step" or fields[0][3] is not None:
        raise said
    pad = _PAD.fullmatch(fields[0][2] or "")
    if pad is None:
        raise said
    digits = rf"(\d{{{max(1, int(pad[1] or 1))},18}})"
    before, after = (re.escape("".join(p[0] for p in parts[:1])), "")
    after = re.escape("".join(p[0] for p in parts[1:]))
    if after[:1].isdigit() or before[-1:].isdigit():
        raise said
    return re.compile(before + digits + after, re.DOTALL)
