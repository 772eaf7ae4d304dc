"""Exports, imports and copies: whole or not at all, right, and refused before they write."""

from __future__ import annotations

import json
import os
import shutil
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import load_file
from torch.distributed.checkpoint import format_utils as stock_utils
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import ray_dcp
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    DamagedCheckpointError,
    InvalidRequestError,
    MissingKeyError,
    ShapeMismatchError,
    StateDictError,
    StorageError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from ray_dcp.format.manifest import AbortRecord, decode_record
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.storage import PartWriter
from ray_dcp.transform import conversion
from ray_dcp.transform.copying import copy_checkpoint, plan_copy
from ray_dcp.transform.exporting import plan_export
from ray_dcp.view.progress import Meter
from tests.support import checkpoints
from tests.support.adapter import save_on_ranks
from tests.support.programs.forks import Programs
from tests.support.storages import interpose

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


@pytest.fixture(params=["torch_save", "stock"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "stock":
        return checkpoints.save_stock(tmp_path / "source")
    return checkpoints.save(tmp_path / "source")


KINDS = ["safetensors", "torch", "hf", "dcp"]


def test_torch_and_dcp_exports_hold_what_the_checkpoint_does(source: Path, tmp_path: Path):
    ray_dcp.export(source, tmp_path / "w.pt", "torch")
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert found["step"] == 10
    assert torch.equal(found["model"]["weight"], checkpoints.tensors()["model.weight"])
    ray_dcp.export(source, tmp_path / "dcp", "dcp")
    target = {"model.weight": torch.zeros(37, 11)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(target["model.weight"], checkpoints.tensors()["model.weight"])
    assert ray_dcp.open(source).diff(ray_dcp.open(tmp_path / "dcp")).counts == {"unchanged": 10}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dcp", "source", "w.pt"]


def test_a_dcp_export_of_a_part_is_saved_anew_and_cast(source: Path, tmp_path: Path):
    ray_dcp.export(source, tmp_path / "dcp", "dcp", include=["model.[wl]*"], dtype="bf16")
    view = ray_dcp.open(tmp_path / "dcp")
    assert {n: i.dtype for n, i in view.tensors.items()} == {
        "model.weight": "bfloat16", "model.large": "int64"
    }  # fmt: skip
    assert (tmp_path / "dcp" / ".metadata").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dcp", "source"]


@pytest.mark.parametrize("kind", ["safetensors", "hf"])
def test_safetensors_exports_hold_the_tensors(source: Path, tmp_path: Path, kind: str):
    target = tmp_path / ("w.safetensors" if kind == "safetensors" else "hub")
    plan = ray_dcp.export(source, target, kind, include=["model.[wlh]*"])
    assert (plan.num_tensors, plan.num_objects) == (3, 0)
    view = ray_dcp.open(target)
    assert torch.equal(
        torch.from_numpy(view["model.weight"][...]), checkpoints.tensors()["model.weight"]
    )
    assert view["model.half"][...].dtype is torch.bfloat16
    if kind == "hf":
        assert (target / "model.safetensors.index.json").exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_what_a_format_can_not_hold_is_refused_and_leaves_nothing(source: Path, tmp_path: Path):
    for kind in ("safetensors", "hf"):
        with pytest.raises(InvalidRequestError, match="expected tensors that match 'step'"):
            ray_dcp.export(source, tmp_path / "w", kind, include=["step"])
    with pytest.raises(InvalidRequestError, match="expected names that match"):
        ray_dcp.export(source, tmp_path / "w.pt", "torch", include=["nope"])
    with pytest.raises(InvalidRequestError, match="format must be"):
        ray_dcp.export(source, tmp_path / "w.pt", "onnx")
    with pytest.raises(InvalidRequestError, match="dtype must be"):
        ray_dcp.export(source, tmp_path / "w.pt", "torch", dtype="int3")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("kind", KINDS)
def test_objects_are_left_out_where_there_is_no_place_and_names_lose_a_prefix(
    tmp_path: Path, kind: str
):
    source = tmp_path / "source"
    state = {"model": {"w": torch.arange(3.0)}, "other": torch.ones(2), "step": 7}
    ray_dcp.save(state, checkpoint_id=source)
    target = tmp_path / ("out.safetensors" if kind == "safetensors" else "out")
    plan = ray_dcp.export(source, target, kind, strip_prefix="model.")
    holds = kind in ("torch", "dcp")
    assert plan.left_out == (() if holds else ("step",))
    found = set(torch.load(target) if kind == "torch" else ray_dcp.open(target).names)
    assert found == {"w", "other", *(["step"] if holds else [])}


def test_tensors_of_one_memory_are_exported_once(tmp_path: Path):
    one = torch.randn(64, 8)
    # Equal bytes, or a part of the memory, tie nothing.
    others = {"ema": one.clone(), "view": one[:32], "turned": one.view(8, 64)}
    state = {"head": one, **others, "embed": one.detach(), "step": 3}
    ray_dcp.save(state, checkpoint_id=tmp_path / "one", no_dist=True)
    plan = ray_dcp.export(tmp_path / "one", tmp_path / "hf", "hf")
    assert (plan.tied, plan.num_tensors) == ({"embed": "head"}, 4)
    written = load_file(tmp_path / "hf/model-00001-of-00001.safetensors")
    assert set(written) == {"head", *others}
    assert all(torch.equal(written[name], state[name]) for name in written)
    # The only name of its memory that is chosen is written.
    plan = ray_dcp.export(tmp_path / "one", tmp_path / "e.safetensors", include=["e*"])
    assert plan.tied == {}
    assert set(load_file(tmp_path / "e.safetensors")) == {"embed", "ema"}
    # Only transformers ties by itself; other readers of one file may ask for each name.
    plan = ray_dcp.export(tmp_path / "one", tmp_path / "all.safetensors")
    assert plan.tied == {}
    assert set(load_file(tmp_path / "all.safetensors")) == {*others, "head", "embed"}
    # As torch.save does it, and so the next checkpoint has the record too.
    ray_dcp.export(tmp_path / "one", tmp_path / "one.pt", "torch")
    loaded = torch.load(tmp_path / "one.pt")
    assert loaded["embed"].data_ptr() == loaded["head"].data_ptr() != loaded["ema"].data_ptr()
    assert all(torch.equal(loaded[name], state[name]) for name in [*others, "head", "embed"])
    ray_dcp.import_checkpoint(tmp_path / "one.pt", tmp_path / "again")
    ray_dcp.copy(tmp_path / "again", tmp_path / "copy")
    assert ray_dcp.export(tmp_path / "copy", tmp_path / "c", "hf").tied == {"embed": "head"}


def test_the_name_of_a_target_is_that_of_its_format(tmp_path: Path):
    ray_dcp.save({"w": torch.ones(2), "step": 3}, checkpoint_id=tmp_path / "c", no_dist=True)
    for name in ("w.pt", "w.pth", "w.ckpt", "w.bin"):
        assert ray_dcp.export(tmp_path / "c", tmp_path / name).format == "torch"
        assert torch.load(tmp_path / name)["step"] == 3
    assert ray_dcp.export(tmp_path / "c", tmp_path / "w.safetensors").format == "safetensors"
    assert ray_dcp.export(tmp_path / "c", tmp_path / "plain").format == "safetensors"
    for name, kind in [
        ("new.pt", "safetensors"),
        ("new.pt", "hf"),
        ("new.ckpt", "dcp"),
        ("new.safetensors", "torch"),
        ("new.safetensors", "hf"),
    ]:
        with pytest.raises(InvalidRequestError, match=r"expected another name for"):
            ray_dcp.export(tmp_path / "c", tmp_path / name, kind)
        assert not (tmp_path / name).exists()


def test_names_are_mapped_after_their_prefix_is_gone(tmp_path: Path):
    state = {"model": {"a.w": torch.ones(2), "b.w": torch.zeros(2), "c": torch.ones(1)}}
    ray_dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    for number, key_map in enumerate(
        (
            {"a.w": "x.w", "b.w": "y"},
            [("^a[.]w$", "x.w"), ("^b[.]w$", "y")],
            lambda name: {"a.w": "x.w", "b.w": "y", "c": None}[name],
        )
    ):
        left = set() if callable(key_map) else {"c"}
        for kind in KINDS:
            target = tmp_path / f"{number}-{kind}"
            plan = ray_dcp.export(
                tmp_path / "c", target, kind, strip_prefix="model.", key_map=key_map
            )
            found = torch.load(target) if kind == "torch" else ray_dcp.open(target).names
            assert {*found} == {"x.w", "y"} | left
            assert plan.num_tensors == len({*found})


def test_hf_has_config_and_tokenizer_of_the_checkpoint_or_of_a_folder(tmp_path: Path):
    folder = tmp_path / "base"
    files = {
        "config.json": '{"dtype": "float32", "hidden_size": 4}',
        "tokenizer.json": "{}",
        "chat_templates/tools.jinja": "x",
        "modeling_own.py": "pass",
    }
    weights = ("model.safetensors", "model.safetensors.index.json", ".git/config.json", "a.bin")
    for name in (*files, *weights):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(files.get(name, "weights"))
    state = {"model": {"w": torch.ones(2)}, "hf_assets": ray_dcp.hf_assets(folder), "step": 1}
    assert state["hf_assets"] == {name: text.encode() for name, text in files.items()}
    ray_dcp.save(state, checkpoint_id=tmp_path / "with", no_dist=True)
    ray_dcp.save({"model": state["model"]}, checkpoint_id=tmp_path / "without", no_dist=True)
    model = {"include": ["model.*"], "strip_prefix": "model."}
    for source, assets in (("with", None), ("without", folder)):
        target = tmp_path / f"hf-{source}"
        plan = ray_dcp.export(tmp_path / source, target, "hf", assets=assets, **model)
        assert plan.assets == tuple(sorted(files))
        assert plan.left_out == ()
        for name, text in files.items():
            assert (target / name).read_text() == text
        assert [*ray_dcp.open(target).names] == ["w"]
        # Others than hf have the files as any other value, or leave them out.
        plan = ray_dcp.export(tmp_path / "with", tmp_path / f"{source}.safetensors")
        assert (plan.assets, plan.num_objects) == ((), 0)
        assert set(plan.left_out) == {"step", *(f"hf_assets.{name}" for name in files)}
    # transformers loads in the dtype of the config.
    ray_dcp.export(tmp_path / "with", tmp_path / "half", "hf", dtype="bf16", **model)
    config = json.loads((tmp_path / "half/config.json").read_text())
    assert config == {"dtype": "bfloat16", "hidden_size": 4}
    # What the caller names wins.
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer/tokenizer.json").write_text("[]")
    ray_dcp.export(tmp_path / "with", tmp_path / "n", "hf", assets=tmp_path / "newer", **model)
    assert (tmp_path / "n/tokenizer.json").read_text() == "[]"
    assert (tmp_path / "n/config.json").read_text() == files["config.json"]


def test_assets_that_are_none_or_leave_the_folder_are_refused(tmp_path: Path):
    ray_dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c", no_dist=True)
    (tmp_path / "empty").mkdir()
    for assets, told in (("no", "is none"), ("empty", "found none")):
        with pytest.raises(InvalidRequestError, match=told):
            ray_dcp.export(tmp_path / "c", tmp_path / "o", "hf", assets=tmp_path / assets)
    with pytest.raises(InvalidRequestError, match="expected the format hf"):
        ray_dcp.export(tmp_path / "c", tmp_path / "o.pt", assets=tmp_path / "empty")
    with pytest.raises(InvalidRequestError, match="found Linear"):
        ray_dcp.hf_assets(torch.nn.Linear(1, 1))
    for number, (files, error) in enumerate(
        (({"../outside": b"x"}, UnsafeCheckpointError), ({"a": 3}, DamagedCheckpointError))
    ):
        state = {"w": torch.ones(2), "hf_assets": files}
        ray_dcp.save(state, checkpoint_id=tmp_path / f"bad{number}", no_dist=True)
        with pytest.raises(error):
            ray_dcp.export(tmp_path / f"bad{number}", tmp_path / "o", "hf")
    assert {path.name for path in tmp_path.iterdir()} == {"c", "empty", "bad0", "bad1"}


ADAPTERS = [
    # Names in the state dict, and in the file that PEFT 0.21 writes.
    (
        {
            "emb.lora_embedding_A.default": "emb.lora_embedding_A",
            "emb.lora_embedding_B.default": "emb.lora_embedding_B",
            "a.lora_A.default.weight": "a.lora_A.weight",
            "a.lora_B.default.weight": "a.lora_B.weight",
            "head.modules_to_save.default.weight": "head.weight",
            "head.modules_to_save.default.bias": "head.bias",
        },
        ["emb.base_layer.weight", "a.base_layer.bias", "head.original_module.weight"],
        "none",
    ),
    (
        {
            "a.lora_A.default.weight": "a.lora_A.weight",
            "a.lora_B.default.weight": "a.lora_B.weight",
            "a.lora_magnitude_vector.default.weight": "a.lora_magnitude_vector",
            "a.base_layer.bias": "a.base_layer.bias",
        },
        ["emb.weight", "a.base_layer.weight", "head.weight", "head.bias"],
        "lora_only",
    ),
    ({"a.ia3_l.default": "a.ia3_l"}, ["a.base_layer.weight", "head.bias"], "none"),
    ({"default.lora_A.mine.weight": "default.lora_A.weight"}, ["default.weight"], "none"),
    ({"a.lora_A.weight": "a.lora_A.weight"}, [], "none"),
]


@pytest.mark.parametrize("number", range(len(ADAPTERS)))
@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
def test_an_adapter_is_written_as_peft_reads_it(tmp_path: Path, number: int, prefix: str):
    named, base, bias = ADAPTERS[number]
    adapter = {0: "default", 1: "default", 2: "default", 3: "mine", 4: ""}[number]
    tensors = {f"{prefix}{name}": torch.randn(2) for name in (*named, *base)}
    config = {"bias": bias, "inference_mode": True}
    folder = f"{adapter}/" if adapter == "mine" else ""
    files = {f"{folder}adapter_config.json": json.dumps(config).encode(), "tokenizer.json": b"{}"}
    if not prefix:
        files["config.json"] = b"{}"
    moments = {name: {"exp_avg": torch.ones(2)} for name in tensors}
    state = {"model": tensors, "optimizer": {"state": moments}, "hf_assets": files}
    ray_dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    model = {"include": ["model.*"], "strip_prefix": "model."}
    plan = ray_dcp.export(tmp_path / "c", tmp_path / "hf", "hf", **model)
    assert plan.adapter == adapter
    assert set(plan.left_out) == {f"model.{prefix}{name}" for name in base}
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "tokenizer.json"
    }  # fmt: skip
    found = load_file(tmp_path / "hf/adapter_model.safetensors")
    assert {*found} == {f"base_model.model.{name}" for name in named.values()}
    for name, to in named.items():
        assert torch.equal(found[f"base_model.model.{to}"], tensors[f"{prefix}{name}"])
    assert json.loads((tmp_path / "hf/adapter_config.json").read_text()) == config
    # With the optimizer, it is no adapter.
    assert ray_dcp.export(tmp_path / "c", tmp_path / "all", "hf").adapter is None


def test_one_of_several_adapters_is_chosen(tmp_path: Path):
    names = [f"base_model.model.a.lora_A.{name}.weight" for name in ("one", "two")]
    state = {name: torch.full((2,), float(at)) for at, name in enumerate(names)}
    ray_dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(InvalidRequestError, match=r"of one, two; choose one"):
        ray_dcp.export(tmp_path / "c", tmp_path / "hf", "hf")
    assert ray_dcp.export(tmp_path / "c", tmp_path / "hf", "hf", include=["*.two.*"]).adapter
    (found,) = load_file(tmp_path / "hf/adapter_model.safetensors").values()
    assert found.tolist() == [1.0, 1.0]


def test_ranks_that_hold_tensors_must_agree_that_they_are_of_one_memory(tmp_path: Path):
    def held(*, tied: bool) -> dict[str, Any]:
        one = torch.ones(64, 8)
        return {"embed": one, "head": one if tied else one.clone()}

    for folder, states, found in [
        ("agree", [held(tied=True), held(tied=True)], {"head": "embed"}),
        ("empty", [held(tied=True), {}], {"head": "embed"}),
        ("differ", [held(tied=True), held(tied=False)], {}),
        ("first", [held(tied=False), held(tied=True)], {}),
    ]:
        save_on_ranks(states, tmp_path / folder)
        plan = plan_export(tmp_path / folder, tmp_path / "target", "hf")
        assert plan.tied == found, folder


def test_the_state_dict_of_a_module_stays_one_when_its_prefix_is_removed(tmp_path: Path):
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)]
    model = torch.nn.Sequential(*layers)
    state = {"model": model.state_dict(), "more": {"l": [torch.ones(1), {"x": 3}], 7: {"n": 4}}}
    ray_dcp.save(state, checkpoint_id=tmp_path / "source")
    for kind, prefix in (("torch", "model."), ("dcp", "model."), ("torch", "more.")):
        target = tmp_path / f"{prefix}{kind}"
        ray_dcp.export(tmp_path / "source", target, kind, strip_prefix=prefix)
        found = torch.load(target) if kind == "torch" else ray_dcp.read_state_dict(target)
        if prefix == "model.":
            assert [*found] == [*model.state_dict(), "more"]
            del found["more"]
            model.load_state_dict(found)
        else:
            assert (found["l"], found[7]) == ([torch.ones(1), {"x": 3}], {"n": 4})
    whole = ray_dcp.read_state_dict(tmp_path / "source", key_map=[("^model[.]0[.]", "net.first.")])
    assert [*whole["net"]] == ["first.weight", "first.bias"]
    assert [*whole["model"]] == ["1.weight", "1.bias"]
    mixed = ray_dcp.read_state_dict(tmp_path / "source", key_map={"more.l.0": "model.0"})
    assert mixed["model"]["0"] == torch.ones(1)


