"""What is saved as a tensor subclass comes back as it was, or the load says why not."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

import ray_dcp
from ray_dcp import errors
from ray_dcp.transform import conversion
from tests.support.adapter import (
    OwnLoad,
    OwnResolve,
    OwnSave,
    OwnWriter,
    as_rank,
    load_on_ranks,
    save_on_ranks,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # stock DCP of torch 2.9
]

aten = torch.ops.aten
VALUES = torch.arange(24.0).reshape(6, 4)


class Coded(torch.Tensor):
    """Codes and one scale for each row, as 8-bit optimizers have: it rounds what is copied in.

    The dtype that it shows gets lost in every operation, as theirs does.
    """

    copies_rows = False

    @staticmethod
    def __new__(
        cls, codes: Any, scale: Any, signed: bool = True, dtype: Any = torch.float32
    ) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype or torch.float32)

    def __init__(self, codes: Any, scale: Any, signed: bool = True, dtype: Any = None) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], [self.signed, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, rest: Any, *_: Any) -> Any:
        return cls(tensors["codes"], tensors["scale"], *rest)

    def __repr__(self) -> str:
        return f"Coded({self.codes}, {self.scale})"

    def dequantize(self) -> torch.Tensor:
        return self.codes * self.scale[:, None]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        one = args[0]
        if func is aten.is_pinned.default:
            return False
        if func is aten.detach.default:
            return cls(one.codes.detach(), one.scale.detach(), one.signed)
        if func is aten.view.default:
            return cls(one.codes.view(args[1]), one.scale, one.signed)
        if func is aten.slice.Tensor:
            _, dim, start, end = args
            if dim:
                raise ValueError("rows alone can be cut")
            rows = one.codes[start:end]
            return cls(rows.clone() if cls.copies_rows else rows, one.scale[start:end], one.signed)
        if func is aten.copy_.default:
            source = args[1]
            if not isinstance(one, Coded):
                return one.copy_(source.dequantize())
            if isinstance(source, Coded):
                source = source.dequantize()  # rounds, even though it need not
            one.scale.copy_(source.abs().amax(1) / 127)
            one.codes.copy_((source / one.scale[:, None]).round())
            return one
        raise NotImplementedError(f"{func}")


def coded(seed: int = 0, num_rows: int = 6) -> Coded:
    made = torch.Generator().manual_seed(seed)
    codes = torch.randint(-99, 99, (num_rows, 4), dtype=torch.int8, generator=made)
    return Coded(codes, torch.rand(num_rows, generator=made))


class Scaled(torch.Tensor):
    """Elements of its own, and a factor that is an attribute."""

    scale: float


def scaled(values: torch.Tensor, scale: float) -> Scaled:
    made = values.clone().as_subclass(Scaled)
    made.scale = scale
    return made


class Factor(torch.Tensor):
    """A wrapper whose factor is a number, and not a tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, factor: float) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor, factor: float) -> None:
        self.inner, self.factor = inner, factor

    def __tensor_flatten__(self) -> Any:
        return ["inner"], {"factor": self.factor}

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, rest: Any, *_: Any) -> Any:
        return cls(tensors["inner"], **rest)

    def __repr__(self) -> str:
        return f"Factor({self.inner}, {self.factor})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is aten.is_pinned.default:
            return False
        if func is aten.detach.default:
            return cls(args[0].inner.detach(), args[0].factor)
        if func is aten.view.default:
            return cls(args[0].inner.view(args[1]), args[0].factor)
        if func is aten.copy_.default and isinstance(args[0], Factor):
            args[0].inner.copy_(args[1].inner)  # and forgets the factor
            return args[0]
        raise NotImplementedError(f"{func}")


class FactorOfAnyDtype(Factor):
    """Shows float32, whatever it is made of."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, factor: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)


@dataclasses.dataclass(frozen=True)
class Grid:
    """What the codes of a class mean: no number or text, which would be copied as an attribute."""

    points: int


class Hidden(torch.Tensor):
    """A wrapper that does not tell what it is made of; its pickle does."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, low: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor, low: torch.Tensor) -> None:
        self.both = (inner, low)

    forgets = False

    def __repr__(self) -> str:
        return f"Hidden({self.both})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is aten.is_pinned.default:
            return False
        if func is aten.detach.default:
            return cls(*args[0].both)
        if func is aten.copy_.default:
            for into, of in list(zip(args[0].both, args[1].both, strict=True))[cls.forgets :]:
                into.copy_(of)
            return args[0]
        raise NotImplementedError(f"{func}")


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    with torch.serialization.safe_globals(
        [TwoTensor, Coded, Scaled, Factor, FactorOfAnyDtype, Grid, Hidden]
    ):
        yield


