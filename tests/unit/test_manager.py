"""`CheckpointManager` in one process: saves, retention, restores, exports, what it refuses."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
import time
import warnings
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import torch
import torch.distributed.checkpoint.state_dict_saver as stock
from obstore.store import MemoryStore
from safetensors.torch import load_file

import ray_dcp
from ray_dcp import errors, events
from ray_dcp.asynchronous import run_async_save
from ray_dcp.manager import (
    AtSteps,
    BestN,
    CheckpointManager,
    EveryMinutes,
    EveryOptimal,
    EverySteps,
    Item,
    KeepEveryHours,
    KeepEverySteps,
    LatestN,
    OnPreemption,
    StepExport,
    collective_actions,
    preemption,
    step_export,
)
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.store.local import LocalStorage, LocalWriter
from ray_dcp.store.location import Location
from ray_dcp.store.storage import os_failure
from tests.support.checkpoints import data_file, flip

STATE_BYTES = 4000


def state(step: int = 0) -> dict[str, object]:
    return {"w": torch.full((STATE_BYTES // 4,), float(step)), "step": step}


def value(found) -> int:
    assert torch.equal(found["w"], torch.full((STATE_BYTES // 4,), found["w"][0].item()))
    assert found["w"][0].item() == found["step"]
    return found["step"]


@pytest.fixture
def manage(tmp_path):
    """Makes managers of one root, and closes them."""
    made = []

    def make(interval=10, *positional, **given):
        given.setdefault("chkpt_on_preemption", False)
        made.append(CheckpointManager(tmp_path / "run", interval, *positional, **given))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


def restored(manager, step="latest", **given) -> int:
    found = state(-1)
    report = manager.restore(step, found, **given)
    assert report.step == value(found)
    return report.step


def folders(manager) -> list[str]:
    """Returns the folders in which more is left than the record that says what stands."""
    kept = (p for p in Path(manager.path).glob("[!.]*/*") if not p.name.startswith("manifest-"))
    return sorted({p.relative_to(manager.path).parts[0] for p in kept})


def damage(manager, step: int) -> None:
    (file,) = Path(manager.path, f"step-{step:08d}").glob("*.distcp")
    flip(file, file.stat().st_size // 2)


# --- saving -------------------------------------------------------------------------------------


def test_steps_that_are_due_are_saved_and_others_are_not(manage):
    manager = manage(10)
    said = [manager.save(step, state(step)) for step in range(25)]
    assert [step for step, saved in enumerate(said) if saved] == [0, 10, 20]
    assert [step for step in range(25) if manager.should_save(step)] == [0, 10, 20]
    assert manager.all_steps() == [0, 10, 20]
    assert folders(manager) == ["step-00000000", "step-00000010", "step-00000020"]
    assert restored(manager) == 20
    assert restored(manager, 10) == 10
    manager = manage(None)  # without an interval each call saves
    assert all(manager.save(step, state(step)) for step in (21, 25))


@pytest.mark.parametrize("number", [np.int64, np.array, torch.tensor])
def test_steps_may_be_integers_of_any_class(number, manage):
    manager = manage(number(10))
    assert [manager.should_save(step) for step in (10, 11)] == [True, False]
    manager = manage(None, save_policy=AtSteps(number(3), 4) | EverySteps(number(10)))
    assert [manager.save(number(step), state(step)) for step in (1, 3)] == [False, True]
    assert manager.should_save(number(4))
    assert manager.save_async(number(4), state(4))
    assert manager.save(number(5), state(5), True, metrics={"loss": number(2)})
    manager.join()
    found = manager.step_info(number(5))
    assert (type(found.step), found.metrics) == (int, {"loss": 2.0})
    assert restored(manager, number(4)) == 4
    manager.tag(number(3), "kept")
    with manager.reading(number(5)), pytest.raises(errors.CheckpointError, match="read"):
        manager.delete(number(5))
    run = ray_dcp.open(manager.path)
    assert (run.step(number(3)).step, run[number(3)].url) == (3, run[3].url)
    assert run.annotate(number(3), "best").step(3).note == "best"
    found = state(-1)
    bounds = {"at_most": number(4), "newer_than": number(3)}
    assert ray_dcp.load_newest(found, manager.path, no_dist=True, **bounds).step == 4
    assert manager.rewind(number(4)) == [5]
    manager.delete(number(4))
    assert manager.all_steps() == [3]
    with pytest.raises(errors.InvalidRequestError, match="whole number"):
        manager.save(True, state())


def test_an_asynchronous_save_keeps_what_was_given_and_is_listed_when_it_is_committed(manage):
    manager = manage(1, max_pending_async=2)
    for step in range(4):
        changing = state(step)
        assert manager.save_async(step, changing)
        changing["w"].fill_(-1)
    manager.join()
    assert manager.all_steps() == [0, 1, 2, 3]
    assert [restored(manager, step) for step in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("step", [-1, 20.0, True, "20", None, 10**18])
def test_what_is_no_step_is_refused_and_changes_none(manage, step):
    manager = manage(1)
    for saved in (1, 20, 30):
        manager.save(saved, state(saved))
    for call in (
        lambda step: manager.save(step, state()),
        lambda step: manager.save_async(step, state()),
        manager.should_save,
        manager.delete,
        manager.rewind,
        manager.step_info,
        lambda step: manager.tag(step, "kept"),
        lambda step: manager.reading(step).__enter__(),
    ):
        with pytest.raises(errors.InvalidRequestError, match="must be a whole number"):
            call(step)
    assert manager.all_steps() == [1, 20, 30]


def test_settings_may_be_numbers_of_numpy(manage):
    manager = manage(
        np.int64(1),
        max_to_keep=np.int64(2),
        max_pending_async=np.int64(2),
        num_of_threads=np.int64(2),
        sync_every=np.int64(1),
        lease_s=np.float32(30),
    )
    for step in range(4):
        manager.save_async(step, state(step))
    manager.join()
    assert manager.all_steps() == [2, 3]
    policies = (
        LatestN(np.int64(3)), BestN(np.uint8(3), "loss"), KeepEverySteps(np.int32(3)),
        KeepEveryHours(np.float32(3)), EveryMinutes(np.int64(3)), EverySteps(np.int64(3)),
        EveryOptimal(least_s=np.int64(3)),
    )  # fmt: skip
    assert "np." not in repr(policies)


def test_a_repeated_step_is_refused_and_replace_saves_over_it(manage):
    manager = manage()
    manager.save(10, state(10), metrics={"loss": 1})
    with pytest.raises(errors.InvalidRequestError, match=r"committed already.*replace=True"):
        manager.save(10, state(11))
    assert restored(manager, 10) == 10
    manager.save(10, {"w": state(10)["w"], "step": 10}, replace=True, metrics={"loss": 2})
    assert manager.step_info(10).metrics == {"loss": 2.0}
    assert restored(manager, 10) == 10
    assert manager.all_steps() == [10]


def test_a_step_that_is_older_than_the_newest_is_refused_and_rewind_is_the_way_out(manage):
    manager = manage()
    for step in (10, 20, 30):
        manager.save(step, state(step))
    with pytest.raises(
        errors.InvalidRequestError, match=r"older than the newest .* 30.*rewind\(14\)"
    ):
        manager.save(15, state(15), force=True)
    assert manager.rewind(14) == [30, 20]
    assert manager.all_steps() == [10]
    assert manager.save(15, state(15), force=True)
    assert manager.all_steps() == [10, 15]
    assert manager.rewind(15) == []


def test_rewind_goes_by_the_time_of_the_save_where_the_order_does(manage):
    manager = manage(order="any")
    for step in (30, 10, 20):
        manager.save(step, state(step))
    with pytest.raises(errors.InvalidRequestError, match=r"no step 15;.* 30, 10, 20"):
        manager.rewind(15)
    assert manager.all_steps() == [10, 20, 30]
    assert manager.rewind(30) == [20, 10]
    assert manager.all_steps() == [30]
    assert manager.rewind(30) == []


def test_no_order_deletes_a_tagged_step_without_force(manage):
    """The manager's `delete` and `rewind`, and `ray_dcp.delete`; `rm` has a test of its own."""
    manager = manage()
    for step in (10, 20, 30, 40):
        manager.save(step, state(step))
    for step, tag in ((20, "release"), (40, "eval"), (40, "paper")):
        manager.tag(step, tag)
    orders = {
        r"0*20.* has the tag release: remove it with .*force=True": [
            lambda: manager.delete(20),
            lambda: ray_dcp.delete(f"{manager.path}/step-00000020"),
            lambda: ray_dcp.delete(f"{manager.path}/step-00000020", dry_run=True),
        ],
        r"step 40 .* has the tags eval, paper: .*; step 20 .* has the tag release:": [
            lambda: manager.rewind(10)
        ],
    }
    for told, refused in orders.items():
        for order in refused:
            with pytest.raises(errors.InvalidRequestError, match=told):
                order()
            assert manager.all_steps() == [10, 20, 30, 40]
    run = ray_dcp.open_run(manager.path)
    assert [run.step(step).tags for step in (20, 40)] == [("release",), ("eval", "paper")]
    assert list(Path(manager.path, ".manager").glob("deleting/*")) == []
    assert manager.rewind(20, force=True) == [40, 30]
    ray_dcp.delete(f"{manager.path}/step-00000020", force=True)
    assert manager.all_steps() == [10]
    manager.save(40, state(40))
    assert ray_dcp.open_run(manager.path).step(40).tags == ()


