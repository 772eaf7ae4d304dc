"""Python objects and files in the format of `torch.save`, loaded only by an allow-list.

The allow-list has the classes found in state dicts (tensors, numpy arrays, scalars and random
generators, values of the standard library), and those added by
`torch.serialization.add_safe_globals`. A load calls nothing else that a checkpoint names, unless
the user passes `weights_only=False`.

`read_torch_save` reads the zips that torch writes since 1.6. It compares every view with the length
of its storage before torch creates the view, and checks what torch would trust (the order of sparse
indices, the offsets in a nested tensor). `load_torch_file` maps a file, so that only the parts in
use are read.
Source: torch/serialization.py `_load`; torch/_utils.py.
"""

from __future__ import annotations

import collections
import io
import mmap
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import serialization

from ray_dcp.core.dtypes import DTYPE_OF_STORAGE, ITEMSIZE
from ray_dcp.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidRequestError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from ray_dcp.format import damaged
from ray_dcp.format.object_pickle import (
    NUMPY,
    PYTHON,
    Known,
    ObjectMachine,
    Table,
    Unfinished,
    is_shape,
    need,
    set_attributes,
)
from ray_dcp.format.torch_items import check_plain, stored_records
from ray_dcp.store.location import checked_url
from ray_dcp.torch_adapter.content_digests import bytes_digest
from ray_dcp.torch_adapter.tensors import lost_memory_within

_TENSOR_BYTES = 512
_ALIGNMENT = 64


def read_torch_save(data: bytes | memoryview | mmap.mmap, *, is_shared: bool = False) -> Any:
    """Returns the object that `torch.save` wrote, by the allow-list.

    Args:
        data: One whole item or file.
        is_shared: Whether CPU tensors are views of `data`, which must be writable then.

    Raises:
        UnsafeCheckpointError: The data names something that is not on the allow-list, or calls
            something in a way in which no object is saved, or is no zip (before torch 1.6).
        DamagedCheckpointError: `torch.save` did not write the data.

    Complexity:
        O(length), about 2 us per opcode; memory of at most a fixed multiple of the length.
    """
    if bytes(data[:2]) == b"PK":
        return _read_zip(memoryview(data), is_shared)
    if bytes(data[:1]) == b"\x80":
        raise UnsafeCheckpointError(
            "expected a zip of torch.save, found bare pickles, as torch wrote them before version "
            "1.6; save it again with torch, or, if you trust it, load with "
            "LoadOptions(weights_only=False)"
        )
    raise damaged("bytes of torch.save", "others")


def _read_zip(data: memoryview, is_shared: bool) -> Any:
    records: dict[str, memoryview] = {}
    folders = set()
    for name, record in stored_records(data):
        folder, _, rest = name.partition("/")
        folders.add(folder)
        # Careful: torch ignores case when it looks up a record.
        if len(folders) > 1 or rest.lower() in records:
            raise damaged("each record once, in one folder", repr(name[:200]))
        records[rest.lower()] = record
    if "data.pkl" not in records:
        raise damaged("a record data.pkl", "none")
    storages = _Storages(records, is_shared)
    data_pkl = bytes(records["data.pkl"])
    return ObjectMachine(data_pkl, _table(), _added(), storages.item_of).load()


def _added() -> dict[str, Any]:
    """Returns the globals that `torch.serialization.add_safe_globals` has added."""
    found: dict[str, Any] = {}
    for one in serialization.get_safe_globals():
        value, name = one if isinstance(one, tuple) else (one, "")
        found[name or f"{value.__module__}.{value.__qualname__}"] = value
    return found


