"""Copies beside saves, deletes and collectors at one place, in any order, with crashes anywhere."""

from __future__ import annotations

import random
import re
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

from hypothesis import event, given, settings
from hypothesis import strategies as st

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    SaveCancelledError,
    StorageError,
)
from ray_dcp.io.checkpoint import read_checkpoint
from ray_dcp.io.records import read_slots
from ray_dcp.options import SaveOptions
from ray_dcp.runtime import copying
from ray_dcp.runtime.copying import copy_checkpoint, plan_copy
from ray_dcp.runtime.garbage_collection import collect, delete
from ray_dcp.runtime.tasks import perform
from ray_dcp.store.local import LocalStorage
from tests.support.arrays import state_of as whole_state_of
from tests.support.turns import World
from tests.support.world import loads_whole, run_ranks, save, save_ranks

ATTEMPT = re.compile(r"[0-9a-f]{16}")


def state_of(step):
    """A small state: what stands is told by one tensor and one object."""
    return {name: whole_state_of(step)[name] for name in ("a", "rep.scalar", "step")}


STATES = [state_of(step) for step in range(9)]


def saving(url, step, world_size):
    """A whole save: its ranks and its coordinator in one actor."""

    def program(actor):
        ranks = save_ranks(
            STATES[step], world_size, url, session=f"save-{step}", opener=actor.opener,
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
    return loads_whole(url, STATES, world_size=1)


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
                save(STATES[step], 1, str(sources / str(step)), session="source")
        for _ in range(before):
            save(STATES[7], 1, url, session="before")
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
