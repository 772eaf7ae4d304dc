"""What checkpoints are exchanged with: values of every kind, the same under every torch.

Imported by the tests and by the program that they run under another torch, so nothing but torch
and numpy is needed here.
"""

from __future__ import annotations

import collections
import datetime
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as stock

DTYPES = tuple(
    sorted({str(v)[6:] for v in vars(torch).values() if isinstance(v, torch.dtype)} - {"half"})
)
"""Every dtype that this torch has, by name."""


def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Returns a tensor of fixed bit patterns, NaNs and all."""
    data = (torch.arange(math.prod(shape) * dtype.itemsize) * 37 + 11) % 251
    data = (data % 2 if dtype == torch.bool else data).to(torch.uint8)
    return data.view(dtype).reshape(shape)


def shapes(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns tensors of every memory layout that a strided tensor can have."""
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
    }


def raw(tensor: torch.Tensor) -> bytes:
    """Returns the elements of a tensor as bytes, in C order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
