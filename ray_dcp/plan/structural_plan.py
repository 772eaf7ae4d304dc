"""A global plan that holds the rows of few ranks, from which those of all follow."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_dcp.plan.rank_plan import rank_plan
from ray_dcp.plan.structure import Expanded, Structure, expand, files_of, names_of, num_chunks_of
from ray_dcp.plan.values import (
    ChunkTable,
    GlobalPlan,
    Int32Array,
    Int64Array,
    RankPlan,
    ValueGroups,
)

__all__ = ["StructuralPlan"]


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
