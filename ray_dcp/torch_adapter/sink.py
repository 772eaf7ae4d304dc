"""The memory that loaded bytes go into: a target tensor's own where possible, else a copy for now.

`Boxes` collects the boxes that a load wants, one by one or many at once, and the sink of their
bytes. A target that has no memory (`meta`), or another dtype than is to be kept, gets a new tensor
in its place. `targets` decides which tensors are targets, and of which boxes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ray_dcp.core.values import Int64Array, padded, widen
from ray_dcp.errors import UnsupportedValueError
from ray_dcp.planning.reads import Wanted
from ray_dcp.torch_adapter import device_copy
from ray_dcp.torch_adapter.checkpointable import copy_fields, parts
from ray_dcp.torch_adapter.overlaps import Part, sharing
from ray_dcp.torch_adapter.shards import Layouts, sharded
from ray_dcp.torch_adapter.subclasses import class_name, copy_into, place
from ray_dcp.torch_adapter.tensors import (
    dtype_name,
    host_bytes,
    is_plain,
    lost_memory_within,
    unsupported_reason,
    writable_bytes,
)

_copy_memory = ctypes.PyDLL(None).memmove
# Why PyDLL: a copy of a few KB does not pay for giving up Python's global lock and taking it again.
_copy_memory.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy_memory.restype = None


class Fresh:
    """A meta tensor that gets memory when its first byte arrives.

    Args:
        make: Returns the new value of the state dict and the local tensors of its boxes.
    """

    def __init__(self, make: Callable[[], tuple[Any, tuple[torch.Tensor, ...]]]) -> None:
        self._make = make
        self._made: tuple[Any, tuple[torch.Tensor, ...]] | None = None
        self._lock = threading.Lock()

    def take(self, made: torch.Tensor) -> bool:
        """Makes a tensor the new value, if there is none yet; returns whether it is."""
        with self._lock:
            if self._made is None:
                self._made = made, (made,)
                return True
            return False

    @property
    def value(self) -> Any:
        """What takes the meta tensor's place."""
        return self._get()[0]

    def tensor(self, index: int) -> torch.Tensor:
        """Returns the local tensor of the index-th box."""
        return self._get()[1][index]

    def _get(self) -> tuple[Any, tuple[torch.Tensor, ...]]:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made


Taker = Callable[[torch.Tensor], bool]
"""Takes a stored tensor, or makes a target for its parts; returns whether it is the target."""


class AsStored(torch.Tensor):
    """A target without memory that becomes what is stored, whatever its class."""

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype) -> AsStored:
        """Returns one of this shape and dtype."""
        return torch.empty(shape, dtype=dtype, device="meta").as_subclass(AsStored)


_PINNED_BYTES = 256 << 20
"""Rows for devices up to this length go through pinned memory, which torch keeps for the next."""
_MOST_UNDER_WAY_BYTES = 512 << 20
"""What waits for a device in host memory, beside the rows that are being read."""


