"""`progress=` of every long operation: what is called and drawn, and that neither does harm."""

from __future__ import annotations

import io
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ray_dcp
from ray_dcp import Progress
from ray_dcp.cli.main import main
from ray_dcp.errors import DamagedCheckpointError, InvalidRequestError
from ray_dcp.manager import Item
from ray_dcp.store.local import LocalStorage
from ray_dcp.view import progress as progress_module
from ray_dcp.view.progress import Meter, bar_text, reporting
from tests.support import checkpoints, cli_story

STATE = {"w": torch.arange(5000.0), "n": 3}
NUM_BYTES = 20_000


def save(path: Path, **named: Any) -> Path:
    ray_dcp.save(dict(STATE), checkpoint_id=path, no_dist=True, **named)
    return path


def managed(run: Path) -> ray_dcp.CheckpointManager:
    return ray_dcp.CheckpointManager(run, 1, step_name="step-{step}", no_dist=True)


def restore(run: Path, _: Path, **named: Any) -> None:
    with managed(run) as manager:
        manager.restore(2, {"w": torch.zeros(5000), "n": 0}, **named)


def save_managed(run: Path, target: Path, **named: Any) -> None:
    with managed(target) as manager:
        manager.save(1, dict(STATE), **named)


def load(run: Path, _: Path, **named: Any) -> None:
    state = {"w": torch.zeros(5000), "n": 0}
    ray_dcp.load(state, checkpoint_id=run / "step-2", no_dist=True, **named)


def load_newest(run: Path, _: Path, **named: Any) -> None:
    ray_dcp.load_newest({"w": torch.zeros(5000), "n": 0}, run, no_dist=True, **named)


def export(format_: str) -> Callable[..., object]:
    return lambda run, target, **named: ray_dcp.export(
        run / "step-2", target, format_, include=["w"], **named
    )


def import_from(kind: str) -> Callable[..., object]:
    def act(run: Path, target: Path, **named: Any) -> None:
        source = run.parent / "source"
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
        "copying", lambda run, to, **named: ray_dcp.copy(run / "step-2", to, **named), "target",
    ),
    "verify": ("verifying", lambda run, _, **named: ray_dcp.verify(run / "step-2", **named), "2"),
    "view": (
        "verifying", lambda run, _, **named: ray_dcp.open(run / "step-2").verify(**named), "2",
    ),
    "average": (
        "averaging",
        lambda run, to, **named: ray_dcp.average([run / "step-1", run / "step-2"], to, **named),
        "target",
    ),
    "warm_up": (
        "warming up",
        lambda *_, **named: ray_dcp.warm_up(STATE, no_dist=True, **named).result(),
        "memory",
    ),
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(tmp_path / f"run/step-{step}")
    return tmp_path / "run"


@pytest.mark.parametrize("verb", VERBS)
def test_every_long_operation_reports_how_far_it_is(
    run: Path, monkeypatch: pytest.MonkeyPatch, verb: str
):
    """It refuses what is no function before it writes, and survives a function that raises."""
    monkeypatch.setattr(progress_module, "TICK_S", 0.001)
    doing, act, name = VERBS[verb]
    with pytest.raises(InvalidRequestError, match="progress must be True, False or a function"):
        act(run, run.parent / "target", progress="yes")
    assert not list(run.parent.glob("target/**/manifest-*"))
    assert not (run.parent / "target").is_file()
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
        act(run, run.parent / "target", progress=note)
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
    monkeypatch.setattr(progress_module, "LEAVING_S", 0.01)
    over = threading.Event()
    with pytest.warns(UserWarning, match="has not returned for 0.01 s.*itself is not affected"):
        save(tmp_path / "stuck", progress=lambda now: over.wait())
    with warnings.catch_warnings():  # as `python -W error`
        warnings.simplefilter("error")
        save(tmp_path / "error", progress=lambda now: over.wait())
    over.set()
    assert all(ray_dcp.verify(tmp_path / name).ok for name in ("stuck", "error"))


def test_an_operation_that_fails_says_so_and_a_fallback_names_what_it_tries(run: Path):
    file, first, _ = checkpoints.payload_of(run / "step-2", "w")
    checkpoints.flip(file, first)
    seen: list[Progress] = []
    with pytest.raises(DamagedCheckpointError):
        load(run, run, progress=seen.append)
    assert seen[-1].outcome == "failed"
    assert "failed after" in str(seen[-1])
    with pytest.warns(UserWarning, match="instead of the newer"):
        load_newest(run, run, progress=seen.append)
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
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
):
    save(run / "step-3")
    file, first, _ = checkpoints.payload_of(run / "step-2", "w")
    checkpoints.flip(file, first)
    read, printed = LocalStorage.read, dict[str, str]()

    def noted(self: LocalStorage, key: str, *more: Any) -> bytes:
        step = Path(self.url).name
        if self.url.startswith(str(run)) and key.endswith(".distcp") and step not in printed:
            printed[step] = capsys.readouterr().out
        return read(self, key, *more)

    monkeypatch.setattr(LocalStorage, "read", noted)
    words = [verb, str(run), *([str(run.parent / "copy"), "--verify"] if verb == "cp" else [])]
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 1
    first, second = printed["step-2"].splitlines(), printed["step-3"].splitlines()
    (one,), (two, finding) = first, second
    assert one.startswith(f"{run}/step-1: {'ok' if verb == 'verify' else 'copied'}, ")
    assert two.startswith(f"{run}/step-2: {'1 problem' if verb == 'verify' else 'copied'}, ")
    assert finding.startswith("  damaged: __0_0.")
    last = capsys.readouterr().out.splitlines()
    assert last[0].startswith(f"{run}/step-3: ")
    assert last[1].startswith("newest good: step 3" if verb == "verify" else "copied 3 steps")
    assert len(last) == 2
