"""Makes a plan of what the ranks sent, and of what follows of it for those that sent nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ray_dcp.errors import RankDisagreementError
from ray_dcp.plan import global_plan
from ray_dcp.plan.columns import decode
from ray_dcp.plan.contents import with_contents
from ray_dcp.plan.fingerprint import Fingerprints, fingerprint
from ray_dcp.plan.global_plan import MIN_WRITER_BYTES, make_plan
from ray_dcp.plan.rank_plan import RankPlans, rank_plan
from ray_dcp.plan.regular import infer
from ray_dcp.plan.structural import make_structural_plan
from ray_dcp.plan.structural_plan import StructuralPlan
from ray_dcp.plan.values import Columns
from ray_dcp.protocol.commands import MakePlan, Planned, RowsMissing
from ray_dcp.protocol.planning import differences

__all__ = ["plan_of"]


def plan_of(task: MakePlan) -> Planned | RowsMissing:
    """Returns what a task of this kind asks for.

    Raises:
        CheckpointError: The ranks' items make no checkpoint, or are not what they were said to be.
    """
    held = _sent(task)
    structural = _structural(task, held)
    if structural is not None:
        return Planned(structural, RankPlans(structural))
    absent = [rank for rank in range(len(task.columns)) if rank not in held]
    if absent:
        held.update(_derived(task, held, absent))
    missing = tuple(rank for rank in absent if rank not in held)
    if missing:
        return RowsMissing(missing)
    columns = [held[rank] for rank in range(len(task.columns))]
    if task.fingerprints:
        columns = [
            with_contents(own, told, rank)
            for rank, (own, told) in enumerate(zip(columns, task.contents, strict=True))
        ]
    plan = make_plan(
        columns,
        container=task.container,
        part_bytes=task.part_bytes,
        min_writer_bytes=MIN_WRITER_BYTES,
        to_lowest_rank=task.to_lowest_rank,
        nodes=task.nodes,
        files_per_node=task.files_per_node,
        joins=task.joins,
        checked=True,
    )
    parts = tuple(rank_plan(plan, rank) for rank in range(plan.world_size))
    return Planned(plan, parts, disagreements=differences(plan.disagreements))


def _sent(task: MakePlan) -> dict[int, Columns]:
    """Returns what the ranks hold whose rows are known; those that hold the same share it."""
    known: dict[bytes, Columns] = {}
    found = {}
    for rank, encoded in enumerate(task.columns):
        name = task.fingerprints[rank] if task.fingerprints else b""
        if name and not encoded:
            continue
        columns = known.get(name) if name else None
        if columns is None:
            columns = known[name] = decode(encoded)
            if name and _fingerprint(columns, task) != name:
                raise RankDisagreementError(
                    f"expected the items of rank {rank} to have the fingerprint that it sent, but "
                    f"they have another one: run the same version of ray_dcp on all ranks",
                    rank=rank,
                )
        found[rank] = columns
    return found


def _structural(task: MakePlan, held: Mapping[int, Columns]) -> StructuralPlan | None:
    """Returns the plan of a regular layout of many chunks; None where it is none.

    Whether the rows were sent or follow makes no difference: the same ranks have the same plan.
    """
    world_size = len(task.columns)
    usual = task.container == "torch_save" and not task.to_lowest_rank and bool(task.fingerprints)
    # Why not with a bound: files of several ranks are like no other rank's.
    usual &= task.files_per_node is None
    if not usual or 0 not in held or len(set(task.contents)) > 1:
        return None
    if world_size * len(held[0]) < global_plan.CHECKS_AT_END_CHUNKS:
        return None
    regular = infer(held, world_size)
    if regular is None:
        return None
    names = _names(task, regular.first)
    sizes = np.zeros(world_size, dtype=np.int32)
    first_of: dict[bytes, int] = {}
    for rank, name in enumerate(task.fingerprints):
        offset, size = regular.boxes(rank)
        if names.of_boxes(offset, size) != name:
            return None
        sizes[rank] = first_of.setdefault(size.tobytes(), rank)
    first = with_contents(regular.first, task.contents[0], 0)
    return make_structural_plan(
        replace(regular, first=first), sizes, part_bytes=task.part_bytes,
        min_writer_bytes=MIN_WRITER_BYTES, nodes=task.nodes,
    )  # fmt: skip


def _names(task: MakePlan, first: Columns) -> Fingerprints:
    return Fingerprints(
        first, world_size=len(task.columns), container=task.container,
        part_bytes=task.part_bytes, to_lowest_rank=task.to_lowest_rank,
        files_per_node=task.files_per_node,
    )  # fmt: skip


def _derived(task: MakePlan, held: dict[int, Columns], absent: list[int]) -> dict[int, Columns]:
    """Returns what the other ranks hold, as far as that follows and their fingerprints say so."""
    regular = infer(held, len(task.columns))
    if regular is None:
        return {}
    names = _names(task, regular.first)
    found = {}
    for rank in absent:
        columns = regular.of(rank)
        if names.of(columns) == task.fingerprints[rank]:
            found[rank] = columns
    return found


def _fingerprint(columns: Columns, task: MakePlan) -> bytes:
    """Returns the fingerprint of columns under the options of a task."""
    return fingerprint(
        columns, world_size=len(task.columns), container=task.container,
        part_bytes=task.part_bytes, to_lowest_rank=task.to_lowest_rank,
        files_per_node=task.files_per_node,
    )  # fmt: skip
