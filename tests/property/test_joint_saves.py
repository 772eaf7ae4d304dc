"""Saves with few files for each node: whole in any order of events, for us and for stock DCP."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import event, given, settings
from hypothesis import strategies as st

import ray_dcp
from ray_dcp.errors import CheckpointError
from ray_dcp.options import SaveOptions
from ray_dcp.plan import global_plan
from ray_dcp.protocol.messages import Target
from ray_dcp.runtime.inline import run_ranks
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.opening import open_storage
from ray_dcp.testing.array_states import same_state, sample_state
from ray_dcp.testing.ranks import load_state, save_ranks

FEW = SaveOptions(num_threads=1, files_per_node=1)


def data_files(storage):
    return [entry.key for entry in storage.list() if entry.key.endswith(".distcp")]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("checks_at_end", [False, True])
@pytest.mark.parametrize("files_per_node", [1, 2, 3])
def test_a_node_writes_few_files_which_load_on_any_number_of_ranks(
    tmp_path, monkeypatch, files_per_node, checks_at_end
):
    if checks_at_end:
        monkeypatch.setattr(global_plan, "CHECKS_AT_END_CHUNKS", 0)
    options = SaveOptions(num_threads=1, files_per_node=files_per_node)
    nodes = ["x", "y", "x", "x", "y", "x"]
    state = sample_state(1)
    ranks = save_ranks(state, 6, str(tmp_path), options=options, staged=True, nodes=nodes)
    for result in run_ranks(ranks):
        result.get()
    storage = open_storage(Target(str(tmp_path)))
    assert len(data_files(storage)) == min(files_per_node, 4) + min(files_per_node, 2)
    for world_size in (1, 4):
        assert same_state(state, load_state(storage, state, world_size))
    assert ray_dcp.verify(str(tmp_path)).ok
    found = {
        name: torch.zeros(value.shape, dtype=getattr(torch, value.dtype.name))
        for name, value in state.items()
        if isinstance(value, np.ndarray)
    }
    found |= {"step": 0, "note": ""}
    stock.load(found, checkpoint_id=str(tmp_path))
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(found[name].numpy(), value)
        else:
            assert found[name] == value


def test_ranks_that_write_themselves_have_as_many_files_each():
    storage = MemoryStorage("joint-alone")
    options = SaveOptions(num_threads=1, files_per_node=2, part_bytes=1000)
    nodes = ["x", "x", "x"]
    ranks = save_ranks(sample_state(1), 3, storage.url, options=options, nodes=nodes)
    for result in run_ranks(ranks):
        result.get()
    counts = {}
    for key in data_files(storage):
        counts[key.split("_")[2]] = counts.get(key.split("_")[2], 0) + 1
    assert max(counts.values()) == 2
    assert same_state(sample_state(1), load_state(storage, sample_state(1)))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    twice=st.floats(0, 1),
    crash_at=st.none() | st.integers(0, 40),
    die=st.none() | st.integers(0, 3),
)
def test_in_any_order_it_is_committed_whole_or_not_at_all(seed, twice, crash_at, die):
    storage = MemoryStorage("joint-orders")
    storage.delete([entry.key for entry in storage.list()])
    old, new = sample_state(1), sample_state(2)
    for result in run_ranks(save_ranks(old, 2, storage.url, session="before")):
        result.get()
    order = random.Random(seed)

    def fate(request):
        if request.rank == die and type(request).__name__ == "PartsHeld":
            return "die"
        return "twice" if order.random() < twice else "live"

    ranks = save_ranks(new, 4, storage.url, options=FEW, staged=True, nodes=["x", "x", "y", "y"])
    results = run_ranks(ranks, choose=order.randrange, crash_at=crash_at, fate=fate)
    found = load_state(storage, new)
    is_new = same_state(found, new)
    event(f"{is_new=}, {die is None=}")
    assert is_new or same_state(found, old)
    for result in results:
        assert result.error is None or isinstance(result.error, CheckpointError)
        assert is_new or result.value is None
    if die is not None:
        # Its share was handed over, but not written: nobody else has its bytes here.
        assert not is_new
    for result in run_ranks(save_ranks(old, 3, storage.url, session="after")):
        result.get()
    assert same_state(old, load_state(storage, old))
    assert len({key.split(".")[1] for key in data_files(storage)}) == 1
