"""Commands that write, run again: on what was changed, by two at once, on what a process left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import Result

import ray_dcp
from ray_dcp import CheckpointExistsError, CheckpointManager, CheckpointView
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import StorageError
from ray_dcp.io.lease_holders import LeaseHolder
from ray_dcp.manager import Item
from ray_dcp.place.target_lease import leases_at, writing_to
from ray_dcp.store.local import LocalStorage
from tests.support import checkpoints
from tests.support.disks import PAGE, here, small_disk
from tests.support.storages import interpose
from tests.unit.test_cli_verbs import invoke, refused


@pytest.fixture
def run(saved_checkpoint: Path, tmp_path: Path) -> Path:
    for step in (10, 20):
        shutil.copytree(saved_checkpoint, tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


def done(*arguments: object) -> Result:
    """Returns what a command printed that ends with 0."""
    found = invoke(*arguments)
    assert found.exit_code == 0, found.output
    return found


def whole(path: Path) -> CheckpointView:
    """Returns a view of a checkpoint in whose folder there is nothing but it."""
    view = ray_dcp.open_checkpoint(path)
    assert view.verify().ok
    assert not leases_at(LocalStorage(path))
    return view


def test_a_step_that_was_saved_again_in_the_source_is_named_and_the_others_are_copied(run: Path):
    target = run.parent / "copy"
    done("cp", run, target)
    before = ray_dcp.open_checkpoint(target / "step-10").attempt
    ray_dcp.save({"w": torch.ones(2)}, checkpoint_id=run / "step-10", no_dist=True)
    ray_dcp.save({"w": torch.ones(3)}, checkpoint_id=run / "step-30", no_dist=True)
    for _ in range(2):
        found = invoke("cp", run, target)
        assert found.exit_code == 2, found.output
        assert "step-10" in found.output
        assert "delete it first" in found.output
        assert [step.name for step in ray_dcp.open(target)] == ["step-10", "step-20", "step-30"]
        assert ray_dcp.open_checkpoint(target / "step-10").attempt == before
    ray_dcp.delete(target / "step-10")
    done("cp", run, target, "--verify")
    assert ray_dcp.open_checkpoint(target / "step-10")["w"].shape == (2,)


def test_a_run_that_is_copied_below_itself_is_not_copied_into_the_copy(run: Path):
    (run.parent / "link").symlink_to(run)
    for source in (run, run, run.parent / "link"):
        done("cp", source, run / "backup")
    assert sorted(p.name for p in (run / "backup").iterdir()) == ["step-10", "step-20"]
    assert not [*(run / "backup").rglob("backup")]


def test_a_command_whose_place_another_that_lives_writes_is_refused_by_name(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    target, told = run.parent / "new", []
    commands = {
        "cp": ("cp", f"{run}@10", target),
        "average": ("average", f"{run}@10", f"{run}@20", "-o", target),
    }
    for name, command in commands.items():
        with monkeypatch.context() as patch:
            interpose(
                patch, LocalStorage, "open_writer", f"{target}/*",
                lambda command=command: told.append(refused(*command)),
            )  # fmt: skip
            done(*command)
        assert "is being written by process" in told.pop(), name
        assert not told
        whole(target)
        shutil.rmtree(target)


def test_a_copy_that_a_full_disk_stopped_goes_on_when_there_is_room(run: Path):
    with small_disk(run.parent / "disk", may_mount=False) as disk:
        codes = []
        for pages in range(0, 40, 4):
            disk.leave(pages * PAGE, here)
            codes.append(invoke("cp", f"{run}@10", disk.path / "copy").exit_code)
            disk.make_room(here)
            if not codes[-1]:
                break
        done("cp", f"{run}@10", disk.path / "copy")
        whole(disk.path / "copy")
    assert codes[0] == 2
    assert codes.count(2) >= 2
    assert {*codes} <= {0, 2}


def test_a_source_where_nothing_can_be_written_is_copied_and_copied_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    target = run.parent / "copy"
    for method in ("write", "open_writer", "delete"):
        error = StorageError(f"[EROFS] Read-only file system: {run}")
        interpose(monkeypatch, LocalStorage, method, f"{run}/*", error, times=None)
    before = sorted(run.rglob("*"))
    done("cp", run, target)
    done("cp", run, target)
    done("export", f"{run}@20", run.parent / "w.safetensors")
    assert sorted(run.rglob("*")) == before
    assert [step.name for step in ray_dcp.open(target)] == ["step-10", "step-20"]


@pytest.mark.parametrize("lives", [False, True])
def test_a_holder_on_another_host_counts_as_dead_when_it_renews_no_more(
    run: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
):
    source = ray_dcp.open_checkpoint(run / "step-10")
    target = run.parent / "copy"
    target.mkdir()
    attempt, lease = "00000000000000aa", target / "writing-00000001.json"
    holder = LeaseHolder("another", 1, "5", "elsewhere", "n")
    lease.write_bytes(holder.encode(attempt=attempt, work="copy of something else"))
    (target / f"__0_0.{attempt}.distcp").write_bytes(b"of its attempt")
    if lives:
        beats = iter(range(1, 1000))

        def renew() -> None:
            found = json.loads(lease.read_bytes())
            lease.write_text(json.dumps({**found, "beat": next(beats)}))

        interpose(monkeypatch, LocalStorage, "read", f"{lease}", renew, times=None)
        told = "is being written by process 1 on elsewhere, which lives"
        with (
            pytest.raises(CheckpointExistsError, match=told),
            writing_to(Target(str(target)), "copy", lease_s=0.003),
        ):
            pass
        assert sorted(p.name for p in target.iterdir()) == [f"__0_0.{attempt}.distcp", lease.name]
        return
    with writing_to(Target(str(target)), "copy", lease_s=0.003) as held:
        assert (held.dead, held.again, held.is_done) == ({attempt}, frozenset(), False)
    assert [p.name for p in target.iterdir()] == ["manifest-00000001.json"]
    ray_dcp.copy(source, target)
    whole(target)


def test_an_export_that_was_killed_while_it_wrote_its_lease_goes_on(run: Path):
    target = run.parent / "new"
    target.mkdir()
    (target / ".tmp-0123456789ab-writing-00000001.json").write_bytes(b"{")
    done("export", f"{run}@10", target, "--format", "dcp")
    whole(target)
    assert not [*target.glob(".tmp-*")]
    (mine := run.parent / "mine").mkdir()
    (mine / "notes").touch()
    assert "new or empty directory" in refused("export", f"{run}@10", mine, "--format", "dcp")


def test_an_export_that_ctrl_c_ends_while_it_writes_goes_on(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    target = run.parent / "new"
    command = ("export", f"{run}@10", target, "--format", "dcp", "--dtype", "bf16")
    with monkeypatch.context() as patch:
        interpose(patch, LocalStorage, "open_writer", f"{target}/*", KeyboardInterrupt())
        refused(*command, exit_code=130)
    done(*command)
    whole(target)
    assert "new or empty directory" in refused(*command)


def test_a_copy_that_ctrl_c_ends_after_its_commit_keeps_the_items_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    items = {"model": Item(), "more": Item()}
    with CheckpointManager(tmp_path / "run", 1, items=items, chkpt_on_preemption=False) as manager:
        manager.save(1, {"model": {"w": torch.ones(3)}, "more": {"n": 1}})
    target = tmp_path / "copy"
    with monkeypatch.context() as patch:
        interpose(patch, LocalStorage, "write", f"{target}/.metadata", KeyboardInterrupt())
        refused("cp", f"{tmp_path}/run@1", target, exit_code=130)
    assert ray_dcp.verify(target).ok
    done("cp", f"{tmp_path}/run@1", target)
    assert ray_dcp.verify(target).ok
    assert ray_dcp.open_checkpoint(target / "model")["w"][...].tolist() == [1, 1, 1]
    assert not [*target.rglob("writing-*")]


def test_a_step_whose_copy_ends_before_its_tags_has_them_when_it_is_repeated(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    ray_dcp.open(run).tag(10, "kept").annotate(20, "look")
    target = run.parent / "copy"
    with monkeypatch.context() as patch:
        interpose(patch, LocalStorage, "write", f"{target}*tags*", KeyboardInterrupt())
        refused("cp", run, target, exit_code=130)
    assert ray_dcp.verify(target / "step-10").ok
    done("cp", run, target)
    assert [(s.name, s.tags, s.note) for s in ray_dcp.open(target)] == [
        ("step-10", ("kept",), ""), ("step-20", (), "look")
    ]  # fmt: skip
    whole(target / "step-10")
    assert checkpoints.data_file(target / "step-20").exists()