def test_no_order_deletes_a_step_that_is_read_without_force(manage):
    manager = manage()
    for step in (10, 20):
        manager.save(step, state(step))
    told = r"is being read by process \d+ on .*: wait until that is done, or give force=True"
    with manager.reading(20):
        for order in (
            lambda: manager.delete(20),
            lambda: manager.rewind(5),
            lambda: ray_dcp.delete(f"{manager.path}/step-00000020"),
        ):
            with pytest.raises(errors.InvalidRequestError, match=told):
                order()
            assert manager.all_steps() == [10, 20]
        manager.delete(20, force=True)
    assert manager.rewind(5) == [10]


def test_retention_keeps_a_step_whose_reader_came_before_the_deletion(manage):
    manager = manage(1, 2)
    for step in (10, 20):
        manager.save(step, state(step))
    with manager.reading(10):
        for step in (30, 40):
            manager.save(step, state(step))
        manager.join()
        assert manager.all_steps() == [10, 30, 40]


def test_order_any_takes_older_and_repeated_steps_and_keeps_what_it_has_just_saved(manage):
    manager = manage(1, 2, order="any")
    for step in (30, 10, 20, 10, 5):
        assert manager.save(step, state(step))
        manager.join()
        assert step in manager.all_steps()
        assert manager.latest_step() == step
    assert manager.all_steps() == [5, 10]
    assert restored(manager, "auto") == 5