class _Storages:
    """The storages of one item, each read once."""

    def __init__(self, records: Mapping[str, memoryview], is_shared: bool) -> None:
        self._records = records
        self._is_shared = is_shared
        self._loaded: dict[str, torch.UntypedStorage] = {}
        self._to_cpu = not torch.accelerator.is_available()
        self._is_swapped = bytes(records.get("byteorder", b"little")) == b"big"

    def item_of(self, pid: Any) -> torch.TypedStorage:
        """Returns the storage of a persistent id."""
        key, location, dtype, count = _storage_id(pid)
        num_bytes = count * dtype.itemsize
        if key not in self._loaded:
            record = self._records.get(f"data/{key}".lower())
            if record is None:
                raise damaged(f"a record of the storage {key[:100]!r}", "none")
            storage = self._read(record, dtype)
            if not self._to_cpu or location == "meta":
                storage = serialization.default_restore_location(storage, location)
            self._loaded[key] = storage
        storage = self._loaded[key]
        # Careful: torch would lengthen a storage itself if a view exceeds it.
        if not num_bytes <= storage.nbytes() < num_bytes + dtype.itemsize:
            raise damaged(f"a storage of {num_bytes} bytes", f"{storage.nbytes()}")
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    def _read(self, record: memoryview, dtype: torch.dtype) -> torch.UntypedStorage:
        if not len(record):
            return torch.UntypedStorage(0)
        if self._is_shared and not self._is_swapped:
            tensor = torch.frombuffer(record, dtype=torch.uint8)
            if tensor.data_ptr() % _ALIGNMENT == 0:
                return tensor.untyped_storage()
        storage = torch.frombuffer(bytearray(record), dtype=torch.uint8).untyped_storage()
        if self._is_swapped:
            storage.byteswap(dtype)
        return storage


def _storage_id(pid: Any) -> tuple[str, str, torch.dtype, int]:
    """Returns key, location, dtype and number of elements of a storage."""
    need(type(pid) is tuple and 5 <= len(pid) <= 6 and pid[0] == "storage")
    _, kind, key, location, count, *view = pid
    need(view in ([], [None]), "views of storages")
    need(type(key) is type(location) is str and type(count) is int and 0 <= count < 1 << 60)
    if kind is torch.UntypedStorage:
        return key, location, torch.uint8, count
    need(isinstance(kind, serialization.StorageType))
    return key, location, kind.dtype, count


# How tensors are built


def _check_view(
    storage: torch.UntypedStorage, dtype: Any, offset: Any, size: Any, stride: Any
) -> None:
    """Checks that a view lies in its storage: torch would lengthen the storage."""
    need(isinstance(dtype, torch.dtype) and is_shape(size) and is_shape(stride))
    need(len(size) == len(stride) and type(offset) is int and 0 <= offset < 1 << 62)
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    inside = 0 in size or (last + 1) * dtype.itemsize <= storage.nbytes()
    need(inside and prod(size) * dtype.itemsize < 1 << 63, "a tensor outside its storage")


def _view(
    machine: ObjectMachine, storage: Any, dtype: Any, offset: Any, size: Any, stride: Any
) -> torch.Tensor:
    need(isinstance(storage, torch.TypedStorage))
    need(str(dtype).removeprefix("torch.") in ITEMSIZE)
    raw = storage._untyped_storage
    machine.spend(_TENSOR_BYTES)
    _check_view(raw, dtype, offset, size, stride)
    return torch.empty(0, dtype=dtype, device=raw.device).set_(raw, offset, size, stride)


def _tensor(machine: ObjectMachine, args: tuple[Any, ...]) -> torch.Tensor:
    storage, offset, size, stride = args
    need(isinstance(storage, torch.TypedStorage))
    return _view(machine, storage, storage.dtype, offset, size, stride)


def _tensor_v2(machine: ObjectMachine, args: tuple[Any, ...]) -> torch.Tensor:
    storage, offset, size, stride, requires_grad, hooks, *metadata = args
    need(isinstance(storage, torch.TypedStorage))
    made = _view(machine, storage, storage.dtype, offset, size, stride)
    return _finished(made, requires_grad, hooks, metadata)


def _tensor_v3(machine: ObjectMachine, args: tuple[Any, ...]) -> torch.Tensor:
    storage, offset, size, stride, requires_grad, hooks, dtype, *metadata = args
    made = _view(machine, storage, dtype, offset, size, stride)
    return _finished(made, requires_grad, hooks, metadata)


def _finished(made: Any, requires_grad: Any, hooks: Any, metadata: list[Any]) -> torch.Tensor:
    need(type(requires_grad) is bool and _is_empty(hooks))
    need(len(metadata) <= 1)
    bits = (metadata[0] if metadata else None) or {}
    need(type(bits) is dict and bits.keys() <= {"conj", "neg"})
    need(all(type(bit) is bool for bit in bits.values()))
    need(not any(bits.values()) or made.is_complex() or not bits.get("conj"))
    if any(bits.values()):
        torch._utils.set_tensor_metadata(made, bits)
    made.requires_grad = requires_grad
    return made  # type: ignore[no-any-return]


