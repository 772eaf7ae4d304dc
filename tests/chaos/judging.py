"""Says what came of a played cell from what was seen of it. Pure: no Ray, no clock, no disk.

Whoever lives is told in time, all the same, with the name of the victim and the path. What stands
is what they were told, and whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ray_dcp.errors import CheckpointError, CommitUnknownError
from tests.chaos.cells import Cell, Result, is_in_phase
from tests.chaos.traps import Mark


@dataclass(frozen=True)
class Told:
    """What a rank was told, and when on this machine's monotonic clock."""

    at_s: float
    error: Exception | None


@dataclass(frozen=True)
class Seen:
    """What was seen of one played cell."""

    mark: Mark | None
    """Of the blow; None when it did not fall."""
    told: Mapping[int, Told]
    """What ranks were told; also one that was hit, if it came back."""
    before: frozenset[str]
    """Names at the place when the operation began."""
    trouble: tuple[str, ...] = ()
    """What went wrong in the scene itself."""
    step: int | None = None
    """Which step loads whole on all ranks afterwards."""
    later: int | None = None
    """Which does after a save of step 3."""


@dataclass(frozen=True)
class Expected:
    """What must come of it."""

    num_ranks: int
    path: str
    """What every error must name."""
    named: Collection[str] = ()
    """Of these every error must name at least one; empty: no matter."""
    lost: Collection[int] = ()
    """Ranks that need not be told."""
    steps: Collection[int] = field(default_factory=frozenset)
    """Which step may stand; empty: what the ranks were told decides."""


def judge(cell: Cell, seen: Seen, expected: Expected, margin_s: float) -> Result:
    """Returns what came of a cell, with all that is wrong with it.

    Args:
        cell: What was played.
        seen: What came of it.
        expected: What must come of it.
        margin_s: What is added to the ceiling before it counts as missed, in seconds.
    """
    errors = {rank: told.error for rank, told in seen.told.items()}
    hit, problems = _hit(cell, seen)
    living = {rank: told for rank, told in seen.told.items() if rank not in expected.lost}
    seconds = None
    if seen.mark is not None and living:
        seconds = max(told.at_s for told in living.values()) - seen.mark.at_s
        if seconds > cell.ceiling_s + margin_s:
            problems.append(
                f"told after {seconds:.1f} s, allowed are {cell.ceiling_s:g} s and "
                f"{margin_s:.0f} s for the load of this machine"
            )
    silent = set(range(expected.num_ranks)) - set(expected.lost) - living.keys()
    if silent:
        problems.append(f"ranks {sorted(silent)} were never told")
    compared = {rank: told.error for rank, told in living.items()}
    # A save has one outcome, also for who comes back; a load has none that outlives its ranks.
    problems += _wrong_words(compared if cell.phase == "loading" else errors, expected)
    problems += _wrong_steps(cell, seen, expected, errors)
    return Result(hit, seconds, _in_a_word(errors), (*seen.trouble, *problems))


def _hit(cell: Cell, seen: Seen) -> tuple[bool, list[str]]:
    mark = seen.mark
    if mark is None:
        return False, ["the blow did not fall"]
    if is_in_phase(cell.phase, set(seen.before), set(mark.names)) and not mark.told:
        return True, []
    new = sorted(mark.names - seen.before)
    return False, [f"it fell in another phase: {mark.told} ranks were told, new files {new}"]


def _wrong_words(errors: Mapping[int, Exception | None], expected: Expected) -> list[str]:
    """Returns what is wrong with what the ranks were told."""
    wrong = []
    told = {rank: error for rank, error in errors.items() if error is not None}
    if not any(isinstance(error, CommitUnknownError) for error in told.values()):
        if told and len(told) < len(errors):
            well = sorted(errors.keys() - told.keys())
            error = next(iter(told.values()))
            wrong.append(f"ranks {sorted(told)} failed and {well} did not: {error}")
        # Who was hit and came back finds out by itself, from what stands.
        living = {rank: error for rank, error in told.items() if rank not in expected.lost}
        if len({type(error) for error in living.values()}) > 1:
            wrong.append(f"the ranks were told different errors: {told}")
    for rank, error in told.items():
        if not isinstance(error, CheckpointError):
            wrong.append(f"rank {rank} was told {error!r}, which is none of ours")
        elif expected.path not in str(error):
            wrong.append(f"rank {rank} was told no path: {error}")
        elif (
            expected.named
            and rank not in expected.lost
            and not any(name in str(error) for name in expected.named)
        ):
            wrong.append(f"rank {rank} was told none of {sorted(expected.named)}: {error}")
    return wrong


def _wrong_steps(
    cell: Cell, seen: Seen, expected: Expected, errors: Mapping[int, Exception | None]
) -> list[str]:
    """Returns what is wrong with what stands."""
    allowed = set(expected.steps) or _may_stand(cell, list(errors.values()))
    wrong = []
    if seen.step not in allowed:
        word = _in_a_word(errors)
        wrong.append(f"step {seen.step} stands, but after {word} it may be {sorted(allowed)}")
    if seen.later != 3:
        wrong.append(f"step 3 was saved, but step {seen.later} stands")
    return wrong


def _may_stand(cell: Cell, told: Collection[Exception | None]) -> set[int]:
    if cell.phase == "loading":
        return {1}
    if not told or any(isinstance(error, CommitUnknownError) for error in told):
        return {1, 2}
    return {2} if None in told else {1}


def _in_a_word(errors: Mapping[int, Exception | None]) -> str:
    words = {"done" if error is None else type(error).__name__ for error in errors.values()}
    return " / ".join(sorted(words)) or "nothing"
