"""Checkpoints for tests that look at them, and ways to damage one."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as stock

import ray_dcp

GOLDEN = Path(__file__).parents[1] / "golden"


def state(large: tuple[int, int] = (600, 500)) -> dict[str, Any]:
    """Returns tensors of many kinds, small and large, and two objects.

    Args:
        large: Shape of the largest.
    """
    generator = torch.Generator().manual_seed(0)
    return {
        "model": {
            "weight": torch.randn(37, 11, generator=generator),
            "large": torch.arange(large[0] * large[1], dtype=torch.int64).reshape(large),
            "half": torch.randn(5, 7, generator=generator).bfloat16(),
            "flag": torch.tensor(True),
            "empty": torch.zeros(0, 3),
            "complex": torch.randn(4, 2, generator=generator, dtype=torch.complex64),
            "bits": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
        },
        "step": 10,
        "note[x]": {"text": "hello", "items": [1, 2]},
    }


def tensors() -> dict[str, torch.Tensor]:
    """Returns the tensors of `state` by FQN."""
    return {f"model.{name}": value for name, value in state()["model"].items()}


def save(path: Path, **options: Any) -> Path:
    """Saves `state` with ray_dcp as one process."""
    ray_dcp.save(state(), checkpoint_id=path, no_dist=True, options=ray_dcp.SaveOptions(**options))
    return path


def sharding_metadata(offsets: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """Returns the `__metadata__` of a safetensors file of DCP, by the start of each chunk."""
    info = {name: {"saved_offsets": list(offset)} for name, offset in offsets.items()}
    return {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}


def save_stock(path: Path, values: dict[str, Any] | None = None) -> Path:
    """Saves values, by default `state`, with torch's own DCP as one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save(values or state(), checkpoint_id=path, no_dist=True)
    return path


def data_file(path: Path) -> Path:
    """Returns the largest data file of a checkpoint."""
    return max(path.rglob("*.distcp"), key=lambda file: file.stat().st_size)


def payload_of(path: Path, name: str) -> tuple[Path, int, int]:
    """Returns the file that holds a tensor, and the first and last byte of its payload."""
    view = ray_dcp.open(path)
    row = view.table.tensor.tolist().index(view.names.index(name))
    start = int(view.table.payload_offset[row])
    file = path / view.table.files[view.table.file[row]]
    return file, start, start + int(view.table.payload_bytes[row]) - 1


def flip(file: Path, offset: int, mask: int = 1) -> None:
    """Changes bits of one byte in place."""
    data = bytearray(file.read_bytes())
    data[offset] ^= mask
    file.write_bytes(data)


def stock_load(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Returns what stock DCP loads of the arrays of a state."""
    found = {
        name: torch.zeros(value.shape, dtype=torch.from_numpy(np.zeros(0, value.dtype)).dtype)
        for name, value in state.items()
        if isinstance(value, np.ndarray)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.load(found, checkpoint_id=str(path), no_dist=True)
    return {name: tensor.numpy() for name, tensor in found.items()}


def check_stock(path: Path, state: dict[str, Any]) -> None:
    """Checks that stock DCP loads the arrays of a state."""
    for name, found in stock_load(path, state).items():
        np.testing.assert_array_equal(found, state[name], err_msg=name)
