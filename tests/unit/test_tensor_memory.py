"""Memory and values of tensors: a save reads and a load fills it, no more; NaN and infinities.

Tensors that reach beyond their memory are refused by name, before anything is written.
"""

from __future__ import annotations

import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

import ray_dcp
from ray_dcp import errors
from ray_dcp.commit_protocol.messages import OpKey, Target
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.options import SaveOptions
from ray_dcp.torch_adapter import tensors
from ray_dcp.torch_adapter.capture import (
    Capture,
    capture,
    checked_finite,
    nonfinite_of,
)
from ray_dcp.torch_adapter.tensors import (
    dtype_name,
    dtype_of,
    host_bytes,
    loses_nothing,
)
from tests.support.adapter import OwnLoad, OwnReader, OwnResolve, OwnSave, OwnWriter, as_rank
from tests.support.world import run_ranks, save_rank


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Takes the memory, as FSDP does between uses of a parameter."""
    tensor.untyped_storage().resize_(0)
    return tensor


def short(tensor: torch.Tensor) -> torch.Tensor:
    """Takes half of the memory."""
    tensor.untyped_storage().resize_(tensor.nbytes // 2)
    return tensor


def one_mesh() -> Any:
    return init_device_mesh("cpu", (1,))


def late_view() -> torch.Tensor:
    """A view that a storage resized to its own length does not hold."""
    base = torch.ones(64)
    view = base[32:]
    base.untyped_storage().resize_(view.nbytes)
    return view


def column() -> torch.Tensor:
    base = torch.ones(8, 8)
    view = base[:, 0]
    base.untyped_storage().resize_(128)
    return view


LOST: dict[str, Callable[[], Any]] = {
    "freed": lambda: freed(torch.ones(64)),
    "freed view": lambda: freed(torch.ones(64)[8:]),
    "short": lambda: short(torch.ones(64)),
    "late view": late_view,
    "column": column,
    "short transposed": lambda: short(torch.ones(8, 8).T),
    "freed conjugate": lambda: freed(torch.ones(64, dtype=torch.complex64).conj()),
    "two tensor": lambda: TwoTensor(torch.ones(64), freed(torch.ones(64))),
    "DTensor": lambda: DTensor.from_local(short(torch.ones(64)), one_mesh(), [Replicate()]),
    "DTensor of two": lambda: DTensor.from_local(
        TwoTensor(torch.ones(64), freed(torch.ones(64))), one_mesh(), [Shard(0)]
    ),
}

NESTED: dict[str, Callable[[], Any]] = {
    "tuple": lambda: (1, freed(torch.ones(64))),
    "PerRank": lambda: ray_dcp.PerRank({"x": short(torch.ones(64))}),
    "list": lambda: [1, (short(torch.ones(64)),)],
}


@pytest.fixture
def rank() -> Iterator[None]:
    with as_rank(0, 1), torch.serialization.safe_globals([TwoTensor]):
        yield


SAVES: dict[str, Callable[[Any, Any], Any]] = {
    "native": lambda state, path: ray_dcp.save(state, checkpoint_id=path, no_dist=True),
    "async": lambda state, path: ray_dcp.async_save(
        state, checkpoint_id=path, no_dist=True
    ).result(),
    "planner": lambda state, path: ray_dcp.save(
        state, checkpoint_id=path, planner=OwnSave(), no_dist=True
    ),
    "foreign": lambda state, path: ray_dcp.save(
        state, checkpoint_id=path, storage_writer=OwnWriter(path), no_dist=True
    ),
}


# Torch's own planner pickles what is nested in objects.
@pytest.mark.parametrize(
    ("what", "way"),
    [*product(LOST, SAVES), *((what, way) for what in NESTED for way in ("native", "async"))],
)
def test_a_save_refuses_what_reaches_beyond_its_memory(
    what: str, way: str, tmp_path: Any, rank: None
) -> None:
    state = {"beside": torch.ones(4), "m": {"w": {**LOST, **NESTED}[what]()}}
    with pytest.raises(errors.UnsupportedValueError, match=r"'m\.w[.'].*(memory|storage)"):
        SAVES[way](state, tmp_path / "c")
    with pytest.raises(errors.CheckpointNotFoundError):
        ray_dcp.load({"beside": torch.zeros(4)}, checkpoint_id=tmp_path / "c", no_dist=True)


LOADS: dict[str, Callable[[Any, Any], Any]] = {
    "native": lambda state, path: ray_dcp.load(state, checkpoint_id=path, no_dist=True),
    "planner": lambda state, path: ray_dcp.load(
        state, checkpoint_id=path, planner=OwnLoad(), no_dist=True
    ),
    "resolving": lambda state, path: ray_dcp.load(
        state, checkpoint_id=path, planner=OwnResolve(), no_dist=True
    ),
    "foreign": lambda state, path: ray_dcp.load(
        state, checkpoint_id=path, storage_reader=OwnReader(path), no_dist=True
    ),
}


def sound(lost: Any) -> Any:
    """A value like one that has lost its memory."""
    if isinstance(lost, DTensor):
        return DTensor.from_local(sound(lost.to_local()), one_mesh(), lost.placements)
    if isinstance(lost, TwoTensor):
        return TwoTensor(torch.full((64,), 3.0), torch.full((64,), 4.0))
    return torch.ones(lost.shape, dtype=lost.dtype)


@pytest.mark.parametrize("way", LOADS)
@pytest.mark.parametrize("what", LOST)
def test_a_load_refuses_targets_that_reach_beyond_their_memory(
    what: str, way: str, tmp_path: Any, rank: None
) -> None:
    target = {"beside": torch.zeros(4), "m": {"w": LOST[what]()}}
    saved = {"beside": torch.ones(4), "m": {"w": sound(target["m"]["w"])}}
    ray_dcp.save(saved, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(errors.UnsupportedValueError, match=r"'m\.w'.*(memory|storage)"):
        LOADS[way](target, tmp_path / "c")
    if way != "resolving":
        assert target["beside"].tolist() == [0.0] * 4


def test_what_is_taken_away_while_it_is_being_saved_is_named(tmp_path: Any) -> None:
    state = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(8)}
    captured = capture(state, rank=0, world_size=1)
    freed(state["b"])
    with pytest.raises(errors.UnsupportedValueError, match="'b' was changed while"):
        captured.source(1)


def test_what_is_read_outlives_its_tensor(tmp_path: Any) -> None:
    tensor = torch.full((1 << 16,), 7, dtype=torch.uint8)
    data = host_bytes(tensor)
    part = data[100:200]
    tensor.data = torch.zeros(1)
    del tensor, data
    gc.collect()
    torch.full((1 << 16,), 9, dtype=torch.uint8)
    assert bytes(part) == b"\7" * 100


# Nothing else of an object changes


def plain_values() -> dict[str, Any]:
    torch.manual_seed(0)
    base = torch.randn(8, 8)
    hooked = torch.nn.Parameter(torch.randn(4))
    hooked.register_hook(lambda grad: grad)
    learned = torch.nn.Parameter(torch.randn(4))
    learned.grad = torch.randn(4)
    values: dict[str, Any] = {
        "plain": torch.randn(4, 4),
        "large": torch.randn(1 << 16),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.0),
        "parameter": learned,
        "frozen": torch.nn.Parameter(torch.randn(4), requires_grad=False),
        "hooked": hooked,
        "buffer": torch.nn.Buffer(torch.randn(3)),
        "requires grad": torch.randn(3, requires_grad=True),
        "no leaf": learned * 2,
        "base": base,
        "transposed": torch.randn(4, 8).T,
        "strided": torch.randn(8, 8)[::2, 1:],
        "channels last": torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
        "inference": _inference(),
    }
    for dtype in (
        torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64,
        torch.complex128, torch.float8_e4m3fn,
    ):  # fmt: skip
        values[str(dtype)] = torch.randn(6).to(dtype)
    return values


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(4)


def sharded_values() -> dict[str, Any]:
    return {
        "DTensor": DTensor.from_local(torch.randn(4), one_mesh(), [Shard(0)]),
        "replicated": DTensor.from_local(torch.randn(4), one_mesh(), [Replicate()]),
        "DTensor parameter": torch.nn.Parameter(
            DTensor.from_local(torch.randn(4), one_mesh(), [Shard(0)])
        ),
        "two": TwoTensor(torch.full((4,), 3.0), torch.full((4,), 3.0)),
        "DTensor of two": DTensor.from_local(
            TwoTensor(torch.full((4,), 3.0), torch.full((4,), 3.0)), one_mesh(), [Shard(0)]
        ),
    }


def objects() -> dict[str, Any]:
    return {
        "array": np.arange(12.0).reshape(3, 4).T,
        "tuple": (1, torch.randn(3), np.ones(2)),
        "ordered": OrderedDict(a=torch.randn(2), b=[torch.randn(2)]),
        "number": 3,
    }


def expanded() -> torch.Tensor:
    return torch.randn(1, 3).expand(4, 3)


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from tensors_within(getattr(value, name))
        if value.is_leaf and value.grad is not None:
            yield from tensors_within(value.grad)
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.optim.Optimizer):
        yield from tensors_within(list(value.state.values()))
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_within(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_within(each)


def facts(value: Any, *, with_values: bool) -> list[Any]:
    """All that can be seen of the tensors in a value."""
    found: list[Any] = []
    for tensor in tensors_within(value):
        fact: list[Any] = [
            id(tensor), type(tensor), tensor.dtype, tensor.device, tensor.layout,
            tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.requires_grad,
            tensor.is_leaf, tensor.is_conj(), tensor.is_neg(), tensor.is_inference(),
            dict(tensor._backward_hooks or {}), sorted(vars(tensor)), tensor.grad_fn,
            id(tensor.grad) if tensor.is_leaf else None, tensor._base is None,
        ]  # fmt: skip
        if type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            storage = tensor.untyped_storage()
            fact += [
                tensor.data_ptr(), storage.data_ptr(), storage.nbytes(), storage.resizable(),
                storage.is_shared(), tensor.is_pinned(),
            ]  # fmt: skip
        if with_values:
            fact.append(None if tensor.is_inference() else tensor._version)
            if not isinstance(tensor, (DTensor, TwoTensor)):
                fact.append(tensor.detach().clone().to(torch.complex128).tolist())
        found.append(fact)
    return found


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": plain_values,
    "expanded": lambda: {"expanded": expanded()},
    "sharded": sharded_values,
    "objects": objects,
}


# A sharded value is written by torch itself to a foreign storage.
@pytest.mark.parametrize(
    ("kind", "way"), sorted({*product(KINDS, SAVES)} - {("sharded", "foreign")})
)
def test_a_save_changes_nothing(kind: str, way: str, tmp_path: Any, rank: None) -> None:
    state = KINDS[kind]()
    before = facts(state, with_values=True)
    flags = {k: str(v.flags) for k, v in state.items() if isinstance(v, np.ndarray)}
    SAVES[way](state, tmp_path / "c")
    assert facts(state, with_values=True) == before
    assert {k: str(v.flags) for k, v in state.items() if isinstance(v, np.ndarray)} == flags


@pytest.mark.parametrize("way", LOADS)
@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_a_load_changes_nothing_but_values(kind: str, way: str, tmp_path: Any, rank: None) -> None:
    state = KINDS[kind]()
    ray_dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    before = facts(state, with_values=False)
    versions = {
        name: value._version
        for name, value in state.items()
        if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_inference()
    }
    LOADS[way](state, tmp_path / "c")
    assert facts(state, with_values=False) == before
    # Autograd has to know of what was written.
    for name, version in versions.items():
        assert state[name]._version > version or not state[name].numel(), name


def test_what_was_saved_and_loaded_can_still_be_resized(tmp_path: Any) -> None:
    state = {"w": torch.ones(1 << 16), "v": torch.ones(4)}
    ray_dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    ray_dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    for tensor in state.values():
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(tensor.nbytes)


@pytest.mark.parametrize("way", ["native", "async", "planner"])
def test_fsdp2_reshards_after_it_was_saved_unsharded(way: str, tmp_path: Any) -> None:
    with as_rank(0, 2):
        module = torch.nn.Linear(64, 64)
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
        module.unshard()
        SAVES[way](dict(module.named_parameters()), tmp_path / "c")
        module.reshard()
        module.unshard()
        ray_dcp.load(dict(module.named_parameters()), checkpoint_id=tmp_path / "c", no_dist=True)
        module.reshard()


DTYPES = sorted(tensors._DTYPES.values(), key=str)


def test_names_are_those_of_the_format_and_come_back() -> None:
    for dtype in DTYPES:
        assert dtype_of(dtype_name(dtype)) is dtype
        assert ITEMSIZE[dtype_name(dtype)] == dtype.itemsize
    with pytest.raises(errors.UnsupportedValueError, match="float7"):
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


# --- NaN and infinities ---------------------------------------------------------------------------


REFUSE = SaveOptions(nonfinite="refuse")


def captured(state: dict, options: SaveOptions, rank: int, world_size: int) -> Capture:
    found = capture(state, rank=rank, world_size=world_size, options=options)
    return checked_finite(found, options, rank)


def results(states: list[dict], path: Path, options: SaveOptions):
    """Saves one state for each rank; returns how each ended."""
    world_size = len(states)
    return run_ranks(
        [
            save_rank(
                OpKey("save", 0), rank=rank, world_size=world_size, target=Target(str(path)),
                options=options,
                capture=partial(captured, state, options, rank, world_size),
            )
            for rank, state in enumerate(states)
        ]
    )  # fmt: skip


@pytest.mark.parametrize("refused_on", [[1], [0, 2]])
def test_a_refusal_fails_the_save_on_all_ranks_and_names_tensor_rank_and_count(
    tmp_path: Path, refused_on: list[int]
):
    before = [{"w": torch.ones(6)}] * 3
    assert all(r.error is None for r in results(before, tmp_path / "a", SaveOptions()))
    states = [{f"w{rank}": torch.ones(6), "s": torch.ones(2)} for rank in range(3)]
    for rank in refused_on:
        states[rank][f"w{rank}"][2] = float("nan")
        states[rank][f"w{rank}"][4] = -float("inf")
    ended = results(states, tmp_path / "a", SaveOptions(nonfinite="refuse"))
    for result in ended:
        assert isinstance(result.error, errors.NonFiniteError)
        assert result.error.rank == refused_on[0]
        first = f"rank {refused_on[0]}, found 'w{refused_on[0]}' (1 NaN and 1 infinite of 6)"
        assert first in str(result.error)
    assert set(ended[0].error.failures) == set(refused_on)
    assert ray_dcp.open(tmp_path / "a").names == ("w",)
    assert ray_dcp.collect(tmp_path / "a").kept == ()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_options_of_a_save_refuse_or_warn(tmp_path: Path, asynchronous: bool):
    bad = {"good": torch.ones(3), "bad": torch.tensor([1.0, float("inf")]), "int": torch.ones(1)}

    def save(path: Path, nonfinite: str) -> None:
        options = SaveOptions(nonfinite=nonfinite)
        if asynchronous:
            ray_dcp.async_save(bad, checkpoint_id=path, options=options).committed()
        else:
            ray_dcp.save(bad, checkpoint_id=path, options=options)

    with pytest.raises(errors.NonFiniteError, match=r"'bad' \(0 NaN and 1 infinite of 2\)"):
        save(tmp_path / "refused", "refuse")
    assert not list(tmp_path.glob("refused/*"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path / "ignored", "ignore")
    if asynchronous:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            save(tmp_path / "warned", "warn")
        assert any("'bad'" in str(one.message) for one in told)
    else:
        with pytest.warns(UserWarning, match="expected finite values on rank 0"):
            save(tmp_path / "warned", "warn")
    assert ray_dcp.open(tmp_path / "warned")["bad"][1] == float("inf")


def test_values_whose_sum_overflows_are_not_mistaken_for_infinities():
    large = [torch.tensor([1e308, 1e308], dtype=torch.float64), torch.full((3,), 6e4).half()]
    assert nonfinite_of(large.__getitem__, range(2)) == {}


def test_storages_of_others_can_not_promise_it(tmp_path: Path):
    with pytest.raises(errors.InvalidRequestError, match="needs a storage of ray_dcp"):
        ray_dcp.save({"w": torch.ones(1)}, storage_writer=OwnWriter(tmp_path / "a"), options=REFUSE)
    with pytest.raises(errors.InvalidRequestError, match="nonfinite must be one of"):
        SaveOptions(nonfinite="raise")
    assert not issubclass(errors.NonFiniteError, errors.UnsupportedValueError)


def test_every_rank_warns_of_its_own_values_and_the_first_of_them_once(tmp_path: Path):
    """Of other warnings only the first rank's are shown: they are the same on all."""
    states = [{f"w{rank}": torch.full((2,), float("nan"))} for rank in range(3)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ended = results(states, tmp_path / "a", SaveOptions(nonfinite="warn"))
    at_once = [str(one.message) for one in told]
    assert at_once == [
        f"expected finite values on rank {rank}, found 'w{rank}' (2 NaN and 0 infinite of 2)"
        for rank in (1, 2)
    ]
    assert "on rank 0, found 'w0'" in str(ended[0].get().warnings)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.float64]
)
def test_every_value_of_every_dtype_and_stride_is_searched(dtype, monkeypatch):
    monkeypatch.setattr("ray_dcp.torch_adapter.capture._PIECE_ELEMENTS", 50)
    tensors = [torch.full(shape, 2.0) for shape in ((), (0,), (7,), (40, 9), (3, 4, 30))]
    for tensor in tensors[2:]:
        tensor.view(-1)[::5] = torch.nan
        tensor.view(-1)[-1] = -torch.inf
    tensors += [tensor.movedim(0, -1) for tensor in tensors[2:]]
    counted = [(int(one.isnan().sum()), int(one.isinf().sum())) for one in tensors]
    found = nonfinite_of([tensor.to(dtype) for tensor in tensors].__getitem__, range(len(tensors)))
    assert found == {row: counts for row, counts in enumerate(counted) if any(counts)}
    for position in range(360):
        one = torch.ones(360)
        one[position] = torch.nan
        assert nonfinite_of(lambda _, one=one: one.view(9, 40).T.to(dtype), [0]) == {0: (1, 0)}


@pytest.mark.parametrize("planner", [None, OwnSave])
def test_only_numbers_that_can_be_nonfinite_are_searched(planner, tmp_path: Path):
    state = {"i": torch.ones(2, dtype=torch.int64), "b": torch.tensor(True), "w": torch.ones(3)}
    options = {"options": REFUSE, "planner": planner and planner()}
    ray_dcp.save(state, checkpoint_id=tmp_path / "a", **options)
    packed = torch.tensor([0x7F, 0xFF], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    ray_dcp.save({**state, "f4": packed}, checkpoint_id=tmp_path / "a", **options)
    state["w"][1] = torch.nan
    for dtype in (torch.float32, torch.complex32):
        state["w"] = state["w"].to(dtype)
        with pytest.raises(errors.NonFiniteError, match=r"'w' \(1 NaN and 0 infinite of 3\)"):
            ray_dcp.save(state, checkpoint_id=tmp_path / "b", **options)
