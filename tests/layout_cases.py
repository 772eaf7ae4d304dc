"""Tensors in parallel layouts as they lie in files, without ranks to write or read them."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np

from ray_dcp.core.checksums import block_checks
from ray_dcp.core.values import Kind
from ray_dcp.planning.finish import finish_table
from ray_dcp.planning.global_plan import make_plan
from ray_dcp.planning.reads import Wanted
from ray_dcp.store.memory import MemoryStorage
from tests.plan_cases import Case, Piece, Tensor, truth, write

LAYOUTS = ("row", "column", "2-D", "replicated")


def boxes_of(layout: str, shape: tuple[int, ...], rank: int, world_size: int):
    """Returns the part of a two-dimensional tensor that a rank wants."""
    rows, columns = {
        "row": (world_size, 1), "column": (1, world_size), "replicated": (1, 1),
        "2-D": (2, world_size // 2) if world_size % 2 == 0 else (1, world_size),
    }[layout]  # fmt: skip
    place = divmod(rank % (rows * columns), columns)
    bounds = [
        [length * index // parts for index in range(parts + 1)]
        for length, parts in zip(shape, (rows, columns), strict=True)
    ]
    low = [bound[at] for bound, at in zip(bounds, place, strict=True)]
    high = [bound[at + 1] for bound, at in zip(bounds, place, strict=True)]
    return low, [b - a for a, b in zip(low, high, strict=True)]


class Counting(MemoryStorage):
    """Counts how often each byte was asked for."""

    def __init__(self, files: dict[str, bytearray]) -> None:
        super().__init__("read-once")
        self.files = files
        self.asked = {key: np.zeros(len(data), np.int32) for key, data in files.items()}
        self.ranges: list[tuple[str, int, int]] = []
        self._counting = threading.Lock()

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        target[:] = memoryview(self.files[key])[start : start + len(target)]
        with self._counting:
            self.asked[key][start : start + len(target)] += 1
            self.ranges.append((key, start, start + len(target)))


def written(source: str, writers: int, shapes):
    """Returns the chunk table and files of tensors that ranks hold in a layout, and the values."""
    tensors = []
    for number, shape in enumerate(shapes):
        holders: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for rank in range(writers):
            low, size = boxes_of(source, shape, rank, writers)
            holders.setdefault((tuple(low), tuple(size)), []).append(rank)
        pieces = [Piece(low, size, tuple(ranks)) for (low, size), ranks in holders.items()]
        tensors.append(Tensor(f"t{number}", Kind.TENSOR, "float32", shape, True, tuple(pieces)))
    case = Case(writers, tuple(tensors))
    columns = case.columns()
    plan = make_plan(columns, part_bytes=1 << 30, min_piece_bytes=1)
    files, receipts = write(case, columns, plan, "a1")
    table = _with_checks(finish_table(plan, "a1", receipts), files)
    assert table.names == tuple(tensor.fqn for tensor in tensors)
    return table, files, [truth(tensor) for tensor in tensors]


def _with_checks(table, files):
    """Returns the table with the checksums that a load takes from the ends of the files."""
    checks = []
    for chunk in range(len(table.file)):
        start = int(table.payload_offset[chunk])
        payload = files[table.files[table.file[chunk]]][start:][: int(table.payload_bytes[chunk])]
        checks.append(block_checks(payload, int(table.block_bytes[chunk])))
    starts = np.cumsum([0, *(len(one) for one in checks)]).astype(np.int64)
    return replace(table, check_start=starts, checks=np.concatenate(checks))


def wanted_of(boxes) -> Wanted:
    return Wanted(
        np.arange(len(boxes), dtype=np.int32),
        np.array([low for low, _ in boxes], np.int64),
        np.array([size for _, size in boxes], np.int64),
        np.full(len(boxes), 4),
    )
