"""What one rank does to load the newest good checkpoint of a run: a generator of requests.

Rank 0 lists the steps once and the others take its list; whether a step loads is then said by the
load itself, with one outcome for all ranks. So all try the same steps in the same order, and each
decides to fall back by looking at the one error that every rank was told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidRequestError,
    UnsafeCheckpointError,
)
from ray_dcp.protocol.messages import Exchange, Exchanged, OpKey, Reply, Request, Target
from ray_dcp.runtime.telling import attempt, refusal
from ray_dcp.store.storage import KeyMissingError
from ray_dcp.view.runs import Run, StepFolder, list_run

__all__ = ["Newest", "StepRange", "falls_back", "load_newest_rank"]

T = TypeVar("T")

_PASSED_OVER = (DamagedCheckpointError, CheckpointNotFoundError, KeyMissingError)


@dataclass(frozen=True, kw_only=True)
class StepRange:
    """Which steps of a run are asked for.

    Raises:
        InvalidRequestError: A bound is no whole number, or the range is empty.
    """

    at_most: int | None = None
    """Highest step; None for no limit."""
    newer_than: int | None = None
    """Only steps above this one; None for no limit."""

    def __post_init__(self) -> None:
        for name, bound in (("at_most", self.at_most), ("newer_than", self.newer_than)):
            if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
                raise InvalidRequestError(
                    f"{name} must be a step, a whole number, but is {bound!r}", key=name
                )
        if None not in (self.at_most, self.newer_than) and not (
            self.newer_than < self.at_most  # type: ignore[operator]
        ):
            raise InvalidRequestError(
                f"no step is newer than {self.newer_than} and at most {self.at_most}; give bounds "
                f"with steps between them",
                key="newer_than",
            )

    def __contains__(self, step: int) -> bool:
        return (self.at_most is None or step <= self.at_most) and (
            self.newer_than is None or step > self.newer_than
        )

    def __str__(self) -> str:
        bounds = [
            f"{text} {bound}"
            for text, bound in (("newer than", self.newer_than), ("at most", self.at_most))
            if bound is not None
        ]
        return f" {' and '.join(bounds)}" if bounds else ""


@dataclass(frozen=True)
class Newest(Generic[T]):
    """The newest step that loaded."""

    value: T
    """What its load gave."""
    checkpoint_id: str
    step: int
    skipped: tuple[tuple[str, CheckpointError], ...] = field(default=())
    """Newer ones that did not load, newest first, each with why."""


def load_newest_rank(
    key: OpKey,
    *,
    rank: int,
    world_size: int,
    run: Target,
    steps: StepRange,
    timeout_s: float,
    load: Callable[[str], Generator[Request, Reply, T]],
) -> Generator[Request, Reply, Newest[T]]:
    """Returns the part of one rank in a load of the newest step that can be loaded.

    Args:
        key: The operation with which the ranks agree on the steps; `load` names its own.
        rank: This rank.
        world_size: Number of ranks.
        run: The directory of the step folders; the same on all ranks.
        steps: Which of them may be loaded; the same on all ranks.
        timeout_s: Deadline for all ranks to come, in seconds.
        load: From a checkpoint id to this rank's part in the load of it.

    Returns:
        A generator that ends with the same step on every rank.

    Raises:
        CheckpointNotFoundError: No step of the run is committed.
        DamagedCheckpointError: All that are committed are damaged; all are named. The targets
            hold rubbish.
        CheckpointError: Anything that an older step would not help against; with a note on each
            step that was skipped before.
    """
    names = yield from _agreed_names(key, rank, world_size, run, steps, timeout_s)
    skipped: list[tuple[str, CheckpointError]] = []
    for folder in names.steps:
        checkpoint_id = names.checkpoint_id(folder.name)
        try:
            value = yield from _loaded(checkpoint_id, load)
        except CheckpointError as error:
            if falls_back(error):
                skipped.append((checkpoint_id, error))
                continue
            if skipped:
                error.__notes__ = [
                    *getattr(error, "__notes__", ()),
                    f"Newer checkpoints were skipped before: {_told(skipped)}",
                ]
            raise
        return Newest(value, checkpoint_id, folder.step, tuple(skipped))
    raise _nothing_loaded(names.url, steps, skipped)


def _loaded(
    checkpoint_id: str, load: Callable[[str], Generator[Request, Reply, T]]
) -> Generator[Request, Reply, T]:
    """Loads a checkpoint, and once more where that failed: one bad read is no proof of damage."""
    try:
        return (yield from load(checkpoint_id))
    except CheckpointError as error:
        if not falls_back(error):
            raise
    return (yield from load(checkpoint_id))


def falls_back(error: CheckpointError) -> bool:
    """Tells whether an older checkpoint may load where one failed with this error.

    It may when the checkpoint is damaged or not (or no longer) there, on every rank that failed.
    It does not help against a request that does not fit, a storage that fails, a rank that died.
    *Why* an unsafe one is not passed over: nothing is damaged; somebody has to decide whether to
    trust it.

    Args:
        error: What every rank was told.
    """
    causes = [error, *(cause for cause, _ in error.failures.values())]
    return all(
        isinstance(cause, _PASSED_OVER) and not isinstance(cause, UnsafeCheckpointError)
        for cause in causes
    )


def _agreed_names(
    key: OpKey, rank: int, world_size: int, run: Target, steps: StepRange, timeout_s: float
) -> Generator[Request, Reply, Run]:
    """Returns the steps to try, as rank 0 sees them.

    *Why* one rank: the ranks look at different times, and network filesystems show different
    machines different things.
    """
    outbox, error = {}, None
    if rank == 0:
        listed, error = attempt(lambda: _candidates(run, steps), "listing the run", rank)
        if listed is not None:
            names = [[folder.name, folder.step] for folder in listed.steps]
            data = json.dumps([listed.url, names]).encode()
            outbox = dict.fromkeys(range(world_size), data)
    tag = f"newest step{steps} of {run.url}"
    reply = yield Exchange(key, rank, world_size, tag, outbox, timeout_s, error)
    if not isinstance(reply, Exchanged):
        raise refusal(reply, rank)
    url, names = json.loads(reply.inbox[0])
    return Run(url, tuple(StepFolder(name, step) for name, step in names))


def _candidates(run: Target, steps: StepRange) -> Run:
    listed = list_run(run)
    wanted = tuple(folder for folder in listed.steps if folder.step in steps)
    if wanted:
        return Run(listed.url, wanted)
    if listed.is_checkpoint and not listed.steps:
        hint = "; it is itself a checkpoint: load it with ray_dcp.load"
    else:
        hint = "; give the directory in which each checkpoint has a folder that ends in its step"
    raise CheckpointNotFoundError(
        f"expected a checkpoint{steps} in a folder of the run {listed.url}, found "
        f"{listed.in_words()}{hint}",
        checkpoint_id=listed.url,
    )


def _nothing_loaded(
    url: str, steps: StepRange, skipped: Sequence[tuple[str, CheckpointError]]
) -> CheckpointError:
    damaged = [path for path, error in skipped if not isinstance(error, CheckpointNotFoundError)]
    if not damaged:
        return CheckpointNotFoundError(
            f"expected a committed checkpoint{steps} in the run {url}, but none of "
            f"{len(skipped)} folder(s) holds one: {_told(skipped)}",
            checkpoint_id=url,
        )
    return DamagedCheckpointError(
        f"expected a sound checkpoint{steps} in the run {url}, but none of {len(skipped)} "
        f"folder(s) can be loaded: {_told(skipped)}. The state dict may hold parts of what was "
        f"tried: load into it again before you use it. `ray-dcp verify` lists all the damage",
        checkpoint_id=url,
    )


def _told(skipped: Sequence[tuple[str, CheckpointError]]) -> str:
    return "; ".join(f"{path}: {error.message}" for path, error in skipped)
