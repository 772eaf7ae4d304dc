"""The memory that a load writes to: the target tensor's own if possible, else a temporary copy.

`Boxes` collects the boxes that a load wants, one by one or many at once, and the sink of their
bytes. A target without memory (`meta`), or of a dtype that must not be kept, is replaced by a new
tensor. `load_plan` decides which tensors are targets, and of which boxes. `rows_that_share` finds
targets that share memory.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ray_dcp.core.values import Int64Array, padded, widen
from ray_dcp.errors import UnsupportedValueError
from ray_dcp.planning.reads import Wanted
from ray_dcp.torch_adapter import devices
from ray_dcp.torch_adapter.shards import as_sharded_like, copy_fields, is_sharded, sharded
from ray_dcp.torch_adapter.subclass_copy import class_name, copy_into, place
from ray_dcp.torch_adapter.tensors import (
    dtype_name,
    extent,
    host_bytes,
    is_checkpointable,
    is_direct,
    is_plain,
    lost_memory_within,
    may_overlap_itself,
    parts_with_memory,
    unsupported_reason,
    writable_bytes,
)

_copy_memory = ctypes.PyDLL(None).memmove
# Why PyDLL: for a copy of a few KB, releasing and taking the GIL costs more than the copy.
_copy_memory.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy_memory.restype = None


class Fresh:
    """The value for a meta tensor, created when its first byte arrives.

    Args:
        make: Returns the new value for the state dict.
        fqn: Name of the tensor, for messages.
    """

    def __init__(self, make: Callable[[], Any], fqn: str) -> None:
        self._make, self._fqn = make, fqn
        self._made: tuple[Any, Sequence[torch.Tensor]] | None = None
        self._lock = threading.Lock()

    def take(self, made: torch.Tensor) -> bool:
        """Makes a tensor the new value unless there is one; returns whether it is the new value."""
        with self._lock:
            if self._made is None:
                self._made = made, (made,)
                return True
            return False

    @property
    def value(self) -> Any:
        """The value that replaces the meta tensor."""
        return self._get()[0]

    def tensor(self, index: int) -> torch.Tensor:
        """Returns the local tensor of the box with this index."""
        return self._get()[1][index]

    def _get(self) -> tuple[Any, Sequence[torch.Tensor]]:
        with self._lock:
            if self._made is None:
                made = self._make()
                is_cut = is_sharded(made)
                parts = sharded(made, self._fqn, saving=False).tensors if is_cut else (made,)
                self._made = made, parts
            return self._made


Taker = Callable[[torch.Tensor], bool]
"""Accepts a stored tensor as the target, or makes a target for its parts; returns whether the
stored tensor is the target."""


class AsStored(torch.Tensor):
    """A target without memory that is replaced by the stored tensor, whatever its class."""

    place: torch.device | None = None
    """Device of the tensor that replaces it; None for torch's default device."""

    @staticmethod
    def of(
        shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
    ) -> AsStored:
        """Returns a target of this shape and dtype, for a tensor on a device."""
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(AsStored)
        made.place = device
        return made


_PINNED_BYTES = 256 << 20
"""Longest row for a device that goes through pinned memory, which torch keeps for the next one."""
_MOST_UNDER_WAY_BYTES = 512 << 20
"""Most host memory whose copies to devices are pending, beside the rows that are being read."""


