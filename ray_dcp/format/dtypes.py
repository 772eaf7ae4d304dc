"""The torch dtypes whose raw bytes `torch.save` can store, by name, without torch.

Quantised dtypes (`qint8`, …) and the placeholders without storage (`int4`, `uint3`, …) are not
here: torch itself can't save or can't rebuild them from raw bytes alone.
"""

from __future__ import annotations

from types import MappingProxyType

from ray_dcp.errors import UnsupportedValueError

__all__ = ["DTYPE_OF_STORAGE", "ITEMSIZE", "NUMPY_DTYPES", "STORAGE_OF_DTYPE", "itemsize_of"]

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

ITEMSIZE = MappingProxyType(
    {
        "bfloat16": 2,
        "bits16": 2,
        "bits1x8": 1,
        "bits2x4": 1,
        "bits4x2": 1,
        "bits8": 1,
        "bool": 1,
        "complex128": 16,
        "complex32": 4,
        "complex64": 8,
        "float16": 2,
        "float32": 4,
        "float4_e2m1fn_x2": 1,
        "float64": 8,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "int16": 2,
        "int32": 4,
        "int64": 8,
        "int8": 1,
        "uint16": 2,
        "uint32": 4,
        "uint64": 8,
        "uint8": 1,
    }
)
"""Bytes of one element, by dtype name without the `torch.` prefix."""


NUMPY_DTYPES = frozenset(
    {
        "bool",
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    }
)
"""The torch dtypes that numpy has too, under the same name."""


def itemsize_of(dtype: str) -> int:
    """Returns the bytes of one element.

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
