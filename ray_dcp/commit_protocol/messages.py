"""Messages between ranks and the coordinator, as frozen values.

Every message names its operation and its sender, and after planning the attempt and the epoch of
the coordinator, so that it may arrive twice, late, or after a restart without harm. Unpickling a
message needs neither torch nor ray.

Receipts of many files are columns (`FileReceipts`): 10,000 of them are a few arrays and not 10,000
objects.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ray_dcp.core.checksums import DIGEST_BYTES
from ray_dcp.core.grouping import offsets_of, within
from ray_dcp.core.values import Int32Array, Int64Array, RankPlan
from ray_dcp.errors import CheckpointError, InternalError
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.planning.reads import RankShare, ReadNeeds

PlanOrigin = Literal["cold", "warm"]
"""Where the plan of a save is from: made for it, or of an earlier save of the job."""


@dataclass(frozen=True)
class OpKey:
    """Names one operation of all ranks: a step of the n-th call of their users."""

    session: str
    """Name of the session: run, ranks of the group, generation of the group."""
    seq: int
    """How many calls the ranks made before this one. A rank that missed calls learns that by
    `Renumbered`."""
    step: int = 0
    """How many operations of this call were named before: a call through plug-ins takes several."""


@dataclass(frozen=True)
class Target:
    """Where a checkpoint lies: what `ray_dcp.store.opening.open_storage` needs."""

    url: str
    """Absolute path or URL."""
    storage_options: Mapping[str, object] = field(default_factory=dict, repr=False)
    """Options for the storage: credentials above all. They travel to ranks and stagers, and are
    written neither to storage nor to logs."""
    filesystem: Any = field(default=None, repr=False, compare=False)
    """A ready filesystem of fsspec, pyarrow.fs or obstore that serves the URL; None to make one
    from URL and options."""


@dataclass(frozen=True)
class SaveJoin:
    """Rank → coordinator: I take part in this save and hold these items. Reply: `SaveGo`."""

    key: OpKey
    rank: int
    world_size: int
    target: Target
    options: SaveOptions
    columns: bytes
    """`ray_dcp.core.columns.encode` of the rank's `Columns`; empty when `error` is set, and when
    the coordinator may know them by their fingerprint: it asks otherwise."""
    error: CheckpointError | None = None
    """Why this rank can't take part; fails the save on every rank."""
    staged: bool = False
    """Whether stagers write the bytes, while the ranks go on: an asynchronous save."""
    fingerprint: bytes = b""
    """`ray_dcp.planning.fingerprint` of the rank's items; empty when `columns` are enough."""
    contents: bytes = b""
    """The digests of content (`Columns.value`) that are not 0, 8 bytes each."""
    known: bytes = b""
    """Digest of the global plan of which this rank has its part from an earlier save."""
    values: bytes = b""
    """With `known`: one digest for each group of items of that plan that others hold as well
    (`ray_dcp.planning.merge`)."""
    asked: int = 0
    """How many `SendItems` this rank has answered with it; more may follow after a restart."""
    capture_s: float = 0.0
    """Seconds until it had seen what it holds: for the trace."""
    node: str = ""
    """Names the node that this rank is on, for sharing out; empty when it is not known."""


@dataclass(frozen=True)
class SendItems:
    """Coordinator → rank: join again, with what I do not know. Reply to that: as to a join."""

    rows: bool
    """`columns` and `contents`; else only `contents`."""


@dataclass(frozen=True)
class SaveAgain:
    """Coordinator → rank: the plan is unchanged: write your known part, under this attempt."""

    attempt: str
    epoch: int
    digest: bytes = b""
    """Of the global plan, by which a part is used again: `SaveJoin.known`."""
    warnings: tuple[str, ...] = ()
    origin: PlanOrigin = "warm"
    create_if_absent: bool = True
    """A record has one winner, as the coordinator saw: without it a rank must not abort the attempt
    by itself."""

    def with_plan(self, plan: RankPlan, groups: tuple[Int32Array, ...] = ()) -> SaveGo:
        """Returns the whole of it, with the part of a rank."""
        return SaveGo(**vars(self), plan=plan, groups=groups)


