"""Saves, deletes, collectors and zombies at one place, in any order, with crashes anywhere.

What is told is what stands; what stands loads whole; and what nobody needs is gone in the end.
"""

from __future__ import annotations

import random
import re
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

from hypothesis import event, given, settings
from hypothesis import strategies as st

from ray_dcp.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    SaveCancelledError,
    StorageError,
)
from ray_dcp.format.manifest import DeleteRecord, slot_of
from ray_dcp.io.checkpoint import read_checkpoint
from ray_dcp.io.records import read_slots
from ray_dcp.options import SaveOptions
from ray_dcp.protocol.messages import Target
from ray_dcp.protocol.vote import Fenced, Lost, Open, Won
from ray_dcp.runtime import copying
from ray_dcp.runtime.copying import copy_checkpoint, plan_copy
from ray_dcp.runtime.garbage_collection import collect, delete
from ray_dcp.runtime.tasks import outcome, perform, settle
from ray_dcp.store.local import LocalStorage
from tests.inline_ranks import run_ranks
from tests.interleaving import World
from tests.numpy_ranks import loads_whole, save, save_ranks
from tests.numpy_ranks import state_of as whole_state_of

FOREIGN = {"notes.txt": "mine", "backup/rank-00000-part-00000.safetensors": "mine as well"}
ATTEMPT = re.compile(r"[0-9a-f]{16}")


def state_of(step):
    """A small state: what stands is told by one tensor and one object."""
    return {name: whole_state_of(step)[name] for name in ("a", "rep.scalar", "step")}


CONTAINERS = ["torch_save", "safetensors"]
STATES = [state_of(step) for step in range(9)]


def saving(url, step, world_size, container):
    """A whole save: its ranks and its coordinator in one actor."""

    def program(actor):
        ranks = save_ranks(
            STATES[step], world_size, url, session=f"save-{step}", opener=actor.opener,
            options=SaveOptions(container=container, num_threads=1),
        )  # fmt: skip
        results = run_ranks(ranks, performer=partial(perform, opener=actor.opener))
        kinds = {type(result.error) for result in results}
        assert len(kinds) == 1, "the ranks were told different things"
        return results[0]

    return program


def settling(url, attempt):
    return lambda actor: settle(Target(url), attempt, reason="test", rank=0, opener=actor.opener)


def deleting(url):
    return lambda actor: delete(url, opener=actor.opener)


def collecting(url, abort_unfinished):
    return lambda actor: collect(url, abort_unfinished=abort_unfinished, opener=actor.opener)


def looking(actor):
    return read_checkpoint(actor.opener(None))


def copying_from(source, url):
    """A whole copy, of a checkpoint that nobody else uses."""
    storage = LocalStorage(source)
    plan = plan_copy(storage, read_checkpoint(storage))

    def program(actor):
        copy_checkpoint(storage, plan, Target(url), opener=actor.opener)

    return program


def attempts_at(root):
    return {found for file in root.rglob("*") for found in ATTEMPT.findall(file.name)}


def names_at(root):
    return {file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()}


def standing(url):
    """Returns what stands, without the ranks and checks of a load: a step or None."""
    return loads_whole(url, STATES, world_size=1)


def needed_names(root):
    """Names of what stands, of the record that decides, of `.metadata` and of foreign files."""
    decides = read_slots(LocalStorage(root)).decides
    names = set(FOREIGN)
    if decides is None:
        return names
    names.add(f"manifest-{decides.slot:08d}.json")
    if not isinstance(decides.record, DeleteRecord):
        entries = [*decides.record.files, decides.record.table]
        names |= {entry.key for entry in entries}
        names |= {".metadata"} if decides.record.metadata is not None else set()
    return names


def check_told(url, actors):
    """What each actor was told is what the records say in the end."""
    for actor in actors:
        if actor.crashed:
            continue
        match actor.result:
            case Won() | Lost():
                assert outcome(url, actor.attempt) == "committed", actor.name
            case Fenced():
                assert outcome(url, actor.attempt) != "committed", actor.name
            case Open(error):
                raise error
        if not actor.name.startswith("save"):
            continue
        told = actor.result
        if told.error is None:
            assert outcome(url, told.value.attempt) == "committed", actor.name
        else:
            # A rank whose file is removed while it writes tells what the storage says.
            assert isinstance(
                told.error, CheckpointExistsError | SaveCancelledError | StorageError
            ), told.error
            if isinstance(told.error, StorageError):
                assert "Only one save at a time" in told.error.__notes__[-1], told.error


