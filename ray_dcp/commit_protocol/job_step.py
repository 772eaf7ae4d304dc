"""`JobStepMachine`: one step of a job, whose parts are saved by different groups of processes.

A step is *opened* with the names of its parts. Each part is a checkpoint of its own, saved by its
ranks, or by a writer for a value. The step is *staged* when every part is: from then on the death
of who gave the parts stops nothing. When all parts are durable and the driver has left the step (or
has died since it was staged), one record commits it. Anything that fails before gives the step up.

```
opened --all parts staged--> staged --all durable, left, versions equal--> committing --> committed
   |                            |                                              |--> unknown
   +---- failed, lost, late ----+----------------- not committed --------------+--> given up
```

The machine reads no clock and does no I/O: events go in, commands come out. An event that is
refused raises and changes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from ray_dcp.errors import (
    CheckpointError,
    CommitUnknownError,
    DeadlineError,
    InvalidRequestError,
    ParticipantError,
    RankDisagreementError,
)

Process = TypeVar("Process")
"""Identity of a process, as the shell knows it."""

Phase = Literal["opened", "staged", "committing", "committed", "given up", "unknown"]
ENDED: frozenset[Phase] = frozenset(("committed", "given up", "unknown"))


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begun(Generic[Process]):
    """A rank begins to save a part."""

    part: str
    rank: int
    process: Process
    version: int | None = None
    call: str = ""
    """Distinguishes two saves by one process; a message that comes twice has the same."""


@dataclass(frozen=True)
class Staged:
    """A rank's bytes of a part are copied, or already durable."""

    part: str
    rank: int
    world_size: int
    attempt: str
    """Attempt of the part's own commit."""
    outlives: bool
    """Whether the part's commit goes on if the rank dies now."""
    is_durable: bool = False
    """Whether the rank knows that the part is committed, so that its record is there."""


@dataclass(frozen=True)
class Durable:
    """The part's own record was found on storage."""

    part: str
    attempt: str


@dataclass(frozen=True)
class Failed:
    """A part can't be saved."""

    part: str
    error: CheckpointError


@dataclass(frozen=True)
class Gone(Generic[Process]):
    """Processes ended: ranks of parts, or the driver."""

    processes: frozenset[Process]


@dataclass(frozen=True)
class Left:
    """The driver left the step without an error."""


@dataclass(frozen=True)
class Abandoned:
    """The driver left the step with an error, or cancelled it."""

    error: CheckpointError


@dataclass(frozen=True)
class Overdue:
    """A deadline passed; it counts if the step is still in this phase."""

    phase: Phase
    timeout_s: float
    only_unbegun: bool = False
    """Whether it is that of parts that nobody began."""


@dataclass(frozen=True)
class CommitEnded:
    """The attempt to create the record ended; with None it exists."""

    error: CheckpointError | None


Event = (
    Begun[Process] | Staged | Durable | Failed | Gone[Process]
    | Left | Abandoned | Overdue | CommitEnded
)  # fmt: skip


# --- commands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Follow:
    """Find out on storage how the part's own save ends."""

    part: str
    attempt: str


@dataclass(frozen=True)
class Commit:
    """Create the record of the step."""


@dataclass(frozen=True)
class Discard:
    """Delete the parts: the step is never committed."""

    error: CheckpointError


Command = Follow | Commit | Discard


@dataclass
class PartState(Generic[Process]):
    """What is known of one part."""

    begun: dict[int, Process] = field(default_factory=dict)
    """The process of each rank that began to save it."""
    calls: dict[int, str] = field(default_factory=dict)
    """The save of each of them."""
    world_size: int = 0
    """Number of ranks; 0 until one is staged."""
    staged: dict[int, bool] = field(default_factory=dict)
    """Ranks that are staged, with whether the save outlives them."""
    attempt: str = ""
    version: int | None = None
    is_durable: bool = False

    @property
    def is_staged(self) -> bool:
        """Whether the bytes of all ranks are copied."""
        return self.is_durable or (self.world_size > 0 and len(self.staged) == self.world_size)

    def needs(self, processes: frozenset[Process]) -> list[int]:
        """Returns the ranks among some processes without which the part can't be committed."""
        if self.is_durable:
            return []
        return sorted(
            rank
            for rank, process in self.begun.items()
            if process in processes and not self.staged.get(rank, False)
        )


