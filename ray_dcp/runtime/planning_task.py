"""Makes a plan of what the ranks sent, and of what follows of it for those that sent nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ray_dcp.errors import RankDisagreementError
from ray_dcp.plan import structural
from ray_dcp.plan.columns import decode
from ray_dcp.plan.contents import with_contents
from ray_dcp.plan.fingerprint import Fingerprints, alike, fingerprint
from ray_dcp.plan.global_plan import MIN_WRITER_BYTES, make_plan
from ray_dcp.plan.holders import Part
from ray_dcp.plan.own_names import for_rank, without_rank
from ray_dcp.plan.rank_plan import RankPlans, rank_plan
from ray_dcp.plan.regular import Regular, infer
from ray_dcp.plan.structural_plan import StructuralPlan
from ray_dcp.plan.values import Columns, GlobalPlan, Int32Array, Int64Array, UInt64Array
from ray_dcp.protocol.commands import MakePlan, Planned, RowsMissing
from ray_dcp.protocol.planning import differences

__all__ = ["plan_of"]

SAMPLES = 16


def plan_of(task: MakePlan) -> Planned | RowsMissing:
    """Returns what a task of this kind asks for.

    Raises:
        CheckpointError: The ranks' items make no checkpoint, or are not what they were said to be.
    """
    held = _sent(task)
    follows = _Follows(task, held) if task.fingerprints else None
    structural = None if follows is None else _structural(task, follows)
    if isinstance(structural, StructuralPlan):
        return Planned(structural, RankPlans(structural))
    plan = structural or _by_rows(task, held, follows)
    if isinstance(plan, RowsMissing):
        return plan
    parts = tuple(rank_plan(plan, rank) for rank in range(plan.world_size))
    return Planned(plan, parts, disagreements=differences(plan.disagreements))


def _by_rows(
    task: MakePlan, held: dict[int, Columns], follows: _Follows | None
) -> GlobalPlan | RowsMissing:
    """Returns the plan by the rows of all ranks, those that follow with them."""
    absent = [rank for rank in range(len(task.columns)) if rank not in held]
    if follows is not None:
        held.update({rank: follows.of(rank) for rank in absent if follows.fits[rank]})
    missing = tuple(rank for rank in absent if rank not in held)
    if missing:
        return RowsMissing(missing)
    columns = [held[rank] for rank in range(len(task.columns))]
    if task.fingerprints:
        columns = [
            with_contents(own, told, rank)
            for rank, (own, told) in enumerate(zip(columns, task.contents, strict=True))
        ]
    return make_plan(
        columns,
        container=task.container,
        part_bytes=task.part_bytes,
        min_writer_bytes=MIN_WRITER_BYTES,
        to_lowest_rank=task.to_lowest_rank,
        nodes=task.nodes,
        checked=True,
    )


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


class _Follows:
    """What ranks hold by the rows of few, stage by stage of a pipeline.

    Args:
        task: With fingerprints.
        held: What is known of ranks.

    Attributes:
        parts: All ranks that hold boxes of the same items together, where these lie on a mesh.
        fits: bool[w], the ranks whose fingerprints say that they hold what follows.
    """

    def __init__(self, task: MakePlan, held: Mapping[int, Columns]) -> None:
        world_size = len(task.columns)
        self.parts: list[Part] = []
        self.fits = np.zeros(world_size, dtype=bool)
        self._regular: dict[int, tuple[Regular, int]] = {}
        for ranks in alike(task.fingerprints):
            own = {
                at: without_rank(held[rank], world_size)
                for at, rank in enumerate(ranks.tolist())
                if rank in held
            }
            regular = infer(own, len(ranks))
            if regular is not None and _is_likely(task, ranks, np.arange(len(ranks)), regular):
                sizes = self._follow(task, ranks, np.arange(len(ranks)), regular)
                self.parts.append(Part(ranks, regular, sizes))
            rest = ranks[~self.fits[ranks]]
            if not len(rest):
                continue
            # Where a few ranks hold something else, those that are left make no mesh of their own.
            known = {int(ranks[at]): columns for at, columns in own.items()}
            regular = infer(known, world_size)
            if regular is not None and _is_likely(task, rest, rest, regular):
                self._follow(task, rest, rest, regular)

    def _follow(
        self, task: MakePlan, ranks: Int64Array, places: Int64Array, regular: Regular
    ) -> Int32Array:
        """Takes that ranks hold what is on a mesh at these places; returns `Part.sizes`."""
        names, first = _names(task, regular.first), regular.first.size
        sizes = np.zeros(len(ranks), dtype=np.int32)
        lowest: dict[bytes, int] = {first.tobytes(): 0}
        for at, (offset, size) in enumerate(regular.many(places)):
            rank = int(ranks[at])
            self.fits[rank] = names.of_boxes(offset, size, rank) == task.fingerprints[rank]
            self._regular[rank] = regular, int(places[at])
            if not np.array_equal(size, first):
                sizes[at] = lowest.setdefault(size.tobytes(), at)
        return sizes

    def of(self, rank: int) -> Columns:
        """Returns what a rank holds that `fits`."""
        regular, place = self._regular[rank]
        return for_rank(regular.of(place), rank, len(self.fits))


def _is_likely(task: MakePlan, ranks: Int64Array, places: Int64Array, regular: Regular) -> bool:
    """Whether any of some ranks holds what follows.

    Why: irregular slabs look like a mesh at first, and to follow that for all ranks takes long.
    """
    names = _names(task, regular.first)
    # Why of the second half: a mesh was made of ranks of the first.
    some = np.unique(np.linspace(len(ranks) // 2, len(ranks) - 1, SAMPLES).astype(np.int64))
    boxes = regular.many(places[some])
    return any(
        names.of_boxes(*box, rank) == task.fingerprints[rank]
        for rank, box in zip(ranks[some].tolist(), boxes, strict=True)
    )


def _structural(task: MakePlan, follows: _Follows) -> GlobalPlan | None:
    """Returns the plan of a regular layout of many rows; None where it is none.

    Whether the rows were sent or follow makes no difference: the same ranks have the same plan.
    """
    usual = task.container == "torch_save" and not task.to_lowest_rank
    parts = follows.parts
    if (
        not usual
        or not follows.fits.all()
        or sum(len(part.ranks) for part in parts) < len(follows.fits)
    ):
        return None
    num_rows = sum(len(part.ranks) * len(part.regular.first) for part in parts)
    if len(follows.fits) < 2 or num_rows < structural.MANY_ROWS:
        return None
    contents = [_contents(task, part) for part in parts]
    if any(len(own) != len(part.ranks) for own, part in zip(contents, parts, strict=True)):
        return None
    return structural.make_structural_plan(
        parts, contents,
        part_bytes=task.part_bytes, min_writer_bytes=MIN_WRITER_BYTES, nodes=task.nodes,
    )  # fmt: skip


def _contents(task: MakePlan, part: Part) -> UInt64Array:
    """Returns the digests of content of the ranks of a part, by place; of some lengths none."""
    told = [task.contents[rank] for rank in part.ranks.tolist()]
    count = int(np.count_nonzero(part.regular.first.value))
    if any(len(own) != 8 * count for own in told):
        return np.zeros((0, count), dtype=np.uint64)
    return np.frombuffer(b"".join(told), dtype="<u8").reshape(len(told), count)


def _names(task: MakePlan, first: Columns) -> Fingerprints:
    return Fingerprints(
        first, world_size=len(task.columns), container=task.container,
        part_bytes=task.part_bytes, to_lowest_rank=task.to_lowest_rank,
    )  # fmt: skip


def _fingerprint(columns: Columns, task: MakePlan) -> bytes:
    """Returns the fingerprint of columns under the options of a task."""
    return fingerprint(
        columns, world_size=len(task.columns), container=task.container,
        part_bytes=task.part_bytes, to_lowest_rank=task.to_lowest_rank,
    )  # fmt: skip
