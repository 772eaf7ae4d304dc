"""Writes part files as a plan says: frames, payloads and deferred items, checksums on the way.

Small tensors are packed with their frames into a joined buffer; large ones are hashed and
written slice by slice, while a slice is still in the processor's cache. Reading back is in
`reader`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from ray_dcp.errors import CheckpointError, CheckpointExistsError, SaveCancelledError
from ray_dcp.format.checksums import block_bytes_for, block_check, block_checks, digest
from ray_dcp.options import SaveOptions
from ray_dcp.plan.values import FilePlan, RankPlan
from ray_dcp.protocol.messages import DeferredPlace, FileReceipt
from ray_dcp.store.storage import KeyExistsError, PartWriter, Storage
from ray_dcp.transfer.pieces import Pieces, Run, contradiction, pieces_of
from ray_dcp.transfer.published import Region, same_file_is_published
from ray_dcp.transfer.threads import Stop, run_tasks

__all__ = ["BytesLike", "Deferred", "ManySource", "Source", "write_file", "write_part"]

BytesLike = bytes | bytearray | memoryview


@runtime_checkable
class ManySource(Protocol):
    """A source that gives the bytes of many small items for less than one by one."""

    def __call__(self, row: int, /) -> memoryview:
        """Returns the bytes of one item."""
        ...

    def many(self, rows: Sequence[int], /) -> Sequence[memoryview]:
        """Returns the bytes of each item."""
        ...


Source = Callable[[int], memoryview] | ManySource
"""Row of the rank's `Columns` → all C-order bytes of the item (uint8, one dimension)."""
Deferred = Callable[[int], BytesLike]
"""Row of the rank's `Columns` → what `torch.save` makes of the item."""

_PACK_BYTES = 2 << 20
"""Small tensors are joined up to this length before they go to the storage."""
_SMALL_BYTES = 128 << 10
"""Payloads up to this length are joined with others."""
_SLICE_BYTES = 8 << 20
"""A large payload is hashed and written in slices of about this length, on block bounds."""
_DEFERRED_ALIGNMENT = 64


def write_part(
    storage: Storage,
    rank_plan: RankPlan,
    attempt: str,
    *,
    source: Source,
    deferred: Deferred,
    options: SaveOptions,
) -> tuple[FileReceipt, ...]:
    """Writes all files of one rank's plan and returns their receipts, in the plan's order.

    Args:
        storage: Where to.
        rank_plan: What to write.
        attempt: Id of the attempt, put into the keys.
        source: Gives an item's bytes; called from several threads, possibly more than once a row.
        deferred: Gives a deferred item's bytes; called once a row, from several threads.
        options: `num_threads`, `sync_files` and `direct_io` count.

    Raises:
        CheckpointError: The first error of a file; the others were given up and leave nothing
            visible, but files that were complete by then stay, under keys of this attempt.
        Exception: Whatever `source` or `deferred` raised.
    """
    receipts: dict[int, FileReceipt] = {}
    stop = Stop()

    def write(index: int) -> None:
        receipts[index] = _write_file(
            storage, rank_plan.files[index], attempt, source, deferred, options, stop
        )

    num_files = len(rank_plan.files)
    run_tasks(range(num_files), write, min(options.num_threads, num_files), stop)
    return tuple(receipts[index] for index in range(num_files))


def write_file(
    storage: Storage,
    file_plan: FilePlan,
    attempt: str,
    *,
    source: Source,
    deferred: Deferred,
    sync: bool = True,
    direct: bool = True,
) -> FileReceipt:
    """Writes one part file, publishes it, and returns its receipt.

    A file of the same content that another writer of this attempt published first is fine.

    Args:
        storage: Where to.
        file_plan: What to write.
        attempt: Id of the attempt, put into the key.
        source: Gives an item's bytes.
        deferred: Gives a deferred item's bytes.
        sync: Durable when the call returns.
        direct: Bypass the page cache if the storage can.

    Raises:
        StorageError: The storage refused.
        CheckpointExistsError: The key is taken by other bytes.
        InternalError: Plan and items contradict each other.
        Exception: Whatever `source` or `deferred` raised.

    Complexity:
        O(bytes); a small tensor costs about 2 us.
    """
    options = SaveOptions(sync_files=sync, direct_io=direct)
    return _write_file(storage, file_plan, attempt, source, deferred, options, Stop())


