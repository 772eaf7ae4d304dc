"""A small decoder and its model on the Hugging Face hub, which two ranks of FSDP2 load and write.

By the key map, by an adapter as torchtitan's and through its manager; stock DCP reads the same.
Run as `python -m tests.support.programs.hub_ranks FOLDER TORCHTITAN` on each rank.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ray_dcp

WIDTH, HEADS, LAYERS, WORDS = 24, 2, 3, 32

KEY_MAP = [
    (r"^model\.embed_tokens\.", "tok_embeddings."),
    (r"^model\.", ""),
    (r"\.self_attn\.(.)_proj\.", r".attention.w\1."),
    (r"\.input_layernorm\.", ".attention_norm."),
]
"""`LoadOptions.key_map` from the names of the hub to those of `Decoder`."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("wq", "wo"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(), nn.RMSNorm(WIDTH)


class Decoder(nn.Module):
    """As torchtitan names and lays out its models; `lm_head` may be the embedding."""

    def __init__(self, *, seed: int, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight


class Adapter:
    """As torchtitan's `Llama3StateDictAdapter`: other names, and other rows of the queries."""

    def __init__(self, hf_assets_path: str | None = None) -> None:
        self.hf_assets_path = hf_assets_path
        self.fqn_to_index_mapping: dict[Any, int] | None = None
        index = Path(hf_assets_path or "", "model.safetensors.index.json")
        if hf_assets_path and index.exists():
            self.fqn_to_index_mapping = {
                name: int(re.search(r"\d+", file)[0])
                for name, file in json.loads(index.read_text())["weight_map"].items()
            }

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {
            _hub_name(name): _permuted(value, 2) if name.endswith("wq.weight") else value
            for name, value in state_dict.items()
        }

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        names = {_hub_name(name): name for name in Decoder(seed=0).state_dict()}
        return {
            names[name]: _permuted(value, 1) if name.endswith("q_proj.weight") else value
            for name, value in hf_state_dict.items()
        }

    def get_hf_storage_reader(
        self, path: str, from_quantized: bool = False
    ) -> HuggingFaceStorageReader:
        return HuggingFaceStorageReader(path)


def _hub_name(name: str) -> str:
    if name.startswith("lm_head."):
        return name
    name = re.sub(r"\.attention\.w(.)\.", r".self_attn.\1_proj.", name)
    name = name.replace(".attention_norm.", ".input_layernorm.")
    return "model." + name.replace("tok_embeddings.", "embed_tokens.")


def _permuted(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """Swaps halves and pairs of the rows of each head, one way (dim 2) or back (dim 1)."""
    rows = WIDTH // HEADS // 2
    halves = (rows, 2) if dim == 2 else (2, rows)
    return weight.view(HEADS, *halves, WIDTH).transpose(1, 2).reshape(WIDTH, WIDTH).clone()


def write_model(folder: Path, state: dict[str, torch.Tensor], num_files: int = 2) -> Path:
    """Writes a model as the hub has it: a tensor in the file of its turn, and the index."""
    folder.mkdir(parents=True)
    file_of = {}
    for number in range(num_files):
        name = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        own = {key: state[key].contiguous() for key in list(state)[number::num_files]}
        save_file(own, folder / name, {"format": "pt"})
        file_of.update(dict.fromkeys(own, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return folder


def read_model(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a model, by the safetensors library; each must be in its file."""
    file_of = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in sorted({*file_of.values()})}
    assert sorted(p.name for p in folder.glob("*.safetensors")) == sorted(files)
    assert {name: file for file, own in files.items() for name in own} == file_of
    return {name: value for own in files.values() for name, value in own.items()}


# --- Ranks ----------------------------------------------------------------------------------------


def main(folder: Path, titan: str) -> None:
    sys.path.append(titan)
    dist.init_process_group("gloo")
    by_key_map(folder)
    by_adapter(folder)
    by_torchtitan(folder)
    tied(folder)
    print("all equal")
    dist.destroy_process_group()


def model(*, seed: int, tied: bool = False) -> torch.nn.Module:
    made = Decoder(seed=seed, tied=tied)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in made.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    return made


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    wrong = [
        name
        for name in found.keys() | expected.keys()
        if name not in found or name not in expected
        or found[name].dtype != expected[name].dtype
        or not torch.equal(found[name], expected[name])
    ]  # fmt: skip
    if wrong:
        raise SystemExit(f"rank {dist.get_rank()}: {sorted(wrong)} differ")


def by_key_map(folder: Path) -> None:
    """The hub's names are mapped; what is saved becomes a model again, equal to the first."""
    own = model(seed=2).state_dict()
    options = ray_dcp.LoadOptions(key_map=KEY_MAP)
    report = ray_dcp.load(own, checkpoint_id=folder / "hub", options=options)
    if report.path != "native":
        raise SystemExit(f"expected the native path, found {report.path}")
    hub = read_model(folder / "hub")
    expected = Decoder(seed=1).state_dict()
    # The key map does not rearrange the rows of the queries.
    expected |= {
        f"layers.{i}.attention.wq.weight": hub[f"model.layers.{i}.self_attn.q_proj.weight"]
        for i in range(LAYERS)
    }
    check_equal(whole(own), expected)
    ray_dcp.save(Adapter().to_hf(own), checkpoint_id=folder / "mapped")


def by_adapter(folder: Path) -> None:
    adapter, own = Adapter(), model(seed=3)
    state = adapter.to_hf(own.state_dict())
    ray_dcp.load(state, checkpoint_id=folder / "hub")
    theirs = adapter.to_hf(model(seed=4).state_dict())
    stock.load(theirs, storage_reader=stock.HuggingFaceStorageReader(str(folder / "hub")))
    check_equal(whole(state), whole(theirs))
    own.load_state_dict(adapter.from_hf(state))
    check_equal(whole(own.state_dict()), Decoder(seed=1).state_dict())
    ray_dcp.save(adapter.to_hf(own.state_dict()), checkpoint_id=folder / "adapted")


def by_torchtitan(folder: Path) -> None:
    from ray_dcp.integrations.torchtitan import RayDcpCheckpointManager

    own = model(seed=5)
    config = RayDcpCheckpointManager.Config(
        enable=True, initial_load_in_hf=True, last_save_in_hf=True, folder="titan"
    )
    manager = config.build(
        dataloader=None, model_parts=[own], optimizers=None, lr_schedulers=None, states={},
        sd_adapter=Adapter(str(folder / "hub")), base_folder=str(folder),
    )  # fmt: skip
    manager.load()
    check_equal(whole(own.state_dict()), Decoder(seed=1).state_dict())
    manager.save(7, last_step=True)
    manager.close()
    check_equal(read_model(folder / "titan" / "step-7"), read_model(folder / "hub"))


def tied(folder: Path) -> None:
    """A model whose output layer is its embedding, under one name as on the hub."""
    adapter, own = Adapter(), model(seed=6, tied=True)
    state = adapter.to_hf(own.state_dict())
    ray_dcp.load(state, checkpoint_id=folder / "tied")
    own.load_state_dict(adapter.from_hf(state))
    check_equal(whole(own.state_dict()), Decoder(seed=7, tied=True).state_dict())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
