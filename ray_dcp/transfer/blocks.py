"""Verifies blocks that were read against the chunk table, and says which bytes are damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray_dcp.errors import CheckpointError, DamagedCheckpointError, StorageError
from ray_dcp.format.checksums import first_bad_block, num_blocks
from ray_dcp.options import Verify
from ray_dcp.plan.values import ChunkTable
from ray_dcp.store.storage import KeyMissingError, Storage

__all__ = ["BlockVerifier", "naming", "read_stored"]

_SAMPLED = 16
"""`verify="sample"` checks every 16th of the blocks read of a chunk, beginning with the first."""


class BlockVerifier:
    """Checks bytes of chunks against their block checksums.

    Args:
        table: Where the checksums are.
        verify: Which blocks to check.
        checkpoint_id: For messages.
    """

    def __init__(self, table: ChunkTable, verify: Verify, checkpoint_id: str) -> None:
        self._table = table
        self._verify = verify
        self._checkpoint_id = checkpoint_id

    def check(self, chunk: int, low: int, view: memoryview, anchor: int = 0) -> int:
        """Checks bytes that begin on a block bound, and end on one or at the chunk's end.

        Args:
            chunk: Row of the chunk table.
            low: First byte, chunk-local.
            view: The bytes.
            anchor: First byte of the read that this is a part of, for sampling.

        Returns:
            How many blocks were checked.

        Raises:
            DamagedCheckpointError: A block does not match.
        """
        table = self._table
        block_bytes = int(table.block_bytes[chunk])
        if block_bytes == 0 or self._verify == "never" or len(view) == 0:
            return 0
        first = low // block_bytes
        start = int(table.check_start[chunk]) + first
        count = num_blocks(len(view), block_bytes)
        if self._verify == "sample":
            skip = (anchor // block_bytes - first) % _SAMPLED
            sampled = range(skip, count, _SAMPLED)
            for block in sampled:
                part = view[block * block_bytes : (block + 1) * block_bytes]
                check = table.checks[start + block : start + block + 1]
                if first_bad_block(part, block_bytes, check) is not None:
                    raise self.damaged(chunk, first + block)
            return len(sampled)
        bad = first_bad_block(view, block_bytes, table.checks[start : start + count])
        if bad is not None:
            raise self.damaged(chunk, first + bad)
        return count

    def damaged(self, chunk: int, block: int) -> DamagedCheckpointError:
        """Returns the error that says which bytes of which tensor and file are wrong."""
        table = self._table
        block_bytes = int(table.block_bytes[chunk])
        length = int(table.payload_bytes[chunk])
        start = int(table.payload_offset[chunk])
        low, high = block * block_bytes, min((block + 1) * block_bytes, length)
        name, file = table.names[table.tensor[chunk]], table.files[table.file[chunk]]
        return DamagedCheckpointError(
            f"{name!r} is damaged: bytes [{start + low}, {start + high}) of {file} (bytes "
            f"[{low}, {high}) of the chunk's {length}) do not match their checksum; load an "
            f"earlier step",
            checkpoint_id=self._checkpoint_id,
            key=file,
        )


@contextmanager
def naming(table: ChunkTable, chunk: int) -> Iterator[None]:
    """Adds to an error about an item whose it is and where it lies, if it does not say so."""
    try:
        yield
    except CheckpointError as error:
        name, file = table.names[table.tensor[chunk]], table.files[table.file[chunk]]
        if file not in (error.key or "") and file not in error.message:
            start = int(table.item_offset[chunk])
            stop = start + int(table.item_bytes[chunk])
            error.message = f"{name!r} in bytes [{start}, {stop}) of {file}: {error.message}"
        raise


def read_stored(storage: Storage, key: str, start: int, view: memoryview) -> None:
    """Fills `view` from a file that the checkpoint refers to.

    Raises:
        DamagedCheckpointError: The file is gone or too short.
        StorageError: It can't be read.
    """
    try:
        storage.read_into(key, start, view)
    except KeyMissingError as exc:
        raise DamagedCheckpointError(
            f"the checkpoint refers to {key}, but there is no such file; load an earlier step",
            checkpoint_id=storage.url,
            key=key,
        ) from exc
    except StorageError as exc:
        found = next((e.num_bytes for e in storage.list(key) if e.key == key), None)
        if found is None or found >= start + len(view):
            raise
        raise DamagedCheckpointError(
            f"expected bytes [{start}, {start + len(view)}) in {key}, but it was cut off after "
            f"{found} bytes; load an earlier step",
            checkpoint_id=storage.url,
            key=key,
        ) from exc
