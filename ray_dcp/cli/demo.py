"""`ray-dcp demo`: train, save through Ray, kill, resume on other numbers of ranks, compare bits."""

from __future__ import annotations

import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ray_dcp.runtime.worker_group import WorkerGroup


@dataclass(frozen=True)
class Row:
    """One line of the closing table."""

    what: str
    ranks: int
    seconds: float
    num_bytes: int
    files: int | None = None
    bytes_needed: int | None = None


@click.command()
@click.option("--steps", default=4, show_default=True, help="Training steps between resizes.")
@click.option("--dir", "directory", type=click.Path(file_okay=False), help="Where to save.")
def demo(steps: int, directory: str | None) -> None:
    """Train a small Transformer on 4 ranks, save, kill it, resume on 2 and then 3 ranks.

    Exits with 1 if one bit of the resumed runs differs from an uninterrupted run.
    """
    if steps < 1:
        raise click.BadParameter("must be at least 1", param_hint="--steps")
    with tempfile.TemporaryDirectory(prefix="ray-dcp-demo-") as scratch:
        root = Path(directory or scratch).absolute()
        root.mkdir(parents=True, exist_ok=True)
        raise SystemExit(_run(steps, root))


def _run(steps: int, root: Path) -> int:
    # Why: workers inherit the environment; torch and ray warn there about what users can't change.
    warnings.filterwarnings("ignore", category=FutureWarning)
    from ray_dcp.integrations import demo as program
    from ray_dcp.runtime.worker_group import WorkerGroup

    console = Console()
    rows: list[Row] = []
    problems: list[str] = []

    def compare(what: str, found: dict[str, str], expected: dict[str, str]) -> None:
        different = sorted(
            k for k in expected.keys() | found.keys() if found.get(k) != expected.get(k)
        )
        problems.extend(f"{what}: {name}" for name in different)
        verdict = "[red]DIFFERENT[/red]" if different else "[green]bit-equal[/green]"
        console.print(f"  {what}: {len(expected)} values {verdict}")

    with console.status("starting Ray and 4 rank actors") as status, WorkerGroup(4) as ranks:
        status.update(f"training {3 * steps} steps on 4 ranks without interruption")
        ranks.run(program.start)
        expected = {}
        for part in (1, 2, 3):
            ranks.run(program.train, part * steps)
            expected[part] = ranks.run(program.digests)[0]
        status.update(f"training {steps} steps on 4 ranks, to be saved")
        ranks.run(program.start)
        loss = ranks.run(program.train, steps)[0]
        console.print(f"trained {steps} steps on 4 ranks, loss {loss:.3f}")
        path = root / f"step-{steps}"
        rows.append(_save(ranks, path))
        for part, world_size in ((1, 2), (2, 3)):
            ranks.kill()
            console.print(f"saved {path.name}; all {ranks.world_size} ranks killed")
            status.update(f"resuming on {world_size} ranks")
            ranks.resize(world_size)
            ranks.run(program.start, None, 1234)
            rows.append(_load(ranks, path))
            compare(
                f"resumed on {world_size} ranks at step {part * steps}",
                ranks.run(program.digests)[0],
                expected[part],
            )
            status.update(f"training on {world_size} ranks")
            loss = ranks.run(program.train, (part + 1) * steps)[0]
            compare(
                f"trained on {world_size} ranks to step {(part + 1) * steps}, loss {loss:.3f}",
                ranks.run(program.digests)[0],
                expected[part + 1],
            )
            path = root / f"step-{(part + 1) * steps}"
            rows.append(_save(ranks, path))
        status.update("reading it with stock torch.distributed.checkpoint")
        compare(f"stock torch DCP reads step {3 * steps}", _stock_digests(path), expected[3])
    _print_rows(console, rows)
    for problem in problems:
        console.print(f"[red]different: {problem}[/red]")
    return 1 if problems else 0


def _save(ranks: WorkerGroup, path: Path) -> Row:
    from ray_dcp.integrations import demo as program
    from ray_dcp.view.checkpoint_view import open as open_view

    started = time.perf_counter()
    ranks.run(program.save, str(path))
    seconds = time.perf_counter() - started
    view = open_view(str(path))
    return Row(
        f"save {path.name}", ranks.world_size, seconds, view.num_bytes, files=len(view.files)
    )


def _load(ranks: WorkerGroup, path: Path) -> Row:
    from ray_dcp.integrations import demo as program

    started = time.perf_counter()
    needed, read = ranks.run(program.restore, str(path))[0]
    seconds = time.perf_counter() - started
    return Row(f"load {path.name}", ranks.world_size, seconds, read, bytes_needed=needed)


def _stock_digests(path: Path) -> dict[str, str]:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    from ray_dcp.integrations import demo as program

    metadata = FileSystemReader(str(path)).read_metadata()
    flat: dict[str, object] = {}
    for name, item in metadata.state_dict_metadata.items():
        if isinstance(item, TensorStorageMetadata):
            flat[name] = torch.empty(item.size, dtype=item.properties.dtype)
        else:
            flat[name] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it loads in a single process, as asked
        load(flat, checkpoint_id=str(path), no_dist=True)
    return program.digests_of(flat)


def _print_rows(console: Console, rows: list[Row]) -> None:
    table = Table()
    for name in ("what", "ranks", "seconds", "MB", "files", "bytes read / needed"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for row in rows:
        ratio = "" if not row.bytes_needed else f"{row.num_bytes / row.bytes_needed:.2f}"
        table.add_row(
            row.what,
            str(row.ranks),
            f"{row.seconds:.2f}",
            f"{row.num_bytes / 1e6:.2f}",
            "" if row.files is None else str(row.files),
            ratio,
        )
    console.print(table)