def _write_file(
    storage: Storage,
    plan: FilePlan,
    attempt: str,
    source: Source,
    deferred: Deferred,
    options: SaveOptions,
    stop: Stop,
) -> FileReceipt:
    key = plan.key.replace("{attempt}", attempt)
    writer: PartWriter | None = None
    try:
        writer = storage.open_writer(key, sync=options.sync_files, direct=options.direct_io)
        file = _File(writer, plan, key, stop)
        file.write_fixed(source)
        places = tuple(file.write_deferred(row, deferred) for row in plan.deferred.tolist())
        file.flush()
        receipt = file.receipt(places)
        file.commit(storage, receipt)
    except BaseException as exc:
        if writer is not None:
            writer.abort()
        if isinstance(exc, CheckpointError) and exc.key is None:
            exc.key = key
        raise
    return receipt


class _File:
    """A part file while it is written: where it ends, what is still to go out, its checksums."""

    def __init__(self, writer: PartWriter, plan: FilePlan, key: str, stop: Stop) -> None:
        self._writer = writer
        self._plan = plan
        self._key = key
        self._stop = stop
        self._pack: list[BytesLike] = []
        self._end = 0
        self._flushed = 0
        self._item_row = -1
        self._item = memoryview(b"")
        self._checks = array("Q")
        self._deferred_regions: list[Region] = []

    def write_fixed(self, source: Source) -> None:
        """Writes the header and all planned pieces."""
        self._append(self._plan.header)
        pieces = pieces_of(self._plan, self._key, small_bytes=_SMALL_BYTES, pack_bytes=_PACK_BYTES)
        for run in pieces.runs:
            if run.is_large:
                self._write_large(pieces, run.first, source)
            else:
                self._pack_small(pieces, run, source)
            if self._end - self._flushed >= _PACK_BYTES // 2:
                self.flush()
        self._append(bytes(pieces.last_gap))

    def write_deferred(self, row: int, deferred: Deferred) -> DeferredPlace:
        """Writes one deferred item at the next aligned place; returns that place."""
        data = self._checked(deferred(row), row)
        self._append(bytes(-self._end % _DEFERRED_ALIGNMENT))
        place = DeferredPlace(row, self._end, len(data), block_bytes_for(len(data)))
        self._deferred_regions.append(Region(self._end, len(data), place.block_bytes))
        self._write_payload(data, place.block_bytes)
        return place

    def flush(self) -> None:
        """Hands what is packed to the storage."""
        if self._stop.asked:
            raise SaveCancelledError(
                "writing this file was given up, because another one failed", key=self._key
            )
        if self._pack:
            # Why one part: a join would copy a deferred item once more.
            whole = self._pack[0] if len(self._pack) == 1 else b"".join(self._pack)
            self._pack = []
            if len(whole):
                self._writer.write(whole)
        self._flushed = self._end

    def receipt(self, places: tuple[DeferredPlace, ...]) -> FileReceipt:
        """Returns what is to be told of the finished file."""
        checks = np.array(self._checks, dtype=np.uint64)
        return FileReceipt(
            file=self._plan.file,
            key=self._key,
            num_bytes=self._end,
            digest=digest(checks),
            checks=checks,
            deferred=places,
        )

    def commit(self, storage: Storage, receipt: FileReceipt) -> None:
        """Publishes the file.

        Raises:
            CheckpointExistsError: Another file has its key.
            StorageError: The storage refused.
        """
        try:
            self._writer.commit()
        except KeyExistsError as exc:
            regions = [*self._fixed_regions(), *self._deferred_regions]
            if not same_file_is_published(storage, receipt, regions):
                raise CheckpointExistsError(
                    f"expected to publish {self._key} or to find the same bytes under it, but "
                    f"other bytes are there: two writers use one attempt id",
                    key=self._key,
                ) from exc

    def _pack_small(self, pieces: Pieces, run: Run, source: Source) -> None:
        """Packs pieces with their frames.

        Why all in one loop: this is the path of small tensors, and a call costs as much as what
        it would do.
        """
        which = slice(run.first, run.stop)
        add, add_check = self._pack.append, self._checks.append
        for item, row, start, num_bytes, block_bytes, gap, header, footer in zip(
            self._items(pieces.row[which], source),
            pieces.row[which],
            pieces.start[which],
            pieces.num_bytes[which],
            pieces.block_bytes[which],
            pieces.gap[which],
            pieces.header[which],
            pieces.footer[which],
            strict=True,
        ):
            payload = item
            if len(item) != num_bytes or start:
                payload = self._part_of(item, row, start, num_bytes)
            if 0 < num_bytes <= block_bytes:
                add_check(block_check(payload))
            else:
                self._checks.frombytes(block_checks(payload, block_bytes).tobytes())
            if gap:
                add(bytes(gap))
            add(header)
            add(payload)
            add(footer)
            self._end += gap + len(header) + num_bytes + len(footer)

    def _items(self, rows: Sequence[int], source: Source) -> Iterator[memoryview]:
        if isinstance(source, ManySource) and len(rows) > 1:
            return map(self._checked, source.many(rows), rows)
        return (self._item_of(row, source) for row in rows)

    def _item_of(self, row: int, source: Source) -> memoryview:
        """Returns an item's bytes; pieces of one item mostly follow each other."""
        if row != self._item_row:
            self._item_row, self._item = row, self._checked(source(row), row)
        return self._item

    def _write_large(self, pieces: Pieces, index: int, source: Source) -> None:
        row = pieces.row[index]
        item = self._item_of(row, source)
        payload = self._part_of(item, row, pieces.start[index], pieces.num_bytes[index])
        self._append(bytes(pieces.gap[index]))
        self._append(pieces.header[index])
        self._write_payload(payload, pieces.block_bytes[index])
        self._append(pieces.footer[index])

    def _part_of(self, item: memoryview, row: int, start: int, num_bytes: int) -> memoryview:
        part = item[start : start + num_bytes]
        if len(part) != num_bytes:
            raise contradiction(
                f"bytes [{start}, {start + num_bytes}) of row {row}",
                f"an item of {len(item)} bytes",
                self._key,
            )
        return part

    def _write_payload(self, payload: memoryview, block_bytes: int) -> None:
        if len(payload) <= _SMALL_BYTES:
            self._checks.frombytes(block_checks(payload, block_bytes).tobytes())
            self._append(payload)
            return
        self.flush()
        step = max(_SLICE_BYTES // block_bytes, 1) * block_bytes
        for start in range(0, len(payload), step):
            part = payload[start : start + step]
            self._checks.frombytes(block_checks(part, block_bytes).tobytes())
            self._writer.write(part)
            self._end += len(part)
            self.flush()

    def _append(self, data: BytesLike) -> None:
        self._pack.append(data)
        self._end += len(data)

    def _checked(self, data: BytesLike, row: int) -> memoryview:
        view = memoryview(data)
        if view.ndim != 1 or view.itemsize != 1 or not view.c_contiguous:
            raise contradiction(
                f"flat bytes of row {row}",
                f"{view.ndim} dimensions of {view.itemsize} bytes",
                self._key,
            )
        return view

    def _fixed_regions(self) -> list[Region]:
        plan = self._plan
        columns = (plan.payload_offset, plan.payload_bytes, plan.block_bytes)
        return [Region(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]
