"""Plans of regular layouts, from the rows of one rank of each class of equal ranks.

Where ranks hold parts of tensors on meshes (`regular.MeshOwners`), each writes what others do, at
another place of the tensors. Ranks whose files are alike make a class, and only the rows of one
rank of each class are planned. A `StructuralPlan` holds these; the rows of all other ranks follow
from them, and are made only when they are asked for. It is the plan that `make_plan` makes of all
rows, bit for bit; other layouts are left to `make_plan`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.grouping import first_rows, offsets_of
from ray_dcp.core.values import (
    NO_GROUPS,
    ChunkTable,
    GlobalPlan,
    Int32Array,
    Int64Array,
    Kind,
    RankPlan,
    UInt64Array,
    ValueGroups,
    pad,
    volume,
)
from ray_dcp.planning.global_plan import MIN_PIECE_BYTES, digest_of, plan_of_layout, rank_plan
from ray_dcp.planning.layout import lay_out
from ray_dcp.planning.merge import Boxes, Held, merge
from ray_dcp.planning.regular import MeshOwners, Part, Shared, find_holders
from ray_dcp.planning.sharing import (
    ITEM_COST_BYTES,
    Cuts,
    Loads,
    Pieces,
    cut_boxes,
    itemsizes,
    leads_of,
    share_alike,
)
from ray_dcp.planning.structure import (
    Expanded,
    Mesh,
    Structure,
    expand,
    files_of,
    is_expandable,
    names_of,
    num_chunks_of,
)


class StructuralPlan(GlobalPlan):
    """As `GlobalPlan`; what has a row for each chunk of all ranks is made when it is asked for.

    A save does not ask for it.

    Args:
        few: The plan of the leaders' files.
        structure: What tells those of the others.
        groups: Of all ranks.

    Attributes:
        few: As given.
        structure: As given.
        files_of_few: int64[f], the file of `few` that each file is like.
    """

    few: GlobalPlan
    structure: Structure
    files_of_few: Int64Array

    def __init__(self, few: GlobalPlan, structure: Structure, groups: ValueGroups) -> None:
        file_rank, file = files_of(structure)
        vars(self).update(
            few=few,
            structure=structure,
            world_size=few.world_size,
            container=few.container,
            file_rank=file_rank.astype(np.int32),
            file_bytes=few.file_bytes[file],
            disagreements=few.disagreements,
            digest=_digest(few, structure, groups),
            groups=groups,
            files_of_few=file,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what can be made again."""
        made = {"_expanded", "_parts", "file_headers", "num_chunks", "fixed_bytes"}
        return {name: value for name, value in vars(self).items() if name not in made}

    @cached_property
    def _expanded(self) -> Expanded:
        return expand(self.few.table, self.structure)

    @property
    def table(self) -> ChunkTable:
        """As `GlobalPlan.table`."""
        return self._expanded.table

    @property
    def source_rank(self) -> Int32Array:
        """As `GlobalPlan.source_rank`."""
        return self._expanded.rank.astype(np.int32)

    @property
    def source_row(self) -> Int32Array:
        """As `GlobalPlan.source_row`."""
        return self.few.source_row[self._expanded.chunk]

    @property
    def source_start(self) -> Int64Array:
        """As `GlobalPlan.source_start`."""
        return self.few.source_start[self._expanded.chunk]

    @cached_property
    def file_headers(self) -> tuple[bytes, ...]:
        """As `GlobalPlan.file_headers`."""
        return tuple(map(self.few.file_headers.__getitem__, self.files_of_few.tolist()))

    @property
    def files(self) -> tuple[str, ...]:
        """As `GlobalPlan.files`."""
        return names_of(self.few.files, self.structure, self.file_rank, self.files_of_few)

    @cached_property
    def num_chunks(self) -> int:
        """As `GlobalPlan.num_chunks`."""
        return num_chunks_of(self.few.table, self.structure)

    @property
    def num_tensors(self) -> int:
        """As `GlobalPlan.num_tensors`."""
        return len(self.structure.tensors(self.few.table.num_tensors).base)

    @cached_property
    def fixed_bytes(self) -> int:
        """As `GlobalPlan.fixed_bytes`."""
        table = self.few.table
        length = np.maximum(table.payload_bytes, 0)
        by_file = np.zeros(len(table.files), dtype=np.int64)
        np.add.at(by_file, table.file, length)
        return int(by_file[self.files_of_few].sum())

    @cached_property
    def _parts(self) -> dict[int, RankPlan]:
        return {}

    def part_of(self, rank: int) -> RankPlan:
        """Returns what one rank writes: what its leader does, in files of its own."""
        leader = int(self.structure.leaders[self.structure.kind[rank]])
        like = self._parts.get(leader)
        if like is None:
            like = self._parts[leader] = rank_plan(self.few, leader)
        first = int(np.searchsorted(self.file_rank, rank))
        start = len(f"__{leader}_")
        files = tuple(
            replace(file, file=first + index, key=f"__{rank}_{file.key[start:]}")
            for index, file in enumerate(like.files)
        )
        return RankPlan(rank, like.container, files)