def tidy(url, root, order):
    """In the end a quiet save, or a quiet collector, leaves nothing but what is needed."""
    if order.random() < 0.5 and read_slots(LocalStorage(root)).used:
        before = standing(url)
        report = collect(url, abort_unfinished=True)
        assert report.warnings == ()
        assert {kept.key for kept in report.kept} == set(FOREIGN)
        assert standing(url) == before
        extra = names_at(root) - needed_names(root)
        decides = read_slots(LocalStorage(root)).decides
        slots = {slot_of(name) for name in extra}
        assert None not in slots, extra
        assert decides is None or all(slot > decides.record.previous_slot for slot in slots)
    save(STATES[8], 2, url, session="last")
    assert standing(url) == 8
    assert names_at(root) == needed_names(root)
    folders = [entry for entry in root.iterdir() if entry.is_dir()]
    assert all(any(folder.iterdir()) for folder in folders)
    for name, text in FOREIGN.items():
        assert (root / name).read_text() == text


actions = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(1, 2), st.sampled_from(CONTAINERS)),
        st.tuples(st.just("save"), st.just(1), st.just("torch_save")),
        st.tuples(st.just("delete")),
        st.tuples(st.just("collect"), st.booleans()),
        st.tuples(st.just("look")),
    ),
    min_size=2,
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32), actions=actions, before=st.integers(0, 2),
    crashes=st.sampled_from([0.0, 0.0, 0.01, 0.05]), lull=st.sampled_from([0.0, 0.02, 0.2]),
    settlers=st.integers(0, 2),
)  # fmt: skip
def test_whatever_happens_at_once_what_is_told_stands_and_the_rest_is_collected(
    seed, actions, before, crashes, lull, settlers
):
    with tempfile.TemporaryDirectory() as folder:
        root, order = Path(folder) / "place", random.Random(seed)
        for name, text in FOREIGN.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        url = str(root)
        for step in range(before):
            save(STATES[step], 1, url)
        world = World(root, order)
        may_be_absent = before == 0 or any(action[0] == "delete" for action in actions)
        seen = []
        for number, action in enumerate(actions):
            match action:
                case ("save", world_size, container):
                    program = saving(url, 2 + number, world_size, container)
                case ("delete",):
                    program = deleting(url)
                case ("collect", abort_unfinished):
                    program = collecting(url, abort_unfinished)
                case ("look",):
                    program = looking
            world.begin(f"{action[0]}-{number}", program)

        def look():
            if order.random() < 0.02 and len(world.actors) < len(actions) + settlers:
                found = sorted(attempts_at(root))
                if found:
                    attempt = order.choice(found)
                    actor = world.begin(f"settle-{attempt}", settling(url, attempt))
                    actor.attempt = attempt
            if order.random() < 0.1:
                # Nobody may see a mixture, at any moment.
                try:
                    seen.append(standing(url))
                except CheckpointNotFoundError:
                    seen.append(None)

        world.run(crashes=crashes, lull=lull, look=look)
        assert may_be_absent or None not in seen
        for actor in world.actors:
            if actor.name.startswith("look"):
                absent = isinstance(actor.error, CheckpointNotFoundError)
                assert actor.error is None or (absent and may_be_absent), actor.error
            elif actor.name.startswith(("delete", "collect")):
                assert actor.error is None or isinstance(actor.error, CheckpointNotFoundError), (
                    actor.error
                )
            else:
                assert actor.error is None, actor.error
        check_told(url, world.actors)
        event(f"{len(actions)} actors, {sum(actor.crashed for actor in world.actors)} crashed")
        tidy(url, root, order)
        check_told(url, world.actors)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from(["copy", "save", "delete", "collect"]), min_size=1, max_size=3),
    st.sampled_from(CONTAINERS),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.02]),
)
def test_a_copy_beside_others_is_whole_or_not_there_and_harms_none(
    seed, others, container, before, crashes
):
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(copying, "_NUM_THREADS", 1):
        root, sources = Path(folder, "target"), Path(folder, "sources")
        root.mkdir()
        url = str(root)
        for step in (0, 1):
            for _ in range(step + 1):  # its slot is not always the one of the copy
                save(STATES[step], 1, str(sources / str(step)), session="source",
                     options=SaveOptions(container=container))  # fmt: skip
        for _ in range(before):
            save(STATES[7], 1, url, session="before")
            delete(url)
        world = World(root, random.Random(seed))
        programs = [copying_from(sources / "0", url)]
        for number, kind in enumerate(others):
            programs.append({
                "copy": copying_from(sources / "1", url),
                "save": saving(url, 2 + number, 1, container),
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
                failed, CheckpointExistsError | SaveCancelledError | StorageError
                | CheckpointNotFoundError
            ), failed  # fmt: skip
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
