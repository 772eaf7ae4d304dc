"""The command `demo`: trains, saves, kills the ranks, resumes on others, and compares all bits.

The program of the ranks trains a small Transformer with FSDP2. Its public functions run on a rank
of any process group. Only one rank computes the gradient of a step, and the others add zeros, so
that no sum depends on the number of ranks: a run that is resumed on another number of ranks must
equal an uninterrupted run bit for bit.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that every torch program uses
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import ray_dcp
from ray_dcp.cli.main import JSON
from ray_dcp.cli.output import says, styled, table, told
from ray_dcp.core.quantities import size_text
from ray_dcp.errors import InvalidRequestError
from ray_dcp.view.checkpoint_view import read_view

if TYPE_CHECKING:
    from ray_dcp.worker_group import WorkerGroup


@click.command()
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Training steps between resizes.",
)
@click.option("--dir", "directory", type=click.Path(file_okay=False), help="Where to save.")
def demo(steps: int, directory: str | None) -> None:
    """Train a small Transformer on 4 ranks, save, kill it, resume on 2 and then 3 ranks.

    Exits with 1 if one bit of the resumed runs differs from an uninterrupted run.
    """
    with tempfile.TemporaryDirectory(prefix="ray-dcp-demo-") as scratch:
        root = Path(directory or scratch).absolute()
        root.mkdir(parents=True, exist_ok=True)
        rows, problems = _run(steps, root)
    value = {"steps": rows, "problems": problems}
    cells = [{c: _format_cell(c, row[c]) for c in row} for row in rows]
    told(value, *table(cells, left=("what",)), *(f"different: {one}" for one in problems))
    if problems:
        sys.exit(1)


def _format_cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column == "num_bytes":
        return size_text(value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _print(line: str) -> None:
    if not says(JSON):
        click.echo(line)


def _run(steps: int, root: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the measurements of each save and load, and the values that differ."""
    # Why: torch and Ray warn about things that users can't change.
    warnings.filterwarnings("ignore", category=FutureWarning)
    rows: list[dict[str, Any]] = []
    problems: list[str] = []

    def compare(what: str, found: dict[str, str], expected: dict[str, str]) -> None:
        names = sorted(n for n in {**expected, **found} if found.get(n) != expected.get(n))
        problems.extend(f"{what}: {name}" for name in names)
        verdict = styled("DIFFERENT", "red") if names else styled("bit-equal", "green")
        _print(f"  {what}: {len(expected)} values {verdict}")

    # Why here: ranks without Ray take the model and its state from this module.
    from ray_dcp.worker_group import WorkerGroup

    with WorkerGroup(4) as ranks:
        ranks.run(start)
        expected = {}
        for part in (1, 2, 3):
            ranks.run(train, part * steps)
            expected[part] = ranks.run(digests)[0]
        ranks.run(start)
        loss = ranks.run(train, steps)[0]
        _print(f"trained {steps} steps on 4 ranks, loss {loss:.3f}")
        path = root / f"step-{steps}"
        rows.append(_save(ranks, path))
        for part, world_size in ((1, 2), (2, 3)):
            ranks.kill()
            _print(f"saved {path.name}; all {ranks.world_size} ranks killed")
            ranks.resize(world_size)
            ranks.run(start, 1234)
            rows.append(_load(ranks, path))
            on = f"on {world_size} ranks"
            found = ranks.run(digests)[0]
            compare(f"resumed {on} at step {part * steps}", found, expected[part])
            until = (part + 1) * steps
            loss = ranks.run(train, until)[0]
            found = ranks.run(digests)[0]
            compare(f"trained {on} to step {until}, loss {loss:.3f}", found, expected[part + 1])
            path = root / f"step-{until}"
            rows.append(_save(ranks, path))
        compare(f"stock torch DCP reads step {3 * steps}", _stock_digests(path), expected[3])
    return rows, problems


def _save(ranks: WorkerGroup, path: Path) -> dict[str, Any]:
    started = time.perf_counter()
    ranks.run(save, str(path))
    seconds = time.perf_counter() - started
    view = read_view(str(path))
    return _row(f"save {path.name}", ranks, seconds, view.num_bytes, files=len(view.files))


def _load(ranks: WorkerGroup, path: Path) -> dict[str, Any]:
    started = time.perf_counter()
    needed, read = ranks.run(restore, str(path))[0]
    seconds = time.perf_counter() - started
    return _row(f"load {path.name}", ranks, seconds, read, read_per_needed=read / needed)