@pytest.mark.parametrize("where", ["", "model."])
def test_the_state_dict_of_a_module_stays_one_when_its_names_get_a_prefix(
    where: str, tmp_path: Path
):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.register_buffer("scale", torch.ones(1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict()} if where else model.state_dict()
    if where:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    ray_dcp.save(state, checkpoint_id=tmp_path / "source")
    whole = torch.nn.ModuleDict({"net": model})
    found = ray_dcp.read_state_dict(
        tmp_path / "source",
        key_map=[(f"^{where}(?!optimizer)", f"{where}net."), ("[.]state[.]", ".state.net.")],
    )
    assert [*(found["model"] if where else found)] == [*whole.state_dict()]
    if where:
        assert [*found["optimizer"]["state"]] == ["net.0.weight", "net.0.bias"]
        found = ray_dcp.read_state_dict(tmp_path / "source", key_map=[("^model[.]", "ema.net.")])
        assert [*found["ema"]] == [*whole.state_dict()]


@pytest.mark.parametrize("num_steps", [0, 1])
def test_groups_of_optimizers_list_parameters_by_their_new_names(num_steps: int, tmp_path: Path):
    def layers(names: Any) -> dict[str, Any]:
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in names})
        groups = [{"params": model[name].parameters(), "lr": lr} for name, lr in names.items()]
        return {"model": model, "optimizer": torch.optim.AdamW(groups)}

    saved = layers({"net": 0.5, "head": 0.25})
    for _ in range(num_steps):
        saved["model"]["net"](torch.ones(2)).sum().backward()
        saved["optimizer"].step()
    ray_dcp.save(saved, checkpoint_id=tmp_path / "a")
    key_map = [(r"[.]net[.]", ".body."), (r"[.]head[.]", ".top.")]
    ray_dcp.dcp_to_torch_save(tmp_path / "a", tmp_path / "renamed.pt", key_map=key_map)
    ray_dcp.torch_save_to_dcp(tmp_path / "renamed.pt", tmp_path / "b")
    ray_dcp.dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")
    ray_dcp.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "c", key_map=key_map)
    for name in ("b", "c"):
        other = layers({"top": 0.1, "body": 0.1})
        ray_dcp.load(other, checkpoint_id=tmp_path / name)
        assert [group["lr"] for group in other["optimizer"].param_groups] == [0.25, 0.5]
    read = ray_dcp.read_state_dict(tmp_path / "a", key_map=key_map)
    assert read["optimizer"]["param_groups"][0]["params"] == ["body.weight", "body.bias"]
    names = {name: name.replace(".net.", ".body.") for name in ray_dcp.open(tmp_path / "a").names}
    read = ray_dcp.read_state_dict(tmp_path / "a", key_map=names.__getitem__)
    expected = "body" if num_steps else "net"
    assert read["optimizer"]["param_groups"][0]["params"][0] == f"{expected}.weight"