class TensorSink:
    """Buffers of wanted rows; see `io.reader.TargetSink`. Made in the thread of the load's caller.

    A row whose target is a contiguous CPU tensor of the stored dtype is read in place. For any
    other a CPU tensor of the stored dtype is made when it is first asked for, copied to the target
    by `done`, and freed. Copies to devices only begin there, on a stream of their own, behind what
    the caller's had been given; `drain` waits for them.

    Attributes:
        names: FQN of each row, for messages.
        casts: `(FQN, stored, target)` of what is rounded on the way.
        policy: `LoadOptions.dtype`, for what is of a class of its own.
    """

    def __init__(self) -> None:
        self._driver = device_copy.CUDA
        self._marks: dict[torch.device, Any] = {}
        self._under_way: list[torch.Tensor] = []
        self._tensors: list[Any] = []
        self._stored: list[Any] = []
        self._direct: list[bool] = []
        self._temporary: dict[int, torch.Tensor] = {}
        self._takers: dict[int, Taker] = {}
        self._lock = threading.Lock()
        self.names: Sequence[str] = ()
        self.casts: dict[tuple[str, str, str], None] = {}
        self.policy = "widen"

    def __len__(self) -> int:
        return len(self._tensors)

    def add(self, tensor: torch.Tensor, stored: torch.dtype) -> bool:
        """Appends a row with this target, whose box is the whole tensor.

        Returns:
            Whether it will be read in place.
        """
        direct = _in_place(tensor, stored)
        if tensor.device not in self._marks and self._driver.has(tensor):
            self._marks[tensor.device] = self._driver.now(tensor.device)
        self._tensors.append(tensor)
        self._stored.append(stored)
        self._direct.append(direct)
        return direct

    def add_direct(self, tensors: Sequence[torch.Tensor]) -> None:
        """Appends rows like `add`, for plain tensors of the stored dtypes that are `is_direct`."""
        self._tensors += tensors
        self._stored += [None] * len(tensors)  # Why: nobody asks for theirs.
        self._direct += [True] * len(tensors)

    def add_late(
        self,
        make: Callable[[], torch.Tensor],
        stored: torch.dtype,
        taker: Taker | None = None,
    ) -> None:
        """Appends a row whose target `make` returns when it is first needed.

        Args:
            make: Returns it.
            stored: Dtype of the bytes.
            taker: Is asked first when a tensor of a class of its own comes.
        """
        if taker is not None:
            self._takers[len(self)] = taker
        self._tensors.append(make)
        self._stored.append(stored)
        self._direct.append(False)

    def sharing(
        self, num_bytes: Int64Array, other: TensorSink, others_bytes: Int64Array
    ) -> list[list[Part]]:
        """Returns groups of rows whose targets share memory; see `overlaps.sharing`.

        Args:
            num_bytes: int64[n], of each row as stored.
            other: A sink whose rows are counted on from those of this one.
            others_bytes: int64[m], of each of its rows.
        """
        return sharing(
            [*self._tensors, *other._tensors],
            [*self._direct, *other._direct],
            np.concatenate([num_bytes, others_bytes]),
        )

    def buffer(self, row: int) -> memoryview:
        """Returns the writable bytes of a row; the same memory until `done`."""
        if self._direct[row]:
            return host_bytes(self._tensors[row])
        return writable_bytes(self.region(row))

    def put_many(
        self,
        rows: Sequence[int],
        source: memoryview,
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> list[int]:
        """Fills whole rows that are read in place; see `io.reader.ManySink`.

        Complexity: 0.8 us for a small tensor.
        """
        tensors, direct = self._tensors, self._direct
        first, length = np.frombuffer(source, np.uint8).ctypes.data, len(source)
        left = []
        for index, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            tensor = tensors[row]
            # Why again: somebody may have taken the memory from the tensor meanwhile.
            if (
                direct[row]
                and tensor.is_cpu
                and tensor.nbytes == count
                and 0 <= start <= length - count
                and (place := tensor.data_ptr())
            ):
                _copy_memory(place, first + start, count)
            else:
                left.append(index)
        return left

    def done(self, row: int) -> None:
        """Copies a row that could not be read in place to its target."""
        if self._direct[row]:
            return
        with self._lock:
            temporary = self._temporary.pop(row, None)
        if temporary is not None:
            self._put(row, temporary)

    def _put(self, row: int, source: torch.Tensor) -> None:
        target = self._tensors[row]
        if not is_plain(target):
            self.place(row, target, source)
            return
        if target.device not in self._marks or not self._driver.has(target):
            copy_into(target, source)
            return
        stream = self._driver.stream(target.device, self._marks[target.device])
        self._driver.give(stream, partial(copy_into, target, source, wait=False))
        with self._lock:
            self._under_way.append(source)
            is_full = sum(one.nbytes for one in self._under_way) > _MOST_UNDER_WAY_BYTES
        if is_full:
            self.drain()

    def place(self, row: int, target: torch.Tensor, source: torch.Tensor, **parts: Any) -> None:
        """Copies into a target of a row where one of both is of a class of its own; see `place`."""
        fqn = self.names[row]
        # Why: a target that is made here was not chosen by somebody who accepts what it rounds.
        policy = "widen" if row in self._takers else self.policy
        if place(target, source, fqn, policy=policy, **parts):
            self.casts[fqn, class_name(source), class_name(target)] = None

    def afresh(self, row: int) -> torch.Tensor:
        """Returns the target of a row, looked up once more."""
        return self.target(row)

    def takes(self, row: int, stored: torch.Tensor) -> bool:
        """Whether a tensor of a class of its own, all or a part of the row's, is the target now."""
        taker = self._takers.get(row)
        return taker is not None and taker(stored)

    def is_begun(self, row: int) -> bool:
        """Whether plain bytes of a row that is not read in place have come."""
        return row in self._temporary

    def drain(self) -> None:
        """Returns when all that `done` began is in its target."""
        with self._lock:
            # Kept until the end: it is what the devices read.
            begun, self._under_way = self._under_way, []
        for device, mark in self._marks.items() if begun else ():
            self._driver.drain(device, self._driver.stream(device, mark))

    def region(self, row: int) -> torch.Tensor:
        """Returns the tensor that `buffer` shows the bytes of."""
        with self._lock:
            if row in self._temporary:
                return self._temporary[row]
            target = self._made(row)
            if self._direct[row]:
                plain: torch.Tensor = target.detach()
                return plain
            stored = self._stored[row]
            pinned = target.is_cuda and target.numel() * stored.itemsize <= _PINNED_BYTES
            made = torch.empty(target.shape, dtype=stored, device="cpu", pin_memory=pinned)
            self._temporary[row] = made
            return made

    def target(self, row: int) -> torch.Tensor:
        """Returns the tensor that the row is for."""
        with self._lock:
            return self._made(row)

    def _made(self, row: int) -> torch.Tensor:
        target: Any = self._tensors[row]
        if not isinstance(target, torch.Tensor):
            target = self._tensors[row] = target()
            self._direct[row] = _in_place(target, self._stored[row])
        made: torch.Tensor = target
        return made

    def finish(self) -> None:
        """Does every row that is not done, and tells autograd what was written behind its back."""
        for row in list(self._temporary):
            self.done(row)
        self.drain()
        both = zip(self._tensors, self._direct, strict=True)
        increment_version([tensor for tensor, direct in both if direct])


def increment_version(changed: list[torch.Tensor]) -> None:
    """Reports to autograd that tensors were written to behind its back."""
    try:
        torch.autograd.graph.increment_version(changed)
    except RuntimeError:  # Inference tensors have no version; a step more of others is no harm.
        tracked = [tensor for tensor in changed if not tensor.is_inference()]
        torch.autograd.graph.increment_version(tracked)


def _in_place(tensor: torch.Tensor, stored: torch.dtype) -> bool:
    if tensor.dtype != stored or not is_plain(tensor):
        return False
    return tensor.is_cpu and device_copy.is_direct(tensor)


def default_device() -> torch.device:
    """Returns what the process group works on, or torch's default device."""
    return _current_device(_default_type())


def _current_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _default_type() -> str:
    if dist.is_available() and dist.is_initialized():
        types = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
        return "cpu" if "cpu" in types else types[0]
    default = torch.get_default_device().type
    return "cpu" if default == "meta" else default


def target_problem(tensor: torch.Tensor) -> str | None:
    """Returns why nothing can be loaded into a tensor that is not on the meta device, else None."""
    if not is_plain(tensor):
        return lost_memory_within(tensor)
    reason = unsupported_reason(tensor)
    if reason is None and any(
        stride == 0 and length > 1
        for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        reason = "is expanded: several of its elements share one place in memory"
    return reason


def fresh_plain(
    tensor: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Returns a new tensor like a plain one, as what it is and as the parts to fill.

    Args:
        tensor: On any device; one on the meta device gets memory.
        dtype: Of the new one.
    """
    is_any = type(tensor) is AsStored
    made = torch.empty(tensor.shape, dtype=dtype) if is_any else _fresh(tensor, dtype, None)
    if isinstance(tensor, torch.nn.Parameter):
        may_learn = tensor.requires_grad and (dtype.is_floating_point or dtype.is_complex)
        return torch.nn.Parameter(made, requires_grad=may_learn), (made,)
    return made, (made,)


def fresh_taker(
    template: torch.Tensor, is_cast: bool, dtype: torch.dtype, fqn: str, fresh: Fresh
) -> Taker:
    """Returns what makes stored tensors of a class of their own the value of a meta tensor.

    Args:
        template: The meta tensor.
        is_cast: Whether another dtype than is saved takes its place.
        dtype: Of what takes its place.
        fqn: For messages.
        fresh: Its place.
    """

    def take(stored: torch.Tensor) -> bool:
        if type(template) not in (AsStored, type(stored)) or is_plain(stored):
            return False
        if is_cast:
            if type(template) is AsStored:
                raise UnsupportedValueError(
                    f"{fqn!r} is a {class_name(stored)}, which can't be cast to "
                    f"{dtype_name(dtype)} here: leave dtype out, or this name",
                    key=fqn,
                )
            return False
        is_all = stored.shape == template.shape
        try:
            made = stored if is_all else stored.new_empty(template.shape)
        except Exception:  # noqa: BLE001 - classes of users raise what they like
            return False  # A plain tensor gets what it shows, or the error says why it can't.
        if type(template) is not AsStored:
            made = made.to(default_device())
            if isinstance(template, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=template.requires_grad)
        return fresh.take(made) and is_all

    return take


def fresh_dtensor(
    tensor: DTensor, fqn: str, dtype: torch.dtype
) -> tuple[DTensor, tuple[torch.Tensor, ...]]:
    """Returns a new DTensor like one, as what it is and as the parts to fill.

    Args:
        tensor: On any device; one on the meta device gets memory.
        fqn: For messages.
        dtype: Of the new one.
    """
    # Shape and stride are told, as the tensor may be sharded unevenly.
    made = DTensor.from_local(
        _fresh(tensor.to_local(), dtype, tensor.device_mesh.device_type),
        device_mesh=tensor.device_mesh,
        placements=tensor.placements,
        shape=tensor.size(),
        stride=tensor.stride(),
    )
    return made, sharded(made, fqn, Layouts(), saving=False).tensors


def fresh_parts(
    tensor: torch.Tensor, fqn: str, dtype: torch.dtype
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Returns a new tensor that holds the same parts, as what it is and as the parts to fill.

    Args:
        tensor: A `CheckpointableTensor` on any device.
        fqn: For messages.
        dtype: Of the new one.
    """
    made, _ = fresh_plain(tensor, dtype)
    copy_fields(tensor, made)
    return made, tuple(part for _, part in parts(made, fqn))


def _fresh(tensor: torch.Tensor, dtype: torch.dtype, device_type: str | None) -> torch.Tensor:
    if not tensor.is_meta:
        return torch.empty_like(tensor, dtype=dtype, requires_grad=False)
    if dtype != tensor.dtype:
        tensor = torch.empty_like(tensor, dtype=dtype)
    device = default_device() if device_type is None else _current_device(device_type)
    return torch.empty_like(tensor, device=device)


class Boxes:
    """Wanted boxes in the making, and the sink of their bytes.

    Args:
        itemsizes: Bytes of a stored element, by tensor; of those that `add` is called for.
        sink: Of the bytes.
    """

    def __init__(self, itemsizes: Mapping[int, int], sink: TensorSink | None = None) -> None:
        self.sink = TensorSink() if sink is None else sink
        self._itemsizes = itemsizes
        self._tensor: list[int] = []
        self._offset: list[tuple[int, ...]] = []
        self._size: list[tuple[int, ...]] = []
        self._ended: list[Wanted] = []

    def add_direct(
        self,
        tensors: Int64Array,
        targets: Sequence[torch.Tensor],
        shape: Int64Array,
        itemsize: Int64Array,
    ) -> None:
        """Appends targets that are read in place, whole, and their boxes.

        Args:
            tensors: int64[n].
            targets: Of each; the empty ones are left out.
            shape: int64[n, D], theirs, then 1.
            itemsize: int64[n], of an element.
        """
        full = (shape > 0).all(axis=1)
        if not full.all():
            targets = [targets[row] for row in np.flatnonzero(full).tolist()]
            tensors, shape, itemsize = tensors[full], shape[full], itemsize[full]
        self._end()
        zeros = np.zeros_like(shape)
        self._ended.append(Wanted(tensors.astype(np.int32), zeros, shape, itemsize))
        self.sink.add_direct(targets)

    def add(self, tensor: int, offset: tuple[int, ...], size: tuple[int, ...]) -> None:
        """Appends the box of the next row of the sink."""
        self._tensor.append(tensor)
        self._offset.append(offset)
        self._size.append(size)

    def wanted(self) -> Wanted:
        """Returns the boxes as columns."""
        self._end()
        if len(self._ended) == 1:
            return self._ended[0]
        width = max(part.offset.shape[1] for part in self._ended)
        boxes = [widen(part.offset, part.size, width) for part in self._ended]
        return Wanted(
            np.concatenate([part.tensor for part in self._ended]),
            np.concatenate([offset for offset, _ in boxes]),
            np.concatenate([size for _, size in boxes]),
            np.concatenate([part.itemsize for part in self._ended]),
        )

    def _end(self) -> None:
        """Makes columns of what `add` was called for."""
        if not self._tensor and self._ended:
            return
        num = len(self._tensor)
        width = max(1, max(map(len, self._size), default=0))
        offset, size = padded(self._offset, width, 0), padded(self._size, width, 1)
        itemsize = np.fromiter(map(self._itemsizes.__getitem__, self._tensor), np.int64, num)
        self._ended.append(Wanted(np.array(self._tensor, np.int32), offset, size, itemsize))
        self._tensor, self._offset, self._size = [], [], []
