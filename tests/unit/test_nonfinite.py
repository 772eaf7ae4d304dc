"""What a save does about NaN and infinities."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

import ray_dcp
from ray_dcp.commit_protocol.messages import OpKey, Target
from ray_dcp.errors import (
    InvalidRequestError,
    NonFiniteError,
    UnsupportedValueError,
)
from ray_dcp.options import SaveOptions
from ray_dcp.torch_adapter.capture import (
    Capture,
    capture,
    checked_finite,
    nonfinite_of,
)
from tests.support.own_planners import OwnSave, OwnWriter
from tests.support.world import run_ranks, save_rank

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
        assert isinstance(result.error, NonFiniteError)
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

    with pytest.raises(NonFiniteError, match=r"'bad' \(0 NaN and 1 infinite of 2\)"):
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
    with pytest.raises(InvalidRequestError, match="needs a storage of ray_dcp"):
        ray_dcp.save({"w": torch.ones(1)}, storage_writer=OwnWriter(tmp_path / "a"), options=REFUSE)
    with pytest.raises(InvalidRequestError, match="nonfinite must be one of"):
        SaveOptions(nonfinite="raise")
    assert not issubclass(NonFiniteError, UnsupportedValueError)


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
        with pytest.raises(NonFiniteError, match=r"'w' \(1 NaN and 0 infinite of 3\)"):
            ray_dcp.save(state, checkpoint_id=tmp_path / "b", **options)
