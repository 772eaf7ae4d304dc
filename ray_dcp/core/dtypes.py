"""Names of dtypes, and conversion of stored bytes to numbers, without torch.

The dtypes are those of torch whose raw bytes `torch.save` can store. Quantised dtypes (`qint8`, …)
and the placeholders without storage (`int4`, `uint3`, …) are excluded: torch itself can't save
them, or can't rebuild them from raw bytes alone.

`as_numbers` converts stored values of every readable dtype, including bfloat16 and float8, to
float64, and complex values to complex128; int64 beyond 2**53 is rounded.
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_dcp.errors import UnsupportedValueError

STORAGE_OF_DTYPE = MappingProxyType(
    {
        "bfloat16": "BFloat16Storage",
        "bool": "BoolStorage",
        "complex128": "ComplexDoubleStorage",
        "complex64": "ComplexFloatStorage",
        "float16": "HalfStorage",
        "float32": "FloatStorage",
        "float64": "DoubleStorage",
        "int16": "ShortStorage",
        "int32": "IntStorage",
        "int64": "LongStorage",
        "int8": "CharStorage",
        "uint8": "ByteStorage",
    }
)
"""Dtypes with a typed storage, which `_rebuild_tensor_v2` rebuilds. The others go through
`_rebuild_tensor_v3` and an untyped storage. Source: torch/storage.py `_dtype_to_storage_type_map`,
torch/_tensor.py `_reduce_ex_internal`."""

DTYPE_OF_STORAGE = MappingProxyType({v: k for k, v in STORAGE_OF_DTYPE.items()})

_WIDTHS = {
    1: "bits1x8 bits2x4 bits4x2 bits8 bool float4_e2m1fn_x2 float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int8 uint8",
    2: "bfloat16 bits16 float16 int16 uint16",
    4: "bcomplex32 complex32 float32 int32 uint32",
    8: "complex64 float64 int64 uint64",
    16: "complex128",
}
ITEMSIZE = MappingProxyType(
    {dtype: width for width, dtypes in _WIDTHS.items() for dtype in dtypes.split()}
)
"""Bytes per element, by dtype name without the `torch.` prefix."""


NUMPY_DTYPES = frozenset(
    {
        "bool",
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    }
)
"""The torch dtypes that numpy has under the same name."""


def itemsize_of(dtype: str) -> int:
    """Returns the bytes per element.

    Args:
        dtype: Name of a torch dtype, without prefix.

    Raises:
        UnsupportedValueError: No tensor of this dtype can be stored as raw bytes.
    """
    itemsize = ITEMSIZE.get(dtype)
    if itemsize is None:
        raise UnsupportedValueError(
            f"Expected a dtype that can be stored as raw bytes ({', '.join(ITEMSIZE)}), "
            f"found {dtype!r}; convert the tensor before saving it"
        )
    return itemsize


_FLOAT8 = {
    # name: (exponent bits, mantissa bits, bias, has infinities, codes of NaN)
    "float8_e5m2": (5, 2, 15, True, ()),
    "float8_e4m3fn": (4, 3, 7, False, (0x7F, 0xFF)),
    "float8_e5m2fnuz": (5, 2, 16, False, (0x80,)),
    "float8_e4m3fnuz": (4, 3, 8, False, (0x80,)),
}
READABLE = frozenset({*NUMPY_DTYPES, "bfloat16", "float8_e8m0fnu", *_FLOAT8})
"""Names of the torch dtypes that `as_numbers` can convert."""


def raw_dtype(dtype: str) -> np.dtype[Any]:
    """Returns the numpy dtype that holds the bytes of a torch dtype.

    Args:
        dtype: Name of a torch dtype.

    Examples:
        >>> raw_dtype("float32").name, raw_dtype("bfloat16").name
        ('float32', 'uint16')
    """
    return np.dtype(dtype) if dtype in NUMPY_DTYPES else np.dtype(f"u{itemsize_of(dtype)}")


def as_numbers(raw: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Returns stored values as float64 or complex128.

    Args:
        raw: Stored values, as an array of `raw_dtype(dtype)` of any shape.
        dtype: Name of a torch dtype, one of `READABLE`.

    Examples:
        >>> as_numbers(np.array([0x3F80, 0xC000], np.uint16), "bfloat16").tolist()
        [1.0, -2.0]
        >>> as_numbers(np.array([0x38, 0x7F], np.uint8), "float8_e4m3fn").tolist()
        [1.0, nan]
    """
    # Why ignored: here a signalling NaN is like any other NaN.
    with np.errstate(invalid="ignore"):
        return _numbers(raw, dtype)


def _numbers(raw: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    if dtype == "bfloat16":
        words = np.left_shift(raw.astype(np.uint32), np.uint32(16))
        return words.view(np.float32).astype(np.float64)
    if dtype == "float8_e8m0fnu":
        return np.where(raw == 255, np.nan, np.exp2(raw.astype(np.float64) - 127))
    if dtype in _FLOAT8:
        found: npt.NDArray[np.float64] = _float8(dtype)[raw]
        return found
    if dtype.startswith("complex"):
        return raw.astype(np.complex128)
    return raw.astype(np.float64)


@cache
def _float8(dtype: str) -> npt.NDArray[np.float64]:
    """Returns the values of the 256 codes."""
    exponent_bits, mantissa_bits, bias, has_infinities, not_numbers = _FLOAT8[dtype]
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = np.exp2(exponent.astype(np.float64) - bias) * (1 + mantissa)
    value = sign * np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), normal)
    if has_infinities:
        top = exponent == (1 << exponent_bits) - 1
        value = np.where(top, np.where(mantissa == 0, sign * np.inf, np.nan), value)
    value[list(not_numbers)] = np.nan
    return value
