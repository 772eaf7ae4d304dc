"""What planning tests share: states over ranks, their true bytes and files; importable on ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ray_dcp import SaveOptions
from ray_dcp.commit_protocol.messages import FileReceipt, FileReceipts
from ray_dcp.core.columns import ColumnsBuilder
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import ChunkTable, Columns, GlobalPlan, Kind
from ray_dcp.errors import CheckpointError, CoverageError, PlanConflictError
from ray_dcp.format.table import placed
from ray_dcp.io.writer import write_part
from ray_dcp.planning.global_plan import checked_receipts, rank_plan
from ray_dcp.store.memory import MemoryStorage

DTYPES = ("float32", "bfloat16", "uint8", "complex64", "float8_e4m3fn")


@dataclass(frozen=True)
class Piece:
    """One box and the ranks that hold it."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    ranks: tuple[int, ...]
    values: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tensor:
    fqn: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    splittable: bool
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Case:
    world_size: int
    tensors: tuple[Tensor, ...]

    def columns(self) -> list[Columns]:
        builders = [ColumnsBuilder() for _ in range(self.world_size)]
        for tensor in self.tensors:
            for piece in tensor.pieces:
                values = piece.values or (0,) * len(piece.ranks)
                for rank, value in zip(piece.ranks, values, strict=True):
                    if tensor.kind == Kind.OBJECT:
                        builders[rank].object(tensor.fqn, value=value)
                        continue
                    builders[rank].tensor(
                        tensor.fqn, tensor.dtype, tensor.shape,
                        offset=piece.offset, size=piece.size, value=value,
                        opaque=tensor.kind == Kind.OPAQUE, splittable=tensor.splittable,
                    )  # fmt: skip
        return [builder.build() for builder in builders]


def truth(tensor: Tensor) -> np.ndarray:
    """Returns the tensor's bytes as an array of its shape and, last, the bytes of an element."""
    shape = (*tensor.shape, ITEMSIZE[tensor.dtype])
    seed = sum(map(ord, tensor.fqn))
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def box_bytes(array: np.ndarray, offset: list[int], size: list[int]) -> np.ndarray:
    """Returns the C-order bytes of a box, by numpy's own slicing."""
    index = tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))
    return np.ascontiguousarray(array[index]).reshape(-1)


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """Draws `(offset, size)` parts that fill a dimension, uneven, some of them empty."""
    inner = draw(st.lists(st.integers(0, length), max_size=3))
    return [(low, high - low) for low, high in pairwise([0, *sorted(inner), length])]


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Draws boxes that fill a shape exactly once: grids, uneven ones, and cuts of cuts."""
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    grid = draw(st.booleans())
    for length in shape:
        common = draw(cuts(length))
        found = [
            ((*offset, low), (*size, count))
            for offset, size in found
            for low, count in (common if grid else draw(cuts(length)))
        ]
    distinct = dict.fromkeys(found)
    return list(distinct)[:40] if len(distinct) <= 40 else [((0,) * len(shape), shape)]


@st.composite
def tensors(draw: st.DrawFn, fqn: str, world_size: int) -> Tensor:
    kind = draw(st.sampled_from([Kind.TENSOR] * 6 + [Kind.OPAQUE, Kind.OBJECT]))
    some_ranks = st.sets(st.integers(0, world_size - 1), min_size=1).map(sorted).map(tuple)
    differing = draw(st.integers(0, 9)) == 0
    if kind == Kind.OBJECT:
        ranks = draw(some_ranks)
        values = tuple(1 + rank % 2 if differing else 1 for rank in ranks)
        return Tensor(fqn, kind, "", (), False, (Piece((), (), ranks, values),))
    shape = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
    everyone = tuple(range(world_size))
    holders = draw(
        st.sampled_from([some_ranks, st.just(everyone), some_ranks.map(lambda r: r[:1])])
    )
    pieces = []
    for offset, size in draw(boxes(shape)):
        ranks = draw(holders)
        values = tuple(1 + rank % 2 if differing else 0 for rank in ranks)
        pieces.append(Piece(offset, size, ranks, values))
    dtype = draw(st.sampled_from(DTYPES))
    return Tensor(fqn, kind, dtype, shape, draw(st.booleans()), tuple(pieces))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws a state over 1 to 8 ranks that makes one checkpoint."""
    world_size = draw(st.integers(1, 8))
    count = draw(st.integers(1, 4))
    return Case(world_size, tuple(draw(tensors(f"t{index}", world_size)) for index in range(count)))


def write(
    case: Case, columns: list[Columns], plan: GlobalPlan, attempt: str
) -> tuple[dict[str, bytes], dict[int, FileReceipt]]:
    """Writes the parts of all ranks in memory: `(files by key, receipts)`."""
    known = {tensor.fqn: tensor for tensor in case.tensors}
    storage = MemoryStorage("plan-cases")
    storage.delete([entry.key for entry in storage.list()])
    receipts: dict[int, FileReceipt] = {}
    for rank, own in enumerate(columns):
        names = [own.names[name] for name in own.name.tolist()]
        written = write_part(
            storage, rank_plan(plan, rank), attempt,
            source=lambda row, own=own: memoryview(item_bytes(known, own, row)),
            deferred=lambda row, names=names: f"deferred {names[row]}".encode() * 3,
            options=SaveOptions(num_threads=1),
        )  # fmt: skip
        receipts |= {receipt.file: receipt for receipt in written}
    files = {entry.key: storage.read(entry.key) for entry in storage.list()}
    assert len(files) == len(receipts)
    return files, receipts


def finish_table(plan: GlobalPlan, attempt: str, receipts: FileReceipts) -> ChunkTable:
    """Returns the table of what was written, without checksums."""
    return placed(plan.table, attempt, checked_receipts(plan, attempt, receipts))


def item_bytes(known: dict[str, Tensor], columns: Columns, row: int) -> np.ndarray:
    """Returns the C-order bytes of a held item."""
    ndim = columns.ndim[row]
    offset, size = columns.offset[row, :ndim].tolist(), columns.size[row, :ndim].tolist()
    return box_bytes(truth(known[columns.names[columns.name[row]]]), offset, size)


# --- states of ranks that make no checkpoint, and what has to be told of each ---------------------


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