def two(a: torch.Tensor, b: torch.Tensor) -> TwoTensor:
    return TwoTensor(a.clone(), b.clone())


def halves(shape: tuple[int, ...] = (6, 4)) -> TwoTensor:
    values = torch.arange(24.0)[: torch.Size(shape).numel()].reshape(shape)
    return TwoTensor(values.clone(), -values - 1)


def parts(tensor: Any) -> list[Any]:
    """Returns all that a tensor is made of, as plain values."""
    if isinstance(tensor, Scaled):
        return [tensor.as_subclass(torch.Tensor).tolist(), tensor.scale]
    if isinstance(tensor, Hidden):
        return [one.tolist() for one in tensor.both]
    if hasattr(tensor, "__tensor_flatten__"):
        names, rest = tensor.__tensor_flatten__()
        return [type(tensor).__name__, [parts(getattr(tensor, name)) for name in names], rest][
            : 2 if isinstance(tensor, Coded) else 3
        ]
    return tensor.tolist()


PAIRS: dict[str, Any] = {
    "halves that differ": (halves, lambda: two(VALUES * 0, VALUES * 0)),
    "a parameter": (
        lambda: torch.nn.Parameter(halves()),
        lambda: torch.nn.Parameter(two(VALUES * 0, VALUES * 0)),
    ),
    "a parameter into none": (
        lambda: torch.nn.Parameter(halves()),
        lambda: two(VALUES * 0, VALUES * 0),
    ),
    "nested": (
        lambda: TwoTensor(halves(), TwoTensor(VALUES + 50, VALUES + 60)),
        lambda: TwoTensor(TwoTensor(VALUES * 0, VALUES * 0), TwoTensor(VALUES * 0, VALUES * 0)),
    ),
    "codes": (coded, lambda: coded(1)),
    "codes that show bfloat16": (
        lambda: Coded(coded().codes, coded().scale, True, torch.bfloat16),
        lambda: Coded(coded(1).codes, coded(1).scale, True, torch.bfloat16),
    ),
    "a scalar": (lambda: halves(()), lambda: TwoTensor(torch.tensor(8.0), torch.tensor(8.0))),
    "an attribute": (lambda: scaled(VALUES, 2.5), lambda: scaled(VALUES * 0, 1.0)),
    "a number": (lambda: Factor(VALUES.clone(), 2.5), lambda: Factor(VALUES * 0, 1.0)),
    "hidden": (
        lambda: Hidden(VALUES.clone(), VALUES + 1),
        lambda: Hidden(VALUES * 0, VALUES * 0),
    ),
}


def save(saver: str, state: dict[str, Any], path: Path) -> None:
    """Saves with stock DCP, natively, or through hooks."""
    if saver == "stock":
        stock.save(state, checkpoint_id=path, no_dist=True)
    elif saver == "hooks":
        ray_dcp.save(state, checkpoint_id=path, planner=OwnSave())
    else:
        ray_dcp.save(state, checkpoint_id=path)


def load(target: Any, path: Path, planner: Any = None, **options: Any) -> ray_dcp.LoadReport:
    """Loads into a state dict, or into the target of `w`, with a planner of this class."""
    state = target if isinstance(target, dict) else {"w": target}
    return ray_dcp.load(
        state, checkpoint_id=path, planner=planner and planner(), no_dist=True,
        options=ray_dcp.LoadOptions(**options),
    )  # fmt: skip


SAVERS = ("stock", "native", "hooks")
savers = pytest.mark.parametrize("saver", SAVERS)
planners = pytest.mark.parametrize(
    "planner", [None, OwnLoad, OwnResolve], ids=["native", "hooks", "late hooks"]
)


# Stock DCP detaches, which leaves attributes behind.
pairs_and_savers = pytest.mark.parametrize(
    ("kind", "saver"), sorted({*product(PAIRS, ("stock", "native"))} - {("an attribute", "stock")})
)


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize(
    ("saver", "planner"),
    [("native", None), ("stock", OwnResolve), ("hooks", OwnLoad), ("native", OwnResolve)],
)
def test_a_subclass_comes_back_as_it_was(
    tmp_path: Path, kind: str, saver: str, planner: Any
) -> None:
    make, make_target = PAIRS[kind]
    state = {"w": make(), "plain": torch.ones(3)}
    save("native" if kind == "an attribute" else saver, state, tmp_path)
    target = {"w": make_target(), "plain": torch.zeros(3)}
    tensor = target["w"]
    load(target, tmp_path, planner)
    assert target["w"] is tensor
    assert parts(tensor) == parts(state["w"])
    assert target["plain"].tolist() == [1, 1, 1]