def test_a_step_of_a_run_is_no_target(tmp_path: Path):
    state = {"w": torch.ones(2)}
    run, one = tmp_path / "run", str(tmp_path / "run" / "step-1")
    ray_dcp.save(state, checkpoint_id=one)
    torch.save(state, tmp_path / "w.pt")
    for step in ("1", "2", "latest", "best", "step-1"):
        target = f"{run}@{step}"
        for write in (
            partial(ray_dcp.copy, one, target),
            partial(ray_dcp.average, [one], target),
            partial(ray_dcp.export, one, target, "dcp"),
            partial(ray_dcp.import_checkpoint, tmp_path / "w.pt", target),
        ):
            with pytest.raises(InvalidRequestError, match="names a step of the run"):
                write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "w.pt"]
    for target in (f"{run}@v2", f"{one}@2"):
        assert ray_dcp.copy(one, target)["w"][...].tolist() == [1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_targets_that_are_taken_or_have_no_place_are_refused(tmp_path: Path, kind: str):
    source = checkpoints.save(tmp_path / "source")
    taken, file, link = (tmp_path / name for name in ("taken", "file", "link"))
    taken.mkdir()
    (taken / "notes").write_text("mine")
    file.write_text("dear")
    link.symlink_to("nowhere")
    refused = {taken: r"is a directory|new or empty"}
    if kind in ("safetensors", "torch"):
        there = "is there already: delete it first"
        refused |= {tmp_path / "no" / "w": "directory that exists", file: there, link: there}
    for target, told in refused.items():
        with pytest.raises(InvalidRequestError, match=told):
            ray_dcp.export(source, target, kind, include=["model.w*"])
    assert [p.name for p in taken.iterdir()] == ["notes"]
    assert (file.read_text(), link.is_symlink(), link.exists()) == ("dear", True, False)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_an_export_goes_to_where_the_name_of_its_folder_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    source = checkpoints.save(tmp_path / "source")
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("there")
    (tmp_path / "dangling").symlink_to("new")
    monkeypatch.chdir(tmp_path / "here")
    if kind == "hf":
        with pytest.raises(InvalidRequestError, match="other than the current one"):
            ray_dcp.export(source, ".", kind)
    else:
        ray_dcp.export(source, ".", kind)
    for target, made in (("../link", "there"), ("../dangling", "new")):
        ray_dcp.export(source, target, kind, include=["model.w*"])
        assert list(ray_dcp.open(tmp_path / made).names) == ["model.weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_that_does_not_fit_the_disk_is_said_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    source = checkpoints.save(tmp_path / "source")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000))
    with pytest.raises(StorageError, match=r"but 1000 B are free; nothing was written"):
        ray_dcp.export(source, tmp_path / "out", kind, include=["model.[wl]*"])
    with pytest.raises(StorageError, match="nothing was written"):
        ray_dcp.copy(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_what_is_made_of_a_part_needs_the_space_of_that_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = checkpoints.save(tmp_path / "source")
    tensors = ray_dcp.open(source).tensors
    name = min(tensors, key=lambda one: tensors[one].num_bytes)
    usage, free = shutil.disk_usage(tmp_path), 8192 + 3 * tensors[name].num_bytes
    assert free < sum(info.num_bytes for info in tensors.values())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    ray_dcp.export(source, tmp_path / "dcp", "dcp", include=[name], dtype="bfloat16")
    new = ray_dcp.import_checkpoint(source, tmp_path / "new", include=[name])
    assert list(ray_dcp.open(tmp_path / "dcp").names) == list(new.names) == [name]


def interrupt(_: Path) -> None:
    raise KeyboardInterrupt


def replace_source(source: Path) -> None:
    ray_dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=source)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("step", "happens", "error", "told"),
    [
        ("read_into", interrupt, KeyboardInterrupt, None),
        ("read_into", checkpoints.save, StorageError, "meanwhile, and nothing was written"),
        ("stored_in", replace_source, StorageError, "replaced"),
    ],
)
def test_an_export_that_is_interrupted_or_whose_source_is_replaced_leaves_nothing(
    tmp_path, monkeypatch, kind, step, happens, error, told
):
    """Its contents are listed, and then loaded: both open it."""
    source = checkpoints.save(tmp_path / "source")
    real, seen = getattr(conversion, step), list[bool]()

    def meanwhile(*args: Any, **named: Any) -> Any:
        if not seen:
            seen.append(True)
            happens(source)
        return real(*args, **named)

    monkeypatch.setattr(conversion, step, meanwhile)
    with pytest.raises(error, match=told):
        ray_dcp.export(source, tmp_path / "out", kind, include=["model.[wl]*"])
    assert seen
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_import_that_does_not_fit_the_disk_is_said_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    source = checkpoints.save(tmp_path / "source")
    if kind == "torch":
        ray_dcp.export(source, tmp_path / "w.pt", "torch")
    elif kind == "safetensors":
        ray_dcp.export(source, tmp_path / "w.safetensors")
    names = {"torch": "w.pt", "safetensors": "w.safetensors"}
    before = sorted(tmp_path.iterdir())
    usage = shutil.disk_usage(tmp_path)
    # The state takes 2.4 MB; what is no file of torch is on the disk twice meanwhile.
    free = 2_000_000 if kind == "torch" else 4_000_000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    with pytest.raises(StorageError, match=r"are free; nothing was written"):
        ray_dcp.import_checkpoint(tmp_path / names.get(kind, "source"), tmp_path / "new")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_of_what_was_replaced_exports_nothing_else(tmp_path: Path, kind: str):
    view = ray_dcp.open(checkpoints.save(tmp_path / "source"))
    ray_dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "source")
    with pytest.raises(StorageError, match=r"replaced.*read it again"):
        ray_dcp.export(view, tmp_path / "out", kind)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("wrong", ["model.w", None, 5, [5]])