def _is_empty(hooks: Any) -> bool:
    """Returns whether no hooks were saved. Why: torch would call them."""
    return hooks is None or (isinstance(hooks, dict) and not hooks)


def _parameter(machine: ObjectMachine, args: tuple[Any, ...]) -> torch.nn.Parameter:
    data, requires_grad, hooks, *state = args
    need(isinstance(data, torch.Tensor) and type(requires_grad) is bool and _is_empty(hooks))
    machine.spend(_TENSOR_BYTES)
    made = torch.nn.Parameter(data, requires_grad)
    for one in state:
        _set_state(made, one)
    return made


def _set_state(tensor: torch.Tensor, state: Any) -> None:
    if type(state) is tuple:
        state, slots = state
        need(not slots)
    set_attributes(tensor, state or {})


def _of_type(machine: ObjectMachine, args: tuple[Any, ...]) -> Any:
    """Builds a tensor with attributes, or one of a class that the user allowed."""
    function, cls, inner, state = args
    known = machine.table.build_of(function)
    need(known is not None and known[0].startswith("torch._utils."))
    need(type(inner) is tuple)
    made: Any = known[1](machine, inner) if known else None
    if cls in (torch.Tensor, torch.nn.Parameter):
        need(type(made) is cls)
        _set_state(made, state)
        return made
    need(machine.is_added(cls))
    return torch._tensor._rebuild_from_type_v2(lambda: made, cls, (), state)


def _wrapper(machine: ObjectMachine, args: tuple[Any, ...]) -> Any:
    cls, dtype, size, stride, offset, layout, device, requires_grad = args
    need(machine.is_added(cls) and isinstance(cls, type) and issubclass(cls, torch.Tensor))
    need(isinstance(dtype, torch.dtype) and isinstance(layout, torch.layout))
    need(is_shape(size) and is_shape(stride) and len(size) == len(stride))
    need(type(offset) is int and offset >= 0 and type(requires_grad) is bool)
    return torch._utils._rebuild_wrapper_subclass(
        cls, dtype, size, stride, offset, layout, _device_of(device), requires_grad
    )


def _device_of(value: Any) -> torch.device:
    need(type(value) in (str, torch.device))
    is_there = torch.accelerator.is_available() or str(value) == "meta"
    return torch.device(value if is_there else "cpu")


def _meta_tensor(machine: ObjectMachine, args: tuple[Any, ...]) -> torch.Tensor:
    dtype, size, stride, requires_grad = args
    need(isinstance(dtype, torch.dtype) and is_shape(size) and is_shape(stride))
    need(len(size) == len(stride) and type(requires_grad) is bool)
    machine.spend(_TENSOR_BYTES)
    return torch.empty_strided(
        size, stride, dtype=dtype, device="meta", requires_grad=requires_grad
    )


def _need_dense(tensor: Any) -> None:
    """Checks that a tensor repeats no element. Why: a value made of it would be longer."""
    need(type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided)
    need(tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes())


def _sparse(machine: ObjectMachine, args: tuple[Any, ...]) -> torch.Tensor:
    layout, parts = args
    need(isinstance(layout, torch.layout) and type(parts) is tuple)
    machine.spend(_TENSOR_BYTES)
    if layout is torch.sparse_coo:
        indices, values, size, *coalesced = parts
        need(len(coalesced) <= 1 and all(one is None or type(one) is bool for one in coalesced))
        tensors: tuple[Any, ...] = (indices, values)
    else:
        *tensors, size = parts
        need(layout in _COMPRESSED and len(tensors) == 3)
    need(is_shape(size))
    for tensor in tensors:
        _need_dense(tensor)
        machine.spend(4 * tensor.numel() * tensor.element_size())
    if layout is torch.sparse_coo:
        is_coalesced = coalesced[0] if coalesced else None
        return torch.sparse_coo_tensor(
            indices,
            values,
            size,
            device=values.device,
            is_coalesced=is_coalesced,
            check_invariants=True,
        )
    compressed, plain, values = tensors
    return torch.sparse_compressed_tensor(
        compressed,
        plain,
        values,
        size,
        layout=layout,
        device=values.device,
        check_invariants=True,
    )


