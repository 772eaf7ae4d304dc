"""Exchange with stock DCP of the same torch, both ways: every dtype, layout and kind of value.

Stock DCP itself says which dtypes can be exchanged at all, so that one which a new torch adds
fails here until ray_dcp has it.
"""

from __future__ import annotations

import pickle
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
    ZStandard,
)

import ray_dcp
from ray_dcp.errors import (
    DamagedCheckpointError,
    UnsupportedValueError,
)
from ray_dcp.fsspec_filesystem import FsspecWriter
from tests.support.exchange_cases import (
    DTYPES,
    bits,
    blank,
    blanks,
    differences,
    layouts,
    nested,
    piecemeal,
    same,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning",  # stock DCP's word for no_dist
    "ignore:Sparse CSR tensor support is in beta:UserWarning",  # torch's, on making one
    "ignore:ComplexHalf support is experimental:UserWarning",  # torch's word for complex32
    "ignore:TypedStorage is deprecated:UserWarning",  # stock DCP of torch 2.9, on every save
)

WAYS = {"ours to stock": (ray_dcp, stock), "stock to ours": (stock, ray_dcp)}


@pytest.fixture(params=WAYS)
def exchange(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Saves a state with one library and loads it with the other."""
    writer, reader = WAYS[request.param]

    def carry(
        state: dict[str, Any], into: dict[str, Any] | None = None, **planners: Any
    ) -> dict[str, Any]:
        target = blanks(state) if into is None else into
        writer.save(state, checkpoint_id=tmp_path / "a", no_dist=True, planner=planners.get("save"))
        reader.load(
            target, checkpoint_id=tmp_path / "a", no_dist=True, planner=planners.get("load")
        )
        return target

    return carry


def save_stock(path: Path, state: dict[str, Any], **options: Any) -> Path:
    options.setdefault("planner", None)
    stock.save(state, no_dist=True, **({"checkpoint_id": path} | options))
    return path


def load_ours(path: Path, into: dict[str, Any], **options: Any) -> dict[str, Any]:
    ray_dcp.load(into, checkpoint_id=path, no_dist=True, **options)
    return into


# Dtypes and layouts


@cache
def exchanged_by_stock(name: str) -> bool:
    """Whether stock DCP can load what it saved of a dtype."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            state = {"x": bits(getattr(torch, name), 4)}
            target = blanks(state)
            stock.save(state, checkpoint_id=directory, no_dist=True)
            stock.load(target, checkpoint_id=directory, no_dist=True)
        except (NotImplementedError, RuntimeError, TypeError, stock.CheckpointException):
            return False
    return same(target, state)


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_is_exchanged_in_every_layout_or_refused_by_name(exchange, tmp_path, name):
    dtype = getattr(torch, name)
    if exchanged_by_stock(name):
        state = layouts(dtype)
        assert differences(exchange(state), state) == []
        return
    with pytest.raises(UnsupportedValueError, match=rf"'layer\.x' has the .* dtype {dtype}"):
        ray_dcp.save(
            {"layer": {"x": bits(dtype, 4)}}, checkpoint_id=tmp_path / "refused", no_dist=True
        )
    assert not (tmp_path / "refused").exists()


def test_stock_says_of_all_dtypes_in_use_that_they_can_be_exchanged():
    known = {
        "bfloat16", "bool", "complex128", "complex32", "complex64", "float16", "float32",
        "float4_e2m1fn_x2", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
        "float8_e5m2fnuz", "float8_e8m0fnu", "int16", "int32", "int64", "int8", "uint16", "uint32",
        "uint64", "uint8",
    }  # fmt: skip
    assert known <= {name for name in DTYPES if exchanged_by_stock(name)}


def quantised(dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.arange(4.0), 0.5, 0, dtype)


def test_a_quantised_tensor_of_stock_is_refused_by_name_and_the_rest_loads(tmp_path):
    state = {"q": quantised(torch.quint8), "x": bits(torch.float32, 3)}
    path = save_stock(tmp_path / "a", state)
    with pytest.raises(UnsupportedValueError, match="'q' is saved with the dtype 'quint8'"):
        load_ours(path, {"q": torch.zeros(4), "x": torch.zeros(3)})
    assert differences(load_ours(path, {"x": blank(state["x"])}), {"x": state["x"]}) == []


# Containers and objects


def test_what_no_safe_load_of_torch_reads_is_exchanged_both_ways(tmp_path):
    state = piecemeal()
    ray_dcp.save(state, checkpoint_id=tmp_path / "ours", no_dist=True)
    for reader in (stock, ray_dcp):
        into = blanks(state)
        reader.load(into, checkpoint_id=tmp_path / "ours", no_dist=True)
        assert differences(into, state) == []
    path = save_stock(tmp_path / "stock", state)
    for options in (None, ray_dcp.LoadOptions(weights_only=False)):
        assert differences(load_ours(path, blanks(state), options=options), state) == []


# Stateful values


def trained(steps: int, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Returns a model with tied weights, a buffer and a frozen parameter, and its AdamW."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    )
    model[2].weight = model[0].weight
    model[3].bias.requires_grad_(False)
    groups = [
        {"params": [*model[0].parameters()], "lr": 0.01},
        {"params": [*model[1].parameters(), model[2].bias, model[3].weight]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02, amsgrad=True)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("writer", [stock, ray_dcp], ids=["stock", "ray_dcp"])
def test_modules_and_optimizers_of_both_are_loaded_and_train_on_alike(writer, tmp_path):
    pair, others = trained(3, seed=1), others_of(2)
    writer.save(
        dict(zip(("model", "optimizer"), pair, strict=True)), checkpoint_id=tmp_path, no_dist=True
    )
    load_ours(tmp_path, dict(zip(("model", "optimizer"), others, strict=True)))
    train_on_alike(pair, others)


def others_of(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Returns what is loaded into: of other values and options."""
    model, optimizer = trained(1, seed)
    for group in optimizer.param_groups:
        group["lr"] = 9.0
    return model, optimizer


def train_on_alike(pair: Any, others: Any) -> None:
    """Checks that two models and their optimizers are the same, and one step later still."""
    (model, optimizer), (other, other_optimizer) = pair, others
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []
    assert other[2].weight is other[0].weight
    assert same(other_optimizer.state_dict(), optimizer.state_dict())
    for one, its_optimizer in (pair, others):
        its_optimizer.zero_grad()
        one(torch.linspace(0, 1, 32).reshape(8, 4)).square().mean().backward()
        its_optimizer.step()
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []


# What stock DCP can write


def test_flattening_of_torch_before_2_4_is_read(tmp_path, monkeypatch):
    state = {
        "extra": {"epoch": 3, "names": {"a": "b"}},
        "model": {"w": bits(torch.float32, 3), "config": {"depth": 2}},
    }
    with monkeypatch.context() as patch:
        patch.setattr(_version, "_derived_version", "2_3")
        path = save_stock(tmp_path / "a", state)
    stored = stock.FileSystemReader(path).read_metadata().state_dict_metadata
    assert set(stored) == {"extra", "model.w", "model.config"}
    into = {
        "extra": {"epoch": 0, "names": {"a": ""}},
        "model": {"w": torch.zeros(3), "config": {"depth": 0}},
    }
    assert differences(load_ours(path, into), state) == []


@pytest.mark.parametrize(
    ("writer", "options", "num_files"),
    [
        (stock.FileSystemWriter, {"thread_count": 2}, 2),
        (stock.FileSystemWriter, {"single_file_per_rank": False}, 17),
        (stock.FileSystemWriter, {"single_file_per_rank": False, "thread_count": 3}, 17),
        (FsspecWriter, {"thread_count": 2}, 2),
    ],
)
def test_every_way_in_which_stock_lays_out_its_files_is_read(tmp_path, writer, options, num_files):
    state = layouts(torch.bfloat16) | {"more": nested()["model"]["layers"], "n": 3}
    save_stock(tmp_path / "a", state, storage_writer=writer(str(tmp_path / "a"), **options))
    assert len(list((tmp_path / "a").glob("*.distcp"))) == num_files
    assert differences(load_ours(tmp_path / "a", blanks(state)), state) == []


def zstd_state() -> dict[str, Any]:
    return layouts(torch.float32) | {"nested": nested(), "text": "compressed"}


def save_zstd(path: Path, state: dict[str, Any], *extensions: StreamTransformExtension) -> Path:
    writer = stock.FileSystemWriter(path, _extensions=list(extensions) or [ZStandard()])
    return save_stock(path, state, storage_writer=writer)


@pytest.mark.parametrize(
    "planner", [None, stock.DefaultLoadPlanner(), type("Own", (stock.DefaultLoadPlanner,), {})()]
)
def test_checkpoints_that_stock_compressed_with_zstd_are_read(tmp_path, planner):
    state = zstd_state()
    path = save_zstd(tmp_path / "a", state)
    into = blanks(state)
    ray_dcp.load(into, checkpoint_id=path, no_dist=True, planner=planner)
    assert differences(into, state) == []
    assert same(ray_dcp.open(path)["matrix"][1:3], state["matrix"][1:3])


class Unknown(StreamTransformExtension):
    """A transform that ray_dcp can't know."""

    @staticmethod
    def registry_name() -> str:
        return "test.unknown"

    @staticmethod
    def from_descriptor(version: str) -> Unknown:
        return Unknown()

    def get_descriptor(self) -> str:
        return "test.unknown/1"

    def transform_to(self, output: Any) -> Any:
        return output

    def transform_from(self, input: Any) -> Any:  # noqa: A002 - torch's name
        return input


def test_a_transform_of_a_plug_in_is_refused_with_the_way_out_that_works(tmp_path):
    state = {"w": bits(torch.float32, 3), "n": [1, 2]}
    path = save_zstd(tmp_path / "a", state, Unknown())
    for name in state:
        with pytest.raises(DamagedCheckpointError, match=rf"'{name}'.*_extension_registry=") as e:
            load_ours(path, {name: blanks(state)[name]})
        assert type(e.value) is DamagedCheckpointError
    registry = ExtensionRegistry()
    registry.register(Unknown)
    reader = stock.FileSystemReader(path, _extension_registry=registry)
    into = blanks(state)
    ray_dcp.load(into, storage_reader=reader, no_dist=True)
    assert differences(into, state) == []


def test_an_item_that_unpacks_to_more_than_its_tensor_can_hold_is_refused(tmp_path):
    small, huge = {"w": torch.zeros(3)}, {"w": torch.zeros(20 << 20)}
    path = save_zstd(tmp_path / "a", small)
    item = next(save_zstd(tmp_path / "b", huge).glob("*.distcp")).read_bytes()
    assert len(item) < 1 << 17
    metadata = stock.FileSystemReader(path).read_metadata()
    (place,) = metadata.storage_data.values()
    place.length = len(item)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / place.relative_path).write_bytes(item)
    with pytest.raises(DamagedCheckpointError, match=r"'w'.*unpacks to more"):
        load_ours(path, {"w": torch.zeros(3)})


# What of ours stock DCP meets
