"""Random histories of a run whose steps share files, while bits flip in any of its files.

Up to three processes save in turn, go away, come back or begin anew; steps are loaded, deleted,
copied, or go by retention. At every moment what a reader calls good holds the right values; a bit
that flipped is not in more saves than the rule allows, and in none of a process that began after;
and whoever trains with the right bytes gets new right steps.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_dcp
from ray_dcp import errors
from ray_dcp.core.damage import DAMAGE, DamageLog
from ray_dcp.manager import CheckpointManager, Item, LatestN
from ray_dcp.planning import sources
from ray_dcp.rank.unchanged import RunHistory
from ray_dcp.session.inline_transport import session_alone
from tests.support.checkpoints import flip
from tests.support.programs.unchanged import LINK, Tuned, save_steps

MOST_LINKS = 4
SEEDS = 200 if os.environ.get("RAY_DCP_THOROUGH") else 3
ACTIONS = 24


@dataclass
class Process:
    """What a process knows of the run."""

    born: int
    """Number of flips before it began."""
    history: RunHistory = field(default_factory=RunHistory)
    damage: dict[str, Any] = field(default_factory=lambda: dict(vars(DamageLog())))


class Run:
    """A run on a disk, and what it should hold.

    Attributes:
        flips: The inode of each file in which a bit was flipped, in order.
        values: What the trained part of each step is.
    """

    def __init__(
        self, root: Path, seed: int, patch: pytest.MonkeyPatch, reached: Counter[str]
    ) -> None:
        self.root, self.rng, self.patch = root, random.Random(seed), patch
        self.reached = reached
        self.flips: list[int] = []
        self.values: dict[int, int] = {}
        self.hit: Counter[int] = Counter()
        self.model, self.next_step = Tuned(), 1
        self.processes: list[Process] = []
        self.manager: CheckpointManager | None = None
        self.begin()

    # --- Actions

    def begin(self) -> None:
        """Another process goes on: a new one, or one that saved before."""
        self.end()
        if len(self.processes) < 3 or self.rng.random() < 0.5:
            self.processes = [*self.processes[-2:], Process(len(self.flips))]
        self.process = self.rng.choice(self.processes)
        self.patch.setattr(session_alone(), "history", self.process.history)
        vars(DAMAGE).update(self.process.damage)
        self.manager = CheckpointManager(
            self.root, 1, item=Item(save_options=LINK), retention=LatestN(3), no_dist=True,
            takeover=True, chkpt_on_preemption=False,
        )  # fmt: skip
        if self.rng.random() < 0.6:
            self.restore()

    def end(self) -> None:
        if self.manager is not None:
            self.process.history.wait()
            self.manager.close()
            self.process.damage = dict(vars(DAMAGE))
            self.manager = None

    def restore(self) -> None:
        model = self.blank()
        try:
            found = self.manager.restore("auto", {"model": model}).step
        except errors.CheckpointError:
            self.reached["nothing to restore"] += 1
            return
        self.check_values(model, self.values[found])
        self.reached["restored"] += 1

    def save(self) -> None:
        step, self.next_step = self.next_step, self.next_step + 1
        self.model.set_step(step)
        self.manager.save(step, {"model": self.model})
        self.values[step] = step
        self.process.history.wait()
        self.reached["saved"] += 1
        self.check_new(self.path(step))

    def check_new(self, path: Path) -> None:
        """Checks that a new step has only those flipped bits that its process could not know."""
        shared = {file.stat().st_ino for file in path.glob("*.distcp")} & {*self.flips}
        self.reached["in time"] += bool(self.flips) and not shared
        for inode in shared:
            self.hit[inode] += 1
            self.reached["hit"] += 1
            assert self.hit[inode] <= MOST_LINKS, "a flipped bit goes on with the run"
            assert inode not in self.flips[: self.process.born], "it was there before the process"
        if not shared:
            assert ray_dcp.open(path).verify().ok

    def flip(self) -> None:
        files = [one for one in self.root.glob("step-*/*") if one.is_file() and one.stat().st_size]
        if files:
            # Why so: most bytes are in data files.
            data = [one for one in files if one.stat().st_size > 1 << 20] or files
            file = self.rng.choice(self.rng.choice([files, data, data]))
            flip(file, self.rng.randrange(file.stat().st_size), 1 << self.rng.randrange(8))
            # Why linked: the number of a file that is gone would be given to another one.
            os.link(file, self.root.parent / f"flipped-{len(self.flips)}")
            self.flips.append(file.stat().st_ino)
            self.reached["flipped"] += 1

    def delete(self) -> None:
        steps = self.manager.all_steps()
        if len(steps) > 1:
            try:
                self.manager.delete(self.rng.choice([steps[-1], self.rng.choice(steps)]))
                self.reached["deleted"] += 1
            except errors.CheckpointError:
                self.reached["not deleted"] += 1

    def copy(self) -> None:
        steps = self.manager.all_steps()
        if steps:
            step, place = self.rng.choice(steps), self.root.parent / "copy"
            shutil.rmtree(place, ignore_errors=True)
            try:
                ray_dcp.copy(self.path(step), place)
            except errors.CheckpointError:
                return
            if ray_dcp.open(place).verify().ok:
                self.check_loads(place, step)
                self.reached["copied"] += 1

    # --- Checks

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:08}"

    def blank(self) -> Tuned:
        model = Tuned()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(-1)
        return model

    def check_values(self, model: Tuned, step: int) -> None:
        expected = Tuned()
        expected.set_step(step)
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(one, other)

    def check_loads(self, path: Path, step: int) -> None:
        model = self.blank()
        ray_dcp.load({"model": model}, checkpoint_id=path, no_dist=True)
        self.check_values(model, step)

    def check(self) -> None:
        """Checks what any reader calls good, without letting the process know what it finds."""
        self.manager.join()  # deletions
        damage, good = dict(vars(DAMAGE)), None
        run = ray_dcp.open_run(self.root) if self.values else ()
        for one in run:
            if one.is_readable and ray_dcp.verify(one.path).ok:
                good = one.step
                assert not one.is_marked_damaged or self.path(one.step).exists()
        if good is not None:
            self.check_loads(self.path(good), good)
            model = self.blank()
            found = ray_dcp.load_newest({"model": model}, self.root, no_dist=True).step
            self.check_values(model, self.values[found])
            assert found >= good
        vars(DAMAGE).update(damage)


def test_a_flipped_bit_stays_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MOST_LINKS", MOST_LINKS)
    logging.getLogger("ray_dcp").setLevel(logging.CRITICAL)
    before = dict(vars(DAMAGE))
    reached: Counter[str] = Counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed in range(SEEDS):
                run_history(Run(tmp_path / f"{seed}" / "run", seed, monkeypatch, reached))
                shutil.rmtree(tmp_path / f"{seed}")
    finally:
        vars(DAMAGE).update(before)
        logging.getLogger("ray_dcp").setLevel(logging.NOTSET)
    expected = {"restored", "saved", "hit", "in time", "flipped", "deleted", "copied"}
    assert expected <= reached.keys(), reached


def run_history(run: Run) -> None:
    """Plays a random history."""
    actions = [run.save] * 6 + [run.flip] * 3 + [run.copy] * 2
    actions += [run.begin, run.restore, run.delete]
    for _ in range(ACTIONS):
        run.rng.choice(actions)()
        run.check()
    # Whoever trains with the right bytes gets new right steps, also without a new process.
    for _ in range(MOST_LINKS):
        run.save()
    last = run.next_step - 1
    assert ray_dcp.open(run.path(last)).verify().ok
    run.check_loads(run.path(last), last)
    run.end()


TRAIN = """
import sys, ray_dcp
from ray_dcp.rank import unchanged
from tests.support.programs.unchanged import LINK, Tuned
unchanged.WAIT_S = 60.0  # on a busy machine it would be written, and not be looked at
model, root = Tuned(), sys.argv[1]
for step in map(int, sys.argv[2:]):
    model.set_step(step)
    state = {"model": model, "rank": ray_dcp.PerRank(0)}
    ray_dcp.save(state, checkpoint_id=f"{root}/step-{step}", options=LINK)
"""


def test_a_process_that_begins_links_to_nothing_that_was_damaged_before(programs, tmp_path):
    save_steps(tmp_path, 3)
    data = max((tmp_path / "step-2").glob("*.distcp"), key=lambda file: file.stat().st_size)
    assert data.stat().st_nlink == 3
    flip(data, 700_000)
    (ended,) = programs.run("-c", TRAIN, str(tmp_path), "3", "4")
    assert ended.returncode == 0, ended.stderr
    assert [ray_dcp.open(tmp_path / f"step-{step}").verify().ok for step in (1, 2, 3, 4)] == [
        False, False, True, True
    ]  # fmt: skip
    marked = [one.is_marked_damaged for one in ray_dcp.open_run(tmp_path) if one.step]
    assert marked == [True, True, False, False]
