"""One tensor as bytes: dtype names, host bytes, writable host bytes, and lossless casts.

Bytes are always the tensor's elements in C order, as `torch.save` would store them for a contiguous
tensor. `shards` handles sharding.

Views of a tensor's memory are created from its address. *Why not `Tensor.numpy()`*: it makes the
storage permanently unresizable, and FSDP resizes the storages of its parameters.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ray_dcp.errors import UnsupportedValueError

_INTEGERS = (
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
_REAL = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64, *_INTEGERS)
_COMPLEX = (torch.complex64, torch.complex128)
_CARRIERS = {
    torch.complex32: torch.int32,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.float4_e2m1fn_x2: torch.uint8,
}
"""Dtypes that some torch can't copy, each with a dtype of the same width that it can copy."""
if hasattr(torch, "bcomplex32"):  # from torch 2.15 on
    _CARRIERS[torch.bcomplex32] = torch.int32
_NAMES = {dtype: str(dtype)[6:] for dtype in (*_REAL, *_COMPLEX, *_CARRIERS)}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

_FLOATS: dict[torch.dtype, tuple[int, int, float, bool]] = {
    torch.float64: (53, -1074, torch.finfo(torch.float64).max, True),
    torch.float32: (24, -149, torch.finfo(torch.float32).max, True),
    torch.bfloat16: (8, -133, torch.finfo(torch.bfloat16).max, True),
    torch.float16: (11, -24, 65504.0, True),
    torch.float8_e5m2: (3, -16, 57344.0, True),
    torch.float8_e5m2fnuz: (3, -17, 57344.0, False),
    torch.float8_e4m3fn: (4, -9, 448.0, False),
    torch.float8_e4m3fnuz: (4, -10, 240.0, False),
    torch.float8_e8m0fnu: (1, -127, 2.0**127, False),
}
"""Significant bits, log2 of the smallest positive value, largest value, whether it has infinities.

Why not torch.finfo: its eps of float8_e5m2fnuz is that of another format (torch 2.13)."""

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes of tensors for which `is_plain` holds."""
FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""Attributes of DCP's `CheckpointableTensor`: the shape of the global tensor, and for each part its
offset in the global and in the local tensor, and its lengths. DCP reads them since torch 2.14;
ray_dcp reads them on every class and with every torch."""

_EMPTY = memoryview(bytearray())


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without prefix.

    Examples:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return _NAMES.get(dtype) or str(dtype)[6:]


def dtype_of(name: str, *, fqn: str | None = None) -> torch.dtype:
    """Returns the dtype of this name.

    Args:
        name: Name without prefix.
        fqn: Name of the tensor, for messages.

    Raises:
        UnsupportedValueError: This torch has no such dtype, or its tensors have no raw bytes.
    """
    dtype = _DTYPES.get(name)
    if dtype is None:
        where = "" if fqn is None else f"{fqn!r} is saved with "
        here = f"torch {torch.__version__}"
        if isinstance(getattr(torch, name, None), torch.dtype):
            why = "of quantised or packed tensors; load it with torch's own load and convert it"
        else:
            why = f"that {here} lacks; load this checkpoint with the torch that wrote it, or newer"
        raise UnsupportedValueError(f"{where}the dtype {name!r}, one {why}", key=fqn or name)
    return dtype


def find_dtype(name: str) -> torch.dtype | None:
    """Returns the dtype of this name, or None if this torch lacks it."""
    return _DTYPES.get(name)


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is of torch's own class and so described completely by its bytes."""
    return type(tensor) in PLAIN_TYPES


def is_checkpointable(value: Any) -> bool:
    """Returns whether a value is a tensor with all of `FIELDS`.

    Complexity: 15 ns for a tensor without them.
    """
    return (
        hasattr(value, "global_shape")
        and isinstance(value, torch.Tensor)
        and all(hasattr(value, name) for name in FIELDS)
    )