class TensorSink:
    """Buffers of wanted rows; see `io.reader.TargetSink`.

    The sink is created in the thread of the load's caller. A row whose target is a contiguous CPU
    tensor of the stored dtype is read in place. For any other row, a CPU tensor of the stored dtype
    is created on first access, copied to the target by `done`, and freed. Copies to devices only
    start there, on a separate stream that follows the work of the caller's stream; `drain` waits
    for them.

    Attributes:
        targets: The target of each row; no tensor where it is created on first use.
        direct: Whether each row is read in place.
        names: FQN of each row, for messages.
        casts: `(FQN, stored, target)` of the rows whose values are rounded.
        policy: `LoadOptions.dtype`, for tensor subclasses.
    """

    def __init__(self) -> None:
        self._driver = devices.CUDA
        self._marks: dict[torch.device, Any] = {}
        self._under_way: list[torch.Tensor] = []
        self.targets: list[Any] = []
        self._stored: list[Any] = []
        self.direct: list[bool] = []
        self._temporary: dict[int, torch.Tensor] = {}
        self._takers: dict[int, Taker] = {}
        self._lock = threading.Lock()
        self.names: Sequence[str] = ()
        self.casts: dict[tuple[str, str, str], None] = {}
        self.policy = "widen"

    def __len__(self) -> int:
        return len(self.targets)

    def add(self, tensor: torch.Tensor, stored: torch.dtype) -> bool:
        """Appends a row with this target, whose box is the whole tensor.

        Returns:
            Whether the row will be read in place.
        """
        direct = _in_place(tensor, stored)
        if tensor.device not in self._marks and self._driver.has(tensor):
            self._marks[tensor.device] = self._driver.now(tensor.device)
        self.targets.append(tensor)
        self._stored.append(stored)
        self.direct.append(direct)
        return direct

    def add_direct(self, tensors: Sequence[torch.Tensor]) -> None:
        """Appends rows like `add`, for plain tensors of the stored dtypes that are `is_direct`."""
        self.targets += tensors
        self._stored += [None] * len(tensors)  # Why: the dtype of direct rows is not used.
        self.direct += [True] * len(tensors)

    def add_late(
        self,
        make: Callable[[], torch.Tensor],
        stored: torch.dtype,
        taker: Taker | None = None,
    ) -> None:
        """Appends a row whose target is created on first use.

        Args:
            make: Returns the target.
            stored: Dtype of the bytes.
            taker: Called first if the stored item is a tensor subclass.
        """
        if taker is not None:
            self._takers[len(self)] = taker
        self.targets.append(make)
        self._stored.append(stored)
        self.direct.append(False)

    def buffer(self, row: int) -> memoryview:
        """Returns the writable bytes of a row; the same memory until `done`."""
        if self.direct[row]:
            return host_bytes(self.targets[row])
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
        targets, direct = self.targets, self.direct
        first, length = np.frombuffer(source, np.uint8).ctypes.data, len(source)
        left = []
        for index, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            tensor = targets[row]
            # Why again: the tensor may have lost its memory meanwhile. *Careful*: a view of freed
            # memory has an address, that of its offset.
            if (
                direct[row]
                and tensor.is_cpu
                and tensor.nbytes == count
                and 0 <= start <= length - count
                and tensor.untyped_storage().nbytes()
                >= count + tensor.storage_offset() * tensor.itemsize
            ):
                _copy_memory(tensor.data_ptr(), first + start, count)
            else:
                left.append(index)
        return left

    def done(self, row: int) -> None:
        """Copies a row that could not be read in place to its target."""
        if self.direct[row]:
            return
        with self._lock:
            temporary = self._temporary.pop(row, None)
        if temporary is not None:
            self._put(row, temporary)

    def _put(self, row: int, source: torch.Tensor) -> None:
        target = self.targets[row]
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
        """Copies into a row's target if source or target is a tensor subclass; see `place`."""
        fqn = self.names[row]
        # Why: nobody chose the dtype of a target that is created here, or accepted its rounding.
        policy = "widen" if row in self._takers else self.policy
        if place(target, source, fqn, policy=policy, **parts):
            self.casts[fqn, class_name(source), class_name(target)] = None

    def afresh(self, row: int) -> torch.Tensor:
        """Returns the target of a row, looked up again."""
        return self.target(row)

    def takes(self, row: int, stored: torch.Tensor) -> bool:
        """Returns whether a stored tensor subclass, the row or a part of it, is now the target."""
        taker = self._takers.get(row)
        return taker is not None and taker(stored)

    def is_begun(self, row: int) -> bool:
        """Returns whether plain bytes have arrived for a row that is not read in place."""
        return row in self._temporary

    def drain(self) -> None:
        """Waits until all copies that `done` started have reached their targets."""
        with self._lock:
            # Kept until the end: the devices read from it.
            begun, self._under_way = self._under_way, []
        for device, mark in self._marks.items() if begun else ():
            self._driver.drain(device, self._driver.stream(device, mark))

    def region(self, row: int) -> torch.Tensor:
        """Returns the tensor whose bytes `buffer` returns."""
        with self._lock:
            if row in self._temporary:
                return self._temporary[row]
            target = self._materialize(row)
            if self.direct[row]:
                plain: torch.Tensor = target.detach()
                return plain
            stored = self._stored[row]
            pinned = target.is_cuda and target.numel() * stored.itemsize <= _PINNED_BYTES
            made = torch.empty(target.shape, dtype=stored, device="cpu", pin_memory=pinned)
            self._temporary[row] = made
            return made

    def target(self, row: int) -> torch.Tensor:
        """Returns the target tensor of a row."""
        with self._lock:
            return self._materialize(row)

    def _materialize(self, row: int) -> torch.Tensor:
        target: Any = self.targets[row]
        if not isinstance(target, torch.Tensor):
            target = self.targets[row] = target()
            self.direct[row] = _in_place(target, self._stored[row])
        made: torch.Tensor = target
        return made

    def finish(self) -> None:
        """Finishes every row that is not done, and reports the writes to autograd."""
        for row in list(self._temporary):
            self.done(row)
        self.drain()
        both = zip(self.targets, self.direct, strict=True)
        increment_version([tensor for tensor, direct in both if direct])