class JobStepMachine(Generic[Process]):
    """Decides about one step of a job.

    Args:
        step: Number of the step.
        parts: Names of its parts.
        driver: The process that opened it.

    Attributes:
        phase: What the step is now. "unknown" means that the record may exist.
        parts: What is known of each part.
        error: Why the step is not committed, or why that is unknown.

    Examples:
        >>> machine = JobStepMachine(7, ["policy"], driver="driver")
        >>> machine.receive(Begun("policy", 0, "trainer"))
        ()
        >>> machine.receive(Staged("policy", 0, 1, "a1", outlives=True))
        (Follow(part='policy', attempt='a1'),)
        >>> machine.receive(Durable("policy", "a1")), machine.phase
        ((), 'staged')
        >>> machine.receive(Left()), machine.phase
        ((Commit(),), 'committing')
    """

    def __init__(self, step: int, parts: Sequence[str], driver: Process) -> None:
        self.step = step
        self.phase: Phase = "opened"
        self.parts: dict[str, PartState[Process]] = {name: PartState() for name in parts}
        self.error: CheckpointError | None = None
        self._driver = driver
        self._is_left = False

    def receive(self, event: Event[Process]) -> tuple[Command, ...]:
        """Returns the commands that follow from an event.

        Raises:
            InvalidRequestError: The event contradicts the step; it changed nothing.
            CheckpointError: Why the step was given up, to a rank that goes on with it.
        """
        match event:
            case Begun():
                return self._begin(event)
            case Staged():
                return self._stage(event)
            case Durable():
                return self._make_durable(event)
            case Failed(part, error):
                return self._give_up(_in_part(self.step, part, error))
            case Gone(processes):
                return self._lose(processes)
            case Left():
                self._is_left = True
                return self._advance()
            case Abandoned(error):
                return self._give_up(error)
            case Overdue():
                return self._expire(event)
            case CommitEnded(error):
                return self._end(error)

    @property
    def is_left(self) -> bool:
        """Whether the driver has left the step, or it has ended."""
        return self._is_left or self.phase in ENDED

    def check_open(self, part: str) -> PartState[Process]:
        """Returns a part after checking that it may still be saved.

        Raises:
            InvalidRequestError: The step has no such part, or is not open any more.
        """
        if self.phase != "opened" and self.error is None:
            raise self._refuse(part, f"the step is {self.phase}")
        if self.error is not None:
            raise self._refuse(part, f"the step was {self.phase}: {self.error.message}")
        if part not in self.parts:
            raise InvalidRequestError(
                f"step {self.step} has the parts {', '.join(self.parts)}, but was given a part "
                f"{part!r}; name it in JobCheckpoints(parts=...)",
                step=self.step,
                key=part,
            )
        return self.parts[part]

    def missing(self, is_there: Callable[[PartState[Process]], bool]) -> list[str]:
        """Returns the parts that are not yet as far as `is_there` asks."""
        return [name for name, one in self.parts.items() if not is_there(one)]

    def _refuse(self, part: str, why: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the part {part!r} of step {self.step} can't be saved: {why}. Open a step with "
            f"JobCheckpoints.step and save its parts",
            step=self.step,
            key=part,
        )

    def _begin(self, event: Begun[Process]) -> tuple[Command, ...]:
        known = self.parts.get(event.part)
        told, rank = (event.process, event.call), event.rank
        is_known = known and (known.begun.get(rank), known.calls.get(rank)) == told
        if is_known and self.error is None:
            return ()  # The message came twice.
        part = self.check_open(event.part)
        if event.rank in part.begun or part.is_staged:
            raise self._refuse(
                event.part, f"rank {event.rank} of {part.begun.get(event.rank)} saves it already"
            )
        if part.begun and part.version != event.version:
            raise RankDisagreementError(
                f"expected all ranks to give the part {event.part!r} of step {self.step} one "
                f"version, but found {part.version} and {event.version}",
                step=self.step,
                rank=event.rank,
                key=event.part,
            )
        part.begun[event.rank], part.calls[event.rank] = event.process, event.call
        part.version = event.version
        return ()

    def _stage(self, event: Staged) -> tuple[Command, ...]:
        if self.phase in ENDED and self.phase != "committed":
            self.check_open(event.part)
        part = self.parts.get(event.part)
        if part is None or event.rank not in part.begun:
            raise self._refuse(event.part, f"rank {event.rank} did not begin to save it")
        if part.attempt and part.attempt != event.attempt:
            raise self._refuse(event.part, "it was saved already, by other ranks")
        is_first = not part.attempt
        part.attempt, part.world_size = event.attempt, event.world_size
        part.staged[event.rank] = event.outlives or part.staged.get(event.rank, False)
        follow = (Follow(event.part, event.attempt),) if is_first else ()
        return (*follow, *self._advance())

    def _make_durable(self, event: Durable) -> tuple[Command, ...]:
        part = self.parts[event.part]
        if self.phase in ENDED or part.attempt != event.attempt:
            return ()
        part.is_durable = True
        return self._advance()

    def _lose(self, processes: frozenset[Process]) -> tuple[Command, ...]:
        if self.phase not in ("opened", "staged"):
            return ()
        lost = {name: ranks for name, one in self.parts.items() if (ranks := one.needs(processes))}
        for name, ranks in lost.items():
            who = self.parts[name].begun[ranks[0]]
            return self._give_up(
                ParticipantError(
                    f"expected the part {name!r} of step {self.step} to be staged, but its rank "
                    f"{ranks[0]} ({who}) died before. The step is not committed, and the one "
                    f"before stands; restart the rank",
                    step=self.step,
                    rank=ranks[0],
                    key=name,
                )
            )
        if self._driver not in processes:
            return ()
        if self.phase == "opened":
            return self._give_up(
                ParticipantError(
                    f"the driver ({self._driver}) that opened step {self.step} died before these "
                    f"parts were staged: {', '.join(self.missing(_is_staged))}. The step is not "
                    f"committed, and the one before stands",
                    step=self.step,
                )
            )
        self._is_left = True
        return self._advance()

    def _expire(self, event: Overdue) -> tuple[Command, ...]:
        if event.phase != self.phase or self.phase not in ("opened", "staged"):
            return ()
        if event.only_unbegun:
            late, what = self.missing(lambda one: bool(one.begun) or one.is_durable), "be saved"
        elif self.phase == "opened":
            late, what = self.missing(_is_staged), "be staged"
        else:
            late, what = self.missing(lambda one: one.is_durable), "be durable"
        if not late:
            return ()
        return self._give_up(
            DeadlineError(
                f"expected all parts of step {self.step} to {what} within {event.timeout_s:g} s, "
                f"but these were not: {', '.join(late)}. The step is not committed, and the one "
                f"before stands; look whether every group of ranks saves its part",
                step=self.step,
                key=late[0],
            )
        )

    def _advance(self) -> tuple[Command, ...]:
        # Why not `missing`: with each event of many parts, the first that is missing is enough.
        if self.phase == "opened" and all(map(_is_staged, self.parts.values())):
            self.phase = "staged"
        all_durable = all(one.is_durable for one in self.parts.values())
        if self.phase != "staged" or not all_durable or not self._is_left:
            return ()
        versions = {name: one.version for name, one in self.parts.items()}
        error = differing_versions(self.step, versions)
        if error is not None:
            return self._give_up(error)
        self.phase = "committing"
        return (Commit(),)

    def _give_up(self, error: CheckpointError) -> tuple[Command, ...]:
        if self.phase not in ("opened", "staged"):
            return ()
        self.phase, self.error = "given up", error
        return (Discard(error),)

    def _end(self, error: CheckpointError | None) -> tuple[Command, ...]:
        if self.phase != "committing":
            return ()
        self.error = error
        if error is None:
            self.phase = "committed"
            return ()
        if isinstance(error, CommitUnknownError):
            self.phase = "unknown"
            return ()
        self.phase = "given up"
        return (Discard(error),)


