"""What a manager can't read it does not decide on: the step stays, and the log says so."""

from __future__ import annotations

import logging
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import ray_dcp
from ray_dcp import errors
from ray_dcp.format.names import CATALOGUE
from ray_dcp.manager import (
    BestN,
    CheckpointManager,
    Item,
    KeepEveryHours,
    KeepEverySteps,
    LatestN,
    StepFacts,
)
from ray_dcp.manager.catalogue import FOLDER
from ray_dcp.manager.leases import ReaderLease, Readers, WriterLease, _started, this_process
from ray_dcp.manager.retention import superfluous
from ray_dcp.manager.steps import free_number
from ray_dcp.runtime.garbage_collection import delete
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.memory import MemoryStorage
from tests.crash.registry import OLD
from tests.support.manager_places import HERE, root_of, save_step, writer_of

KEEPS_BEST = LatestN(1) | BestN(1, "loss")
LOSSES = {1: 0.1, 2: 0.9, 3: 0.5}


def state(step=0):
    return {"w": torch.full((8,), float(step))}


def manager_of(path, **given) -> CheckpointManager:
    given.setdefault("retention", KEEPS_BEST)
    return CheckpointManager(path, 1, chkpt_on_preemption=False, **given)


def crashed_run(path: Path) -> Path:
    """Returns the info of the best step of a run whose process died before its catalogue."""
    with manager_of(path) as manager:
        for step in (1, 2):
            manager.save(step, state(step), metrics={"loss": LOSSES[step]})
    (path / FOLDER / CATALOGUE).unlink()
    (info,) = path.glob("step-00000001/step-info-*.json")
    return info


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_the_best_step_stays_when_what_was_told_of_it_is_damaged(tmp_path, caplog, damage):
    info = crashed_run(tmp_path)
    data = info.read_bytes()
    info.write_bytes(
        {"flip": flip(data, len(data) // 2), "truncate": data[:40], "empty": b""}[damage]
    )
    with manager_of(tmp_path) as manager:
        manager.save(3, state(3), metrics={"loss": LOSSES[3]})
        manager.join()
        assert 1 in manager.all_steps()
        manager.save(4, state(4), metrics={"loss": 0.7})
        manager.join()
        # The others go as ever: the best of those that are known stays, and the newest.
        assert manager.all_steps() == [1, 3, 4]
        found = [one for one in caplog.records if one.levelno >= logging.WARNING]
        assert [("step-00000001" in one.getMessage()) for one in found] == [True]
        assert "stays" in found[0].getMessage()
        info.write_bytes(data)
        manager.save(5, state(5), metrics={"loss": 0.8})
        manager.join()
        assert manager.all_steps() == [1, 5]


@pytest.mark.parametrize("what", ["step-info-", "manifest-"])
def test_one_read_that_gives_another_byte_changes_nothing(tmp_path, monkeypatch, caplog, what):
    crashed_run(tmp_path)
    real, left = LocalStorage.read, [1]

    def read(self, key, *where):
        data = real(self, key, *where)
        if left and "step-00000001" in f"{self.url}/{key}" and what in key:
            left.pop()
            return flip(data, len(data) // 2)
        return data

    monkeypatch.setattr(LocalStorage, "read", read)
    with manager_of(tmp_path) as manager:
        manager.save(3, state(3), metrics={"loss": LOSSES[3]})
        manager.join()
        assert left == []
        assert manager.all_steps() == [1, 3]
        assert manager.best_step() == 1
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


def test_what_is_not_known_is_not_known_to_the_next_process_either(tmp_path):
    crashed_run(tmp_path).write_bytes(b"")
    for step in (3, 4):
        with manager_of(tmp_path) as manager:
            manager.save(step, state(step), metrics={"loss": LOSSES[3]})
            manager.join()
            assert 1 in manager.all_steps()


def test_an_info_that_was_listed_and_is_gone_makes_no_step_go(tmp_path, monkeypatch):
    crashed_run(tmp_path)
    real = LocalStorage.read

    def read(self, key, *where):
        is_gone = "step-00000001/step-info-" in f"{self.url}/{key}"
        return real(self, f"{key}.gone" if is_gone else key, *where)

    monkeypatch.setattr(LocalStorage, "read", read)
    with manager_of(tmp_path) as manager:
        manager.save(3, state(3), metrics={"loss": LOSSES[3]})
        manager.join()
        assert 1 in manager.all_steps()


POLICIES = st.recursive(
    st.one_of(
        st.builds(LatestN, st.integers(1, 4)),
        st.builds(BestN, st.integers(1, 3), st.just("loss"), st.sampled_from(["min", "max"])),
        st.builds(KeepEverySteps, st.integers(1, 4)),
        st.builds(KeepEveryHours, st.floats(0.2, 3.0)),
    ),
    lambda some: st.one_of(
        st.builds(lambda a, b: a | b, some, some),
        st.builds(lambda a, b: a & b, some, some),
        st.builds(lambda a: ~a, some),
    ),
    max_leaves=4,
)


# Where the best goes, what is not known may be the best, or the worst.
@example(policy=~BestN(1, "loss", "max"), losses=[2, 5, 1], at=1, seed=0)
@example(policy=~BestN(1, "loss", "min"), losses=[2, 0, 3], at=1, seed=0)
@given(
    policy=POLICIES,
    losses=st.lists(st.integers(0, 5), min_size=2, max_size=8),
    at=st.integers(0, 7),
    seed=st.integers(0, 99),
)
def test_what_is_not_known_of_a_step_only_makes_more_stay(policy, losses, at, seed):
    order = random.Random(seed)
    steps = [
        StepFacts(step=step, created_s=3600.0 * step * order.uniform(0.8, 1.2),
                  metrics={"loss": float(loss)})
        for step, loss in enumerate(losses)
    ]  # fmt: skip
    one = steps[at % len(steps)]
    others = [facts for facts in steps if facts is not one]
    unsure = superfluous(others, policy, unknown=[replace(one, metrics={})])
    assert set(unsure) <= set(superfluous(steps, policy))
    assert one.step not in unsure


# --- leases -------------------------------------------------------------------------------------


@pytest.fixture
def storage(request):
    name = "unreadable-" + "".join(c if c.isalnum() else "-" for c in request.node.name)
    found = MemoryStorage(name)
    found.delete([entry.key for entry in found.list()])
    return found


@pytest.mark.parametrize("content", [b"", b'{"pid": ', b"\xff\xfe"])
def test_a_writer_lease_that_cannot_be_read_is_not_taken(storage, content):
    first = writer_of(storage)
    first.begin(1)
    (key,) = [entry.key for entry in storage.list(f"{FOLDER}/writer-")]
    storage.write(key, content)
    with pytest.raises(errors.CheckpointExistsError, match=r"can't be read.*takeover=True"):
        writer_of(storage).begin(2)
    first.begin(2)
    writer_of(storage, takeover=True).begin(3)


def test_a_readers_lease_that_cannot_be_read_keeps_its_step(storage, caplog):
    now = [0.0]
    readers = Readers(lease_s=30.0, holder=HERE, clock=lambda: now[0])
    shared = root_of(storage).shared
    shared.write("reading/1.abc", b"{")
    for now[0] in (0.0, 29.0, 31.0, 1e6):
        assert readers.is_live(shared, "reading/1.abc")
    assert [one.getMessage().count("reading/1.abc") for one in caplog.records] == [1]
    assert "remove" in caplog.text


def test_one_unreadable_answer_is_no_dead_reader_and_no_free_lease(storage, monkeypatch):
    """A flipped byte in the answer of a server, once."""
    writer_of(storage).begin(1)
    lease = ReaderLease(root_of(storage), 1, lease_s=30.0, holder=HERE, beats=False)
    lease.__enter__()
    real, left = MemoryStorage.read, ["writer-", "reading/"]

    def read(self, key, *where):
        for one in [one for one in left if one in key]:
            left.remove(one)
            return b"?" + real(self, key, *where)[1:]
        return real(self, key, *where)

    monkeypatch.setattr(MemoryStorage, "read", read)
    other = replace(HERE, pid=1, machine="another machine")
    with pytest.raises(errors.CheckpointExistsError, match="which lives"):
        WriterLease(root_of(storage), holder=replace(HERE, pid=2, nonce="2"), beats=False).take()
    assert Readers(lease_s=30.0, holder=other).is_live(root_of(storage).shared, lease._key)
    assert left == []


def test_a_process_that_proc_hides_lives(monkeypatch):
    """As with /proc mounted with hidepid=2, and a process of another user."""
    hidden = replace(HERE, pid=2**22 + 3, started="7")

    def kill(pid, number):
        assert (pid, number) == (hidden.pid, 0)
        raise PermissionError

    assert hidden.lives_here(HERE) is False
    monkeypatch.setattr(os, "kill", kill)
    assert hidden.lives_here(HERE) is True


# --- names that somebody else gave --------------------------------------------------------------

STRAYS = (
    f"{FOLDER}/writer-00000001 (conflicted copy).json",
    f"{FOLDER}/writer-x.json",
    f"{FOLDER}/writer-00000001-LAPTOP.beat",
    f"{FOLDER}/writer-",
    f"{FOLDER}/tags/1.",
    f"{FOLDER}/tags/x.best",
    f"{FOLDER}/tags/1 (conflicted copy).best",
    f"{FOLDER}/notes/1 (conflicted copy).txt",
    f"{FOLDER}/reading/x",
    f"{FOLDER}/reading/2 (conflicted copy).abc",
    f"{FOLDER}/deleting/1",
    f"{FOLDER}/deleting/1.0123456789abcdef.step-00000001 (conflicted copy)",
    f"{FOLDER}/catalogue (conflicted copy).json",
    "step-00000001 (conflicted copy)/manifest-00000001.json",
    "step-00000001/manifest-00000001 (conflicted copy).json",
    "step-00000001/step-info-00000000 (conflicted copy).json",
    "step-00000001/manifest-x.json",
    "step-x/manifest-00000001.json",
    "step-00000002/model (conflicted copy)/manifest-00000001.json",
    "step-00000002/model.x/__0_0.distcp",
)


@pytest.mark.parametrize("stray", STRAYS)
def test_a_stray_file_of_a_sync_tool_stops_nothing_and_stays(tmp_path, stray):
    for step in (1, 2):
        with manager_of(tmp_path, retention=LatestN(2)) as manager:
            manager.save(step, state(step), metrics={"loss": 1})
    path = tmp_path / stray
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(b"?")
    before = {one.name for one in tmp_path.iterdir()}
    with manager_of(tmp_path, retention=LatestN(2)) as manager:
        assert manager.all_steps() == [1, 2]
        assert manager.restore("auto", state()).step == 2
        with manager.reading(2):
            manager.save(3, state(3), metrics={"loss": 1})
        manager.save(3, state(4), metrics={"loss": 1}, replace=True)
        manager.tag(3, "fine")
        manager.join()
        assert manager.all_steps() == [2, 3]
        manager.delete(2)
    run = ray_dcp.open(tmp_path)
    assert [one.step for one in run if one.state == "committed"] == [3]
    assert ray_dcp.verify(run["latest"].url).ok
    assert ray_dcp.load_newest(state(), tmp_path).step == 3
    if "deleting" not in stray:
        assert path.read_bytes() == b"?"
    assert {one.name for one in tmp_path.iterdir()} == before | {"step-00000003"}


# --- deletions ----------------------------------------------------------------------------------


def test_a_deletion_that_cannot_read_a_record_deletes_nothing(storage):
    """The record may be what ends the deletion, or commit another checkpoint."""
    writer = writer_of(storage)
    attempt = save_step(writer, storage, 1, OLD)
    folder = writer.root.below("step-00000001")
    key = "step-00000001/manifest-00000002.json"
    storage.write(key, b"?")
    for how in ({"expected": attempt}, {"expected": attempt, "attempt": "0123456789abcdef"}):
        with pytest.raises(errors.DamagedCheckpointError, match="manifest-00000002"):
            delete(folder, opener=writer.root.opener, **how)
    storage.delete([key])
    assert list(writer.look().steps) == [1]


def test_items_of_a_copied_step_are_not_saved_over_when_its_info_cannot_be_read(tmp_path):
    options = {"items": {"model": Item(), "ema": Item()}, "retention": None}
    states = [{name: state(n) for name in options["items"]} for n in (1, 2, 3)]
    with manager_of(tmp_path / "run", **options) as manager:
        for values in states[:2]:
            manager.save(1, values, replace=True)
    # A copy has new records, and the same folders of items.
    shutil.copytree(tmp_path / "run", tmp_path / "copy", ignore=shutil.ignore_patterns(FOLDER))
    step = tmp_path / "copy" / "step-00000001"
    for path in step.glob("manifest-*"):
        path.unlink()
    for info in step.glob("step-info-*"):
        info.unlink()
    (step / "step-info-00000000.json").write_bytes(b"?")
    folders = {one.name for one in step.iterdir() if one.is_dir()}
    storage = LocalStorage(step)
    storage.write("manifest-00000001.json", b"?")
    assert f"model.{free_number(storage, 1)}" not in folders


def test_who_copies_a_live_run_is_told_whose_lease_the_copy_has_and_how_to_take_it(tmp_path):
    parent = os.getppid()
    alive = replace(this_process(), pid=parent, started=_started(parent))
    run, copy = tmp_path / "run", tmp_path / "copy"
    with manager_of(run) as manager:
        manager.save(1, state(1), metrics={"loss": 1})
    lease = WriterLease(root_of(LocalStorage(run)), holder=alive, beats=False)
    lease.take()
    shutil.copytree(run, copy)
    refused = rf"lease of process {parent} .*writes to {run}\. If this is a copy.*takeover=True"
    with manager_of(copy) as manager, pytest.raises(errors.CheckpointExistsError, match=refused):
        manager.save(2, state(2), metrics={"loss": 1})
    with manager_of(copy, takeover=True) as manager:
        assert manager.save(2, state(2), metrics={"loss": 1})
    lease.check()
    with (
        manager_of(run) as manager,
        pytest.raises(errors.CheckpointExistsError, match="is written"),
    ):
        manager.save(2, state(2), metrics={"loss": 1})


def test_an_item_with_a_record_that_cannot_be_read_goes_with_its_step(tmp_path):
    options = {"items": {"model": Item(), "ema": Item()}, "retention": LatestN(1)}
    with manager_of(tmp_path, **options) as manager:
        manager.save(1, {name: state(1) for name in options["items"]})
        (tmp_path / "step-00000001" / "model" / "manifest-00000001.json").write_bytes(b"?")
        manager.save(2, {name: state(2) for name in options["items"]})
        manager.join()
        assert manager.all_steps() == [2]
        assert not list(tmp_path.glob("step-00000001/*/*.distcp"))
        assert manager.restore("latest", {"ema": state()}).step == 2
