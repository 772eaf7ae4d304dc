"""Numbers of the pairs of a read as lists, for the loops that look at every small pair.

Pure: which pairs can take the shortest way is decided here, `filling` does it.
"""

from __future__ import annotations

import numpy as np

from ray_dcp.plan.grouping import group_rows
from ray_dcp.plan.values import ChunkTable, Int64Array
from ray_dcp.transfer.jobs import Geometry

__all__ = ["PairNumbers"]


class PairNumbers:
    """Columns of the pairs as lists: indexing numpy arrays costs 10 times more.

    Attributes:
        whole: All bytes of a chunk go to all bytes of a target.
        simple: And no other chunk or target needs them, they are verified at once as one block or
            not at all, and where they are is known.
        likeness: Equal for items of one length with equal tensors in them; for unparsed pairs.
        unparsed: As in `Geometry`.
        straight: The bytes are contiguous in chunk and target.
        first_check: The checksum of the first block that is read.
        block_bytes: Length of a block; 0 when nothing is to be verified.
        file: Index of the file.
        place: Where the chunk's raw bytes start in the file; meaningless if unparsed.
        payload_bytes: Length of the chunk's raw bytes.
        read_low: First byte to read, chunk-local.
        read_start: The same, in the file.
        read_bytes: How many to read.
        chunk_start: First byte needed, in the file.
        chunk_low: The same, chunk-local.
        target_low: First byte filled of the target.
        num_bytes: Bytes of the common part.
        item_low: Where the item starts in the file.
        item_bytes: Length of the item.
    """

    def __init__(
        self, geo: Geometry, table: ChunkTable, lengths: Int64Array, parts: Int64Array
    ) -> None:
        pairs, chunk, row = geo.bytes, geo.plan.chunk, geo.plan.wanted
        block = np.maximum(geo.block_bytes, 1)
        check = table.check_start[chunk] + pairs.read_low // block
        last = max(len(table.checks) - 1, 0)
        checks = table.checks if len(table.checks) else np.zeros(1, np.uint64)
        straight = pairs.chunk_contiguous & pairs.target_contiguous
        whole = (
            straight & (pairs.num_bytes == lengths[row]) & (pairs.num_bytes == geo.payload_bytes)
        )
        alone = (parts[row] == 1) & (np.bincount(chunk, minlength=1)[chunk] == 1)
        at_once = (geo.block_bytes == 0) | (geo.payload_bytes <= geo.block_bytes)
        self.first_check: list[int] = checks[np.minimum(check, last)].tolist()
        self.block_bytes: list[int] = geo.block_bytes.tolist()
        self.file: list[int] = geo.file.tolist()
        self.place: list[int] = geo.place.tolist()
        self.payload_bytes: list[int] = geo.payload_bytes.tolist()
        self.read_low: list[int] = pairs.read_low.tolist()
        self.read_start: list[int] = (geo.place + pairs.read_low).tolist()
        self.read_bytes: list[int] = (pairs.read_high - pairs.read_low).tolist()
        self.chunk_start: list[int] = (geo.place + pairs.chunk_low).tolist()
        self.chunk_low: list[int] = pairs.chunk_low.tolist()
        self.target_low: list[int] = pairs.target_low.tolist()
        self.num_bytes: list[int] = pairs.num_bytes.tolist()
        self.unparsed: list[bool] = geo.unparsed.tolist()
        self.straight: list[bool] = straight.tolist()
        self.whole: list[bool] = whole.tolist()
        self.simple: list[bool] = (whole & alone & at_once & ~geo.unparsed).tolist()
        self.item_low: list[int] = geo.item_low.tolist()
        self.item_bytes: list[int] = (geo.item_high - geo.item_low).tolist()
        self.likeness: list[int] = _likeness(geo, table).tolist() if geo.unparsed.any() else []


def _likeness(geo: Geometry, table: ChunkTable) -> Int64Array:
    tensor = table.tensor[geo.plan.chunk]
    columns = [geo.item_high - geo.item_low, table.dtype[tensor], table.ndim[tensor]]
    return group_rows([*columns, *geo.chunk_size.T])[1]
