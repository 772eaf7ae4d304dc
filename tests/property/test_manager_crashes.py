"""Managers and copies, interrupted at every call and beside others: no step is lost.

Beside others: its writers crash, freeze and are succeeded, while people tag, remove and read, one
storage call at a time, in the order of a seed, as in `tests.support.turns`. A model notes what
every actor was told, and looks at each record in the moment in which it is created: a deletion has
to be right then.

In some rounds small files are damaged: a read gives another byte, or half of the file, once; or
what lies there is damaged for good, where nothing that was promised is lost by it.
"""

from __future__ import annotations

import random
import re
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from click import ClickException
from hypothesis import event, given, settings
from hypothesis import strategies as st

import ray_dcp
from ray_dcp import errors
from ray_dcp.cli.main import main as command_line
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.coordinator.tasks import perform
from ray_dcp.format.manifest import DeleteRecord, Manifest, decode_record, slot_of
from ray_dcp.format.names import StepNames
from ray_dcp.io.checkpoint import read_checkpoint
from ray_dcp.io.lease_holders import this_process
from ray_dcp.io.records import read_slots
from ray_dcp.manager import BestN, LatestN
from ray_dcp.manager.catalogue import FOLDER, Catalogue, Root, look
from ray_dcp.manager.reader_leases import ReaderLease
from ray_dcp.manager.root_writer import Writer
from ray_dcp.options import SaveOptions
from ray_dcp.place.collect import collect
from ray_dcp.place.delete import delete
from ray_dcp.store.local import LocalStorage
from ray_dcp.transform import copying
from ray_dcp.transform.copying import copy_checkpoint, plan_copy
from tests.crash.crashes import check_crashes
from tests.crash.interruptions import interrupted_system
from tests.crash.invariants import (
    an_allowed_checkpoint_loads_whole,
    expect,
    is_same,
    nothing_lies_outside,
    standing_state,
)
from tests.crash.registry import NEW, NEXT, OLD, Operation
from tests.support.arrays import state_of as whole_state_of
from tests.support.manager_places import (
    folders_of,
    in_this_thread,
    newest_state,
    root_of,
    save_step,
    writer_of,
)
from tests.support.manager_places import settings as manager_settings
from tests.support.storages import CrashError, Fault, Script
from tests.support.turns import SteppedStorage, World
from tests.support.world import loads_whole, run_ranks, save, save_ranks

NUM_STEPS = 8
STATES = [
    {name: whole_state_of(step)[name] for name in ("a", "rep.scalar", "step")}
    for step in range(NUM_STEPS)
]
METHODS = ("read", "read_into", "write", "open_writer", "list", "unpublished", "delete")
_here = threading.local()


SMALL = re.compile(r"(step-info|manifest|writer|catalogue).*\.json|\d+\..*")
"""Names of records, infos, leases and the catalogue."""


def spoiled(data: bytes, order: random.Random) -> bytes:
    """Returns bytes with a flipped bit, or the first of them."""
    at = order.randrange(max(1, len(data)))
    if not data or order.random() < 0.5:
        return data[:at]
    return data[:at] + bytes([data[at] ^ 1 << order.randrange(8)]) + data[at + 1 :]


def is_delete_record(data) -> bool:
    return isinstance(decode_record(bytes(data)), DeleteRecord)


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def open_quickly(target: Target) -> LocalStorage:
    return LocalStorage(target.url, durable=False)


@contextmanager
def in_one_step():
    """Lets the actor of this thread call storages without waiting for its turn."""
    before = getattr(_here, "inside", False)
    _here.inside = True
    try:
        yield
    finally:
        _here.inside = before


UNLESS_TAGGED = "unless it has a tag"


