"""Two ranks of FSDP2 load a model of the hub and write one; `python … FOLDER TORCHTITAN`.

By the key map, by an adapter and through torchtitan's manager; stock DCP reads the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ray_dcp
from tests.support import hub_models


def main(folder: Path, titan: str) -> None:
    sys.path.append(titan)
    dist.init_process_group("gloo")
    by_key_map(folder)
    by_adapter(folder)
    by_torchtitan(folder)
    print("all equal")
    dist.destroy_process_group()


def model(*, seed: int) -> torch.nn.Module:
    made = hub_models.Decoder(seed=seed)
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
    options = ray_dcp.LoadOptions(key_map=hub_models.KEY_MAP)
    report = ray_dcp.load(own, checkpoint_id=folder / "hub", options=options)
    if report.path != "native":
        raise SystemExit(f"expected the native path, found {report.path}")
    hub = hub_models.read_model(folder / "hub")
    expected = hub_models.Decoder(seed=1).state_dict()
    # The key map does not rearrange the rows of the queries.
    expected |= {
        f"layers.{i}.attention.wq.weight": hub[f"model.layers.{i}.self_attn.q_proj.weight"]
        for i in range(hub_models.LAYERS)
    }
    check_equal(whole(own), expected)
    ray_dcp.save(hub_models.Adapter().to_hf(own), checkpoint_id=folder / "mapped")


def by_adapter(folder: Path) -> None:
    adapter, own = hub_models.Adapter(), model(seed=3)
    state = adapter.to_hf(own.state_dict())
    ray_dcp.load(state, checkpoint_id=folder / "hub")
    theirs = adapter.to_hf(model(seed=4).state_dict())
    stock.load(theirs, storage_reader=stock.HuggingFaceStorageReader(str(folder / "hub")))
    check_equal(whole(state), whole(theirs))
    own.load_state_dict(adapter.from_hf(state))
    check_equal(whole(own.state_dict()), hub_models.Decoder(seed=1).state_dict())
    ray_dcp.save(adapter.to_hf(own.state_dict()), checkpoint_id=folder / "adapted")


def by_torchtitan(folder: Path) -> None:
    from ray_dcp.integrations.torchtitan import RayDcpCheckpointManager

    own = model(seed=5)
    config = RayDcpCheckpointManager.Config(
        enable=True, initial_load_in_hf=True, last_save_in_hf=True, folder="titan"
    )
    manager = config.build(
        dataloader=None, model_parts=[own], optimizers=None, lr_schedulers=None, states={},
        sd_adapter=hub_models.Adapter(str(folder / "hub")), base_folder=str(folder),
    )  # fmt: skip
    manager.load()
    check_equal(whole(own.state_dict()), hub_models.Decoder(seed=1).state_dict())
    manager.save(7, last_step=True)
    manager.close()
    check_equal(
        hub_models.read_model(folder / "titan" / "step-7"), hub_models.read_model(folder / "hub")
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
