"""Files that equal those of the last step, and what is settled: neither is made something else."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import obstore
import obstore.exceptions
import obstore.store
import pytest
import torch
import torch.distributed.checkpoint as stock
from click.testing import CliRunner
from torch import nn
from torch.distributed.checkpoint.logger import _dcp_logger

import ray_dcp
from ray_dcp import asynchronous, errors, events
from ray_dcp.cli.main import main
from ray_dcp.core import bounds
from ray_dcp.manager import CheckpointManager, Item, LatestN
from ray_dcp.options import SaveOptions
from ray_dcp.planning import sources
from ray_dcp.rank import unchanged
from ray_dcp.rank.unchanged import RunHistory
from ray_dcp.session.inline_transport import session_alone
from ray_dcp.stage import staging_backend
from ray_dcp.store.opening import open_storage
from tests.support.checkpoints import flip
from tests.support.programs.unchanged import LINK, WIDTH, Tuned, holds, inodes, path_of, save_steps
from tests.unit.test_async_inline import Gate, gate  # noqa: F401 - a fixture


@pytest.fixture(autouse=True)
def time_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a busy machine read what a new process may link, which it would write otherwise."""
    monkeypatch.setattr(bounds, "SETTLED_READ_S", 60.0)


def save(root: Path, step: int, state: dict[str, Any], options: SaveOptions = LINK) -> Path:
    path = path_of(root, step)
    ray_dcp.save(state, checkpoint_id=path, options=options)
    return path


def shared(one: Path, other: Path) -> int:
    """Returns how many data files two checkpoints share."""
    return len(inodes(one) & inodes(other))


def values_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns a copy of the tensors of a state by their names."""
    found = {}
    for key, value in state.items():
        inner = value.state_dict() if isinstance(value, nn.Module) else {"": value}
        for name, one in inner.items():
            found[f"{key}.{name}".rstrip(".")] = one.detach().clone()
    return found


def check_holds(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """Checks that a checkpoint is whole and holds these values, for us and for stock DCP."""
    assert ray_dcp.verify(path).ok
    ours = {name: torch.zeros_like(value) for name, value in expected.items()}
    theirs = {name: torch.zeros_like(value) for name, value in expected.items()}
    ray_dcp.load(ours, checkpoint_id=path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.load(theirs, checkpoint_id=path, no_dist=True)
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name
        assert torch.equal(theirs[name], value), name


def a_run(root: Path, steps: int = 3) -> tuple[Tuned, list[dict[str, torch.Tensor]]]:
    """Saves steps of a run whose large part does not change; returns the model and their values."""
    model, saved = Tuned(), []
    for step in range(steps):
        model.set_step(step)
        save(root, step, {"model": model})
        saved.append(values_of({"model": model}))
    return model, saved


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets what this process knows of earlier saves."""
    monkeypatch.setattr(session_alone(), "history", RunHistory())


# --- What is linked ------------------------------------------------------------------------------


def test_the_default_is_to_write_everything(tmp_path):
    model = Tuned()
    one, other = (save(tmp_path, step, {"model": model}, SaveOptions()) for step in (0, 1))
    assert shared(one, other) == 0
    assert len(list(one.glob("*.distcp"))) == 1


@pytest.mark.parametrize(
    "wrap", [lambda m: m, partial(torch.compile, backend="eager")], ids=["plain", "compiled"]
)
def test_a_module_says_which_of_its_parameters_are_frozen(tmp_path, wrap):
    state = {"model": wrap(Tuned()), "step": torch.zeros(4)}
    one, other = (save(tmp_path, step, state) for step in (0, 1))
    assert shared(one, other) == 1


def test_detached_tensors_are_linked_once_they_were_equal_in_two_saves(tmp_path):
    model, saved = Tuned(), []
    for step in range(5):
        model.set_step(step)
        save(tmp_path, step, {"model": dict(model.state_dict())})
        saved.append(values_of({"model": model}))
    links = [shared(path_of(tmp_path, step - 1), path_of(tmp_path, step)) for step in range(1, 5)]
    # Equal in 0 and 1; in a file of its own from 2 on.
    assert links == [0, 0, 1, 1]
    for step, values in enumerate(saved):
        check_holds(path_of(tmp_path, step), values)


def test_what_changed_once_stays_out_of_the_settled_files(tmp_path):
    model, buffer = Tuned(), torch.zeros(WIDTH, WIDTH)
    model.register_parameter("other", nn.Parameter(buffer, requires_grad=False))
    links = []
    for step in range(6):
        if step in (2, 5):
            model.other.data += 1
        save(tmp_path, step, {"model": model})
        if step:
            links.append(shared(path_of(tmp_path, step - 1), path_of(tmp_path, step)))
    # Changed in 2: written; in 3 the others get a file of their own, which is linked even in 5.
    assert links == [1, 0, 0, 1, 1]
    check_holds(path_of(tmp_path, 5), values_of({"model": model}))


def test_a_little_is_not_worth_a_file_of_its_own(tmp_path):
    path = save(tmp_path, 0, {"model": Tuned(width=8)})
    assert len(list(path.glob("*.distcp"))) == 1


# --- What is not ---------------------------------------------------------------------------------