@dataclass
class Model:
    """What must be, by what every actor was told."""

    root: Path
    max_to_keep: int
    order: random.Random
    losses: dict[int, float] = field(default_factory=dict)
    """Metric of each step, by which the best one stays."""
    flips: float = 0.0
    """Chance that a read of a small file gives something else."""
    newest_lease: int = 0
    """Number of the newest writer lease of which its holder was told."""
    pinned: set[int] = field(default_factory=set)
    """Steps of which somebody was told that they have a tag."""
    read: Counter[int] = field(default_factory=Counter)
    """Steps that somebody has a lease on."""
    saved: set[int] = field(default_factory=set)
    """Steps of which somebody was told that they are committed, and nobody deleted them since."""
    forced: Counter[int] = field(default_factory=Counter)
    """How often a step was deleted whatever tags it had."""
    removing: Counter[int] = field(default_factory=Counter)
    """Steps that somebody was asked to remove; also those whose remover crashed."""
    wrong: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def stands(self, name: str) -> str | None:
        """Returns the attempt that stands in a step folder, at one moment."""
        with in_one_step():
            decides = read_slots(LocalStorage(self.root / name), tolerant=True).decides
        if decides is None or not isinstance(decides.record, Manifest):
            return None
        return decides.record.attempt

    def took_lease(self, writer: Writer) -> None:
        """Notes that a writer was told that he has the lease."""
        self.newest_lease = max(self.newest_lease, writer._lease._number)

    def standing(self) -> list[int]:
        names = (path.name for path in self.root.glob("step-*"))
        return sorted(int(name[5:]) for name in names if self.stands(name) is not None)

    def oldest_first(self) -> list[int]:
        """Returns the steps that stand, in the order in which they were saved."""
        with in_one_step():
            root = Root(Target(str(self.root)), open_quickly)
            return [one.step for one in look(root, StepNames(), Catalogue()).oldest_first("any")]

    def deleted(self, step: int, before: str, was_older: set[int], actor) -> None:
        """Judges a deletion in the moment in which it is committed.

        Args:
            step: The step.
            before: Attempt that stood.
            was_older: The steps that were older.
            actor: Who deleted it.
        """
        self.saved.discard(step)
        asked = actor.asked.get(step)
        self.seen["deleted, " + ("asked" if asked else "by retention")] += 1
        told = f"{actor.name} deletes step {step} ({before}), "
        if actor.writer is not None and actor.writer._lease._number < self.newest_lease:
            self.wrong.append(told + "after another process took the lease")
        if asked == "force":
            self.forced[step] += 1
            self.pinned.discard(step)
            return
        if self.read[step] and asked is None:
            self.wrong.append(told + "which somebody reads")
        if step in self.pinned:
            self.wrong.append(told + "which has a tag")
        if asked is None:
            # Those that are just being removed may count: that is a matter of who came first.
            newer = {*self.standing()} - was_older
            newer |= {one for one, number in self.removing.items() if number} - was_older
            if len(newer) < self.max_to_keep:
                self.wrong.append(told + f"though only {sorted(newer)} are newer")
            others = {*self.standing(), *(one for one, number in self.removing.items() if number)}
            if step == min({*others, step}, key=self.losses.__getitem__):
                self.wrong.append(told + f"the best of {sorted(others)}")

    def read_of(self, path: Path, data: bytes) -> bytes:
        """Returns what a read gives: now and then not what is there."""
        if not data or SMALL.fullmatch(path.name) is None or self.order.random() >= self.flips:
            return data
        self.seen["flipped"] += 1
        return spoiled(data, self.order)

    def damage(self) -> None:
        """Damages a small file for good."""
        names = ("step-*/step-info-*", ".manager/*.json", ".manager/reading/*")
        found = sorted(path for name in names for path in self.root.glob(name))
        if found:
            path = self.order.choice(found)
            path.write_bytes(spoiled(path.read_bytes(), self.order))
            self.seen[f"damaged {path.name[:4]}"] += 1


class Unstepped:
    """The real methods of a storage; tells the model of records that come and go."""

    def __init__(self, storage, real, model, actor):
        self._storage, self._real, self._model, self._actor = storage, real, model, actor
        self.url, self.traits = storage.url, storage.traits

    def __getattr__(self, name):
        def call(*args, **given):
            with in_one_step(), self._judged(name, args):
                found = self._real[name](self._storage, *args, **given)
            return self._model.read_of(Path(self.url, args[0]), found) if name == "read" else found

        return call

    @contextmanager
    def _judged(self, name, args):
        keys = list(args[0]) if name == "delete" else [args[0]] if name == "write" else []
        paths = [(Path(self.url) / key).relative_to(self._model.root) for key in keys
                 if slot_of(Path(key).name) is not None]  # fmt: skip
        folders = {path.parts[0] for path in paths if len(path.parts) == 2}
        before = {folder: self._model.stands(folder) for folder in folders}
        deletes = name == "write" and any(before.values()) and is_delete_record(args[1])
        ages = self._model.oldest_first() if deletes else []
        yield
        for folder, attempt in before.items():
            if attempt is None or self._model.stands(folder) == attempt:
                continue
            if name == "delete":
                self._model.wrong.append(f"{self._actor.name} deletes the record of {folder}")
            elif deletes:
                step = int(folder[5:])
                was_older = {*ages[: ages.index(step)]} if step in ages else set()
                self._model.deleted(step, attempt, was_older, self._actor)


