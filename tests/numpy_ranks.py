"""Ranks that hold numpy arrays: what the protocol tests save and load instead of torch tensors.

What a rank captures and wants is in `tests.crash.ranks`.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from tests.crash import ranks
from tests.crash.array_states import ArrayCapture, ArrayWork, sample_state
from tests.inline_ranks import run_ranks


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
    state = sample_state(seed) | {"step": {"step": seed}}
    del state["note"]
    return state | more


save_ranks = partial(ranks.save_ranks, capture=NumpyCapture)
load_ranks = partial(ranks.load_ranks, work=NumpyWork)


def save(state, world_size, url, **more):
    """Returns each rank's outcome of a save that works."""
    return [result.get() for result in run_ranks(save_ranks(state, world_size, url, **more))]


def load_and_check(state, world_size, url, **more):
    """Loads on some world size and compares every rank's part."""
    loading, works = load_ranks(state, world_size, url, **more)
    results = [result.get() for result in run_ranks(loading)]
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

    loading, works = load_ranks(states[0], world_size, url)
    try:
        for result in run_ranks(loading):
            result.get()
    except CheckpointNotFoundError:
        return None
    step = works[0].state["step"]
    (found,) = [i for i, state in enumerate(states) if repr(state["step"]).encode() == step]
    for work in works:
        work.check(states[found])
    return found
