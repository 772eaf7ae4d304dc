"""What checkpoints are exchanged with: values of every kind, the same under every torch.

Imported by the tests and by the program that they run under another torch, so nothing but torch
and numpy is needed here.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import math
import pathlib
import uuid
from typing import Any

import numpy as np
import torch

DTYPES = tuple(sorted({str(v)[6:] for v in vars(torch).values() if isinstance(v, torch.dtype)}))
"""Every dtype that this torch has, by name: a new one can't be forgotten."""


def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Returns a tensor of fixed bit patterns, NaNs and all."""
    data = (torch.arange(math.prod(shape) * dtype.itemsize) * 37 + 11) % 251
    data = (data % 2 if dtype == torch.bool else data).to(torch.uint8)
    return data.view(dtype).reshape(shape)


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns tensors of every memory layout that a strided tensor can have."""
    shared = bits(dtype, 40)
    return {
        "scalar": bits(dtype),
        "one": bits(dtype, 1),
        "empty": bits(dtype, 0, 3),
        "matrix": bits(dtype, 5, 7),
        "large": bits(dtype, 200, 331),
        "transposed": bits(dtype, 4, 6).t(),
        "sliced": bits(dtype, 6, 8)[1:5, ::3],
        "tail": bits(dtype, 100)[90:],
        "expanded": bits(dtype, 3, 1).expand(3, 4),
        "permuted": bits(dtype, 2, 3, 4, 5).permute(0, 3, 1, 2),
        "tied": shared,
        "tied_too": shared,
        "overlapping": shared[5:30],
    }


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor to load into, all bits zero."""
    zeros = torch.zeros(tensor.numel() * tensor.dtype.itemsize, dtype=torch.uint8)
    return zeros.view(tensor.dtype).reshape(tensor.shape)


def blanks(values: Any) -> Any:
    """Returns a state to load into: blank tensors, and None for everything that is no container."""
    if isinstance(values, torch.Tensor):
        return blank(values)
    if isinstance(values, dict):
        return {key: blanks(value) for key, value in values.items()}
    if isinstance(values, list) and any(isinstance(v, (dict, list, torch.Tensor)) for v in values):
        return [blanks(value) for value in values]
    return None


def raw(tensor: torch.Tensor) -> bytes:
    """Returns the elements of a tensor as bytes, in C order."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype.itemsize == 1:  # before the copy: torch 2.9 can't copy float4
        tensor = tensor.view(torch.uint8)
    whole = tensor.clone(memory_format=torch.contiguous_format)
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes()


def same(found: Any, expected: Any) -> bool:
    """Whether two values are of one type and equal, bit by bit where they have bits."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, torch.Tensor):
        kind = (found.dtype, found.shape) == (expected.dtype, expected.shape)
        return kind and raw(found) == raw(expected)
    if isinstance(expected, (np.ndarray, np.generic)):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            same(found[key], value) for key, value in expected.items()
        )
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Returns the names of all values that are not the same."""
    names = found.keys() | expected.keys()
    missing = object()
    return sorted(
        name for name in names if not same(found.get(name, missing), expected.get(name, missing))
    )


def objects() -> dict[str, Any]:
    """Returns values that are no tensors, of every kind that state dicts are known to hold."""
    return {
        "int": 7,
        "huge": 1 << 200,
        "negative": -3,
        "float": 0.1,
        "infinite": float("-inf"),
        "bool": True,
        "complex": 1 - 2j,
        "text": "grüße \U0001f600",
        "bytes": b"\0\xff",
        "none": None,
        "tuple": (1, ("a", 2.5), [None]),
        "list": [1, "a", (2,)],
        "empty_list": [],
        "set": {1, 2},
        "frozenset": frozenset({"a"}),
        "slice": (slice(1, None, 2), range(3)),
        "datetime": datetime.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=datetime.timezone.utc),
        "timedelta": datetime.timedelta(days=1, microseconds=2),
        "decimal": decimal.Decimal("1.10"),
        "uuid": uuid.UUID(int=5),
        "path": (pathlib.PurePosixPath("a/b"),),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "array_of_texts": np.array(["a", "bc"]),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "numpy_scalar": np.float64(0.25),
        "numpy_bool": np.bool_(True),
        "numpy_dtype": (np.dtype("int16"),),
        "ordered": (collections.OrderedDict([("b", 1), ("a", 2)]),),
        "counter": (collections.Counter("aab"),),
        "pair": (torch.arange(3), "beside a tensor"),
        "torch_values": (torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")),
    }


def piecemeal() -> dict[str, Any]:
    """Returns objects that stock DCP pickles in a way that no safe load of torch can read."""
    counts: collections.defaultdict[str, int] = collections.defaultdict(int)
    counts["a"] += 1
    return {"counts": (counts,), "window": collections.deque([1, 2], maxlen=4)}


def nested() -> dict[str, Any]:
    """Returns a state dict with containers in containers."""
    return {
        "model": {
            "layers": [{"w": bits(torch.float32, 3, 4), "name": "a"}, {"w": bits(torch.int8, 5)}],
            "sizes": [1, 2, 3],
            "deep": {"a": {"b": {"c": [[bits(torch.bfloat16, 2)], 4]}}},
        },
        "dotted.key": {"x.y": bits(torch.float16, 2), "plain": "text"},
        "rng": [bits(torch.uint8, 16), bits(torch.uint8, 24)],
        "step": 12,
    }