def _digest(few: GlobalPlan, structure: Structure, groups: ValueGroups) -> bytes:
    state = blake2b(few.digest, digest_size=32)
    state.update(str(groups.told).encode())
    arrays: list[npt.NDArray[Any]] = [
        structure.part, structure.leaders, structure.kind, structure.file_kind, structure.own,
        groups.rank, groups.place, groups.group,
    ]  # fmt: skip
    for mesh in structure.meshes:
        state.update(str((mesh.strides, mesh.lengths)).encode())
        arrays += [mesh.tensors, mesh.offset, mesh.steps]
    for array in arrays:
        state.update(str((array.dtype.str, array.shape)).encode())
        state.update(np.ascontiguousarray(array).data)
    return state.digest()


MANY_ROWS = 100_000
"""From so many rows of all ranks on it is worth while."""
LEAST_RANKS_A_CLASS = 4
"""Where ranks of a class are fewer on average, all chunks are made: little is saved else."""


def make_structural_plan(
    parts: Sequence[Part],
    contents: Sequence[UInt64Array],
    *,
    part_bytes: int,
    min_writer_bytes: int,
    min_piece_bytes: int = MIN_PIECE_BYTES,
    nodes: Sequence[int] | None = None,
) -> GlobalPlan | None:
    """Returns the plan of a regular layout, in the container `torch_save`.

    Args:
        parts: All ranks, each in one of these, in the order of their lowest ranks. Their `value`s
            only tell which items have a digest of content.
        contents: Of each part the digests of its ranks, uint64[n, k]: by place, in the order of the
            items that have one.
        part_bytes: As for `make_plan`.
        min_writer_bytes: As there.
        min_piece_bytes: As there.
        nodes: As there.

    Returns:
        A `StructuralPlan` where there are few classes. None where the layout is not
        of this sort, or contents of a box differ between ranks; nothing is said about whether it
        makes a checkpoint.

    Complexity:
        O(ranks + items of one rank of each part + chunks of a rank of each class).
    """
    base = merge([part.regular.first for part in parts])
    known = np.array([name in ITEMSIZE for name in base.dtypes] + [True])
    holders = find_holders(parts, base)
    if holders is None or not (known[base.dtype] | (base.kind != Kind.TENSOR)).all():
        return None
    job = _Job(parts, base, holders, nodes)
    if not job.agrees(contents):
        return None
    job.share(min_piece_bytes, min_writer_bytes)
    leaders, kind = job.classes()
    held, pieces = job.pieces(leaders)
    layout = lay_out(held, pieces, container="torch_save", part_bytes=part_bytes)
    few = plan_of_layout(held, pieces, layout, NO_GROUPS, len(kind), "torch_save")
    structure = Structure(
        meshes=tuple(
            Mesh(
                part.regular.strides,
                part.regular.lengths,
                base.tensor[rows],
                base.offset[rows],
                np.pad(part.regular.steps, _more(part, base.offset.shape[1])),
            )
            for part, rows in zip(parts, job.rows, strict=True)
        ),
        part=job.part[leaders].astype(np.int32),
        leaders=leaders,
        kind=kind,
        file_kind=np.searchsorted(leaders, few.file_rank).astype(np.int32),
        own=np.unique(
            np.concatenate(
                [base.tensor[rows][own] for rows, own in zip(job.rows, holders.own, strict=True)]
            )
        ),
    )
    if not is_expandable(few.table, structure):
        return None
    plan = StructuralPlan(few, structure, _groups(job))
    if len(leaders) * LEAST_RANKS_A_CLASS <= len(kind):
        return plan
    return _in_full(plan)