@pairs_and_savers
def test_a_subclass_comes_back_without_a_target_and_in_copies(
    tmp_path: Path, kind: str, saver: str
) -> None:
    make, make_target = PAIRS[kind]
    state = {"w": make(), "plain": torch.ones(3)}
    save(saver, state, tmp_path / "c")
    found = ray_dcp.read_state_dict(tmp_path / "c")
    assert type(found["w"]) is type(state["w"])
    assert not isinstance(found["w"], torch.nn.Parameter)
    assert parts(found["w"]) == parts(state["w"])
    assert type(found["plain"]) is torch.Tensor
    conversion.dcp_to_torch_save(tmp_path / "c", tmp_path / "w.pt")
    assert parts(torch.load(tmp_path / "w.pt")["w"]) == parts(state["w"])
    ray_dcp.copy(tmp_path / "c", tmp_path / "d")
    target = {"w": make_target()}
    ray_dcp.load(target, checkpoint_id=tmp_path / "d")
    assert parts(target["w"]) == parts(state["w"])


@savers
@planners
def test_a_plain_target_gets_what_the_class_shows_or_an_error(
    tmp_path: Path, saver: str, planner: Any
) -> None:
    path, one = tmp_path / "codes", coded()
    save(saver, {"w": one}, path)
    plain, wide = torch.zeros(6, 4), torch.zeros(6, 4, dtype=torch.float64)
    load(plain, path, planner)
    load(wide, path, planner)
    assert torch.equal(plain, one.dequantize())
    assert torch.equal(wide, one.dequantize().double())
    path = tmp_path / "halves"
    save(saver, {"m": {"w": halves()}, "w": halves()}, path)
    with pytest.raises(errors.UnsupportedValueError, match=r"'w'.*TwoTensor.*other values"):
        load(torch.zeros(6, 4), path, planner)
    report = load(torch.zeros(6, 4), path, planner, dtype="cast")
    assert report.cast == (("w", "TwoTensor[float32]", "float32"),)
    path = tmp_path / "alike"
    save(saver, {"w": two(VALUES, VALUES)}, path)
    load(plain, path, planner)
    assert torch.equal(plain, VALUES)


@savers
@planners
def test_plain_values_go_into_a_subclass_that_keeps_them(
    tmp_path: Path, saver: str, planner: Any
) -> None:
    values = torch.rand(6, 4, generator=torch.Generator().manual_seed(1))
    save(saver, {"w": values}, tmp_path)
    pair, one = two(VALUES * 0, VALUES * 0), scaled(VALUES * 0, 3.0)
    load(pair, tmp_path, planner)
    load(one, tmp_path, planner)
    assert parts(pair)[1] == [values.tolist(), values.tolist()]
    assert parts(one) == [values.tolist(), 3.0]
    with pytest.raises(errors.UnsupportedValueError, match=r"'w'.*Coded.*other values"):
        load(coded(), tmp_path, planner)
    target = coded()
    assert load(target, tmp_path, planner, dtype="cast").cast == (
        ("w", "float32", "Coded[float32]"),
    )
    assert (target.dequantize() - values).abs().max() < 0.01


@pytest.mark.parametrize("forgets", ["hidden", "shared", "rest"])
@savers
@planners
def test_a_copy_that_loses_something_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: Any, saver: str, planner: Any, forgets: str
) -> None:
    if forgets == "hidden":
        monkeypatch.setattr(Hidden, "forgets", True)
        state, target = Hidden(VALUES.clone(), VALUES + 1), Hidden(VALUES * 0, VALUES * 0)
    elif forgets == "shared":
        memory = VALUES * 0
        state, target = halves(), TwoTensor(memory, memory)
    else:
        state, target = Factor(VALUES.clone(), Grid(2)), Factor(VALUES * 0, Grid(4))
    save(saver, {"w": state}, tmp_path)
    for dtype in ("widen", "cast"):
        with pytest.raises(errors.UnsupportedValueError, match=r"'w'.*other values"):
            load(target, tmp_path, planner, dtype=dtype)


@pytest.mark.parametrize("planner", [None, OwnLoad])
def test_parts_that_are_copies_of_the_target_do_not_lose_values_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planner: Any
) -> None:
    stock.save({"w": coded()}, checkpoint_id=tmp_path, planner=InRows(), no_dist=True)
    monkeypatch.setattr(Coded, "copies_rows", True)
    with pytest.raises(errors.UnsupportedValueError, match=r"'w'.*other values"):
        load(coded(1), tmp_path, planner)


