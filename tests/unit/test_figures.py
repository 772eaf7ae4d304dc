"""The pictures as matplotlib figures: what is in them, derived from the values."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest

from ray_dcp.errors import InvalidRequestError
from ray_dcp.format.save_trace import RankTimes, Span, make_trace
from ray_dcp.view.pictures import Changed, Leaf, Step, even_boxes, figures


def drawn(figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def test_a_timeline_has_a_bar_for_each_span():
    times = {"write": RankTimes.of(range(4), [0.5] * 4, [1.0, 1.0, 1.0, 3.0])}
    trace = make_trace("a", "save", 4, 0.0, 4.0, [Span("record", None, 3.0, 4.0)], times)
    figure = figures.figure_timeline(trace)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "coordinator", "rank 0", "rank 1", "rank 2", "rank 3",
    ]  # fmt: skip
    widths = sorted(round(patch.get_width(), 3) for patch in axes.patches)
    assert widths == [0.5, 0.5, 0.5, 1.0, 1.0, 2.5, 3.0, 3.0, 3.0]
    assert axes.get_yticklabels()[4].get_color() == "#d1495b"
    assert drawn(figure)


def test_a_layout_has_a_rectangle_for_each_part():
    (axes,) = figures.figure_layout(even_boxes((8, 6), (4, 2)), "w").axes
    boxes = [(p.get_x(), p.get_y(), p.get_width(), p.get_height()) for p in axes.patches]
    assert boxes == [(x, y, 3, 2) for y in (0, 2, 4, 6) for x in (0, 3)]
    assert drawn(figures.figure_layout(even_boxes((1000, 1000), (50, 50))))


def test_a_reshard_outlines_what_ranks_want():
    figure = figures.figure_reshard(even_boxes((12, 4), (4,)), even_boxes((12, 4), (3,)))
    left, right = figure.axes
    assert len(left.patches) == 4
    assert [p.get_height() for p in right.patches if not p.get_fill()] == [4, 4, 4]
    with pytest.raises(InvalidRequestError, match="two layouts"):
        figures.figure_reshard(even_boxes((4,), (2,)), even_boxes((5,), (2,)))


def test_lines_are_the_values_and_few_are_named():
    series = {f"w{i}": [(1, 5.0), (0, 5.0 - i)] for i in range(12)}
    (axes,) = figures.figure_lines(series).axes
    assert len(axes.lines) == 12
    assert len(axes.get_legend().texts) == 8
    assert axes.lines[0].get_xdata()[0] == 0
    assert np.array_equal(axes.lines[0].get_ydata(), [-5.0, 5.0])
    assert drawn(figures.figure_lines({}))


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InvalidRequestError, match="ray-dcp\\[viz\\]"):
        figures.figure_steps([])


def test_bars_are_as_long_as_values():
    leaves = [Leaf("m.a.w", (1,), "int8", 3 << 20), Leaf("m.b.w", (1,), "int8", 1 << 20)]
    (axes,) = figures.figure_tree(leaves).axes
    assert [p.get_width() for p in axes.patches] == [3.0, 1.0]
    steps = [Step(name="s-1", step=1, num_bytes=4 << 20, new_bytes=1 << 20)]
    (axes,) = figures.figure_steps(steps).axes
    assert [p.get_height() for p in axes.patches] == [4.0, 1.0]
    changes = [Changed("a", "changed", 9, 9, 0.5), Changed("b", "unchanged", 9)]
    (axes,) = figures.figure_diff(changes).axes
    assert [p.get_width() for p in axes.patches] == [0.5]