def test_patterns_that_are_no_list_of_texts_are_refused(tmp_path: Path, wrong: Any):
    source = checkpoints.save(tmp_path / "source")
    for call in (
        lambda: ray_dcp.export(source, tmp_path / "w.pt", "torch", include=wrong),
        lambda: ray_dcp.import_checkpoint(source, tmp_path / "new", include=wrong),
        lambda: ray_dcp.read_state_dict(source, include=wrong),
        lambda: ray_dcp.dcp_to_torch_save(source, tmp_path / "w.pt", include=wrong),
        lambda: ray_dcp.average([source], tmp_path / "new", keys=wrong or 5),
    ):
        with pytest.raises(InvalidRequestError, match="must be a list of patterns"):
            call()
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_imports_of_files_and_folders_hold_what_they_did(tmp_path: Path):
    from safetensors.torch import save_file

    tensors = {"a.w": torch.arange(6.0), "a.b": torch.ones(2, dtype=torch.bfloat16)}
    torch.save({"a": {"w": tensors["a.w"]}, "n": 3}, tmp_path / "w.pt")
    (tmp_path / "hub").mkdir()
    save_file(tensors, tmp_path / "hub" / "model.safetensors")
    stock_path = checkpoints.save_stock(tmp_path / "stock", {"a": {"w": tensors["a.w"]}})
    sources = {
        "torch": tmp_path / "w.pt", "file": tmp_path / "hub" / "model.safetensors",
        "hub": tmp_path / "hub", "stock": stock_path,
    }  # fmt: skip
    for name, source in sources.items():
        target = tmp_path / f"ours-{name}"
        ray_dcp.import_checkpoint(f"file://{source}" if name != "stock" else source, target)
        view = ray_dcp.open(target)
        assert view.kind == "native"
        assert view["a.w"][...].tolist() == [0, 1, 2, 3, 4, 5]
        assert view.verify().ok
    assert ray_dcp.open(tmp_path / "ours-torch")["n"] == 3
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_wrong_imports_are_refused(tmp_path: Path):
    ours = checkpoints.save(tmp_path / "ours")
    for missing in (tmp_path / "nope", f"file://{tmp_path}/nope"):
        with pytest.raises(CheckpointNotFoundError, match="expected a file or folder"):
            ray_dcp.import_checkpoint(missing, tmp_path / "new")
    with pytest.raises(CheckpointExistsError, match="expected nothing of a checkpoint"):
        ray_dcp.import_checkpoint(ours, ours)
    for begin, error in ((b"no zip at all", InvalidRequestError), (b"PK", DamagedCheckpointError)):
        (tmp_path / "w.pt").write_bytes(begin)
        with pytest.raises(error):
            ray_dcp.import_checkpoint(tmp_path / "w.pt", tmp_path / "new")
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 99)
    with pytest.raises(DamagedCheckpointError) as told:
        ray_dcp.import_checkpoint(tmp_path / "w.safetensors", tmp_path / "new")
    assert told.value.checkpoint_id == str(tmp_path / "w.safetensors")
    assert not (tmp_path / "new").exists()