def test_a_frozen_value_that_changed_is_written(tmp_path):
    model, saved = a_run(tmp_path, 2)
    model.base.weight.data[WIDTH - 1, WIDTH - 1] += 1
    path = save(tmp_path, 2, {"model": model})
    assert shared(path_of(tmp_path, 1), path) == 0
    check_holds(path, values_of({"model": model}))
    for step, values in enumerate(saved):
        check_holds(path_of(tmp_path, step), values)


OTHERS = {
    "dtype": lambda value: value.view(torch.int32),
    "shape": lambda value: value.reshape(WIDTH // 2, WIDTH * 2),
    "dimensions": lambda value: value.reshape(WIDTH, 2, WIDTH // 2),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_equal_bytes_of_another_kind_are_written(tmp_path, change):
    values = torch.arange(WIDTH * WIDTH, dtype=torch.float32).reshape(WIDTH, WIDTH)
    for step, value in enumerate((values, change(values))):
        state = {"w": nn.Parameter(value, requires_grad=False)}
        check_holds(save(tmp_path, step, state), {"w": value})
    assert shared(path_of(tmp_path, 0), path_of(tmp_path, 1)) == 0


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EMLINK])
def test_a_filesystem_that_does_not_link_gets_the_bytes(tmp_path, monkeypatch, number):
    model, _ = a_run(tmp_path, 1)
    real = os.link

    def link(old: str, new: str, **how: Any) -> None:
        if ".distcp" in str(old) and ".tmp-" not in str(old):
            raise OSError(number, os.strerror(number), new)
        real(old, new, **how)

    monkeypatch.setattr(os, "link", link)
    path = save(tmp_path, 1, {"model": model})
    assert shared(path_of(tmp_path, 0), path) == 0
    check_holds(path, values_of({"model": model}))
    assert not list(path.glob(".tmp-*"))


def linked_file(path: Path) -> Path:
    return max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 8)


def flip_a_checksum(file: Path) -> None:
    flip(file, file.stat().st_size - 1)


def replace_by_a_symbolic_link(file: Path) -> None:
    away = file.rename(file.parent.parent / "away")
    file.symlink_to(away)


def replace_by_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    "harm",
    [cut_short, flip_a_checksum, replace_by_a_symbolic_link, replace_by_a_folder, Path.unlink],
    ids=lambda harm: harm.__name__,
)
def test_a_file_that_is_not_what_was_committed_is_not_linked(tmp_path, harm):
    model, _ = a_run(tmp_path, 1)
    file = linked_file(path_of(tmp_path, 0))
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    harm(file)
    if file.is_file():
        os.utime(file, ns=times)
    path = save(tmp_path, 1, {"model": model})
    assert shared(path_of(tmp_path, 0), path) == 0
    check_holds(path, values_of({"model": model}))


