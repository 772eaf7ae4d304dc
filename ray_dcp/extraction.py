"""What conversions read of a checkpoint: what is stored, and the tensors, part by part.

Whoever wants to be told how far it is gets several loads of one checkpoint instead of one load;
that it was one and the same is looked at in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.storage import StorageReader

from ray_dcp.entrypoints import load
from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.operations import CheckpointId
from ray_dcp.options import LoadOptions
from ray_dcp.seam.decision import FOREIGN
from ray_dcp.seam.paths import decide_load
from ray_dcp.seam.stored import Stored, stored_in_metadata, stored_in_table
from ray_dcp.store.opening import open_storage
from ray_dcp.store.watching import Told
from ray_dcp.transfer.opening import find_checkpoint, read_checkpoint

__all__ = ["Progress", "Told", "bytes_of", "check_stands", "read_into", "stored_in"]

_PART_BYTES = 1 << 30
"""Whoever wants to be told how far it is, is told after each load of so much."""


def stored_in(
    checkpoint_id: CheckpointId | None, reader: StorageReader | None
) -> tuple[list[Stored], bytes]:
    """Returns what is stored, and the record of the checkpoint; of a third party's, no record.

    Args:
        checkpoint_id: As for `load`.
        reader: `storage_reader`, as for `load`.

    Raises:
        CheckpointError: As `load` does.
    """
    decision = decide_load(None, reader, checkpoint_id)
    if decision.path != FOREIGN and decision.target is not None:
        checkpoint = read_checkpoint(open_storage(decision.target), checks_later=True)
        return stored_in_table(checkpoint.table), checkpoint.record
    if checkpoint_id is not None:
        decision.storage.reset(checkpoint_id)
    return stored_in_metadata(decision.storage.read_metadata()), b""


def check_stands(checkpoint_id: CheckpointId, record: bytes) -> None:
    """Checks that the loads of a conversion were all of one checkpoint: each opens it anew.

    Args:
        checkpoint_id: Of which was read.
        record: What `stored_in` told.

    Raises:
        DamagedCheckpointError: It was replaced meanwhile.
    """
    if record and find_checkpoint(open_storage(checkpoint_id)).record != record:
        raise DamagedCheckpointError(
            f"expected the checkpoint that was in {checkpoint_id} at first, found another one: it "
            f"was replaced meanwhile, and nothing was written; run it again"
        )


class Progress:
    """Adds up what was read, for one who wants to be told.

    Args:
        told: Is called with bytes read and in all; None if nobody wants to know.
        tensors: Everything that will be read.
    """

    def __init__(self, told: Told | None, tensors: Iterable[Stored | torch.Tensor]) -> None:
        self.told = told
        self._done, self._total = 0, sum(map(bytes_of, tensors))

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tells that these were read, too."""
        self._done += sum(map(bytes_of, tensors))
        if self.told is not None:
            self.told(self._done, self._total)


def read_into(
    flat: dict[str, Any],
    checkpoint_id: CheckpointId | None,
    reader: StorageReader | None,
    options: LoadOptions | None,
    progress: Progress | None = None,
) -> None:
    """Loads into tensors, in place, and into a dict, whose objects are replaced.

    Args:
        flat: By FQN.
        checkpoint_id: As for `load`.
        reader: `storage_reader`, as for `load`.
        options: As for `load`.
        progress: Is told about each part; what is loaded with it is tensors alone.

    Raises:
        CheckpointError: As `load` does.
    """
    if progress is not None and progress.told is not None:
        for part in _parts(flat):
            read_into(part, checkpoint_id, reader, options)
            progress.add(part.values())
        return
    options = options or LoadOptions()
    if any(isinstance(value, torch.Tensor) for value in flat.values()) and options.dtype != "keep":
        # Why: what differs was asked for.
        options = replace(options, dtype="cast")
    load(
        flat, checkpoint_id=checkpoint_id, storage_reader=reader, no_dist=True, options=options
    )  # fmt: skip


def _parts(flat: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    part: dict[str, Any] = {}
    num_bytes = 0
    for name, tensor in flat.items():
        part[name] = tensor
        num_bytes += bytes_of(tensor)
        if num_bytes >= _PART_BYTES:
            yield part
            part, num_bytes = {}, 0
    if part:
        yield part


def bytes_of(stored: Stored | torch.Tensor) -> int:
    """Returns the length of a tensor, in bytes."""
    return prod(stored.shape) * (stored.dtype or torch.uint8).itemsize
