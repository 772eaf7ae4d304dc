"""All that a run needs to go on as if it had not stopped: each start goes on from the newest step.

torchrun --standalone --nproc-per-node=2 whole_state.py RUN LAST_STEP [adapters]

Low-rank adapters of a frozen base model are trained under FSDP2, in mixed precision. With
`adapters` the steps have these without the base model, which `build` makes at each start.
"""

import json
import random
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import ray_dcp
from ray_dcp.data import ElasticBatchSampler

WORDS = 32
CONFIG = {"model_type": "whole-state", "vocab_size": WORDS, "hidden_size": 16, "rank": 2}


class LowRank(nn.Module):
    """A frozen layer, with adapters named as PEFT names them."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def build(config: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)  # in the place of a base model that is downloaded
    words, width, rank = config["vocab_size"], config["hidden_size"], config["rank"]
    return fully_shard(
        nn.Sequential(
            nn.Embedding(words, width).requires_grad_(False),
            nn.Dropout(0.2),
            LowRank(nn.Linear(width, width), rank),
            nn.Tanh(),
            LowRank(nn.Linear(width, words), rank),
        )
    )


def adapters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the trained tensors by name; a load writes into them."""
    return {name: one for name, one in model.state_dict().items() if ".lora_" in name}


class RandomStates:
    """The random states of this rank; on another number of ranks they stay as they are."""

    def state_dict(self) -> dict[str, Any]:
        states = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state()
        return {"states": ray_dcp.PerRank(states, resized="keep")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        states = state["states"].value
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])


def main(
    run: str, last_step: int, *, adapters: bool = False, forget: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Trains to a step, from the newest one of the run; returns what each step gave.

    `forget` names what a restore leaves out, to see what a run without it becomes.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = {f"w{index}": index for index in range(WORDS)}
    tokenizer = Tokenizer(WordLevel(names))
    tokenizer.pre_tokenizer = Whitespace()
    texts = [f"w{index} w{(3 * index + 1) % WORDS}" for index in range(WORDS)]
    data = torch.tensor([one.ids for one in tokenizer.encode_batch(texts)])

    model, average = build(CONFIG), build(CONFIG)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 8))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    sampler = ElasticBatchSampler(WORDS, rank=rank, world_size=ranks, global_batch_size=6)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + rank)
    state = {
        "model": adapters_of(model) if adapters else model,
        "average": adapters_of(average),
        "optimizer": optimizer,
        "scheduler": warm_up,
        "scaler": scaler,
        "random": RandomStates(),
        "data": sampler,
        "files": {"config.json": json.dumps(CONFIG), "tokenizer.json": tokenizer.to_str()},
    }
    log: list[dict[str, Any]] = []
    with ray_dcp.CheckpointManager(run, save_interval=3, max_to_keep=2) as manager:
        step = 0
        if manager.latest_step() is not None:
            known = {name: one for name, one in state.items() if name not in forget}
            step = manager.restore("auto", known).step
        while step < last_step:
            # With a generator of its own, its iteration draws nothing from the states of the rank.
            loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator())
            for batch in sampler.follow(loader):
                step += 1
                noise = random.gauss(0.0, 0.1) * np.random.standard_normal()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(batch[:, 0]), batch[:, 1])
                scaler.scale(loss * (1 + noise)).backward()
                scaler.step(optimizer)
                scaler.update()
                warm_up.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for mean, new in zip(
                        adapters_of(average).values(), adapters_of(model).values(), strict=True
                    ):
                        mean.lerp_(new, 0.1)
                    average.eval()
                    mean_loss = nn.functional.cross_entropy(average(data[:, 0]), data[:, 1])
                log.append(
                    {
                        "step": step,
                        "loss": loss.item(),
                        "loss of the average": mean_loss.item(),
                        "learning rate": warm_up.get_last_lr()[0],
                        "scale": scaler.get_scale(),
                        "batch": batch[:, 0].tolist(),
                    }
                )
                manager.save_async(step, state)
                if step == last_step:
                    break
    return log


if __name__ == "__main__":
    dist.init_process_group("gloo")
    told = main(sys.argv[1], int(sys.argv[2]), adapters="adapters" in sys.argv[3:])
    if dist.get_rank() == 0:
        for line in told:
            print(json.dumps(line))
    dist.destroy_process_group()