@contextmanager
def stepped(model: Model):
    """Lets actors take turns at every call of a local storage, whoever makes it.

    An actor sleeps for no time: who wakes it is a matter of turns.
    """
    sleep = time.sleep
    real = {name: getattr(LocalStorage, name) for name in METHODS}

    def patched(name):
        def call(self, *args, **given):
            actor = getattr(_here, "actor", None)
            if actor is None or getattr(_here, "inside", False):
                return real[name](self, *args, **given)
            unstepped = Unstepped(self, real, model, actor)
            return getattr(SteppedStorage(unstepped, actor), name)(*args, **given)

        return call

    with pytest.MonkeyPatch.context() as patch, in_this_thread():
        for name in METHODS:
            patch.setattr(LocalStorage, name, patched(name))
        patch.setattr(time, "sleep", lambda s: sleep(0 if hasattr(_here, "actor") else s))
        yield


class Round:
    """One round: its actors, and what they do.

    Args:
        root: Where; empty.
        seed: Of all that is chosen.
    """

    def __init__(self, root: Path, seed: int) -> None:
        self.order = random.Random(seed)
        losses = self.order.sample(range(NUM_STEPS + 8), NUM_STEPS + 8)
        if self.order.random() < 0.6:
            losses.sort()  # so that the first one is to stay
        self.model = Model(
            root,
            self.order.choice([1, 1, 2, 3]),
            self.order,
            dict(enumerate(map(float, losses))),
            self.order.choice([0.0, 0.03, 0.2]),
        )
        self.world = World(root, self.order)
        self.root = Root(Target(str(root)), open_quickly)

    def play(self) -> Model:
        """Plays it to the end; returns the model, which says what was wrong."""
        with stepped(self.model):
            self._play()
        self._look_at_the_end()
        return self.model

    def _play(self) -> None:
        world, order = self.world, self.order
        last = order.randint(3, 7)
        self._begin("writer-1", lambda actor: self.write(actor, 1, last))
        visitors = order.randint(0, 4)
        successor = order.random() < 0.7
        begun = 0

        def look() -> None:
            nonlocal begun, successor
            if not self.model.saved:
                return
            if self.model.flips and order.random() < 0.01:
                self.model.damage()
            if begun < visitors and order.random() < 0.01:
                begun += 1
                visit = order.choice([self._tag, self._tag, self._rm, self._read])
                self._begin(f"visitor-{begun}", visit)
            if successor and order.random() < 0.005:
                successor = False
                first = order.randint(1, 4)
                self._begin("writer-2", lambda actor: self.write(actor, first, first + 2))

        world.run(
            crashes=order.choice([0.0, 0.0, 0.001, 0.004]),
            lull=order.choice([0.0, 0.002, 0.01]),
            look=look,
        )

    def _begin(self, name, program):
        def run(actor):
            _here.actor = actor
            actor.asked, actor.writer = {}, None
            try:
                return program(actor)
            except errors.CheckpointError as error:
                self.model.seen[f"{name[:6]}: {type(error).__name__}"] += 1
                return None

        return self.world.begin(name, run)

    # What actors do

    def write(self, actor, first: int, last: int) -> None:
        """Saves steps, and does now and then what else a writer does."""
        order = self.order
        actor.writer = writer = self._writer(actor)
        if first > 1 and order.random() < 0.5:
            # Those go that were saved later, whatever their number is; a step may be saved again
            # until then.
            may_go = [step for step in range(1, NUM_STEPS) if step != first - 1]
            with self._by_order(actor, may_go) as force:
                writer.rewind(first - 1, force=force)
            self.model.took_lease(writer)
        for step in range(first, last + 1):
            if order.random() < 0.3:  # it died before it could write the catalogue, and came again
                actor.writer = writer = self._writer(actor)
            if order.random() < 0.15 and self.model.saved:
                writer.damaged.add(max(self.model.saved))  # one read of it had failed
                self.model.seen["damaged"] += 1
            self._save(actor, writer, step, replace=False)
            if order.random() < 0.25:
                again = order.choice(sorted(self.model.saved) or [step])
                self._save(actor, writer, again, replace=True)
            if order.random() < 0.1:
                with self._by_order(actor, [step]) as force:
                    writer.delete(step, force=force)
        writer.close()

    def _writer(self, actor) -> Writer:
        return Writer(
            self.root,
            manager_settings(
                retention=LatestN(self.model.max_to_keep) | BestN(1, "loss"), order="any"
            ),
            holder=replace(this_process(), nonce=actor.name),
        )

    def _save(self, actor, writer, step: int, *, replace: bool) -> None:
        tags = ["kept"] if self.order.random() < 0.15 else []
        metrics = {"loss": self.model.losses[step]}
        place = writer.begin(step, replace=replace, tags=tags, metrics=metrics)
        self.model.took_lease(writer)
        if self.order.random() < 0.12:
            writer.finish(place, False)  # as when its bytes could not be captured
            writer.remover.drain()
            self.model.seen["failed"] += 1
            return
        url = str(self.model.root / place.name)
        try:
            save(STATES[step], 1, url, session=f"{actor.name}-{step}", opener=open_quickly)
        except errors.CheckpointError:
            writer.finish(place, False)
            raise
        self.model.seen["saved"] += 1
        if self.model.stands(place.name) is not None:  # else it was deleted right after its commit
            self.model.saved.add(step)
            self.model.pinned.update([step] if tags else [])
        writer.finish(place, True)
        writer.remover.drain()

    @contextmanager
    def _by_order(self, actor, steps):
        """Removes steps in the block, which is told whether tagged ones go, too."""
        force = self.order.random() < 0.5
        with self._asked(actor, steps, "force" if force else UNLESS_TAGGED):
            yield force

    @contextmanager
    def _asked(self, actor, steps, how):
        """Has steps removed: until that is done, and after a crash, they may be there or not."""
        for step in steps:
            actor.asked[step] = how
            self.model.removing[step] += 1
            if how == "force":
                self.model.pinned.discard(step)
                self.model.saved.discard(step)
        with suppress(errors.CheckpointError):
            yield
        for step in steps:
            actor.asked.pop(step)
            self.model.removing[step] -= 1

    def _some_step(self) -> int:
        return self.order.choice(self.model.standing() or [1])

    def _tag(self, actor) -> None:
        step = self._some_step()
        forced = self.model.forced[step]
        ray_dcp.open(self.root.url).tag(step, "best")
        self.model.seen["tagged"] += 1
        if self.model.stands(name_of(step)) is not None:
            self.model.pinned.add(step)
        elif not self.model.removing[step] and self.model.forced[step] == forced:
            self.model.wrong.append(f"{actor.name} gave step {step} a tag, and it is not there")

    def _rm(self, actor) -> None:
        step = self._some_step()

        with self._asked(actor, [step], UNLESS_TAGGED):
            # Careful: no runner of click's. It takes stdout away from all threads.
            arguments = ["rm", f"{self.root.url}@{step}", "--yes", "--quiet"]
            with suppress(SystemExit, ClickException):
                command_line(arguments, standalone_mode=False)
            self.model.seen["removed"] += 1

    def _read(self, actor) -> None:
        step = self._some_step()
        holder = replace(this_process(), nonce=actor.name)
        lease = ReaderLease(self.root, step, lease_s=30.0, holder=holder)
        try:
            lease.__enter__()
        except errors.CheckpointError as error:
            working = [one for one in self.world.actors if not one.over and one is not actor]
            if self.model.stands(name_of(step)) is not None and not working:
                self.model.wrong.append(f"nobody deletes step {step}, but it is hidden: {error}")
            return
        if self.model.stands(name_of(step)) is not None:
            self.model.read[step] += 1
            self.model.seen["read"] += 1
            for _ in range(self.order.randint(1, 60)):
                self.root.storage.list("nothing/")
            self.model.read[step] -= 1
        lease.__exit__(None, None, None)

    def _look_at_the_end(self) -> None:
        """What was told as committed, and what has a tag, stands and loads whole."""
        for step in sorted(self.model.saved | self.model.pinned):
            if self.model.removing[step]:
                continue
            if self.model.stands(name_of(step)) is None:
                self.model.wrong.append(f"step {step} is gone, and nothing deleted it")
        for step in self.model.standing():
            try:
                found = loads_whole(str(self.model.root / name_of(step)), STATES, world_size=1)
            except errors.CheckpointError as error:
                self.model.wrong.append(f"step {step} does not load: {error}")
                continue
            if found != step:
                self.model.wrong.append(f"step {step} holds the state of {found}")
        for actor in self.world.actors:
            if actor.error is not None:
                raise actor.error


