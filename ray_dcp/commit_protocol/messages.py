"""Messages between ranks, stagers and the coordinator, as frozen values.

Every message names its operation and its sender and, after planning, the attempt and the epoch of
the coordinator. A message that arrives twice, late, or after a restart therefore does no harm.
Unpickling a message imports neither torch nor ray.

Receipts of many files are stored as columns (`FileReceipts`): 10,000 receipts are a few arrays
instead of 10,000 objects.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ray_dcp.core.checksums import DIGEST_BYTES
from ray_dcp.core.values import Int32Array, Int64Array, RankPlan, offsets_of
from ray_dcp.errors import CheckpointError, InternalError
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.planning.reads import RankShare, ReadNeeds

Phases = tuple[tuple[str, float], ...]
"""Phases of a rank in their order, without a gap, each with its duration in seconds."""

PlanOrigin = Literal["cold", "warm"]
"""Origin of the plan of a save: made for this save, or reused from an earlier save of the job."""


@dataclass(frozen=True)
class OpKey:
    """Identifies one operation of all ranks: one step of the user's n-th call."""

    session: str
    """Name of the session: run, ranks of the group, generation of the group."""
    seq: int
    """Number of calls that the ranks made before this one. A rank that missed calls receives
    `Renumbered`."""
    step: int = 0
    """Number of earlier operations of this call: a call through plug-ins has several."""


@dataclass(frozen=True)
class Target:
    """Location of a checkpoint: the arguments of `ray_dcp.store.opening.open_storage`."""

    url: str
    """Absolute path or URL."""
    storage_options: Mapping[str, object] = field(default_factory=dict, repr=False)
    """Options for the storage, mostly credentials. They are sent to ranks and stagers, and never
    written to storage or logs."""
    filesystem: Any = field(default=None, repr=False, compare=False)
    """A filesystem object of fsspec, pyarrow.fs or obstore that serves the URL; if None, one is
    created from URL and options."""


@dataclass(frozen=True)
class SaveJoin:
    """Rank → coordinator: the rank joins a save with its items. Reply: `SaveGo`."""

    key: OpKey
    rank: int
    world_size: int
    target: Target
    options: SaveOptions
    columns: bytes
    """`ray_dcp.core.columns.encode` of the rank's `Columns`. Empty if `error` is set, or if the
    coordinator may know them by their fingerprint; if it does not, it sends `SendItems`."""
    error: CheckpointError | None = None
    """Why this rank can't take part; fails the save on every rank."""
    staged: bool = False
    """Whether stagers write the bytes while training continues: an asynchronous save."""
    fingerprint: bytes = b""
    """`ray_dcp.planning.fingerprint` of the rank's items; empty if `columns` suffice."""
    contents: bytes = b""
    """The digests of content (`Columns.value`) that are not 0, 8 bytes each."""
    known: bytes = b""
    """Digest of the global plan whose part for this rank it has from an earlier save."""
    values: bytes = b""
    """With `known`: one digest for each group of items of that plan that other ranks hold as well
    (`ray_dcp.planning.merge`)."""
    asked: int = 0
    """Number of `SendItems` that this rank has answered so far; more may follow after a restart."""
    phases: Phases = ()
    """Those so far, for the trace."""
    node: str = ""
    """Name of the rank's node, for dividing up replicas; empty if unknown."""
    about: Mapping[str, Any] | None = field(default=None, hash=False)
    """What this rank knows for `Manifest.about`, which has the topics that ranks agree on."""
    attempt: str = ""
    """Id for the attempt, if the caller of the save made one, the same on all ranks."""


@dataclass(frozen=True)
class SendItems:
    """Coordinator → rank: the rank must join again, with the data that the coordinator lacks."""

    rows: bool
    """Whether `columns` and `contents` are missing; if False, only `contents`."""


@dataclass(frozen=True)
class SaveGo:
    """Coordinator → rank: what the rank writes for this attempt."""

    attempt: str
    epoch: int
    digest: bytes = b""
    """Digest of the global plan, which later joins send as `SaveJoin.known`."""
    warnings: tuple[str, ...] = ()
    origin: PlanOrigin = "warm"
    create_if_absent: bool = True
    """Whether the storage creates a record only if it is absent, as the coordinator found. If not,
    a rank must not abort the attempt by itself."""
    part: RankPlan | None = None
    """The rank's part of the plan; None if it is the one that the rank knows."""
    differing: tuple[str, ...] = ()
    """Names of which this save keeps one rank's value only; of more than 1000 the first."""
    groups: tuple[Int32Array, ...] = ()
    """`ray_dcp.planning.merge.groups_of` this rank; empty if the rank knows them."""

    @property
    def plan(self) -> RankPlan:
        """The rank's part of the plan, once it is filled in."""
        if self.part is None:
            raise InternalError(
                f"Expected the part of a rank in attempt {self.attempt}, which it should know. "
                f"Please report this"
            )
        return self.part


