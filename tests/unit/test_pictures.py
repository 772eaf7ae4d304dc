"""Pictures: what is in them, derived from the values; that they stay small, and are well-formed."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import ray_dcp
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import InvalidRequestError, MissingKeyError
from ray_dcp.format.save_trace import RankTimes, SaveTrace, Span, make_trace
from ray_dcp.view.charts import Leaf
from ray_dcp.view.checkpoint_view import CheckpointView
from ray_dcp.view.pictures import (
    Picture,
    line_chart,
    picture_diff,
    picture_histogram,
    picture_layout,
    picture_norms,
    picture_reshard,
    picture_steps,
    tensor_tree,
    timeline,
)
from ray_dcp.view.run_listing import ListedCheckpoint
from ray_dcp.view.run_view import RunView
from ray_dcp.view.tensor_handle import TensorInfo
from tests.support import checkpoints

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
    assert {"record: commit", "write: write durably"} <= set(texts(root))
    many = timeline(trace_of(10_000, late=77))
    assert len(many.html) < 120_000
    assert "▲ rank 77" in texts(parsed(many))
    parsed(timeline(SaveTrace(attempt="a", mode="save", world_size=1, began_s=0, committed_s=0)))


def test_a_late_rank_is_marked_and_named_and_so_is_when_training_went_on():
    root = parsed(timeline(trace_of(4, late=2)))
    assert sum(text.startswith("▲ rank 2") for text in texts(root)) == 1
    assert "rank 2 ended write after" in "".join(root.itertext())
    assert "<script>alert(1)</script>" in "".join(root.itertext())
    assert "training goes on" not in texts(root)
    root = parsed(timeline(trace_of(3, staged=True)))
    assert "training goes on" in texts(root)
    (line,) = [n for n in root.iter("line") if n.get("stroke") == "#9a6fd0"]
    (stage, *_) = titled(root, "^rank 0: stage")
    end = number(stage, "x") + number(stage, "width")
    assert number(line, "x1") == pytest.approx(end, abs=0.1)


# --- layouts ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> CheckpointView:
    """Two tensors of 4 x 1024, a row on each of 4 ranks."""
    table = checkpoints.large_table(2, 4, "a" * 16, files=4)
    return ray_dcp.open(
        checkpoints.place_table(tmp_path_factory.mktemp("cut") / "a", table, "a" * 16)
    )


def test_a_layout_has_a_box_for_each_part_where_it_lies(cut: CheckpointView):
    name = cut.names[0]
    root = parsed(picture_layout(cut, name))
    parts = titled(root, r"^rank \d \[")
    told = [part.find("title").text for part in parts]  # type: ignore[union-attr]
    assert told == [f"rank {rank} [{rank}:{rank + 1}, 0:1024]" for rank in range(4)]
    tops = [number(part, "y") for part in parts]
    assert np.diff(tops) == pytest.approx([number(parts[0], "height")] * 3, abs=0.1)
    assert len({part.get("fill") for part in parts}) == 4
    assert "4×1024 · float32 · 16.0 KiB · 4 parts on 4 ranks" in "".join(root.itertext())
    wanted = titled(parsed(picture_reshard(cut, name, (2, 2))), "^wanted by rank")
    assert [part.find("title").text for part in wanted][1:3] == [  # type: ignore[union-attr]
        "wanted by rank 1 [0:2, 512:1024]", "wanted by rank 2 [2:4, 0:512]",
    ]  # fmt: skip
    assert number(wanted[1], "x") == number(wanted[3], "x") > number(wanted[0], "x")


def test_uneven_parts_scalars_and_more_parts_than_are_drawn(tmp_path: Path):
    state = {"v": torch.ones(10), "s": torch.tensor(1), "cube": torch.ones(4, 6, 8)}
    ray_dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    view = ray_dcp.open(tmp_path / "a")
    widths = [
        number(part, "width") for part in titled(parsed(picture_reshard(view, "v", 3)), "^wanted")
    ]
    assert widths == pytest.approx([120, 120, 60])
    assert len(titled(parsed(picture_layout(view, "s")), r"^rank 0 \[0:1\]")) == 1
    root = parsed(picture_reshard(view, "cube", (2, 2, 2)))
    assert len(titled(root, "^wanted")) == 4  # of eight: the first slice of the third dimension
    table = checkpoints.large_table(1, 1000, "a" * 16, files=1000)
    many = ray_dcp.open(checkpoints.place_table(tmp_path / "many", table, "a" * 16))
    root = parsed(picture_layout(many, many.names[0]))
    assert len(titled(root, r"^rank \d+ \[")) == 400
    assert "the first 400 parts" in texts(root)
    assert "… and 976 more" in texts(parsed(picture_reshard(many, many.names[0], 1000)))


def test_a_reshard_tells_who_takes_how_much_from_whom(cut: CheckpointView):
    root = parsed(picture_reshard(cut, cut.names[0], 3))
    bars = titled(root, r"^[\d.]+ KiB from rank \d$")
    told = [bar.find("title").text for bar in bars]  # type: ignore[union-attr]
    assert told == [f"4.0 KiB from rank {rank}" for rank in range(4)]
    assert {"8.0 KiB of 2 ranks", "0 B of 0 ranks"} <= {*texts(root)}
    with pytest.raises(InvalidRequestError, match="numbers of parts"):
        picture_reshard(cut, cut.names[0], (2, 2, 2))
    with pytest.raises(MissingKeyError, match="did you mean"):
        picture_layout(cut, cut.names[0][:-1])


# --- trees, tables, lines -----------------------------------------------------------------------


def leaf(name: str, num_bytes: int) -> Leaf:
    return Leaf(name, TensorInfo((num_bytes,), "int8", num_bytes, 1, None))


def leaves(n: int) -> list[Leaf]:
    return [leaf(f"model.layers.{i}.w", 4 * (i + 1)) for i in range(n)]


def test_a_tree_adds_up_and_sorts_layer_9_before_layer_10():
    root = parsed(tensor_tree([*leaves(12), Leaf(NASTY, None)]))
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


def test_a_tree_of_many_tensors_is_bounded():
    picture = tensor_tree(leaves(20_000))
    assert len(picture.html) < 400_000
    assert "… and 19960 more" in "".join(parsed(picture).itertext())


def run_of(steps: range | tuple[int, ...]) -> RunView:
    """A run as a listing gives it, with steps of so many MiB."""
    return RunView(
        Target("memory://no-run"),
        tuple(
            ListedCheckpoint(f"step-{i}", i, "committed", i << 20, None, None, metrics={"loss": i})
            for i in steps
        ),
    )


def test_the_steps_of_a_run_have_bars_of_their_sizes():
    root = parsed(picture_steps(run_of((1, 2, 4)), details=False))
    assert [th.text for th in root.iter("th")] == ["step", "state", "mark", "loss", "size"]
    bars = [s for s in root.iter("span") if "background:#4c8fd6" in s.get("style", "")]
    widths = [int(re.search(r"width:(\d+)px", b.get("style", "")).group(1)) for b in bars]  # type: ignore[union-attr]
    assert widths == [30, 0, 60, 0, 120, 0]
    rows = ["".join(row.itertext()) for row in root.iter("tr")]
    assert "★" in rows[1]
    assert "latest" in rows[3]
    root = parsed(picture_steps(run_of(range(120)), details=False))
    assert len(list(root.iter("tr"))) == 101
    assert "… and 20 earlier steps" in "".join(root.itertext())


def test_lines_go_up_where_values_do_and_the_steadiest_are_grey():
    series = {f"steady{i}": [(0, 5.0), (1, 5.0), (2, 5.0)] for i in range(9)}
    series["moves"] = [(0, 1.0), (1, 2.0), (2, 3.0)]
    root = parsed(line_chart(series, NASTY))
    lines = {n.find("title").text: n for n in root.iter("polyline")}  # type: ignore[union-attr]
    assert len(lines) == 10
    ys = heights(lines["moves"])
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    assert ys == sorted(ys, reverse=True)
    assert sum(line.get("stroke") == "#8d949c" for line in lines.values()) == 2
    assert "in grey: 2 that change less" in "".join(root.itertext())
    (line,) = parsed(line_chart({"loss": [(0, 100.0), (1, 10.0), (2, 1.0), (3, 0.1)]})).iter(
        "polyline"
    )
    steps = np.diff(heights(line))  # on a logarithmic scale
    assert steps == pytest.approx([steps[0]] * 3, abs=0.2)
    root = parsed(line_chart({"w": [(0, 1.0), (1, float("nan")), (2, float("inf")), (3, 2.0)]}))
    assert texts(root).count("✕") == 2
    assert [len(heights(line)) for line in root.iter("polyline")] == [2]
    parsed(line_chart({"w": [(0, float("nan"))]}))
    parsed(line_chart({}))


def heights(line: ElementTree.Element) -> list[float]:
    return [float(point.split(",")[1]) for point in line.attrib["points"].split()]


# --- of views -----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        state = {"a": {"w": torch.full((40, 10), float(step)), "frozen": torch.ones(7)}, "n": step}
        ray_dcp.save(state, checkpoint_id=tmp_path / "run" / f"step-{step}", no_dist=True)
    return tmp_path / "run"


def test_a_run_shows_itself_as_a_table_and_a_checkpoint_its_tree_and_its_timeline(run: Path):
    found = ray_dcp.open(run)
    root = parsed(Picture(found._repr_html_()))
    assert len(list(root.iter("tr"))) == 4
    assert {"stall", "durable", "new", "layout"} <= {th.text for th in root.iter("th")}
    plain = parsed(picture_steps(found, details=False))
    assert "stall" not in [th.text for th in plain.iter("th")]
    root = parsed(Picture(found[1]._repr_html_()))
    assert {"w", "frozen", "n"} <= {code.text for code in root.iter("code")}
    assert "coordinator" in texts(root)
    assert "coordinator" in texts(parsed(Picture(found.step(1).trace._repr_html_())))


def test_views_are_drawn_by_name(run: Path):
    view = ray_dcp.open(run / "step-1")
    assert parsed(Picture(view["a.w"]._repr_html_())).tag == "div"
    for layout, count in ((4, 4), ("2x2", 4), ((2, 5), 10)):
        assert len(titled(parsed(picture_reshard(view, "a.w", layout)), "^wanted by")) == count
    assert "2 tensors and 1 object" in "".join(parsed(Picture(view._repr_html_())).itertext())
    preview = parsed(Picture(view.reshard(4)._repr_html_()))
    assert [t for t in texts(preview) if t.startswith("rank")] == [f"rank {i}" for i in range(4)]
    with pytest.raises(InvalidRequestError, match="is an object"):
        picture_layout(view, "n")


def test_a_difference_tells_how_much_changed_and_where_most(tmp_path: Path):
    old = {"same": torch.ones(75), "little": torch.ones(25), NASTY[:-1]: torch.ones(25)}
    new = {**old, "little": torch.ones(25) * 1.25, NASTY[:-1]: torch.ones(25) * 1.5}
    states = old, {**new, "new": torch.ones(125)}
    for name, state in zip("ab", states, strict=True):
        ray_dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
    found = ray_dcp.open(tmp_path / "a").diff(ray_dcp.open(tmp_path / "b"))
    root = parsed(Picture(found._repr_html_()))
    shares = {
        kind: number(titled(root, f"^{kind}: ")[0], "width")
        for kind in ("unchanged", "changed", "added")
    }
    assert shares["added"] == pytest.approx(shares["unchanged"] * 5 / 3, abs=0.1)
    assert sum(shares.values()) == pytest.approx(860, abs=0.1)
    assert "1 unchanged, 300 B" in texts(root)
    assert not titled(root, "^same")
    told = texts(parsed(picture_diff(found, values=True)))
    assert told.index("50.0%") < told.index("25.0%")


def test_a_histogram_has_the_share_of_each_bin_and_counts_what_is_not_finite():
    one = torch.cat([torch.zeros(30), torch.full((10,), 4.0), torch.tensor([float("nan")])])
    other = torch.full((2, 2), 2.0, dtype=torch.bfloat16)
    state = {"one": one, "other": other, "none": torch.zeros(0), "z": torch.ones(1).cfloat()}
    ray_dcp.save(state, checkpoint_id="memory://histogram")
    view = ray_dcp.open("memory://histogram")
    root = parsed(picture_histogram(view["one"], view["other"], bins=4))
    assert texts(root)[-2:] == ["one: 41 values, 1 not finite", "other: 4 values"]
    drawn = [p.get("points").split() for p in root.iter("polygon")]
    heights = [[float(point.split(",")[1]) for point in points[1:-1:2]] for points in drawn]
    floor, top = max(heights[1]), min(heights[1])  # all of `other` lies in one bin
    shares = [[(floor - height) / (floor - top) for height in found] for found in heights]
    assert shares[0] == pytest.approx([0.75, 0, 0, 0.25], abs=0.01)
    assert shares[1] == pytest.approx([0, 0, 1, 0])
    assert "no finite values" in picture_histogram(view["none"]).html
    for bad, bins in (([], 9), ([view["z"]], 9), ([one], 9), ([view["one"]], 1)):
        with pytest.raises(InvalidRequestError, match="expected"):
            picture_histogram(*bad, bins=bins)


def test_norms_over_the_steps_are_those_of_the_tensors(run: Path):
    drawn = picture_norms(ray_dcp.open(run), "a.*")
    told = [point.find("title").text for point in parsed(drawn).iter("circle")]  # type: ignore[union-attr]
    assert told[:3] == [f"a.w at {step}: {20 * step}" for step in (1, 2, 3)]
    drawn.save(run / "norms.html", "<t>")
    page = (run / "norms.html").read_text()
    assert drawn.html in page
    assert "<title>&lt;t&gt;</title>" in page
    with pytest.raises(InvalidRequestError, match=r"match 'b\.\*'"):
        picture_norms(ray_dcp.open(run), "b.*")
