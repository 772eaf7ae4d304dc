"""A small decoder, its model on the Hugging Face hub, and torchtitan's adapter between the two."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

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
    """As torchtitan names and lays out its models."""

    def __init__(self, *, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter)


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
