"""`Checkpoint`: one that stands, and where all its chunks are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ray_dcp.format.manifest import Manifest
from ray_dcp.format.metadata_in import ForeignMetadata
from ray_dcp.plan.reading import Wanted
from ray_dcp.plan.values import ChunkTable
from ray_dcp.transfer.check_file import CheckFile
from ray_dcp.transfer.reader import Transforms
from ray_dcp.transfer.table_parts import TableParts

__all__ = ["Checkpoint", "CheckpointKind"]

CheckpointKind = Literal["native", "stock", "safetensors"]


def _at_once(read: Callable[[], CheckFile]) -> CheckFile:
    # Why no lambda: views are pickled, and Checkpoints with them.
    return read()


@dataclass(eq=False)
class Checkpoint:
    """A checkpoint that stands, and where all its chunks are."""

    kind: CheckpointKind
    """`native`: ours. `stock`: DCP's `.metadata`. `safetensors`: plain files."""
    checkpoint_id: str
    """Path or URL, for messages."""
    slot: int
    """Slot of the manifest; 0 for a checkpoint that is not ours."""
    record: bytes
    """The manifest, or the foreign `.metadata`, as on storage; empty for plain files."""
    chunks: ChunkTable | TableParts = field(repr=False)
    """All of them, or of a large checkpoint what reads those that are needed."""
    attempt: str | None = None
    """The attempt that committed it; None for a checkpoint that is not ours."""
    manifest: Manifest | None = None
    """None for a checkpoint that is not ours."""
    foreign: ForeignMetadata | None = None
    """What the `.metadata` says; None for all but `stock`."""
    metadata_is_stale: bool = False
    """`.metadata` should project this manifest, but is missing or older: publish it again."""
    check_file: CheckFile | None = None
    """Where checksums that the table lacks are read from, file by file; None: it has them all."""
    in_time: Callable[[Callable[[], CheckFile]], CheckFile] = field(default=_at_once, repr=False)
    """Calls what reads chunks, under a deadline."""

    @property
    def tensors(self) -> ChunkTable:
        """The tensors, maybe without the chunks: no chunk is read for it."""
        return self.chunks.tensors if isinstance(self.chunks, TableParts) else self.chunks

    @property
    def table(self) -> ChunkTable:
        """The chunks: those that `narrow` left, else all, which are read now if they were not yet.

        Raises:
            DamagedCheckpointError: They are damaged or missing.
            StorageError: They can't be read.
        """
        if isinstance(self.chunks, TableParts):
            return self._take(self.chunks.whole)
        return self.chunks

    def narrow(self, wanted: Sequence[Wanted], tensors: Sequence[int]) -> ChunkTable:
        """Leaves out chunks that are not needed, where that spares reading them; returns the rest.

        Args:
            wanted: Boxes that are needed.
            tensors: Of which every chunk is needed.

        Raises:
            CheckpointError: As for `table`.
        """
        parts = self.chunks
        if isinstance(parts, TableParts):
            return self._take(lambda: parts.around(wanted, tensors))
        return parts

    @property
    def transforms(self) -> Transforms:
        """What its stored items went through, for `reader`."""
        return None if self.foreign is None else self.foreign.transforms

    def know_checks(self, chunks: Iterable[int] | None = None) -> None:
        """Reads the checksums of some chunks, or of all, where the table lacks them still.

        Raises:
            DamagedCheckpointError: They are not those of which the manifest has the digest.
            StorageError: They can't be read.
        """
        table = self.table
        if self.check_file is None:
            return
        if chunks is None:
            self.check_file.read(range(len(table.files)))
        else:
            self.check_file.read(table.file[[*chunks]].tolist())

    def _take(self, read: Callable[[], CheckFile]) -> ChunkTable:
        self.check_file = self.in_time(read)
        self.chunks = self.check_file.table
        return self.chunks