def test_files_of_an_attempt_that_was_not_committed_are_not_linked(tmp_path, monkeypatch):
    from ray_dcp.coordinator import tasks

    model, _ = a_run(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(tasks, "build_commit", _refuse)
        with pytest.raises(ray_dcp.errors.CheckpointError):
            save(tmp_path, 1, {"model": model})
    shutil.rmtree(path_of(tmp_path, 0))
    left = inodes(path_of(tmp_path, 1))
    path = save(tmp_path, 2, {"model": model})
    assert not left & inodes(path)


def _refuse(*_: Any) -> None:
    raise ray_dcp.errors.StorageError("scripted")


# --- One flipped bit does not spread -------------------------------------------------------------


def flip_shared(path: Path) -> None:
    """Flips a bit in the data of the large file of a checkpoint."""
    flip(linked_file(path), 500_000)


def own_bytes(path: Path) -> None:
    """Gives a checkpoint files of its own, with the bytes that they have."""
    for file in path.glob("*.distcp"):
        shutil.copy(file, file.with_suffix(".copy"))
        file.with_suffix(".copy").replace(file)


def a_damaged_run(root: Path, model: Tuned) -> None:
    """Saves steps 1 to 3; 2 and 3 share a damaged file, 1 is whole."""
    for step in (1, 2, 3):
        model.set_step(step)
        with CheckpointManager(root, 1, item=Item(save_options=LINK), no_dist=True) as manager:
            manager.save(step, {"model": model})
    assert shared(*(root / f"step-0000000{step}" for step in (1, 3))) == 1
    own_bytes(root / "step-00000001")
    flip_shared(root / "step-00000003")


def test_what_a_load_found_damaged_is_linked_nowhere_and_costs_no_whole_step(tmp_path, monkeypatch):
    model = Tuned()
    a_damaged_run(tmp_path, model)
    new_process(monkeypatch)
    how: dict[str, Any] = {"item": Item(save_options=LINK), "no_dist": True}
    with CheckpointManager(tmp_path, 1, retention=LatestN(3), **how) as manager:
        with pytest.warns(UserWarning, match="neither counts for retention"):
            assert manager.restore("auto", {"model": model}).step == 1
        with CheckpointManager(tmp_path, read_only=True, no_dist=True) as other:
            assert other.all_steps() == [1, 2, 3]
        saved = {}
        for step in (4, 5, 6):
            model.set_step(step)
            manager.save(step, {"model": model})
            saved[step] = values_of({"model": model})
        manager.join()
        assert manager.all_steps() == [2, 3, 4, 5, 6]  # damaged steps don't count, and stay
        for step, values in saved.items():
            check_holds(tmp_path / f"step-0000000{step}", values)
        # As the warning says, the damaged steps may be saved again; they are whole then.
        for step in (2, 3):
            model.set_step(step)
            manager.save(step, {"model": model})
            check_holds(tmp_path / f"step-0000000{step}", values_of({"model": model}))
        manager.join()
        assert 6 in manager.all_steps()
    steps = ray_dcp.open(tmp_path).steps
    assert not any(one.is_marked_damaged for one in steps)


@pytest.mark.parametrize("finds", ["load", "verify"])
def test_damage_that_a_part_of_this_process_finds_makes_its_next_save_write(tmp_path, finds):
    model, _ = a_run(tmp_path, 2)
    assert shared(path_of(tmp_path, 0), path_of(tmp_path, 1)) == 1
    flip_shared(path_of(tmp_path, 1))
    if finds == "verify":
        assert not ray_dcp.verify(path_of(tmp_path, 0)).ok
    else:
        with pytest.raises(errors.DamagedCheckpointError):
            ray_dcp.load({"model": Tuned()}, checkpoint_id=path_of(tmp_path, 0), no_dist=True)
    for step in (2, 3):
        path = save(tmp_path, step, {"model": model})
        check_holds(path, values_of({"model": model}))
    assert shared(path_of(tmp_path, 2), path_of(tmp_path, 3)) == 1


def test_a_new_process_reads_what_it_links_and_marks_every_step_with_a_damaged_file(
    tmp_path, monkeypatch, caplog
):
    model, _ = a_run(tmp_path, 3)
    own_bytes(path_of(tmp_path, 0))
    # In the header of a tensor, which a load does not read, but stock DCP does.
    flip(linked_file(path_of(tmp_path, 1)), 100)
    new_process(monkeypatch)
    check_holds(save(tmp_path, 3, {"model": model}), values_of({"model": model}))
    assert "The steps that have it: 1, 2." in caplog.text
    steps = {one.step: one for one in ray_dcp.open(tmp_path).steps}
    assert [steps[step].is_marked_damaged for step in range(4)] == [False, True, True, False]
    assert "marked as damaged" in steps[1].detail
    # A mark makes nothing unreadable.
    ray_dcp.load({"model": Tuned()}, checkpoint_id=path_of(tmp_path, 1), no_dist=True)
    # A new process links to the newest step without a mark alone.
    ray_dcp.delete(path_of(tmp_path, 3))
    new_process(monkeypatch)
    path = save(tmp_path, 4, {"model": model})
    assert shared(path, path_of(tmp_path, 0)) == 1
    check_holds(path, values_of({"model": model}))


def test_a_file_that_many_saves_linked_is_read_again_and_written_if_it_is_damaged(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(sources, "MOST_LINKS", 4)
    model, _ = a_run(tmp_path, 1)
    for step in range(1, 12):
        if step == 3:
            flip_shared(path_of(tmp_path, 0))
        model.set_step(step)
        save(tmp_path, step, {"model": model})
        session_alone().history.wait()
    # Two links are half of four: the file is read after each second save, so after 2 and 4.
    assert "The steps that have it: 0, 1, 2, 3, 4." in caplog.text
    found = [ray_dcp.verify(path_of(tmp_path, step)).ok for step in range(12)]
    assert found == [False] * 5 + [True] * 7
    assert shared(path_of(tmp_path, 10), path_of(tmp_path, 11)) == 1
    check_holds(path_of(tmp_path, 11), values_of({"model": model}))


def test_a_damaged_item_marks_the_steps_that_have_it(tmp_path, monkeypatch):
    model, items = Tuned(), {"model": Item(save_options=LINK), "other": Item()}

    def save_step(step: int) -> None:
        with CheckpointManager(tmp_path, 1, items=items, no_dist=True) as manager:
            manager.save(step, {"model": {"net": model}, "other": {"x": torch.ones(2)}})

    for step in (1, 2):
        save_step(step)
    flip_shared(tmp_path / "step-00000002" / "model")
    new_process(monkeypatch)
    save_step(3)
    session_alone().history.wait()
    found = {one.step: one.is_marked_damaged for one in ray_dcp.open_run(tmp_path) if one.step}
    assert found == {1: True, 2: True, 3: False}
    assert ray_dcp.verify(tmp_path / "step-00000003").ok


def test_a_file_that_nobody_read_for_a_day_is_written(tmp_path, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(unchanged, "_now_s", lambda: now_s[0])
    model, _ = a_run(tmp_path, 1)
    links = []
    for step in range(1, 5):
        if step == 3:
            session_alone().history.wait()
            now_s[0] += sources.MOST_AGE_S
        save(tmp_path, step, {"model": model})
        links.append(shared(path_of(tmp_path, step - 1), path_of(tmp_path, step)))
    assert links == [1, 1, 0, 1]


def test_retention_keeps_the_newest_step_that_is_known_to_be_whole(tmp_path):
    how: dict[str, Any] = {"no_dist": True, "retention": LatestN(1)}
    path = tmp_path / "step-00000004"
    with (
        CheckpointManager(tmp_path, 1, **how) as manager,
        CheckpointManager(tmp_path, read_only=True, no_dist=True) as reader,
    ):
        manager.save(2, state_of(2))
        ray_dcp.save(state_of(3), checkpoint_id=tmp_path / "step-00000003")  # by who knows whom
        with reader.reading(2), reader.reading(3):
            manager.save(4, state_of(4))
            manager.join()
        flip(linked_file(path), 1000)
        assert CliRunner().invoke(main, ["verify", "--mark", f"{tmp_path}@4"]).exit_code == 1
        manager.join()
        # 4 is damaged; of 3 this process knows nothing.
        assert manager.all_steps() == [2, 3, 4]
        manager.save(5, state_of(5))
        manager.join()
        assert manager.all_steps() == [4, 5]


def test_a_storage_that_hangs_while_files_are_read_again_is_told_and_ends_with_its_owner(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(sources, "MOST_LINKS", 4)
    monkeypatch.setattr(unchanged, "SLOW_S", 0.0)
    monkeypatch.setattr(session_alone(), "history", RunHistory())
    history, read, goes_on = session_alone().history, unchanged.is_intact, threading.Event()
    ended: list[type[BaseException]] = []

    def hanging_read(*how: Any) -> bool:
        goes_on.wait(PATIENCE_S)
        try:
            return read(*how)
        except errors.CheckpointError as error:
            ended.append(type(error))
            raise

    monkeypatch.setattr(unchanged, "is_intact", hanging_read)
    model, _ = a_run(tmp_path, 8)  # saves go on beside it
    history.close()
    goes_on.set()
    history.wait()
    assert ended == [errors.SaveCancelledError]
    told = [one for one in caplog.records if "its storage is slow, or hangs" in one.message]
    assert len(told) == 1
    check_holds(path_of(tmp_path, 7), values_of({"model": model}))


def test_a_run_that_is_forgotten_for_newer_ones_is_read_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MOST_LINKS", 4)
    monkeypatch.setattr(session_alone(), "history", RunHistory())
    read, goes_on, ended = unchanged.is_intact, threading.Event(), threading.Event()

    def hanging_read(*how: Any) -> bool:
        goes_on.wait(PATIENCE_S)
        try:
            return read(*how)
        except errors.SaveCancelledError:
            ended.set()
            raise

    with monkeypatch.context() as patched:
        patched.setattr(unchanged, "is_intact", hanging_read)
        a_run(tmp_path / "first", 8)
        for number in range(8):
            a_run(tmp_path / f"run_{number}", 1)
        goes_on.set()
        assert ended.wait(PATIENCE_S)


def test_a_file_that_can_not_be_read_in_time_is_written(tmp_path, monkeypatch):
    model, _ = a_run(tmp_path, 1)
    new_process(monkeypatch)
    read, was_saved = unchanged.is_intact, threading.Event()

    def slow_read(*how: Any) -> bool:
        was_saved.wait(PATIENCE_S)
        return read(*how)

    with monkeypatch.context() as patched:
        patched.setattr(bounds, "SETTLED_READ_S", 0.01)
        patched.setattr(unchanged, "is_intact", slow_read)
        path = save(tmp_path, 1, {"model": model})
        was_saved.set()
        session_alone().history.wait()
    assert shared(path_of(tmp_path, 0), path) == 0
    check_holds(path, values_of({"model": model}))
    assert shared(path, save(tmp_path, 2, {"model": model})) == 1


def test_a_store_s_copies_of_a_damaged_object_are_looked_at_one_by_one(caplog, monkeypatch):
    place = a_store()
    save_steps(place, 3)
    storage = open_storage(place)
    (key,) = [
        one.key
        for one in storage.list("step-2/")
        if one.key.endswith(".distcp") and one.num_bytes > 1 << 20
    ]
    data = bytearray(storage.read(key))
    data[500_000] ^= 4
    storage.write(key, data)
    new_process(monkeypatch)
    model = Tuned()
    model.set_step(3)
    state = {"model": model, "rank": ray_dcp.PerRank(0)}
    ray_dcp.save(state, checkpoint_id=place / "step-3", options=LINK)
    assert "The steps that have it: 2." in caplog.text
    assert [holds(place / f"step-{step}", step) for step in (0, 1, 3)] == [True] * 3


def test_the_mark_of_an_earlier_attempt_is_not_that_of_the_step_saved_again(tmp_path, monkeypatch):
    model, _ = a_run(tmp_path, 1)
    flip_shared(path_of(tmp_path, 0))
    assert CliRunner().invoke(main, ["verify", "--mark", str(tmp_path)]).exit_code == 1
    again = save(tmp_path, 0, {"model": model}, SaveOptions())  # whose plan has no settled files
    save(tmp_path, 0, {"model": model})
    assert [*(tmp_path / ".manager" / "damaged").iterdir()], "the mark of the first attempt is left"
    new_process(monkeypatch)
    assert shared(again, save(tmp_path, 1, {"model": model})) == 1
    check_holds(path_of(tmp_path, 1), values_of({"model": model}))


def test_a_mark_that_another_process_sets_ends_linking_at_once_and_for_one_save(tmp_path):
    model, _ = a_run(tmp_path, 2)
    session_alone().history.wait()
    flip_shared(path_of(tmp_path, 1))
    command = [sys.executable, "-m", "ray_dcp", "verify", "--mark", str(tmp_path)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 1
    new, links = [], []
    for step in (2, 3):
        model.set_step(step)
        new.append(save(tmp_path, step, {"model": model}))
        session_alone().history.wait()
        links.append(shared(path_of(tmp_path, 1), new[-1]))
        check_holds(new[-1], values_of({"model": model}))
    assert links == [0, 0]
    assert shared(*new) == 1


def test_a_manager_with_a_retention_names_damaged_steps_and_the_way_out(tmp_path, caplog):
    how: dict[str, Any] = {"no_dist": True, "retention": LatestN(1)}
    for step in (1, 2):
        with CheckpointManager(tmp_path, 1, **how) as manager:
            manager.save(step, state_of(step))
        path = tmp_path / f"step-0000000{step}"
        flip(next(path.glob("*.distcp")), 1000)
        assert CliRunner().invoke(main, ["verify", "--mark", f"{tmp_path}@{step}"]).exit_code == 1
    with CheckpointManager(tmp_path, 1, **how) as manager:
        manager.save(3, state_of(3))
        manager.join()
        assert manager.all_steps() == [1, 2, 3]
    assert "2 steps of " in caplog.text
    assert ": 1, 2. `ray-dcp verify --mark RUN`" in caplog.text
    for step in (1, 2):
        assert CliRunner().invoke(main, ["rm", "--yes", f"{tmp_path}@{step}"]).exit_code == 0
    caplog.clear()
    with CheckpointManager(tmp_path, 1, **how) as manager:
        manager.save(4, state_of(4))
        manager.join()
        assert manager.all_steps() == [4]
    assert "marked as damaged" not in caplog.text


def test_a_mark_is_set_and_cleared_by_verify(tmp_path):
    a_run(tmp_path, 2)
    command = CliRunner()
    flip_shared(path_of(tmp_path, 1))
    assert command.invoke(main, ["verify", "--mark", str(tmp_path)]).exit_code == 1
    steps = ray_dcp.open(tmp_path).steps
    assert [one.is_marked_damaged for one in steps] == [True, True]
    flip_shared(path_of(tmp_path, 1))  # it is as it was
    done = command.invoke(main, ["verify", "--mark", "--json", str(tmp_path)])
    assert done.exit_code == 0
    assert not any(one.is_marked_damaged for one in ray_dcp.open(tmp_path).steps)
    # What the steps share was read once.
    found = json.loads(done.output)["steps"]
    assert found[0]["checked_bytes"] > 1 << 20 > found[1]["checked_bytes"]


@pytest.mark.parametrize("what", ["file", "copy of a damaged one"])
def test_what_is_read_before_it_is_linked_is_read_no_more_when_its_owner_ends(
    tmp_path, monkeypatch, what
):
    model, _ = a_run(tmp_path, 3)
    if what != "file":
        for one in path_of(tmp_path, 1).glob("*.distcp"):
            shutil.copy(one, tmp_path / "copy")
            os.replace(tmp_path / "copy", one)
            flip(one, one.stat().st_size // 2)
        for one in path_of(tmp_path, 2).glob("*.distcp"):
            flip(one, one.stat().st_size // 2)
    new_process(monkeypatch)
    history, read = session_alone().history, unchanged.is_intact
    ended: list[type[BaseException]] = []

    def closing_read(storage: Any, *how: Any) -> bool:
        if what == "file" or storage.url == str(path_of(tmp_path, 1)):
            history.close()
        try:
            return read(storage, *how)
        except errors.CheckpointError as error:
            ended.append(type(error))
            raise

    monkeypatch.setattr(unchanged, "is_intact", closing_read)
    new = save(tmp_path, 3, {"model": model})
    history.wait()
    assert {*ended} == {errors.SaveCancelledError}
    check_holds(new, values_of({"model": model}))


def test_every_spelling_of_a_place_is_one_run(tmp_path):
    model = Tuned()
    for step, root in enumerate((f"file://{tmp_path}", f"{tmp_path}/", f"file://{tmp_path}/x/..")):
        place = f"{root}/step-{step}"
        ray_dcp.save({"model": model}, checkpoint_id=place, options=LINK)
    assert shared(path_of(tmp_path, 0), path_of(tmp_path, 2)) == 1


def test_a_save_links_to_what_is_left_after_the_newest_step_was_deleted(tmp_path):
    model, _ = a_run(tmp_path, 3)
    ray_dcp.delete(path_of(tmp_path, 2))
    assert shared(path_of(tmp_path, 1), save(tmp_path, 3, {"model": model})) == 1


# --- Steps stay whole by themselves --------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_steps_can_be_deleted_in_any_order(tmp_path, order):
    _, saved = a_run(tmp_path)
    left = set(order)
    for step in order:
        ray_dcp.delete(path_of(tmp_path, step))
        left.remove(step)
        for other in left:
            check_holds(path_of(tmp_path, other), saved[other])


def test_a_linked_file_is_made_durable_although_its_first_save_did_not(tmp_path, monkeypatch):
    model, durable, real = Tuned(), set(), os.fsync

    def fsync(fd: int) -> None:
        durable.add(os.fstat(fd).st_ino)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    unsafe = SaveOptions(unchanged="link", sync_files=False)
    first = save(tmp_path, 0, {"model": model}, unsafe)
    linked = linked_file(first).stat().st_ino
    assert linked not in durable
    assert shared(first, save(tmp_path, 1, {"model": model}, unsafe)) == 1
    assert linked not in durable
    assert shared(first, save(tmp_path, 2, {"model": model})) == 1
    assert linked in durable


# --- Asynchronous saves, and reports -------------------------------------------------------------


@pytest.mark.parametrize("staging", ["call", "background"])
def test_an_asynchronous_save_links_and_reports_it(tmp_path, staging):
    reports = save_steps(tmp_path, 3, "async_save", staging=staging)
    for step, report in enumerate(reports):
        path = path_of(tmp_path, step)
        assert holds(path, step)
        sizes = sorted(file.stat().st_size for file in path.glob("*.distcp"))
        expected = (sizes[0], sizes[1], 0) if step else (sum(sizes), 0, 0)
        assert (report.bytes_written, report.bytes_linked, report.bytes_copied) == expected


# --- Object stores -------------------------------------------------------------------------------


def a_store() -> Any:
    return ray_dcp.Location("run", filesystem=obstore.store.MemoryStore())


def test_a_store_copies_what_did_not_change(monkeypatch):
    place, sent = a_store(), []
    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda *a, **k: (sent.append(a[1]), put(*a, **k))[1])
    reports = save_steps(place, 3, "async_save")
    assert [report.bytes_copied > 0 for report in reports] == [False, True, True]
    assert len([key for key in sent if key.endswith(".distcp")]) == 4
    for step in range(3):
        assert holds(path_of(place, step), step)
    ray_dcp.delete(path_of(place, 0))
    ray_dcp.delete(path_of(place, 2))
    assert holds(path_of(place, 1), 1)


def other_copy(store: Any, old: str, new: str) -> None:
    data = bytes(obstore.get(store, old).bytes())
    obstore.put(store, new, data[:-1] + bytes([data[-1] ^ 1]))


def replaced_source(store: Any, old: str, new: str) -> None:
    data = bytes(obstore.get(store, old).bytes())
    obstore.put(store, new, data)
    obstore.put(store, old, data[:1] + b"x" + data[2:])


def gone_source(store: Any, old: str, new: str) -> None:
    obstore.delete(store, old)
    raise FileNotFoundError(old)


def lost_answer(store: Any, old: str, new: str) -> None:
    obstore.put(store, new, obstore.get(store, old).bytes())
    raise obstore.exceptions.GenericError("status code: 400")


def no_copies(store: Any, old: str, new: str) -> None:
    raise NotImplementedError


@pytest.mark.parametrize(
    "copy",
    [other_copy, replaced_source, gone_source, lost_answer, no_copies],
    ids=lambda copy: copy.__name__,
)
def test_what_a_store_did_not_copy_well_is_written(monkeypatch, copy):
    place = a_store()
    save_steps(place, 1)
    monkeypatch.setattr(obstore, "copy", copy)
    model = Tuned()
    handle = ray_dcp.async_save({"model": model}, checkpoint_id=place / "step-1", options=LINK)
    handle.committed(120)
    assert handle.report().bytes_copied == 0
    monkeypatch.undo()
    model.set_step(0)
    ray_dcp.save({"model": model}, checkpoint_id=place / "step-2", options=SaveOptions())
    assert holds(place / "step-2", 0)
    assert ray_dcp.verify(place / "step-1").ok


# --- Managers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [False, True], ids=["whole", "items"])
@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarts"])
def test_a_manager_passes_the_option_on(tmp_path, monkeypatch, items, restarts):
    item = Item(save_options=LINK)
    how = {"items": {"model": item, "other": Item()}} if items else {"item": item}
    model = Tuned()

    def save_step(step: int) -> None:
        with CheckpointManager(tmp_path, 1, 2, **how, no_dist=True) as manager:
            model.set_step(step)
            state = (
                {"model": {"net": model}, "other": {"x": torch.ones(2)}}
                if items
                else {"model": model}
            )
            manager.save(step, state)

    for step in range(3):
        save_step(step)
        if restarts:
            new_process(monkeypatch)
    folders = sorted(path for path in tmp_path.glob("*/model" if items else "*0*") if path.is_dir())
    assert shared(*folders[-2:]) == 1  # retention deleted the first
    assert all(ray_dcp.verify(folder).ok for folder in folders[-2:])


# --- settled saves --------------------------------------------------------------------------------


PATIENCE_S = 120


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((64,), value)}


def assert_holds(path: Path, value: float) -> None:
    assert ray_dcp.verify(path).ok
    assert ray_dcp.read_state_dict(path)["w"].unique().tolist() == [value]


class Stranger:
    """An object that a safe load refuses: a save warns of it."""


def telling(value: float) -> dict[str, Any]:
    return {**state_of(value), "object": Stranger()}


# One session: `max_pending` and `when_full` hold for a process that is alone


def test_the_next_save_waits_for_the_one_before_and_has_its_memory(gate: Gate, tmp_path):  # noqa: F811
    staging_backend._memory.clear()
    first = ray_dcp.async_save(state_of(1), checkpoint_id=tmp_path / "1")
    handles, begun = [], threading.Event()

    def more() -> None:
        begun.set()
        for value in (2, 3, 4):
            path = tmp_path / str(value)
            handles.append(ray_dcp.async_save(state_of(value), checkpoint_id=path))

    saving = threading.Thread(target=more, daemon=True)
    saving.start()
    begun.wait()
    # A load of another thread is not behind them.
    ray_dcp.save(state_of(0), checkpoint_id=tmp_path / "0")
    ray_dcp.load(state_of(5), checkpoint_id=tmp_path / "0")
    assert not first.done()
    assert not handles
    gate.open.set()
    saving.join(PATIENCE_S)
    for handle in (first, *handles):
        handle.committed(PATIENCE_S)
    assert staging_backend._memory.idle_bytes <= 2 << 20  # of one save
    for value in (1, 2, 3, 4):
        assert_holds(tmp_path / str(value), value)


def test_a_save_that_its_process_left_in_a_hanging_storage_is_in_nobodys_way(
    gate: Gate,  # noqa: F811
    tmp_path,
):
    first = ray_dcp.async_save(
        state_of(1), checkpoint_id=tmp_path / "1", options=SaveOptions(write_timeout_s=1)
    )
    second = ray_dcp.async_save(state_of(2), checkpoint_id=tmp_path / "2")
    with pytest.raises(errors.DeadlineError):
        first.committed(PATIENCE_S)
    gate.open.set()
    second.committed(PATIENCE_S)
    assert_holds(tmp_path / "2", 2)


# Futures that users hold


def test_who_gives_up_waiting_for_a_future_does_not_end_the_save(gate: Gate, tmp_path):  # noqa: F811
    handle = ray_dcp.async_save(state_of(1), checkpoint_id=tmp_path / "c")

    async def wait_a_moment() -> None:
        for future in (handle.upload_completion, handle.upload_completion):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(future), 0.01)

    asyncio.run(wait_a_moment())
    assert not handle.upload_completion.cancel()
    assert not handle.staging_completion.cancel()
    handle.upload_completion.set_result("something else")
    gate.open.set()
    assert handle.result(PATIENCE_S).state_dict_metadata.keys() == {"w"}
    assert_holds(tmp_path / "c", 1)


def test_no_callback_breaks_the_thread_that_ends_a_save(gate: Gate, tmp_path, caplog):  # noqa: F811
    handle = ray_dcp.async_save(state_of(1), checkpoint_id=tmp_path / "c")
    called = []

    def ends(future: Any) -> None:
        called.append(future)
        raise SystemExit("a callback")

    def waits(future: Any) -> None:
        called.append(handle.result(PATIENCE_S))

    for future in (handle.upload_completion, handle):
        future.add_done_callback(waits)
        future.add_done_callback(ends)
    gate.open.set()
    handle.result(PATIENCE_S)
    for thread in threading.enumerate():
        if thread.name.startswith("ray_dcp save"):
            thread.join(PATIENCE_S)
    assert len(called) == 4
    assert "A callback of" in caplog.text
    handle.add_done_callback(called.append)
    assert called[-1] is handle


def test_a_callback_of_staging_may_wait_for_the_end_of_its_save(tmp_path):
    options = SaveOptions(staging="background")
    told = threading.Event()

    class Slow:
        def __reduce__(self) -> Any:
            return int, (1,)

    handle = ray_dcp.async_save({**state_of(1), "s": Slow()}, checkpoint_id=tmp_path / "c",
                                options=options)  # fmt: skip

    def waits(future: Any) -> None:
        handle.result(PATIENCE_S)
        told.set()

    # Called in this thread where it is staged already.
    handle.staging_completion.add_done_callback(waits)
    handle.committed(PATIENCE_S)
    assert told.wait(PATIENCE_S)


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_listener_of_events_that_raises_leaves_an_asynchronous_save_as_it_is(tmp_path, error):
    heard = []

    def listener(event: events.Event) -> None:
        if event.is_end:
            heard.append(event)
            raise error("a listener")

    unsubscribe = events.subscribe(listener)
    try:
        ray_dcp.async_save(state_of(1), checkpoint_id=tmp_path / "c").committed(PATIENCE_S)
    finally:
        unsubscribe()
    assert heard
    assert_holds(tmp_path / "c", 1)


# What follows a commit


@pytest.fixture
def strict() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_warning_that_is_an_error_does_not_fail_what_is_committed(strict, tmp_path, caplog):
    ray_dcp.save(telling(1), checkpoint_id=tmp_path / "sync")
    ray_dcp.async_save(telling(2), checkpoint_id=tmp_path / "async").committed(PATIENCE_S)
    with ray_dcp.CheckpointManager(tmp_path / "run", save_interval=1) as manager:
        assert manager.save(1, telling(3))
        assert manager.save_async(2, telling(4))
        manager.join()
        assert manager.all_steps() == [1, 2]
    assert caplog.text.count("Stranger") >= 4
    for place, value in (
        ("sync", 1),
        ("async", 2),
        ("run/step-00000001", 3),
        ("run/step-00000002", 4),
    ):
        found = state_of(0)
        ray_dcp.load(found, checkpoint_id=tmp_path / place)
        assert found["w"].unique().tolist() == [value]


def test_a_load_that_is_done_is_not_failed_by_its_warning(strict, tmp_path):
    for step in (1, 2):
        ray_dcp.save(state_of(step), checkpoint_id=tmp_path / f"step-{step:08}")
    next((tmp_path / "step-00000002").glob("*.distcp")).unlink()
    found = state_of(0)
    assert ray_dcp.load_newest(found, tmp_path).step == 1
    with ray_dcp.CheckpointManager(tmp_path, read_only=True) as manager:
        again = state_of(0)
        assert manager.restore("auto", again).step == 1
    assert found["w"].tolist() == again["w"].tolist() == [1.0] * 64


class Raises(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("a handler")


@pytest.mark.parametrize("name", [events.LOGGER_NAME, _dcp_logger.name, "ray_dcp"])
def test_a_log_handler_that_raises_fails_neither_save_nor_load(tmp_path, name):
    told = []
    logger, handler = logging.getLogger(name), Raises()
    level, unsubscribe = logger.level, events.subscribe(lambda event: told.append(event.outcome))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        ray_dcp.save(state_of(1), checkpoint_id=tmp_path / "sync")
        ray_dcp.async_save(state_of(2), checkpoint_id=tmp_path / "async").committed(PATIENCE_S)
        ray_dcp.load(state_of(0), checkpoint_id=tmp_path / "sync")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        unsubscribe()
    assert [outcome for outcome in told if outcome in events._ENDS] == [
        "committed", "committed", "loaded"
    ]  # fmt: skip


def test_a_writer_that_takes_no_save_id_does_not_fail_what_is_committed(tmp_path):
    writer = torch.distributed.checkpoint.FileSystemWriter(tmp_path / "c")
    kind, tried = type(writer), []

    class Refuses:
        def __get__(self, *_: object) -> str:
            return "mine"

        def __set__(self, _: object, save_id: str) -> None:
            tried.append(save_id)
            raise AttributeError("no")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "save_id", Refuses(), raising=False)
        ray_dcp.save(state_of(1), storage_writer=writer)
    assert ray_dcp.outcome(tmp_path / "c", tried[-1]) == "committed"
    assert_holds(tmp_path / "c", 1)


def test_an_interrupt_after_the_commit_leaves_the_step_committed_for_its_manager(tmp_path):
    def interrupt(event: events.Event) -> None:
        if event.is_end:
            raise KeyboardInterrupt

    with ray_dcp.CheckpointManager(tmp_path, 1, chkpt_on_preemption=False) as manager:
        unsubscribe = events.subscribe(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                manager.save(1, state_of(1), tags=("keep",))
        finally:
            unsubscribe()
        assert manager.step_info(1).tags == {"keep"}
        assert manager.all_steps() == [1]


# No threads


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns what refuses new threads: of some names, or all."""
    begin = threading.Thread.start

    def refuse(*names: str) -> None:
        def start(thread: threading.Thread) -> None:
            if not names or thread.name.partition("/")[0].strip() in names:
                raise RuntimeError("can't start new thread")
            begin(thread)

        monkeypatch.setattr(threading.Thread, "start", start)

    yield refuse
    monkeypatch.undo()


def test_an_asynchronous_save_without_a_thread_fails_and_is_in_nobodys_way(
    no_threads, monkeypatch, tmp_path
):
    no_threads("ray_dcp save")
    handle = ray_dcp.async_save(state_of(1), checkpoint_id=tmp_path / "1")
    with pytest.raises(errors.LimitError, match="start a thread"):
        handle.result(PATIENCE_S)
    assert handle.upload_completion.done()
    assert not asynchronous._running
    assert session_alone().coordinator_info()["active"] == ()
    monkeypatch.undo()
    began_s = time.monotonic()
    asynchronous._drain()
    ray_dcp.async_save(state_of(2), checkpoint_id=tmp_path / "2").committed(PATIENCE_S)
    assert time.monotonic() - began_s < PATIENCE_S
    assert not list((tmp_path / "1").glob("*.distcp"))
    atexit.unregister(asynchronous._drain)


def test_without_threads_every_call_fails_cleanly_and_the_next_ones_work(
    no_threads, monkeypatch, tmp_path
):
    ray_dcp.save(state_of(0), checkpoint_id=tmp_path / "c")
    no_threads()
    with pytest.raises(errors.LimitError):
        ray_dcp.save(state_of(1), checkpoint_id=tmp_path / "c")
    with pytest.raises(errors.LimitError):
        ray_dcp.async_save(state_of(1), checkpoint_id=tmp_path / "c").result(PATIENCE_S)
    with pytest.raises(errors.LimitError):
        ray_dcp.load(state_of(0), checkpoint_id=tmp_path / "c")
    monkeypatch.undo()
    assert_holds(tmp_path / "c", 0)
    ray_dcp.save(state_of(2), checkpoint_id=tmp_path / "c")
    assert_holds(tmp_path / "c", 2)


@pytest.mark.parametrize("name", ["trace", "ray_dcp removal", "ray_dcp manager"])
def test_a_thread_for_what_follows_a_commit_is_not_needed(no_threads, tmp_path, name):
    with ray_dcp.CheckpointManager(tmp_path, save_interval=1, max_to_keep=1) as manager:
        no_threads(name)
        for step in (1, 2):
            assert manager.save_async(step, state_of(step))
        manager.join()
        assert manager.all_steps() == [2]
