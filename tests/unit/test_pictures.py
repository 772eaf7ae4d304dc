"""What is drawn: pictures of values, and the progress of long operations."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ray_dcp
from ray_dcp import Progress
from ray_dcp.cli.main import main
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core import bounds
from ray_dcp.errors import DamagedCheckpointError, InvalidRequestError, MissingKeyError
from ray_dcp.format.save_trace import RankTimes, SaveTrace, Span, make_trace
from ray_dcp.manager import Item
from ray_dcp.store.local import LocalStorage
from ray_dcp.view import progress as progress_module
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
from ray_dcp.view.progress import Meter, bar_text, reporting
from ray_dcp.view.run_listing import ListedCheckpoint
from ray_dcp.view.run_view import RunView
from ray_dcp.view.tensor_handle import TensorInfo
from tests.support import checkpoints, cli_story

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


@pytest.mark.parametrize("last", [2.0, 200.0, 1e6])
def test_the_title_of_an_axis_is_clear_of_its_ticks_and_a_logarithmic_one_is_told(last: float):
    for values, is_log in ([1.0, 2.0], False), ([1.0, 1000.0], True):
        root = parsed(line_chart({"loss": [(0.0, values[0]), (last, values[1])]}))
        notes = {one.text: one for one in root.iter("text")}
        title, tick = notes["step"], notes[f"{last:.10g}"]
        assert (title.get("text-anchor"), tick.get("text-anchor")) == ("end", "middle")
        # A letter is at most 7 units wide.
        begins = float(title.get("x", 0)) - 7 * len("step")
        assert begins > float(tick.get("x", 0)) + 7 * len(tick.text or "") / 2
        assert ("logarithmic" in notes) == is_log


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
    steps = np.diff(heights(line))  # on a logarithmic scale, which is told
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


# --- progress -------------------------------------------------------------------------------------


STATE = {"w": torch.arange(5000.0), "n": 3}
NUM_BYTES = 20_000


def save(path: Path, **named: Any) -> Path:
    ray_dcp.save(dict(STATE), checkpoint_id=path, no_dist=True, **named)
    return path


def managed(root: Path) -> ray_dcp.CheckpointManager:
    return ray_dcp.CheckpointManager(root, 1, step_name="step-{step}", no_dist=True)


def restore(root: Path, _: Path, **named: Any) -> None:
    with managed(root) as manager:
        manager.restore(2, {"w": torch.zeros(5000), "n": 0}, **named)


def save_managed(root: Path, target: Path, **named: Any) -> None:
    with managed(target) as manager:
        manager.save(1, dict(STATE), **named)


def load(root: Path, _: Path, **named: Any) -> None:
    state = {"w": torch.zeros(5000), "n": 0}
    ray_dcp.load(state, checkpoint_id=root / "step-2", no_dist=True, **named)


def load_newest(root: Path, _: Path, **named: Any) -> None:
    ray_dcp.load_newest({"w": torch.zeros(5000), "n": 0}, root, no_dist=True, **named)


def export(format_: str) -> Callable[..., object]:
    return lambda root, target, **named: ray_dcp.export(
        root / "step-2", target, format_, include=["w"], **named
    )


def import_from(kind: str) -> Callable[..., object]:
    def act(root: Path, target: Path, **named: Any) -> None:
        source = root.parent / "source"
        if kind == "torch" and not source.exists():
            torch.save(STATE, source)
        elif not source.exists():
            checkpoints.save_stock(source, dict(STATE))
        ray_dcp.import_checkpoint(source, target, **named)

    return act


# Name -> what is done, the call, and the end of the name that is shown.
VERBS: dict[str, tuple[str, Callable[..., object], str]] = {
    "save": ("saving", lambda _, target, **named: save(target, **named), "target"),
    "load": ("loading", load, "step-2"),
    "load_newest": ("loading", load_newest, "step-2"),
    "restore": ("loading", restore, "step-2"),
    "manager": ("saving", save_managed, "step-1"),
    "safetensors": ("exporting", export("safetensors"), "target"),
    "hf": ("exporting", export("hf"), "target"),
    "torch": ("exporting", export("torch"), "target"),
    "dcp": ("exporting", export("dcp"), "target"),
    "import torch": ("importing", import_from("torch"), "target"),
    "import stock": ("importing", import_from("stock"), "target"),
    "copy": (
        "copying", lambda root, to, **named: ray_dcp.copy(root / "step-2", to, **named), "target",
    ),
    "verify": ("verifying", lambda root, _, **named: ray_dcp.verify(root / "step-2", **named), "2"),
    "view": (
        "verifying", lambda root, _, **named: ray_dcp.open(root / "step-2").verify(**named), "2",
    ),
    "average": (
        "averaging",
        lambda root, to, **named: ray_dcp.average([root / "step-1", root / "step-2"], to, **named),
        "target",
    ),
    "warm_up": (
        "warming up",
        lambda *_, **named: ray_dcp.warm_up(STATE, no_dist=True, **named).result(),
        "memory",
    ),
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(tmp_path / f"run/step-{step}")
    return tmp_path / "run"


@pytest.mark.parametrize("verb", VERBS)
def test_every_long_operation_reports_how_far_it_is(
    root: Path, monkeypatch: pytest.MonkeyPatch, verb: str
):
    """It refuses what is no function before it writes, and survives a function that raises."""
    monkeypatch.setattr(progress_module, "TICK_S", 0.001)
    doing, act, name = VERBS[verb]
    with pytest.raises(InvalidRequestError, match="progress must be True, False or a function"):
        act(root, root.parent / "target", progress="yes")
    assert not list(root.parent.glob("target/**/manifest-*"))
    assert not (root.parent / "target").is_file()
    seen: list[Progress] = []
    ended, warned = threading.Event(), threading.Event()

    def note(now: Progress) -> None:
        seen.append(now)
        if now.outcome:
            ended.set()
            raise SystemExit("no")

    with warnings.catch_warnings():
        warnings.showwarning = lambda *_: warned.set()
        warnings.simplefilter("always")
        act(root, root.parent / "target", progress=note)
        assert ended.wait(180)
        assert warned.wait(180)
    assert [one.outcome for one in seen] == [""] * (len(seen) - 1) + ["done"]
    assert {one.doing for one in seen} == {doing}
    assert seen[-1].name.endswith(name)
    done = [one.done_bytes for one in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1].total_bytes >= NUM_BYTES
    assert (seen[-1].fraction, seen[-1].left_s) == (1.0, 0.0)


def test_a_function_that_hangs_is_named_and_the_save_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bounds, "SHOWN_END_S", 0.01)
    over = threading.Event()
    with pytest.warns(UserWarning, match="has not returned for 0.01 s.*itself is not affected"):
        save(tmp_path / "stuck", progress=lambda now: over.wait())
    with warnings.catch_warnings():  # as `python -W error`
        warnings.simplefilter("error")
        save(tmp_path / "error", progress=lambda now: over.wait())
    over.set()
    assert all(ray_dcp.verify(tmp_path / name).ok for name in ("stuck", "error"))


def test_an_operation_that_fails_says_so_and_a_fallback_names_what_it_tries(root: Path):
    file, first, _ = checkpoints.payload_of(root / "step-2", "w")
    checkpoints.flip(file, first)
    seen: list[Progress] = []
    with pytest.raises(DamagedCheckpointError):
        load(root, root, progress=seen.append)
    assert seen[-1].outcome == "failed"
    assert "failed after" in str(seen[-1])
    with pytest.warns(UserWarning, match="instead of the newer"):
        load_newest(root, root, progress=seen.append)
    assert seen[-1].name.endswith("step-1")


def test_items_of_a_step_are_verified_and_copied_as_one(tmp_path: Path):
    items = {"model": Item(), "data": Item()}
    with ray_dcp.CheckpointManager(tmp_path / "run", 1, items=items, no_dist=True) as manager:
        manager.save(1, {"model": dict(STATE), "data": {"w": torch.ones(1000)}})
    step, seen = tmp_path / "run/step-00000001", list[Progress]()
    ray_dcp.verify(step, progress=seen.append)
    ray_dcp.copy(step, tmp_path / "copy", progress=seen.append)
    for one in (one for one in seen if one.outcome):
        assert one.done_bytes == one.total_bytes >= NUM_BYTES + 4000


class Terminal(io.StringIO):
    """Standard error that is a terminal, and tells when a bar was drawn."""

    encoding = "utf-8"
    drawn: threading.Event

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.drawn.set() if "█" in text else None
        return super().write(text)


def test_a_terminal_has_a_bar_while_it_runs_and_a_line_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
):
    stream = Terminal()
    stream.drawn = threading.Event()
    monkeypatch.setattr("sys.stderr", stream)
    with reporting(True, "copying", "run\x1b/step-1") as meter:
        meter.expect(100)
        meter.add(50, "a.distcp")
        assert stream.drawn.wait(180)
        with meter.hidden():
            assert stream.getvalue().endswith("\r\x1b[K")
    *_, end = stream.getvalue().split("\r")
    assert "\x1b/" not in stream.getvalue()
    assert end.startswith("\x1b[Kcopied run\N{REPLACEMENT CHARACTER}/step-1: 100 B in ")


def test_elsewhere_there_is_a_line_every_ten_seconds_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    save(tmp_path / "a", progress=True)
    assert capsys.readouterr().err.startswith(f"saved {tmp_path}/a: ")
    stream = io.StringIO()
    lines = progress_module._Lines(stream, ends=True)
    for tenths in range(251):
        now = Progress(doing="saving", name="a", done_bytes=tenths, total_bytes=250,
                       seconds=tenths / 10, outcome="done" if tenths == 250 else "")  # fmt: skip
        lines(now)
    assert stream.getvalue().splitlines() == [
        "saving a: 40%, 100 of 250 B, 10 B/s, 15 s left",
        "saving a: 80%, 200 of 250 B, 10 B/s, 5 s left",
        "saved a: 250 B in 25.0 s",
    ]


def test_only_rank_0_draws_but_every_rank_is_called(capsys: pytest.CaptureFixture[str]):
    others = set(threading.enumerate())
    with reporting(True, "saving", "a", (1, 2)) as meter:
        meter.add(5, "f")
        with meter.following(lambda: pytest.fail("nobody wants to know")):
            new = set(threading.enumerate()) - others
            assert "ray_dcp progress" not in {one.name for one in new}
    assert meter.now().done_bytes == 0
    assert capsys.readouterr() == ("", "")
    seen: list[Progress] = []
    with reporting(seen.append, "saving", "a", (1, 8)):
        pass
    assert str(seen[-1]).startswith("saved a on rank 1 of 8: ")


def test_a_notebook_has_a_bar_below_the_cell_and_then_a_line(monkeypatch: pytest.MonkeyPatch):
    shown: list[dict[str, str]] = []
    drawn = threading.Event()

    def update(data: dict[str, str], raw: bool) -> None:
        shown.append(data)
        drawn.set()

    def display(data: dict[str, str], raw: bool, display_id: bool) -> SimpleNamespace:
        update(data, raw)
        return SimpleNamespace(update=update)

    kernel = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    with reporting(True, "loading", "<run>") as meter:
        meter.expect(4)
        meter.add(1)
        assert drawn.wait(180)
    assert shown[0]["text/html"].startswith('<div><progress value="0.250"></progress> loading &lt;')
    assert shown[-1]["text/plain"].startswith("loaded <run>: 4 B in ")
    assert "<progress" not in shown[-1]["text/html"]


NOW = Progress(
    doing="verifying",
    name="runs/llama/step-00012000",
    file="__3_0.0123456789abcdef.distcp",
    done_bytes=45 << 30,
    total_bytes=128 << 30,
    step=3,
    num_steps=12,
    seconds=90.0,
)


def test_screens_of_a_bar():
    told = [f"{width}:\n{bar_text(NOW, width)}" for width in (40, 60, 80, 120, 160)]
    unknown = Progress(doing="saving", name="run/step-1", phase="waiting", seconds=4.0)
    listing = Progress(doing="listing", name="runs/llama", step=30, num_steps=120, seconds=12.0)
    for other in (unknown, listing):
        told += [f"{width}:\n{bar_text(other, width)}" for width in (80, 120)]
    told += ["piped:", *map(str, (NOW, unknown, listing))]
    found = "\n".join(told) + "\n"
    cli_story.compare("progress", found, renew="RENEW_GOLDEN" in os.environ)


@given(
    st.builds(
        Progress, doing=st.just("saving"), name=st.text(max_size=80), phase=st.just("waiting"),
        file=st.text(max_size=40), done_bytes=st.integers(0, 1 << 50),
        total_bytes=st.integers(0, 1 << 50), step=st.integers(0, 99), num_steps=st.integers(0, 99),
        seconds=st.floats(0, 1e7),
    ),
    st.integers(1, 200),
)  # fmt: skip
def test_a_bar_fits_its_line_whatever_it_shows(now: Progress, width: int):
    text = bar_text(now, width)
    assert len(text) <= width
    assert not {*map(chr, range(32)), "\x7f", "\x9b"} & {*text}
    assert now.fraction is None or 0 <= now.fraction <= 1


@given(st.lists(st.tuples(st.sampled_from(["expect", "add", "begin"]), st.integers(0, 99))))
def test_a_meter_never_shows_more_than_all(acts: list[tuple[str, int]]):
    meter = Meter("copying", "run", sizes=[100] * 5)
    before = 0
    for act, number in acts:
        meter.begin("next") if act == "begin" else getattr(meter, act)(number)
        now = meter.now()
        assert before <= now.done_bytes <= now.total_bytes or act == "begin"
        before = now.done_bytes
    end = meter.now("done")
    assert end.done_bytes == end.total_bytes


@pytest.mark.parametrize("verb", ["verify", "cp"])
def test_each_step_of_a_run_is_printed_as_soon_as_it_is_done(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
):
    save(root / "step-3")
    file, first, _ = checkpoints.payload_of(root / "step-2", "w")
    checkpoints.flip(file, first)
    read, printed = LocalStorage.read, dict[str, str]()

    def noted(self: LocalStorage, key: str, *more: Any) -> bytes:
        step = Path(self.url).name
        if self.url.startswith(str(root)) and key.endswith(".distcp") and step not in printed:
            printed[step] = capsys.readouterr().out
        return read(self, key, *more)

    monkeypatch.setattr(LocalStorage, "read", noted)
    words = [verb, str(root), *([str(root.parent / "copy"), "--verify"] if verb == "cp" else [])]
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 1
    first, second = printed["step-2"].splitlines(), printed["step-3"].splitlines()
    (one,), (two, *finding) = first, second
    assert one.startswith(f"{root}/step-1: {'ok' if verb == 'verify' else 'copied'}, ")
    if verb == "verify":
        assert two.startswith(f"{root}/step-2: 1 problem, ")
        (found,) = finding
        assert found.startswith("  damaged: __0_0.")
    else:
        assert two.startswith(f"{root}/step-2: not copied: ")
        assert "of 'w'" in two
        assert finding == []
    last = capsys.readouterr().out.splitlines()
    assert last[0].startswith(f"{root}/step-3: ")
    assert last[1].startswith("newest good: step 3" if verb == "verify" else "copied 2 steps")
    assert len(last) == 2
