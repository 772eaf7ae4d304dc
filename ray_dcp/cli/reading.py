"""The commands that read: `ls`, `show` and `verify`, as tables for people or as JSON.

They load neither torch nor ray.
"""

from __future__ import annotations

import json
import sys
import time
from fnmatch import fnmatchcase
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ray_dcp.view.checkpoint_view import CheckpointView
from ray_dcp.view.checkpoint_view import open as open_view
from ray_dcp.view.listing import ListedCheckpoint, list_checkpoints
from ray_dcp.view.verify import VerifyReport
from ray_dcp.view.verify import verify as verify_path
from ray_dcp.view.wording import age_text, size_text

__all__ = ["ls", "show", "verify"]

_PLAIN_WIDTH = 10_000
_MOST_PROBLEMS = 50
_STYLES = {"committed": "green", "damaged": "red", "in flight": "yellow", "aborted": "yellow", "deleted": "dim"}

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.command()
@click.argument("root")
@as_json
def ls(root: str, as_json: bool) -> None:
    """List the checkpoints at and below ROOT.

    STATE is committed, uncommitted (a save that was never committed), damaged (files are missing
    or have another length), or stock (written by torch's DCP).
    """
    found = list_checkpoints(root)
    now_s = time.time()
    if as_json:
        _print_json([_listed(item, now_s) for item in found])
        return
    if not found:
        click.echo(f"no checkpoints at or below {root}")
        return
    table = _table("name", "step<", "state", "size<", "ranks<", "age<")
    for item in found:
        age = "-" if item.created_s is None else age_text(now_s - item.created_s)
        _add(
            table, item.name, "-" if item.step is None else item.step,
            Text(item.state, style=_STYLES.get(item.state, "")), size_text(item.num_bytes),
            "-" if item.num_ranks is None else item.num_ranks, age,
        )  # fmt: skip
    _console().print(table)
    for item in found:
        if item.state == "damaged":
            click.echo(f"{item.name}: {item.detail}")


@click.command()
@click.argument("path")
@click.option(
    "--tensor", "pattern", metavar="GLOB", help="Only names that match, such as '*.bias'."
)
@as_json
def show(path: str, pattern: str | None, as_json: bool) -> None:
    """Show the tensors and objects of the checkpoint at PATH."""
    view = open_view(path)
    names = [name for name in view.names if pattern is None or fnmatchcase(name, pattern)]
    if as_json:
        _print_json(_shown(view, names))
        return
    for line in _summary(view):
        click.echo(line)
    table = _table("name", "shape", "dtype", "chunks<", "size<")
    for name in names:
        info = view.tensors.get(name)
        if info is None:
            _add(table, name, "", "object", "", "")
        else:
            shape = "x".join(map(str, info.shape)) or "scalar"
            _add(table, name, shape, info.dtype, info.num_chunks, size_text(info.num_bytes))
    if names:
        _console().print(table)
    if pattern is not None:
        click.echo(f"{len(names)} of {len(view)} names match {pattern!r}")


@click.command()
@click.argument("path")
@as_json
def verify(path: str, as_json: bool) -> None:
    """Compare every stored byte of the checkpoint at PATH with its checksums.

    Exit status: 0 no damage, 1 damaged, 2 there is no checkpoint or the call is wrong.
    """
    report = verify_path(path)
    if as_json:
        _print_json(_verified(path, report))
    else:
        for problem in report.problems[:_MOST_PROBLEMS]:
            click.echo(f"damaged: {problem}")
        if len(report.problems) > _MOST_PROBLEMS:
            click.echo(f"... and {len(report.problems) - _MOST_PROBLEMS} more, see --json")
        for note in report.notes:
            click.echo(f"note: {note}")
        result = "ok" if report.ok else f"{len(report.problems)} problem(s)"
        click.echo(f"{path}: {result}, {size_text(report.checked_bytes)} checked")
    if not report.ok:
        sys.exit(1)


def _listed(item: ListedCheckpoint, now_s: float) -> dict[str, Any]:
    return {
        "name": item.name,
        "step": item.step,
        "state": item.state,
        "num_bytes": item.num_bytes,
        "num_ranks": item.num_ranks,
        "age_s": None if item.created_s is None else round(max(0.0, now_s - item.created_s), 3),
        "detail": item.detail,
    }


def _shown(view: CheckpointView, names: list[str]) -> dict[str, Any]:
    return {
        "path": view.url,
        "kind": view.kind,
        "attempt": view.attempt,
        "slot": view.slot,
        "world_size": view.world_size,
        "num_bytes": view.num_bytes,
        "files": [{"key": file.key, "num_bytes": file.num_bytes} for file in view.files],
        "tensors": {
            name: {
                "shape": list(info.shape),
                "dtype": info.dtype,
                "num_bytes": info.num_bytes,
                "num_chunks": info.num_chunks,
            }
            for name in names
            if (info := view.tensors.get(name)) is not None
        },
        "objects": [name for name in names if name not in view.tensors],
    }


def _verified(path: str, report: VerifyReport) -> dict[str, Any]:
    return {
        "path": path,
        "ok": report.ok,
        "checked_bytes": report.checked_bytes,
        "problems": [
            {"file": p.file, "fqn": p.fqn, "start": p.start, "stop": p.stop, "what": p.what}
            for p in report.problems
        ],
        "notes": list(report.notes),
    }


def _summary(view: CheckpointView) -> list[str]:
    ranks = "" if view.world_size is None else f", saved by {view.world_size} rank(s)"
    commit = "" if view.attempt is None else f", attempt {view.attempt} in slot {view.slot}"
    return [
        f"{view.url}: {view.kind}{ranks}{commit}",
        f"{len(view.tensors)} tensors and {len(view.objects)} objects, "
        f"{size_text(view.num_bytes)} in {len(view.files)} file(s)",
    ]


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def _console() -> Console:
    # Why: piped output has no width to fit into, and a cut name is of no use to grep.
    console = Console(file=sys.stdout, highlight=False)
    return console if console.is_terminal else Console(
        file=sys.stdout, highlight=False, width=_PLAIN_WIDTH
    )  # fmt: skip


def _table(*titles: str) -> Table:
    """Returns an empty table; a title that ends in `<` has right-aligned cells."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        justify = "right" if title.endswith("<") else "left"
        table.add_column(title.rstrip("<").upper(), justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def _add(table: Table, *cells: object) -> None:
    # Why Text: a name with [brackets] is no markup.
    table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells))