@savers
@planners
def test_what_a_class_is_made_of_is_widened_and_rounded_only_if_asked(
    tmp_path: Path, saver: str, planner: Any
) -> None:
    def loaded(own: torch.dtype, **how: Any) -> Any:
        target = FactorOfAnyDtype(torch.zeros(6, 4, dtype=own), 1.0)
        load(target, tmp_path, planner, **how)
        return target.inner

    values = torch.rand(6, 4, generator=torch.Generator().manual_seed(1))
    save(saver, {"w": FactorOfAnyDtype(values, 2.5)}, tmp_path)
    assert torch.equal(loaded(torch.float64), values.double())
    with pytest.raises(errors.UnsupportedValueError, match=r"'w'.*other values"):
        loaded(torch.bfloat16)
    assert torch.equal(loaded(torch.bfloat16, dtype="cast"), values.bfloat16())


@savers
def test_a_class_that_can_not_copy_is_an_error_that_names_it(tmp_path: Path, saver: str) -> None:
    save(saver, {"w": halves()}, tmp_path)
    target = Factor(VALUES * 0, 1.0)
    with pytest.raises(errors.UnsupportedValueError, match=r"'w'.*TwoTensor.*Factor.*can't do"):
        ray_dcp.load({"w": target}, checkpoint_id=tmp_path)


def test_a_meta_target_of_a_class_becomes_what_is_stored(tmp_path: Path) -> None:
    save("stock", {"w": halves()}, tmp_path)
    template = TwoTensor(torch.empty(6, 4, device="meta"), torch.empty(6, 4, device="meta"))
    for make in (lambda one: one, torch.nn.Parameter):
        state = {"w": make(template)}
        ray_dcp.load(state, checkpoint_id=tmp_path)
        assert parts(state["w"]) == parts(halves())
        assert isinstance(state["w"], torch.nn.Parameter) == (make is torch.nn.Parameter)
    with pytest.raises(errors.UnsupportedValueError, match=r"'w'"):
        ray_dcp.load({"w": torch.empty(6, 4, device="meta")}, checkpoint_id=tmp_path)


def test_what_can_not_hold_a_subclass_refuses_it_by_name(tmp_path: Path) -> None:
    for saver in ("stock", "native"):
        save(saver, {"w": coded()}, tmp_path / "codes")
        conversion.dcp_to_safetensors(tmp_path / "codes", tmp_path / "shown")
        (file,) = (tmp_path / "shown").glob("*.safetensors")
        assert torch.equal(load_file(file)["w"], coded().dequantize())
        path = tmp_path / saver
        save(saver, {"w": halves(), "v": torch.ones(2)}, path)
        with pytest.raises(errors.UnsupportedValueError, match=r"'w'"):
            conversion.dcp_to_safetensors(path, tmp_path / "hf")
        with pytest.raises(errors.UnsupportedValueError, match=r"'w'.*cast"):
            ray_dcp.read_state_dict(path, dtype=torch.bfloat16)


