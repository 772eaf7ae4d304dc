"""What planning tests share: random states over ranks, their true bytes, and their files."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from ray_dcp import SaveOptions
from ray_dcp.commit_protocol.messages import FileReceipt, FileReceipts
from ray_dcp.core.columns import ColumnsBuilder
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import ChunkTable, Columns, GlobalPlan, Kind
from ray_dcp.format.table import placed
from ray_dcp.io.writer import write_part
from ray_dcp.planning.global_plan import checked_receipts, rank_plan
from ray_dcp.store.storage import MemoryStorage

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
