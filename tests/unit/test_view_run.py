"""Runs: their steps, how one is named, tags and notes, also while a job saves and deletes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from click.testing import CliRunner, Result

import ray_dcp
from ray_dcp import errors
from ray_dcp.cli.main import main
from ray_dcp.format.manifest import AbortRecord, encode_record, record_key
from ray_dcp.format.table import decode_table
from ray_dcp.io import checkpoint
from ray_dcp.manager import CheckpointManager, Item
from ray_dcp.options import SaveOptions
from ray_dcp.store import local
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.storage import Entry, Storage
from ray_dcp.view import run_listing as listing
from ray_dcp.view.run_listing import ListedCheckpoint, list_checkpoints
from ray_dcp.view.run_view import RunView, picture_steps, split_address, step_cells
from ray_dcp.view.step_choice import best_of_run, choose
from tests.support import checkpoints
from tests.support.storages import interpose


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    with ray_dcp.CheckpointManager(path, 1) as manager:
        for step, loss in ((10, 0.5), (20, 0.1), (30, 0.3)):
            state = {"w": torch.full((8, 2), float(step)), "frozen": torch.ones(16)}
            manager.save(step, state, metrics={"loss": loss}, metadata={"commit": f"c{step}"})
        manager.join()
    return path


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Path:
    return shutil.copytree(root, tmp_path / "run")


def test_a_step_tells_what_its_manager_and_its_save_noted(root: Path):
    step = ray_dcp.open(root).step(20)
    assert (step.state, step.metrics, step.metadata) == (
        "committed", {"loss": 0.1}, {"commit": "c20"}
    )  # fmt: skip
    assert step.num_ranks == 1
    assert step.detail == ""
    assert step.layout == "whole"
    assert 0 <= step.stall_s <= step.durable_s


def test_new_bytes_are_those_of_tensors_that_changed(root: Path):
    first, second, third = ray_dcp.open(root)
    assert first.new_bytes == (8 * 2 + 16) * 4
    assert second.new_bytes == third.new_bytes == 8 * 2 * 4


@pytest.mark.parametrize(
    ("key", "step"),
    [
        (20, 20), ("20", 20), ("latest", 30), ("best", 20), ("best:loss", 20),
        ("best:loss:max", 10), ("step-00000010", 10),
    ],
)  # fmt: skip
def test_a_step_is_named_in_many_ways(root: Path, key: int | str, step: int):
    assert ray_dcp.open(root)[key]["w"][0, 0] == step
    assert ray_dcp.open(f"{root}@{key}")["w"][0, 0] == step


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (21, "nearest: 10, 20, 30"),
        ("latst", "did you mean 'latest'"),
        ("step-0000010", "did you mean 'step-00000010'"),
        ("best:los", "did you mean 'loss'"),
    ],
)
def test_a_step_that_is_not_there_offers_the_nearest(root: Path, key: int | str, said: str):
    for wrong in (True, 1.0, None, b"latest"):
        with pytest.raises(errors.InvalidRequestError, match="a step is named by"):
            ray_dcp.open(root)[wrong]
    with pytest.raises(errors.CheckpointNotFoundError, match=said):
        ray_dcp.open(root)[key]
    with pytest.raises(errors.CheckpointNotFoundError, match=said):
        ray_dcp.open(f"{root}@{key}")


def listed(step: int, state: str = "committed", **metrics: float) -> ListedCheckpoint:
    return ListedCheckpoint(f"step-{step}", step, state, 1, 1, float(step), metrics=metrics)


def test_the_best_is_told_by_the_name_of_its_metric_or_asked_for():
    run = [listed(1, acc=0.1), listed(2, acc=0.9), listed(3, acc=float("nan")), listed(4)]
    assert best_of_run(run).step == 2
    assert best_of_run(run, "acc", "min").step == 1
    odd = [listed(1, thing=1.0), listed(2, thing=2.0)]
    with pytest.raises(errors.InvalidRequestError, match="best:thing:min or best:thing:max"):
        best_of_run(odd)
    assert best_of_run(odd, "thing", "max").step == 2
    with pytest.raises(errors.InvalidRequestError, match="by which metric"):
        best_of_run([listed(1, acc=1.0, loss=1.0)])
    with pytest.raises(errors.InvalidRequestError, match="'min' or 'max'"):
        best_of_run(odd, "thing", "best")
    with pytest.raises(errors.CheckpointNotFoundError, match="NaN"):
        best_of_run([listed(1, loss=float("nan"))])


def test_of_equally_good_steps_the_newest_is_the_best_and_only_readable_ones_count():
    run = [listed(1, loss=0.5), listed(2, loss=0.5), listed(3, "damaged", loss=0.1)]
    assert best_of_run(run).step == 2
    assert choose(run, "latest").step == 2
    with pytest.raises(errors.CheckpointNotFoundError, match="committed step"):
        choose([listed(3, "damaged")], "latest")
    with pytest.raises(errors.StorageError, match=r"step-3 .*may be the latest step"):
        choose([*run[:2], listed(3, "unreadable")], "latest")


def test_two_folders_of_one_step_have_to_be_told_apart():
    def run(other, state="committed"):
        names = {"a-5": "committed", other: state}
        return [ListedCheckpoint(name, 5, names[name], 1, 1, 1.0) for name in names]

    with pytest.raises(errors.InvalidRequestError, match="a-5, b-5"):
        choose(run("b-5"), 5)
    assert choose(run("b-5", "aborted"), 5).name == choose(run("x/b-5"), 5).name == "a-5"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("run@5", ("run", "5")), ("run", ("run", None)), ("a@b/run", ("a@b/run", None)),
        ("run@", ("run@", None)), ("@5", ("@5", None)), ("a@b/run@best:x", ("a@b/run", "best:x")),
    ],
)  # fmt: skip
def test_an_address_is_taken_apart_at_its_last_at(text: str, found: tuple[str, str | None]):
    assert split_address(text) == found


def test_a_directory_with_an_at_in_its_name_is_taken_literally(tmp_path: Path):
    checkpoints.save(tmp_path / "run@5")
    checkpoints.save(tmp_path / "runs@new" / "step-1")
    assert ray_dcp.open(str(tmp_path / "run@5")).kind == "native"
    assert [step.step for step in ray_dcp.open(str(tmp_path / "runs@new"))] == [1]
    with pytest.raises(errors.CheckpointNotFoundError, match="did you mean 'runs@new'"):
        ray_dcp.open(tmp_path / "runs@now")


def test_tags_and_notes_are_put_on_steps_and_taken_away(run: Path):
    view = ray_dcp.open(run).tag("latest", "b", "a").annotate(30, "ünïcode")
    assert view.step(30).tags == ("a", "b")
    assert view.step("a").step == 30
    assert view.step(30).note == "ünïcode"
    view = view.tag(30, "a", remove=True).annotate(30, "")
    assert (view.step(30).tags, view.step(30).note) == (("b",), "")
    assert (view.annotate(10, "old") and run / ".manager" / "notes" / "10.txt").exists()
    with ray_dcp.CheckpointManager(run, 1) as manager:
        assert manager.step_info(30).tags == {"b"}
        manager.delete(10)
    assert not (run / ".manager" / "notes" / "10.txt").exists()


def test_a_step_that_is_deleted_while_the_run_is_listed_is_not_taken_for_a_stock_one(
    run: Path, monkeypatch
):
    real = listing.readable_entries

    def entries(storage: Storage) -> tuple[list[Entry], dict[str, str]]:
        before, refused = real(storage)
        ray_dcp.delete(run / "step-00000010")
        now, _ = real(storage)
        # What a folder is read slowly enough for: of the step, what goes first and what comes.
        early = [one for one in before if one.key == "step-00000010/.metadata"]
        return sorted([*early, *now], key=lambda one: one.key), refused

    monkeypatch.setattr(listing, "readable_entries", entries)
    assert ray_dcp.open(run).step(10).state == "deleted"


def test_a_tag_is_not_told_where_its_step_was_deleted_and_saved_anew(run: Path, monkeypatch):
    view = ray_dcp.open(run)
    real = type(view).refresh

    def refresh(self: RunView) -> RunView:
        monkeypatch.undo()
        with ray_dcp.CheckpointManager(run, 1, order="any") as manager:
            manager.delete(10, force=True)  # with its tags
            manager.save(10, {"w": torch.ones(3)})
        return real(self)

    monkeypatch.setattr(RunView, "refresh", refresh)
    with pytest.raises(errors.CheckpointNotFoundError, match="deleted before it had the tag"):
        view.tag(10, "good")
    assert view.refresh().step(10).tags == ()
    assert view.refresh().tag(10, "good").step(10).tags == ("good",)


def test_what_can_be_no_tag_and_no_note_is_refused_and_nothing_is_written(run: Path):
    view = ray_dcp.open(run)
    with pytest.raises(errors.InvalidRequestError, match="a tag must be"):
        view.tag(10, "good", "../bad")
    with pytest.raises(errors.InvalidRequestError, match="64 KiB"):
        view.annotate(10, "x" * 70_000)
    with pytest.raises(errors.InvalidRequestError, match="a note must be"):
        view.annotate(10, 5)
    with pytest.raises(errors.CheckpointNotFoundError):
        view.tag(11, "good")
    assert view.refresh().step(10).tags == ()


def test_a_tag_is_not_the_name_of_a_folder_which_it_would_hide(run: Path):
    first, second = (step.name for step in ray_dcp.open(run).steps[:2])
    with pytest.raises(errors.InvalidRequestError, match=f"tag '{second}' is the name of a folder"):
        ray_dcp.open(run).tag(first, "good", second)
    assert "good" not in ray_dcp.open(run).step(first).tags
    ray_dcp.open(run).tag(first, second, remove=True)  # such a tag of an earlier version goes


def test_a_tag_on_several_steps_names_none_of_them_and_one_without_number_takes_none(run: Path):
    checkpoints.save(run / "final")
    view = ray_dcp.open(run).tag(10, "x").tag(20, "x")
    with pytest.raises(errors.InvalidRequestError, match="10, 20"):
        view["x"]
    with pytest.raises(errors.InvalidRequestError, match="steps with a number"):
        view.tag("final", "x")


def test_the_best_step_by_each_of_two_metrics_is_marked(tmp_path: Path):
    with ray_dcp.CheckpointManager(tmp_path, 1) as manager:
        for step, loss, accuracy in ((1, 0.1, 0.2), (2, 0.3, 0.9), (3, 0.2, 0.5)):
            metrics = {"loss": loss, "accuracy": accuracy, "seen": step + 0.5}
            manager.save(step, {"w": torch.ones(2)}, metrics=metrics)
    run = ray_dcp.open_run(tmp_path)
    cells = step_cells(run, run.steps, details=False, now_s=0.0)
    assert [row["mark"] for row in cells] == ["", "", "latest"]
    assert [row["loss"] for row in cells] == ["*0.1", "0.3", "0.2"]
    assert [row["accuracy"] for row in cells] == ["0.2", "*0.9", "0.5"]
    # Nobody knows whether few or many of those are better.
    assert [row["seen"] for row in cells] == ["1.5", "2.5", "3.5"]
    shown = picture_steps(run).html
    assert shown.count("★</span>0.1<") == shown.count("★</span>0.9<") == 1


def test_details_of_many_steps_do_not_read_the_mounts_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with ray_dcp.CheckpointManager(tmp_path, 1) as manager:
        for step in range(1, 7):
            manager.save(step, {"w": torch.full((8, 2), float(step))})
    asked: list[str] = []
    kind_of = local.mount_kind

    def counting(directory: str) -> str | None:
        asked.append(directory)
        return kind_of(directory)

    monkeypatch.setattr(local, "mount_kind", counting)
    found = CliRunner().invoke(main, ["--json", "ls", "--full", str(tmp_path)])
    assert [(one["layout"], one["new_bytes"]) for one in json.loads(found.output)] == [
        ("whole", 64)
    ] * 6
    assert len(asked) < 6


def test_the_states_of_steps_that_are_not_whole(run: Path):
    saved = checkpoints.save(run / "step-40")
    (saved / "__0_0.00000000000000bb.distcp").write_bytes(b"another save")
    flying = run / "step-50"
    flying.mkdir()
    (flying / "__0_0.00000000000000aa.distcp").write_bytes(b"x")
    failed = run / "step-60"
    failed.mkdir()
    record = AbortRecord(attempt="00000000000000cc", reason="a rank died", rank=1)
    (failed / record_key(1)).write_bytes(encode_record(record))
    (failed / "__0_0.00000000000000cc.distcp").write_bytes(b"x")
    gone = checkpoints.save(run / "step-70")
    ray_dcp.delete(gone)
    half = checkpoints.save(run / "step-80")
    checkpoints.data_file(half).unlink()
    torn = checkpoints.save(run / "step-90")
    (torn / record_key(1)).write_bytes(b"{}")
    states = {step.step: step.state for step in ray_dcp.open(run) if step.step >= 40}
    assert states == {
        40: "committed", 50: "in flight", 60: "aborted", 70: "deleted", 80: "damaged",
        90: "damaged",
    }  # fmt: skip
    assert ray_dcp.open(run).step(40).in_flight == ("00000000000000bb",)
    with pytest.warns(UserWarning, match="step-40 is used as 'latest' because step-90 is"):
        assert ray_dcp.open(run)["latest"].url.endswith("step-40")
    with pytest.raises(errors.UncommittedCheckpointError):
        ray_dcp.open(run)[50]


def test_a_run_is_a_table_of_steps_metrics_bytes_and_times(run: Path, tmp_path: Path):
    other = SaveOptions(unchanged="link")
    opened = ray_dcp.open(run).tag(20, "good", "best-yet").annotate(20, "the second")
    opened = opened.annotate(10, "the first")
    state = {"w": torch.ones(8, 2), "frozen": torch.ones(16)}
    for _ in range(2):
        ray_dcp.save(state, checkpoint_id=run / "final", options=other)
    damaged = run / "step-00000030"
    next(damaged.glob("*.distcp")).unlink()
    ray_dcp.delete(run / "step-00000010")
    ray_dcp.save(state, checkpoint_id=run / "step-00000010")
    opened = opened.refresh()
    frame = opened.to_pandas()
    assert frame["name"].tolist() == [one.name for one in opened]
    by_name = frame.set_index("name")
    assert list(frame.columns) == [
        "name", "step", "state", "created", "num_bytes", "num_ranks", "tags", "note", "url",
        "new_bytes", "linked_bytes", "copied_bytes", "stall_s", "durable_s", "metrics.loss",
    ]  # fmt: skip
    twenty, thirty, final = (
        by_name.loc[name] for name in ("step-00000020", "step-00000030", "final")
    )
    assert (twenty["step"], twenty["state"], twenty["num_ranks"]) == (20, "committed", 1)
    assert twenty["metrics.loss"] == 0.1
    assert twenty["tags"].tolist() == ["best-yet", "good"]
    assert twenty["url"] == str(run / "step-00000020")
    step = opened.step(20)
    assert twenty["num_bytes"] == step.num_bytes
    assert twenty["new_bytes"] == step.new_bytes
    assert (twenty["stall_s"], twenty["durable_s"]) == (step.stall_s, step.durable_s)
    assert twenty["created"].timestamp() == pytest.approx(step.created_s, abs=1e-5)
    assert str(frame["created"].dtype) == "datetime64[us, UTC]"
    assert (thirty["state"], thirty["new_bytes"]) == ("damaged", pandas.NA)
    assert final["step"] is pandas.NA
    assert pandas.isna(final["metrics.loss"])
    assert str(frame["step"].dtype) == "Int64"
    assert twenty["note"] == "the second"
    assert by_name.loc["step-00000010", "note"] == ""  # the one before was deleted with its note


def test_without_pandas_the_package_is_named(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(errors.InvalidRequestError, match="pip install pandas"):
        ray_dcp.open(run).to_pandas()


# --- the listing ----------------------------------------------------------------------------------


@pytest.fixture
def several(saved_checkpoint: Path, stock_checkpoint: Path, tmp_path: Path) -> Path:
    for name in ("step-10", "step-9", "best"):
        shutil.copytree(saved_checkpoint, tmp_path / name)
    shutil.copytree(stock_checkpoint, tmp_path / "old" / "iter_0000020")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.txt").write_text("no checkpoint")
    return tmp_path


def by_name(root: Path) -> dict[str, ListedCheckpoint]:
    return {item.name: item for item in list_checkpoints(root)}


def test_checkpoints_are_listed_by_run_and_step_and_those_without_step_last(several: Path):
    found = [(item.name, item.step) for item in list_checkpoints(several)]
    assert found == [("step-9", 9), ("step-10", 10), ("best", None), ("old/iter_0000020", 20)]


def test_a_failed_save_over_a_stock_checkpoint_leaves_it_a_stock_checkpoint(several: Path):
    record = AbortRecord(attempt="a1", reason="a rank died", rank=None)
    path = several / "old" / "iter_0000020"
    (path / record_key(1)).write_bytes(encode_record(record))
    (path / "__0_0.a1.distcp").write_bytes(b"")
    assert by_name(several)["old/iter_0000020"].state == "stock"
    assert ray_dcp.open(path).kind == "stock"


@pytest.mark.parametrize("more", [-1, 1, None])
def test_a_file_that_is_missing_or_has_another_length_is_damage(several: Path, more: int | None):
    file = checkpoints.data_file(several / "step-9")
    num_bytes = file.stat().st_size
    detail = "is missing"
    if more is None:
        file.unlink()
    else:
        os.truncate(file, num_bytes + more)
        detail = f"has {num_bytes + more} bytes instead of {num_bytes}"
    found = by_name(several)
    assert (found["step-9"].state, found["step-10"].state) == ("damaged", "committed")
    assert found["step-9"].detail == f"{file.name} {detail}"


def test_a_checkpoint_is_listed_once_also_as_the_root_itself(tmp_path: Path):
    for _ in range(2):
        checkpoints.save(tmp_path / "step-10")
    for root, name in ((tmp_path, "step-10"), (tmp_path / "step-10", ".")):
        (item,) = list_checkpoints(root)
        assert (item.name, item.step, item.state) == (name, 10, "committed")


def test_nothing_is_listed_where_nothing_is_and_what_is_in_memory_is(tmp_path: Path):
    assert list_checkpoints(tmp_path) == list_checkpoints(tmp_path / "nothing") == ()
    for step in (2, 1):
        ray_dcp.save({"w": torch.ones(3)}, checkpoint_id=f"memory://listing/step-{step}")
    found = [(item.name, item.state) for item in list_checkpoints("memory://listing")]
    assert found == [("step-1", "committed"), ("step-2", "committed")]


# --- while a job saves ----------------------------------------------------------------------------


def save(path: Path, value: float = 1.0) -> None:
    ray_dcp.save({"w": torch.full((64,), value)}, checkpoint_id=path, no_dist=True)


@pytest.fixture
def live_run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save(tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


@pytest.mark.parametrize(("becomes", "state"), [(save, "committed"), (ray_dcp.delete, "deleted")])
def test_a_step_that_is_replaced_or_deleted_while_its_run_is_listed_is_not_damaged(
    live_run: Path, monkeypatch: pytest.MonkeyPatch, becomes: Callable, state: str
):
    done = interpose(
        monkeypatch,
        LocalStorage,
        "read",
        "*/step-2/manifest-*",
        lambda: becomes(live_run / "step-2"),
    )
    steps = ray_dcp.open(live_run)
    assert done
    assert [step.state for step in steps] == ["committed", state, "committed"]


def test_a_checkpoint_that_is_replaced_while_it_is_verified_is_verified_anew(
    live_run: Path, monkeypatch: pytest.MonkeyPatch
):
    done = interpose(
        monkeypatch, LocalStorage, "read", "*.distcp", lambda: save(live_run / "step-2", 2.0)
    )
    report = ray_dcp.verify(live_run / "step-2")
    assert done
    assert report.ok, report


def test_a_checkpoint_that_is_deleted_while_it_is_verified_is_gone_and_not_damaged(
    live_run: Path, monkeypatch: pytest.MonkeyPatch
):
    done = interpose(
        monkeypatch, LocalStorage, "read", "*.distcp", lambda: ray_dcp.delete(live_run / "step-2")
    )
    with pytest.raises(errors.CheckpointNotFoundError, match="it was deleted"):
        ray_dcp.verify(live_run / "step-2")
    assert done


def test_a_run_is_verified_like_a_checkpoint_and_names_the_steps(
    live_run: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = ray_dcp.verify(live_run)
    assert whole.ok
    sizes = [ray_dcp.verify(live_run / f"step-{step}").checked_bytes for step in (1, 2, 3)]
    assert whole.checked_bytes == sum(sizes)
    (data,) = (live_run / "step-2").glob("*.distcp")
    checkpoints.flip(data, data.stat().st_size // 2)
    (problem,) = ray_dcp.verify(live_run).problems
    assert problem.file == f"step-2/{data.name}"
    interpose(
        monkeypatch, LocalStorage, "read", "*.distcp", lambda: ray_dcp.delete(live_run / "step-3")
    )
    report = ray_dcp.verify(live_run)
    assert report.problems == (problem,)
    assert "step-3 was deleted meanwhile" in report.notes
    with pytest.raises(errors.CheckpointNotFoundError, match="check the path"):
        ray_dcp.verify(live_run / "nothing")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_step_that_goes_while_its_run_is_verified_is_no_damage(
    live_run: Path, monkeypatch: pytest.MonkeyPatch
):
    interpose(
        monkeypatch, LocalStorage, "read", "*.distcp", lambda: ray_dcp.delete(live_run / "step-3")
    )
    found = invoke("verify", live_run)
    assert found.exit_code == 0, found.output
    assert f"{live_run}/step-3: deleted meanwhile" in found.stdout
    assert found.stdout.count(": ok, ") == 2


@pytest.mark.parametrize(
    ("becomes", "left"),
    [
        (lambda step: ray_dcp.delete(step), "1 step: deleted meanwhile"),
        (lambda step: save(step, 2.0), "copied 3 steps"),
    ],
    ids=["deleted", "replaced"],
)
def test_a_run_is_copied_while_its_steps_are_replaced_and_deleted(
    live_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, becomes: Callable, left: str
):
    interpose(
        monkeypatch, LocalStorage, "open_writer", "*.distcp", lambda: becomes(live_run / "step-3")
    )
    found = invoke("cp", live_run, tmp_path / "copy", "--verify")
    assert found.exit_code == 0, found.output
    assert left in found.stdout
    states = {step.step: step.state for step in ray_dcp.open(tmp_path / "copy")}
    assert states == dict.fromkeys((1, 2) if "deleted" in left else (1, 2, 3), "committed")


@pytest.mark.parametrize("verb", ["cp", "export"])
def test_a_step_of_a_manager_stays_while_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
):
    """Retention finds the reader's lease."""
    root, state = tmp_path / "run", {"w": torch.ones(64)}
    manager = CheckpointManager(root, 1, max_to_keep=1, chkpt_on_preemption=False)
    with manager:
        manager.save(1, state)
        manager.join()
        method = {"cp": "open_writer", "export": "read_into"}[verb]
        done = interpose(
            monkeypatch, LocalStorage, method, "*.distcp",
            lambda: (manager.save(2, state), manager.join()),
        )  # fmt: skip
        found = invoke(verb, f"{root}@1", tmp_path / "out")
        assert done
        assert found.exit_code == 0, found.output
        assert not list((root / ".manager" / "reading").glob("*"))
        assert ray_dcp.verify(root / "step-00000001").ok