def sharded(make: Any, rank: int, world_size: int, num_rows: int) -> DTensor:
    """Returns a rank's part, whose local tensor `make` gives for its rows."""
    each = -(-num_rows // world_size)
    low, high = min(num_rows, rank * each), min(num_rows, (rank + 1) * each)
    with as_rank(rank, world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        return DTensor.from_local(
            make(low, high), mesh, [Shard(0)], run_check=False, shape=(num_rows, 4), stride=(4, 1)
        )


def rows_of_halves(low: int, high: int) -> TwoTensor:
    return two(halves().a[low:high], halves().b[low:high])


def rows_of_codes(low: int, high: int) -> Coded:
    whole = coded()
    return Coded(whole.codes[low:high].clone(), whole.scale[low:high].clone())


def zeros_of(make: Any) -> Any:
    """Returns what makes tensors like those of `make`, of zeros."""

    def empty(low: int, high: int) -> Any:
        one = make(low, high)
        names, rest = one.__tensor_flatten__()
        return type(one)(*(torch.zeros_like(getattr(one, n)) for n in names), *(rest or ()))

    return empty


@pytest.mark.parametrize("make", [rows_of_halves, rows_of_codes])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_local_tensors_of_a_class_are_resharded(tmp_path: Path, make: Any, world_size: int) -> None:
    states = [{"w": sharded(make, rank, 2, 6)} for rank in range(2)]
    save_on_ranks(states, tmp_path)

    targets = [{"w": sharded(zeros_of(make), rank, world_size, 6)} for rank in range(world_size)]
    load_on_ranks(targets, tmp_path)
    each = -(-6 // world_size)
    for rank, target in enumerate(targets):
        local = target["w"]._local_tensor
        assert parts(local) == parts(make(rank * each, (rank + 1) * each))


class InRows(DefaultSavePlanner):
    """Saves each tensor as an item for two rows, as ranks of stock DCP save their parts."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        items = [one for item in plan.items for one in self._rows(item)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def _rows(self, item: Any) -> list[Any]:
        data = item.tensor_data
        found = []
        for low in range(0, data.size[0], 2):
            offset = torch.Size((low, 0))
            chunk = ChunkStorageMetadata(offset, torch.Size((2, *data.size[1:])))
            found.append(
                dataclasses.replace(
                    item,
                    type=WriteItemType.SHARD,
                    index=MetadataIndex(item.index.fqn, offset),
                    tensor_data=dataclasses.replace(data, chunk=chunk),
                )
            )
        return found

    def resolve_data(self, write_item: Any) -> Any:
        low = write_item.index.offset[0]
        return self.state_dict[write_item.index.fqn][low : low + 2]


@pytest.mark.parametrize("saver", [stock.save, ray_dcp.save])
@pytest.mark.parametrize("make", [rows_of_halves, rows_of_codes])
@planners
def test_items_of_a_class_are_put_together_and_cut(
    tmp_path: Path, saver: Any, make: Any, planner: Any
) -> None:
    saver({"w": make(0, 6)}, checkpoint_id=tmp_path, planner=InRows(), no_dist=True)

    whole = zeros_of(make)(0, 6)
    load(whole, tmp_path, planner)
    assert parts(whole) == parts(make(0, 6))
    for world_size in (2, 3, 4):
        each = -(-6 // world_size)
        for rank in range(-(-6 // each)):
            target = sharded(zeros_of(make), rank, world_size, 6)
            with as_rank(rank, world_size):
                load(target, tmp_path, planner)
            wanted = make(rank * each, min(6, (rank + 1) * each))
            assert parts(target._local_tensor) == parts(wanted)
    if make is rows_of_halves:
        assert parts(ray_dcp.read_state_dict(tmp_path)["w"]) == parts(halves())
    else:
        found = ray_dcp.read_state_dict(tmp_path)["w"]
        assert torch.equal(found, coded().dequantize())
        conversion.dcp_to_torch_save(tmp_path, tmp_path / "w.pt")
        assert torch.equal(torch.load(tmp_path / "w.pt")["w"], found)
    plain = torch.zeros(6, 4)
    if make is rows_of_codes:
        load(plain, tmp_path, planner)
        assert torch.equal(plain, coded().dequantize())
    else:
        with pytest.raises(errors.UnsupportedValueError, match=r"'w'.*other values"):
            load(plain, tmp_path, planner)


class HalfPlain(InRows):
    """Saves the first rows as a plain tensor."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data.a if write_item.index.offset[0] == 0 else data


@planners
def test_a_tensor_of_which_some_items_are_of_a_class_goes_into_no_subclass(
    tmp_path: Path, planner: Any
) -> None:
    values = two(VALUES, VALUES)
    stock.save({"w": values}, checkpoint_id=tmp_path, planner=HalfPlain(), no_dist=True)
    plain = torch.zeros(6, 4)
    load(plain, tmp_path, planner)
    assert torch.equal(plain, VALUES)
    pair = two(VALUES * 0, VALUES * 0)
    with contextlib.suppress(errors.UnsupportedValueError):
        load(pair, tmp_path, planner)
        assert parts(pair) == parts(values)


def test_differences_of_stock_checkpoints_of_a_class_are_told(tmp_path: Path) -> None:
    save("stock", {"w": halves(), "v": torch.ones(2)}, tmp_path / "a")
    save("stock", {"w": two(VALUES, VALUES), "v": torch.ones(2)}, tmp_path / "b")
    first, second = ray_dcp.open(tmp_path / "a"), ray_dcp.open(tmp_path / "b")
    assert {one.name: one.change for one in first.diff(second).tensors} == {
        "w": "changed",
        "v": "unchanged",
    }
    assert {one.change for one in first.diff(first).tensors} == {"unchanged"}


def test_a_class_that_can_not_be_cut_says_so_by_name(tmp_path: Path) -> None:
    save_on_ranks([{"w": sharded(rows_of_codes, rank, 2, 6)} for rank in range(2)], tmp_path)
    targets = [{"w": sharded(lambda low, high: Factor(VALUES[low:high].clone(), 1.0), 0, 1, 6)}]
    with pytest.raises(errors.UnsupportedValueError, match=r"'w'.*part"):
        load_on_ranks(targets, tmp_path)


def test_attributes_of_parts_must_be_those_of_the_target(tmp_path: Path) -> None:
    def rows(low: int, high: int) -> Scaled:
        one = scaled(VALUES[low:high], 2.0)
        one.global_shape, one.global_offsets = (6, 4), ((low, 0),)
        one.local_offsets, one.local_sizes = ((0, 0),), ((high - low, 4),)
        return one

    save_on_ranks([{"w": rows(0, 2)}, {"w": rows(2, 6)}], tmp_path)
    good = scaled(VALUES * 0, 2.0)
    ray_dcp.load({"w": good}, checkpoint_id=tmp_path)
    assert parts(good) == parts(scaled(VALUES, 2.0))
    assert not hasattr(good, "global_shape")
    with pytest.raises(errors.UnsupportedValueError, match=r"'w'.*other values"):
        ray_dcp.load({"w": scaled(VALUES * 0, 1.0)}, checkpoint_id=tmp_path)


BAD_TARGETS: dict[str, Any] = {
    "sparse_coo": lambda: torch.zeros(6, 4).to_sparse(),
    "sparse_csr": lambda: torch.ones(6, 4).to_sparse_csr(),
    "sparse_csc": lambda: torch.ones(6, 4).to_sparse_csc(),
    "sparse_bsr": lambda: torch.ones(6, 4).to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.zeros(2), torch.zeros(3)], layout=torch.jagged
    ),
    "mkldnn": lambda: torch.ones(6, 4).to_mkldnn(),
    "ZeroTensor": lambda: torch._efficientzerotensor((6, 4)),
}


TOLD = {"jagged": "nested"}


@pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:.*in beta state")
@pytest.mark.parametrize("kind", BAD_TARGETS)
@planners
def test_a_target_of_another_layout_is_refused_by_name_before_anything_changes(
    tmp_path: Path, kind: str, planner: Any
) -> None:
    if kind == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("needs mkldnn")
    ray_dcp.save({"a": torch.ones(3), "w": VALUES}, checkpoint_id=tmp_path)
    first, target, told = torch.zeros(3), BAD_TARGETS[kind](), rf"(?s)'w'.*{TOLD.get(kind, kind)}"
    with pytest.raises(errors.CheckpointError, match=told):
        load({"a": first, "w": target}, tmp_path, planner)
    assert first.tolist() == [0, 0, 0]
    with pytest.raises(errors.UnsupportedValueError, match=told):
        ray_dcp.save({"w": target}, checkpoint_id=tmp_path / "b")


def test_a_pickle_of_a_subclass_keeps_its_numbers(tmp_path: Path) -> None:
    memory = torch.zeros(100).as_subclass(Scaled)
    part = memory[:4]
    part.scale = 0.5
    ray_dcp.save({"w": part}, checkpoint_id=tmp_path)
    view = ray_dcp.open(tmp_path)
    assert view["w"][...].numel() == 4
    assert ray_dcp.read_state_dict(tmp_path)["w"].scale == 0.5
    buffer = io.BytesIO()
    torch.save(ray_dcp.read_state_dict(tmp_path), buffer)
    assert buffer.tell() < 4000


# --- tensors that are parts of others -------------------------------------------------------------


FULL = torch.arange(24.0).reshape(6, 4)

Part = tuple[tuple[int, ...], tuple[int, ...]]


def marked(tensor: torch.Tensor, whole: Any, parts: list[Any], starts: list[Any]) -> torch.Tensor:
    """Gives a tensor the attributes of the protocol."""
    tensor.global_shape = tuple(whole)
    tensor.global_offsets = tuple(offset for offset, _ in parts)
    tensor.local_sizes = tuple(size for _, size in parts)
    tensor.local_offsets = tuple(starts)
    return tensor


def holding(parts: list[Part], full: torch.Tensor = FULL, pad: int = 1, **how: Any) -> torch.Tensor:
    """Returns parts of a matrix, row by row in one padded tensor."""
    rows = sum(size[0] for _, size in parts) + pad
    local = torch.full((rows, full.shape[1] + pad), -1.0, **how)
    starts, row = [], 0
    for (low, left), (count, width) in parts:
        if not local.is_meta:
            local[row : row + count, :width] = full[low : low + count, left : left + width]
        starts.append((row, 0))
        row += count
    return marked(local, full.shape, parts, starts)


def rows(low: int, count: int) -> Part:
    return (low, 0), (count, 4)


def empty(parts: list[Part], **how: Any) -> torch.Tensor:
    return holding(parts, torch.full((6, 4), -1.0), **how)


def check_holds(tensor: Any, full: torch.Tensor = FULL) -> None:
    """Checks every part and that the padding is as it was."""
    rest = tensor.detach().clone().as_subclass(torch.Tensor)
    for (low, left), (row, col), (count, width) in zip(
        tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True
    ):
        part = rest[row : row + count, col : col + width]
        assert torch.equal(part, full[low : low + count, left : left + width])
        part.fill_(-1.0)
    assert torch.equal(rest, torch.full_like(rest, -1.0))


BY_TWO = [[rows(0, 2), rows(5, 1)], [rows(2, 3)]]
BY_THREE = [[((0, 0), (6, 1))], [((0, 1), (3, 3))], [((3, 1), (3, 3))]]


@pytest.mark.parametrize("to", [BY_TWO, BY_THREE, [[rows(0, 6)]]])
def test_parts_of_several_ranks_are_one_tensor_and_load_into_any_others(
    tmp_path: Path, to: list[list[Part]]
) -> None:
    save_on_ranks([{"w": holding(parts), "n": 3} for parts in BY_TWO], tmp_path)
    assert ray_dcp.open(tmp_path)["w"].shape == (6, 4)
    whole = {"w": torch.zeros(6, 4)}
    ray_dcp.load(whole, checkpoint_id=tmp_path)
    assert torch.equal(whole["w"], FULL)
    states = [{"w": empty(parts), "n": 0} for parts in to]
    tensors = [state["w"] for state in states]
    load_on_ranks(states, tmp_path)
    for state, tensor in zip(states, tensors, strict=True):
        assert state["w"] is tensor
        check_holds(tensor)


def test_replicas_of_parts_are_stored_once(tmp_path: Path) -> None:
    save_on_ranks([{"w": holding(parts)} for parts in (*BY_TWO, *BY_TWO)], tmp_path)
    states = [{"w": empty(parts)} for parts in BY_THREE]
    load_on_ranks(states, tmp_path)
    for state in states:
        check_holds(state["w"])
    assert ray_dcp.open(tmp_path).verify().ok


def test_a_parameter_with_parts_keeps_what_it_is(tmp_path: Path) -> None:
    save_on_ranks([{"w": holding(BY_TWO[0])}, {"w": holding(BY_TWO[1])}], tmp_path)
    plain = empty([rows(1, 4)])
    param = torch.nn.Parameter(plain.clone())
    marked(param, (6, 4), [rows(1, 4)], [(0, 0)])
    ray_dcp.load({"w": param}, checkpoint_id=tmp_path)
    check_holds(param)
    assert param.requires_grad


def test_a_meta_target_gets_memory_and_keeps_its_parts(tmp_path: Path) -> None:
    save_on_ranks([{"w": holding(parts)} for parts in BY_TWO], tmp_path)
    state: dict[str, Any] = {"w": empty([rows(1, 4)], pad=0, device="meta")}
    ray_dcp.load(state, checkpoint_id=tmp_path)
    assert not state["w"].is_meta
    check_holds(state["w"])
    parameter = torch.nn.Parameter(torch.empty(4, 4, device="meta"))
    state = {"w": marked(parameter, (6, 4), [rows(1, 4)], [(0, 0)])}
    ray_dcp.load(state, checkpoint_id=tmp_path)
    assert type(state["w"]) is torch.nn.Parameter
    check_holds(state["w"])


def test_a_scalar_and_a_rank_without_parts(tmp_path: Path) -> None:
    scalar = marked(torch.tensor(7.0), (), [((), ())], [()])
    states = [{"w": empty([]), "s": scalar}, {"w": holding([rows(0, 6)]), "s": scalar}]
    save_on_ranks(states, tmp_path)
    found = ray_dcp.read_state_dict(tmp_path)
    assert torch.equal(found["w"], FULL)
    assert found["s"].item() == 7


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"global_offsets": ((0, 0),)}, "one entry a part"),
        ({"local_sizes": ((2, 4), (1, 9))}, "lies outside"),
        ({"local_offsets": ((0, 0), (-1, 0))}, "lies outside"),
        ({"global_shape": (6,)}, "lies outside"),
        ({"global_offsets": ((0, 0), (6, 0))}, "lies outside"),
        ({"global_offsets": (0, 0)}, "tuple of whole numbers"),
        ({"local_sizes": ((2, 4), (1, 0.5))}, "tuple of whole numbers"),
        ({"global_shape": 24}, "tuple of whole numbers"),
    ],
)
def test_attributes_that_contradict_each_other_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    tensor = holding(BY_TWO[0])
    for name, value in change.items():
        setattr(tensor, name, value)
    with pytest.raises(errors.UnsupportedValueError, match=f"'w'.*{told}"):
        ray_dcp.save({"w": tensor}, checkpoint_id=tmp_path / "a")
    ray_dcp.save({"w": FULL}, checkpoint_id=tmp_path / "b")
    with pytest.raises(errors.UnsupportedValueError, match=f"'w'.*{told}"):
        ray_dcp.load({"w": tensor}, checkpoint_id=tmp_path / "b")


