"""Fills planned targets from a storage in the caller's thread, for readers that DCP calls."""

from __future__ import annotations

from functools import partial

from ray_dcp.options import LoadOptions
from ray_dcp.plan.reading import plan_reads
from ray_dcp.seam.targets import ObjectTaker, Targets
from ray_dcp.store.storage import Storage
from ray_dcp.transfer.blocks import naming
from ray_dcp.transfer.checkpoint import Checkpoint
from ray_dcp.transfer.reader import read_chunks, read_item

__all__ = ["fill"]


def fill(storage: Storage, checkpoint: Checkpoint, targets: Targets, options: LoadOptions) -> None:
    """Puts everything that is wanted into place.

    Args:
        storage: Where the checkpoint is.
        checkpoint: What is stored.
        targets: What is wanted.
        options: How to read.

    Raises:
        CoverageError: The checkpoint lacks a part; nothing was touched.
        DamagedCheckpointError: Stored bytes are not what was committed.
        StorageError: A file can't be read.
    """
    table = checkpoint.table
    read_plan = plan_reads(table, targets.wanted)
    targets.check_coverage(read_plan)
    stats = read_chunks(storage, table, read_plan, targets.wanted, targets.sink, options=options)
    transforms = None if checkpoint.foreign is None else checkpoint.foreign.transforms
    opaque: list[tuple[int, ObjectTaker]] = [
        (chunk, partial(targets.place_item, chunk)) for chunk in stats.opaque
    ]
    for chunk, take in (*opaque, *targets.objects):
        data = read_item(storage, table, chunk, verify=options.verify, transforms=transforms)
        with naming(table, chunk):
            take(data)
    targets.finish()
