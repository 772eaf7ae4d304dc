"""Messages between a rank and a stager about staged bytes, as frozen values.

Unpickling them needs neither torch nor ray.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal

from ray_dcp.commit_protocol.messages import FileReceipt, Target
from ray_dcp.core.values import RankPlan
from ray_dcp.errors import CheckpointError, InvalidRequestError
from ray_dcp.options import SaveOptions

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StagerOptions:
    """How a node stages.

    Raises:
        InvalidRequestError: A field has a value that it can't have.

    Examples:
        >>> StagerOptions(limit_bytes=64 << 20).window_bytes_within(64 << 20)
        16777216
    """

    limit_bytes: int | None = None
    """Most bytes that all ranks of a node may have staged at a time; by default half of the
    memory that is free when the stager starts."""
    memory: Literal["auto", "shared", "object_store"] = "auto"
    """Where a rank stages: `"shared"` memory of its node's stager; Ray's `"object_store"`, which
    only Ray workers may ask for; by default shared memory, and the object store with a warning
    where that can't be shared, as across containers."""
    window_bytes: int = 64 * MIB
    """Unit of handing over and of reuse; smaller under a small limit."""

    def __post_init__(self) -> None:
        checks = {
            "limit_bytes": self.limit_bytes is None or _is_in(self.limit_bytes, _LEAST_LIMIT),
            "memory": self.memory in ("auto", "shared", "object_store"),
            "window_bytes": _is_in(self.window_bytes, _LEAST_WINDOW),
        }
        wrong = [name for name, is_right in checks.items() if not is_right]
        if wrong:
            raise InvalidRequestError(
                f"StagerOptions.{wrong[0]} can't be {getattr(self, wrong[0])!r}: expected "
                f"limit_bytes of at least {_LEAST_LIMIT}, memory auto, shared or object_store, and "
                f"window_bytes of at least {_LEAST_WINDOW}",
                key=wrong[0],
            )

    def window_bytes_within(self, limit_bytes: int) -> int:
        """Returns the length of a window: a whole number of MiB, at least four in the limit."""
        return max(min(self.window_bytes, limit_bytes // _LEAST_WINDOWS) // MIB * MIB, 2 * MIB)


def _is_in(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= sys.maxsize


_LEAST_WINDOWS = 4
"""A rank fills one window while others are written."""
_LEAST_WINDOW = 2 * MIB
"""A window must take a checksum block (1 MiB) wherever it begins."""
_LEAST_LIMIT = _LEAST_WINDOW * _LEAST_WINDOWS


@dataclass(frozen=True)
class StageKey:
    """One rank's share of one attempt."""

    save: Any
    """Whatever the caller calls the save; unique for the life of the stager. The runtime's is
    `(OpKey, epoch of the coordinator that planned it)`."""
    rank: int
    attempt: str


@dataclass(frozen=True)
class MemoryAddress:
    """Where another process of this machine finds a stager's shared memory."""

    pid: int
    """A process that has it open."""
    fd: int
    """Its descriptor there."""
    identity: tuple[int, int]
    """Device and inode: what is found under pid and descriptor must be this."""
    num_slots: int
    slot_bytes: int


@dataclass(frozen=True)
class Slot:
    """One window's place in staging memory."""

    index: int
    generation: int
    """How often the slot had been granted: tells whether it holds this window still."""


@dataclass(frozen=True)
class Grant:
    """Places for a job's next windows; more follow when there is room."""

    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Unknown:
    """The stager can't do it: it lacks the plan, or the job, or is another one than was meant."""

    what: Literal["plan", "job", "stager"]


@dataclass(frozen=True)
class StageOrder:
    """Rank → stager: I shall hand over these bytes; write them."""

    key: StageKey
    owner: str
    """The rank's name on the node: it gets back the memory that it used before."""
    process: str
    """Names the rank's process: what dies."""
    plan_id: bytes
    """`plan_digest` of the plan."""
    plan: RankPlan | None
    """What to write; None when the stager should know it."""
    deferred_bytes: tuple[tuple[int, ...], ...]
    """For each file the lengths of its deferred items."""
    target: Target
    options: SaveOptions
    channel: Literal["shared", "object_store"]
    """Whether windows lie in the stager's memory, or come as objects of Ray's store."""
    window_bytes: int
    """Length of a window."""


@dataclass(frozen=True)
class StageReport:
    """Stager → whoever collects receipts: what became of one part file. May come twice."""

    key: StageKey
    file: int
    """`FilePlan.file`."""
    receipt: FileReceipt | None
    error: CheckpointError | None = None


@dataclass(frozen=True)
class InFlight:
    """A save that a stager works for, whose outcome it does not know."""

    target: Target
    attempt: str
    is_written: bool
    """The stager has written its part: only the commit is awaited."""


@dataclass(frozen=True)
class StageProgress:
    """How far a stager is with one key."""

    key: StageKey
    num_bytes: int
    """Bytes to write, without frames."""
    written_bytes: int
    is_sealed: bool
    """The stager holds all bytes: the rank may go on."""
    reports: tuple[StageReport, ...]
    """All so far, whether or not they could be delivered."""
