"""Reads planned bytes into targets, verifying every block on the way.

Large contiguous regions go straight into the target's memory; small ones that lie together are
read together; the rest goes through a bounded scratch buffer per thread. Which bytes those are is
decided in `jobs`; the work is done in `filling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ray_dcp.errors import DamagedCheckpointError, InvalidRequestError
from ray_dcp.format.checksums import num_blocks_many
from ray_dcp.format.dtypes import ITEMSIZE
from ray_dcp.format.stream_transforms import unpacked_item
from ray_dcp.options import LoadOptions, Verify
from ray_dcp.plan.boxes import volume
from ray_dcp.plan.reading import ReadPlan, Wanted
from ray_dcp.plan.values import BoolArray, ChunkTable, Int32Array, Int64Array, Kind
from ray_dcp.store.storage import Storage, read_traits_of
from ray_dcp.transfer.blocks import BlockVerifier, naming, read_stored
from ray_dcp.transfer.filling import Filler, TargetSink
from ray_dcp.transfer.jobs import Geometry, Job, ReadCost, geometry, job_reads, make_jobs
from ray_dcp.transfer.stock import item_bytes_at_most, locate_item
from ray_dcp.transfer.threads import run_tasks

__all__ = [
    "Prepared",
    "ReadStats",
    "TargetSink",
    "Transforms",
    "prepare_reads",
    "read_chunks",
    "read_cost",
    "read_item",
    "read_prepared",
]

Transforms = Sequence[tuple[str, ...] | None] | None
"""`ForeignMetadata.transforms`."""

_WHOLE_ITEM_BYTES = 1 << 20
"""Stock items up to this length are read whole at once; of longer ones first the head."""

_FAR_REQUEST_BYTES = 8 << 20
"""Length that requests have at least where each of them takes a round trip."""


@dataclass(frozen=True)
class ReadStats:
    """What a read did."""

    bytes_read: int
    """Bytes asked of the storage."""
    bytes_needed: int
    """Bytes of all wanted boxes."""
    blocks_checked: int
    opaque: tuple[int, ...] = ()
    """Chunks that only `torch.load` understands. Nothing was written for them, and `done` was not
    called for the rows that need them: read them with `read_item`."""


def read_chunks(
    storage: Storage,
    table: ChunkTable,
    read_plan: ReadPlan,
    wanted: Wanted,
    sink: TargetSink,
    *,
    options: LoadOptions,
) -> ReadStats:
    """Fills the targets of all wanted rows.

    Rows of volume 0 are done at once. Rows that the plan names as uncovered are filled as far as
    they can be, and never done. After an error the targets hold rubbish.

    Args:
        storage: Where the files are.
        table: What is stored.
        read_plan: `plan_reads(table, wanted)`.
        wanted: What is asked for.
        sink: Gives the targets; used from `options.num_threads` threads.
        options: `num_threads` and `verify` count.

    Returns:
        How much was read and checked, and which chunks could not be read here.

    Raises:
        DamagedCheckpointError: A block does not match its checksum, or a file is gone or too
            short; names the tensor, the file and the bytes.
        UnsafeCheckpointError: A stock item asks for code to run.
        StorageError: A file can't be read.
        InvalidRequestError: A target is not writable or has another length than its box, or
            `wanted` has another element size than the table.

    Complexity:
        O(bytes); a small tensor costs about 3 us. Memory: per thread the greatest of 8 MiB,
        `jobs.SCRATCH_BYTES` and one block, and no more than what one job needs.
    """
    prepared = prepare_reads(storage, table, read_plan, wanted, options=options)
    return read_prepared(storage, prepared, sink, options=options)


@dataclass(frozen=True, eq=False)
class Prepared:
    """What is to be read, to the byte, before anything of a target is touched."""

    table: ChunkTable
    read_plan: ReadPlan
    wanted: Wanted
    geo: Geometry
    jobs: Sequence[Job]
    parts: Int64Array
    """How many jobs fill each wanted row."""
    opaque: frozenset[int]
    """As in `ReadStats`; more may turn out to be when they are read."""
    cost: ReadCost

    def reads(self) -> tuple[Int32Array, Int64Array, Int64Array]:
        """Returns `(file, low, high)` of every range that is asked of the storage."""
        return job_reads(self.geo, self.jobs, self.cost)


def prepare_reads(
    storage: Storage,
    table: ChunkTable,
    read_plan: ReadPlan,
    wanted: Wanted,
    *,
    options: LoadOptions,
) -> Prepared:
    """Decides what `read_prepared` reads; asks the storage only for the heads of stock items.

    Args:
        storage: Where the files are.
        table: What is stored.
        read_plan: `plan_reads(table, wanted)`.
        wanted: What is asked for.
        options: `num_threads` and `verify` count.

    Raises:
        CheckpointError: As `read_chunks`, for what the table or the head of an item shows.
    """
    _check_request(table, read_plan, wanted)
    place, opaque = _locate(storage, table, read_plan.chunk, options.num_threads)
    usable = ~np.isin(read_plan.chunk, np.array(sorted(opaque), np.int32))
    geo = geometry(table, wanted, _rows_of(read_plan, usable), place, options.verify)
    cost = read_cost(storage)
    jobs, parts = make_jobs(geo, len(wanted), cost)
    # One part too many: these rows are never done.
    parts[read_plan.wanted[~usable]] += 1
    parts[np.array([row for row, _ in read_plan.uncovered], np.int64)] += 1
    return Prepared(table, read_plan, wanted, geo, jobs, parts, frozenset(opaque), cost)


def read_cost(storage: Storage) -> ReadCost:
    """Returns what reads of a storage cost, by its kind and what it says of itself."""
    traits = read_traits_of(storage)
    usual = 0 if traits.cached else _FAR_REQUEST_BYTES
    return ReadCost(traits.request_s, traits.bytes_per_s, getattr(storage, "request_bytes", usual))


def read_prepared(
    storage: Storage, prepared: Prepared, sink: TargetSink, *, options: LoadOptions
) -> ReadStats:
    """Fills the targets, as `read_chunks` does.

    Jobs are begun in the order of files and of places in them.

    Args:
        storage: Where the files are.
        prepared: What `prepare_reads` returned.
        sink: Gives the targets; used from `options.num_threads` threads.
        options: As given to `prepare_reads`.

    Raises:
        CheckpointError: As `read_chunks`.
    """
    wanted, parts = prepared.wanted, prepared.parts
    lengths = volume(wanted.size) * wanted.itemsize
    filler = Filler(
        storage, prepared.table, prepared.geo, sink, lengths.tolist(), parts.tolist(),
        options.verify, prepared.cost,
    )  # fmt: skip
    for row in np.flatnonzero((parts == 0) & (lengths == 0)).tolist():
        sink.done(row)
    run_tasks(prepared.jobs, filler.do, min(options.num_threads, len(prepared.jobs)))
    return ReadStats(
        bytes_read=filler.bytes_read,
        bytes_needed=prepared.read_plan.bytes_needed,
        blocks_checked=filler.blocks_checked,
        opaque=tuple(sorted(prepared.opaque | filler.opaque)),
    )


def read_item(
    storage: Storage,
    table: ChunkTable,
    chunk: int,
    *,
    verify: Verify = "always",
    transforms: Transforms = None,
) -> bytes:
    """Returns a whole item (what `torch.save` wrote) after verifying its payload.

    Args:
        storage: Where the files are.
        table: What is stored.
        chunk: Row of the table: an object, an opaque chunk, or any other.
        verify: Which blocks to check.
        transforms: `ForeignMetadata.transforms`; those of the chunk are undone.

    Raises:
        DamagedCheckpointError: A block does not match its checksum, the file is gone or short, or
            a transform can't be undone.
        StorageError: The file can't be read.
    """
    _check_reaches(storage, table, chunk)
    data = bytearray(int(table.item_bytes[chunk]))
    view = memoryview(data)
    read_stored(storage, table.files[table.file[chunk]], int(table.item_offset[chunk]), view)
    if table.block_bytes[chunk] > 0:
        chosen = np.array([chunk], np.int32)
        _check_blocks_fit(table, chosen, table.payload_bytes[chosen])
        low = int(table.payload_offset[chunk] - table.item_offset[chunk])
        payload = view[low : low + int(table.payload_bytes[chunk])]
        BlockVerifier(table, verify, storage.url).check(chunk, 0, payload)
    found = None if transforms is None else transforms[chunk]
    if not found:
        return bytes(data)
    with naming(table, chunk):
        return bytes(unpacked_item(view, found, max_bytes=item_bytes_at_most(table, chunk)))


def _locate(
    storage: Storage, table: ChunkTable, chunks: Int32Array, num_threads: int
) -> tuple[Int64Array, set[int]]:
    """Returns where raw bytes start (int64[c], -1: read the whole item), and opaque chunks."""
    place = table.payload_offset.copy()
    used = np.unique(chunks)
    opaque: set[int] = set(used[table.kind[table.tensor[used]] != Kind.TENSOR].tolist())
    large = used[(place[used] < 0) & (table.item_bytes[used] > _WHOLE_ITEM_BYTES)]
    todo = [chunk for chunk in large.tolist() if chunk not in opaque]

    def locate(chunk: int) -> None:
        item = locate_item(storage, table, chunk)
        if item is None:
            opaque.add(chunk)
        elif item.is_contiguous:
            place[chunk] = table.item_offset[chunk] + item.payload_offset
        else:
            _check_reaches(storage, table, chunk)

    run_tasks(todo, locate, min(num_threads, len(todo)))
    return place, opaque


def _check_reaches(storage: Storage, table: ChunkTable, chunk: int) -> None:
    """Checks that a long item is there to its last byte, before memory is taken for it.

    Why: how long it is said to be may be a lie, in a `.metadata` without checksums.
    """
    length = int(table.item_bytes[chunk])
    if length > _WHOLE_ITEM_BYTES:
        last = int(table.item_offset[chunk]) + length - 1
        read_stored(storage, table.files[table.file[chunk]], last, memoryview(bytearray(1)))


def _rows_of(plan: ReadPlan, chosen: BoolArray) -> ReadPlan:
    if chosen.all():
        return plan
    return ReadPlan(
        chunk=plan.chunk[chosen],
        wanted=plan.wanted[chosen],
        offset=plan.offset[chosen],
        size=plan.size[chosen],
        uncovered=plan.uncovered,
        bytes_needed=plan.bytes_needed,
    )


def _check_request(table: ChunkTable, plan: ReadPlan, wanted: Wanted) -> None:
    """Checks what a damaged table or a careless caller could get wrong, before anything is read."""
    sizes = np.array([ITEMSIZE.get(name, -1) for name in table.dtypes] + [-1], np.int64)
    known = sizes[table.dtype[wanted.tensor]]
    wrong = np.flatnonzero((known >= 0) & (known != wanted.itemsize))
    if len(wrong):
        row = int(wrong[0])
        raise InvalidRequestError(
            f"wanted row {row} has elements of {wanted.itemsize[row]} bytes, but "
            f"{table.names[wanted.tensor[row]]!r} is stored with {known[row]}"
        )
    chunks, first = np.unique(plan.chunk, return_index=True)
    with_place = (table.payload_offset[chunks] >= 0) & (
        table.kind[table.tensor[chunks]] == Kind.TENSOR
    )
    chunks, first = chunks[with_place], first[with_place]
    lengths = volume(table.size[chunks]) * wanted.itemsize[plan.wanted[first]]
    _check_blocks_fit(table, chunks, lengths)


def _check_blocks_fit(table: ChunkTable, chunks: Int32Array, lengths: Int64Array) -> None:
    counts = table.check_start[chunks + 1] - table.check_start[chunks]
    expected = num_blocks_many(lengths, table.block_bytes[chunks])
    wrong = np.flatnonzero((table.payload_bytes[chunks] != lengths) | (counts != expected))
    if len(wrong):
        chunk = int(chunks[wrong[0]])
        raise DamagedCheckpointError(
            f"the chunk table contradicts itself: {table.names[table.tensor[chunk]]!r} in "
            f"{table.files[table.file[chunk]]} should have {lengths[wrong[0]]} bytes and "
            f"{expected[wrong[0]]} checksums, but has {table.payload_bytes[chunk]} and "
            f"{counts[wrong[0]]}; load an earlier step",
            key=table.files[table.file[chunk]],
        )
