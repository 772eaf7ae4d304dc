"""The commands `diff` and `reshard`, which compare checkpoints and simulate loads.

They import neither torch nor Ray.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from fnmatch import fnmatchcase

import click

from ray_dcp.cli.output import progress, table, told
from ray_dcp.cli.places import address_of
from ray_dcp.view.difference import TensorDiff, ValueDiff
from ray_dcp.view.wording import count_text, number_text, size_text

_STYLES = {"changed": "yellow", "added": "green", "removed": "red", "undecided": "magenta",
           "reshaped": "cyan", "retyped": "cyan"}  # fmt: skip


@click.command()
@click.argument("first")
@click.argument("second")
@click.option("--tensor", "pattern", metavar="GLOB", help="Only names that match.")
@click.option("--values", is_flag=True, help="Read what changed, and show by how much.")
@click.option("--hashes-only", is_flag=True, help="Read nothing where hashes can't decide.")
@click.option("--all", "show_all", is_flag=True, help="List what is unchanged, too.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 when something differs.")
def diff(
    first: str,
    second: str,
    pattern: str | None,
    values: bool,
    hashes_only: bool,
    show_all: bool,
    exit_code: bool,
) -> None:
    """List the tensors of checkpoint SECOND that differ from those of FIRST; PATH or RUN@STEP.

    Tensors with the same chunks in both checkpoints are compared by their stored hashes, without
    reading them. Other tensors are read and compared; the last lines report how much was read.
    """
    address_one, address_other = address_of(first), address_of(second)
    one, other = address_one.open(first), address_other.open(second)
    with progress("comparing") as bar:
        found = one.diff(other, read=not hashes_only, told=bar)
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
        with progress("reading") as bar:
            by_name = {row.name: row for row in found.values(names, told=bar)}
    lines = table(
        [_row(row, by_name.get(row.name)) for row in shown],
        left=("change", "name", "type"),
        least=("elements", "type", "max", "size", "norm", "differs"),
        style=lambda column, cell: _STYLES.get(cell, "") if column == "change" else "",
    )
    counts = ", ".join(f"{count} {name}" for name, count in found.counts.items())
    total = f"{counts or 'both are empty'}; {size_text(found.changed_bytes)} differ"
    title = f"{address_one.name} -> {address_other.name}"
    notes = [f"note: {note}" for note in found.notes]
    read = f"{size_text(found.bytes_read)} of tensors were read to decide that"
    value = {
        "first": one.url,
        "second": other.url,
        "counts": found.counts,
        "changed_bytes": found.changed_bytes,
        "bytes_read": found.bytes_read,
        "notes": list(found.notes),
        "tensors": [
            {**asdict(row), "values": asdict(by_name[row.name]) if row.name in by_name else None}
            for row in shown
        ],
    }
    told(value, title, *lines, total, *notes, read)
    if exit_code and not found.is_empty:
        sys.exit(1)


def _row(row: TensorDiff, value: ValueDiff | None) -> dict[str, object]:
    numbers = {
        "norm": value and number_text(value.norm),
        "relative": value and number_text(value.relative),
        "max": value and number_text(value.max_abs),
        "elements": value and f"{value.num_changed}/{value.num_elements}",
    }
    return {
        "change": row.change,
        "name": row.name,
        "size": size_text(row.num_bytes),
        "differs": size_text(row.changed_bytes),
        "type": " -> ".join(dict.fromkeys(filter(None, (row.first, row.second)))),
        **{column: cell or "" for column, cell in numbers.items()},
    }


@click.command()
@click.argument("path")
@click.option(
    "--to",
    "layout",
    required=True,
    metavar="LAYOUT",
    help="8 or 8:row, 8:column, 4x2 (rows over 4, columns over 2).",
)
@click.option("--tensor", "pattern", metavar="GLOB", help="Only names that match.")
def reshard(path: str, layout: str, pattern: str | None) -> None:
    """Show what a load of the checkpoint at PATH, or RUN@STEP, on other ranks would read.

    The plan is that of a load, but no tensor is read. PEAK is the memory that a rank needs: its
    tensors, and bytes that are read but not yet copied into them.
    """
    address = address_of(path)
    found = address.open(path).reshard(layout, include=pattern)
    rows = [
        {
            "rank": one.rank,
            "needs": size_text(one.bytes_needed),
            "reads": size_text(one.bytes_read),
            "ranges": one.num_ranges,
            "files": one.num_files,
            "times": f"{one.bytes_read / one.bytes_needed if one.bytes_needed else 1.0:.2f}",
            "peak": size_text(one.peak_bytes),
        }
        for one in found.ranks
    ]
    total = (
        f"{address.name}\n"
        f"{found.layout}: {count_text(len(rows), 'rank')}, {size_text(found.bytes_read)} read for "
        f"{size_text(found.bytes_needed)} ({found.amplification:.2f} times)\n"
        f"at most {size_text(found.peak_bytes)} of memory on a rank"
    )
    missing = [
        f"missing: a part of {name!r} is stored nowhere; a load would fail"
        for name in found.uncovered
    ]
    value = {
        "path": address.name,
        "layout": str(found.layout),
        "bytes_needed": found.bytes_needed,
        "bytes_read": found.bytes_read,
        "amplification": found.amplification,
        "peak_bytes": found.peak_bytes,
        "uncovered": list(found.uncovered),
        "ranks": [{**asdict(one), "peak_bytes": one.peak_bytes} for one in found.ranks],
    }
    told(value, *table(rows, least=("ranges", "files", "times")), total, *missing)