def _row(
    what: str, ranks: WorkerGroup, seconds: float, num_bytes: int, **more: Any
) -> dict[str, Any]:
    numbers = {"ranks": ranks.world_size, "seconds": seconds, "num_bytes": num_bytes}
    return {"what": what, **numbers, "files": None, "read_per_needed": None, **more}


def _stock_digests(path: Path) -> dict[str, str]:
    metadata = FileSystemReader(str(path)).read_metadata()
    flat = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        if isinstance(item, TensorStorageMetadata)
        else None
        for name, item in metadata.state_dict_metadata.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it loads in a single process, as asked
        load_stock(flat, checkpoint_id=str(path), no_dist=True)
    return digests_of(flat)


# --- what the ranks run ---------------------------------------------------------------------------

# Sizes of the Transformer. They are uneven, so that shards differ between ranks.
VOCABULARY, WIDTH, NUM_HEADS, NUM_BLOCKS, CONTEXT, BATCH = 211, 96, 4, 4, 32, 6


class Transformer(nn.Module):
    """A decoder-only language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH,
                NUM_HEADS,
                4 * WIDTH + 2,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(NUM_BLOCKS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits (batch, context, vocabulary) for tokens (batch, context)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        past = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, past, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


@dataclass
class TrainingRun:
    """State of one rank between calls."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that a resumed run needs."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "progress": {"step": self.step},
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state dict that `ray_dcp.load` has filled."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["progress"]["step"]
        torch.set_rng_state(state["rng"])


_current: list[TrainingRun] = []


def start(seed: int = 0) -> None:
    """Creates model, optimizer and scheduler on this rank, sharded over all ranks by FSDP2.

    Args:
        seed: Seed of the initial weights. A different seed before a restore proves that the state
            comes from the checkpoint and not from the initialisation.
    """
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    model = Transformer()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    _current[:] = [TrainingRun(model, optimizer, scheduler)]


def current() -> TrainingRun:
    """Returns the run that `start` created on this rank.

    Raises:
        InvalidRequestError: `start` was not called.
    """
    if not _current:
        raise InvalidRequestError("call start() on this rank first")
    return _current[0]


def train(until_step: int) -> float:
    """Trains up to a step and returns the last loss.

    The batch depends on the step only. It follows a learnable rule (the next token is a fixed
    function of the last two) with noise, over so few tokens that the loss falls from the start.
    """
    run = current()
    loss_value = float("nan")
    while run.step < until_step:
        tokens = batch(run.step)
        logits = run.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        # Why: sums with zeros are exact, sums of partial gradients are not; see the module.
        torch.autograd.backward(loss if dist.get_rank() == 0 else loss * 0.0)
        run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad()
        run.step += 1
        loss_value = loss.item()
    return loss_value


def batch(step: int) -> torch.Tensor:
    """Returns the tokens of a step, (batch, context + 1), int64."""
    generator = torch.Generator().manual_seed(1_000_003 * (step + 1))
    used = max(VOCABULARY // 16, 2)
    tokens = torch.randint(used, (BATCH, CONTEXT + 1), generator=generator)
    for i in range(2, tokens.shape[1], 2):
        tokens[:, i] = (3 * tokens[:, i - 1] + tokens[:, i - 2] + 7) % used
    return tokens


def save(path: str) -> None:
    """Saves the run: every rank writes its share."""
    ray_dcp.save(current().state_dict(), checkpoint_id=path)


def restore(path: str) -> tuple[int, int]:
    """Loads the run in place and returns (bytes needed, bytes read) of the whole job."""
    run = current()
    state = run.state_dict()
    report = ray_dcp.load(state, checkpoint_id=path)
    run.load_state_dict(state)
    return report.bytes_needed, report.bytes_read


def digests() -> dict[str, str]:
    """Returns the SHA-256 of every value of the whole run; the same on all ranks.

    Collective: sharded tensors are gathered.
    """
    return digests_of(current().state_dict())


def digests_of(state: Mapping[Any, Any], prefix: str = "") -> dict[str, str]:
    """Returns the SHA-256 of every value in a nested state dict, by dotted name."""
    found: dict[str, str] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            found.update(digests_of(value, f"{name}."))
            continue
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor):
            plain = value.detach().contiguous()
            data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
            found[name] = hashlib.sha256(
                f"{plain.dtype}{tuple(plain.shape)}".encode() + data
            ).hexdigest()
        else:
            found[name] = hashlib.sha256(repr(value).encode()).hexdigest()
    return found
