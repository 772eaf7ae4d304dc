"""States of numpy arrays and objects, and what a rank holds of one, wants of one and loads.

A state is a mapping of names to numpy arrays and to objects (anything else that `torch.save`
takes). Arrays named `rep.*` are replicated on every rank; others are cut over the ranks along
their longest dimension, as unevenly as `numpy.linspace` cuts. Saves and loads are in `ranks`.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ray_dcp.commit_protocol.messages import Untaken
from ray_dcp.core.columns import ColumnsBuilder
from ray_dcp.errors import MissingKeyError
from ray_dcp.io.checkpoint import Checkpoint
from ray_dcp.planning.reads import ReadPlan, Wanted
from ray_dcp.torch_adapter.targets import Targets

State = Mapping[str, Any]

GOLDEN_ARRAYS: State = {
    "w": np.arange(300, dtype=np.float32).reshape(20, 15),
    "rep.bias": np.arange(7, dtype=np.float16),
    "rep.scalar": np.array(7, np.int64),
    "empty": np.zeros((0, 4), np.float32),
}
"""What is in the checkpoints of arrays of `tests/golden`."""

Box = tuple[tuple[int, ...], tuple[int, ...]]


def sample_state(step: int, **more: object) -> dict[str, Any]:
    """Returns a state of uneven shapes: a scalar, an empty and odd dimensions, replicas, objects.

    Args:
        step: Any two steps differ in every value but the empty one.
        **more: Further values.
    """
    rng = np.random.default_rng(step)
    return {
        "a": rng.standard_normal((13, 7)).astype(np.float32),
        "b.weight": rng.integers(0, 255, (3, 29), dtype=np.uint8),
        "big": rng.standard_normal((67, 131)),
        "empty": np.zeros((0, 4), np.float32),
        "rep.bias": rng.standard_normal(5).astype(np.float16),
        "rep.large": rng.standard_normal((31, 40)),
        "rep.scalar": np.array(step, np.int64),
        "step": step,
        "note": f"step {step}",
        **more,
    }


def state_of(step: int = 0, **more: object) -> dict[str, Any]:
    """Returns `sample_state` with one object, which is no number, and further values."""
    state = sample_state(step) | {"step": {"step": step}}
    del state["note"]
    return state | more


def same_state(one: State, other: State) -> bool:
    """Returns whether two states have the same names, dtypes, shapes, bytes and objects."""
    return one.keys() == other.keys() and all(
        same_value(value, other[name]) for name, value in one.items()
    )


def same_value(one: Any, other: Any) -> bool:
    """Returns whether two values of states are the same, to the byte."""
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return type(one) is type(other) and bool(one == other)
    shape = (one.dtype, one.shape) == (other.dtype, other.shape)
    return shape and one.tobytes() == other.tobytes()


def box_of(name: str, array: NDArray[Any], rank: int, world_size: int) -> Box:
    """Returns offset and size of the part of an array that a rank holds."""
    if name.startswith("rep.") or array.ndim == 0:
        return (0,) * array.ndim, array.shape
    dim = int(np.argmax(array.shape))
    bounds = np.linspace(0, array.shape[dim], world_size + 1).astype(int)
    offset, size = [0] * array.ndim, list(array.shape)
    offset[dim] = int(bounds[rank])
    size[dim] = int(bounds[rank + 1] - bounds[rank])
    return tuple(offset), tuple(size)


class ArrayCapture:
    """What a rank holds of a state; implements `ray_dcp.rank.captured.Captured`.

    Args:
        state: Of all ranks.
        rank: Whose part.
        world_size: Number of ranks.
    """

    warnings = ()
    tied = None

    def __init__(self, state: State, rank: int, world_size: int) -> None:
        builder = ColumnsBuilder()
        self._items: list[Any] = []
        for name, value in state.items():
            if not isinstance(value, np.ndarray):
                file = io.BytesIO()
                torch.save(value, file)
                data = file.getvalue()
                builder.object(name, value=zlib.crc32(data) + 1)
                self._items.append(data)
                continue
            offset, size = box_of(name, value, rank, world_size)
            builder.tensor(
                name, value.dtype.name, value.shape, offset=offset, size=size,
                splittable=value.nbytes > 4096,
            )  # fmt: skip
            self._items.append(cut(value, offset, size))
        self.columns = builder.build()

    def source(self, row: int, /) -> memoryview:
        """Returns the bytes of an array."""
        return _bytes_of(self._items[row])

    def deferred(self, row: int, /) -> bytes:
        """Returns what is stored of an object."""
        data: bytes = self._items[row]
        return data


class ArrayWork:
    """What a rank wants of a checkpoint; implements `Targets`.

    Args:
        checkpoint: To load from.
        like: A state with the names, dtypes and shapes that are wanted.
        rank: Who loads.
        world_size: Number of ranks.

    Attributes:
        state: By name, what was loaded: the part of each array that the rank holds, and objects.
        boxes: By name, the offset of that part.
        dones: Rows of `wanted` that were read so far.

    Raises:
        MissingKeyError: The checkpoint lacks names.
    """

    def __init__(self, checkpoint: Checkpoint, like: State, rank: int, world_size: int) -> None:
        table = checkpoint.tensors
        index = {name: row for row, name in enumerate(table.names)}
        missing = [name for name in like if name not in index]
        if missing:
            raise MissingKeyError(f"missing {missing}", key=missing[0])
        arrays = {n: value for n, value in like.items() if isinstance(value, np.ndarray)}
        parts = {name: box_of(name, value, rank, world_size) for name, value in arrays.items()}
        self.state: dict[str, Any] = {}
        self.boxes = {name: offset for name, (offset, _) in parts.items()}
        self.finished = False
        self._names = list(arrays)
        self._buffers = [np.full(parts[n][1], 0x77, arrays[n].dtype) for n in arrays]
        self.dones: list[int] = []
        width = table.shape.shape[1]
        offsets = np.zeros((len(arrays), width), np.int64)
        sizes = np.ones((len(arrays), width), np.int64)
        for row, (offset, size) in enumerate(parts.values()):
            offsets[row, : len(offset)] = offset
            sizes[row, : len(size)] = size
        self.wanted = Wanted(
            np.array([index[name] for name in arrays], np.int32), offsets, sizes,
            np.array([value.dtype.itemsize for value in arrays.values()], np.int64),
        )  # fmt: skip
        self.sink = self
        rows = [index[name] for name in like if name not in arrays]
        chunks = checkpoint.narrow([self.wanted], rows).tensor
        self.objects: Sequence[tuple[int, Callable[[bytes], None]]] = [
            (int(np.flatnonzero(chunks == index[name])[0]), partial(self._place, name))
            for name in like
            if name not in arrays
        ]

    def buffer(self, row: int, /) -> memoryview:
        """See `TargetSink`."""
        return _bytes_of(self._buffers[row])

    def done(self, row: int, /) -> None:
        """See `TargetSink`."""
        self.dones.append(row)

    def place_item(self, chunk: int, data: bytes, /) -> None:
        """See `Targets`; arrays have raw bytes."""
        raise AssertionError(f"chunk {chunk} has no raw bytes, but every array has")

    untaken = None
    whole_items = ()

    def check_taken(self, untaken: Untaken, /) -> None:
        """See `Targets`; nobody has to take anything."""

    def check_coverage(self, plan: ReadPlan, /) -> None:
        """See `Targets`."""
        if plan.uncovered:
            raise AssertionError(f"not all that is wanted is stored: {plan.uncovered}")

    def trials(self) -> Iterator[Targets]:
        """See `Targets`; no two arrays share memory."""
        return iter(())

    def finish(self) -> None:
        """See `Targets`."""
        if sorted(self.dones) != list(range(len(self._buffers))):
            raise AssertionError(f"of {len(self._buffers)} arrays these were read: {self.dones}")
        self.state.update(zip(self._names, self._buffers, strict=True))
        self.finished = True

    def check(self, state: State) -> None:
        """Compares all that was loaded with the state that was saved.

        Raises:
            AssertionError: Something differs.
        """
        if not self.finished:
            raise AssertionError("the load was not finished")
        for name, value in state.items():
            found = self.state[name]
            if isinstance(value, np.ndarray):
                value = cut(value, self.boxes[name], found.shape)
            if not same_value(value, found):
                raise AssertionError(f"{name} was saved as {value!r}, and loaded as {found!r}")

    def _place(self, name: str, data: bytes) -> None:
        self.state[name] = torch.load(io.BytesIO(data), weights_only=True)


def cut(array: NDArray[Any], offset: Sequence[int], size: Sequence[int]) -> NDArray[Any]:
    """Returns a contiguous copy of a box of an array."""
    return np.ascontiguousarray(
        array[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
    ).reshape(size)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8).data)
