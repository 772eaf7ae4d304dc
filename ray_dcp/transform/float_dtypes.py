"""The floating-point dtypes to which an export or import converts."""

from __future__ import annotations

from typing import Any

from ray_dcp.errors import (
    InvalidRequestError,
)

_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32",
            "float": "float32", "fp64": "float64"}  # fmt: skip
_FLOATS = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")


def float_dtype(dtype: str | None) -> str | None:
    """Returns the full name of a floating-point dtype.

    Raises:
        InvalidRequestError: It is none.
    """
    if dtype is None:
        return None
    name = _ALIASES.get(dtype, dtype) if isinstance(dtype, str) else ""
    if name not in _FLOATS:
        raise InvalidRequestError(
            f"dtype must be one of {', '.join((*_FLOATS, *_ALIASES))}, but is {dtype!r}",
            key="dtype",
        )
    return name


def torch_dtype(dtype: str | None) -> Any:
    """Returns torch's dtype of a name as `float_dtype` takes it; None for None."""
    name = float_dtype(dtype)
    if name is None:
        return None
    from ray_dcp.torch_adapter.tensors import dtype_of

    return dtype_of(name)