def test_a_copy_is_the_same_checkpoint_elsewhere(tmp_path: Path):
    for _ in range(2):
        source = checkpoints.save(tmp_path / "source")
    seen: list[ray_dcp.Progress] = []
    view = ray_dcp.copy(source, tmp_path / "copy", progress=seen.append)
    before, own = ray_dcp.open(source).attempt, view.attempt
    assert own != before
    assert view.verify() == ray_dcp.open(source).verify()
    assert view.trace == replace(ray_dcp.open(source).trace, attempt=own)
    files = [ray_dcp.open(path).checkpoint.manifest.files for path in (source, tmp_path / "copy")]
    assert files[0].digests == files[1].digests
    assert seen[-1].done_bytes == seen[-1].total_bytes > 0
    names = [sorted(p.name for p in path.rglob("*")) for path in (source, tmp_path / "copy")]
    slots = [name for name in names[0] if name.startswith("manifest-")]
    assert slots == ["manifest-00000002.json"]
    there = sorted(
        name.replace(before, own).replace(slots[0], "manifest-00000001.json") for name in names[0]
    )
    assert there == names[1]
    ray_dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "copy")  # it can be saved over
    with pytest.raises(CheckpointExistsError, match="choose another place"):
        ray_dcp.copy(source, tmp_path / "copy")


class Failing(LocalStorage):
    """Fails at a write, or when a file is published."""

    def __init__(self, root: Path, error: BaseException, at: str, times: int = 1) -> None:
        super().__init__(root)
        self._error, self._at, self._times = error, at, times

    def write(self, key, data, *, create=False):
        if self._at in key and self._times:
            self._times -= 1
            raise self._error
        super().write(key, data, create=create)

    def open_writer(self, key, *, sync=True):
        if self._at in key:
            raise self._error
        return super().open_writer(key, sync=sync)


