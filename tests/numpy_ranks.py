"""Ranks that hold numpy arrays: what the protocol tests save and load instead of torch tensors.

What a rank captures and wants is in `tests.crash.ranks`.
"""

from __future__ import annotations

import numpy as np

from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.protocol.messages import OpKey, Target
from ray_dcp.runtime.inline import run_ranks
from ray_dcp.runtime.rank import load_rank, save_rank
from tests.crash.array_states import ArrayCapture, ArrayWork


class NumpyCapture(ArrayCapture):
    """Stores of an object its `repr`, so that its bytes can be told by looking at them."""

    def dumped(self, value):
        return repr(value).encode()


class NumpyWork(ArrayWork):
    """Leaves objects as the bytes that are stored."""

    def loaded(self, data):
        return data

    def check(self, state):
        is_array = {name: isinstance(value, np.ndarray) for name, value in state.items()}
        super().check({name: value for name, value in state.items() if is_array[name]})
        for name, value in state.items():
            assert is_array[name] or self.state[name] == repr(value).encode()


def state_of(seed=0, **more):
    """Returns a state of uneven shapes: a scalar, empty and odd dimensions, replicas, objects."""
    rng = np.random.default_rng(seed)
    return {
        "a": rng.standard_normal((13, 7)).astype(np.float32),
        "b.weight": rng.integers(0, 255, (3, 29), dtype=np.uint8),
        "big": rng.standard_normal((67, 131)),
        "empty": np.zeros((0, 4), np.float32),
        "rep.bias": rng.standard_normal(5).astype(np.float16),
        "rep.large": rng.standard_normal((31, 40)),
        "rep.scalar": np.array(seed, np.int64),
        "step": {"step": seed},
        **more,
    }


def save_ranks(state, world_size, url, *, session="save", seq=0, options=None, states=None, **more):
    """Returns the generators of a save; `states` gives each rank a state of its own."""
    return [
        save_rank(
            OpKey(session, seq), rank=rank, world_size=world_size, target=Target(url),
            options=options or SaveOptions(),
            capture=lambda rank=rank: NumpyCapture(
                states[rank] if states else state, rank, world_size
            ),
            **more,
        )
        for rank in range(world_size)
    ]  # fmt: skip


def load_ranks(shapes, world_size, url, *, session="load", seq=0, options=None, **more):
    """Returns the generators of a load, and the list that will hold each rank's work."""
    works = [None] * world_size

    def plan(checkpoint, rank):
        works[rank] = NumpyWork(checkpoint, shapes, rank, world_size)
        return works[rank]

    ranks = [
        load_rank(
            OpKey(session, seq), rank=rank, world_size=world_size, target=Target(url),
            options=options or LoadOptions(), plan=lambda c, rank=rank: plan(c, rank), **more,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    return ranks, works


def save(state, world_size, url, **more):
    """Returns each rank's outcome of a save that works."""
    return [result.get() for result in run_ranks(save_ranks(state, world_size, url, **more))]


def load_and_check(state, world_size, url, **more):
    """Loads on some world size and compares every rank's part."""
    ranks, works = load_ranks(state, world_size, url, **more)
    results = [result.get() for result in run_ranks(ranks)]
    for work in works:
        work.check(state)
    return results


def loads_whole(url, states, world_size=2):
    """Returns the index of the one state that stands at a place, whole; None when none does.

    Raises:
        AssertionError: What stands there is a mixture.
        CheckpointError: It can't be loaded.
    """
    from ray_dcp.errors import CheckpointNotFoundError

    ranks, works = load_ranks(states[0], world_size, url)
    try:
        for result in run_ranks(ranks):
            result.get()
    except CheckpointNotFoundError:
        return None
    step = works[0].state["step"]
    (found,) = [i for i, state in enumerate(states) if repr(state["step"]).encode() == step]
    for work in works:
        work.check(states[found])
    return found
