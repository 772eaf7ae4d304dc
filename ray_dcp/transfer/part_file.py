"""One part file on its way to the storage: frames, payloads, deferred items, checksums.

Who opens it and what becomes of the receipt is in `writer`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from ray_dcp.errors import CheckpointExistsError, SaveCancelledError
from ray_dcp.format.checksums import block_bytes_for, block_check, block_checks, digest
from ray_dcp.format.end_checks import end_checks
from ray_dcp.plan.values import FilePlan
from ray_dcp.protocol.messages import DeferredPlace, FileReceipt
from ray_dcp.store.storage import KeyExistsError, PartWriter, Storage
from ray_dcp.transfer.pieces import Pieces, Run, contradiction, pieces_of
from ray_dcp.transfer.published import Region, same_file_is_published
from ray_dcp.transfer.sources import BytesLike, PieceSource
from ray_dcp.transfer.threads import Stop

__all__ = ["PartFile"]

_PACK_BYTES = 2 << 20
"""Small tensors are joined up to this length before they go to the storage."""
_SMALL_BYTES = 128 << 10
"""Payloads up to this length are joined with others."""
_SLICE_BYTES = 8 << 20
"""A large payload is hashed and written in slices of about this length, on block bounds."""
_DEFERRED_ALIGNMENT = 64


class PartFile:
    """A part file while it is written: where it ends, what is still to go out, its checksums.

    Args:
        writer: Of the storage.
        plan: What is written.
        key: Of the file.
        source: Gives the bytes.
        stop: Tells that it is given up.
    """

    def __init__(
        self,
        writer: PartWriter,
        plan: FilePlan,
        key: str,
        source: PieceSource,
        stop: Stop,
    ) -> None:
        self._writer = writer
        self._plan = plan
        self._key = key
        self._source = source
        source.before_wait = self.flush
        self._stop = stop
        self._pack: list[BytesLike] = []
        self._end = 0
        self._flushed = 0
        self._checks = array("Q")
        self._deferred_regions: list[Region] = []

    def write(self) -> FileReceipt:
        """Writes all of the file; returns what is to be told of it."""
        self._write_fixed()
        places = [self._write_deferred(index) for index in range(len(self._plan.deferred))]
        return self._finish(tuple(places))

    def _write_fixed(self) -> None:
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

    def _write_deferred(self, index: int) -> DeferredPlace:
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
            self._pack.clear()
            if len(whole):
                self._writer.write(whole)
        self._flushed = self._end
        self._source.written(self._end)

    def _finish(self, places: tuple[DeferredPlace, ...]) -> FileReceipt:
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
                self._writer.write(part)
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