@pytest.mark.parametrize("at", [".distcp", "chunks.", "manifest-", "trace."])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), StorageError("disk full")])
def test_a_copy_that_fails_or_is_interrupted_anywhere_is_taken_back(
    tmp_path: Path, at: str, error: BaseException
):
    view = ray_dcp.open(checkpoints.save(tmp_path / "source"))
    plan = plan_copy(view.storage, view.checkpoint)
    is_retried = at == "manifest-" and isinstance(error, StorageError)
    failing = Failing(tmp_path / "copy", error, at, 1 + is_retried)
    target = Target(str(tmp_path / "copy"))
    with pytest.raises(type(error)):
        copy_checkpoint(view.storage, plan, target, opener=lambda _: failing)
    left = [p.name for p in tmp_path.rglob("copy/**/*") if p.is_file()]
    assert left in ([], ["manifest-00000001.json"])
    if left:
        assert isinstance(decode_record((tmp_path / "copy" / left[0]).read_bytes()), AbortRecord)
    assert ray_dcp.copy(view, tmp_path / "copy").verify().ok


def test_a_copy_of_what_others_wrote_replaces_no_metadata_that_came_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source, theirs = checkpoints.save_stock(tmp_path / "stock"), tmp_path / "copy" / ".metadata"
    interpose(
        monkeypatch, LocalStorage, "write", str(theirs),
        lambda: theirs.write_bytes(b"of another program"),
    )  # fmt: skip
    with pytest.raises(CheckpointExistsError, match=r"somebody else created \.metadata"):
        ray_dcp.copy(source, tmp_path / "copy")
    assert theirs.read_bytes() == b"of another program"


@pytest.mark.parametrize("damage", [os.remove, lambda file: os.truncate(file, 1000)])
def test_a_copy_of_what_others_wrote_is_refused_where_a_file_lacks_bytes(
    tmp_path: Path, damage: Callable[[Path], None]
):
    source = checkpoints.save_stock(tmp_path / "stock")
    damage(checkpoints.data_file(source))
    with pytest.raises(DamagedCheckpointError, match=r"expected __0_0\.distcp with .*copy another"):
        ray_dcp.copy(source, tmp_path / "copy")
    assert [p.name for p in tmp_path.iterdir()] == ["stock"]


def test_a_copy_whose_metadata_can_not_be_written_stands(tmp_path: Path):
    view = ray_dcp.open(checkpoints.save(tmp_path / "source"))
    failing = Failing(tmp_path / "copy", StorageError("disk full"), ".metadata")
    target = Target(str(tmp_path / "copy"))
    with pytest.warns(UserWarning, match=r"stands, but what follows.*disk full"):
        copy_checkpoint(
            view.storage, plan_copy(view.storage, view.checkpoint), target, opener=lambda _: failing
        )
    assert ray_dcp.verify(tmp_path / "copy").ok


def test_a_place_that_was_deleted_can_be_copied_to(tmp_path: Path):
    sources = [checkpoints.save(tmp_path / "source"), checkpoints.save_stock(tmp_path / "stock")]
    target = checkpoints.save(tmp_path / "copy")
    for source in sources:
        with pytest.raises(CheckpointExistsError, match="delete it first"):
            ray_dcp.copy(source, target)
        ray_dcp.delete(target)
        view = ray_dcp.copy(source, target)
        assert view.verify().ok
        assert len(list(target.glob("manifest-*"))) == 1


@pytest.mark.parametrize("kind", ["stock", "hub"])
def test_of_two_copies_of_what_others_wrote_one_wins(tmp_path: Path, kind: str):
    from safetensors.torch import save_file

    source = checkpoints.save_stock(tmp_path / "stock")
    if kind == "hub":
        (source := tmp_path / "hub").mkdir()
        for name in "ab":
            save_file({name: torch.ones(3)}, source / f"{name}.safetensors")
    view = ray_dcp.open(source)
    plan = plan_copy(view.storage, view.checkpoint)
    target = Target(str(tmp_path / "copy"))
    began, lock = [], threading.Lock()
    told = r"is being written by process \d+ on .*, which lives"

    class Rival(Meter):
        def add(self, num_bytes: int, file: str = "") -> None:
            with lock:
                if not began:
                    began.append(file)
                    with pytest.raises(CheckpointExistsError, match=told):
                        copy_checkpoint(view.storage, plan, target)

    copy_checkpoint(view.storage, plan, target, progress=Rival("copying", ""))
    assert began
    assert ray_dcp.verify(tmp_path / "copy").ok
    assert len(ray_dcp.open(tmp_path / "copy")) == len(view)


class Losing(LocalStorage):
    """Says that data files were written, and has them under other names."""

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        return super().open_writer(key.replace(".distcp", ".lost"), sync=sync)


def test_a_copy_whose_files_can_not_be_seen_is_not_committed(tmp_path: Path):
    view = ray_dcp.open(checkpoints.save(tmp_path / "source"))
    plan = plan_copy(view.storage, view.checkpoint)
    losing = Losing(str(tmp_path / "copy"))
    with pytest.raises(StorageError, match=r"\.distcp"):
        copy_checkpoint(view.storage, plan, Target(losing.url), opener=lambda _: losing)
    with pytest.raises(CheckpointNotFoundError):
        ray_dcp.open(tmp_path / "copy")


def test_a_copy_of_which_nobody_knows_whether_it_stands_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    state = {"w": torch.arange(40.0)}
    ray_dcp.save(state, checkpoint_id=tmp_path / "a")

    def lost() -> None:
        error = StorageError("no answer")
        interpose(monkeypatch, LocalStorage, "list", f"{tmp_path}/b/*", error, times=None)
        raise StorageError("the answer was lost")

    interpose(monkeypatch, LocalStorage, "write", "*/manifest-*", lost, after=True, times=None)
    with pytest.raises(CommitUnknownError):
        ray_dcp.copy(tmp_path / "a", tmp_path / "b")
    monkeypatch.undo()
    assert ray_dcp.verify(tmp_path / "b").ok
    assert torch.equal(ray_dcp.read_state_dict(tmp_path / "b")["w"], state["w"])


@pytest.mark.parametrize("source", [None, 5])
def test_what_names_no_file_is_refused(source: object, tmp_path: Path):
    for make in (ray_dcp.import_checkpoint, ray_dcp.torch_save_to_dcp):
        with pytest.raises(InvalidRequestError, match="expected a path or URL"):
            make(source, tmp_path / "new")
    assert not list(tmp_path.iterdir())


# --- into other formats and back ----------------------------------------------------------------