def test_a_part_that_is_held_by_nobody_fails_the_save(tmp_path: Path) -> None:
    with pytest.raises(errors.CoverageError, match="'w'"):
        ray_dcp.save({"w": holding([rows(0, 4)])}, checkpoint_id=tmp_path)


def test_the_wrong_global_shape_is_a_size_mismatch(tmp_path: Path) -> None:
    ray_dcp.save({"w": FULL}, checkpoint_id=tmp_path)
    tensor = marked(torch.zeros(6, 4), (12, 4), [rows(0, 6)], [(0, 0)])
    with pytest.raises(errors.ShapeMismatchError, match=r"\(12, 4\)"):
        ray_dcp.load({"w": tensor}, checkpoint_id=tmp_path)
    assert not tensor.any()


def test_one_attribute_alone_makes_no_part_of_a_tensor(tmp_path: Path) -> None:
    tensor = FULL.clone()
    tensor.global_shape = (99,)
    ray_dcp.save({"w": tensor}, checkpoint_id=tmp_path)
    target = torch.zeros(6, 4)
    target.global_shape = (99,)
    ray_dcp.load({"w": target}, checkpoint_id=tmp_path)
    assert torch.equal(target, FULL)


def test_a_tuple_stays_the_object_that_it_is(tmp_path: Path) -> None:
    state = {"w": holding([rows(0, 6)]), "pair": (holding(BY_TWO[0]), 1)}
    ray_dcp.save(state, checkpoint_id=tmp_path)
    target: dict[str, Any] = {"w": empty([rows(0, 6)]), "pair": (empty(BY_TWO[0]), 0)}
    ray_dcp.load(target, checkpoint_id=tmp_path)
    check_holds(target["w"])
    assert type(target["pair"][0]) is torch.Tensor
    assert torch.equal(target["pair"][0], state["pair"][0])
    assert target["pair"][1] == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.skipif(hasattr(stock, "CheckpointableTensor"), reason="planners know them since 2.14")
