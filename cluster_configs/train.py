"""Trains a small Transformer on a Ray cluster, and resumes it on any number of workers.

Every cluster file in this directory runs this script, and so does CI on a local cluster. On one
machine:

    python cluster_configs/train.py --storage /tmp/run --workers 2 --steps 40

The same command again goes on where the run was, with another number of workers too. What is saved
is the model, the optimizer and the place in the data: no sample of an epoch is lost or seen twice.
Replace `Sequences` and `Transformer` by your own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import ray.train
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that every torch program uses
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import ray_dcp.train
from ray_dcp.data import ElasticBatchSampler

VOCABULARY = 61


class Sequences(Dataset[torch.Tensor]):
    """Sequences of numbers that go on by a step of their own: there is something to learn."""

    def __init__(self, num_samples: int, length: int) -> None:
        self.num_samples, self.length = num_samples, length

    def __len__(self) -> int:
        """Returns how many there are."""
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        """Returns one, of shape (length + 1)."""
        return (index + torch.arange(self.length + 1) * (1 + index % 7)) % VOCABULARY


class Block(nn.Module):
    """Causal attention and a feed-forward layer, with residual connections."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what comes out, of the shape of `x`: (batch, length, width)."""
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (
            part.reshape(heads).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """A decoder-only language model."""

    def __init__(self, width: int, num_blocks: int, length: int, num_heads: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits of shape (batch, length, vocabulary)."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(config: dict[str, Any], device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Makes model and optimizer, the same on every rank."""
    torch.manual_seed(config["seed"])
    model: nn.Module = Transformer(config["width"], config["blocks"], config["length"]).to(device)
    if config["parallel"] == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    elif config["parallel"] == "ddp":
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=config["lr"])


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, share: float
) -> float:
    """Takes one step and returns this rank's part of the loss.

    Args:
        model: Of this rank.
        optimizer: Of this rank.
        batch: This rank's samples, of shape (samples, length + 1).
        share: Of the global batch. Losses are weighed by it: a step is then the same on any number
            of ranks, up to the order of sums.
    """
    logits = model(batch[:, :-1])
    loss = share * F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    # Why times the ranks: DDP and FSDP take the mean of what the ranks have.
    (loss * (dist.get_world_size() if dist.is_initialized() else 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def sampler_for(config: dict[str, Any], rank: int, world_size: int) -> ElasticBatchSampler:
    """Returns the sampler of a rank."""
    return ElasticBatchSampler(
        config["samples"],
        rank=rank,
        world_size=world_size,
        global_batch_size=config["global_batch"],
        seed=config["seed"],
    )


def train_fn(config: dict[str, Any]) -> None:
    """Trains on one worker of Ray Train."""
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    device = get_device()
    model, optimizer = build(config, device)
    sampler = sampler_for(config, rank, world_size)
    loader = DataLoader(
        Sequences(config["samples"], config["length"]),
        batch_sampler=sampler,
        num_workers=config["data_workers"],
    )
    state = {"model": model, "optimizer": optimizer, "data": sampler}
    with ray_dcp.train.checkpointer(
        max_to_keep=config["keep"], save_interval=config["save_every"]
    ) as checkpointer:
        restored = checkpointer.restore(state)
        if rank == 0:
            print(_story(restored, sampler, world_size), flush=True)
        step = restored or 0
        while step < config["steps"]:
            for batch in sampler.follow(loader):
                share = len(batch) / config["global_batch"]
                part = train_step(model, optimizer, batch.to(device), share)
                loss = torch.tensor(part, device=device)
                dist.all_reduce(loss)
                step += 1
                metrics = {
                    "step": step,
                    "loss": float(loss),
                    "samples": sampler.epoch * sampler.num_samples + sampler.consumed,
                    "world_size": world_size,
                    "restored": -1 if restored is None else restored,
                }
                is_last = step >= config["steps"]
                checkpointer.save(step, state, metrics=metrics, force=is_last)
                if rank == 0 and (is_last or step % config["print_every"] == 0):
                    print(f"step {step}: loss {float(loss):.4f}, {sampler!r}", flush=True)
                if is_last:
                    break


def _story(restored: int | None, sampler: ElasticBatchSampler, world_size: int) -> str:
    if restored is None:
        return f"nothing to restore: training from the start on {world_size} workers"
    return (
        f"restored step {restored} on {world_size} workers: epoch {sampler.epoch}, sample "
        f"{sampler.consumed} of {sampler.num_samples}"
    )


def num_workers(text: str) -> int | tuple[int, int]:
    """Returns `4` as 4 and `2:8` as (2, 8)."""
    low, colon, high = text.partition(":")
    try:
        found = (int(low), int(high or low))
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1] or (colon and not high):
        raise argparse.ArgumentTypeError(f"expected a number or MIN:MAX, such as 2:8, not {text!r}")
    return found if colon else found[0]


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--storage",
        required=True,
        help="where runs are kept: a path that all nodes share, or s3://",
    )
    add("--name", default="demo", help="of the run; the same name resumes it")
    add("--workers", type=num_workers, default=2, help="a number, or MIN:MAX for an elastic run")
    add("--gpu", action="store_true", help="one GPU for each worker")
    add("--cpus-per-worker", type=float, default=1)
    add("--resize-after", type=float, default=60.0, help="seconds between looks for more room")
    add("--max-failures", type=int, default=3, help="restarts after failures; -1: without end")
    add("--parallel", choices=["fsdp2", "ddp"], default="fsdp2")
    add("--steps", type=int, default=100)
    add("--save-every", type=int, default=10)
    add("--keep", type=int, default=3, help="newest checkpoints that are kept")
    add("--print-every", type=int, default=10)
    add("--samples", type=int, default=1000, help="in the data set")
    add("--global-batch", type=int, default=24, help="samples of all workers together in a step")
    add("--data-workers", type=int, default=0, help="processes of each loader")
    add("--width", type=int, default=32)
    add("--blocks", type=int, default=2)
    add("--length", type=int, default=16)
    add("--lr", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    return parser


def main(arguments: Sequence[str] | None = None) -> ray.train.Result:
    """Runs the training that a command line asks for; returns how it ended."""
    chosen = make_parser().parse_args(arguments)
    trainer = TorchTrainer(
        train_fn,
        train_loop_config=vars(chosen),
        torch_config=TorchConfig(backend="nccl" if chosen.gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=chosen.workers,
            use_gpu=chosen.gpu,
            resources_per_worker={
                "CPU": chosen.cpus_per_worker,
                **({"GPU": 1} if chosen.gpu else {}),
            },
            elastic_resize_monitor_interval_s=chosen.resize_after,
        ),
        run_config=RunConfig(
            name=chosen.name,
            storage_path=chosen.storage,
            failure_config=FailureConfig(max_failures=chosen.max_failures),
            callbacks=[ray_dcp.train.SaveBeforeResize()],
        ),
    )
    result = trainer.fit()
    print(f"done: {result.metrics}, newest checkpoint {result.checkpoint}", flush=True)
    return result


if __name__ == "__main__":
    main()
