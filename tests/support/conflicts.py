"""States of ranks that make no checkpoint, and what has to be told of each. Importable on ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ray_dcp.errors import CheckpointError, CoverageError, PlanConflictError


class Boxes:
    """A tensor of 8 numbers that says by DCP's protocol which of them this rank holds."""

    dtype = torch.float32
    requires_grad = False

    def __init__(self, *spans: tuple[int, int]) -> None:
        self.chunks = [
            ChunkStorageMetadata(torch.Size([start]), torch.Size([stop - start]))
            for start, stop in spans
        ]

    def size(self):
        return torch.Size([8])

    def __create_write_items__(self, fqn, value):
        properties = TensorProperties(dtype=torch.float32)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.chunks
        ]

    def __create_chunk_list__(self):
        return self.chunks

    def __get_tensor_shard__(self, index):
        return torch.zeros(next(c.sizes for c in self.chunks if c.offsets == index.offset))


@dataclass(frozen=True)
class Conflict:
    """What three ranks hold, and the error that they have to be told."""

    state: Callable[[int], dict[str, Any]]
    kind: type[CheckpointError]
    told: tuple[str, ...]


def _everything(rank: int) -> dict[str, Any]:
    return {name: one.state(rank)[name] for name, one in CONFLICTS.items()}


CONFLICTS = {
    "shape": Conflict(
        lambda rank: {"shape": torch.zeros(2 + (rank == 1))},
        PlanConflictError,
        ("'shape': (2,) of float32 on ranks 0, 2; (3,) of float32 on rank 1",),
    ),
    "dtype": Conflict(
        lambda rank: {"dtype": torch.zeros(2, dtype=torch.int32 if rank == 2 else torch.int64)},
        PlanConflictError,
        ("'dtype': (2,) of int64 on ranks 0, 1; (2,) of int32 on rank 2",),
    ),
    "kind": Conflict(
        lambda rank: {"kind": torch.zeros(2) if rank else "zeros"},
        PlanConflictError,
        ("'kind': an object on rank 0; (2,) of float32 on ranks 1, 2",),
    ),
    "overlap": Conflict(
        lambda rank: {"overlap": Boxes([(0, 3), (3, 6), (5, 8)][rank])},
        PlanConflictError,
        ("'overlap': [3:6] on rank 1 overlaps [5:8] on rank 2",),
    ),
    "bounds": Conflict(
        lambda rank: {"bounds": Boxes([(-1, 3), (3, 6), (6, 9)][rank])},
        PlanConflictError,
        (
            "'bounds': [-1:3] on rank 0 reaches out of the shape (8,)",
            "'bounds': [6:9] on rank 2 reaches out of the shape (8,)",
        ),
    ),
    "gap": Conflict(
        lambda rank: {"gap": Boxes([(0, 3), (3, 5), (7, 8)][rank])},
        CoverageError,
        ("'gap': no rank holds 2 of 8 elements, first [5:7]; the rest is on ranks 0-2",),
    ),
    "twice": Conflict(
        lambda rank: {"twice": Boxes(*[[(0, 3)] * 2, [(3, 5), (5, 6), (5, 6)], [(6, 8)]][rank])},
        PlanConflictError,
        (
            "'twice': [0:3] is listed more than once by rank 0",
            "'twice': [5:6] is listed more than once by rank 1",
        ),
    ),
}  # fmt: skip
"""By the name of the one item that is in conflict."""

ALL = Conflict(_everything, PlanConflictError, tuple(t for c in CONFLICTS.values() for t in c.told))
"""All of them in one state."""