@dataclass(frozen=True, kw_only=True)
class SaveGo(SaveAgain):
    """Coordinator → rank: write this, under this attempt."""

    plan: RankPlan
    groups: tuple[Int32Array, ...] = ()
    """`ray_dcp.planning.merge.groups_of` this rank; empty where it knows them."""


@dataclass(frozen=True)
class DeferredPlace:
    """Where a rank put a deferred item in its file."""

    row: int
    """Row of the rank's `Columns`."""
    item_offset: int
    item_bytes: int
    block_bytes: int


@dataclass(frozen=True, eq=False)
class FileReceipt:
    """One part file is durable under its key."""

    file: int
    """Index into the plan's files."""
    key: str
    """Key in storage, with the attempt."""
    num_bytes: int
    """Length of the whole file."""
    digest: bytes
    """xxh3-128 over all block checksums of the file, in order (16 bytes)."""
    deferred: tuple[DeferredPlace, ...] = ()


@dataclass(frozen=True)
class SaveReceipt:
    """Rank → coordinator: my part is durable, or failed. Reply: `SaveOutcome`."""

    key: OpKey
    rank: int
    attempt: str
    epoch: int
    files: tuple[FileReceipt, ...] = ()
    error: CheckpointError | None = None
    staged: tuple[float, int] = (0.0, 0)
    """How long the rank copied before it wrote, in seconds, and how many bytes: for the trace."""


@dataclass(frozen=True)
class PartsHeld:
    """Stager → coordinator: I hold a rank's bytes, and write them whatever becomes of it.

    Sent before the rank may go on. Reply: `Ack`.
    """

    key: OpKey
    rank: int
    """Whose bytes."""
    attempt: str
    epoch: int
    stager: str
    """Name of this stager, different for each process that ever was one."""
    num_bytes: int = 0
    """How many were copied: for the trace."""


@dataclass(frozen=True)
class PartsWritten:
    """Stager → coordinator: these part files of a rank are durable, or one failed.

    Reply: `Ack`.
    """

    key: OpKey
    rank: int
    """Whose bytes."""
    attempt: str
    epoch: int
    files: tuple[FileReceipt, ...] = ()
    error: CheckpointError | None = None


@dataclass(frozen=True)
class SaveStaged:
    """Rank → coordinator: my bytes are staged, or staging failed; how does it end?

    Reply: `SaveOutcome`.
    """

    key: OpKey
    rank: int
    attempt: str
    epoch: int
    error: CheckpointError | None = None
    held: PartsHeld | None = None
    """The last report of who holds the bytes: another coordinator may not have received it."""


@dataclass(frozen=True)
class Ack:
    """Coordinator → stager: received. Nothing more has to be reported of this."""