def _more(part: Part, width: int) -> tuple[tuple[int, int], ...]:
    return (0, 0), (0, 0), (0, width - part.regular.steps.shape[2])


def _in_full(plan: StructuralPlan) -> GlobalPlan:
    """Returns the same plan with all chunks."""
    table, chunk, rank = expand(plan.few.table, plan.structure)
    few = plan.few
    source = (rank.astype(np.int32), few.source_row[chunk], few.source_start[chunk])
    full = GlobalPlan(
        world_size=plan.world_size,
        container=plan.container,
        table=table,
        source_rank=source[0],
        source_row=source[1],
        source_start=source[2],
        file_rank=plan.file_rank,
        file_bytes=plan.file_bytes,
        file_headers=plan.file_headers,
        disagreements=plan.disagreements,
        digest=b"",
        groups=plan.groups,
    )
    return replace(full, digest=digest_of(full))


@dataclass(frozen=True, eq=False)
class _Given:
    """What a rank was given of boxes that others hold too."""

    tensor: Int64Array
    first: Int64Array
    """Leading row of the box, and how many from there."""
    count: Int64Array


class _Job:
    """All ranks, and what each of them writes.

    Attributes:
        parts: As given.
        base: What the lowest rank of each part holds.
        holders: Who holds which boxes.
        rows: Rows of `base` of each part.
        part: int64[w], of each rank.
        place: int64[w], of each rank in its part.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        base: Held,
        holders: MeshOwners,
        nodes: Sequence[int] | None,
    ) -> None:
        self.parts, self.base, self.holders = parts, base, holders
        starts = offsets_of(np.array([len(part.regular.first) for part in parts])).tolist()
        self.rows = [slice(low, high) for low, high in pairwise(starts)]
        world_size = sum(len(part.ranks) for part in parts)
        self.part, self.place = np.zeros((2, world_size), dtype=np.int64)
        for index, part in enumerate(parts):
            self.part[part.ranks] = index
            self.place[part.ranks] = np.arange(len(part.ranks))
        every = np.arange(len(base.rank))
        self._itemsize = itemsizes(base, Boxes(every, np.arange(len(every) + 1), every))
        self._nodes = nodes
        self._own: dict[tuple[int, int], tuple[Int64Array, Int64Array]] = {}
        self._given: list[_Given] = []
        self._numbers: dict[bytes, int] = {}
        self._of_rank: dict[int, list[int]] = defaultdict(list)

    def agrees(self, contents: Sequence[UInt64Array]) -> bool:
        """Tells whether all that hold a box took the same digest of its content.

        Args:
            contents: As for `make_structural_plan`.
        """
        numbers = self.number_of_content()
        for ranks, rows in self.compared():
            tensor, part = self.base.tensor[rows], self.part[ranks]
            found = [
                contents[one][np.ix_(self.place[ranks[part == one]], numbers[one, tensor])]
                for one in np.unique(part).tolist()
            ]
            if any((values != found[0][0]).any() for values in found):
                return False
        return True

    def compared(self) -> list[tuple[Int64Array, Int64Array]]:
        """Returns `(ranks, rows)` of the boxes with contents that several ranks hold.

        In the order in which the rows of all would come upon the first box of each.
        """
        valued = self.base.value > 0
        several = [
            (one.ranks, one.rows[valued[one.rows]])
            for one in self.holders.shared
            if len(one.ranks) > 1 and valued[one.rows].any()
        ]
        several.sort(key=lambda one: (int(one[0][0]), int(self.base.row[one[1][0]])))
        return several

    def number_of_content(self) -> Int64Array:
        """Returns which of a rank's digests is that of a tensor: int64[parts, t], -1 for none."""
        found = np.full((len(self.parts), len(self.base.names)), -1, dtype=np.int64)
        for part, rows in enumerate(self.rows):
            tensor = self.base.tensor[rows][self.base.value[rows] > 0]
            found[part, tensor] = np.arange(len(tensor))
        return found

    def share(self, min_piece_bytes: int, min_writer_bytes: int) -> None:
        """Decides who writes what, as `share_out` does."""
        loads = Loads(self._loads(), self._nodes)
        several = []
        for shared in self.holders.shared:
            if len(shared.ranks) > 1:
                several.append(shared)
                continue
            rank = int(shared.ranks[0])
            size = self._sizes(shared)
            lead = leads_of(size)
            given = _Given(self.base.tensor[shared.rows], np.zeros_like(lead), lead)
            self._of_rank[rank].append(self._number(given))
            weight = volume(size) * self._itemsize[shared.rows] + ITEM_COST_BYTES
            loads.add(shared.ranks, weight.sum(keepdims=True))
        # Why kept: the ranks of most meshes are alike, and so is what becomes of their boxes.
        done: dict[tuple[bytes, int, int, bytes], tuple[list[tuple[int, int]], Int64Array]] = {}
        for shared in several:
            lowest = int(shared.ranks[0])
            part = int(self.part[lowest])
            like = int(self.parts[part].sizes[self.place[lowest]])
            name = shared.rows.tobytes(), part, like, loads.of(shared.ranks)
            if name in done:
                cuts, more = done[name]
                loads.add(shared.ranks, more)
            else:
                before = loads.bytes_of(shared.ranks)
                cuts = self._cuts(shared, loads, min_piece_bytes, min_writer_bytes)
                done[name] = cuts, loads.bytes_of(shared.ranks) - before
            for place, number in cuts:
                self._of_rank[int(shared.ranks[place])].append(number)

    def classes(self) -> tuple[Int64Array, Int32Array]:
        """Returns `(leaders, class of each rank)`."""
        known: dict[tuple[int, int, tuple[int, ...]], int] = {}
        leaders: list[int] = []
        kind = np.zeros(len(self.part), dtype=np.int32)
        like = np.zeros(len(self.part), dtype=np.int64)
        for part in self.parts:
            like[part.ranks] = part.sizes
        none: list[int] = []
        for rank, name in enumerate(zip(self.part.tolist(), like.tolist(), strict=True)):
            given = tuple(sorted(self._of_rank.get(rank, none)))
            number = known.setdefault((*name, given), len(leaders))
            if number == len(leaders):
                leaders.append(rank)
            kind[rank] = number
        return np.array(leaders, dtype=np.int64), kind

    def pieces(self, leaders: Int64Array) -> tuple[Held, Pieces]:
        """Returns what the leaders write, and the items that it is of."""
        row_of = np.full((len(self.parts), len(self.base.names)), -1, dtype=np.int64)
        for part, rows in enumerate(self.rows):
            row_of[part, self.base.tensor[rows]] = np.arange(rows.start, rows.stop)
        width = self.base.offset.shape[1]
        ranks, items, offsets, sizes, owns, gives = [], [], [], [], [], []
        before = 0
        for rank in leaders.tolist():
            part = int(self.part[rank])
            own, _ = self._own_of(part, int(self.parts[part].sizes[self.place[rank]]))
            given = [self._given[number] for number in self._of_rank.get(rank, ())]
            mine = [row_of[part, one.tensor] for one in given]
            used = np.unique(np.concatenate([own, *mine]))
            offset, size = self.parts[part].regular.boxes(int(self.place[rank]))
            at = used - self.rows[part].start
            ranks.append(np.full(len(used), rank, dtype=np.int32))
            items.append(used)
            offsets.append(pad(offset[at], width, 0))
            sizes.append(pad(size[at], width, 1))
            owns.append(before + np.searchsorted(used, own))
            gives += [
                Cuts(before + np.searchsorted(used, rows), one.first, one.count, rows)
                for one, rows in zip(given, mine, strict=True)
            ]
            before += len(used)
        gives.append(Cuts(*np.zeros((4, 0), dtype=np.int64)))
        held = self._held(*map(np.concatenate, (ranks, items, offsets, sizes)))
        itemsize = self._itemsize[np.concatenate(items)]
        cuts = Cuts(*map(np.concatenate, zip(*gives, strict=True)))
        return held, _pieces(held, itemsize, np.concatenate(owns), cuts)

    def _held(
        self, rank: Int32Array, item: Int64Array, offset: Int64Array, size: Int64Array
    ) -> Held:
        base = self.base
        tensor = base.tensor[item]
        return replace(
            base,
            first=first_rows(tensor, len(base.names)),
            rank=rank,
            row=base.row[item],
            tensor=tensor,
            kind=base.kind[item],
            dtype=base.dtype[item],
            ndim=base.ndim[item],
            shape=base.shape[item],
            offset=offset,
            size=size,
            # Why of the first: what the chunk table says of a tensor.
            requires_grad=base.requires_grad[base.first[tensor]],
            splittable=base.splittable[item],
            value=base.value[item],
        )

    def _own_of(self, part: int, place: int) -> tuple[Int64Array, Int64Array]:
        """Returns the rows that only ranks with boxes as at a place can write, and their sizes."""
        found = self._own.get((part, place))
        if found is None:
            rows = self.holders.own_rows(part, place)
            _, size = self.parts[part].regular.boxes(place)
            found = self._own[part, place] = rows + self.rows[part].start, size[rows]
        return found

    def _loads(self) -> Int64Array:
        """Returns what each rank writes that only it can write."""
        load = np.zeros(len(self.part), dtype=np.int64)
        for index, part in enumerate(self.parts):
            for like in np.unique(part.sizes).tolist():
                rows, size = self._own_of(index, like)
                weight = volume(size) * self._itemsize[rows] + ITEM_COST_BYTES
                load[part.ranks[part.sizes == like]] = weight.sum()
        return load

    def _sizes(self, shared: Shared) -> Int64Array:
        lowest = int(shared.ranks[0])
        part = int(self.part[lowest])
        _, size = self.parts[part].regular.boxes(int(self.place[lowest]))
        return np.asarray(size[shared.rows - self.rows[part].start])

    def _cuts(
        self, shared: Shared, loads: Loads, min_piece_bytes: int, min_writer_bytes: int
    ) -> list[tuple[int, int]]:
        """Returns `(holder, number of what it is given)`; the loads grow."""
        size, rows = self._sizes(shared), shared.rows
        num_bytes = volume(size) * self._itemsize[rows]
        cuttable = self.holders.splittable[rows] & (self.base.kind[rows] == Kind.TENSOR)
        cuttable &= num_bytes >= 2 * min_piece_bytes
        found = share_alike(
            np.arange(len(rows)),
            num_bytes,
            leads_of(size),
            cuttable,
            shared.ranks.astype(np.int32),
            loads,
            min_piece_bytes,
            min_writer_bytes,
        )
        box, first, count, holder = map(np.concatenate, zip(*found, strict=True))
        order = np.argsort(holder, kind="stable")
        told = []
        for own in np.split(order, np.flatnonzero(np.diff(holder[order])) + 1):
            tensor = self.base.tensor[rows[box[own]]]
            given = _Given(tensor, first[own], count[own])
            told.append((int(holder[own[0]]), self._number(given)))
        return told

    def _number(self, given: _Given) -> int:
        name = np.stack([given.tensor, given.first, given.count]).tobytes()
        number = self._numbers.setdefault(name, len(self._given))
        if number == len(self._given):
            self._given.append(given)
        return number