def test_in_any_order_the_steps_of_an_earlier_run_are_the_older_ones(manage, monkeypatch):
    earlier = manage(1, 3, order="any")
    for step in (700, 800, 900):
        earlier.save(step, state(step), metrics={"loss": 1.0})
    earlier.close()
    # The clock of the machine of the next process is behind by a day, then by more.
    behind_s, now = count(86_400, 3600), time.time
    monkeypatch.setattr(time, "time", lambda: now() - next(behind_s))
    kept = []
    for first in (100, 400):
        manager = manage(1, 3, order="any")
        for step in range(first, first + 300, 100):
            manager.save(step, state(step), metrics={"loss": 1.0})
            manager.join()
            kept.append(manager.all_steps())
            assert restored(manager, "auto") == manager.latest_step() == step
            assert manager.best_step("loss") == step
        manager.close()
    assert kept == [
        [100, 800, 900], [100, 200, 900], [100, 200, 300],
        [200, 300, 400], [300, 400, 500], [400, 500, 600],
    ]  # fmt: skip
    reader = manage(None, order="any", read_only=True)
    assert next(reader.follow()) == 600
    # Where steps go up, the highest is the newest, whenever it was saved.
    later = manage(1, order="any")
    later.save(50, state(50))
    later.close()
    assert (manage(None, read_only=True).latest_step(), reader.latest_step()) == (600, 50)


@pytest.mark.parametrize(
    "telling",
    [
        {"metadata": {"a": (1, 2)}}, {"metadata": {1: 2}}, {"metadata": {"a": torch.ones(1)}},
        {"metadata": [1]}, {"tags": ["no/slash"]}, {"tags": [""]}, {"tags": [3]},
        {"tags": "kept"}, {"tags": None}, {"tags": 5}, {"metrics": [("loss", 1.0)]},
        {"metrics": {"loss": "low"}}, {"metrics": {"loss": 10**400}}, {"metrics": {}},
    ],
    ids=repr,
)  # fmt: skip
def test_what_can_not_be_told_about_a_step_is_refused_before_anything_is_written(manage, telling):
    manager = manage(retention=BestN(1, "loss"))
    with pytest.raises(errors.InvalidRequestError):
        manager.save(10, state(), **{"metrics": {"loss": 1.0}, **telling})
    assert manager.all_steps() == []
    assert folders(manager) == []
    assert manager.save(10, state(), metrics={"loss": 1.0})


@pytest.mark.parametrize(
    "given",
    [
        {"interval": 0}, {"interval": 1.5}, {"interval": True},
        {"max_to_keep": -1}, {"max_to_keep": 1.0}, {"max_pending_async": 0},
        {"num_of_threads": 0}, {"sync_every": 0}, {"lease_s": 0}, {"order": "up"},
        {"save_policy": EverySteps(1)}, {"interval": None, "save_policy": LatestN(1)},
        {"interval": None, "save_policy": EverySteps(2) & AtSteps(1)},
        {"interval": None, "save_policy": OnPreemption()},
        {"max_to_keep": 1, "retention": LatestN(2)}, {"retention": EverySteps(1)},
        {"items": {}}, {"items": {"a/b": Item()}}, {"items": {"a": SaveOptions()}},
        {"items": {"a": Item()}, "item": Item()}, {"item": SaveOptions()},
        {"step_name": "steps"}, {"step_name": "{step}/{step}"}, {"step_name": "{step}9"},
        {"step_name": "{step}-v2"}, {"also_read": "{step}"}, {"read_only": True},
    ],
    ids=repr,
)  # fmt: skip
def test_arguments_that_are_wrong_or_contradict_each_other_are_refused(manage, given):
    with pytest.raises(errors.InvalidRequestError):
        manage(**given)


