"""A job's step on storage, stopped at every call of the system, and beside a coordinator that left.

Parts are saved and kept, the record is created, or the step is given up. Whoever comes next finds
the step whole or not at all, and goes on; a coordinator that was paused and replaced commits
nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_dcp
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import CheckpointError, CheckpointExistsError
from ray_dcp.format.job_parts import PartRecord
from ray_dcp.io.lease_holders import this_process
from ray_dcp.job.kept_parts import KeptParts
from ray_dcp.job.step_files import create_record, part_source, read_parts, remove_parts
from ray_dcp.manager import Item
from ray_dcp.manager.catalogue import Root, look
from ray_dcp.manager.root_writer import Writer
from ray_dcp.manager.step_target import StepTarget
from ray_dcp.options import SaveOptions
from ray_dcp.place.attempt_id import new_attempt
from ray_dcp.saving import run_save
from ray_dcp.session.inline_transport import inline_session
from ray_dcp.torch_adapter.dispatch import decide_save
from tests.crash.interruptions import CALLS, _System, one_call_at_a_time
from tests.support.manager_places import in_this_thread, settings

SPARSE = 1 if os.environ.get("RAY_DCP_THOROUGH") else 17
"""How far apart the calls are at which a step is stopped."""
PARTS = ("policy", "buffer")
JOB = settings(items={name: Item() for name in PARTS}, takeover=True)


def new_writer(root: Path) -> Writer:
    """Returns the writer of a coordinator that was just made."""
    return Writer(Root(Target(str(root))), JOB, holder=this_process())


def save_part(root: Path, place: StepTarget, part: str) -> str:
    path = root / place.name / place.folder_of(part)
    state = {"w": torch.full((9,), float(place.step))}
    attempt = new_attempt()
    # Why inline: no thread is left that waits for a process which died.
    session, route = inline_session("part"), decide_save(None, None, path)
    run_save(route, session, state, SaveOptions(), path, attempt=attempt)
    return attempt


def give_parts(root: Path, writer: Writer, step: int, kept: bool = False) -> tuple[StepTarget, Any]:
    """Begins a step, and has its parts saved or kept; returns its place and attempts."""
    place = writer.begin(step)
    attempts = {"buffer": save_part(root, place, "buffer")}
    if kept:
        found, _ = part_source(writer, "policy", step)
        folder = f"{place.name}/{place.folder_of('policy')}"
        attempts["policy"] = KeptParts(writer.root, JOB).link(found, "policy", folder)
    else:
        attempts["policy"] = save_part(root, place, "policy")
    return place, attempts


def commit(
    writer: Writer, place: StepTarget, attempts: Mapping[str, str]
) -> CheckpointError | None:
    records = {name: PartRecord(attempt=one) for name, one in attempts.items()}
    error = create_record(writer, place, records)
    writer.finish(place, error is None)
    return error


def save_step(root: Path, writer: Writer, step: int, *, kept: bool = False) -> None:
    error = commit(writer, *give_parts(root, writer, step, kept))
    if error is not None:
        raise error


def give_up_step(root: Path, writer: Writer, step: int) -> None:
    place, attempts = give_parts(root, writer, step)
    remove_parts(writer, place, attempts, CheckpointError("a rank died"))
    writer.finish(place, False)


def whole_steps(root: Path) -> list[int]:
    """Returns the committed steps, having read all their parts."""
    found = look(Root(Target(str(root))), JOB.names)
    for step, one in found.steps.items():
        folder = root / one.name
        assert ray_dcp.verify(folder).ok, f"step {step} is not whole"
        parts = read_parts(Root(Target(str(root))), one)
        assert parts.keys() == one.info.items.keys() == {*PARTS}
        for name, saved in parts.items():
            part = folder / one.info.items[name]
            assert ray_dcp.open(part).attempt == saved.attempt
            state = {"w": torch.zeros(9)}
            ray_dcp.load(state, checkpoint_id=part, no_dist=True)
            assert (
                state["w"] == (1.0 if step == 2 and name == "policy" and kept(root) else step)
            ).all()
    return [*found.steps]


def kept(root: Path) -> bool:
    return (root.parent / "kept").exists()


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one step, for copies."""
    root = tmp_path_factory.mktemp("job") / "run"
    with in_this_thread():
        writer = new_writer(root)
        save_step(root, writer, 1)
        writer.close()
    return root


class At(_System):
    """Does something at the n-th call of the system below a folder, and then goes on."""

    def __init__(self, root: Path, at: int | None, there: Callable[[], object]) -> None:
        super().__init__(root, at, "before")
        self._there = there

    def _interrupt(self, name: str, real: Any, args: Any, kwargs: Any) -> Any:
        self._at = None  # Its own calls are not counted.
        self._there()
        return real(*args, **kwargs)


def run_at(
    root: Path, at: int | None, work: Callable[[], object], there: Callable[[], object]
) -> int:
    """Does something at a call of some work; returns how many calls there were."""
    system = At(root, at, there)
    with pytest.MonkeyPatch.context() as patched, one_call_at_a_time():
        for name in CALLS:
            patched.setattr(os, name, system.replaced(name))
        work()
    return len(system.steps)


