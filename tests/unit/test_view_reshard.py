"""A reshard preview tells what loads then read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ray_dcp
from ray_dcp.errors import InvalidRequestError
from ray_dcp.io.reader import read_chunks
from ray_dcp.options import LoadOptions
from ray_dcp.planning.reads import Wanted, plan_reads
from ray_dcp.view.resharding import ShardGrid, parse_layout, preview_reshard
from tests.support import checkpoints
from tests.support.storages import counted_view


def state() -> dict:
    return {
        "w": torch.randn(1000, 700),
        "wide": torch.randn(3, 50_000),
        "b": torch.randn(1001),
        "deep": torch.randn(16, 8, 4),
        "s": torch.ones(()),
        "empty": torch.zeros(0, 4),
    }


class Everywhere:
    """A sink of its own memory for each row."""

    def __init__(self, lengths):
        self.rows = [np.empty(n, np.uint8) for n in lengths]

    def buffer(self, row):
        return self.rows[row].data

    def done(self, row):
        """Takes note of nothing."""


@pytest.mark.parametrize("layout", ["1", "3", "8", "3:column", "2x2", "3x4"])
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_the_preview_is_what_the_reader_then_reads(tmp_path: Path, layout: str, kind: str):
    path = tmp_path / "a"
    if kind == "ours":
        ray_dcp.save(state(), checkpoint_id=path, no_dist=True)
    else:
        checkpoints.save_stock(path, state())
    view, before = counted_view(path)
    found = view.reshard(layout)
    assert kind == "stock" or before.payload_bytes == 0
    assert len(found.ranks) == parse_layout(layout).num_ranks
    table = view.table
    for one in found.ranks[:: max(1, len(found.ranks) // 4)]:
        fresh, reads = counted_view(path)
        offset, size = boxes(table, found.layout, one.rank)
        wanted = Wanted(
            np.arange(table.num_tensors, dtype=np.int32), offset, size,
            np.full(table.num_tensors, 4, np.int64),
        )  # fmt: skip
        plan = plan_reads(table, wanted)
        lengths = (size.prod(axis=1) * 4).tolist()
        reads.bytes_read.clear()
        stats = read_chunks(
            fresh.storage, table, plan, wanted, Everywhere(lengths), options=LoadOptions()
        )
        assert one.bytes_needed == sum(lengths) == stats.bytes_needed
        # Why: where in a long item of stock DCP its bytes are, only the item itself tells.
        unknown = 0 if kind == "ours" else 1024
        assert abs(one.bytes_read - stats.bytes_read) <= unknown
        if kind == "ours":
            assert reads.payload_bytes == one.bytes_read


def boxes(table, layout: ShardGrid, rank: int):
    """Returns what a rank holds, by torch's own way to cut."""
    row, column = divmod(rank, layout.columns)
    offset, size = np.zeros_like(table.shape), table.shape.copy()
    for tensor in range(table.num_tensors):
        for dim, part, parts in ((0, row, layout.rows), (1, column, layout.columns)):
            if dim >= table.ndim[tensor] or parts == 1:
                continue
            pieces = torch.arange(int(table.shape[tensor, dim])).chunk(parts)
            own = pieces[part] if part < len(pieces) else torch.zeros(0)
            size[tensor, dim] = len(own)
            offset[tensor, dim] = int(own[0]) if len(own) else 0
    return offset, size


def test_rows_cost_about_what_they_need_and_memory_holds_the_targets(tmp_path: Path):
    ray_dcp.save(state() | {"o": "object"}, checkpoint_id=tmp_path / "a", no_dist=True)
    found = ray_dcp.open(tmp_path / "a").reshard(4)
    assert 1.0 <= found.amplification < 1.5
    assert all(one.peak_bytes >= one.bytes_needed for one in found.ranks)
    assert found.peak_bytes == max(one.peak_bytes for one in found.ranks)
    only = ray_dcp.open(tmp_path / "a").reshard(4, include="w*")
    assert only.stored_bytes == (1000 * 700 + 150_000) * 4
    assert only.bytes_needed == only.stored_bytes
    with pytest.raises(InvalidRequestError, match="did you mean 'wide'"):
        ray_dcp.open(tmp_path / "a").reshard(2, include="wdie")


def test_a_checkpoint_with_holes_says_what_a_load_would_miss(tmp_path: Path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)
    view = ray_dcp.open(tmp_path / "a")
    table = view.table
    size = table.size.copy()
    size[table.tensor == table.names.index("w"), 0] = 999
    holes = replace(view, checkpoint=replace(view.checkpoint, chunks=replace(table, size=size)))
    assert preview_reshard(holes, 2).uncovered == ("w",)


@pytest.mark.parametrize(
    "text", ["", "0", "x", "8:diagonal", "0x2", "2x", "row=0", "-1", "row=2,rows=3", True, 10**9]
)
def test_what_is_no_layout_is_refused(text: object):
    with pytest.raises(InvalidRequestError, match="layout"):
        parse_layout(text)