def test_a_failed_asynchronous_save_is_told_by_join_and_by_the_callback(manage):
    told = []
    manager = manage(1, 1, on_failure=lambda step, error: told.append((step, type(error))))
    manager.save(1, state(1))
    manager.save_async(3, {"w": torch.ones(3).to("meta")})
    with pytest.raises(errors.CheckpointError):
        manager.join()
    assert [step for step, _ in told] == [3]
    manager.join()  # told once
    assert restored(manager) == 1


def test_leaving_the_block_waits_and_tells_of_failures_but_hides_no_other_error(tmp_path, caplog):
    def leave(fails, error=None):
        with CheckpointManager(tmp_path, 1, chkpt_on_preemption=False) as manager:
            manager.save_async(2, {"w": torch.ones(3).to("meta")} if fails else state(2))
            if error is not None:
                raise error
        return manager

    with pytest.raises(errors.CheckpointError, match="meta"):
        leave(True)
    with pytest.raises(ZeroDivisionError), caplog.at_level(logging.ERROR):
        leave(True, ZeroDivisionError())
    assert "meta" in caplog.text
    manager = leave(False)
    manager.close()
    assert manager.all_steps() == [2]
    with pytest.raises(errors.InvalidRequestError, match="is closed"):
        manager.save(20, state(20))


# --- retention ----------------------------------------------------------------------------------


def test_the_best_the_rounded_and_the_tagged_steps_are_kept(manage):
    manager = manage(1, retention=LatestN(1) | BestN(1, "loss") | KeepEverySteps(5))
    for step, loss in enumerate((4, 1, 3, 2, 9, 8, 7, 6)):
        tags = ["pinned"] if step == 2 else ()
        manager.save(step, state(step), metrics={"loss": loss}, tags=tags)
    manager.join()
    assert manager.all_steps() == [0, 1, 2, 5, 7]
    assert (manager.best_step(), manager.best_step("loss", "max")) == (1, 5)
    assert manager.best_step("else") is None
    assert restored(manager, "best") == 1
    manager.tag(2, "pinned", remove=True)
    ray_dcp.open(manager.path).tag(7, "release")  # Another process does that.
    manager.save(8, state(8), metrics={"loss": 0.5})
    manager.join()
    assert manager.all_steps() == [0, 5, 7, 8]