def unsupported_reason(tensor: torch.Tensor) -> str | None:
    """Returns why the bytes of a plain tensor can't be read, or None if they can."""
    if tensor.is_meta:
        return "is on the meta device and has no bytes: give it some (.to_empty(), a load) first"
    if (reason := no_target_reason(tensor)) is not None:
        return reason
    if tensor.dtype not in _NAMES:
        if tensor.is_quantized:
            return f"has the quantised dtype {tensor.dtype}: save .int_repr() or .dequantize()"
        return f"has the packed dtype {tensor.dtype}: save .view(torch.uint8) instead"
    return lost_memory(tensor)


def no_target_reason(tensor: torch.Tensor) -> str | None:
    """Returns why no values can be written to a tensor of any class, or None if they can."""
    if is_lazy(tensor):
        return "has no shape before the first forward pass of its lazy module: make one first"
    if tensor.is_nested:
        return "is a nested tensor: use the tensors of .unbind(), or .values() and .offsets()"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}: use its .to_dense(), or its parts"
    if tensor._is_zerotensor():
        return "is a ZeroTensor, which has no memory: use torch.zeros instead"
    return None


def lost_memory(tensor: torch.Tensor) -> str | None:
    """Returns why a strided tensor reaches beyond its memory, or None if it does not.

    torch reads and writes beyond the memory without a check.
    """
    if tensor.numel() == 0:
        return None
    try:
        storage, is_null = tensor.untyped_storage(), tensor.data_ptr() == 0
    except (NotImplementedError, RuntimeError):  # a device that exposes no memory
        return None
    held, needed = storage.nbytes(), extent(tensor) + tensor.storage_offset() * tensor.itemsize
    if held >= needed and not (is_null and tensor.is_cpu):
        return None
    if held and not is_null:
        return f"reaches to byte {needed} of a storage that was resized to {held} bytes"
    return (
        "has no memory, as its storage was freed (by FSDP, or untyped_storage().resize_(0)): make "
        "it whole first, or take the sharded state dict"
    )


def lost_memory_within(tensor: torch.Tensor) -> str | None:
    """Returns the first `lost_memory` of the parts of a tensor of any class, or None."""
    return next(filter(None, map(lost_memory, parts_with_memory(tensor))), None)


def parts_with_memory(tensor: torch.Tensor, *, or_meta: bool = False) -> list[torch.Tensor]:
    """Returns the strided tensors that hold the memory of a tensor, as far as it exposes them.

    Args:
        tensor: A tensor of any class.
        or_meta: Also return those on the meta device.
    """
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        # Why: a class with its own dispatch is a wrapper, and has no own memory.
        names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
        parts = [getattr(tensor, name) for name in names]
        return [
            one
            for part in parts
            if isinstance(part, torch.Tensor)
            for one in parts_with_memory(part, or_meta=or_meta)
        ]
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return [tensor] if is_strided and (or_meta or not tensor.is_meta) else []


def extent(tensor: torch.Tensor) -> int:
    """Returns the number of bytes from the first to the last byte of a strided tensor.

    Examples:
        >>> extent(torch.zeros(4, 4)), extent(torch.zeros(4, 4)[:, 0])
        (64, 52)
    """
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((length - 1) * stride for length, stride in steps)) * tensor.itemsize


def may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Returns False if no two elements of a strided tensor can share memory.

    Examples:
        >>> may_overlap_itself(torch.zeros(4, 4).T)
        False
        >>> may_overlap_itself(torch.zeros(4).unfold(0, 2, 1))
        True
    """
    reach = 0
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride <= reach:
            return True
        reach += (length - 1) * stride
    return False


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the elements as uint8, one dimension, C order.

    The result is a view of the tensor's own memory if that is contiguous on the CPU, else of a
    copy, which is read-only. The view keeps the storage alive.

    Args:
        tensor: A plain tensor without an `unsupported_reason`. The bytes of a conjugate or negative
            view are those of the values that it shows.

    Raises:
        UnsupportedValueError: The tensor has no bytes of its own.

    Complexity: 1 us for a small CPU tensor.
    """
    if tensor.is_cpu and not tensor.is_nested and is_direct(tensor):
        return writable_bytes(tensor)
    return writable_bytes(device_bytes(tensor).cpu()).toreadonly()