def play(seed: int) -> Model:
    """Plays the round of a seed."""
    # Why there: a disk makes every call durable, and that is not what is tried here.
    quick = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=quick) as folder:
        return Round(Path(folder) / "run", seed).play()


# --- Crashes --------------------------------------------------------------------------------------


def every_listed_step_loads(after):
    """What the catalogue lists is whole: one of the states that were ever saved."""
    root = root_of(after.storage)
    for found in look(root, manager_settings().names).steps.values():
        expect(
            standing_state(root.open(found.name), after.states) is not None,
            f"{found.name} does not load",
        )


def a_later_writer_leaves_one_step(after):
    """The next save works, and only its step and what managers share is left."""
    writer = writer_of(after.storage, max_to_keep=1)
    save_step(writer, after.storage, 9, NEXT)
    expect(list(writer.look().steps) == [9], f"there are steps {list(writer.look().steps)}")
    expect(is_same(newest_state(after.storage, after.states), NEXT), "the later save does not load")
    ours = folders_of(after.storage) - {key.partition("/")[0] for key in after.foreign}
    expect(ours == {"step-00000009", FOLDER}, f"there is left {sorted(ours)}")


INVARIANTS = (
    an_allowed_checkpoint_loads_whole,
    every_listed_step_loads,
    nothing_lies_outside,
    a_later_writer_leaves_one_step,
)


