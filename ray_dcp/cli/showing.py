"""The commands `show` and `verify`, as tables for people or as JSON. No torch, no ray."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import click

from ray_dcp.cli.output import Rows, as_json, number_text, print_json, progress
from ray_dcp.cli.places import checkpoint_at, hint_at, place_of
from ray_dcp.errors import CheckpointNotFoundError
from ray_dcp.view.checkpoint_view import CheckpointView
from ray_dcp.view.pictures.of_views import leaves_of
from ray_dcp.view.pictures.tree import Node, grown
from ray_dcp.view.verify import VerifyReport
from ray_dcp.view.verify import verify as verify_path
from ray_dcp.view.wording import count_text, size_text


def tree_lines(
    view: CheckpointView, names: Sequence[str] | None = None, depth: int | None = None
) -> Iterator[str]:
    """Yields the tree of a checkpoint as lines of text.

    Args:
        view: The checkpoint.
        names: Which names; all by default.
        depth: Levels; all by default.
    """
    yield from _lines(grown(leaves_of(view, names), merged=False), "", depth)


def _lines(node: Node, indent: str, depth: int | None) -> Iterator[str]:
    if depth is not None and depth <= 0:
        return
    for number, child in enumerate(node.children.values()):
        last = number == len(node.children) - 1
        yield f"{indent}{'└── ' if last else '├── '}{_node_line(child)}"
        deeper = None if depth is None else depth - 1
        yield from _lines(child, f"{indent}{'    ' if last else '│   '}", deeper)


def _node_line(node: Node) -> str:
    leaf = node.leaf
    if leaf is None or node.children:
        num_objects = node.num_leaves - node.num_tensors
        counts = f"{node.num_tensors} tensors" + (f", {num_objects} objects" if num_objects else "")
        return f"{node.name}: {counts}, {size_text(node.num_bytes)}"
    if leaf.shape is None:
        return f"{node.name}: object"
    return f"{node.name}: {leaf.dtype}{list(leaf.shape)} {size_text(leaf.num_bytes)}"


_MOST_PROBLEMS = 50


@click.command()
@click.argument("path")
@click.option(
    "--tensor", "pattern", metavar="GLOB", help="Only names that match, such as '*.bias'."
)
@click.option("--tree", "as_tree", is_flag=True, help="As a tree of names, with sizes.")
@click.option("--depth", type=click.IntRange(1), help="Levels of the tree.")
@click.option("--stats", is_flag=True, help="With norms, as SaveOptions(stats=True) saved them.")
@as_json
def show(
    path: str, pattern: str | None, as_tree: bool, depth: int | None, stats: bool, as_json: bool
) -> None:
    """Show the tensors and objects of the checkpoint at PATH, or RUN@STEP.

    LAYOUT is how a tensor is cut into chunks: whole, rows/8, columns/2, 4x2.
    """
    view = checkpoint_at(path)
    names = [name for name in view.names if pattern is None or fnmatchcase(name, pattern)]
    if as_json:
        print_json(_shown(view, names))
        return
    for line in _summary(view):
        click.echo(line)
    if as_tree or depth is not None:
        for line in tree_lines(view, names, depth):
            click.echo(line)
    elif names:
        _print_rows(view, names, stats=stats)
    if stats and not view.stats:
        click.echo("no norms were saved: SaveOptions(stats=True) does that")
    if pattern is not None:
        click.echo(f"{len(names)} of {len(view)} names match {pattern!r}")


def _print_rows(view: CheckpointView, names: list[str], *, stats: bool) -> None:
    more = ("norm<", "max<", "nan<", "inf<") if stats else ()
    table = Rows("name", "shape", "dtype", "chunks<", "size<", "layout", *more)
    for name in names:
        info = view.tensors.get(name)
        if info is None:
            table.add(name, "", "object", "", "", "", *("" for _ in more))
            continue
        found = view.stats.get(name) if stats else None
        told = (
            [number_text(found.norm), number_text(found.absmax), found.num_nan, found.num_inf]
            if found is not None
            else ["-" for _ in more]
        )
        shape = "x".join(map(str, info.shape)) or "scalar"
        table.add(
            name,
            shape,
            info.dtype,
            info.num_chunks,
            size_text(info.num_bytes),
            view.layouts[name],
            *told,
        )
    table.print()


@click.command()
@click.argument("path")
@as_json
def verify(path: str, as_json: bool) -> None:
    """Compare every stored byte of the checkpoint at PATH, or RUN@STEP, with its checksums.

    Exit status: 0 no damage, 1 damaged, 2 there is no checkpoint or the call is wrong.
    """
    with progress("verifying") as told:
        try:
            report = verify_path(place_of(path), told=told)
        except CheckpointNotFoundError as error:
            error.message += hint_at(path)
            raise
    if as_json:
        print_json(_verified(path, report))
    else:
        for problem in report.problems[:_MOST_PROBLEMS]:
            click.echo(f"damaged: {problem}")
        if len(report.problems) > _MOST_PROBLEMS:
            click.echo(f"... and {len(report.problems) - _MOST_PROBLEMS} more, see --json")
        for note in report.notes:
            click.echo(f"note: {note}")
        result = "ok" if report.ok else count_text(len(report.problems), "problem")
        click.echo(f"{path}: {result}, {size_text(report.checked_bytes)} checked")
    if not report.ok:
        sys.exit(1)


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
                "layout": view.layouts[name],
                **_told(view, name),
            }
            for name in names
            if (info := view.tensors.get(name)) is not None
        },
        "objects": [name for name in names if name not in view.tensors],
    }


def _told(view: CheckpointView, name: str) -> dict[str, Any]:
    found = view.stats.get(name)
    if found is None:
        return {}
    return {
        "stats": {
            "norm": found.norm,
            "absmax": found.absmax,
            "num_nan": found.num_nan,
            "num_inf": found.num_inf,
        }
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
    ranks = "" if view.world_size is None else f", saved by {count_text(view.world_size, 'rank')}"
    commit = "" if view.attempt is None else f", attempt {view.attempt} in slot {view.slot}"
    return [
        f"{view.url}: {view.kind}{ranks}{commit}",
        f"{count_text(len(view.tensors), 'tensor')} and {count_text(len(view.objects), 'object')}, "
        f"{size_text(view.num_bytes)} in {count_text(len(view.files), 'file')}",
    ]
