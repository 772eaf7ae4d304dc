"""The steps of a run and the checkpoints below a folder: states, names, tags and notes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ray_dcp
from ray_dcp.errors import CheckpointNotFoundError, InvalidRequestError, UncommittedCheckpointError
from ray_dcp.format.manifest import AbortRecord, encode_record, record_key
from ray_dcp.view.listing import ListedCheckpoint, list_checkpoints
from ray_dcp.view.naming import best_of_run
from tests import checkpoints

# --- Runs -----------------------------------------------------------------------------------------


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
    assert {step: step.listed.detail} == {step: ""}
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
    with pytest.raises(CheckpointNotFoundError, match=said):
        ray_dcp.open(root)[key]
    with pytest.raises(CheckpointNotFoundError, match=said):
        ray_dcp.open(f"{root}@{key}")


def listed(step: int, state: str = "committed", **metrics: float) -> ListedCheckpoint:
    return ListedCheckpoint(f"step-{step}", step, state, 1, 1, float(step), metrics=metrics)


def test_the_best_is_told_by_the_name_of_its_metric_or_asked_for():
    run = [listed(1, acc=0.1), listed(2, acc=0.9), listed(3, acc=float("nan")), listed(4)]
    assert best_of_run(run).step == 2
    assert best_of_run(run, "acc", "min").step == 1
    odd = [listed(1, thing=1.0), listed(2, thing=2.0)]
    with pytest.raises(InvalidRequestError, match="best:thing:min or best:thing:max"):
        best_of_run(odd)
    assert best_of_run(odd, "thing", "max").step == 2
    with pytest.raises(InvalidRequestError, match="by which metric"):
        best_of_run([listed(1, acc=1.0, loss=1.0)])
    with pytest.raises(InvalidRequestError, match="'min' or 'max'"):
        best_of_run(odd, "thing", "best")
    with pytest.raises(CheckpointNotFoundError, match="NaN"):
        best_of_run([listed(1, loss=float("nan"))])


def test_a_directory_with_an_at_in_its_name_is_taken_literally(tmp_path: Path):
    checkpoints.save(tmp_path / "run@5")
    checkpoints.save(tmp_path / "runs@new" / "step-1")
    assert ray_dcp.open(str(tmp_path / "run@5")).kind == "native"
    assert [step.step for step in ray_dcp.open(str(tmp_path / "runs@new"))] == [1]


def test_tags_and_notes_are_put_on_steps_and_taken_away(run: Path):
    view = ray_dcp.open(run).tag("latest", "b", "a").annotate(30, "ünïcode")
    assert view.step(30).tags == ("a", "b")
    assert view.step("a").step == 30
    assert view.step(30).note == "ünïcode"
    view = view.tag(30, "a", remove=True).annotate(30, "")
    assert (view.step(30).tags, view.step(30).note) == (("b",), "")
    with ray_dcp.CheckpointManager(run, read_only=True) as manager:
        assert manager.step_info(30).tags == {"b"}


def test_what_can_be_no_tag_and_no_note_is_refused_and_nothing_is_written(run: Path):
    view = ray_dcp.open(run)
    with pytest.raises(InvalidRequestError, match="a tag must be"):
        view.tag(10, "good", "../bad")
    with pytest.raises(InvalidRequestError, match="64 KiB"):
        view.annotate(10, "x" * 70_000)
    with pytest.raises(InvalidRequestError, match="a note must be"):
        view.annotate(10, 5)
    with pytest.raises(CheckpointNotFoundError):
        view.tag(11, "good")
    assert view.refresh().step(10).tags == ()


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
    assert ray_dcp.open(run)["latest"].url.endswith("step-40")
    with pytest.raises(UncommittedCheckpointError):
        ray_dcp.open(run)[50]


def test_a_place_that_holds_nothing_offers_similar_names(root: Path, tmp_path: Path):
    checkpoints.save(tmp_path / "experiment" / "step-1")
    with pytest.raises(CheckpointNotFoundError, match="did you mean 'experiment'"):
        ray_dcp.open(tmp_path / "experimant")


def test_a_single_safetensors_file_is_a_checkpoint(tmp_path: Path):
    from safetensors.torch import save_file

    save_file({"w": torch.arange(6.0)}, tmp_path / "a.safetensors")
    save_file({"other": torch.ones(1)}, tmp_path / "b.safetensors")
    view = ray_dcp.open(tmp_path / "a.safetensors")
    assert view.names == ("w",)
    assert view["w"][2:4].tolist() == [2.0, 3.0]
    assert view.verify().ok


# --- Checkpoints below a folder -------------------------------------------------------------------


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


def test_checkpoints_are_listed_by_step_and_those_without_step_last(several: Path):
    found = [(item.name, item.step) for item in list_checkpoints(several)]
    assert found == [("step-9", 9), ("step-10", 10), ("old/iter_0000020", 20), ("best", None)]


def test_a_save_that_was_never_committed_is_told_as_such(several: Path):
    for manifest in (several / "best").glob("manifest-*"):
        manifest.unlink()
    assert by_name(several)["best"].state == "in flight"
    (several / "best" / ".metadata").unlink()
    assert by_name(several)["best"].state == "in flight"
    (several / "old" / "iter_0000020" / ".metadata").unlink()
    assert by_name(several)["old/iter_0000020"].state == "in flight"


def test_a_failed_save_over_a_stock_checkpoint_leaves_it_a_stock_checkpoint(several: Path):
    record = AbortRecord(attempt="a1", reason="a rank died", rank=None)
    path = several / "old" / "iter_0000020"
    (path / record_key(1)).write_bytes(encode_record(record))
    (path / "__0_0.a1.distcp").write_bytes(b"")
    assert by_name(several)["old/iter_0000020"].state == "stock"
    assert ray_dcp.open(path).kind == "stock"


def test_a_missing_or_shorter_file_is_told_as_damage(several: Path):
    checkpoints.data_file(several / "best").unlink()
    short = checkpoints.data_file(several / "step-9")
    num_bytes = short.stat().st_size
    short.write_bytes(short.read_bytes()[:-1])
    found = by_name(several)
    assert found["best"].state == "damaged"
    assert "is missing" in found["best"].detail
    assert found["step-9"].state == "damaged"
    assert f"has {num_bytes - 1} bytes instead of {num_bytes}" in found["step-9"].detail
    assert found["step-10"].state == "committed"


def test_the_folder_of_a_safetensors_attempt_belongs_to_its_checkpoint(tmp_path: Path):
    path = checkpoints.save(tmp_path / "step-1", container="safetensors")
    assert list(path.rglob("*/*.safetensors"))
    (item,) = list_checkpoints(tmp_path)
    assert (item.name, item.state) == ("step-1", "committed")
    for manifest in path.glob("manifest-*"):
        manifest.unlink()
    (item,) = list_checkpoints(tmp_path)
    assert (item.name, item.state) == ("step-1", "in flight")


def test_nothing_is_listed_where_nothing_is(tmp_path: Path):
    assert list_checkpoints(tmp_path) == ()
    assert list_checkpoints(tmp_path / "nothing") == ()