def writable_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the tensor's own memory as uint8, writable, one dimension.

    The view keeps the storage alive. *Careful*: it does not prevent a resize of the storage.

    Args:
        tensor: A plain contiguous CPU tensor that is no conjugate or negative view.

    Raises:
        UnsupportedValueError: The tensor has no bytes of its own.
    """
    num_bytes = tensor.nbytes
    if num_bytes == 0:
        return _EMPTY
    storage, address = tensor.untyped_storage(), tensor.data_ptr()
    needed = num_bytes + tensor.storage_offset() * tensor.itemsize
    if not address or storage.nbytes() < needed or tensor.dtype not in _NAMES:
        raise UnsupportedValueError(f"a tensor {unsupported_reason(tensor)}")
    array: Any = _bytes_type(num_bytes).from_address(address)
    array.storage = storage
    return memoryview(array).cast("B")


@lru_cache(maxsize=1024)
def _bytes_type(length: int) -> Any:
    """Returns the ctypes array type of a length; cached, as creating it costs 15 times its use."""
    return ctypes.c_ubyte * length


def device_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a plain tensor as uint8[n] in C order, on its device.

    The result is a view of the tensor's memory if that is contiguous. See `host_bytes`.

    Raises:
        UnsupportedValueError: The tensor has no bytes of its own, or its memory was freed. A kernel
            that reads freed memory ends all use of CUDA in the process.

    Examples:
        >>> device_bytes(torch.tensor([[1, 2], [3, 4]], dtype=torch.int8).T).tolist()
        [1, 3, 2, 4]
    """
    reason = unsupported_reason(tensor)
    if reason is not None:
        raise UnsupportedValueError(f"a tensor {reason}")
    plain = tensor.detach().resolve_conj().resolve_neg()
    # Why: torch 2.9 can't copy every dtype (float4), but it can copy others of the same width.
    plain = plain.view(_CARRIERS.get(plain.dtype, plain.dtype)).contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.view(-1).view(torch.uint8)


def is_direct(tensor: torch.Tensor) -> bool:
    """Returns whether the memory of a tensor holds its elements in C order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


@lru_cache(maxsize=1024)
def loses_nothing(stored: torch.dtype, target: torch.dtype) -> bool:
    """Returns whether every value of `stored` is a value of `target`.

    Infinities count as values, NaN payloads do not.

    Examples:
        >>> loses_nothing(torch.bfloat16, torch.float32), loses_nothing(torch.int64, torch.float32)
        (True, False)
    """
    if stored == target:
        return True
    if stored.is_complex or target.is_complex:
        real = stored.to_real() if stored.is_complex else stored
        return target.is_complex and loses_nothing(real, target.to_real())
    if target in _INTEGERS:
        return stored == torch.bool or (stored in _INTEGERS and _integers_fit(stored, target))
    # No cast to the exponent-only format is lossless: it has no zero and no sign.
    if target not in _FLOATS or target == torch.float8_e8m0fnu:
        return False
    bits, _, largest, infinities = _FLOATS[target]
    if stored in _INTEGERS:
        ends = torch.iinfo(stored)
        return max(ends.max, -1 - ends.min).bit_length() <= bits and ends.max <= largest
    if stored == torch.bool:
        return True
    return stored in _FLOATS and (
        _FLOATS[stored][0] <= bits
        and _FLOATS[stored][1] >= _FLOATS[target][1]
        and _FLOATS[stored][2] <= largest
        and _FLOATS[stored][3] <= infinities
    )


def _integers_fit(stored: torch.dtype, target: torch.dtype) -> bool:
    of, to = torch.iinfo(stored), torch.iinfo(target)
    return to.min <= of.min and of.max <= to.max
