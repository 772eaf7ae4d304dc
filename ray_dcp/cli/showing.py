"""The commands `show` and `verify`. They import neither torch nor Ray."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from typing import Any

import click

from ray_dcp.cli.main import JSON, VERBOSE
from ray_dcp.cli.output import interrupted, progress, says, table, told
from ray_dcp.cli.places import addresses_of, checkpoint_at, hint_at
from ray_dcp.errors import CheckpointError, CheckpointNotFoundError
from ray_dcp.io.checkpoint import what_became_of
from ray_dcp.view.checkpoint_view import CheckpointView
from ray_dcp.view.naming import nearest
from ray_dcp.view.pictures.tree import Node, grown, leaves_of, shape_text
from ray_dcp.view.run_listing import wrong_lengths
from ray_dcp.view.verify import Problem, VerifyInterrupted, VerifyReport
from ray_dcp.view.verify import verify as verify_path
from ray_dcp.view.wording import count_text, size_text

_MOST_NAMES = 40
_MOST_PROBLEMS = 50


@click.command()
@click.argument("path")
@click.option(
    "--tensor", "pattern", metavar="GLOB", help="Only names that match, such as '*.bias'."
)
@click.option("--all", "show_all", is_flag=True, help=f"Each of more than {_MOST_NAMES} names.")
@click.option("--tree", "as_tree", is_flag=True, help="As a tree of names, with sizes.")
@click.option("--depth", type=click.IntRange(1), help="Levels of the tree.")
def show(
    path: str,
    pattern: str | None,
    show_all: bool,
    as_tree: bool,
    depth: int | None,
) -> None:
    """Show the tensors and objects of the checkpoint at PATH, or RUN@STEP.

    If there are more than 40 names, their modules are shown instead. LAYOUT is how a tensor is
    divided into chunks: whole, rows/8, columns/2, 4x2. Exit status: 1 if a file is missing or too
    short.
    """
    view = checkpoint_at(path)
    wrong = wrong_lengths(view.storage, view.checkpoint)
    if wrong and (became := what_became_of(view.storage, view.checkpoint)) is not None:
        raise became
    names = [name for name in view.names if pattern is None or fnmatchcase(name, pattern)]
    if says(JSON):
        told({**_shown(view, names), "problems": wrong})
        if wrong:
            sys.exit(1)
        return
    root = grown(leaves_of(view, names), merged=False)
    if as_tree or depth is not None:
        lines = [*_branches(root, "", depth)]
    elif len(names) > _MOST_NAMES and not show_all:
        lines = [*table(_groups(root), left=("name", "holds")), "each name: --all, --tree"]
    else:
        rows = [_row(view, name) for name in names]
        least = ("chunks", "layout", "size")
        lines = table(rows, left=("name", "shape", "dtype", "layout", "value"), least=least)
    if pattern is not None:
        hint = "" if names else nearest(pattern, view.names)
        lines.append(f"{len(names)} of {count_text(len(view), 'name')} match {pattern!r}{hint}")
    told(None, *_summary(view), *(f"damaged: {one}" for one in wrong), *lines)
    if wrong:
        sys.exit(1)


def _summary(view: CheckpointView) -> list[str]:
    ranks = "" if view.world_size is None else f", saved by {count_text(view.world_size, 'rank')}"
    commit = f", attempt {view.attempt} in slot {view.slot}" if says(VERBOSE) else ""
    return [
        f"{view.url}: {view.kind}{ranks}{commit if view.attempt else ''}",
        f"{count_text(len(view.tensors), 'tensor')} and {count_text(len(view.objects), 'object')}, "
        f"{size_text(view.num_bytes)} in {count_text(len(view.files), 'file')}",
    ]


def _row(view: CheckpointView, name: str) -> dict[str, object]:
    info = view.tensors.get(name)
    if info is None:
        cells = ("", "object", "", "", "", view.small_values.get(name, ""))
    else:
        size, shape = size_text(info.num_bytes), shape_text(info.shape)
        cells = (shape, info.dtype, str(info.num_chunks), size, view.layouts[name], "")
    columns = ("shape", "dtype", "chunks", "size", "layout", "value")
    return {"name": name, **dict(zip(columns, cells, strict=True))}


def _groups(root: Node) -> list[dict[str, str]]:
    """Returns a row for each module, down to the deepest level that fits."""
    level = [*root.children.items()]
    while True:
        deeper = [
            (f"{name}.{below}" if node.children else name, child)
            for name, node in level
            for below, child in (node.children or {"": node}).items()
        ]
        if len(deeper) > _MOST_NAMES or (len(deeper) == len(level) and deeper == level):
            break
        level = deeper
    shown = [
        {
            "name": name,
            "holds": node.told,
            "size": size_text(node.num_bytes) if node.num_tensors else "",
        }
        for name, node in level[:_MOST_NAMES]
    ]
    hidden = len(level) - len(shown)
    more = {"name": f"… and {hidden} more", "holds": "", "size": ""}
    return [*shown, *([more] if hidden else [])]


def _branches(node: Node, indent: str, depth: int | None) -> Iterator[str]:
    """Yields the tree below a node as lines of text."""
    if depth is not None and depth <= 0:
        return
    for number, child in enumerate(node.children.values(), start=1):
        last = number == len(node.children)
        size = f", {size_text(child.num_bytes)}" if child.num_tensors else ""
        yield f"{indent}{'└── ' if last else '├── '}{child.name}: {child.told}{size}"
        deeper = None if depth is None else depth - 1
        yield from _branches(child, f"{indent}{'    ' if last else '│   '}", deeper)


def _shown(view: CheckpointView, names: Sequence[str]) -> dict[str, Any]:
    tensors = {}
    for name in names:
        info = view.tensors.get(name)
        if info is not None:
            fields = {key: value for key, value in asdict(info).items() if key != "path"}
            tensors[name] = {**fields, "layout": view.layouts[name]}
    return {
        "path": view.url,
        "kind": view.kind,
        "attempt": view.attempt,
        "slot": view.slot,
        "world_size": view.world_size,
        "num_bytes": view.num_bytes,
        "files": [{"key": file.key, "num_bytes": file.num_bytes} for file in view.files],
        "tensors": tensors,
        "objects": {n: view.small_values.get(n) for n in names if n not in view.tensors},
    }


@click.command()
@click.argument("path")
def verify(path: str) -> None:
    """Compare every stored byte of the checkpoint at PATH, or RUN@STEP, with its checksums.

    If PATH is a run, all of its steps are verified. RUN@latest is the newest committed step, even
    if it is damaged. Exit status: 0 no damage, 1 damaged, 2 there is no checkpoint, a file can't be
    read, or the call is invalid.
    """
    is_run, addresses = addresses_of(path, damaged=True)
    results, lines, found = list[dict[str, Any]](), list[str](), VerifyReport(0, ())

    def add(name: str, report: VerifyReport, ok: bool) -> None:
        nonlocal found
        results.append({"path": name, "ok": ok, **asdict(report)})
        lines.extend(_problems(name, report))
        found = replace(
            found,
            problems=(*found.problems, *report.problems),
            unread=(*found.unread, *report.unread),
        )

    for name, place, _ in addresses:
        try:
            with progress(f"verifying {name}") as bar:
                report = verify_path(place, told=bar)
            add(name, report, report.ok)
        except CheckpointNotFoundError as error:
            if not is_run:
                error.message += hint_at(path)
                raise
            lines.append(f"{name}: deleted meanwhile")
            results.append({"path": name, "ok": True, "error": error.message})
        except CheckpointError as error:
            if not is_run:
                raise
            found = replace(found, unread=(*found.unread, Problem("", None, 0, 0, error.message)))
            lines.append(f"{name}: could not be verified: {error.message}")
            results.append({"path": name, "ok": False, "error": error.message})
        except KeyboardInterrupt as error:
            if isinstance(error, VerifyInterrupted):
                add(f"{name} (in part)", error.report, False)
            value = {"path": path, "steps": results} if is_run else (results or [{"path": path}])[0]
            interrupted(value, *lines)
    # Why not a list for one checkpoint: programs rely on this form.
    told({"path": path, "steps": results} if is_run else results[0], *lines)
    if not found.ok:
        sys.exit(1 if found.problems else 2)


def _problems(name: str, report: VerifyReport) -> list[str]:
    lines = [f"damaged: {problem}" for problem in report.problems[:_MOST_PROBLEMS]]
    if len(report.problems) > _MOST_PROBLEMS:
        lines.append(f"... and {len(report.problems) - _MOST_PROBLEMS} more, see --json")
    lines += [f"unread: {problem}" for problem in report.unread[:_MOST_PROBLEMS]]
    lines += [f"note: {note}" for note in report.notes]
    num_problems = len(report.problems) + len(report.unread)
    result = count_text(num_problems, "problem") if num_problems else "ok"
    return [*lines, f"{name}: {result}, {size_text(report.checked_bytes)} checked"]
