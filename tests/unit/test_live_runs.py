"""Runs that are looked at, verified and copied while their job replaces and deletes steps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ray_dcp
from ray_dcp.errors import CheckpointNotFoundError, StorageError
from ray_dcp.store.local import LocalStorage


def save(path: Path, value: float = 1.0) -> None:
    ray_dcp.save({"w": torch.full((64,), value)}, checkpoint_id=path, no_dist=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save(tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


def once_before(
    monkeypatch: pytest.MonkeyPatch, method: str, concerns: Callable[..., bool], act: Callable
) -> list[bool]:
    """Has something happen in the moment before the first call of a storage that is concerned."""
    inner, done = getattr(LocalStorage, method), []

    def call(self: LocalStorage, *arguments: object, **more: object) -> object:
        if not done and concerns(self, *arguments):
            done.append(True)
            act()
        return inner(self, *arguments, **more)

    monkeypatch.setattr(LocalStorage, method, call)
    return done


def is_data(self: LocalStorage, key: str, *_: object) -> bool:
    return key.endswith(".distcp")


def is_record(self: LocalStorage, key: str, *_: object) -> bool:
    return "step-2/manifest-" in f"{self.url}/{key}"


@pytest.mark.parametrize(("becomes", "state"), [(save, "committed"), (ray_dcp.delete, "deleted")])
def test_a_step_that_is_replaced_or_deleted_while_its_run_is_listed_is_not_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch, becomes: Callable, state: str
):
    done = once_before(monkeypatch, "read", is_record, lambda: becomes(run / "step-2"))
    steps = ray_dcp.open(run)
    assert done
    assert [step.state for step in steps] == ["committed", state, "committed"]


def test_a_checkpoint_that_is_replaced_while_it_is_verified_is_verified_anew(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    done = once_before(monkeypatch, "read", is_data, lambda: save(run / "step-2", 2.0))
    report = ray_dcp.verify(run / "step-2")
    assert done
    assert report.ok, report


def test_a_checkpoint_that_is_deleted_while_it_is_verified_is_gone_and_not_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    done = once_before(monkeypatch, "read", is_data, lambda: ray_dcp.delete(run / "step-2"))
    with pytest.raises(CheckpointNotFoundError, match="it was deleted"):
        ray_dcp.verify(run / "step-2")
    assert done