def _quantized(machine: ObjectMachine, args: tuple[Any, ...]) -> torch.Tensor:
    storage, offset, size, stride, parameters, requires_grad, hooks = args
    need(isinstance(storage, torch.TypedStorage) and storage.dtype in _QUANTIZED)
    _check_view(storage._untyped_storage, storage.dtype, offset, size, stride)
    need(prod(size) * storage.dtype.itemsize <= storage._untyped_storage.nbytes())
    need(type(requires_grad) is bool and _is_empty(hooks) and type(parameters) is tuple)
    machine.spend(_TENSOR_BYTES + prod(size))
    scheme, scale, zero, *axis = parameters
    if scheme is torch.per_tensor_affine:
        need(type(scale) is float and type(zero) is int and not axis)
    else:
        need(scheme in (torch.per_channel_affine, torch.per_channel_affine_float_qparams))
        need(len(axis) == 1 and type(axis[0]) is int and 0 <= axis[0] < len(size))
        for tensor in (scale, zero):
            _need_dense(tensor)
            need(tensor.shape == (size[axis[0]],))
    made: torch.Tensor = torch._utils._rebuild_qtensor(
        storage, offset, size, stride, parameters, requires_grad, collections.OrderedDict()
    )
    return made


def _on_device(machine: ObjectMachine, args: tuple[Any, ...]) -> torch.Tensor:
    """Builds a tensor that was saved through the CPU or numpy."""
    data, dtype, device, requires_grad = args
    need(isinstance(dtype, torch.dtype) and type(requires_grad) is bool)
    if type(data) is np.ndarray:
        machine.spend(data.nbytes)
        data = torch.from_numpy(data)
    _need_dense(data)
    machine.spend(data.numel() * dtype.itemsize)
    made = data.to(dtype=dtype, device=_device_of(device))
    made.requires_grad = requires_grad
    return made  # type: ignore[no-any-return]


def _size(_: ObjectMachine, args: tuple[Any, ...]) -> torch.Size:
    need(len(args) <= 1 and all(isinstance(arg, (list, tuple)) for arg in args))
    need(all(type(length) is int for arg in args for length in arg))
    return torch.Size(*args)


def _device(_: ObjectMachine, args: tuple[Any, ...]) -> torch.device:
    need(1 <= len(args) <= 2 and type(args[0]) is str and all(type(n) is int for n in args[1:]))
    return torch.device(*args)


def _layout(_: ObjectMachine, args: tuple[Any, ...]) -> torch.layout:
    (name,) = args
    need(type(name) is str)
    return _LAYOUTS[name]


def _generator(machine: ObjectMachine, args: tuple[Any, ...]) -> Unfinished:
    (device,) = args
    need(isinstance(device, torch.device))
    machine.spend(8 << 10)

    def finish(state: Any) -> torch.Generator:
        seed, offset, words = state
        need(type(seed) is int and (offset is None or type(offset) is int))
        _need_dense(words)
        made = torch.Generator(device=device).manual_seed(seed)
        if offset is not None:
            made.set_offset(offset)
        made.set_state(words)
        return made

    return Unfinished(finish)


_QUANTIZED = frozenset([torch.qint8, torch.quint8, torch.qint32])
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_LAYOUTS = {
    str(layout): layout for layout in (torch.strided, torch.sparse_coo, torch.jagged, *_COMPRESSED)
}


@cache
def _table() -> Table:
    builds = {
        "torch.Size": (torch.Size, _size),
        "torch.device": (torch.device, _device),
        "torch.serialization._get_layout": (None, _layout),
        "torch._C.Generator": (torch.Generator, _generator),
        "torch.Tensor": (torch.Tensor, None),
        "torch.nn.parameter.Parameter": (torch.nn.Parameter, None),
        "torch.storage.UntypedStorage": (torch.UntypedStorage, None),
        "torch._tensor._rebuild_from_type_v2": (None, _of_type),
        "torch._utils._rebuild_tensor": (None, _tensor),
        "torch._utils._rebuild_tensor_v2": (None, _tensor_v2),
        "torch._utils._rebuild_tensor_v3": (None, _tensor_v3),
        "torch._utils._rebuild_parameter": (None, _parameter),
        "torch._utils._rebuild_parameter_with_state": (None, _parameter),
        "torch._utils._rebuild_wrapper_subclass": (None, _wrapper),
        "torch._utils._rebuild_meta_tensor_no_storage": (None, _meta_tensor),
        "torch._utils._rebuild_sparse_tensor": (None, _sparse),
        "torch._utils._rebuild_qtensor": (None, _quantized),
        "torch._utils._rebuild_device_tensor_from_numpy": (None, _on_device),
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": (None, _on_device),
    }
    return Table(PYTHON, NUMPY, _constants(), {k: Known(*known) for k, known in builds.items()})