REUSED = ("", "linked", "copied")


@dataclass(frozen=True)
class DeferredPlace:
    """The place of a deferred item in a rank's file."""

    row: int
    """Row of the rank's `Columns`."""
    item_offset: int
    item_bytes: int
    block_bytes: int


@dataclass(frozen=True, eq=False)
class FileReceipt:
    """A part file that is durable under its key."""

    file: int
    """Index into the plan's files."""
    key: str
    """Storage key, which includes the attempt."""
    num_bytes: int
    """Length of the whole file."""
    digest: bytes
    """xxh3-128 over all block checksums of the file, in order (16 bytes)."""
    deferred: tuple[DeferredPlace, ...] = ()
    reused: str = ""
    """How the file got the bytes of a file of an earlier step, one of `REUSED`; empty if it was
    written."""


@dataclass(frozen=True)
class SaveReceipt:
    """Rank → coordinator: the rank's part is durable, or failed. Reply: `SaveOutcome`."""

    key: OpKey
    rank: int
    attempt: str
    epoch: int
    files: tuple[FileReceipt, ...] = ()
    error: CheckpointError | None = None
    phases: Phases = ()
    """For the trace; the last of them ends with this request."""
    staged_bytes: int = 0
    """Bytes copied before they were written, for the trace."""


@dataclass(frozen=True)
class PartsHeld:
    """Stager → coordinator: it holds a rank's bytes, and will write them even if the rank dies.

    Training continues on the rank once the stager has the reply, `Ack`.
    """

    key: OpKey
    rank: int
    """The rank whose bytes these are."""
    attempt: str
    epoch: int
    stager: str
    """Name of the stager, unique to its process."""
    phases: Phases = ()
    """Those of the rank, for the trace; the last of them ends with this report."""
    num_bytes: int = 0
    """Bytes copied, for the trace."""


@dataclass(frozen=True)
class PartsWritten:
    """Stager → coordinator: these part files of a rank are durable, or one failed.

    Reply: `Ack`.
    """

    key: OpKey
    rank: int
    """The rank whose bytes these are."""
    attempt: str
    epoch: int
    files: tuple[FileReceipt, ...] = ()
    error: CheckpointError | None = None


@dataclass(frozen=True)
class SaveStaged:
    """Rank → coordinator: the rank's bytes are staged, or staging failed; it awaits the outcome.

    Reply: `SaveOutcome`.
    """

    key: OpKey
    rank: int
    attempt: str
    epoch: int
    error: CheckpointError | None = None
    stager: str = ""
    """Name of the stager that has the bytes, which a restarted coordinator has to ask; empty if the
    rank has no bytes."""
    phases: Phases = ()
    """For the trace, of a rank without bytes; the last of them ends with this request."""


@dataclass(frozen=True)
class Ack:
    """Coordinator → stager: the report was received and need not be repeated."""


@dataclass(frozen=True)
class SaveOutcome:
    """Coordinator → rank: the checkpoint is committed."""

    attempt: str
    slot: int
    manifest: bytes
    """The committed manifest, as on storage; empty if it is too long to send, in which case ranks
    read it from storage."""
    warnings: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    """As `SaveGo.differing`; a rank adds it to the reply."""


@dataclass(frozen=True)
class LoadJoin:
    """Rank → coordinator: the rank joins a load. Reply: `LoadGo`."""

    key: OpKey
    rank: int
    world_size: int
    target: Target
    options: LoadOptions
    error: CheckpointError | None = None


@dataclass(frozen=True)
class LoadGo:
    """Coordinator → rank: the checkpoint that all ranks load."""

    kind: str
    """`"native"` (of ray_dcp), `"stock"` (DCP's `.metadata`) or `"safetensors"` (plain files)."""
    slot: int
    """Slot of the manifest; 0 for a checkpoint that ray_dcp did not write."""
    record: bytes
    """Bytes of the manifest, or of the foreign `.metadata`; empty for plain files."""
    table: bytes = b""
    """A short chunk table, so that it is read only once; if empty, each rank reads the table."""


