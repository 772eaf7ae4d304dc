"""A tensor's bytes are those of a contiguous copy of it, and only lossless casts count as such."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.errors import UnsupportedValueError
from ray_dcp.torch_adapter import tensors
from ray_dcp.torch_adapter.tensors import (
    dtype_name,
    dtype_of,
    host_bytes,
    loses_nothing,
    unsupported_reason,
    writable_bytes,
)

DTYPES = sorted(tensors._DTYPES.values(), key=str)


def of_bits(dtype: torch.dtype, num: int, seed: int = 0) -> torch.Tensor:
    """Elements of random bits; booleans are 0 and 1."""
    bits = np.random.default_rng(seed).integers(0, 256, num * dtype.itemsize, np.uint8)
    if dtype == torch.bool:
        bits &= 1
    return torch.from_numpy(bits).view(dtype)


def storage_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes by another way: the storage of a contiguous clone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some operators warn of experimental dtypes
        clone = tensor.detach().resolve_conj().resolve_neg()
        clone = clone.clone(memory_format=torch.contiguous_format)
    return bytes(clone.untyped_storage())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (0,), (2, 0)], ids=str)
def test_bytes_of_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    num = int(np.prod(shape))
    tensor = of_bits(dtype, max(num, 1))[:num].reshape(shape)
    data = host_bytes(tensor)
    assert (data.format, data.ndim, data.nbytes) == ("B", 1, num * dtype.itemsize)
    assert bytes(data) == storage_bytes(tensor)
    if num:
        target = of_bits(dtype, num, seed=1).reshape(shape)
        writable_bytes(target)[:] = data
        assert storage_bytes(target) == storage_bytes(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_views_give_the_bytes_that_they_show(dtype: torch.dtype) -> None:
    tensor = torch.arange(24.0).to(dtype).reshape(2, 3, 4)
    for view in (
        tensor.permute(2, 0, 1), tensor[:, 1], tensor[..., ::2], tensor[1:], tensor.expand(2, 3, 4),
        tensor[0, 0, 0].expand(5), torch.nn.Parameter(tensor), tensor.flatten()[3],
    ):  # fmt: skip
        assert bytes(host_bytes(view)) == storage_bytes(view)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bytes_of_a_gpu_tensor() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    assert bytes(host_bytes(tensor.cuda().T)) == storage_bytes(tensor.T)


def test_tensors_without_bytes_of_their_own_are_refused_with_a_way_out() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the end of quantised and sparse types
        cases = {
            "meta device": torch.empty(2, device="meta"),
            "to_dense": torch.eye(2).to_sparse(),
            "dequantize": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "nested tensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        }
    for words, tensor in cases.items():
        assert words in (unsupported_reason(tensor) or "")
        with pytest.raises(UnsupportedValueError, match=words):
            host_bytes(tensor)
    assert unsupported_reason(torch.ones(2)) is None


def test_names_are_those_of_the_format_and_come_back() -> None:
    for dtype in DTYPES:
        assert dtype_of(dtype_name(dtype)) is dtype
        assert ITEMSIZE[dtype_name(dtype)] == dtype.itemsize
    with pytest.raises(UnsupportedValueError, match="float7"):
        dtype_of("float7")


@pytest.mark.parametrize(
    "stored", [dtype for dtype in DTYPES if dtype.itemsize <= 2 and "float4" not in str(dtype)],
    ids=str,
)  # fmt: skip
def test_a_cast_loses_nothing_exactly_when_every_value_survives_it(stored: torch.dtype) -> None:
    if stored == torch.bool:
        values = torch.tensor([False, True])
    else:
        bits = torch.arange(1 << (8 * stored.itemsize), dtype=torch.int32)
        values = bits.to(torch.uint8 if stored.itemsize == 1 else torch.int16).view(stored)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        for target in DTYPES:
            if "float4" in str(target) or "e8m0" in str(target):
                assert loses_nothing(stored, target) == (stored == target)
                continue
            back = values.to(target)
            exact = (torch.int64, torch.int64)
            if target.is_complex:
                exact = (torch.complex128, torch.complex128)
            elif stored.is_floating_point or target.is_floating_point:
                exact = (torch.float64, torch.float64)
            was, now = values.to(exact[0]), back.to(exact[1])
            survived = bool(((was == now) | (was.isnan() & now.isnan())).all())
            if target == torch.uint64:  # int64 can't show what became of negative values
                survived = bool((values.double() >= 0).all()) and not stored.is_floating_point
            assert loses_nothing(stored, target) == survived, (stored, target)


def test_wide_casts() -> None:
    fine = {
        (torch.int32, torch.float64), (torch.int32, torch.int64), (torch.uint32, torch.int64),
        (torch.float32, torch.float64), (torch.float32, torch.complex64),
        (torch.complex64, torch.complex128), (torch.uint32, torch.float64),
    }  # fmt: skip
    lossy = {
        (torch.int64, torch.float64), (torch.int64, torch.float32), (torch.int32, torch.float32),
        (torch.uint64, torch.int64), (torch.int64, torch.uint64), (torch.float64, torch.float32),
        (torch.float32, torch.bfloat16), (torch.complex64, torch.float64),
        (torch.float64, torch.complex64), (torch.float32, torch.int64),
    }  # fmt: skip
    assert {pair for pair in fine | lossy if loses_nothing(*pair)} == fine