@dataclass(frozen=True)
class SaveOutcome:
    """Coordinator → rank: the checkpoint is committed."""

    attempt: str
    slot: int
    manifest: bytes
    """The committed manifest, as on storage; empty when it is so long that ranks which want it
    have to read it there."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadJoin:
    """Rank → coordinator: I take part in this load. Reply: `LoadGo`."""

    key: OpKey
    rank: int
    world_size: int
    target: Target
    options: LoadOptions
    error: CheckpointError | None = None


@dataclass(frozen=True)
class LoadGo:
    """Coordinator → rank: all of you load exactly this checkpoint."""

    kind: str
    """`"native"` (ours), `"stock"` (DCP's `.metadata`) or `"safetensors"` (plain files)."""
    slot: int
    """Slot of the manifest; 0 for a checkpoint that is not ours."""
    record: bytes
    """Bytes of the manifest, or of the foreign `.metadata`; empty for plain files."""
    table: bytes = b""
    """A short chunk table of ours, so that it is read once for all; empty: each rank reads it."""


@dataclass(frozen=True)
class Untaken:
    """What of a checkpoint a rank does not load, or no rank does: one bit a name, compressed.

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
    """All such names."""
    refused: bytes
    """Those that somebody should load."""

    @classmethod
    def of(
        cls, stored: Sequence[str], untaken: Collection[str], refused: Collection[str]
    ) -> Untaken:
        """Returns it for one rank.

        Args:
            stored: All names of the checkpoint, in its order.
            untaken: What the rank does not load.
            refused: What of that somebody should load.
        """
        bits = [
            np.array([name in some for name in stored]) for some in map(set, (untaken, refused))
        ]
        return cls(*(zlib.compress(np.packbits(each).tobytes()) for each in bits))

    @classmethod
    def of_all(cls, ranks: Sequence[Untaken]) -> Untaken | None:
        """Returns what none of some ranks loads though somebody should; None where there is none.

        Args:
            ranks: Those of one checkpoint.
        """
        names = np.bitwise_and.reduce([_unpacked(rank.names) for rank in ranks])
        refused = np.bitwise_or.reduce([_unpacked(rank.refused) for rank in ranks]) & names
        if not refused.any():
            return None
        return cls(zlib.compress(names.tobytes()), zlib.compress(refused.tobytes()))

    def refused_of(self, stored: Sequence[str]) -> list[str]:
        """Returns the names that somebody should load.

        Args:
            stored: See `of`.
        """
        found = np.flatnonzero(np.unpackbits(_unpacked(self.refused), count=len(stored)))
        return [stored[number] for number in found.tolist()]


def _unpacked(data: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(zlib.decompress(data), np.uint8)


@dataclass(frozen=True)
class LoadReady:
    """Rank → coordinator: my reads are planned, nothing was touched. Reply: `LoadProceed`."""

    key: OpKey
    rank: int
    error: CheckpointError | None = None
    needs: ReadNeeds | None = None
    untaken: Untaken | None = None
    """None: this rank takes everything."""


@dataclass(frozen=True)
class LoadProceed:
    """Coordinator → rank: every rank is ready: read."""

    share: RankShare | None = None
    """None, as `LoadReady.needs`: this rank reads all for itself."""
    untaken: Untaken | None = None
    """What no rank takes though somebody should: raise, before anything is touched."""


@dataclass(frozen=True)
class ReadCounts:
    """What one rank or all of them read; named as in `ray_dcp.LoadReport`."""

    bytes_needed: int = 0
    """Bytes that the targets hold."""
    bytes_read: int = 0
    """Bytes read from storage or memory."""
    bytes_from_memory: int = 0
    """Of those that were read."""
    bytes_from_peers: int = 0
    """Got from another rank, and not among those that were read."""
    bytes_read_instead: int = 0
    """Of those that were read, what should have come from another rank."""


@dataclass(frozen=True)
class LoadDone:
    """Rank → coordinator: I have read everything, or failed. Reply: `LoadOutcome`."""

    key: OpKey
    rank: int
    counts: ReadCounts = ReadCounts()
    error: CheckpointError | None = None


@dataclass(frozen=True)
class LoadOutcome:
    """Coordinator → rank: every rank has loaded."""

    counts: ReadCounts
    """Summed over the ranks."""


@dataclass(frozen=True)
class Exchange:
    """Rank → coordinator: hand these to those ranks. Reply: `Exchanged`, when all have come.

    The one primitive of the paths on which user code of DCP's interfaces runs in the ranks:
    gather is an outbox for rank 0, scatter an outbox of rank 0.
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
    """Coordinator → rank: what the others had for you, by sender."""

    inbox: Mapping[int, bytes]


@dataclass(frozen=True)
class Left:
    """An operation that a rank has left before its end."""

    key: OpKey
    reason: str
    """Why, in words."""
    is_interrupt: bool = False
    """Whether its user wanted that, as by Ctrl-C."""


@dataclass(frozen=True)
class Refused:
    """Coordinator → rank: the operation failed, with this error, the same for every rank."""

    error: CheckpointError


@dataclass(frozen=True)
class Renumbered:
    """Coordinator → rank: the others made calls without this rank. Begin this call as `seq`."""

    seq: int


Fenceable = SaveReceipt | SaveStaged | PartsHeld | PartsWritten
"""What names the attempt that it is about."""

Request = SaveJoin | Fenceable | LoadJoin | LoadReady | LoadDone | Exchange
SaveReply = SaveGo | SaveAgain | SendItems | SaveOutcome | Ack
Reply = SaveReply | LoadGo | LoadProceed | LoadOutcome | Exchanged | Refused | Renumbered


_SEPARATOR = "\n"
"""Between keys: no key that we give has one."""


@dataclass(frozen=True, eq=False)
class FileReceipts:
    """The fields of `FileReceipt`, of `f` files.

    Attributes:
        file: int64[f], indices into the plan's files.
        keys: All keys, one a line.
        num_bytes: int64[f].
        digests: 16 bytes for each file.
        num_places: int64[f], how many deferred items each has.
        places: int64[k, 4], row, item offset, item bytes and block bytes of each.
    """

    file: Int64Array
    keys: str
    num_bytes: Int64Array
    digests: bytes
    num_places: Int64Array
    places: Int64Array

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
            )

    @property
    def lengths(self) -> list[tuple[str, int]]:
        """Key and length of each file."""
        keys = self.keys.split(_SEPARATOR) if len(self) else []
        return list(zip(keys, self.num_bytes.tolist(), strict=True))

    def take(self, order: Int64Array) -> FileReceipts:
        """Returns some of them, in an order.

        Args:
            order: int64[m], positions.
        """
        if np.array_equal(order, np.arange(len(self))):
            return self
        keys = self.keys.split(_SEPARATOR)
        digests = np.frombuffer(self.digests, np.uint8).reshape(-1, DIGEST_BYTES)
        places = _rows(offsets_of(self.num_places), order)
        return FileReceipts(
            self.file[order],
            _SEPARATOR.join(map(keys.__getitem__, order.tolist())),
            self.num_bytes[order],
            digests[order].tobytes(),
            self.num_places[order],
            self.places[places],
        )


