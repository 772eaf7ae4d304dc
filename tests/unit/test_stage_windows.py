"""Every staged byte has one place, in file order; large pieces lie as in a page of their file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dcp.errors import InternalError
from ray_dcp.protocol.messages import Target
from ray_dcp.stage.windows import lay_out_windows, plan_digest
from tests.staged import MIB, share

SIZES = st.lists(
    st.one_of(
        st.integers(0, 200),
        st.sampled_from([64 << 10, (64 << 10) - 1, 128 << 10, MIB, MIB + 1, 2 * MIB, 5 * MIB + 77]),
        st.integers(0, 3 * MIB),
    ),
    max_size=14,
)


def lengths_of(what):
    return [[len(what.items.deferred(row)) for row in f.deferred.tolist()] for f in what.plan.files]


@settings(max_examples=30, deadline=None)
@given(
    sizes=SIZES,
    deferred=st.lists(st.integers(0, 3 * MIB).map(bytes), max_size=3),
    container=st.sampled_from(["torch_save", "safetensors"]),
    part_bytes=st.sampled_from([MIB, 4 * MIB, 1 << 30]),
    window_bytes=st.sampled_from([2 * MIB, 3 * MIB, 64 * MIB]),
)
def test_segments_cover_each_piece_once_in_order_and_fit_their_windows(
    sizes, deferred, container, part_bytes, window_bytes
):
    what = share(sizes, deferred, container=container, part_bytes=part_bytes)
    lengths = lengths_of(what)
    layout = lay_out_windows(what.plan, lengths, window_bytes)
    assert layout.total_bytes == what.num_bytes
    line = layout.window.astype(np.int64) * window_bytes + layout.offset
    assert (layout.num_bytes > 0).all()
    assert (line[1:] >= (line + layout.num_bytes)[:-1]).all()
    assert (layout.offset + layout.num_bytes <= window_bytes).all()
    place = np.arange(len(layout.file))
    assert (np.diff(layout.file * (1 << 20) + layout.piece) >= 0).all()
    for index, file in enumerate(what.plan.files):
        own = slice(*layout.file_first[index : index + 2].tolist())
        assert set(layout.file[own].tolist()) <= {index}
        planned = [*file.payload_bytes.tolist(), *lengths[index]]
        rows = [*file.row.tolist(), *file.deferred.tolist()]
        for piece, num_bytes in enumerate(planned):
            found = place[own][layout.piece[own] == piece]
            assert layout.num_bytes[found].sum() == num_bytes
            assert set(layout.row[found].tolist()) <= {rows[piece]}
            assert set(layout.is_deferred[found].tolist()) <= {piece >= len(file.row)}
            ends = np.cumsum(layout.num_bytes[found])
            assert layout.start[found].tolist() == [0, *ends[:-1].tolist()][: len(found)]
            block = 1 if piece >= len(file.row) else int(file.block_bytes[piece])
            assert not (layout.num_bytes[found[:-1]] % block).any()
            if piece < len(file.row) and num_bytes >= 64 << 10:
                at = file.payload_offset[piece] + layout.start[found]
                assert ((layout.offset[found] - at) % 4096 == 0).all()
                assert layout.file_end[found].tolist() == (at + layout.num_bytes[found]).tolist()
            elif piece < len(file.row):
                assert len(found) <= 1
    for window in range(layout.num_windows):
        own = slice(*layout.window_first[window : window + 2].tolist())
        assert own.stop > own.start
        assert (layout.window[own] == window).all()
        used = (layout.offset + layout.num_bytes)[own].max()
        assert layout.used_bytes[window] == used
        assert layout.files_of(window) == set(layout.file[own].tolist())


def test_windows_are_filled_before_the_next_one_is_begun():
    what = share([5 * MIB + 64] * 20)
    layout = lay_out_windows(what.plan, lengths_of(what), 8 * MIB)
    assert (layout.used_bytes[:-1] >= 7 * MIB).all()


def test_small_pieces_follow_each_other_without_a_gap():
    what = share([1000] * 500)
    layout = lay_out_windows(what.plan, lengths_of(what), 2 * MIB)
    assert layout.offset.tolist() == [1000 * i for i in range(500)]


def test_the_ends_of_deferred_items_are_where_they_are_written(tmp_path):
    what = share([100, 70_000], [b"a" * 100, b"", b"b" * 3, b"c" * 70_001])
    (receipt,) = what.written(Target(str(tmp_path)))
    layout = lay_out_windows(what.plan, lengths_of(what), 2 * MIB)
    ends = {p.row: p.item_offset + p.item_bytes for p in receipt.deferred if p.item_bytes}
    assert len(ends) == 3
    own = layout.is_deferred
    rows, found = layout.row[own].tolist(), layout.file_end[own].tolist()
    assert dict(zip(rows, found, strict=True)) == ends


def test_a_rank_that_writes_nothing_has_no_windows():
    what = share([0, 0])
    layout = lay_out_windows(what.plan, lengths_of(what), 2 * MIB)
    assert layout.num_windows == layout.total_bytes == 0
    empty = replace(what.plan, files=())
    assert lay_out_windows(empty, [], 2 * MIB).num_windows == 0


def test_lengths_that_do_not_fit_the_plan_are_refused():
    what = share([10], [b"x"])
    with pytest.raises(InternalError, match="1 deferred"):
        lay_out_windows(what.plan, [[1, 2]], 2 * MIB)


def test_a_digest_names_a_plan_and_changes_with_anything_in_it():
    plan = share([10, 3 * MIB], [b"x"]).plan
    assert plan_digest(plan) == plan_digest(share([10, 3 * MIB], [b"y"], seed=1).plan)
    file = plan.files[0]
    changed = [
        replace(plan, rank=1),
        replace(plan, container="safetensors"),
        replace(plan, files=()),
        replace(plan, files=(replace(file, key="other"),)),
        replace(plan, files=(replace(file, file=1),)),
        replace(plan, files=(replace(file, dtypes=("int8",)),)),
        replace(plan, files=(replace(file, header=b"h"),)),
        replace(plan, files=(replace(file, source_start=file.source_start + 1),)),
        replace(plan, files=(replace(file, deferred=file.deferred + 1),)),
    ]
    assert len({plan_digest(one) for one in [plan, *changed]}) == len(changed) + 1
