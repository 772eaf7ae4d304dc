"""Saves onto a disk that is full: all ranks are told, nothing is lost, and room is all it takes."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
import torch

import ray_dcp
from ray_dcp.cli.main import main as command_line
from ray_dcp.errors import CommitUnknownError, StorageError
from ray_dcp.io.reserve import RESERVE, RESERVE_BYTES
from ray_dcp.manager import BestN, Item, LatestN
from ray_dcp.manager.catalogue import FOLDER
from ray_dcp.store.local import LocalStorage
from tests.crash.invariants import INVARIANTS, Aftermath, a_later_save_works, nothing_is_left
from tests.crash.registry import OLD, Place
from tests.support.arrays import sample_state
from tests.support.disks import PAGE, here, small_disk
from tests.support.world import run_ranks, save_ranks

NEW = sample_state(2)
LOOKING = [check for check in INVARIANTS if check not in (a_later_save_works, nothing_is_left)]


@pytest.fixture(params=["tmpfs where it can be mounted", "quota"])
def disk(request, tmp_path):
    with small_disk(tmp_path / "disk", may_mount=request.param != "quota") as disk:
        yield disk


def test_at_every_free_byte_a_save_fails_on_all_ranks_or_is_committed(disk):
    storage = LocalStorage(disk.path / "step-1")
    told, names = [], ("[ENOSPC] No space left on device; free space there", str(storage.url))
    for pages in range(0, 100, 3):
        Place(storage).save(OLD)
        disk.leave(pages * PAGE, here)
        results = run_ranks(save_ranks(NEW, 3, storage.url, session=f"{pages}"))
        disk.make_room(here)
        errors = [result.error for result in results]
        told.append(type(errors[0]))
        assert {type(error) for error in errors} == {told[-1]}
        after = Aftermath(storage, allowed=(NEW,), earlier=(OLD,))
        for error in filter(None, errors):
            assert all(name in str(error) for name in names), error
            unsure = isinstance(error, CommitUnknownError)
            after = replace(after, allowed=(OLD, NEW) if unsure else (OLD,))
        for invariant in LOOKING:
            invariant(after)
        if errors[0] is None:
            break
        a_later_save_works(after)
        nothing_is_left(after)
    assert told[-1] is type(None), told
    assert set(told[:-1]) <= {StorageError, CommitUnknownError}
    assert told.count(StorageError) >= 3
    assert told.count(CommitUnknownError) <= 2


# --- freeing space where there is none ------------------------------------------------------------


def manager_of(path, **given):
    return ray_dcp.CheckpointManager(path, 1, chkpt_on_preemption=False, **given)


def tensor(num_bytes, value=0.0):
    return {"w": torch.full((num_bytes // 4,), float(value))}


def command(*arguments):
    """Runs the command in this process, which counts the bytes of a quota."""
    with suppress(SystemExit):
        command_line([*map(str, arguments)], standalone_mode=False)


@pytest.mark.parametrize("what", ["delete", "manager", "another manager", "rm"])
def test_a_step_is_deleted_on_a_disk_without_a_free_byte(disk, what):
    run = disk.path / "run"
    with ExitStack() as stack:
        manager = stack.enter_context(manager_of(run))
        for step in (1, 2):
            manager.save(step, tensor(1 << 18, step))
        if what == "another manager":
            manager.close()
            manager = manager_of(run)
        disk.leave(0, here)
        match what:
            case "delete":
                ray_dcp.delete(run / "step-00000001")
            case "manager" | "another manager":
                manager.delete(1)
            case "rm":
                command("rm", f"{run}@1", "--yes")
        assert manager.all_steps() == [2]
        left = {one.name for one in (run / "step-00000001").iterdir()}
        assert left <= {"manifest-00000002.json", "step-info-00000000.json"}
        assert manager.save(3, tensor(1 << 17, 3))  # the space is there
        manager.close()
    disk.make_room(here)
    assert ray_dcp.verify(run / "step-00000002").ok


def test_what_an_unfinished_save_left_is_collected_on_a_disk_without_a_free_byte(disk):
    run = disk.path / "run"
    with manager_of(run) as manager:
        manager.save(1, tensor(1 << 16))
    left = run / "step-00000002" / "__0_0.0123456789abcdef.distcp"
    left.parent.mkdir()
    left.write_bytes(bytes(1 << 18))
    disk.leave(0, here)
    command("gc", run, "--abort-unfinished", "--yes")
    assert not left.exists()
    assert (run / FOLDER / RESERVE).stat().st_size == RESERVE_BYTES
    assert manager_of(run).all_steps() == [1]


def test_a_save_without_space_is_made_once_more_after_retention(disk, caplog):
    """As where a disk has room for two steps, of which both stay until the third is committed."""
    with manager_of(disk.path / "run", max_to_keep=2) as manager:
        for step in (1, 2):
            manager.save(step, tensor(1 << 20, step))
        disk.leave(1 << 19, here)
        assert manager.save(3, tensor(1 << 20, 3))
        assert manager.all_steps() == [2, 3]
        assert "Step 3 is saved once more" in caplog.text
        # Nothing that the policy would let go, besides the newest: it fails, and both stay.
        disk.leave(1 << 19, here)
        with pytest.raises(StorageError, match="ENOSPC"):
            manager.save(4, tensor(3 << 20, 4))
        assert 3 in manager.all_steps()
        found = tensor(1 << 20)
        assert manager.restore("latest", found).step == 3
        assert found["w"][0] == 3


@pytest.mark.parametrize(
    ("keeps", "losses"),
    [(LatestN(1), {1: 0.5}), (LatestN(1) | BestN(1, "loss"), {1: 0.2, 2: 0.9})],
    ids=["the only step", "the best step"],
)
def test_a_step_that_is_kept_stays_while_there_is_no_space_for_another(disk, keeps, losses):
    with manager_of(disk.path / "run", retention=keeps) as manager:
        for step, loss in losses.items():
            manager.save(step, tensor(1 << 20, step), metrics={"loss": loss})
        disk.leave(1 << 19, here)
        for step in (3, 4):
            with pytest.raises(StorageError, match="ENOSPC"):
                manager.save(step, tensor(3 << 20, step), metrics={"loss": 0.1})
        assert manager.all_steps() == [*losses]
        found = tensor(1 << 20)
        assert manager.restore("auto", found).step == max(losses)
        assert found["w"][0] == max(losses)


def test_after_an_async_save_without_space_the_next_one_makes_room(disk):
    with manager_of(disk.path / "run", max_to_keep=2) as manager:
        for step in (1, 2):
            manager.save(step, tensor(1 << 20, step))
        disk.leave(1 << 19, here)
        manager.save_async(3, tensor(1 << 20, 3))
        with pytest.raises(StorageError, match="ENOSPC"):
            manager.join()
        assert manager.all_steps() == [1, 2]
        manager.save_async(4, tensor(1 << 20, 4))
        manager.join()
        assert manager.all_steps() == [2, 4]


def test_a_step_of_items_without_space_leaves_none_of_them_and_is_saved_once_more(disk):
    items = {"model": Item(), "data": Item()}
    with manager_of(disk.path / "run", max_to_keep=2, items=items) as manager:
        for step in (1, 2):
            manager.save(step, {"model": tensor(1 << 19, step), "data": tensor(1 << 19, step)})
        disk.leave(3 << 18, here)  # room for one of them
        assert manager.save(3, {"model": tensor(1 << 19, 3), "data": tensor(1 << 19, 3)})
        assert manager.all_steps() == [2, 3]
        assert manager.restore(3, {"data": tensor(1 << 19)}).step == 3
    disk.make_room(here)
    assert not list((disk.path / "run" / "step-00000001").glob("*/*"))