def pack_receipts(receipts: Iterable[FileReceipt]) -> FileReceipts:
    """Returns receipts as columns, in their order.

    Raises:
        InternalError: One can't be: its key has a line break, or its digest another length.
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
    )


def join_receipts(parts: Sequence[FileReceipts | FileReceipt]) -> FileReceipts:
    """Returns all receipts as one table, by file.

    Args:
        parts: In any order.

    Raises:
        InternalError: Two are of one file.
    """
    alone = [part for part in parts if isinstance(part, FileReceipt)]
    tables = [part for part in parts if isinstance(part, FileReceipts) and len(part)]
    if alone:
        tables.append(pack_receipts(sorted(alone, key=lambda one: one.file)))
    tables.sort(key=lambda table: int(table.file[0]))
    whole = FileReceipts(
        _joined([table.file for table in tables]),
        _SEPARATOR.join([table.keys for table in tables]),
        _joined([table.num_bytes for table in tables]),
        b"".join([table.digests for table in tables]),
        _joined([table.num_places for table in tables]),
        np.concatenate([np.zeros((0, 4), np.int64), *(table.places for table in tables)]),
    )
    whole = whole.take(np.argsort(whole.file, kind="stable"))
    twice = np.flatnonzero(np.diff(whole.file) == 0)
    if len(twice):
        keys, at = whole.keys.split(_SEPARATOR), int(twice[0])
        raise InternalError(
            f"Expected one receipt for file {whole.file[at]}, but found two: "
            f"{keys[at]} and {keys[at + 1]}. Please report this",
            key=keys[at + 1],
        )
    return whole


def _rows(starts: Int64Array, order: Int64Array) -> Int64Array:
    counts = np.diff(starts)[order]
    return np.repeat(starts[order], counts) + within(counts)


def _column(values: list[int]) -> Int64Array:
    return np.array(values, dtype=np.int64)


def _joined(parts: Sequence[Int64Array]) -> Int64Array:
    return np.concatenate([np.zeros(0, np.int64), *parts])