def die_at(root: Path, at: int, work: Callable[[], object]) -> bool:
    """Runs work in a child that dies at a call; returns whether there were so many calls."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) in (DIED, ENDED)
        return os.waitstatus_to_exitcode(status) == DIED
    try:
        signal.alarm(60)
        run_at(root, at, work, partial(os._exit, DIED))
        os._exit(ENDED)
    finally:
        traceback.print_exc()
        os._exit(1)


DIED, ENDED = 9, 8
"""Exit codes of `die_at`'s child."""


def copy_of(one_step: Path, folder: Path, name: str) -> Path:
    root = folder / name / "run"
    shutil.copytree(one_step, root)
    return root


@pytest.mark.parametrize("how", ["save", "keep", "give up"])
def test_a_coordinator_that_dies_leaves_a_step_whole_or_not_at_all(how, one_step, tmp_path):
    acts = {
        "save": save_step,
        "keep": partial(save_step, kept=True),
        "give up": give_up_step,
    }

    def work(root: Path) -> None:
        writer = new_writer(root)
        writer.remove_leftovers()
        acts[how](root, writer, 2)

    stood, at, has_died = Counter[str](), 0, True
    with in_this_thread():
        while has_died:
            root = copy_of(one_step, tmp_path, str(at))
            if how == "keep":
                (root.parent / "kept").touch()
            has_died = die_at(root, at, partial(work, root))
            steps = whole_steps(root)
            assert steps in ([1], [1, 2])
            stood[str(steps)] += 1
            # The next one deletes what is left, and goes on.
            writer = new_writer(root)
            assert writer.remove_leftovers() == {}
            assert 2 in steps or not [*(root / "step-00000002").glob("*/[!.]*")]
            if 2 not in steps:
                (root.parent / "kept").unlink(missing_ok=True)
            save_step(root, writer, len(steps) + 1)
            assert whole_steps(root) == [*steps, len(steps) + 1]
            writer.close()
            shutil.rmtree(root.parent)
            at += SPARSE
    assert stood["[1]"] >= 3
    assert bool(stood["[1, 2]"]) == (how != "give up")


def test_a_coordinator_that_was_replaced_while_it_committed_changes_no_history(one_step, tmp_path):
    seen, at = Counter[str](), -1
    with in_this_thread():
        while True:
            root = copy_of(one_step, tmp_path, str(at))
            paused, told = new_writer(root), []
            place, attempts = give_parts(root, paused, 2)
            steps_then: list[list[int]] = []

            def replace(root: Path = root, then: list[list[int]] = steps_then) -> None:
                other = new_writer(root)
                other.remove_leftovers()
                then.append(whole_steps(root))

            def work(told: list[Any] = told, given: Any = (paused, place, attempts)) -> None:
                told.append(commit(*given))

            if at < 0:
                replace()  # Before it looks at the lease.
                work()
            else:
                run_at(root, at, work, replace)
            if not steps_then:
                break  # There were not so many calls.
            # What the new one saw is what there is, whatever the paused one was told.
            assert whole_steps(root) == steps_then[0]
            (error,) = told
            assert (error is None) == (2 in steps_then[0])
            seen["committed" if error is None else type(error).__name__] += 1
            shutil.rmtree(root.parent)
            at += max(1, SPARSE // 6)
    assert seen["committed"] >= 1
    assert seen[CheckpointExistsError.__name__] >= 1


def test_a_kept_part_is_durable_before_its_record(one_step, tmp_path, monkeypatch):
    root = copy_of(one_step, tmp_path, "durable")
    calls: list[tuple[str, Any]] = []
    fsync, link = os.fsync, os.link

    def fsync_told(fd: int) -> None:
        calls.append(("fsync", os.fstat(fd).st_ino))
        fsync(fd)

    def link_told(source: str, path: str, **how: Any) -> None:
        link(source, path, **how)
        calls.append((os.path.basename(path), os.stat(path).st_ino))

    with in_this_thread():
        writer = new_writer(root)
        writer.take_lease()
        place = writer.begin(2)
        found, _ = part_source(writer, "policy", 2)
        folder = f"{place.name}/{place.folder_of('policy')}"
        monkeypatch.setattr(os, "fsync", fsync_told)
        monkeypatch.setattr(os, "link", link_told)
        KeptParts(writer.root, JOB).link(found, "policy", folder)
        monkeypatch.undo()
        writer.close()
    (record,) = [at for at, (name, _) in enumerate(calls) if name == "manifest-00000001.json"]
    before = calls[:record]
    files = [*(root / folder).glob("*.distcp"), *(root / folder).glob("*.table")]
    for file in files:
        named = max(at for at, (name, _) in enumerate(before) if name == file.name)
        assert ("fsync", file.stat().st_ino) in before
        assert ("fsync", (root / folder).stat().st_ino) in before[named:]
    assert ("fsync", (root / place.name).stat().st_ino) in before
    # The disk is waited for once a file, and not for leases or what only `timeline` reads.
    assert sum(name == "fsync" for name, _ in calls) == len(files) + 6
