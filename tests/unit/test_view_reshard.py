"""A reshard preview tells what loads then read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ray_dcp
from ray_dcp.errors import InvalidRequestError
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


@pytest.mark.parametrize("layout", ["3", "8:column", "3x4"])
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_the_preview_is_what_the_reader_then_reads(tmp_path: Path, layout: str, kind: str):
    if kind == "ours":
        ray_dcp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)
    else:
        checkpoints.save_stock(tmp_path / "a", state())
    view, reads = counted_view(tmp_path / "a")
    view.reshard(layout)
    assert kind == "stock" or reads.payload_bytes == 0
    view.checkpoint.know_checks()
    for name, info in view.tensors.items():
        found = view.reshard(layout, include=name)
        for one in found.ranks[::3]:
            reads.bytes_read.clear()
            part = view[name][held(info.shape, found.layout, one.rank)]
            assert one.bytes_needed == part.nbytes
            # Why: where in a long item of stock DCP its bytes are, only the item itself tells.
            heads = 0 if kind == "ours" else 5120
            assert abs(one.bytes_read - reads.payload_bytes) <= heads


def held(shape: tuple[int, ...], layout: ShardGrid, rank: int) -> tuple[slice, ...]:
    """Returns what a rank holds, by torch's own way to cut."""
    found = []
    cuts = zip(divmod(rank, layout.columns), (layout.rows, layout.columns), strict=True)
    for length, (part, parts) in zip(shape, cuts, strict=False):
        pieces = torch.arange(length).chunk(parts)
        own = pieces[part].tolist() if part < len(pieces) else []
        found.append(slice(own[0], own[-1] + 1) if own else slice(0, 0))
    return tuple(found)


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