@dataclass(frozen=True)
class Untaken:
    """The names of a checkpoint that a rank, or every rank, does not load.

    Both fields are bit sets with one bit for each name of the checkpoint, in order, compressed.

    Examples:
        >>> names = ("first.w", "second.w", "lr")
        >>> ranks = [Untaken.of(names, {"second.w", "lr"}, {"second.w"}),
        ...          Untaken.of(names, {"first.w", "lr"}, {"first.w"})]
        >>> Untaken.of_all(ranks) is None
        True
        >>> Untaken.of_all(ranks[:1]).refused_of(names)
        ['second.w']
    """

    names: bytes
    """The names that are not loaded."""
    refused: bytes
    """The subset of them that some rank has to load."""

    @classmethod
    def of(
        cls, stored: Sequence[str], untaken: Collection[str], refused: Collection[str]
    ) -> Untaken:
        """Returns the names that one rank does not load.

        Args:
            stored: All names of the checkpoint, in its order.
            untaken: Names that the rank does not load.
            refused: The subset of `untaken` that some rank has to load.
        """
        bits = [
            np.array([name in some for name in stored]) for some in map(set, (untaken, refused))
        ]
        return cls(*(zlib.compress(np.packbits(each).tobytes()) for each in bits))

    @classmethod
    def of_all(cls, ranks: Sequence[Untaken]) -> Untaken | None:
        """Returns the names that no rank loads, or None if none of them has to be loaded.

        Args:
            ranks: The values of all ranks, for the same checkpoint.
        """
        names = np.bitwise_and.reduce([_unpacked(rank.names) for rank in ranks])
        refused = np.bitwise_or.reduce([_unpacked(rank.refused) for rank in ranks]) & names
        if not refused.any():
            return None
        return cls(zlib.compress(names.tobytes()), zlib.compress(refused.tobytes()))

    def refused_of(self, stored: Sequence[str]) -> list[str]:
        """Returns the names of `refused`.

        Args:
            stored: As for `of`.
        """
        found = np.flatnonzero(np.unpackbits(_unpacked(self.refused), count=len(stored)))
        return [stored[number] for number in found.tolist()]


def _unpacked(data: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(zlib.decompress(data), np.uint8)


@dataclass(frozen=True)
class LoadReady:
    """Rank → coordinator: the rank's reads are planned, no target changed. Reply: `LoadProceed`."""

    key: OpKey
    rank: int
    error: CheckpointError | None = None
    needs: ReadNeeds | None = None
    """The rank's needs of shared reads; None if it reads everything for itself."""
    untaken: Untaken | None = None
    """None if this rank loads every name."""


@dataclass(frozen=True)
class LoadProceed:
    """Coordinator → rank: every rank has planned its reads; the rank may read."""

    share: RankShare | None = None
    """The rank's share of the shared reads; None if it reads everything for itself."""
    untaken: Untaken | None = None
    """If set: names that no rank loads though one has to. The rank raises before it changes any
    target."""


@dataclass(frozen=True)
class ReadCounts:
    """Bytes that one rank or all ranks read; the fields are those of `ray_dcp.LoadReport`."""

    bytes_needed: int = 0
    """Bytes that the targets hold."""
    bytes_read: int = 0
    """Bytes read from storage or memory."""
    bytes_from_memory: int = 0
    """The part of `bytes_read` that came from the memory of the nodes."""
    bytes_from_peers: int = 0
    """Bytes received from other ranks; not part of `bytes_read`."""
    bytes_read_instead: int = 0
    """The part of `bytes_read` that other ranks should have sent but did not."""

    @classmethod
    def total(cls, counts: Iterable[ReadCounts]) -> ReadCounts:
        """Returns the sum."""
        return cls(*map(sum, zip(*map(astuple, counts), strict=True)))


@dataclass(frozen=True)
class LoadDone:
    """Rank → coordinator: the rank has read everything, or failed. Reply: `LoadOutcome`."""

    key: OpKey
    rank: int
    counts: ReadCounts = ReadCounts()
    error: CheckpointError | None = None


@dataclass(frozen=True)
class LoadOutcome:
    """Coordinator → rank: every rank has loaded."""

    counts: ReadCounts
    """Sums over all ranks."""


@dataclass(frozen=True)
class Exchange:
    """Rank → coordinator: bytes for other ranks. Reply: `Exchanged`, when all ranks have sent.

    Paths that run user code of DCP's interfaces in the ranks build all communication on it: gather
    is an outbox for rank 0 on each rank, scatter is an outbox on rank 0.
    """

    key: OpKey
    rank: int
    world_size: int
    tag: str
    outbox: Mapping[int, bytes]
    timeout_s: float
    error: CheckpointError | None = None


@dataclass(frozen=True)
class Exchanged:
    """Coordinator → rank: the bytes that ranks sent to this one, by sender."""

    inbox: Mapping[int, bytes]


@dataclass(frozen=True)
class Left:
    """An operation that a rank has left before its end, in reports to the coordinator."""

    key: OpKey
    reason: str
    """Why, in words."""
    is_interrupt: bool = False
    """Whether the user interrupted the call, for example with Ctrl-C."""


@dataclass(frozen=True)
class Refused:
    """Coordinator → rank: the operation failed, with the same error for every rank."""

    error: CheckpointError


@dataclass(frozen=True)
class Renumbered:
    """Coordinator → rank: the rank missed calls of the others, and must begin this one as `seq`."""

    seq: int


Fenceable = SaveReceipt | SaveStaged | PartsHeld | PartsWritten
"""Messages that name an attempt, and are refused if it is not the current one."""

Request = SaveJoin | Fenceable | LoadJoin | LoadReady | LoadDone | Exchange
SaveReply = SaveGo | SendItems | SaveOutcome | Ack
Reply = SaveReply | LoadGo | LoadProceed | LoadOutcome | Exchanged | Refused | Renumbered


@dataclass(frozen=True)
class MessageBatch:
    """Gatherer → coordinator: the requests of several ranks in one step of an operation.

    Reply: `BatchedReplies`.
    """

    key: OpKey
    step: str
    requests: tuple[Request, ...]
    """One of each rank, by rank."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks."""
        return tuple(request.rank for request in self.requests)

    def only(self, ranks: Collection[int]) -> MessageBatch:
        """Returns the batch of only some of these ranks, which are not answered yet."""
        return replace(self, requests=tuple(one for one in self.requests if one.rank in ranks))


@dataclass(frozen=True)
class BatchedReplies:
    """Coordinator → gatherer: replies to some of the ranks; the others still wait."""

    replies: tuple[tuple[int, Reply], ...]


_SEPARATOR = "\n"
"""Separates keys: no key of ray_dcp contains a line break."""


@dataclass(frozen=True, eq=False)
class FileReceipts:
    """The receipts of `f` files with `k` deferred items in all, as columns.

    Attributes:
        file: int64[f], indices into the plan's files.
        keys: All keys, one per line.
        num_bytes: int64[f], length of each file.
        digests: 16 bytes for each file.
        num_places: int64[f], number of deferred items of each file.
        places: int64[k, 4], row, item offset, item bytes and block bytes of each deferred item.
        reused: One byte for each file, an index into `REUSED`.
    """

    file: Int64Array
    keys: str
    num_bytes: Int64Array
    digests: bytes
    num_places: Int64Array
    places: Int64Array
    reused: bytes

    def __len__(self) -> int:
        return len(self.file)

    def __iter__(self) -> Iterator[FileReceipt]:
        firsts = offsets_of(self.num_places).tolist()
        keys = self.keys.split(_SEPARATOR)
        for index, file in enumerate(self.file.tolist()):
            places = self.places[firsts[index] : firsts[index + 1]].tolist()
            yield FileReceipt(
                file,
                keys[index],
                int(self.num_bytes[index]),
                self.digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)],
                tuple(DeferredPlace(*place) for place in places),
                REUSED[self.reused[index]],
            )