def test_planners_and_storages_that_would_take_a_part_for_the_whole_are_not_given_one(
    tmp_path: Path,
) -> None:
    ray_dcp.save({"w": FULL}, checkpoint_id=tmp_path / "c")
    state = {"w": holding([rows(0, 2), rows(2, 4)])}
    before = state["w"].clone()

    for act in (
        lambda: ray_dcp.save(state, checkpoint_id=tmp_path / "a", planner=OwnSave()),
        lambda: ray_dcp.save(state, storage_writer=OwnWriter(tmp_path / "b"), no_dist=True),
        lambda: ray_dcp.load(state, checkpoint_id=tmp_path / "c", planner=OwnLoad()),
    ):
        with pytest.raises(errors.UnsupportedValueError, match=r"'w' is a part.*2\.14"):
            act()
    assert torch.equal(state["w"], before)
    assert not (tmp_path / "a").exists()


def test_a_part_of_a_parameter_is_stored_as_one(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(FULL.clone())
    state = {"w": marked(parameter, (6, 4), [rows(0, 6)], [(0, 0)]), "v": holding([rows(0, 6)])}
    ray_dcp.save(state, checkpoint_id=tmp_path)
    stored = stock.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    found = {name: item.properties.requires_grad for name, item in stored.items()}
    assert found == {"w": True, "v": False}


@pytest.mark.parametrize("stager", [None, BlockingAsyncStager])
def test_what_is_staged_keeps_its_parts(tmp_path: Path, stager: Any) -> None:
    state = {"m": [{"w": holding([rows(0, 2), rows(2, 4)])}], "note": "a"}
    ray_dcp.async_save(state, checkpoint_id=tmp_path, async_stager=stager and stager()).result()
    assert torch.equal(ray_dcp.read_state_dict(tmp_path)["m"][0]["w"], FULL)


if hasattr(stock, "CheckpointableTensor"):  # from torch 2.14 on

    def with_hooks_saved(state: Any, **how: Any) -> None:
        ray_dcp.save(state, planner=OwnSave(), **how)

    def with_hooks_loaded(state: Any, **how: Any) -> None:
        ray_dcp.load(state, planner=OwnLoad(), **how)

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    @pytest.mark.parametrize("saver", [stock.save, ray_dcp.save, with_hooks_saved])
    @pytest.mark.parametrize("loader", [stock.load, ray_dcp.load, with_hooks_loaded])
    def test_files_are_exchanged_with_stock(tmp_path: Path, saver: Any, loader: Any) -> None:
        parts = [rows(0, 2), rows(5, 1), rows(2, 3)]
        saver({"w": holding(parts)}, checkpoint_id=tmp_path, no_dist=True)
        for target in (torch.zeros(6, 4), empty([rows(1, 3)]), empty(BY_THREE[1])):
            loader({"w": target}, checkpoint_id=tmp_path, no_dist=True)
            if hasattr(target, "global_shape"):
                check_holds(target)
            else:
                assert torch.equal(target, FULL)
