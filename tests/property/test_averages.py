"""Averages of any sharding, container and writer are what numpy computes, to the last bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ray_dcp
from ray_dcp import averaging
from tests.support import checkpoints

FLOATS = (
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64",
    "complex128",
)  # fmt: skip
WRITERS = ("native", "rows", "columns", "stock", "safetensors")


def cut(tensor: torch.Tensor, dim: int, at: int) -> torch.Tensor:
    """Returns a tensor that is saved in two parts, as ranks that shard it would save it."""
    shards = tensor.clone()
    sizes = [list(tensor.shape), list(tensor.shape)]
    sizes[0][dim], sizes[1][dim] = at, tensor.shape[dim] - at
    offsets = [[0] * tensor.ndim, [at * (d == dim) for d in range(tensor.ndim)]]
    shards.global_shape = torch.Size(tensor.shape)
    shards.global_offsets = shards.local_offsets = tuple(map(torch.Size, offsets))
    shards.local_sizes = tuple(map(torch.Size, sizes))
    return shards


def write(path: Path, tensor: torch.Tensor, writer: str, at: float) -> Path:
    if writer in ("rows", "columns") and tensor.ndim:
        dim = 0 if writer == "rows" else tensor.ndim - 1
        tensor = cut(tensor, dim, round(at * tensor.shape[dim]))
    state = {"w": tensor}
    if writer == "stock":
        return checkpoints.save_stock(path, state)
    ray_dcp.save(state, checkpoint_id=path, no_dist=True)
    if writer == "safetensors":
        ray_dcp.export(path, path.with_suffix(".safetensors"))
        return path.with_suffix(".safetensors")
    return path


@st.composite
def averages(draw):
    dtype = draw(st.sampled_from(FLOATS))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=9))
    number = draw(st.integers(1, 8))
    seed = draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if "complex" in dtype else torch.float64
    scale = 10.0 ** torch.randint(-3, 3, (number, *shape), generator=generator)
    values = torch.randn((number, *shape), generator=generator, dtype=wide) * scale
    weights = draw(
        st.none() | st.lists(st.floats(0.01, 10) | st.just(0.0), min_size=number, max_size=number)
    )
    if weights is not None and not any(weights):
        weights[0] = 1.0
    writers = draw(st.lists(st.sampled_from(WRITERS), min_size=number, max_size=number))
    if "complex" in dtype:
        writers = ["native" if one == "safetensors" else one for one in writers]
    return values.to(getattr(torch, dtype)), weights, writers, draw(st.floats(0, 1))


def expected(values: torch.Tensor, weights: list[float] | None) -> np.ndarray:
    """What numpy adds up, in the order of the sources."""
    numbers = [one.to(torch.complex128 if one.is_complex() else torch.float64) for one in values]
    factors = np.array([1.0] * len(values) if weights is None else weights)
    total = numbers[0].numpy() * factors[0]
    for one, factor in zip(numbers[1:], factors[1:], strict=True):
        total = total + one.numpy() * factor
    return total / np.sum(factors)


@settings(max_examples=12)
@given(averages(), st.sampled_from((16, 72, 8 << 20)))
def test_an_average_is_that_of_numpy_to_the_last_bit(case, box_bytes):
    values, weights, writers, at = case
    event(f"{len(values)} sources of {values.dtype}")
    with tempfile.TemporaryDirectory() as folder, settings_of(box_bytes):
        sources = [
            write(Path(folder, f"source-{number}"), value, writer, at)
            for number, (value, writer) in enumerate(zip(values, writers, strict=True))
        ]
        means = {}
        for dtype in (None, "float64"):
            out = f"{folder}/{dtype}"
            report = ray_dcp.average(sources, out, weights=weights, dtype=dtype)
            assert report.averaged == ("w",)
            means[dtype] = ray_dcp.read_state_dict(out)["w"]
            assert ray_dcp.verify(out).ok
    wanted = expected(values, weights)
    if not values.is_complex():
        assert means["float64"].numpy().tobytes() == wanted.tobytes()
    if values.dtype in (torch.float16, torch.float32, torch.complex64):
        # torch rounds by way of float32; numpy rounds once.
        wanted = wanted.astype(str(values.dtype).removeprefix("torch."))
    kept = torch.from_numpy(np.asarray(wanted)).to(values.dtype)
    assert means[None].dtype == values.dtype
    assert means[None].flatten().view(torch.uint8).equal(kept.flatten().view(torch.uint8))
    if len(values) < 8 and values.dtype == torch.float64 and values[0].numel() > 1:
        own = np.average(np.stack([one.numpy() for one in values]), axis=0, weights=weights)
        assert means["float64"].numpy().tobytes() == own.tobytes()


class settings_of:  # noqa: N801 - a context, as pytest's fixtures are not for hypothesis
    """Cuts tensors into boxes of a length, in bytes of the sum."""

    def __init__(self, box_bytes: int) -> None:
        self.box_bytes, self.before = box_bytes, averaging.BOX_BYTES

    def __enter__(self) -> None:
        averaging.BOX_BYTES = self.box_bytes

    def __exit__(self, *_: object) -> None:
        averaging.BOX_BYTES = self.before