def state() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(6.0).view(3, 2), "half": torch.ones(3).bfloat16()},
        "optimizer": {"state": {0: {"step": torch.tensor(7.0)}, 1: {}}, "groups": [{"lr": 0.1}]},
        "pair": (1, torch.full((2,), 5)),
        "empty": torch.zeros(0, 3),
        "step": 3,
    }


SAVERS: dict[str, Callable[..., Any]] = {
    "ours": lambda it, path: ray_dcp.save(it, checkpoint_id=path),
    "stock": lambda it, path: stock.save(it, checkpoint_id=path, no_dist=True),
}


def same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)


def test_a_reader_of_the_users_is_read_too(tmp_path: Path):
    class Reader(stock.FileSystemReader):
        pass

    stock.save(state(), checkpoint_id=tmp_path / "c", no_dist=True)
    found = ray_dcp.read_state_dict(storage_reader=Reader(tmp_path / "c"), include=["model.w"])
    assert same(found, {"model": {"w": state()["model"]["w"]}})


# --- torch.save files ---------------------------------------------------------------------------


def test_numbers_as_keys_survive_both_ways(tmp_path: Path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    ray_dcp.dcp_to_torch_save(tmp_path / "c", tmp_path / "a.pt")
    ray_dcp.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "d")
    for name in ("c", "d"):
        found = ray_dcp.read_state_dict(tmp_path / name)
        assert same(found["optimizer"], state()["optimizer"])
    assert set(torch.load(tmp_path / "a.pt")["optimizer"]["state"]) == {0, 1}


def test_objects_that_look_at_their_tensors_when_they_are_built(tmp_path: Path):
    state = {"w": torch.ones(3), "rng": torch.Generator().manual_seed(3), "in": [(torch.ones(2),)]}
    expected = state["rng"].get_state()
    ray_dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    ray_dcp.dcp_to_torch_save(tmp_path / "c", tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=False)
    assert torch.equal(found["rng"].get_state(), expected)
    assert found["in"][0][0].tolist() == [1.0, 1.0]
    ray_dcp.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "d")
    assert torch.equal(ray_dcp.read_state_dict(tmp_path / "d")["rng"].get_state(), expected)


def test_a_part_under_other_names_and_of_another_dtype(tmp_path: Path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    how: dict[str, Any] = {
        "include": ["model.*", "optimizer.state.0.*", "step"],
        "key_map": [(r"^model\.", "net.")],
        "dtype": torch.float64,
    }
    ray_dcp.dcp_to_torch_save(tmp_path / "c", tmp_path / "a.pt", **how)
    found = torch.load(tmp_path / "a.pt")
    assert found["net"]["w"].dtype == found["net"]["half"].dtype == torch.float64
    assert torch.equal(found["net"]["w"], state()["model"]["w"].double())
    assert found["optimizer"]["state"][0]["step"].item() == 7
    assert set(found) == {"net", "optimizer", "step"}
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    torch.save(state(), tmp_path / "all.pt")
    ray_dcp.torch_save_to_dcp(tmp_path / "all.pt", tmp_path / "d", **how)
    again = ray_dcp.read_state_dict(tmp_path / "d")
    assert again["net"]["half"].dtype == torch.float64
    assert again["step"] == 3


def test_a_large_checkpoint_takes_little_memory(tmp_path: Path, programs: Programs):
    program = """
import sys, torch, ray_dcp
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))
root = sys.argv[1]
ray_dcp.dcp_to_torch_save(f"{root}/small", f"{root}/small.pt")
before = anonymous()
ray_dcp.dcp_to_torch_save(f"{root}/c", f"{root}/c.pt")
ray_dcp.dcp_to_safetensors(f"{root}/c", f"{root}/hf", file_bytes=1 << 24)
ray_dcp.torch_save_to_dcp(f"{root}/c.pt", f"{root}/d")
print(anonymous() - before)
"""
    parts = {str(i): torch.full((2 << 20,), float(i)) for i in range(6)}  # 48 MiB
    ray_dcp.save(parts, checkpoint_id=tmp_path / "c")
    ray_dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "small")
    (ran,) = programs.run("-c", program, str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 20 << 20
    found = torch.load(tmp_path / "c.pt", mmap=True)
    assert all(torch.equal(found[key], value) for key, value in parts.items())
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 3
    last = ray_dcp.read_state_dict(tmp_path / "d", include=["5"])
    assert torch.equal(last["5"], parts["5"])


def test_a_conversion_that_fails_leaves_no_file_and_the_old_one(tmp_path: Path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    (tmp_path / "a.pt").write_bytes(b"old")
    (data,) = (tmp_path / "c").glob("*.distcp")
    raw = bytearray(data.read_bytes())
    raw[raw.index(torch.arange(6.0).numpy().tobytes()) + 5] ^= 1
    data.write_bytes(raw)
    with pytest.raises(DamagedCheckpointError, match=r"model\.w"):
        ray_dcp.dcp_to_torch_save(tmp_path / "c", tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "c"]


def test_a_file_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    calls = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *at, n=name, f=real: (calls.append(n), f(*at))[1])
    ray_dcp.dcp_to_torch_save(tmp_path / "c", tmp_path / "a.pt")
    assert calls == ["fsync", "rename", "fsync"]


class Bomb:
    def __reduce__(self) -> Any:
        return (list, (range(10**6),))


def test_files_that_are_no_state_dicts_are_refused(tmp_path: Path):
    torch.save([1], tmp_path / "list.pt")
    torch.save({"a": Bomb()}, tmp_path / "evil.pt")
    (tmp_path / "text.pt").write_text("hello")
    torch.save({"w": torch.ones(1000)}, tmp_path / "cut.pt")
    os.truncate(tmp_path / "cut.pt", 700)
    for name, error in {
        "list.pt": StateDictError,
        "evil.pt": UnsafeCheckpointError,
        "text.pt": DamagedCheckpointError,
        "cut.pt": DamagedCheckpointError,
        "none.pt": CheckpointNotFoundError,
        ".": InvalidRequestError,
    }.items():
        with pytest.raises(error):
            ray_dcp.torch_save_to_dcp(tmp_path / name, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_file_from_before_torch_1_6_is_read_where_it_is_trusted(tmp_path: Path):
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsafeCheckpointError, match=r"before version 1\.6.*weights_only=False"):
        ray_dcp.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "c")
    ray_dcp.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "c", weights_only=False)
    assert same(ray_dcp.read_state_dict(tmp_path / "c"), {"w": torch.ones(3)})