def pack_receipts(receipts: Iterable[FileReceipt]) -> FileReceipts:
    """Returns receipts as columns, in the same order.

    Raises:
        InternalError: A key has a line break, or a digest has the wrong length.
    """
    found = list(receipts)
    for one in found:
        if _SEPARATOR in one.key or len(one.digest) != DIGEST_BYTES:
            raise InternalError(
                f"expected a receipt with a key of one line and a digest of {DIGEST_BYTES} bytes, "
                f"found {one.key!r} and {len(one.digest)} bytes. Please report this",
                key=one.key,
            )
    places = [
        (place.row, place.item_offset, place.item_bytes, place.block_bytes)
        for one in found
        for place in one.deferred
    ]
    return FileReceipts(
        _column([one.file for one in found]),
        _SEPARATOR.join([one.key for one in found]),
        _column([one.num_bytes for one in found]),
        b"".join([one.digest for one in found]),
        _column([len(one.deferred) for one in found]),
        np.array(places, dtype=np.int64).reshape(-1, 4),
        bytes([REUSED.index(one.reused) for one in found]),
    )


def join_receipts(receipts: Iterable[FileReceipt]) -> FileReceipts:
    """Returns all receipts as columns, sorted by file.

    Args:
        receipts: The receipts, in any order.

    Raises:
        InternalError: A file has two receipts.
    """
    found = sorted(receipts, key=lambda one: one.file)
    for one, other in pairwise(found):
        if one.file == other.file:
            raise InternalError(
                f"Expected one receipt for file {one.file}, but found two: {one.key} and "
                f"{other.key}. Please report this",
                key=other.key,
            )
    return pack_receipts(found)


def _column(values: list[int]) -> Int64Array:
    return np.array(values, dtype=np.int64)
