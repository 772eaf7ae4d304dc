"""Ranks that hold numpy arrays: what the protocol tests save and load instead of torch tensors.

A state is a mapping of names to numpy arrays and to objects (anything else). Tensors named
`rep.*` are replicated on every rank; others are cut over the ranks along their longest dimension,
as unevenly as `numpy.array_split` cuts.
"""

from __future__ import annotations

import zlib

import numpy as np

from ray_dcp.errors import MissingKeyError
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.plan.columns import ColumnsBuilder
from ray_dcp.plan.reading import Wanted
from ray_dcp.protocol.messages import OpKey, Target
from ray_dcp.runtime.inline import run_ranks
from ray_dcp.runtime.rank import load_rank, save_rank


def box_of(name, array, rank, world_size):
    """Returns offset and size of the part of `array` that a rank holds."""
    if name.startswith("rep.") or array.ndim == 0:
        return (0,) * array.ndim, array.shape
    dim = int(np.argmax(array.shape))
    bounds = np.linspace(0, array.shape[dim], world_size + 1).astype(int)
    offset, size = [0] * array.ndim, list(array.shape)
    offset[dim] = int(bounds[rank])
    size[dim] = int(bounds[rank + 1] - bounds[rank])
    return tuple(offset), tuple(size)


def cut(array, offset, size):
    return np.ascontiguousarray(
        array[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
    )


class NumpyCapture:
    """Implements `ray_dcp.runtime.rank.Captured`."""

    warnings = ()

    def __init__(self, state, rank, world_size):
        builder = ColumnsBuilder()
        self._items = []
        for name, value in state.items():
            if not isinstance(value, np.ndarray):
                data = repr(value).encode()
                builder.object(name, value=zlib.crc32(data) + 1)
                self._items.append(data)
                continue
            offset, size = box_of(name, value, rank, world_size)
            piece = cut(value, offset, size)
            builder.tensor(
                name, value.dtype.name, value.shape, offset=offset, size=size,
                splittable=value.nbytes > 4096,
            )  # fmt: skip
            self._items.append(piece)
        self.columns = builder.build()

    def source(self, row):
        return memoryview(self._items[row].reshape(-1).view(np.uint8))

    def deferred(self, row):
        return self._items[row]


class NumpyWork:
    """Implements `ray_dcp.runtime.rank.LoadWork`: fills arrays shaped like those of a state."""

    def __init__(self, checkpoint, shapes, rank, world_size):
        table = checkpoint.table
        index = {name: row for row, name in enumerate(table.names)}
        missing = [name for name in shapes if name not in index]
        if missing:
            raise MissingKeyError(f"missing {missing}", key=missing[0])
        self.state, self.boxes, self._buffers, self.names = {}, {}, [], []
        rows = []
        for name, like in shapes.items():
            if not isinstance(like, np.ndarray):
                continue
            offset, size = box_of(name, like, rank, world_size)
            self.boxes[name] = offset
            self._buffers.append(np.full(size, 0x77, dtype=like.dtype))
            self.names.append(name)
            rows.append((index[name], offset, size, like.dtype.itemsize))
        width = table.shape.shape[1]
        pad_off = np.zeros((len(rows), width), np.int64)
        pad_size = np.ones((len(rows), width), np.int64)
        for row, (_, offset, size, _) in enumerate(rows):
            pad_off[row, : len(offset)] = offset
            pad_size[row, : len(size)] = size
        self.wanted = Wanted(
            np.array([row[0] for row in rows], np.int32), pad_off, pad_size,
            np.array([row[3] for row in rows], np.int64),
        )  # fmt: skip
        self.objects = []
        for name, like in shapes.items():
            if not isinstance(like, np.ndarray):
                (chunk,) = np.flatnonzero(table.tensor == index[name]).tolist()
                self.objects.append((chunk, lambda data, name=name: self._place(name, data)))
        self.sink = self
        self.dones = []
        self.finished = False

    def buffer(self, row):
        return memoryview(self._buffers[row].reshape(-1).view(np.uint8))

    def done(self, row):
        self.dones.append(row)

    def _place(self, name, data):
        self.state[name] = data

    def place_item(self, chunk, data):
        raise AssertionError("numpy ranks hold no opaque chunks")

    def check_coverage(self, plan):
        assert plan.uncovered == ()

    def finish(self):
        assert sorted(self.dones) == list(range(len(self._buffers)))
        self.state.update(zip(self.names, self._buffers, strict=True))
        self.finished = True

    def check(self, state):
        """Compares all that was loaded with the state that was saved."""
        assert self.finished
        for name, value in state.items():
            if isinstance(value, np.ndarray):
                piece = self.state[name]
                np.testing.assert_array_equal(
                    piece, cut(value, self.boxes[name], piece.shape), err_msg=name
                )
            else:
                assert self.state[name] == repr(value).encode()


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
