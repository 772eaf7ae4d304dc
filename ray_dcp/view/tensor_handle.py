"""`TensorHandle`: a stored tensor. Indexing reads only the selected part.

`select` converts a basic index of numpy (integers, slices of any step, `...`) to the box to read.
Masks and index arrays are not supported, as they would read scattered elements. `io.reader` reads
and verifies the bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_dcp.core.dtypes import NUMPY_DTYPES, itemsize_of
from ray_dcp.core.values import ChunkTable, Int64Array, Kind
from ray_dcp.errors import CoverageError, DamagedCheckpointError, InvalidRequestError
from ray_dcp.io.checkpoint import Checkpoint
from ray_dcp.io.reader import read_chunks, read_item
from ray_dcp.options import LoadOptions
from ray_dcp.planning.reads import Wanted, plan_reads
from ray_dcp.store.storage import Storage
from ray_dcp.view.shard_map import shard_layout, stored_boxes

_SLAB_BYTES = 32 << 20
"""Length of the parts in which whole tensors are read, in bytes."""


@dataclass(frozen=True)
class Selection:
    """The smallest box that contains the selected elements, and the index to apply to it."""

    offset: tuple[int, ...]
    """Start of the box in each dimension."""
    size: tuple[int, ...]
    """Length of the box in each dimension."""
    rest: tuple[int | slice, ...]
    """Index to apply to the array of the box: slices with steps, and 0 to drop a dimension."""


def select(index: Any, shape: tuple[int, ...]) -> Selection:
    """Returns the box of a tensor that an index selects from.

    Args:
        index: Argument of `__getitem__`.
        shape: Global shape of the tensor.

    Raises:
        InvalidRequestError: There are too many indices, or one is out of bounds or not supported.

    Examples:
        >>> select((slice(2, 8, 3), 1), (10, 4))
        Selection(offset=(2, 1), size=(4, 1), rest=(slice(None, None, 3), 0))
    """
    parts = _complete(index if isinstance(index, tuple) else (index,), shape)
    pairs = zip(parts, shape, strict=True)
    chosen = [_index_dimension(part, length, axis) for axis, (part, length) in enumerate(pairs)]
    offset, size, rest = zip(*chosen, strict=True) if chosen else ((), (), ())
    return Selection(offset, size, rest)


def _complete(index: tuple[Any, ...], shape: tuple[int, ...]) -> list[Any]:
    """Returns one index per dimension, with `...` expanded."""
    where = [i for i, part in enumerate(index) if part is Ellipsis]
    given = len(index) - len(where)
    if len(where) > 1 or given > len(shape):
        raise InvalidRequestError(
            f"expected at most {len(shape)} indices and one '...' for a tensor of shape "
            f"{shape}, but found {given} indices and {len(where)} times '...'"
        )
    at = where[0] if where else given
    missing = [slice(None)] * (len(shape) - given)
    return [*index[:at], *missing, *index[at + len(where) :]]


def _index_dimension(part: Any, length: int, axis: int) -> tuple[int, int, int | slice]:
    """Returns start and length of the box in one dimension, and the index to apply to it."""
    try:
        found = range(length)[operator.index(part) if type(part) is not slice else part]
        if isinstance(part, bool):
            raise TypeError
    except IndexError:
        raise InvalidRequestError(
            f"index {part} is out of bounds for dimension {axis}, which has length {length}"
        ) from None
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"dimension {axis} can't be sliced by {part}: {error}"
            if isinstance(part, slice)
            else f"expected an integer, a slice or '...' for dimension {axis}, but found "
            f"{type(part).__name__}; read a slice and index the array that it gives"
        ) from None
    if isinstance(found, int):
        return found, 1, 0
    if not found:
        return 0, 0, slice(None)
    low, high = min(found[0], found[-1]), max(found[0], found[-1])
    return low, high - low + 1, slice(None) if found.step == 1 else slice(None, None, found.step)


@dataclass(frozen=True)
class TensorInfo:
    """Properties of a stored tensor, from the chunk table."""

    shape: tuple[int, ...]
    """Global shape."""
    dtype: str
    """Name of the torch dtype, without `torch.`."""
    num_bytes: int
    """Number of bytes of the whole tensor."""
    num_chunks: int
    """Number of chunks in which the tensor is stored."""
    path: tuple[str | int, ...] | None
    """Path in the nested state dict; None if unknown."""


class TensorHandle:
    """A stored tensor. Indexing reads and verifies only the selected part.

    `handle[2:5]` returns a numpy array, or a torch tensor if numpy lacks the dtype (bfloat16,
    float8, …). `handle[...]` returns the whole tensor. The enclosing box, extended to whole
    checksum blocks, is read.

    Args:
        storage: Storage of the checkpoint.
        checkpoint: The checkpoint.
        tensor: Index of the tensor in the `names` of the chunk table.
        info: Properties of the tensor.
    """

    def __init__(
        self,
        storage: Storage,
        checkpoint: Checkpoint,
        tensor: int,
        info: TensorInfo,
    ) -> None:
        self._storage = storage
        self._checkpoint = checkpoint
        self._table = checkpoint.table
        self._tensor = tensor
        self._info = info

    @property
    def name(self) -> str:
        """FQN."""
        return self._table.names[self._tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self._info.shape

    @property
    def dtype(self) -> str:
        """Name of the torch dtype, without `torch.`."""
        return self._info.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._info.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise InvalidRequestError(f"{self.name!r} has no dimensions, hence no length; use [()]")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"TensorHandle({self.name!r}, shape={self.shape}, dtype={self.dtype!r})"

    def _repr_html_(self) -> str:
        boxes = stored_boxes(self._table, self._tensor)
        return shard_layout(boxes, self.name, self.dtype, self._info.num_bytes).html

    def __getitem__(self, index: Any) -> Any:
        """Returns the selected part: a numpy array, or a torch tensor if numpy lacks the dtype.

        Args:
            index: Integers, slices of any step and `...`.

        Raises:
            InvalidRequestError: The index is out of bounds or not supported.
            DamagedCheckpointError: The stored bytes do not match their checksums.
            CoverageError: The checkpoint lacks some of the selected elements.
            StorageError: The storage failed.
        """
        selected = self._select(index, "i")
        if selected is None:
            return self._load_by_torch()[index]
        if self.dtype in NUMPY_DTYPES:
            return selected
        import torch

        # Why: numpy regards a reversed dimension of length 1 as C order, torch does not.
        if min(selected.strides, default=0) < 0:
            selected = selected.copy()
        return torch.from_numpy(selected).view(getattr(torch, self.dtype))

    @property
    def is_opaque(self) -> bool:
        """Whether only `torch.load` can read the stored bytes."""
        return bool(self._table.kind[self._tensor] == Kind.OPAQUE)

    def raw(self, index: Any) -> npt.NDArray[Any]:
        """Returns the selected part as a numpy array; needs no torch.

        Args:
            index: Index as for `handle[index]`.

        Returns:
            An array of the tensor's dtype, or of unsigned integers of equal length if numpy lacks
            the dtype.

        Raises:
            InvalidRequestError: Only `torch.load` can read the stored bytes.
            CheckpointError: As for `handle[index]`.
        """
        selected = self._select(index, "u")
        if selected is None:
            raise InvalidRequestError(
                f"{self.name!r} is a pickled tensor subclass; index the handle instead",
                key=self.name,
            )
        return selected

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """Returns the whole tensor as a numpy array.

        Raises:
            InvalidRequestError: numpy lacks the dtype, or `copy` is False.
        """
        if self.dtype not in NUMPY_DTYPES:
            raise InvalidRequestError(
                f"numpy has no dtype {self.dtype} for {self.name!r}; index the handle instead, "
                "handle[...] gives a torch tensor"
            )
        if copy is False:
            raise InvalidRequestError(f"{self.name!r} lies on storage: reading it makes a copy")
        return np.asarray(self[...], dtype=dtype)

    def _select(self, index: Any, stands_in: str) -> npt.NDArray[Any] | None:
        """Returns the selected part; None if only `torch.load` can read the stored bytes.

        Args:
            index: See `select`.
            stands_in: Kind of integers that replace a dtype that numpy lacks: `"i"` or `"u"`.
        """
        selection = select(index, self.shape)
        if self.is_opaque:
            return None
        in_numpy = self.dtype in NUMPY_DTYPES
        dtype = self.dtype if in_numpy else f"{stands_in}{itemsize_of(self.dtype)}"
        box: npt.NDArray[Any] = np.empty(selection.size, dtype)
        width = self._table.shape.shape[1]
        padding = width - self.ndim
        wanted = Wanted(
            tensor=np.array([self._tensor], np.int32),
            offset=np.array([[*selection.offset, *[0] * padding]], np.int64),
            size=np.array([[*selection.size, *[1] * padding]], np.int64),
            itemsize=np.array([box.itemsize], np.int64),
        )
        # Why only the tensor's own: a plan for a few rows would look at all chunks otherwise.
        plan = plan_reads(self._own_table, replace(wanted, tensor=np.zeros(1, np.int32)))
        plan = replace(plan, chunk=self._chunks[plan.chunk].astype(np.int32))
        if plan.uncovered:
            raise CoverageError(
                f"expected every element of {self.name!r} to be stored, but "
                f"{plan.uncovered[0][1]} bytes of the selected part are in no chunk; load another "
                "checkpoint",
                checkpoint_id=self._storage.url,
                key=self.name,
            )
        self._checkpoint.know_checks(plan.chunk.tolist())
        sink = _OneTarget(box)
        options = LoadOptions()
        stats = read_chunks(self._storage, self._table, plan, wanted, sink, options=options)
        return None if stats.opaque else np.asarray(box[selection.rest], order="C")

    @cached_property
    def _chunks(self) -> Int64Array:
        """The chunks of the tensor."""
        return np.flatnonzero(self._table.tensor == self._tensor)

    @cached_property
    def _own_table(self) -> ChunkTable:
        """The places of these chunks, as the table of a single tensor without checksums."""
        columns = ("offset", "size", "file", "item_offset", "payload_offset")
        part = {name: getattr(self._table, name)[self._chunks] for name in columns}
        tensor = np.zeros(len(self._chunks), np.int32)
        return replace(self._table, names=(self.name,), tensor=tensor, **part)

    def _load_by_torch(self) -> Any:
        """Returns a tensor that only `torch.load` can read."""
        chunks = self._chunks
        if len(chunks) != 1:
            raise InvalidRequestError(
                f"{self.name!r} is stored as {len(chunks)} pickled chunks of a tensor subclass, "
                "which a view can't put together; read it with ray_dcp.load",
                key=self.name,
            )
        from ray_dcp.torch_adapter.objects import load_object

        self._checkpoint.know_checks(chunks.tolist())
        data = read_item(
            self._storage, self._table, int(chunks[0]), transforms=self._checkpoint.transforms
        )
        value = load_object(data, fqn=self.name)
        if tuple(getattr(value, "shape", ())) != self.shape:
            raise DamagedCheckpointError(
                f"expected a tensor of shape {self.shape} under {self.name!r}, found "
                f"{type(value).__name__}; load an earlier checkpoint",
                checkpoint_id=self._storage.url,
                key=self.name,
            )
        return value


def parts_of(shape: tuple[int, ...]) -> list[Any]:
    """Returns indices that divide a tensor into parts of up to 32 MiB, or one row."""
    if not shape:
        return [...]
    rows = max(1, _SLAB_BYTES // max(prod(shape[1:]) * 8, 1))
    return [slice(low, min(low + rows, shape[0])) for low in range(0, shape[0], rows)]


class _OneTarget:
    """Implements `TargetSink` for one row."""

    def __init__(self, target: npt.NDArray[Any]) -> None:
        self._buffer = target.reshape(-1).view(np.uint8).data

    def buffer(self, row: int) -> memoryview:
        """See `TargetSink.buffer`."""
        return self._buffer

    def done(self, row: int) -> None:
        """Does nothing: the caller waits for all rows."""