@pytest.mark.parametrize(
    "how",
    [{"include": ["nothing.*"]}, {"key_map": {"model.w": "model.half"}}, {"key_map": [("[", "")]}],
)
def test_a_choice_that_can_not_be_is_refused(tmp_path: Path, how: dict[str, Any]):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    with pytest.raises(InvalidRequestError):
        ray_dcp.dcp_to_torch_save(tmp_path / "c", tmp_path / "a.pt", **how)
    assert not (tmp_path / "a.pt").exists()
    with pytest.raises(InvalidRequestError, match="directory that exists"):
        ray_dcp.dcp_to_torch_save(tmp_path / "c", tmp_path / "no" / "a.pt")


# --- safetensors --------------------------------------------------------------------------------


def test_safetensors_files_have_an_index_and_split_by_size(tmp_path: Path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    tensors = {"include": ["model.*", "optimizer.state.0.step", "empty"]}
    ray_dcp.dcp_to_safetensors(tmp_path / "c", tmp_path / "hf", file_bytes=20, **tensors)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 24 + 6 + 4
    found = {}
    for name, file in index["weight_map"].items():
        found[name] = load_file(tmp_path / "hf" / file)[name]
    assert torch.equal(found["model.w"], state()["model"]["w"])
    assert found["model.half"].dtype == torch.bfloat16
    assert found["optimizer.state.0.step"].shape == ()
    assert found["optimizer.state.0.step"].item() == 7
    assert found["empty"].shape == (0, 3)
    assert same(
        ray_dcp.read_state_dict(tmp_path / "hf", include=["empty"]), {"empty": found["empty"]}
    )


@pytest.mark.parametrize(
    ("value", "told"),
    [({"pair": (1, 2)}, "'pair'"), ({"__metadata__": torch.ones(2)}, "rename it")],
)
def test_what_safetensors_can_not_hold_is_named(tmp_path: Path, value: Any, told: str):
    ray_dcp.save({"w": torch.ones(1), **value}, checkpoint_id=tmp_path / "c")
    with pytest.raises(UnsupportedValueError, match=rf"'{next(iter(value))}'.*{told}|{told}"):
        ray_dcp.dcp_to_safetensors(tmp_path / "c", tmp_path / "hf")
    assert not list(tmp_path.glob("hf/*"))


def test_files_of_an_earlier_conversion_or_save_are_not_left_beside_the_new_ones(tmp_path: Path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "adapter.safetensors").write_bytes(b"mine")
    for value, file_bytes in ((1.0, 8), (2.0, 1 << 20)):
        ray_dcp.save({name: torch.full((4,), value) for name in "ab"}, checkpoint_id=tmp_path / "c")
        ray_dcp.dcp_to_safetensors(tmp_path / "c", tmp_path / "hf", file_bytes=file_bytes)
        (tmp_path / "hf" / "shard-00001-model-00001-of-00001.safetensors").touch()
    ray_dcp.dcp_to_safetensors(tmp_path / "c", tmp_path / "hf")
    assert sorted(file.name for file in (tmp_path / "hf").iterdir()) == [
        "adapter.safetensors", "model-00001-of-00001.safetensors", "model.safetensors.index.json",
    ]  # fmt: skip
    found = load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors")
    assert {name: value[0].item() for name, value in found.items()} == {"a": 2.0, "b": 2.0}


def test_paths_without_a_folder_are_those_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    ray_dcp.save({"w": torch.ones(2)}, checkpoint_id="c")
    ray_dcp.dcp_to_torch_save("c", "w.pt")
    ray_dcp.torch_save_to_dcp("w.pt", "again")
    ray_dcp.dcp_to_safetensors("again", "hf")
    assert load_file("hf/model-00001-of-00001.safetensors")["w"].tolist() == [1.0, 1.0]
    assert not list(tmp_path.glob("*.tmp"))


# --- the reader ---------------------------------------------------------------------------------


def test_the_reader_of_torch_save_files_works_alone(tmp_path: Path):
    torch.save({"m": OrderedDict(w=torch.arange(6.0).view(3, 2))}, tmp_path / "a.pt")
    found = {"m": {"w": torch.zeros(3, 2)}}
    ray_dcp.load(
        found,
        storage_reader=stock_utils.BroadcastingTorchSaveReader(),
        planner=stock_utils.DynamicMetaLoadPlanner(),
        checkpoint_id=tmp_path / "a.pt",
    )
    assert torch.equal(found["m"]["w"], torch.arange(6.0).view(3, 2))


def test_the_reader_of_torch_save_files_runs_no_code_unless_told_to(tmp_path: Path):
    torch.save({"w": torch.ones(2), "a": Bomb()}, tmp_path / "a.pt")
    found = {"w": torch.zeros(2)}
    how: dict[str, Any] = {
        "storage_reader": stock_utils.BroadcastingTorchSaveReader(tmp_path / "a.pt"),
        "planner": stock_utils.DynamicMetaLoadPlanner(),
    }
    with pytest.raises(UnsafeCheckpointError):
        ray_dcp.load(found, **how)
    ray_dcp.load(found, **how, options=ray_dcp.LoadOptions(weights_only=False))
    assert found["w"].tolist() == [1, 1]


def test_the_reader_of_torch_save_files_needs_one(tmp_path: Path):
    with pytest.raises(InvalidRequestError, match=r"a file of torch\.save, found None"):
        ray_dcp.load({}, storage_reader=stock_utils.BroadcastingTorchSaveReader())


@pytest.mark.parametrize(
    ("wanted", "error", "also"),
    [
        ({"x": torch.zeros(1)}, MissingKeyError, RuntimeError),
        ({"w": torch.zeros(3)}, ShapeMismatchError, ValueError),
        ({"n": torch.zeros(1)}, UnsupportedValueError, RuntimeError),
    ],
)
def test_the_reader_refuses_what_does_not_fit(tmp_path: Path, wanted: Any, error: Any, also: Any):
    torch.save({"w": torch.ones(2), "n": 3}, tmp_path / "a.pt")
    with pytest.raises(ray_dcp.CheckpointError) as caught:
        ray_dcp.load(
            wanted,
            storage_reader=stock_utils.BroadcastingTorchSaveReader(tmp_path / "a.pt"),
            planner=stock_utils.DynamicMetaLoadPlanner(),
        )
    failures = [caught.value, *(each for each, _ in caught.value.failures.values())]
    assert any(isinstance(each, error) and isinstance(each, also) for each in failures)
