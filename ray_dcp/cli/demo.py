"""The command `demo`: trains, saves, kills the ranks, resumes on others, and compares all bits."""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ray_dcp.cli.main import JSON
from ray_dcp.cli.output import says, styled, table, told
from ray_dcp.view.wording import size_text

if TYPE_CHECKING:
    from ray_dcp.runtime.worker_group import WorkerGroup


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
    cells = [{c: _cell(c, row[c]) for c in row} for row in rows]
    told(value, *table(cells, left=("what",)), *(f"different: {one}" for one in problems))
    if problems:
        sys.exit(1)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column == "num_bytes":
        return size_text(value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _say(line: str) -> None:
    if not says(JSON):
        click.echo(line)


def _run(steps: int, root: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the measurements of each save and load, and the values that differ."""
    # Why: torch and Ray warn about things that users can't change.
    warnings.filterwarnings("ignore", category=FutureWarning)
    from ray_dcp.integrations import demo_program as program
    from ray_dcp.runtime.worker_group import WorkerGroup

    rows: list[dict[str, Any]] = []
    problems: list[str] = []

    def compare(what: str, found: dict[str, str], expected: dict[str, str]) -> None:
        names = sorted(n for n in {**expected, **found} if found.get(n) != expected.get(n))
        problems.extend(f"{what}: {name}" for name in names)
        verdict = styled("DIFFERENT", "red") if names else styled("bit-equal", "green")
        _say(f"  {what}: {len(expected)} values {verdict}")

    with WorkerGroup(4) as ranks:
        ranks.run(program.start)
        expected = {}
        for part in (1, 2, 3):
            ranks.run(program.train, part * steps)
            expected[part] = ranks.run(program.digests)[0]
        ranks.run(program.start)
        loss = ranks.run(program.train, steps)[0]
        _say(f"trained {steps} steps on 4 ranks, loss {loss:.3f}")
        path = root / f"step-{steps}"
        rows.append(_save(ranks, path))
        for part, world_size in ((1, 2), (2, 3)):
            ranks.kill()
            _say(f"saved {path.name}; all {ranks.world_size} ranks killed")
            ranks.resize(world_size)
            ranks.run(program.start, 1234)
            rows.append(_load(ranks, path))
            on = f"on {world_size} ranks"
            found = ranks.run(program.digests)[0]
            compare(f"resumed {on} at step {part * steps}", found, expected[part])
            until = (part + 1) * steps
            loss = ranks.run(program.train, until)[0]
            found = ranks.run(program.digests)[0]
            compare(f"trained {on} to step {until}, loss {loss:.3f}", found, expected[part + 1])
            path = root / f"step-{until}"
            rows.append(_save(ranks, path))
        compare(f"stock torch DCP reads step {3 * steps}", _stock_digests(path), expected[3])
    return rows, problems


def _save(ranks: WorkerGroup, path: Path) -> dict[str, Any]:
    from ray_dcp.integrations import demo_program as program
    from ray_dcp.view.checkpoint_view import read_view

    started = time.perf_counter()
    ranks.run(program.save, str(path))
    seconds = time.perf_counter() - started
    view = read_view(str(path))
    return _row(f"save {path.name}", ranks, seconds, view.num_bytes, files=len(view.files))


def _load(ranks: WorkerGroup, path: Path) -> dict[str, Any]:
    from ray_dcp.integrations import demo_program as program

    started = time.perf_counter()
    needed, read = ranks.run(program.restore, str(path))[0]
    seconds = time.perf_counter() - started
    return _row(f"load {path.name}", ranks, seconds, read, read_per_needed=read / needed)


def _row(
    what: str, ranks: WorkerGroup, seconds: float, num_bytes: int, **more: Any
) -> dict[str, Any]:
    numbers = {"ranks": ranks.world_size, "seconds": seconds, "num_bytes": num_bytes}
    return {"what": what, **numbers, "files": None, "read_per_needed": None, **more}


def _stock_digests(path: Path) -> dict[str, str]:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    from ray_dcp.integrations import demo_program as program

    metadata = FileSystemReader(str(path)).read_metadata()
    flat = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        if isinstance(item, TensorStorageMetadata)
        else None
        for name, item in metadata.state_dict_metadata.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it loads in a single process, as asked
        load(flat, checkpoint_id=str(path), no_dist=True)
    return program.digests_of(flat)