def keep_one(place, step, state, **telling):
    return save_step(writer_of(place.storage, max_to_keep=1), place.storage, step, state, **telling)


def leave_old_and_more(place):
    keep_one(place, 1, OLD)
    # What a process left that died before it could commit the next step.
    dies = Fault(operation="write", key="*manifest-*", stops=True)
    with suppress(CrashError), Script([dies]) as script:
        storage = script.wrap(place.storage)
        save_step(writer_of(storage, max_to_keep=1), storage, 2, NEXT)


SAVE = Operation(
    name="manager.save_keep_1",
    prepare=leave_old_and_more,
    run=lambda place: keep_one(place, 3, NEW),
    previous=OLD,
    new=NEW,
    look=newest_state,
    invariants=INVARIANTS,
)
REPLACE = Operation(
    name="manager.replace_keep_1",
    prepare=lambda place: keep_one(place, 3, OLD),
    run=lambda place: keep_one(place, 3, NEW, replace=True),
    previous=OLD,
    new=NEW,
    look=newest_state,
    invariants=INVARIANTS,
)


@pytest.fixture(autouse=True)
def _in_this_thread():
    with in_this_thread():
        yield


@pytest.mark.parametrize("operation", [SAVE, REPLACE], ids=str)
def test_the_only_good_step_survives_the_death_of_the_process_at_any_call(operation):
    reached = check_crashes(operation, variants=["before"])
    assert reached.stood["previous"] >= 5
    assert reached.stood["new"] >= 5
    assert set(reached.stood) == {"previous", "new"}


@pytest.mark.parametrize("variant", ["torn", "lost", "refused", "broken"])
def test_the_only_good_step_survives_every_other_fault(variant):
    reached = check_crashes(SAVE, variants=[variant], every=5)
    # Only small records are written after the commit, and those at once: nothing is torn then.
    assert set(reached.stood) == ({"previous"} if variant == "torn" else {"previous", "new"})


def test_the_only_good_step_survives_a_death_at_a_system_call(tmp_path):
    reached = check_crashes(
        SAVE,
        storage=partial(LocalStorage, tmp_path / "run"),
        interrupt=interrupted_system,
        variants=["before"],
        every=10,
    )
    assert set(reached.stood) == {"previous", "new"}


# --- Races ----------------------------------------------------------------------------------------


_reached: Counter[str] = Counter()


