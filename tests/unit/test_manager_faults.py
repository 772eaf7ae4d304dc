"""What a full disk, an altered listing, and a save beside a look leave of the steps of a run."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
from obstore.store import MemoryStore

import ray_dcp
from ray_dcp import errors
from ray_dcp.manager import CheckpointManager
from ray_dcp.store.local import LocalStorage, LocalWriter
from ray_dcp.store.location import Location
from ray_dcp.store.storage import os_failure


def manager_of(path: Any, **given: Any) -> CheckpointManager:
    return CheckpointManager(path, 1, chkpt_on_preemption=False, **given)


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(step))}


def fill_disk(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """Fails the first write into a folder for space, and whatever is to be deleted there then."""
    append, delete, is_full = LocalWriter._append, LocalStorage.delete, [1]

    def full(self: LocalWriter, data: Any) -> None:
        if is_full and f"/{folder}/__" in self._path:
            append(self, data)
            raise os_failure(OSError(errno.ENOSPC, ""), "write", self._key, self._path)
        append(self, data)

    def refused(self: LocalStorage, keys: Any) -> None:
        if is_full and self.url.endswith(folder):
            raise errors.StorageError("the network is gone")
        delete(self, keys)

    monkeypatch.setattr(LocalWriter, "_append", full)
    monkeypatch.setattr(LocalStorage, "delete", refused)
    monkeypatch.setattr(LocalWriter, "abort", lambda self: None, raising=False)


def test_what_a_save_without_space_could_not_remove_goes_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It lies above the newest step, where a deletion does not look for what crashes left."""
    with manager_of(tmp_path) as manager:
        manager.save(1, state(1))
        with monkeypatch.context() as patch:
            fill_disk(patch, "step-00000002")
            manager.save_async(2, state(2))
            with pytest.raises(errors.StorageError):
                manager.join()
        left = tmp_path / "step-00000002"
        (left / "__0_0.0123456789abcdef.distcp").write_bytes(b"of the save that failed")
        manager.save(3, state(3))
        assert not list(left.glob("*.distcp"))
        assert manager.all_steps() == [1, 3]


def test_room_is_not_made_at_the_price_of_the_newest_step_where_an_older_was_saved_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with manager_of(tmp_path, max_to_keep=1, order="any") as manager:
        for step in (5, 3):
            manager.save(step, state(step))
            manager.join()
        assert manager.all_steps() == [3, 5]
        fill_disk(monkeypatch, "step-00000006")
        with pytest.raises(errors.StorageError, match="ENOSPC"):
            manager.save(6, state(6))
        assert manager.all_steps() == [3, 5]


def test_a_name_that_was_altered_in_a_listing_hides_no_step(monkeypatch: pytest.MonkeyPatch):
    place = Location("run", filesystem=MemoryStore())
    with manager_of(place) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    real, altered = obstore.list, []

    def listed(*arguments: Any, **how: Any) -> Any:
        for chunk in real(*arguments, **how):
            for item in chunk:
                if "step-00000002/manifest-" in item["path"] and not altered:
                    altered.append(item["path"])
                    item = {**item, "path": item["path"].replace("run/", "rum/", 1)}
                yield [item]

    monkeypatch.setattr(obstore, "list", listed)
    reader = CheckpointManager(place, read_only=True)
    assert reader.all_steps() == [1, 2]
    assert altered


def test_a_step_that_is_replaced_twice_while_a_run_is_listed_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Once after the listing of the run, and once between the record and the files of the step."""
    with manager_of(tmp_path) as manager:
        manager.save(1, state(1))
        real, step = LocalStorage.list, str(tmp_path / "step-00000001")
        todo = [step, str(tmp_path), *[""] * 2]  # the run is listed three times

        def replace_twice() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(LocalStorage, "list", real)
                for value in (2, 3):  # the second removes the record of the first
                    manager.save(1, state(value), replace=True)

        def listed(self: LocalStorage, prefix: str = "") -> Any:
            is_next = todo and prefix == "" and self.url == (todo[-1] or str(tmp_path))
            if not is_next:
                return real(self, prefix)
            before = real(self, prefix)
            if todo.pop():
                replace_twice()
            return before if self.url == str(tmp_path) else real(self, prefix)

        monkeypatch.setattr(LocalStorage, "list", listed)
        (found,) = ray_dcp.open(tmp_path)
        assert todo == []
        assert (found.state, found.detail) == ("committed", "")