def differing_versions(
    step: int, versions: Mapping[str, int | None]
) -> RankDisagreementError | None:
    """Returns the error of parts with different versions; None if all that are given are equal.

    Examples:
        >>> differing_versions(7, {"policy": 3, "buffer": 3, "cursor": None})
        >>> print(differing_versions(7, {"policy": 3, "buffer": 2}).key)
        policy
    """
    given = {name: one for name, one in versions.items() if one is not None}
    if len({*given.values()}) < 2:
        return None
    told = ", ".join(f"{name} has {version}" for name, version in given.items())
    return RankDisagreementError(
        f"expected the parts of step {step} to have one version, but {told}. They are not of one "
        f"moment, so the step is not committed, and the one before stands",
        step=step,
        key=next(iter(given)),
    )


def processes_of(parts: Iterable[PartState[Process]]) -> set[Process]:
    """Returns the processes whose death would give a step up."""
    found: set[Process] = set()
    for one in parts:
        everyone = frozenset(one.begun.values())
        found |= {one.begun[rank] for rank in one.needs(everyone)}
    return found


def _is_staged(part: PartState[Process]) -> bool:
    return part.is_staged


def _in_part(step: int, part: str, error: CheckpointError) -> CheckpointError:
    """Returns the error of a part as that of the step."""
    found = copy.copy(error)
    found.message = (
        f"the part {part!r} of step {step} failed, so that the step is not committed and the one "
        f"before stands: {error.message}"
    )
    found.args = (found.message,)
    found.step = step
    return found
