"""The commands `diff` and `reshard`: what differs, and what a load would read. No torch, no ray."""

from __future__ import annotations

import sys
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

import click

from ray_dcp.cli.output import Rows, as_json, number_text, print_json, progress
from ray_dcp.cli.places import checkpoint_at
from ray_dcp.view.difference import CheckpointDiff, ValueDiff
from ray_dcp.view.wording import size_text

_STYLES = {"changed": "yellow", "added": "green", "removed": "red", "undecided": "magenta",
           "reshaped": "cyan", "retyped": "cyan"}  # fmt: skip


@click.command()
@click.argument("first")
@click.argument("second")
@click.option("--tensor", "pattern", metavar="GLOB", help="Only names that match.")
@click.option("--values", is_flag=True, help="Read what changed, and tell by how much.")
@click.option("--hashes-only", is_flag=True, help="Read nothing where hashes can't tell.")
@click.option("--all", "show_all", is_flag=True, help="List what is unchanged, too.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 when something differs.")
@as_json
def diff(
    first: str,
    second: str,
    pattern: str | None,
    values: bool,
    hashes_only: bool,
    show_all: bool,
    exit_code: bool,
    as_json: bool,
) -> None:
    """Tell which tensors of checkpoint SECOND are not the same as in FIRST; PATH or RUN@STEP.

    Decided by stored hashes, without reading tensors, where both cut a tensor into the same chunks.
    What hashes can't decide is read and compared, and the last lines say so.
    """
    one, other = checkpoint_at(first), checkpoint_at(second)
    with progress("comparing") as told:
        found = one.diff(other, read=not hashes_only, told=told)
    shown = [
        row
        for row in found.tensors
        if (pattern is None or fnmatchcase(row.name, pattern))
        and (show_all or row.change != "unchanged")
    ]
    by_name: dict[str, ValueDiff] = {}
    if values:
        chosen = {row.name for row in shown}
        names = [name for name in found.comparable if name in chosen]
        with progress("reading") as told:
            by_name = {row.name: row for row in found.values(names, told=told)}
    if as_json:
        print_json(_as_json(found, [row.name for row in shown], by_name))
    else:
        _print(found, [row.name for row in shown], by_name, values=values)
    if exit_code and not found.is_empty:
        sys.exit(1)


def _as_json(
    found: CheckpointDiff, names: list[str], values: dict[str, ValueDiff]
) -> dict[str, Any]:
    chosen = set(names)
    return {
        "first": found.first.url,
        "second": found.second.url,
        "counts": found.counts,
        "changed_bytes": found.changed_bytes,
        "bytes_read": found.bytes_read,
        "notes": list(found.notes),
        "tensors": [
            {**asdict(row), "values": asdict(values[row.name]) if row.name in values else None}
            for row in found.tensors
            if row.name in chosen
        ],
    }


def _print(
    found: CheckpointDiff, names: list[str], by_name: dict[str, ValueDiff], *, values: bool
) -> None:
    chosen = set(names)
    more = ("norm<", "relative<", "max<", "elements<") if values else ()
    table = Rows("change", "name", "size<", "differs<", "was", "is", *more)
    for row in found.tensors:
        if row.name not in chosen:
            continue
        value = by_name.get(row.name)
        told = (
            [
                number_text(value.norm),
                number_text(value.relative),
                number_text(value.max_abs),
                f"{value.num_changed}/{value.num_elements}",
            ]
            if value is not None
            else ["-" for _ in more]
        )
        same = row.first == row.second
        table.add(
            row.change,
            row.name,
            size_text(row.num_bytes),
            size_text(row.changed_bytes),
            row.first,
            "" if same else row.second,
            *told,
            styled=(0, _STYLES.get(row.change, "")),
        )
    if chosen:
        table.print()
    counts = ", ".join(f"{count} {name}" for name, count in found.counts.items())
    total = f"{len(found.tensors)} tensors and objects: {counts}" if counts else "both are empty"
    click.echo(f"{total}; {size_text(found.changed_bytes)} differ")
    for note in found.notes:
        click.echo(f"note: {note}")
    click.echo(f"{size_text(found.bytes_read)} of tensors were read to decide that")


@click.command()
@click.argument("path")
@click.option(
    "--to",
    "layout",
    required=True,
    metavar="LAYOUT",
    help="8 or 8:row, 8:column, 4x2 (rows over 4, columns over 2), row=4,column=2.",
)
@click.option("--tensor", "pattern", metavar="GLOB", help="Only names that match.")
@as_json
def reshard(path: str, layout: str, pattern: str | None, as_json: bool) -> None:
    """Tell what a load of the checkpoint at PATH, or RUN@STEP, on other ranks would read.

    Planned as a load plans; nothing is read. PEAK is what a rank needs in memory: its tensors, and
    what is read and not yet in place.
    """
    found = checkpoint_at(path).reshard(layout, include=pattern)
    if as_json:
        print_json(
            {
                "path": path,
                "layout": str(found.layout),
                "bytes_needed": found.bytes_needed,
                "bytes_read": found.bytes_read,
                "amplification": found.amplification,
                "peak_bytes": found.peak_bytes,
                "uncovered": list(found.uncovered),
                "ranks": [{**asdict(one), "peak_bytes": one.peak_bytes} for one in found.ranks],
            }
        )
        return
    table = Rows("rank<", "needs<", "reads<", "ranges<", "files<", "times<", "peak<")
    for one in found.ranks:
        times = one.bytes_read / one.bytes_needed if one.bytes_needed else 1.0
        table.add(
            one.rank,
            size_text(one.bytes_needed),
            size_text(one.bytes_read),
            one.num_ranges,
            one.num_files,
            f"{times:.2f}",
            size_text(one.peak_bytes),
        )
    table.print()
    click.echo(
        f"{found.layout}: {len(found.ranks)} ranks read {size_text(found.bytes_read)} for "
        f"{size_text(found.bytes_needed)} ({found.amplification:.2f} times), at most "
        f"{size_text(found.peak_bytes)} of memory on a rank"
    )
    for name in found.uncovered:
        click.echo(f"missing: a part of {name!r} is stored nowhere; a load would fail")
