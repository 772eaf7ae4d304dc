"""What a rank spends on learning where its bytes are, when it loads from a job of many ranks.

The checkpoint is that of a simulated save, as in `plan`; the rank wants what one of its ranks held,
or two neighbours. `whole` is the same with every chunk of the table, as views and planners of one's
own need it.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ray_dcp.core.values import Columns, Kind
from ray_dcp.io.checkpoint import Checkpoint, checkpoint_from, newest_record
from ray_dcp.options import SaveOptions
from ray_dcp.planning.reads import Wanted, plan_reads
from ray_dcp.runtime.rank_save import PlanMemory


def wanted_of(columns: Columns, checkpoint: Checkpoint) -> tuple[Wanted, list[int]]:
    """Returns the boxes and objects of a rank by their numbers in a checkpoint."""
    number = {name: row for row, name in enumerate(checkpoint.tensors.names)}
    rows = np.array([number[columns.names[name]] for name in columns.name.tolist()], np.int32)
    box = columns.kind == Kind.TENSOR
    boxes = Wanted(rows[box], columns.offset[box], columns.size[box], np.full(int(box.sum()), 4))
    return boxes, rows[~box].tolist()


def measure(world_size: int, tensors: int, layout: str, whole: bool) -> dict[str, Any]:
    """Saves, and opens the checkpoint as a rank does; returns what that cost."""
    from tests.bench import plan

    class Counting(plan.Written):
        """Counts what is read of the chunk table and its second file."""

        num_bytes = 0

        def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
            data = super().read(key, start, num_bytes)
            Counting.num_bytes += len(data) * key.startswith("chunks.")
            return data

    storage = Counting("bench")
    columns = list(plan.held(world_size, tensors, layout))
    memories = [PlanMemory() for _ in range(world_size)]
    options = SaveOptions(stock_metadata=False)
    counted = plan.Counted(storage)
    plan.save(counted, 0, world_size, columns.__getitem__, memories, options)
    own = columns[world_size // 2]
    del columns, memories, counted
    committed = newest_record(storage)
    if committed is None:
        raise AssertionError("nothing was committed")
    spent = []
    for _ in range(3):
        Counting.num_bytes = 0
        began_s = time.process_time()
        checkpoint = checkpoint_from(
            storage, "native", committed.slot, committed.data, checks_later=True
        )
        opened_s = time.process_time()
        boxes, objects = wanted_of(own, checkpoint)
        table = checkpoint.table if whole else checkpoint.narrow([boxes], objects)
        narrowed_s = time.process_time()
        reads = plan_reads(table, boxes)
        planned_s = time.process_time()
        if reads.uncovered or len(reads) < len(boxes):
            raise AssertionError("not all that is wanted was found")
        spent.append((planned_s - began_s, opened_s - began_s, narrowed_s - opened_s))
    total_s, open_s, narrow_s = sorted(spent)[1]
    return {
        "cpu_s": total_s, "open_s": open_s, "narrow_s": narrow_s,
        "record_bytes": len(committed.data), "bytes": Counting.num_bytes,
        "chunks": table.num_chunks, "all": checkpoint.manifest and checkpoint.manifest.num_chunks,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }  # fmt: skip


def print_table(cases: Sequence[tuple[int, int, str]]) -> None:
    """Prints what a rank spends on the chunk table, of its part and of all of it.

    Args:
        cases: Ranks, tensors of each, and how these lie.
    """
    from tests.bench import plan

    print("\na rank that loads, until it knows what to read (CPU of the rank):")
    print(f"{'ranks':>6} {'tensors':>7} {'layout':>9} {'table':>6} {'CPU s':>7} {'of them':>9}")
    for world, count, layout in cases:
        for whole in (False, True):
            found = plan.measured(measure, world, count, layout, whole)
            print(
                f"{world:>6} {count:>7} {layout:>9} {'whole' if whole else 'part':>6} "
                f"{found['cpu_s']:>7.3f} opening {found['open_s']:.3f}, chunks "
                f"{found['narrow_s']:.3f}; {found['chunks']:,} of {found['all']:,} chunks, "
                f"{found['bytes'] / 1e6:.2f} MB read, manifest {found['record_bytes'] / 1e6:.2f} MB"
            )
