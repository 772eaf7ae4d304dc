"""Writes part files as a plan says: frames, payloads and deferred items, checksums on the way.

Small tensors are packed with their frames into a joined buffer; large ones are hashed and
written slice by slice, while a slice is still in the processor's cache. Reading back is in
`reader`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from ray_dcp.errors import CheckpointError, CheckpointExistsError, SaveCancelledError
from ray_dcp.format.checksums import block_bytes_for, block_check, block_checks, digest
from ray_dcp.format.end_checks import end_checks
from ray_dcp.options import SaveOptions
from ray_dcp.plan.values import FilePlan, RankPlan, UInt64Array
from ray_dcp.protocol.messages import DeferredPlace, FileReceipt
from ray_dcp.store.storage import KeyExistsError, PartWriter, Storage
from ray_dcp.transfer.pieces import Pieces, Run, contradiction, pieces_of
from ray_dcp.transfer.published import Region, same_file_is_published
from ray_dcp.transfer.sources import (
    BytesLike,
    Deferred,
    ItemPieces,
    ManySource,
    PieceSource,
    Source,
)
from ray_dcp.transfer.threads import Stop, run_tasks

__all__ = [
    "BytesLike",
    "Deferred",
    "ManySource",
    "PieceSource",
    "Source",
    "part_key",
    "write_file",
    "write_part",
    "write_pieces",
]

_PACK_BYTES = 2 << 20
"""Small tensors are joined up to this length before they go to the storage."""
_SMALL_BYTES = 128 << 10
"""Payloads up to this length are joined with others."""
_SLICE_BYTES = 8 << 20
"""A large payload is hashed and written in slices of about this length, on block bounds."""
_DEFERRED_ALIGNMENT = 64
_NO_CHECKS: UInt64Array = np.zeros(0, dtype=np.uint64)


def part_key(plan: FilePlan, attempt: str) -> str:
    """Returns the key of a part file.

    Args:
        plan: Of the file.
        attempt: Id of the attempt that writes it.
    """
    return plan.key.replace("{attempt}", attempt)


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


def write_pieces(
    storage: Storage,
    file_plan: FilePlan,
    attempt: str,
    source: PieceSource,
    *,
    options: SaveOptions,
) -> FileReceipt:
    """Writes one part file from staged pieces, publishes it, and returns its receipt.

    Args:
        storage: Where to.
        file_plan: What to write.
        attempt: Id of the attempt, put into the key.
        source: Gives the bytes; may wait for them.
        options: `sync_files` and `direct_io` count.

    Raises:
        CheckpointError: As `write_file`.
        Exception: Whatever `source` raised.
    """
    return _write(storage, file_plan, attempt, lambda key: source, options, Stop())


def _write_file(
    storage: Storage,
    plan: FilePlan,
    attempt: str,
    source: Source,
    deferred: Deferred,
    options: SaveOptions,
    stop: Stop,
) -> FileReceipt:
    def pieces(key: str) -> PieceSource:
        return ItemPieces(plan, key, source, deferred)

    return _write(storage, plan, attempt, pieces, options, stop)


def _write(
    storage: Storage,
    plan: FilePlan,
    attempt: str,
    pieces: Callable[[str], PieceSource],
    options: SaveOptions,
    stop: Stop,
) -> FileReceipt:
    key = part_key(plan, attempt)
    writer: PartWriter | None = None
    try:
        writer = storage.open_writer(key, sync=options.sync_files, direct=options.direct_io)
        file = _File(writer, plan, key, pieces(key), stop)
        file.write_fixed()
        places = tuple(file.write_deferred(index) for index in range(len(plan.deferred)))
        receipt = file.finish(places)
        file.commit(storage, receipt)
    except BaseException as exc:
        if writer is not None:
            writer.abort()
        if isinstance(exc, CheckpointError) and exc.key is None:
            exc.key = key
        raise
    # Why not before: what somebody else published is compared with them.
    return replace(receipt, checks=_NO_CHECKS) if plan.checks_at_end else receipt


class _File:
    """A part file while it is written: where it ends, what is still to go out, its checksums."""

    def __init__(
        self, writer: PartWriter, plan: FilePlan, key: str, source: PieceSource, stop: Stop
    ) -> None:
        self._writer = writer
        self._plan = plan
        self._key = key
        self._source = source
        # Why: an upload sends a tensor from where it lies, if that stays as it is.
        lend = getattr(writer, "lend", None) if source.keeps else None
        self._give: Callable[[BytesLike], None] = lend or writer.write
        self._stop = stop
        self._pack: list[BytesLike] = []
        self._end = 0
        self._flushed = 0
        self._checks = array("Q")
        self._deferred_regions: list[Region] = []

    def write_fixed(self) -> None:
        """Writes the header and all planned pieces."""
        self._append(self._plan.header)
        pieces = pieces_of(self._plan, self._key, small_bytes=_SMALL_BYTES, pack_bytes=_PACK_BYTES)
        for run in pieces.runs:
            if run.is_large:
                self._write_large(pieces, run.first)
            else:
                self._pack_small(pieces, run)
            if self._end - self._flushed >= _PACK_BYTES // 2:
                self.flush()
        self._append(bytes(pieces.last_gap))

    def write_deferred(self, index: int) -> DeferredPlace:
        """Writes one deferred item at the next aligned place; returns that place."""
        piece = len(self._plan.row) + index
        num_bytes = self._source.num_bytes(piece)
        self._append(bytes(-self._end % _DEFERRED_ALIGNMENT))
        row = int(self._plan.deferred[index])
        place = DeferredPlace(row, self._end, num_bytes, block_bytes_for(num_bytes))
        self._deferred_regions.append(Region(self._end, num_bytes, place.block_bytes))
        self._write_payload(self._source.parts(piece), num_bytes, place.block_bytes)
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
                self._give(whole)
        self._flushed = self._end
        self._source.written(self._end)

    def finish(self, places: tuple[DeferredPlace, ...]) -> FileReceipt:
        """Hands on all that is left of the file; returns what is to be told of it."""
        checks = np.array(self._checks, dtype=np.uint64)
        if self._plan.checks_at_end:
            self._append(end_checks(self._end, checks))
        self.flush()
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
            at_end = self._plan.checks_at_end
            if not same_file_is_published(storage, receipt, regions, checks_at_end=at_end):
                raise CheckpointExistsError(
                    f"expected to publish {self._key} or to find the same bytes under it, but "
                    f"other bytes are there: two writers use one attempt id",
                    key=self._key,
                ) from exc

    def _pack_small(self, pieces: Pieces, run: Run) -> None:
        """Packs pieces with their frames.

        Why all in one loop: this is the path of small tensors, and a call costs as much as what
        it would do.
        """
        which = slice(run.first, run.stop)
        add, add_check = self._pack.append, self._checks.append
        for payload, num_bytes, block_bytes, gap, header, footer in zip(
            self._source.small(run.first, run.stop),
            pieces.num_bytes[which],
            pieces.block_bytes[which],
            pieces.gap[which],
            pieces.header[which],
            pieces.footer[which],
            strict=True,
        ):
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

    def _write_large(self, pieces: Pieces, index: int) -> None:
        self._append(bytes(pieces.gap[index]))
        self._append(pieces.header[index])
        parts = self._source.parts(index)
        self._write_payload(parts, pieces.num_bytes[index], pieces.block_bytes[index])
        self._append(pieces.footer[index])

    def _write_payload(self, parts: Iterable[memoryview], num_bytes: int, block_bytes: int) -> None:
        if num_bytes <= _SMALL_BYTES:
            for payload in parts:
                self._checks.frombytes(block_checks(payload, block_bytes).tobytes())
                self._append(payload)
            return
        self.flush()
        end = self._end + num_bytes
        step = max(_SLICE_BYTES // block_bytes, 1) * block_bytes
        for payload in parts:
            for start in range(0, len(payload), step):
                part = payload[start : start + step]
                self._checks.frombytes(block_checks(part, block_bytes).tobytes())
                self._give(part)
                self._end += len(part)
                self.flush()
        if self._end != end:
            raise contradiction(f"a piece up to byte {end}", f"one up to {self._end}", self._key)

    def _append(self, data: BytesLike) -> None:
        self._pack.append(data)
        self._end += len(data)

    def _fixed_regions(self) -> list[Region]:
        plan = self._plan
        columns = (plan.payload_offset, plan.payload_bytes, plan.block_bytes)
        return [Region(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]