def increment_version(changed: list[torch.Tensor]) -> None:
    """Reports to autograd that tensors were written without its knowledge."""
    try:
        torch.autograd.graph.increment_version(changed)
    except RuntimeError:  # Inference tensors have no version; a second step is harmless.
        tracked = [tensor for tensor in changed if not tensor.is_inference()]
        torch.autograd.graph.increment_version(tracked)


def _in_place(tensor: torch.Tensor, stored: torch.dtype) -> bool:
    if tensor.dtype != stored or not is_plain(tensor):
        return False
    return tensor.is_cpu and is_direct(tensor)


def default_device() -> torch.device:
    """Returns the device of the process group, or torch's default device."""
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
    """Returns why no values can be loaded into a tensor not on the meta device, or None."""
    if not is_plain(tensor):
        return lost_memory_within(tensor)
    reason = unsupported_reason(tensor)
    if reason is None and any(
        stride == 0 and length > 1
        for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        reason = "is expanded: several of its elements share one place in memory"
    return reason


def fresh_value(template: Any, dtype: torch.dtype) -> Any:
    """Returns a new tensor, DTensor or `CheckpointableTensor` like a given one.

    Args:
        template: A value on any device; for the meta device the new one has memory.
        dtype: Dtype of the new value.
    """
    if isinstance(template, DTensor):
        local = _empty_like(template.to_local(), dtype, template.device_mesh.device_type)
        return as_sharded_like(local, template)
    if type(template) is AsStored:
        device = template.place or torch.get_default_device()
        return torch.empty(
            template.shape, dtype=dtype, device="cpu" if device.type == "meta" else device
        )
    made = _empty_like(template, dtype, None)
    if isinstance(template, torch.nn.Parameter):
        may_learn = template.requires_grad and (dtype.is_floating_point or dtype.is_complex)
        made = torch.nn.Parameter(made, requires_grad=may_learn)
    if is_checkpointable(template):
        copy_fields(template, made)
    return made


def fresh_taker(
    template: torch.Tensor, is_cast: bool, dtype: torch.dtype, fqn: str, fresh: Fresh
) -> Taker:
    """Returns a taker by which a stored tensor subclass becomes the value of a meta tensor.

    Args:
        template: The meta tensor.
        is_cast: Whether the value has another dtype than the stored tensor.
        dtype: Dtype of the value.
        fqn: Name of the tensor, for messages.
        fresh: The place of the value.
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
        except Exception:  # noqa: BLE001 - user classes may raise anything
            return False  # A plain tensor gets the values that it shows, or an error says why not.
        if type(template) is AsStored:
            made = made if template.place is None else made.to(template.place)
        else:
            made = made.to(default_device())
            if isinstance(template, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=template.requires_grad)
        return fresh.take(made) and is_all

    return take


def _empty_like(tensor: torch.Tensor, dtype: torch.dtype, device_type: str | None) -> torch.Tensor:
    if not tensor.is_meta:
        return torch.empty_like(tensor, dtype=dtype, requires_grad=False)
    if dtype != tensor.dtype:
        tensor = torch.empty_like(tensor, dtype=dtype)
    device = default_device() if device_type is None else _current_device(device_type)
    return torch.empty_like(tensor, device=device)


class Boxes:
    """Collects wanted boxes, and the sink of their bytes.

    Args:
        sink: Sink of the bytes.
    """

    def __init__(self, sink: TensorSink | None = None) -> None:
        self.sink = TensorSink() if sink is None else sink
        self._itemsize: list[int] = []
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
        """Appends whole tensors that are read in place, and their boxes.

        Args:
            tensors: int64[n], numbers of the tensors.
            targets: Target of each tensor; empty targets are omitted.
            shape: int64[n, D], shape of each tensor, padded with 1.
            itemsize: int64[n], bytes per element.
        """
        full = (shape > 0).all(axis=1)
        if not full.all():
            targets = [targets[row] for row in np.flatnonzero(full).tolist()]
            tensors, shape, itemsize = tensors[full], shape[full], itemsize[full]
        self._finish_columns()
        zeros = np.zeros_like(shape)
        self._ended.append(Wanted(tensors.astype(np.int32), zeros, shape, itemsize))
        self.sink.add_direct(targets)

    def add(
        self, tensor: int, offset: tuple[int, ...], size: tuple[int, ...], stored: torch.dtype
    ) -> None:
        """Appends the box of the next row of the sink, and the dtype of its bytes."""
        self._itemsize.append(stored.itemsize)
        self._tensor.append(tensor)
        self._offset.append(offset)
        self._size.append(size)

    def wanted(self) -> Wanted:
        """Returns the boxes as columns."""
        self._finish_columns()
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

    def _finish_columns(self) -> None:
        """Converts the boxes added by `add` to columns."""
        if not self._tensor and self._ended:
            return
        width = max(1, max(map(len, self._size), default=0))
        offset, size = padded(self._offset, width, 0), padded(self._size, width, 1)
        itemsize = np.array(self._itemsize, np.int64)
        self._ended.append(Wanted(np.array(self._tensor, np.int32), offset, size, itemsize))
        self._tensor, self._offset, self._size, self._itemsize = [], [], [], []


# Which targets share memory

_MOST_WORK = 1 << 20
"""Effort to decide whether two views share memory; beyond it (many odd strides) they count as
sharing."""


def rows_that_share(sinks: Sequence[TensorSink], num_bytes: Int64Array) -> list[list[int]]:
    """Returns groups of rows whose targets share memory with each other; usually none.

    Args:
        sinks: The sinks, whose rows are numbered one after another. Targets that are no tensors yet
            will get their own memory.
        num_bytes: int64[n], stored bytes of each row.

    Returns:
        The rows of each group of at least two, in order. Interleaved views, such as columns of one
        matrix, share nothing.

    Complexity:
        0.1 us for each target that is read in place, a sort, and O(n^2) for n targets whose extents
        overlap.
    """
    tensors = [target for sink in sinks for target in sink.targets]
    direct = np.array([each for sink in sinks for each in sink.direct], np.bool_)
    rows = np.flatnonzero(direct)
    targets = [tensors[row] for row in rows.tolist()]
    owners = rows.tolist()
    for row in np.flatnonzero(~direct).tolist():
        if isinstance(tensors[row], torch.Tensor):
            parts = [one for one in parts_with_memory(tensors[row]) if has_place(one)]
            targets += parts
            owners += [row] * len(parts)
    if len(targets) < 2:
        return []
    address = np.fromiter(map(torch.Tensor.data_ptr, targets), np.uint64, len(targets))
    length = np.array([extent(one) for one in targets[len(rows) :]], np.int64)
    end = address + np.concatenate([num_bytes[rows], length]).astype(np.uint64)
    order = np.argsort(address, kind="stable")
    reach = np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.r_[True, address[order][1:] >= reach[:-1]])
    if len(first) == len(order):
        return []
    groups = []
    for some in np.split(order, first[1:]):
        if len(some) > 1:
            found = _groups([targets[index] for index in some.tolist()])
            groups += [sorted({owners[some[index]] for index in group}) for group in found]
    return [group for group in groups if len(group) > 1]


def rows_that_overlap(sinks: Sequence[TensorSink]) -> list[int]:
    """Returns the rows whose targets may have several elements in one place, as `unfold` makes.

    Args:
        sinks: See `rows_that_share`.
    """
    tensors = [target for sink in sinks for target in sink.targets]
    direct = [each for sink in sinks for each in sink.direct]
    return [
        row
        for row, (target, in_place) in enumerate(zip(tensors, direct, strict=True))
        if not in_place
        and isinstance(target, torch.Tensor)
        and any(map(may_overlap_itself, parts_with_memory(target)))
    ]


def has_place(tensor: torch.Tensor) -> bool:
    """Returns whether the place of a tensor in memory is known."""
    try:
        return tensor.data_ptr() != 0
    except (NotImplementedError, RuntimeError):
        return False


def geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for tensors of the same places in the same order.

    Args:
        tensor: A tensor of any class; all its inner tensors count.
    """
    return tuple(
        (one.dtype, one.is_conj(), one.is_neg(), one.device, one.data_ptr(), tuple(one.shape),
         one.stride())
        for one in parts_with_memory(tensor)
    )  # fmt: skip


def _groups(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Groups tensors that share memory, given in the order of their addresses, by their indices."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, tensor in enumerate(tensors):
        alike.setdefault(geometry(tensor), []).append(index)
    groups = list(alike.values())
    distinct = [tensors[group[0]] for group in groups]
    views = [np.asarray(_Memory(tensor)) for tensor in distinct]
    for one, tensor in enumerate(distinct):
        for other in range(one + 1, len(distinct)):
            if distinct[other].data_ptr() >= tensor.data_ptr() + extent(tensor):
                break
            if groups[one] is groups[other] or tensor.device != distinct[other].device:
                continue
            if _is_shared(views[one], views[other]):
                old, both = (groups[one], groups[other]), groups[one] + groups[other]
                groups = [both if group in old else group for group in groups]
    return list({id(group): group for group in groups}.values())


class _Memory:
    """The memory of a tensor as numpy's array interface; numpy reads none of its bytes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        shape: tuple[int, ...] = (tensor.nbytes,)
        strides = None
        if not tensor.is_contiguous():
            shape = (*tensor.shape, tensor.itemsize)
            strides = (*(step * tensor.itemsize for step in tensor.stride()), 1)
        place = (tensor.data_ptr(), True)
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "data": place, "shape": shape, "strides": strides
        }  # fmt: skip


def _is_shared(one: np.ndarray, other: np.ndarray) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