def _constants() -> Mapping[str, Known]:
    kinds = (torch.dtype, torch.memory_format, torch.qscheme)
    found = [value for value in vars(torch).values() if isinstance(value, kinds)]
    storages = [*DTYPE_OF_STORAGE, "QInt8Storage", "QUInt8Storage", "QInt32Storage"]
    return {
        **{str(value): Known(value) for value in found},
        **{f"torch.{name}": Known(serialization.StorageType(name)) for name in storages},
    }


_SCALARS = frozenset({type(None), bool, float, str, bytes, complex})
_CONTAINERS = frozenset({list, tuple, set, frozenset})
_LONGEST_INT = 1 << 2000
"""Integers must be below this: torch's unpickler reads at most 255 bytes per integer."""
_MAX_DEPTH = 50


def dump_object(value: Any, *, fqn: str, refused: Reason | None = None) -> bytes:
    """Returns a value's bytes as written by `torch.save`, which stock DCP reads.

    Args:
        value: The value.
        fqn: Its name, for messages.
        refused: Returns why a tensor in the value must not be saved, or None if it may be.

    Raises:
        UnsupportedValueError: The value can't be pickled, or holds a tensor that is refused or that
            reaches beyond its memory; the message names the FQN and the class.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer, pickle_module=_pickle_module(refused))
    except _RefusedTensorError as error:
        raise UnsupportedValueError(f"{fqn!r} is or holds a tensor that {error}", key=fqn) from None
    except Exception as error:  # user classes may raise anything
        raise UnsupportedValueError(
            f"{fqn!r} holds a {_class_name(value)}, which can't be pickled "
            f"({type(error).__name__}: {error}); take it out of the state dict, or store what it "
            "is made of (tensors, numbers, strings, lists)",
            key=fqn,
        ) from error
    return buffer.getvalue()


class _RefusedTensorError(Exception):
    """A tensor must not be saved in an object."""


Reason = Callable[[torch.Tensor], "str | None"]


@cache
def _pickle_module(refused: Reason | None) -> Any:
    """Returns the `pickle_module` for `torch.save` that refuses some tensors.

    A tensor that reaches beyond its memory is always refused: torch would save it, and a load would
    invent the rest.
    """

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                reason = refused(value) if refused is not None else None
                if reason is not None or (reason := lost_memory_within(value)) is not None:
                    raise _RefusedTensorError(reason)
            return NotImplemented

    return SimpleNamespace(__name__="pickle", Pickler=Pickler)


def load_object(
    data: bytes | memoryview,
    *,
    fqn: str,
    weights_only: bool = True,
) -> Any:
    """Returns the object in an item of ray_dcp or stock DCP.

    Its tensors are moved to the device that they were saved from, or to the CPU if there is no
    accelerator.

    Args:
        data: One whole `torch.save` item.
        fqn: Name of the object, for messages.
        weights_only: Refuse everything that is not on the allow-list. False runs code from the
            data.

    Raises:
        UnsafeCheckpointError: The item names a class or function that is not on the allow-list, or
            calls one in a way that no object needs.
        DamagedCheckpointError: The data is no `torch.save` item.
    """
    try:
        check_plain(data)
        if weights_only:
            return read_torch_save(data)
        where = None if torch.accelerator.is_available() else "cpu"
        return torch.load(io.BytesIO(data), map_location=where, weights_only=False)
    except DamagedCheckpointError as error:
        is_refused = isinstance(error, UnsafeCheckpointError)
        told = "is refused by a safe load" if is_refused else "can't be read"
        error.message = f"the object {fqn!r} of the checkpoint {told}: {error.message}"
        error.key = fqn
        raise
    except Exception as error:  # user classes may raise anything
        raise DamagedCheckpointError(
            f"the object {fqn!r} of the checkpoint can't be read: expected bytes of torch.save, "
            f"found {type(error).__name__}: {error}; load an earlier checkpoint",
            key=fqn,
        ) from error


def load_problem(value: Any, data: bytes, *, fqn: str) -> str | None:
    """Returns why a safe load would refuse an object, with the line of code that allows it.

    Args:
        value: The object.
        data: The result of `dump_object(value)`.
        fqn: Name of the object.

    Returns:
        A sentence, or None if a safe load accepts the object.
    """
    try:
        read_torch_save(data)
    except UnsafeCheckpointError as error:
        return f"{fqn!r} holds a {_class_name(value)} that a safe load refuses: {error.message}"
    except Exception as error:  # noqa: BLE001 - user classes may raise anything
        return (
            f"{fqn!r} holds a {_class_name(value)} that does not come back from its own pickle: "
            f"{error}"
        )
    return None


def tensors_within(value: Any) -> list[torch.Tensor]:
    """Returns the tensors that an object is or holds, as far as it can be pickled.

    Examples:
        >>> tensors_within((torch.ones(1), {"step": 3}))
        [tensor([1.])]
    """
    found: list[torch.Tensor] = []

    class Finder(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return NotImplemented
            found.append(value)
            return list, ()  # in place of its contents, which nobody needs

    # Suppressed: whatever classes of the user raise. Such a value is refused when it is saved.
    with suppress(Exception):
        # Why out of band: arrays are not copied then.
        Finder(io.BytesIO(), protocol=5, buffer_callback=lambda _: None).dump(value)
    return found


def is_simple(value: Any, depth: int = 0) -> bool:
    """Returns whether a value consists only of numbers, strings, None and standard containers.

    The containers are lists, tuples, sets and dicts. Such a value always loads, and different
    values have different `repr`s.
    """
    cls = type(value)
    if cls in _SCALARS:
        return True
    if cls is int:
        return bool(-_LONGEST_INT < value < _LONGEST_INT)
    if depth >= _MAX_DEPTH:
        return False
    if cls in _CONTAINERS:
        return set(map(type, value)) <= _SCALARS or all(is_simple(v, depth + 1) for v in value)
    if cls is dict:
        return all(is_simple(k, depth + 1) and is_simple(v, depth + 1) for k, v in value.items())
    return False


def simple_digest(value: Any) -> int:
    """Returns a 64-bit digest of a simple value, never 0, the same in every process.

    Why not of its pickle: a pickle depends on which equal strings are one object, and on the order
    of sets, which differs between processes.
    """
    text = repr(value)
    if "set(" in text or "{" in text:
        text = _text(value)
    return bytes_digest(text.encode())


def _text(value: Any) -> str:
    cls = type(value)
    if cls in (set, frozenset):
        return f"{cls.__name__}({', '.join(sorted(map(_text, value)))})"
    if cls in _CONTAINERS:
        return f"{cls.__name__}({', '.join(map(_text, value))})"
    if cls is dict:
        return f"dict({', '.join(f'{_text(k)}: {_text(v)}' for k, v in value.items())})"
    return repr(value)


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


_WAY_OUT = "pass weights_only=False"


def load_torch_file(path: str | os.PathLike[str], *, weights_only: bool = True) -> Any:
    """Returns the object in a file of `torch.save`; its tensors are views of the mapped file.

    Args:
        path: Path of the file.
        weights_only: Refuse objects that are not on the allow-list. False runs code from the file.

    Raises:
        CheckpointNotFoundError: There is no such file.
        UnsafeCheckpointError: The file names a class or function that is not on the allow-list.
        DamagedCheckpointError: `torch.save` did not write the file, or it is truncated.
        InvalidRequestError: The path is a directory.
    """
    name = checked_url(path)
    if Path(name).is_dir():
        raise InvalidRequestError(f"expected a file of torch.save, found the directory {name}")
    if not Path(name).exists():
        raise CheckpointNotFoundError(f"there is no file {name}", checkpoint_id=name)
    try:
        if not weights_only:
            is_zip = zipfile.is_zipfile(name)
            return torch.load(name, map_location="cpu", mmap=is_zip, weights_only=False)
        with Path(name).open("rb") as stream:
            # Why not closed: the tensors are views of it, and the last one frees it.
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return read_torch_save(mapped, is_shared=True)
    except UnsafeCheckpointError as error:
        told = error.message.replace("load with LoadOptions(weights_only=False)", _WAY_OUT)
        error.message = f"a safe load refuses {name}: {told}"
        error.checkpoint_id = name
        raise
    except Exception as error:  # damaged bytes may raise anything
        raise DamagedCheckpointError(
            f"expected a file of torch.save, but {name} can't be read: {type(error).__name__}: "
            f"{error}",
            checkpoint_id=name,
        ) from error