@settings(max_examples=24)
@given(seed=st.integers(0, 2**32))
def _no_step_is_deleted_that_must_stand(seed):
    model = play(seed)
    assert model.wrong == []
    for what in model.seen:
        event(what)
    _reached.update(model.seen)


def test_no_step_is_deleted_that_must_stand_whatever_happens_at_once():
    _no_step_is_deleted_that_must_stand()
    assert _reached["deleted, by retention"] >= 1
    assert _reached["saved"] >= 10


# --- copies ---------------------------------------------------------------------------------------


ATTEMPT = re.compile(r"[0-9a-f]{16}")


def state_of(step):
    """A small state: what stands is told by one tensor and one object."""
    return {name: whole_state_of(step)[name] for name in ("a", "rep.scalar", "step")}


COPIED = [state_of(step) for step in range(9)]


def saving(url, step, world_size):
    """A whole save: its ranks and its coordinator in one actor."""

    def program(actor):
        ranks = save_ranks(
            COPIED[step], world_size, url, session=f"save-{step}", opener=actor.opener,
            options=SaveOptions(num_threads=1),
        )  # fmt: skip
        results = run_ranks(ranks, performer=partial(perform, opener=actor.opener))
        kinds = {type(result.error) for result in results}
        assert len(kinds) == 1, "the ranks were told different things"
        return results[0]

    return program


def deleting(url):
    return lambda actor: delete(url, opener=actor.opener)


def collecting(url, abort_unfinished):
    return lambda actor: collect(url, abort_unfinished=abort_unfinished, opener=actor.opener)


def copying_from(source, url):
    """A whole copy, of a checkpoint that nobody else uses."""
    storage = LocalStorage(source)
    plan = plan_copy(storage, read_checkpoint(storage))

    def program(actor):
        copy_checkpoint(storage, plan, Target(url), opener=actor.opener)

    return program


def standing(url):
    """Returns what stands, without the ranks and checks of a load: a step or None."""
    return loads_whole(url, COPIED, world_size=1)


@settings(max_examples=25)
@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from(["copy", "save", "delete", "collect"]), min_size=1, max_size=3),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.02]),
)
def test_a_copy_beside_others_is_whole_or_not_there_and_harms_none(seed, others, before, crashes):
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(copying, "_NUM_THREADS", 1):
        root, sources = Path(folder, "target"), Path(folder, "sources")
        root.mkdir()
        url = str(root)
        for step in (0, 1):
            for _ in range(step + 1):  # its slot is not always the one of the copy
                save(COPIED[step], 1, str(sources / str(step)), session="source")
        for _ in range(before):
            save(COPIED[7], 1, url, session="before")
            delete(url)
        world = World(root, random.Random(seed))
        programs = [copying_from(sources / "0", url)]
        for number, kind in enumerate(others):
            programs.append({
                "copy": copying_from(sources / "1", url),
                "save": saving(url, 2 + number, 1),
                "delete": deleting(url),
                "collect": collecting(url, abort_unfinished=True),
            }[kind])  # fmt: skip
        actors = [world.begin(kind, one) for kind, one in zip(["copy", *others], programs,
                                                              strict=True)]  # fmt: skip
        world.run(crashes=crashes)
        told = set()
        for number, actor in enumerate(actors):
            event(f"{actor.name}: {'crash' if actor.crashed else type(actor.error).__name__}")
            step = 0 if number == 0 else 1 if actor.name == "copy" else 1 + number
            failed = actor.error or getattr(actor.result, "error", None)
            if actor.name in ("copy", "save") and not actor.crashed and failed is None:
                told.add(step)
            assert failed is None or isinstance(
                failed,
                errors.CheckpointExistsError
                | errors.SaveCancelledError
                | errors.StorageError
                | errors.CheckpointNotFoundError,
            ), failed
        stands = standing(url)
        deletes = [actor for actor in actors if actor.name == "delete" and actor.error is None]
        crashed = any(actor.crashed for actor in actors)
        if told and not deletes and not crashed:
            assert stands in told
        if not told and not crashed:
            assert stands is None
        if not crashed and not deletes:
            files = {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()}
            known = {one for file in files for one in ATTEMPT.findall(file)}
            decides = read_slots(LocalStorage(root)).decides
            assert known <= ({decides.record.attempt} if decides else set()), files