def test_a_copy_of_a_run_goes_on_where_it_was_interrupted(
    live_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ray_dcp.open(live_run).tag(1, "kept").annotate(2, "look").tag(3, "last")
    target = tmp_path / "copy"
    with monkeypatch.context() as patch:
        interpose(patch, LocalStorage, "open_writer", "*/step-3/*.distcp", KeyboardInterrupt())
        found = invoke("cp", live_run, target)
    assert found.exit_code == 130
    assert "copied 2 steps" in found.stdout
    assert [(one.step, one.tags, one.note) for one in ray_dcp.open(target)] == [
        (1, ("kept",), ""), (2, (), "look")
    ]  # fmt: skip
    before = {p: p.stat().st_mtime_ns for p in (target / "step-1").iterdir()}
    found = invoke("cp", live_run, target, "--json")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert (told["num_copied"], told["num_there"], told["num_checkpoints"]) == (1, 2, 1)
    assert before == {p: p.stat().st_mtime_ns for p in (target / "step-1").iterdir()}
    assert [one.tags for one in ray_dcp.open(target)] == [("kept",), (), ("last",)]
    save(live_run / "step-2", 5.0)
    found = invoke("cp", live_run, target)
    assert (found.exit_code, "expected nothing of a checkpoint" in found.output) == (2, True)


def test_copies_of_what_others_wrote_are_compared_byte_by_byte(tmp_path: Path):
    live_run, target = tmp_path / "run", tmp_path / "copy"
    for step in (1, 2):
        checkpoints.save_stock(live_run / f"step-{step}", {"w": torch.full((8,), float(step))})
    assert invoke("cp", live_run, target).exit_code == 0
    assert "2 steps: there already" in invoke("cp", live_run, target).stdout
    file = checkpoints.data_file(target / "step-1")
    checkpoints.flip(file, file.read_bytes().index(torch.ones(8).numpy().tobytes()))
    found = invoke("cp", live_run, target)
    assert (found.exit_code, "expected nothing of a checkpoint" in found.output) == (2, True)


def damage(step: Path) -> None:
    checkpoints.data_file(step).unlink()


def test_a_damaged_step_of_a_run_keeps_the_others_from_nothing(live_run: Path, tmp_path: Path):
    damage(live_run / "step-2")
    for verify in ([], ["--verify"]):
        found = invoke("cp", live_run, tmp_path / "copy", *verify)
        assert found.exit_code == 1, found.output
        assert "not copied: " in found.stdout
        assert "step-2" in found.stdout.rpartition("not copied: ")[2]
        assert [one.step for one in ray_dcp.open(tmp_path / "copy")] == [1, 3]
    (problem,) = json.loads(invoke("cp", live_run, tmp_path / "copy", "--json").stdout)["problems"]
    assert "is missing" in problem


def test_latest_says_which_step_it_is_and_when_a_newer_one_is_damaged(
    live_run: Path, tmp_path: Path
):
    damage(live_run / "step-3")
    out = tmp_path / "w.safetensors"
    for command in (["show", f"{live_run}@latest"], ["export", f"{live_run}@latest", out],
                    ["cp", f"{live_run}@latest", tmp_path / "copy"],
                    ["diff", f"{live_run}@1", f"{live_run}@latest"],
                    ["reshard", f"{live_run}@latest", "--to", "2"],
                    ["tag", f"{live_run}@latest", "good"]):  # fmt: skip
        found = invoke(*command)
        assert found.exit_code == 0, found.output
        assert "step-2" in found.stdout
        assert "warning: step-2 is used as 'latest' because step-3 is damaged" in (found.stderr)
    found = invoke("verify", f"{live_run}@latest")
    assert (found.exit_code, f"{live_run}/step-3: 1 problem" in found.stdout) == (1, True)
    found = invoke("rm", f"{live_run}@latest", "--yes")
    assert (found.exit_code, "which step of" in found.stderr) == (2, True)
    assert [step.state for step in ray_dcp.open(live_run)] == ["committed", "committed", "damaged"]
    with pytest.warns(UserWarning, match="because step-3 is damaged"):
        assert ray_dcp.open(f"{live_run}@latest").url.endswith("step-2")


def test_the_best_step_that_is_damaged_is_not_passed_over_silently(tmp_path: Path):
    with CheckpointManager(tmp_path, 1, chkpt_on_preemption=False) as manager:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3)):
            manager.save(step, {"w": torch.ones(64)}, metrics={"loss": loss})
    damage(tmp_path / "step-00000002")
    found = invoke("show", f"{tmp_path}@best")
    assert (found.exit_code, "step-00000003" in found.stdout) == (0, True)
    assert "because step-00000002 is damaged" in found.stderr
    found = invoke("verify", f"{tmp_path}@best:loss")
    assert (found.exit_code, "step-00000002: 1 problem" in found.stdout) == (1, True)


