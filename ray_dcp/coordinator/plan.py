"""Makes the plan of a save from the rows that ranks sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ray_dcp.commit_protocol.commands import (
    MakePlan,
    Planned,
    RowsMissing,
)
from ray_dcp.core.columns import decode, for_rank, without_rank
from ray_dcp.core.values import Columns, Int64Array
from ray_dcp.errors import (
    RankDisagreementError,
)
from ray_dcp.planning.fingerprint import Fingerprints, Regular, alike, fingerprint, infer
from ray_dcp.planning.global_plan import make_plan, rank_plan
from ray_dcp.planning.merge import with_contents
from ray_dcp.planning.share_out import MIN_WRITER_BYTES

SAMPLES = 16


def plan_of(task: MakePlan) -> Planned | RowsMissing:
    """Returns the result of `MakePlan`.

    Raises:
        CheckpointError: The ranks' items do not form a checkpoint, or do not have the fingerprints
            that were sent.
    """
    held = _decode_known_items(task)
    held.update(_following(task, held))
    missing = tuple(rank for rank in range(len(task.columns)) if rank not in held)
    if missing:
        return RowsMissing(missing)
    columns = [
        with_contents(held[rank], contents, rank)
        for rank, contents in zip(range(len(task.columns)), task.contents, strict=True)
    ]
    plan = make_plan(
        columns,
        part_bytes=task.part_bytes,
        min_writer_bytes=MIN_WRITER_BYTES,
        to_lowest_rank=task.to_lowest_rank,
        nodes=task.nodes,
    )
    parts = tuple(rank_plan(plan, rank) for rank in range(plan.world_size))
    return Planned(plan, parts, disagreements=plan.disagreements)


def _decode_known_items(task: MakePlan) -> dict[int, Columns]:
    """Returns the items of the ranks whose rows are known; equal ones are shared."""
    known: dict[bytes, Columns] = {}
    found = {}
    for rank, (name, encoded) in enumerate(zip(task.fingerprints, task.columns, strict=True)):
        if not encoded:
            continue
        columns = known.get(name)
        if columns is None:
            columns = known[name] = decode(encoded)
            if fingerprint(columns, **_options(task)) != name:
                raise RankDisagreementError(
                    f"expected the items of rank {rank} to have the fingerprint that it sent, but "
                    f"they have another one: run the same version of ray_dcp on all ranks",
                    rank=rank,
                )
        found[rank] = columns
    return found


def _following(task: MakePlan, held: Mapping[int, Columns]) -> dict[int, Columns]:
    """Returns the items of ranks that sent no rows, where they follow from the rows of others.

    Pipelines are searched stage by stage: ranks that hold boxes of the same items together.
    """
    world_size, found = len(task.columns), dict[int, Columns]()
    for ranks in alike(task.fingerprints):
        own = {
            at: without_rank(held[rank], world_size)
            for at, rank in enumerate(ranks.tolist())
            if rank in held
        }
        if len(own) == len(ranks):
            continue
        regular = infer(own, len(ranks))
        if regular is not None:
            found.update(_on_mesh(task, held, ranks, np.arange(len(ranks)), regular))
        rest = np.array([rank for rank in ranks.tolist() if rank not in held and rank not in found])
        if not len(rest):
            continue
        # Where a few ranks hold something else, those that are left make no mesh of their own.
        known = {int(ranks[at]): columns for at, columns in own.items()}
        regular = infer(known, world_size)
        if regular is not None:
            found.update(_on_mesh(task, held, rest, rest, regular))
    return found


def _on_mesh(
    task: MakePlan,
    held: Mapping[int, Columns],
    ranks: Int64Array,
    places: Int64Array,
    regular: Regular,
) -> Iterator[tuple[int, Columns]]:
    """Yields the ranks without rows that hold, by their fingerprints, the boxes at their places."""
    names = Fingerprints(regular.first, **_options(task))
    # Why of the second half: a mesh was made of ranks of the first. Why at all: irregular slabs
    # look like a mesh at first, and to follow that for all ranks takes long.
    some = np.unique(np.linspace(len(ranks) // 2, len(ranks) - 1, SAMPLES).astype(np.int64))
    if not any(
        names.of_boxes(columns, rank) == task.fingerprints[rank]
        for rank, columns in zip(ranks[some].tolist(), regular.columns(places[some]), strict=True)
    ):
        return
    for rank, columns in zip(ranks.tolist(), regular.columns(places), strict=True):
        if rank not in held and names.of_boxes(columns, rank) == task.fingerprints[rank]:
            yield rank, for_rank(columns, rank, len(task.columns)) if names.has_own else columns


def _options(task: MakePlan) -> dict[str, Any]:
    """Returns the options on which fingerprints depend."""
    return {
        "world_size": len(task.columns),
        "part_bytes": task.part_bytes,
        "to_lowest_rank": task.to_lowest_rank,
    }