def test_what_others_wrote_is_read_and_never_deleted(manage):
    manager = manage(1, 1, also_read=("{step}", "checkpoint-{step}"))
    theirs = Path(manager.path, "3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save(state(3), checkpoint_id=theirs, no_dist=True)
    Path(manager.path, "step-00000001").mkdir()
    Path(manager.path, "step-00000001", "notes.txt").write_text("mine")
    assert manager.all_steps() == [3]
    assert restored(manager) == 3
    for step in (4, 5):
        manager.save(step, state(step))
    manager.join()
    assert manager.all_steps() == [3, 5]
    with pytest.raises(errors.InvalidRequestError, match="written by another program"):
        manager.delete(3)
    assert Path(manager.path, "step-00000001", "notes.txt").read_text() == "mine"


def test_a_checkpoint_of_another_program_that_is_gone_is_not_listed_for_what_lies_there_now(manage):
    manager = manage(1)
    theirs = Path(manager.path, "step-00000003")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save(state(3), checkpoint_id=theirs, no_dist=True)
    assert manager.all_steps() == [3]
    for file in theirs.iterdir():
        file.unlink()
    for left in ("__0_0.0123456789abcdef.distcp", "chunks.0123456789abcdef.table"):
        (theirs / left).write_bytes(b"of a save that crashed")
    assert manager.all_steps() == []


def test_a_save_that_is_committed_before_its_call_is_interrupted_keeps_its_tags(
    manage, monkeypatch
):
    def interrupted(*args, **how):
        run_async_save(*args, **how).committed(60)
        raise KeyboardInterrupt

    manager = manage(1)
    monkeypatch.setattr(collective_actions, "run_async_save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        manager.save_async(5, state(5), tags=["good"])
    assert manager.all_steps() == [5]
    assert manager.step_info(5).tags == {"good"}


def test_what_a_crash_left_is_removed_after_a_later_commit(manage):
    manager = manage(1)
    manager.save(5, state(5))
    left = Path(manager.path, "step-00000003")
    left.mkdir()
    (left / "__0_0.0123456789abcdef.distcp").write_bytes(b"1234")
    (left / "step-info-00000000.json").write_bytes(b"half")
    newer = Path(manager.path, "step-00000009")
    newer.mkdir()
    (newer / "__0_0.0123456789abcdef.distcp").write_bytes(b"1234")
    manager.close()
    manager = manage(1)
    manager.save(6, state(6))
    manager.join()
    # The newer one may still be committed: somebody may be writing it.
    assert folders(manager) == ["step-00000005", "step-00000006", "step-00000009"]


# --- restoring ----------------------------------------------------------------------------------


def test_nothing_to_restore_is_told(manage):
    manager = manage()
    for step in ("latest", "auto", 10):
        with pytest.raises(errors.CheckpointNotFoundError, match="no committed step"):
            manager.restore(step, state())
    assert (manager.latest_step(), manager.all_steps()) == (None, [])
    manager.save(10, state())
    with pytest.raises(errors.CheckpointNotFoundError, match=r"expected step 11.*found steps 10"):
        manager.restore(11, state())
    with pytest.raises(errors.InvalidRequestError, match="by which metric"):
        manager.restore("best", state())
    for wrong in ("newest", 1.5, None, True):
        with pytest.raises(errors.InvalidRequestError, match="'latest', 'best' or 'auto'"):
            manager.restore(wrong, state())


def test_auto_falls_back_over_damaged_steps_loudly_and_they_may_be_saved_again(manage):
    manager = manage(10, 5)
    for step in (10, 20, 30):
        manager.save(step, state(step))
    damage(manager, 30)
    with pytest.raises(errors.DamagedCheckpointError):
        manager.restore("latest", state(-1))
    found = state(-1)
    with pytest.warns(UserWarning, match="instead of the newer step 30"):
        report = manager.restore("auto", found)
    assert (report.step, value(found)) == (20, 20)
    assert [step for step, _ in report.skipped] == [30]
    assert isinstance(report.skipped[0][1], errors.DamagedCheckpointError)
    assert manager.save(25, state(25), force=True)
    assert manager.save(30, state(30))
    assert restored(manager) == 30
    damage(manager, 10)
    for step in (20, 25, 30):
        damage(manager, step)
    with pytest.raises(errors.DamagedCheckpointError, match=r"none of 4 step\(s\)"):
        manager.restore("auto", state(-1))


# --- items --------------------------------------------------------------------------------------


def items():
    return {"model": Item(save_options=SaveOptions(stock_metadata=False)), "training": Item()}


def both(step):
    return {"model": {"w": torch.full((8,), float(step))}, "training": {"step": step}}


def test_named_items_are_saved_and_restored_each_in_its_own_way(manage):
    manager = manage(1, 2, items=items())
    manager.save(1, both(1))
    manager.save_async(2, both(2))
    manager.save_async(3, both(3))
    manager.join()
    assert manager.all_steps() == [2, 3]
    assert manager.step_info(3).items == ("model", "training")
    folder = Path(manager.step_info(3).checkpoint_id)
    assert not (folder / "model" / ".metadata").exists()
    assert (folder / "training" / ".metadata").exists()
    found = {"training": {"step": 0}}
    assert manager.restore("latest", found).reports.keys() == {"training"}
    assert found == {"training": {"step": 3}}
    found = both(0)
    manager.restore(2, found)
    assert (found["model"]["w"][0].item(), found["training"]["step"]) == (2.0, 2)


def test_items_that_the_manager_or_the_step_lacks_are_told(manage):
    manager = manage(1, items=items())
    for wrong in ({"model": {}}, {**both(1), "more": {}}, state(1), [1]):
        with pytest.raises(errors.InvalidRequestError, match="state"):
            manager.save(1, wrong)
    manager.save(1, both(1))
    with pytest.raises(errors.InvalidRequestError, match="has the items model, training"):
        manager.restore(1, {"optimizer": {}})
    for wrong in (None, [1]):
        with pytest.raises(errors.InvalidRequestError, match="a state for each item"):
            manager.restore(1, wrong)
    plain = manage(1)
    with pytest.raises(
        errors.InvalidRequestError, match=r"make the manager with items=\{'model': Item"
    ):
        plain.restore(1, state())
    plain.save(2, state(2))
    with pytest.raises(errors.InvalidRequestError, match="without items="):
        manage(1, items=items()).restore(2, both(0))


# --- preemption ---------------------------------------------------------------------------------


def test_sigterm_makes_one_step_due_and_the_process_goes_on(manage):
    before = signal.getsignal(signal.SIGTERM)
    manager = manage(10, chkpt_on_preemption=True)
    assert not manager.should_save(3)
    assert not manager.reached_preemption(3)
    os.kill(os.getpid(), signal.SIGTERM)
    assert manager.should_save(4)
    with pytest.raises(errors.CheckpointError):
        manager.save(4, {"w": torch.ones(3).to("meta")})
    assert manager.save(5, state(5)), "the one before failed"
    assert manager.reached_preemption(5)
    assert not manager.save(6, state(6))
    assert manager.save(10, state(10))
    manager.close()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("is_told_by_another_rank", [False, True])
def test_a_later_sigterm_does_what_it_would_have_done_without_a_manager(
    manage, monkeypatch, is_told_by_another_rank
):
    """One right after the first is the same notice: torchrun passes its own on to the ranks."""
    told = []
    before = signal.signal(signal.SIGTERM, lambda *_: told.append("before"))
    try:
        manager = manage(10, chkpt_on_preemption=True)
        if is_told_by_another_rank:
            manager.notice_preemption()
        for same_s, expected in ((1e6, []), (1e6, []), (0.0, ["before"])):
            monkeypatch.setattr(preemption, "SAME_NOTICE_S", same_s)
            os.kill(os.getpid(), signal.SIGTERM)
            assert (manager.should_save(3), told) == (True, expected)
        manager.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_process_that_was_forked_ends_by_sigterm_as_it_did_before(manage):
    manager = manage(10, chkpt_on_preemption=True)
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"x")
        while True:  # Why not `pause`: a signal just before it would not end it.
            signal.sigtimedwait([signal.SIGUSR1], 0.05)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert not manager.should_save(3)


def test_a_manager_in_another_thread_takes_the_callers_word_instead(tmp_path):
    made = []
    thread = threading.Thread(target=lambda: made.append(CheckpointManager(tmp_path, 10)))
    thread.start()
    thread.join()
    (manager,) = made
    assert not manager.save(3, state(3))
    manager.notice_preemption()
    assert manager.save(3, state(3))
    manager.close()


def test_a_planner_that_is_shared_and_a_question_without_detection_are_refused(manage):
    with pytest.raises(errors.InvalidRequestError, match="must make a planner for each call"):
        Item(save_planner=torch.distributed.checkpoint.DefaultSavePlanner())
    with pytest.raises(errors.InvalidRequestError, match="Preemption detection not enabled"):
        manage().reached_preemption(1)


def test_options_of_the_call_go_before_those_of_the_item(manage):
    manager = manage(item=Item(load_options=LoadOptions(strict=False)))
    manager.save(10, state(10))
    wanted = {**state(-1), "other": torch.ones(2)}
    assert manager.restore(10, wanted).report.missing == ("other",)
    with pytest.raises(errors.MissingKeyError):
        manager.restore(10, wanted, options=LoadOptions())


def test_values_that_a_failed_step_overwrote_are_not_left_as_they_were(manage):
    """What it never touched may stay, as for `load_newest`."""
    manager = manage(items={"a": Item(), "b": Item()})
    partial = LoadOptions(strict=False)

    def both(**state):
        return {"a": state, "b": {"v": torch.ones(10)}}

    def file_of(step):
        return data_file(Path(manager.path, f"step-{step:08d}", "b"))

    manager.save(10, both(w=torch.ones(10), x=torch.ones(3000)))
    manager.save(20, both(w=torch.ones(10)))
    flip(file_of(20), file_of(20).stat().st_size // 2)
    target = both(w=torch.zeros(10), x=torch.zeros(3000), y=torch.zeros(2000))
    with pytest.warns(UserWarning, match="instead of the newer"):
        report = manager.restore("auto", target, options=partial)
    assert (report.step, report.report.missing) == (10, ("y",))
    manager.delete(20)
    manager.save(30, both(w=torch.ones(10), x=torch.ones(3000), y=torch.ones(2000)))
    flip(file_of(30), file_of(30).stat().st_size // 2)
    with pytest.raises(errors.MissingKeyError, match=r"may have overwritten.*'y'") as told:
        manager.restore("auto", target, options=partial)
    assert told.value.step == 10
    assert "30" in str(told.value.__notes__)


# --- exports of steps -----------------------------------------------------------------------------


def exported_state(step: int) -> dict[str, Any]:
    return {
        "model.a": torch.full((40, 3), step + 0.1), "model.n": torch.arange(5) + step,
        "optimizer.a": torch.ones(4), "step": step,
    }  # fmt: skip


def exporting(path: Path, **given: Any) -> CheckpointManager:
    return CheckpointManager(path / "run", chkpt_on_preemption=False, **given)


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture
def heard():
    found: list[events.Event] = []
    unsubscribe = events.subscribe(
        lambda event: found.append(event) if event.name.startswith("export.") else None
    )
    yield found
    unsubscribe()


@pytest.fixture
def at_once(monkeypatch):
    """Exports do not wait for all that runs beside this test."""
    monkeypatch.setattr(step_export, "_NICE", 0)


@pytest.fixture
def forked(at_once, monkeypatch, programs, tmp_path):
    """The processes of exports begin with torch: to import it takes longer than all they do."""
    python = programs.interpreter(tmp_path / "forked-python")
    monkeypatch.setattr("sys.executable", python)
    return python


def test_a_chosen_step_is_exported_with_the_options_of_export_while_retention_goes_on(
    tmp_path, heard, at_once
):
    # An earlier export of the step is replaced.
    (tmp_path / "hf" / "step-00000002").mkdir(parents=True)
    (tmp_path / "hf" / "step-00000002" / "old.safetensors").touch()
    items = {"model": Item(), "data": Item()}
    how: dict[str, Any] = {"include": ["model.*"], "dtype": "bf16", "strip_prefix": "model."}
    chosen = StepExport(path=tmp_path / "hf", policy=AtSteps(2), item="model", **how)
    with exporting(tmp_path, items=items, retention=LatestN(1), export=chosen) as manager:
        for step in range(1, 4):
            manager.save_async(step, {"model": exported_state(step), "data": {"at": step}})
    # The reader lease of the export is gone, and so is what retention lets go.
    with exporting(tmp_path, read_only=True) as manager:
        assert manager.all_steps() == [3]
    (made,) = (tmp_path / "hf").iterdir()
    assert made.name == "step-00000002"
    assert not (made / "old.safetensors").exists()
    found = load_file(made / "model-00001-of-00001.safetensors")
    assert found["a"].equal(torch.full((40, 3), 2.1).bfloat16())
    assert found.keys() == {"a", "n"}
    assert [(event.name, Path(event.checkpoint_id).parent.name) for event in heard] == [
        ("export.exported", "step-00000002")
    ]


def test_a_run_that_goes_on_exports_what_the_end_of_the_last_one_prevented(tmp_path, forked):
    def export(**given: Any) -> StepExport:
        return StepExport(path=tmp_path / "hf", policy=EverySteps(2), format="safetensors", **given)

    with exporting(tmp_path) as manager:
        for step in (2, 4):
            manager.save(step, exported_state(step))
    with exporting(tmp_path, export=export(include=["model.*"])) as manager:
        manager.save(5, exported_state(5))
    assert [p.name for p in (tmp_path / "hf").iterdir()] == ["step-00000004.safetensors"]
    file = tmp_path / "hf" / "step-00000004.safetensors"
    made = file.stat()
    with exporting(tmp_path, export=export(), order="any") as manager:
        manager.save(5, exported_state(5))
    assert file.stat() == made
    assert load_file(file).keys() == {"model.a", "model.n"}


KILLED = """
import os, sys, ray_dcp.manager.step_export as it
export = it.export
it.export = lambda *args, **how: (export(*args, **how), os.kill(os.getpid(), 9))
exec(sys.argv[1])
"""


def test_an_export_leaves_what_another_run_exports_to_the_same_folder(
    tmp_path, monkeypatch, heard, forked
):
    chosen = StepExport(path=tmp_path / "hf", policy=EverySteps(1), format="safetensors")
    names = lambda: sorted(path.name for path in (tmp_path / "hf").iterdir())  # noqa: E731
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{KILLED}' \"$2\"\n")
    python.chmod(0o755)
    with monkeypatch.context() as killed:
        killed.setattr("sys.executable", str(python))
        with exporting(tmp_path, export=chosen) as manager:
            manager.save(1, exported_state(1))
    assert "status -9" in heard.pop().error
    (left,) = names()
    with exporting(tmp_path / "other", export=chosen) as manager:
        manager.save(2, exported_state(2))
    assert names() == [left, "step-00000002.safetensors"]
    with exporting(tmp_path, export=chosen) as manager:
        manager.save(3, exported_state(3))
    assert names() == [f"step-0000000{step}.safetensors" for step in (1, 2, 3)]


def test_an_export_takes_the_place_of_no_checkpoint(tmp_path, heard, forked):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for folder in (tmp_path / "run", tmp_path / "link"):
        chosen = StepExport(path=folder, policy=EverySteps(1))
        with pytest.raises(errors.InvalidRequestError, match="the steps of the run itself"):
            exporting(tmp_path, export=chosen)
    (tmp_path / "stock" / "step-00000001").mkdir(parents=True)
    (tmp_path / "stock" / "step-00000001" / ".metadata").touch()
    with CheckpointManager(tmp_path / "other", 1, chkpt_on_preemption=False) as manager:
        manager.save(1, exported_state(1))
    for folder, how in (("stock", "hf"), ("other", "dcp")):
        before = files_of(tmp_path / folder / "step-00000001")
        chosen = StepExport(path=tmp_path / folder, policy=EverySteps(1), format=how)
        with exporting(tmp_path, export=chosen, order="any") as manager:
            manager.save(1, exported_state(1))
        assert files_of(tmp_path / folder / "step-00000001") == before
        assert "holds a checkpoint" in heard.pop().error
    assert heard == []


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("exec sleep 600", "did not end within 3 s"),
        ("echo out of memory >&2; exit 1", "out of memory"),
        ('echo "$2" >&2; exit 1', "os.nice(10)"),
        ("exit 1", "ended with status 1"),
        (None, "FileNotFoundError"),
    ],
)
def test_a_failed_export_leaves_the_run_alone_and_is_reported(
    tmp_path, heard, caplog, monkeypatch, program, told
):
    python = tmp_path / "python"
    if program is not None:
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    # The timeout is that of the save too, which needs some time.
    given = {"write_timeout_s": 3.0} if "did not end" in told else {}
    item = Item(save_options=SaveOptions(**given))
    chosen = StepExport(path=tmp_path, policy=EverySteps(1))
    with exporting(tmp_path, item=item, export=chosen) as manager:
        assert manager.save(1, exported_state(1))
    assert [event.name for event in heard] == ["export.failed"]
    assert told in heard[0].error
    assert heard[0].checkpoint_id == str(tmp_path / "run" / "step-00000001")
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert heard[0].error in record.getMessage()
    with exporting(tmp_path) as manager:  # No reader lease is left.
        manager.delete(1)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"path": "s3://bucket/hf"}, "path must be a folder of this machine"),
        ({"path": 7}, "path must be a folder"), ({"policy": 100}, "policy"),
        ({"policy": EveryMinutes(3)}, "must decide by the step alone"),
        ({"format": "onnx"}, "format must be one of safetensors, hf"),
        ({"include": "model.*"}, "must be a list"), ({"include": 7}, "must be a list"),
        ({"strip_prefix": None}, "must be a text"), ({"item": 1}, "must be a text"),
        ({"dtype": "int7"}, "must be one of"), ({"dtype": ["bf16"]}, "must be one of"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_when_it_is_made(given, told):
    with pytest.raises(ray_dcp.errors.InvalidRequestError, match=told):
        StepExport(**{"path": "hf", "policy": EverySteps(1), **given})


def test_a_manager_refuses_what_it_cannot_export(tmp_path):
    chosen = StepExport(path="x", policy=EverySteps(1))
    for given, told in (
        ({"export": "hf"}, "export must be a StepExport"),
        ({"export": chosen, "read_only": True}, "read_only managers save nothing"),
        ({"export": chosen, "items": {"ema": Item()}}, "'ema', but is ''"),
    ):
        with pytest.raises(ray_dcp.errors.InvalidRequestError, match=told):
            exporting(tmp_path, **given)


# --- a full disk, and an altered listing ---------------------------------------------------------


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


def test_what_a_save_without_space_could_not_remove_goes_before_the_next(manage, monkeypatch):
    """It lies above the newest step, where a deletion does not look for what crashes left."""
    manager = manage(1)
    manager.save(1, state(1))
    with monkeypatch.context() as patch:
        fill_disk(patch, "step-00000002")
        manager.save_async(2, state(2))
        with pytest.raises(errors.StorageError):
            manager.join()
    left = Path(manager.path, "step-00000002")
    (left / "__0_0.0123456789abcdef.distcp").write_bytes(b"of the save that failed")
    manager.save(3, state(3))
    assert not list(left.glob("*.distcp"))
    assert manager.all_steps() == [1, 3]


def test_room_is_not_made_at_the_price_of_the_newest_step_where_an_older_was_saved_last(
    manage, monkeypatch
):
    manager = manage(1, retention=LatestN(1) | KeepEverySteps(3))
    for step in (3, 5, 3):
        manager.save(step, state(step), replace=True)
    manager.join()
    assert manager.all_steps() == [3, 5]
    fill_disk(monkeypatch, "step-00000006")
    with pytest.raises(errors.StorageError, match="ENOSPC"):
        manager.save(6, state(6))
    assert manager.all_steps() == [3, 5]


def test_a_name_that_was_altered_in_a_listing_hides_no_step(monkeypatch):
    place = Location("run", filesystem=MemoryStore())
    with CheckpointManager(place, 1, chkpt_on_preemption=False) as manager:
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


@pytest.mark.filterwarnings("ignore:this process is rank 1 of 2")
@pytest.mark.parametrize("save", ["save", "save_async"])
def test_a_process_of_several_without_a_group_is_refused_to_save_and_may_restore(
    save, tmp_path, monkeypatch
):
    with ray_dcp.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"step": 1}, force=True)
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(ray_dcp.InvalidRequestError, match="rank 1 of 2") as caught:
            getattr(manager, save)(2, {"step": 2}, force=True)
        assert caught.value.key == "no_dist"
        assert manager.restore("latest", {"step": 0}).step == 1
    with ray_dcp.CheckpointManager(tmp_path, no_dist=True) as alone:
        alone.save(2, {"step": 2}, force=True)