def test_a_folder_below_a_run_is_neither_its_latest_nor_its_best_step(live_run: Path):
    with CheckpointManager(live_run / "old", 1, chkpt_on_preemption=False) as manager:
        manager.save(900, {"w": torch.ones(64)}, metrics={"loss": 0.1})
    assert f"{live_run}/step-3" in invoke("show", f"{live_run}@latest").stdout
    assert f"{live_run}/step-3" in invoke("rm", f"{live_run}@latest", "--dry-run").stdout
    found = invoke("show", f"{live_run}@best")
    assert (found.exit_code, "expected steps with metrics" in found.stderr) == (2, True)


def test_a_note_that_is_altered_on_its_way_is_read_again_and_a_damaged_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with CheckpointManager(tmp_path, 1, items={"m": Item()}, chkpt_on_preemption=False) as manager:
        manager.save(1, {"m": {"w": torch.ones(64)}}, metrics={"loss": 0.1})
    (tmp_path / ".manager" / "catalogue.json").unlink()
    (info,) = (tmp_path / "step-00000001").glob("step-info-*")
    data, read = info.read_bytes(), LocalStorage.read

    def altered(self: LocalStorage, key: str, *more: object) -> bytes:
        found = read(self, key, *more)
        return found[:-2] if key.endswith(info.name) and not seen and not seen.append(1) else found

    seen: list[int] = []
    monkeypatch.setattr(LocalStorage, "read", altered)
    assert ray_dcp.open(tmp_path).step(1).metrics == {"loss": 0.1}
    assert seen
    info.write_bytes(data[:-2])
    assert "its metrics and items are not known" in invoke("ls", tmp_path).stdout
    found = invoke("verify", f"{tmp_path}@1")
    assert (found.exit_code, info.name in found.stdout) == (1, True)
    found = invoke("cp", f"{tmp_path}@1", tmp_path / "copy")
    assert (found.exit_code, info.name in found.stderr) == (1, True)


