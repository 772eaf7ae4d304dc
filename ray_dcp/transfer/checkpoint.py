"""`Checkpoint`: one that stands, and where all its chunks are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ray_dcp.format.manifest import Manifest
from ray_dcp.format.metadata_in import ForeignMetadata
from ray_dcp.plan.values import ChunkTable
from ray_dcp.transfer.check_file import CheckFile
from ray_dcp.transfer.reader import Transforms

__all__ = ["Checkpoint", "CheckpointKind"]

CheckpointKind = Literal["native", "stock", "safetensors"]


@dataclass(frozen=True, eq=False)
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
    table: ChunkTable
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
        if self.check_file is None:
            return
        if chunks is None:
            self.check_file.read(range(len(self.table.files)))
        else:
            self.check_file.read(self.table.file[[*chunks]].tolist())