def _pieces(held: Held, itemsize: Int64Array, own: Int64Array, given: Cuts) -> Pieces:
    """Returns what is written: items that are nobody else's, and what was given of others."""
    boxes = Boxes(given.box, np.arange(len(given.box) + 1), given.box)
    offset, size, start = cut_boxes(
        held, boxes, itemsize[given.box], np.arange(len(given.box)), given.first, given.rows
    )
    size = np.concatenate([held.size[own], size])
    row = np.concatenate([own, given.box])
    return Pieces(
        held=row,
        offset=np.concatenate([held.offset[own], offset]),
        size=size,
        start=np.concatenate([np.zeros(len(own), dtype=np.int64), start]),
        num_bytes=volume(size) * itemsize[row],
        disagreements=(),
        differing=np.zeros(0, dtype=bool),
    )


def _groups(job: _Job) -> ValueGroups:
    """Returns which contents have to be equal, as `group_values` of all rows does."""
    several, numbers = job.compared(), job.number_of_content()
    if not several:
        return NO_GROUPS
    counts = np.zeros(len(job.part), dtype=np.int64)
    for ranks, rows in several:
        counts[ranks] += len(rows)
    starts = offsets_of(counts)
    place, group = np.empty((2, int(starts[-1])), dtype=np.int32)
    end = starts[:-1].copy()
    for code, (ranks, rows) in enumerate(several):
        at = end[ranks, None] + np.arange(len(rows))
        place[at] = numbers[job.part[ranks, None], job.base.tensor[rows]]
        group[at] = code
        end[ranks] += len(rows)
    rank = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return ValueGroups(rank=rank, place=place, group=group, told=())