@pytest.mark.parametrize(
    ("method", "name"),
    [("read", "manifest-"), ("read", "chunks."), ("read", ".distcp"), ("read_into", ".distcp")],
)
def test_a_load_reads_again_what_is_altered_once_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, name: str
):
    """Large tensors, small ones that are read together, slices and objects."""
    state = {f"w{i}": torch.full((300,), float(i)) for i in range(3)}
    state |= {"large": torch.arange(1 << 20), "object": "hello", "slab": torch.ones(64, 64)}
    ray_dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    inner, left = getattr(LocalStorage, method), list[str]()

    def altered(self: LocalStorage, key: str, *more: object) -> object:
        found = inner(self, key, *more)
        if not left or left[0] not in key or found == b"":
            return found
        left.clear()
        if method == "read":
            return bytes([found[0] ^ 1]) + found[1:]
        more[1][len(more[1]) // 2] ^= 1
        return None

    monkeypatch.setattr(LocalStorage, method, altered)
    for names in (["w0", "w1", "w2"], ["large"], ["object"], ["slab"]):
        left.append(name)
        found = {k: state[k] * 0 if k != "object" else "" for k in names}
        ray_dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
        assert not left or (method, name) == ("read", ".distcp")
        assert all(torch.equal(v, state[k]) for k, v in found.items() if k != "object")
        assert found.get("object", "hello") == "hello"
    left[:] = [name]
    view = ray_dcp.open(tmp_path)
    assert view["slab"][:, 3:5].sum() == 128
    assert view["object"] == "hello"
    assert not left


def test_the_table_of_a_plan_is_decoded_once_and_each_step_has_its_own_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def state(step: int) -> dict[str, Any]:
        late = torch.ones(10) * (step // 2)
        return {"w": torch.full((300,), float(step)), "frozen": torch.ones(50), "late": late}

    for step in range(1, 6):
        objects = {"note": "x" * step} if step < 5 else {}
        ray_dcp.save({**state(step), **objects}, checkpoint_id=tmp_path / f"step-{step}")
    # In the middle, another plan.
    ray_dcp.save({"w": torch.ones(7)}, checkpoint_id=tmp_path / "step-6")
    decoded = []

    def decode(data: bytes) -> Any:
        decoded.append(data)
        return decode_table(data)

    monkeypatch.setattr(checkpoint, "decode_table", decode)
    checkpoint._decode_shared.cache_clear()
    run = ray_dcp.open_run(tmp_path)
    found = [(step.new_bytes, step.layout) for step in run]
    assert len(decoded) == len({*decoded}) == 3
    views = [ray_dcp.open_checkpoint(tmp_path / f"step-{step}") for step in range(1, 7)]
    expected: list[int] = [int(views[0].table.payload_bytes.sum())]
    for before, view in itertools.pairwise(views):
        differ = before.diff(view).tensors
        new = (one for one in differ if one.change not in ("unchanged", "removed"))
        expected.append(sum(one.num_bytes for one in new))
    assert found == [(num_bytes, "whole") for num_bytes in expected]
    # What is shared can't be changed by whoever has one of them.
    with pytest.raises(ValueError, match="read-only"):
        views[0].table.shape[0] = 1
    for step, view in enumerate(views[:5], start=1):
        assert view["w"][0:1].tolist() == [float(step)]
        assert view.verify().ok


def test_a_step_that_is_saved_again_after_it_was_listed_is_read_as_it_stands(tmp_path: Path):
    for step in (1, 2):
        ray_dcp.save({"w": torch.full((9,), float(step))}, checkpoint_id=tmp_path / f"step-{step}")
    *_, listed = ray_dcp.open_run(tmp_path)
    ray_dcp.save({"v": torch.ones(4)}, checkpoint_id=tmp_path / "step-2")
    assert (listed.new_bytes, listed.layout) == (16, "whole")
    *_, listed = ray_dcp.open_run(tmp_path)
    (tmp_path / "step-2" / f"chunks.{listed.manifest.attempt}.table").write_bytes(b"")
    assert (listed.new_bytes, listed.layout) == (None, None)
