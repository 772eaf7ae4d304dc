"""Regular layouts: the rows of a few ranks tell those of all, and nobody is believed unseen."""

from itertools import product

import numpy as np
import pytest

import ray_dcp
from ray_dcp.commit_protocol import planning
from ray_dcp.commit_protocol.messages import SendItems, Target
from ray_dcp.planning.fingerprint import probes
from ray_dcp.runtime import rank_save
from ray_dcp.store.opening import open_storage
from tests.support.arrays import ArrayCapture, same_state
from tests.support.world import Warm, committed, load_state


def test_probes_are_where_a_dimension_may_begin():
    for mesh in product((1, 2, 3, 4), repeat=3):
        strides = {int(np.prod(mesh[at:])) for at in (1, 2, 3)}
        assert strides - {int(np.prod(mesh))} <= set(probes(int(np.prod(mesh))))
    assert probes(1) == (0,)
    assert len(probes(10240)) < 32


# --- through the protocol -----------------------------------------------------------------------


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "MANY_UNKNOWN", 2)
    monkeypatch.setattr(rank_save, "ROWS_AT_ONCE", 0)
    return Warm(12, str(tmp_path / "ckpt"))


def test_a_first_save_of_many_ranks_moves_the_rows_of_few(job):
    state = {"a": np.arange(48.0).reshape(24, 2), "b": np.arange(36), "step": 3}
    committed(job.save(state))
    assert job.senders == set(probes(12))
    assert job.plans_made == 1
    storage = open_storage(Target(job.url))
    assert same_state(state, load_state(storage, state, 2))
    committed(job.save(state))
    assert job.was_warm


def test_a_rank_that_is_not_like_the_others_sends_its_rows(job):
    state = {"a": np.arange(48.0).reshape(24, 2), "step": 3}
    states = [dict(state) for _ in range(12)]
    states[7]["rep.mine"] = np.arange(4)
    committed(job.save(states))
    assert job.senders == {*probes(12), 7}
    assert job.plans_made == 1
    committed(job.save(states))
    assert job.was_warm


SLABS = {
    "a": np.arange(48.0).reshape(24, 2), "b": np.arange(36), "step": 3,
    "rep.scalar": np.array(7), "note": "x",
}  # fmt: skip


def test_it_is_the_same_plan_for_whoever_begins_anew(job):
    committed(job.save(SLABS))
    job.restart_coordinator()
    committed(job.save(SLABS))
    assert job.plans_made == 1
    assert all(isinstance(r, SendItems) or r.part is None for r in job.replies)
    job.restart(12)
    committed(job.save(SLABS))
    assert not job.senders
    assert not job.plans_made
    changed = [{**SLABS, "note": "y"} if rank == 4 else SLABS for rank in range(12)]
    committed(job.save(changed))
    storage = open_storage(Target(job.url))
    assert same_state(SLABS, load_state(storage, SLABS, 3))


# --- stages of a pipeline, HSDP in each -----------------------------------------------------------

STAGES = [
    {f"{stage}.a": np.arange(stage, 96.0 + stage).reshape(24, 4), f"{stage}.b": np.arange(32),
     "rep.tied": np.arange(2000) + 1.5, "step": 3, f"rep.{stage}.scalar": np.array(stage)}
    for stage in range(3)
]  # fmt: skip


def of_stage(state, rank, world_size):
    """Of each 8 ranks, 4 have a quarter each, and the others the same."""
    return ArrayCapture(state, rank % 4, 4)


def test_a_pipeline_of_replicated_stages_is_saved_by_the_rows_of_few(job):
    job.restart(24)
    states = [STAGES[rank // 8] for rank in range(24)]
    committed(job.save(states, capture=of_stage))
    # Of each two that hold the same at most one, where a dimension of a mesh may begin.
    assert {0, 1, 2, 8, 9, 10, 16, 17, 18} <= job.senders < set(range(24))
    assert len({rank // 8 * 4 + rank % 4 for rank in job.senders}) == len(job.senders)
    assert job.plans_made == 1
    committed(job.save(states, capture=of_stage))
    assert job.was_warm
    storage = open_storage(Target(job.url))
    whole = STAGES[0] | STAGES[1] | STAGES[2]
    for world_size in (1, 5):
        assert same_state(whole, load_state(storage, whole, world_size))
    assert ray_dcp.verify(job.url).ok
    job.restart(24)
    states[17] = states[17] | {"step": 4}
    committed(job.save(states, capture=of_stage))
    assert same_state(whole, load_state(storage, whole, 2))
