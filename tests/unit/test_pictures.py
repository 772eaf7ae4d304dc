"""Pictures: what is in them, derived from the values; that they stay small, and are well-formed."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import ray_dcp
from ray_dcp.errors import InvalidRequestError, MissingKeyError
from ray_dcp.format.save_trace import RankTimes, SaveTrace, Span, make_trace
from ray_dcp.view.pictures import (
    Leaf,
    Picture,
    even_boxes,
    picture_diff,
    picture_layout,
    picture_norms,
    picture_preview,
    picture_reshard,
    picture_steps,
    picture_timeline,
    picture_tree,
    reshard,
    shard_layout,
    tensor_tree,
    timeline,
)
from ray_dcp.view.pictures.drawing import rank_colour

NASTY = "</title><script>alert(1)</script>&\"'\x00\ud800"


def parsed(picture: Picture) -> ElementTree.Element:
    """A picture as XML; fails if it is not well-formed, or needs anything from outside."""
    assert "<script" not in picture.html
    assert "http" not in picture.html
    assert "<style" not in picture.html
    return ElementTree.fromstring(picture.html)


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(node.itertext()) for node in root.iter("text")]


def titled(root: ElementTree.Element, what: str) -> list[ElementTree.Element]:
    """The shapes whose title matches."""
    found = []
    for node in root.iter():
        title = node.find("title")
        if title is not None and node.tag != "svg" and re.search(what, title.text or ""):
            found.append(node)
    return found


def number(node: ElementTree.Element, name: str) -> float:
    return float(node.attrib[name])


# --- timelines ----------------------------------------------------------------------------------


def trace_of(n: int, late: int | None = None, staged: bool = False) -> SaveTrace:
    stops = np.full(n, 0.8)
    if late is not None:
        stops[late] = 1.8
    times = {
        "capture": RankTimes.of(range(n), [0.0] * n, [0.1] * n),
        "write": RankTimes.of(range(n), [0.2] * n, stops, [1 << 20] * n),
    }
    if staged:
        times["stage"] = RankTimes.of(range(n), [0.2] * n, [0.4] * n)
    where = {late: NASTY} if late is not None else {}
    return make_trace("0123456789abcdef", "async_save" if staged else "save", n, 1e9, 2.0,
                      [Span("record", None, 1.9, 2.0)], times, where=where)  # fmt: skip


def test_a_timeline_has_a_lane_for_each_rank_and_bars_as_long_as_they_took():
    root = parsed(timeline(trace_of(4), "/run/step-1"))
    assert {"coordinator", "rank 0", "rank 1", "rank 2", "rank 3"} <= set(texts(root))
    writes = titled(root, r"^rank \d: write")
    captures = titled(root, r"^rank \d: capture")
    assert len(writes) == len(captures) == 4
    for write, capture in zip(writes, captures, strict=True):
        assert number(write, "width") == pytest.approx(6 * number(capture, "width"), rel=0.01)
        assert number(write, "x") > number(capture, "x") + number(capture, "width")
    tops = [number(node, "y") for node in writes]
    assert tops == sorted(tops)
    assert len(set(tops)) == 4
    (record,) = titled(root, "^coordinator: record")
    end = number(record, "x") + number(record, "width")
    waits = titled(root, r"^rank \d: commit")
    assert {round(number(w, "x") + number(w, "width"), 1) for w in waits} == {round(end, 1)}


def test_a_late_rank_is_marked_and_named_with_its_place():
    root = parsed(timeline(trace_of(4, late=2)))
    assert "▲ rank 2" in texts(root)
    assert sum(text.startswith("▲") for text in texts(root)) == 1
    assert "was late with write" in "".join(root.itertext())
    assert "<script>alert(1)</script>" in "".join(root.itertext())


def test_a_timeline_of_ten_thousand_ranks_is_bounded_and_tells_how_many_it_leaves_out():
    picture = timeline(trace_of(10_000, late=77))
    assert len(picture.html) < 120_000
    root = parsed(picture)
    assert "▲ rank 77" in texts(root)
    shown = sum("rank " in text for text in texts(root))
    assert f"… and {10_000 - shown} more ranks" in "".join(root.itertext())


# --- layouts ------------------------------------------------------------------------------------


def test_a_layout_has_a_box_for_each_part_where_it_lies():
    root = parsed(shard_layout(even_boxes((100, 50), (4, 2)), NASTY, itemsize=2))
    parts = titled(root, r"^rank \d \[")
    assert len(parts) == 8
    widths, heights = ({round(number(p, side), 1) for p in parts} for side in ("width", "height"))
    assert len(widths) == len(heights) == 1
    by_rank = {int(p.find("title").text.split()[1]): p for p in parts}  # type: ignore[union-attr]
    assert number(by_rank[0], "y") == number(by_rank[1], "y") < number(by_rank[2], "y")
    assert number(by_rank[0], "x") == number(by_rank[6], "x") < number(by_rank[1], "x")
    assert by_rank[3].get("fill") == rank_colour(3)
    assert by_rank[7].find("title").text == "rank 7 [75:100, 25:50]"  # type: ignore[union-attr]


def test_half_a_million_parts_become_a_raster_of_bounded_size():
    boxes = even_boxes((100_000, 500), (1000, 500))
    picture = shard_layout(boxes)
    assert len(picture.html) < 400_000
    parsed(picture)


def test_a_reshard_tells_who_takes_how_much_from_whom():
    before, after = even_boxes((12, 10), (4,)), even_boxes((12, 10), (3,))
    root = parsed(reshard(before, after, "w", itemsize=4))
    bars = titled(root, r"^\d+ B from rank \d$")
    told = [bar.find("title").text for bar in bars]  # type: ignore[union-attr]
    assert told == [
        "120 B from rank 0", "40 B from rank 1", "80 B from rank 1", "80 B from rank 2",
        "40 B from rank 2", "120 B from rank 3",
    ]  # fmt: skip
    assert number(bars[0], "width") == pytest.approx(3 * number(bars[1], "width"), rel=0.01)
    assert len(titled(root, "^wanted by rank")) == 3
    assert "160 B of 2 ranks" in texts(root)


# --- trees, tables, lines -----------------------------------------------------------------------


def leaves(n: int) -> list[Leaf]:
    return [Leaf(f"model.layers.{i}.w", (i + 1,), "float32", 4 * (i + 1)) for i in range(n)]


def test_a_tree_adds_up_and_sorts_layer_9_before_layer_10():
    root = parsed(tensor_tree([*leaves(12), Leaf(NASTY, None, "", 0)]))
    names = [node.text for node in root.iter("code")]
    assert names[0].startswith("</title><script>")
    assert names[1] == "model.layers"
    assert names[2:] == [f"{i}.w" for i in range(12)]
    spans = ["".join(span.itertext()) for span in root.iter("span")]
    assert "312 B" in spans  # 4 * (1 + ... + 12)
    bars = [s for s in root.iter("span") if "background" in s.get("style", "")]
    widths = [int(re.search(r"width:(\d+)px", s.get("style", "")).group(1)) for s in bars]  # type: ignore[union-attr]
    assert widths[:2] == [0, 130]
    assert widths[2:] == [max(round(130 * 4 * (i + 1) / 312), 1) for i in range(12)]


def test_a_tree_of_a_hundred_thousand_tensors_is_bounded():
    picture = tensor_tree(leaves(100_000))
    assert len(picture.html) < 400_000
    assert "… and 99960 more" in "".join(parsed(picture).itertext())


# --- of views -----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        state = {"a": {"w": torch.full((40, 10), float(step)), "frozen": torch.ones(7)}, "n": step}
        ray_dcp.save(state, checkpoint_id=tmp_path / "run" / f"step-{step}", no_dist=True)
    return tmp_path / "run"


def test_a_run_shows_itself_as_a_table(run: Path):
    found = ray_dcp.open(run)
    root = parsed(Picture(found._repr_html_()))
    assert len(list(root.iter("tr"))) == 4
    heads = [th.text for th in root.iter("th")]
    assert {"stall", "durable", "new", "layout"} <= set(heads)
    plain = parsed(picture_steps(found, details=False))
    assert "stall" not in [th.text for th in plain.iter("th")]


def test_views_are_drawn_by_name(run: Path):
    view = ray_dcp.open(run / "step-1")
    assert "a.w" in "".join(parsed(picture_layout(view, "a.w")).itertext())
    assert parsed(Picture(view["a.w"]._repr_html_())).tag == "div"
    assert len(titled(parsed(picture_reshard(view, "a.w", 4)), "^wanted by")) == 4
    assert len(titled(parsed(picture_reshard(view, "a.w", "2x2")), "^wanted by")) == 4
    assert len(titled(parsed(picture_reshard(view, "a.w", (2, 5))), "^wanted by")) == 10
    assert "rank 0" in texts(parsed(picture_timeline(view)))
    assert "3 tensors and objects" in "".join(parsed(picture_tree(view)).itertext())
    preview = parsed(picture_preview(view.reshard(4)))
    assert [t for t in texts(preview) if t.startswith("rank")] == [f"rank {i}" for i in range(4)]
    with pytest.raises(MissingKeyError, match=r"a\.w"):
        picture_layout(view, "a.v")
    with pytest.raises(InvalidRequestError, match="is an object"):
        picture_layout(view, "n")


def test_a_difference_shows_itself_without_reading(run: Path):
    found = ray_dcp.open(run / "step-1").diff(ray_dcp.open(run / "step-2"))
    root = parsed(Picture(found._repr_html_()))
    assert titled(root, r"^a\.w: changed")
    assert not titled(root, r"^a\.frozen")
    measured = texts(parsed(picture_diff(found, values=True)))
    assert "100.0%" in measured  # from ones to twos


def test_norms_over_the_steps_are_those_of_the_tensors(run: Path):
    from ray_dcp.view.pictures.of_runs import norms_of

    norms = norms_of(ray_dcp.open(run), "a.*")
    assert norms["a.w"] == [(s, pytest.approx(s * 20.0)) for s in (1.0, 2.0, 3.0)]
    assert "a.w" in texts(parsed(picture_norms(ray_dcp.open(run), "a.*")))
    with pytest.raises(InvalidRequestError, match=r"match 'b\.\*'"):
        picture_norms(ray_dcp.open(run), "b.*")


def test_a_picture_is_saved_as_a_page(tmp_path: Path):
    Picture("<div>x</div>").save(tmp_path / "p.html", "<t>")
    page = (tmp_path / "p.html").read_text()
    assert "<div>x</div>" in page
    assert "<title>&lt;t&gt;</title>" in page
