"""Whatever a tensor subclass is made of: what is loaded is bit for bit what was saved."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

import ray_dcp
from tests.support.own_planners import OwnLoad, OwnSave

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float64)


def plain(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8, generator=made)
    bits = bits if dtype is torch.bool else bits * torch.randint(1, 255, (1,), generator=made)
    return bits.to(torch.uint8).view(dtype).reshape(shape)


def built(tree: Any, shape: tuple[int, ...], dtype: torch.dtype, seeds: Any) -> torch.Tensor:
    """Returns a tensor of this tree: None is a plain one, a pair a subclass of both."""
    if tree is None:
        return plain(next(seeds), shape, dtype)
    return TwoTensor(*(built(one, shape, dtype, seeds) for one in tree))


def leaves(tensor: Any) -> list[bytes]:
    if isinstance(tensor, TwoTensor):
        return [*leaves(tensor.a), *leaves(tensor.b)]
    return [tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()]


TREES = st.recursive(st.none(), lambda one: st.tuples(one, one), max_leaves=5)
STATES = st.dictionaries(
    st.sampled_from("abcd"),
    st.tuples(TREES, st.lists(st.integers(1, 4), max_size=3).map(tuple), st.sampled_from(_DTYPES)),
    min_size=1,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(STATES, st.sampled_from(["stock", "native", "hooks"]), st.sampled_from([None, OwnLoad]))
def test_subclasses_come_back_bit_for_bit(
    tmp_path_factory: Any, state: dict[str, Any], saver: str, planner: Any
) -> None:
    path, seeds = tmp_path_factory.mktemp("c"), itertools.count()
    saved = {name: built(*how, seeds) for name, how in state.items()}
    target = {name: built(*how, seeds) for name, how in state.items()}
    with torch.serialization.safe_globals([TwoTensor]):
        if saver == "stock":
            stock.save(saved, checkpoint_id=path, no_dist=True)
        else:
            how = OwnSave() if saver == "hooks" else None
            ray_dcp.save(saved, checkpoint_id=path, planner=how)
        tensors = dict(target)
        ray_dcp.load(target, checkpoint_id=path, planner=planner and planner())
        found = ray_dcp.read_state_dict(path)
    for name, tensor in saved.items():
        assert target[name] is tensors[name]
        assert leaves(target[name]) == leaves(tensor)
        assert type(found[name]) is type(tensor)
        assert leaves(found[name]) == leaves(tensor)
