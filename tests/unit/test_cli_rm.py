"""`ray-dcp rm` deletes what was looked at, and nothing that somebody protects or saved since."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import ray_dcp
from ray_dcp import CheckpointManager
from ray_dcp.cli import writing
from ray_dcp.cli.main import main
from ray_dcp.errors import StorageError
from ray_dcp.manager import Item
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.leases import LeaseHolder, ReaderLease
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.opening import absolute_target

STATE = {"w": torch.ones(3)}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def step_1(root: Path) -> Any:
    return next(step for step in ray_dcp.open(root) if step.step == 1)


def meanwhile(monkeypatch: pytest.MonkeyPatch, happens: Any) -> None:
    """Does something while the user reads what is about to be deleted."""
    monkeypatch.setattr(writing, "agree", lambda what, *, yes: happens())


def test_a_checkpoint_that_is_committed_while_the_user_reads_the_prompt_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "step-7"
    place.mkdir()
    (place / "__0_0.0123456789abcdef.distcp").write_bytes(b"crashed")
    meanwhile(monkeypatch, lambda: ray_dcp.save(STATE, checkpoint_id=place))
    found = run("rm", str(place))
    assert found.exit_code == 2
    assert "stands there by now" in found.output
    assert ray_dcp.verify(place).ok


def saved(root: Path, **first: Any) -> Path:
    with CheckpointManager(root, 1) as manager:
        manager.save(1, STATE, **first)
        manager.save(2, STATE)
    return root


def test_a_step_that_is_being_read_stays_unless_forced(tmp_path: Path) -> None:
    with ReaderLease(Root(absolute_target(saved(tmp_path))), 1, lease_s=30.0):
        found = run("rm", f"{tmp_path}@1", "--yes")
        assert found.exit_code == 2
        assert "is being read by process" in found.output
        assert ray_dcp.verify(tmp_path / "step-00000001").ok
        assert run("rm", f"{tmp_path}@1", "--yes", "--force").exit_code == 0
    assert [step.step for step in ray_dcp.open(tmp_path) if step.is_readable] == [2]


def test_a_reader_whose_process_is_gone_holds_nothing(tmp_path: Path) -> None:
    with ReaderLease(Root(absolute_target(saved(tmp_path))), 1, lease_s=30.0):
        (lease,) = (tmp_path / ".manager" / "reading").iterdir()
        found = LeaseHolder.decode(lease.read_bytes())
    assert found is not None
    gone = LeaseHolder(found.machine, found.pid, "before", found.host)
    lease.parent.mkdir(exist_ok=True)
    lease.write_bytes(gone.encode())
    assert run("rm", f"{tmp_path}@1", "--yes").exit_code == 0


def test_the_number_of_an_item_s_folder_is_no_step(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, 1, items={"model": Item()}) as manager:
        for value in range(4):
            state = {"model": {"w": torch.full((3,), float(value))}}
            manager.save(1, state, replace=value > 0)
        manager.tag(1, "keep")
    assert (tmp_path / "step-00000001" / "model.3").is_dir()
    assert "expected step 3" in run("rm", f"{tmp_path}@3", "--yes").output
    assert "step-00000001: a checkpoint of ray_dcp" in run("show", f"{tmp_path}@latest").output
    state = {"model": {"w": torch.zeros(3)}}
    with CheckpointManager(tmp_path, 1, items={"model": Item()}) as manager:
        manager.restore(1, state)
    assert state["model"]["w"].tolist() == [3, 3, 3]


def test_the_tags_and_the_info_of_a_step_that_was_saved_again_meanwhile_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path, 1, order="any") as manager:
        manager.save(1, STATE, tags=["good"], metrics={"loss": 2.0})
        manager.save(2, STATE)
        deletes = LocalStorage.delete

        def delete(storage: LocalStorage, keys: Any) -> Any:
            # What a delete removes after its record: now the number is free for the job.
            gone = deletes(storage, keys)
            if any(str(key).endswith(".distcp") for key in keys):
                monkeypatch.undo()
                manager.save(1, STATE, tags=["good"], metrics={"loss": 1.0})
            return gone

        monkeypatch.setattr(LocalStorage, "delete", delete)
        found = run("rm", f"{tmp_path}@1", "--yes", "--force")
        assert found.exit_code == 0, found.output
    # The catalogue remembers what the info said: without it, the info itself is read.
    (tmp_path / ".manager" / "catalogue.json").unlink()
    step = step_1(tmp_path)
    assert (step.tags, dict(step.metrics)) == (("good",), {"loss": 1.0})


def test_a_deletion_that_fails_gives_the_tags_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, tags=["good"])
    writes = LocalStorage.write

    def write(storage: LocalStorage, key: str, data: Any, *args: Any, **how: Any) -> Any:
        if key.startswith("manifest-"):
            raise StorageError("the disk is read-only")
        return writes(storage, key, data, *args, **how)

    monkeypatch.setattr(LocalStorage, "write", write)
    assert run("rm", f"{tmp_path}@1", "--yes", "--force").exit_code != 0
    assert step_1(tmp_path).tags == ("good",)
    assert ray_dcp.verify(tmp_path / "step-00000001").ok
