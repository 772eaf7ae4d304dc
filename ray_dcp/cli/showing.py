"""The commands `show`, `verify`, `diff`, `reshard` and `timeline`, which look into checkpoints.

They import neither torch nor Ray. The lines of Python that `show` prints run as they are, given the
objects that they name.
"""

from __future__ import annotations

import ast
import json
import keyword
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import click

from ray_dcp.cli.main import JSON, VERBOSE
from ray_dcp.cli.output import (
    interrupted,
    part,
    pattern,
    printed,
    progress,
    says,
    screen_width,
    styled,
    table,
    told,
)
from ray_dcp.cli.places import (
    PLACE,
    Address,
    address_of,
    addresses_of,
    hint_at,
    part_of,
    written,
)
from ray_dcp.core.json_text import to_json
from ray_dcp.core.quantities import age_text, count_text, number_text, seconds_text, size_text
from ray_dcp.errors import CheckpointError, CheckpointNotFoundError, InvalidRequestError
from ray_dcp.format.job_parts import KEY
from ray_dcp.format.save_trace import SaveTrace, Span
from ray_dcp.io.checkpoint import what_became_of
from ray_dcp.store.opening import open_storage, place_below
from ray_dcp.store.storage import read_if_there
from ray_dcp.view.charts import Leaf, Node, grown, shape_text
from ray_dcp.view.checkpoint_view import CheckpointView, leaves_of, read_view
from ray_dcp.view.damage_marks import mark_damaged, remove_marks
from ray_dcp.view.difference import TensorDiff, ValueDiff
from ray_dcp.view.run_listing import wrong_lengths
from ray_dcp.view.run_view import RunView, StepView, folder_of, read_run, whole_steps
from ray_dcp.view.step_part import StepPart
from ray_dcp.view.verify import Seen, VerifyInterrupted, VerifyReport, verify_unseen
from ray_dcp.view.wording import course_text, few, late_text, nearest, stacked

_MOST_NAMES = 40
_MOST_PROBLEMS = 50


@click.command()
@click.argument("path", type=PLACE)
@part
@pattern
@click.option("--all", "show_all", is_flag=True, help=f"Each of more than {_MOST_NAMES} names.")
@click.option("--tree", "as_tree", is_flag=True, help="As a tree of names, with sizes.")
@click.option("--depth", type=click.IntRange(1), help="Levels of the tree.")
def show(
    part: str | None,
    path: str,
    pattern: str | None,
    show_all: bool,
    as_tree: bool,
    depth: int | None,
) -> None:
    """Show what is at PATH, or RUN@STEP: its writer, content and state, and how to load it.

    Of a checkpoint, all tensors and objects; of a run, its newest step and the states of all. If
    there are more than 40 names, their modules are shown instead. LAYOUT is how a tensor is
    divided into chunks: whole, rows/8, columns/2, 4x2. Exit status: 1 if a file is missing or too
    short.
    """
    name, view = _open_path(path, part)
    if isinstance(view, RunView):
        told(_shown_run(view), *run_lines(view, name))
        return
    wrong = wrong_lengths(view.storage, view.checkpoint)
    if wrong and (became := what_became_of(view.storage, view.checkpoint)) is not None:
        raise became
    names = [name for name in view.names if pattern is None or fnmatchcase(name, pattern)]
    if says(JSON):
        told({**_tensors_value(view, names), "problems": wrong})
        if wrong:
            sys.exit(1)
        return
    root = grown(leaves_of(view, names), merged=False)
    if as_tree or depth is not None:
        lines = [*_branches(root, "", depth)]
    elif len(names) > num_names_shown() and not show_all:
        lines = [
            *table(_groups(root, num_names_shown()), left=("name", "holds")),
            "each name: --all, --tree",
        ]
    else:
        rows = [_row(view, name) for name in names]
        lines = table(
            rows,
            left=("name", "shape", "dtype", "layout", "value"),
            least=("value",),
            last=("chunks", "layout", "size"),
        )
    if pattern is not None:
        hint = "" if names else nearest(pattern, view.names)
        lines.append(f"{len(names)} of {count_text(len(view), 'name')} match {pattern!r}{hint}")
    elif not as_tree and depth is None and not wrong:
        lines += checkpoint_lines(view, name)
    told(None, *_summary(view, wrong), *lines)
    if wrong:
        sys.exit(1)


def _open_path(path: str, part: str | None) -> tuple[str, CheckpointView | RunView]:
    """Returns what is at a path, or named by `RUN@STEP`, and its path."""
    address = part_of(address_of(path), part)
    try:
        return address.name, address.open()
    except CheckpointNotFoundError as error:
        run = None if os.path.isfile(path) or address.step else read_run(address.place)
        if run is not None and any(step.name != "." for step in run):
            return address.name, run
        error.message += hint_at(path)
        raise


def num_names_shown() -> int:
    """Returns how many lines of names fit on the screen beside the rest."""
    if not sys.stdout.isatty():
        return _MOST_NAMES
    return min(_MOST_NAMES, max(8, shutil.get_terminal_size().lines - 12))


def _summary(view: CheckpointView, wrong: Sequence[str]) -> list[str]:
    commit = f", attempt {view.attempt} in slot {view.slot}" if says(VERBOSE) else ""
    return [
        f"{view.url}: {writer_text(view)}{commit if view.attempt else ''}",
        f"{count_text(len(view.tensors), 'tensor')} and {count_text(len(view.objects), 'object')}, "
        f"{size_text(view.num_bytes)} in {count_text(len(view.files), 'file')}"
        + ("" if wrong else ", none missing or too short"),
        *(f"damaged: {one}" for one in wrong),
        *(
            f"mean of {one['weight']:.4g} x {one['checkpoint']}"
            + (f", attempt {one['attempt']}" if one["attempt"] else "")
            for one in view.sources
        ),
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


def _groups(root: Node, most: int) -> list[dict[str, str]]:
    """Returns a row for each module, down to the deepest level that fits."""
    level = _deepest_level(root, most)
    sizes = [size_text(node.num_bytes) if node.num_tensors else "" for _, node in level]
    rows = [
        {"name": name, "holds": node.told, "size": size}
        for (name, node), size in zip(level[:most], sizes, strict=False)
    ]
    more = {"name": f"… and {len(level) - len(rows)} more", "holds": "", "size": ""}
    return [*rows, more] if len(level) > len(rows) else rows


def _deepest_level(root: Node, most: int) -> list[tuple[str, Node]]:
    """Returns the deepest level of a tree with at most so many nodes, by their whole names."""
    level = [*root.children.items()]
    while True:
        deeper = [
            (f"{name}.{below}" if node.children else name, child)
            for name, node in level
            for below, child in (node.children or {"": node}).items()
        ]
        if len(deeper) > most or deeper == level:
            return level
        level = deeper


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


def _shown_run(run: RunView) -> dict[str, Any]:
    return {
        "path": run.url,
        "kind": "run",
        "runs": [
            {
                "path": one.url,
                "num_steps": len(one.present),
                "num_bytes": sum(step.num_bytes for step in one),
                "latest": None if (newest := newest_of(one)) is None else newest.name,
            }
            for one in run.runs
        ],
    }


def _tensors_value(view: CheckpointView, names: Sequence[str]) -> dict[str, Any]:
    tensors = {}
    for name in names:
        info = view.tensors.get(name)
        if info is not None:
            fields = {key: value for key, value in asdict(info).items() if key != "path"}
            tensors[name] = {**fields, "layout": view.layouts[name]}
    facts = ("kind", "attempt", "slot", "world_size", "num_bytes", "sources")
    return {
        "path": view.url,
        **{name: getattr(view, name) for name in facts},
        "files": [{"key": file.key, "num_bytes": file.num_bytes} for file in view.files],
        "tensors": tensors,
        "objects": {n: view.small_values.get(n) for n in names if n not in view.tensors},
    }


@click.command()
@click.argument("path", type=PLACE)
@click.option(
    "--mark", is_flag=True, help="Record in the run which steps are damaged, and which no more."
)
def verify(path: str, mark: bool) -> None:
    """Compare every stored byte of the checkpoint at PATH, or RUN@STEP, with its checksums.

    If PATH is a run, all of its steps are verified, oldest first, and the last line names the
    newest one without damage; of several runs, a line each. What was found is below the line of its
    step. RUN@latest is the
    newest committed step, even if it is damaged. A file that steps share is read once. With --mark,
    managers of the run neither count nor delete the damaged steps until they are saved or verified
    again. Exit status: 0 no damage, 1 damaged, 2 there is no
    checkpoint, a file can't be read, or the call is invalid.
    """
    is_run, addresses = addresses_of(path, damaged=True)
    results, codes = list[dict[str, Any]](), set[int]()
    runs = dict.fromkeys(one.step.run for one in addresses if one.step is not None)
    newest: dict[str, StepView] = {}
    seen: Seen = {}
    sizes = [0 if one.step is None else one.step.num_bytes for one in addresses] if is_run else ()

    def add(name: str, report: VerifyReport, *, in_part: bool = False) -> None:
        name = f"{name} (in part)" if in_part else name
        results.append({"path": name, "ok": report.ok and not in_part, **asdict(report)})
        printed(meter, *_result(name, report, "no problem so far" if in_part else "ok"))
        codes.update([1] if report.problems else [2] if report.unread else [])

    def verify_one(address: Address) -> None:
        name = address.name
        meter.begin(name)
        try:
            report = verify_unseen(address.place, seen, progress=meter)
        except CheckpointError as error:
            is_gone = isinstance(error, CheckpointNotFoundError)
            if not is_run:
                error.message += hint_at(path) if is_gone else ""
                raise
            what = "deleted meanwhile" if is_gone else f"could not be verified: {error.message}"
            printed(meter, f"{name}: {what}")
            results.append({"path": name, "ok": is_gone, "error": error.message})
            codes.update([] if is_gone else [2])
            return
        add(name, report)
        if mark:
            _mark(address, report)
        if report.ok and address.step is not None:
            newest[address.step.run] = address.step

    try:
        with progress("verifying", path, sizes) as meter:
            for address in addresses:
                verify_one(address)
    except KeyboardInterrupt as error:
        if isinstance(error, VerifyInterrupted):
            add(address.name, error.report, in_part=True)
        if not is_run:
            interrupted((results or [{"path": path}])[0])
        left = len(addresses) - len(results)
        lines = [f"not verified: {count_text(left, 'step')}"] if left else []
        interrupted({"path": path, "steps": results}, *lines)
    if is_run:
        good = {run or ".": _number_or_name(newest.get(run)) for run in runs}
        of_run = {run: f" of {run}" if len(good) > 1 else "" for run in good}
        lines = [
            f"newest good{of_run[run]}: {f'step {one}' if isinstance(one, int) else one or 'none'}"
            for run, one in good.items()
        ]
        first = next(iter(good.values()), None)
        value = {"path": path, "steps": results, "newest_good": first if len(good) < 2 else good}
        told(value, *lines)
    else:
        # Why not a list for one checkpoint: programs rely on this form.
        told(results[0])
    if codes:
        sys.exit(min(codes))


def _mark(address: Address, report: VerifyReport) -> None:
    """Records in its run whether a step is damaged.

    Raises:
        InvalidRequestError: It is no step with a number, directly in a run.
        StorageError: The storage failed.
    """
    step = address.step
    is_in_run = step is not None and "/" not in step.name.removeprefix(f"{step.run}/")
    if step is None or step.step is None or step.manifest is None or not is_in_run:
        raise InvalidRequestError(
            f"--mark is for steps that ray_dcp saved, with a number, directly in a run, but "
            f"{address.name} is none; name it as RUN@STEP, or leave --mark out",
            key="mark",
        )
    run = place_below(step.run_place, step.run) if step.run else step.run_place
    if report.problems:
        steps = {step.step: step.manifest.attempt}
        mark_damaged(run, steps, "verify found steps damaged", open_storage)
    elif report.ok and step.is_marked_damaged:
        remove_marks(run, [step.step], open_storage)


def _number_or_name(step: StepView | None) -> int | str | None:
    """Returns the number of a step, or its name where it has none."""
    return None if step is None else step.name if step.step is None else step.step


def _result(name: str, report: VerifyReport, good: str) -> list[str]:
    """Returns lines with the result of a checkpoint (`good` if it is), and what was found."""
    lines = [f"damaged: {problem}" for problem in report.problems[:_MOST_PROBLEMS]]
    if len(report.problems) > _MOST_PROBLEMS:
        lines.append(f"... and {len(report.problems) - _MOST_PROBLEMS} more, see --json")
    lines += [f"unread: {problem}" for problem in report.unread[:_MOST_PROBLEMS]]
    lines += [f"note: {note}" for note in report.notes]
    num_problems = len(report.problems) + len(report.unread)
    result = count_text(num_problems, "problem") if num_problems else good
    head = f"{name}: {result}, {size_text(report.checked_bytes)} checked"
    return [head, *(f"  {line}" for line in lines)]


_STYLES = {"changed": "yellow", "added": "green", "removed": "red", "undecided": "magenta",
           "reshaped": "cyan", "retyped": "cyan"}  # fmt: skip


@click.command()
@click.argument("first", type=PLACE)
@click.argument("second", type=PLACE)
@part
@pattern
@click.option("--values", is_flag=True, help="Read what changed, and show by how much.")
@click.option("--hashes-only", is_flag=True, help="Read nothing where hashes can't decide.")
@click.option("--all", "show_all", is_flag=True, help="List what is unchanged, too.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 when something differs.")
def diff(
    part: str | None,
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
    reading them. Of steps of several parts, each part is compared with that of its name. Other
    tensors are read and compared; the first lines report how much was read. If
    more than 40 names differ, their modules are shown instead; --tensor '*' lists each.
    """

    def compare(
        address_one: Address, address_other: Address
    ) -> tuple[bool, dict[str, Any], list[str]]:
        one, other = address_one.open(address_one.name), address_other.open(address_other.name)
        with progress("comparing", address_other.name) as meter:
            found = one.diff(other, read=not hashes_only, progress=meter)
        if pattern is not None:
            chosen = tuple(row for row in found.tensors if fnmatchcase(row.name, pattern))
            found = replace(found, tensors=chosen)
        shown = [row for row in found.tensors if show_all or row.change != "unchanged"]
        by_name: dict[str, ValueDiff] = {}
        if values:
            rows = {row.name for row in shown}
            names = [name for name in found.comparable if name in rows]
            with progress("reading", address_other.name) as meter:
                by_name = {row.name: row for row in found.values(names, progress=meter)}
        is_long = len(shown) > num_names_shown() and not (show_all or values or pattern is not None)
        if is_long:
            groups = _diff_groups(shown, num_names_shown())
            lines = [*table(groups, left=("name", "holds")), "each name: --tensor '*'"]
        else:
            lines = table(
                [_diff_row(row, by_name.get(row.name)) for row in shown],
                left=("change", "name", "type"),
                least=("elements", "max", "norm"),
                last=("type", "size", "differs"),
                style=lambda column, cell: _STYLES.get(cell, "") if column == "change" else "",
            )
        counts = ", ".join(f"{count} {name}" for name, count in found.counts.items())
        none = "both are empty" if pattern is None else f"no name matches {pattern!r}"
        total = f"{counts or none}; {size_text(found.changed_bytes)} differ"
        title = f"{address_one.name} -> {address_other.name}"
        notes = [f"note: {note}" for note in found.notes]
        read = f"{size_text(found.bytes_read)} were read to decide that"
        facts = ("counts", "changed_bytes", "bytes_read", "notes")
        value = {
            "first": one.url,
            "second": other.url,
            **{name: getattr(found, name) for name in facts},
            "tensors": [
                {
                    **asdict(row),
                    "values": asdict(by_name[row.name]) if row.name in by_name else None,
                }
                for row in shown
            ],
        }
        return found.is_empty, value, [title, f"{total} ({read})", *notes, *lines]

    addresses = [part_of(address_of(one), part) for one in (first, second)]
    one, other = addresses[0].open(first), addresses[1].open(second)
    if not (one.parts and other.parts):
        is_empty, value, lines = compare(*addresses)
        told(value, *lines)
    else:
        # Why by parts: the small checkpoint of a step has nothing but their names.
        is_empty, value, lines = True, {}, []
        for name in dict.fromkeys([*one.parts, *other.parts]):
            if name in one.parts and name in other.parts:
                is_same, value[name], own = compare(*(part_of(one, name) for one in addresses))
                is_empty = is_empty and is_same
            else:
                is_empty, value[name] = False, "removed" if name in one.parts else "added"
                own = [f"{name}: {value[name]}"]
            lines += [*([""] if lines else []), *own]
        told({"first": one.url, "second": other.url, "parts": value}, *lines)
    if exit_code and not is_empty:
        sys.exit(1)


def _diff_groups(rows: Sequence[TensorDiff], most: int) -> list[dict[str, str]]:
    """Returns a row for each module that differs, down to the deepest level that fits."""
    level = _deepest_level(grown([Leaf(row.name, None) for row in rows], merged=False), most)
    found = []
    for name, _ in level[:most]:
        inside = [row for row in rows if row.name == name or row.name.startswith(f"{name}.")]
        counts = Counter(row.change for row in inside)
        found.append(
            {
                "name": name,
                "holds": ", ".join(f"{count} {change}" for change, count in counts.items()),
                "size": size_text(sum(row.num_bytes for row in inside)),
                "differs": size_text(sum(row.changed_bytes for row in inside)),
            }
        )
    if len(level) > most:
        more = f"… and {len(level) - most} more"
        found.append({"name": more, "holds": "", "size": "", "differs": ""})
    return found


def _diff_row(row: TensorDiff, value: ValueDiff | None) -> dict[str, object]:
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
@click.argument("path", type=PLACE)
@part
@click.option(
    "--to",
    "layout",
    required=True,
    metavar="LAYOUT",
    help="8 or 8:row, 8:column, 4x2 (rows over 4, columns over 2).",
)
@pattern
def reshard(part: str | None, path: str, layout: str, pattern: str | None) -> None:
    """Show what a load of the checkpoint at PATH, or RUN@STEP, on other ranks would read.

    The plan is that of a load, but no tensor is read. PEAK is the memory that a rank needs: its
    tensors, and bytes that are read but not yet copied into them.
    """
    address = part_of(address_of(path), part)
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
    numbers = ("bytes_needed", "bytes_read", "amplification", "peak_bytes", "uncovered")
    value = {
        "path": address.name,
        "layout": str(found.layout),
        **{name: getattr(found, name) for name in numbers},
        "ranks": [{**asdict(one), "peak_bytes": one.peak_bytes} for one in found.ranks],
    }
    told(value, *table(rows, least=("ranges", "files", "times")), total, *missing)


RANK = {"capture": ("░", "yellow"), "plan": ("·", "dim"), "stage": ("▒", "magenta"),
        "write": ("█", "blue"), "commit": ("-", "dim")}  # fmt: skip
"""Character and style of each phase of a rank; the character suffices without colours."""
COORDINATOR = {"look": ("·", "green"), "plan": ("░", "dim"), "build": ("▒", "green"),
               "table": ("▓", "green"), "record": ("█", "green")}  # fmt: skip

_WIDTH, _LEAST_WIDTH, _MOST_WIDTH = 100, 60, 160
_MOST_LANES = 64


@click.command()
@click.argument("path", type=PLACE)
@part
@click.option(
    "--chrome",
    "chrome_file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write the trace to FILE for chrome://tracing and ui.perfetto.dev.",
)
def timeline(part: str | None, path: str, chrome_file: str | None) -> None:
    """Show the duration of each phase on each rank when the checkpoint at PATH was saved.

    PATH may be RUN@STEP, such as run@latest. A step of a job has a lane for each part, from its
    first phase to its commit; --part shows the ranks of one. Stragglers in a phase are marked with
    `!`. All times are by the clock of the coordinator.
    """
    view = part_of(address_of(path), part).open(path)
    if view.parts:
        _tell_parts(view, chrome_file)
        return
    trace = view.trace
    if trace is None:
        why = (
            f"a {view.kind} checkpoint has none"
            if view.attempt is None
            else "the trace could not be written, or was deleted"
        )
        raise CheckpointNotFoundError(
            f"expected the trace of a save beside the checkpoint, but there is none: {why}",
            checkpoint_id=view.url,
        )
    if chrome_file is not None:
        written(chrome_file, chrome_trace(trace))
        if not says(JSON):
            click.echo(f"wrote {chrome_file}: open it in chrome://tracing or ui.perfetto.dev")
            return
    width = min(max(screen_width() or _WIDTH, _LEAST_WIDTH), _MOST_WIDTH)
    told({"path": view.url, **asdict(trace)}, *gantt(trace, view.url, width))


def _tell_parts(view: CheckpointView, chrome_file: str | None) -> None:
    """Prints when each part of a step was saved, and the record that commits all of them.

    Raises:
        CheckpointNotFoundError: No trace is there.
    """
    traces: dict[str, SaveTrace | None] = {}
    for name, one in view.parts.items():
        # Why none: the trace of a kept part is that of the step from which it is.
        is_own = one.kept_from is None and view.place is not None
        place = place_below(view.place or view.url, one.folder)
        traces[name] = read_view(place).trace if is_own else None
    traces["record"] = view.trace
    known = {name: one for name, one in traces.items() if one is not None}
    if not known:
        raise CheckpointNotFoundError(
            "expected the traces of saves beside the parts of the step, but there are none: they "
            "could not be written, or were deleted",
            checkpoint_id=view.url,
        )
    if chrome_file is not None:
        written(chrome_file, chrome_traces(known))
        if not says(JSON):
            click.echo(f"wrote {chrome_file}: open it in chrome://tracing or ui.perfetto.dev")
            return
    width = min(max(screen_width() or _WIDTH, _LEAST_WIDTH), _MOST_WIDTH)
    value = {name: None if one is None else asdict(one) for name, one in traces.items()}
    told({"path": view.url, "parts": value}, *parts_gantt(view, traces, width))


def parts_gantt(
    view: CheckpointView, traces: Mapping[str, SaveTrace | None], width: int = _WIDTH
) -> list[str]:
    """Returns the saves of the parts of a step as lines of styled text, a lane each.

    Args:
        view: The step.
        traces: Trace of each part, None where it has none of its own, and of the record.
        width: Width in columns, at least 60.
    """
    known = [one for one in traces.values() if one is not None]
    began_s = min(one.began_s for one in known)
    end_s = max(one.began_s - began_s + one.committed_s for one in known) or 1e-9
    left = max(map(len, traces))
    bar = max(width - left - 22, 8)
    count = count_text(len(view.parts), "part")
    lines = [f"{view.url}: {count}, committed after {seconds_text(end_s)}", ""]
    for name, trace in traces.items():
        if trace is None:
            kept_from = view.parts[name].kept_from if name in view.parts else None
            source = "no trace" if kept_from is None else f"kept from step {kept_from}"
            lines.append(f"{name:<{left}}   {source}")
            continue
        start_s = trace.began_s - began_s
        num_bytes = sum(one.num_bytes for one in trace.phases if one.phase == "write")
        span = Span("write", None, start_s, start_s + trace.committed_s)
        mark = styled("!", "red") if trace.stragglers else " "
        drawn = _draw_bar((span,), end_s, bar, RANK)
        lines.append(f"{name:<{left}} {mark} {drawn} {size_text(num_bytes):>10}")
    end = seconds_text(end_s)
    middle = f"{'0':<{bar // 2}}{seconds_text(end_s / 2)}"
    lines.append(styled(" " * (left + 3) + f"{middle:<{max(bar - len(end), 0)}}{end}", "dim"))
    return [*lines, "", "the ranks of one: --part NAME"]


def chrome_traces(traces: Mapping[str, SaveTrace]) -> str:
    """Returns the traces of the parts of a step as `chrome_trace` does, one after the other."""
    events: list[dict[str, Any]] = []
    for name, trace in traces.items():
        first = 1 + max((event["pid"] for event in events), default=-1)
        for event in json.loads(chrome_trace(trace))["traceEvents"]:
            event["pid"] += first
            if event["name"] == "process_name":
                event["args"]["name"] = f"{name}: {event['args']['name']}"
            if event["name"] == "process_sort_index":
                event["args"]["sort_index"] = event["pid"]
            events.append(event)
    return to_json({"traceEvents": events, "displayTimeUnit": "ms"})


def chrome_trace(trace: SaveTrace) -> str:
    """Returns a trace as JSON for `chrome://tracing` and https://ui.perfetto.dev.

    Each rank is a process, after the coordinator. Times are microseconds since 1970.

    Args:
        trace: Trace of a save.

    Examples:
        >>> import json
        >>> from ray_dcp.format.save_trace import Span
        >>> trace = SaveTrace(
        ...     attempt="0123456789abcdef", mode="save", world_size=1, began_s=1.0,
        ...     committed_s=0.5, spans=(Span("write", 0, 0.1, 0.5, 8),),
        ... )
        >>> events = json.loads(chrome_trace(trace))["traceEvents"]
        >>> [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
        [('write', 1100000.0, 400000.0), ('commit', 1500000.0, 0.0)]
    """
    late = {(straggler.rank, straggler.phase): straggler for straggler in trace.stragglers}
    events: list[dict[str, Any]] = []
    for lane, spans in trace.lanes().items():
        pid = 0 if lane is None else lane + 1
        name = "coordinator" if lane is None else f"rank {lane}"
        meta = {"ph": "M", "pid": pid, "tid": 0}
        events.append({**meta, "name": "process_name", "args": {"name": name}})
        events.append({**meta, "name": "process_sort_index", "args": {"sort_index": pid}})
        for span in spans:
            told: dict[str, Any] = {"bytes": span.num_bytes} if span.num_bytes else {}
            straggler = late.get((lane, span.phase)) if lane is not None else None
            if straggler is not None:
                told |= {"straggler": True, "median_s": straggler.median_s}
                told |= {"where": straggler.where} if straggler.where else {}
            times = {"ts": _micros(trace.began_s + span.start_s), "dur": _micros(span.seconds)}
            kind = {"name": span.phase, "cat": "commit" if lane is None else "rank", "ph": "X"}
            events.append({**kind, "pid": pid, "tid": 0, **times, "args": told})
    whole = ("attempt", "mode", "world_size", "num_bytes")
    other = {name.removeprefix("num_"): getattr(trace, name) for name in whole}
    return to_json({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def gantt(trace: SaveTrace, title: str, width: int = _WIDTH) -> list[str]:
    """Returns a trace as lines of styled text, each at most `width` wide except the title.

    Args:
        trace: Trace of a save.
        title: Path of the checkpoint.
        width: Width in columns, at least 60.
    """
    found = trace.lanes()
    names = {lane: "coordinator" if lane is None else f"rank {lane}" for lane in found}
    left = max(len(name) for name in names.values())
    bar = width - left - 22
    late = {straggler.rank for straggler in trace.stragglers}
    end_s = max([trace.committed_s, *(span.stop_s for span in trace.spans)]) or 1e-9
    what, course = course_text(trace)
    lines = [f"{title}: {what}", course, ""]
    for lane, spans in [*found.items()][: _MOST_LANES + 1]:
        drawn = _draw_bar(spans, end_s, bar, COORDINATOR if lane is None else RANK)
        mark = styled("!", "red") if lane in late else " "
        num_bytes = sum(span.num_bytes for span in spans if span.phase == "write")
        size = f" {size_text(num_bytes):>10}" if num_bytes else ""
        lines.append(f"{names[lane]:<{left}} {mark} {drawn}{size}")
    end = seconds_text(end_s)
    middle = f"{'0':<{bar // 2}}{seconds_text(end_s / 2)}"
    lines.append(styled(" " * (left + 3) + f"{middle:<{max(bar - len(end), 0)}}{end}", "dim"))
    hidden = trace.world_size - len(trace.ranks)
    if hidden > 0:
        lines.append(f"… and {hidden} more ranks, which are in these numbers:")
    phases = [
        {
            "phase": one.phase,
            "ranks": one.num_ranks,
            "median": seconds_text(one.median_s),
            "p99": seconds_text(one.p99_s),
            "max": seconds_text(one.max_s),
            "size": size_text(one.num_bytes) if one.num_bytes else "",
        }
        for one in trace.phases
    ]
    lines += ["", *table(phases, left=("phase",)), ""]
    lines += [f"! {late_text(one)}" for one in trace.stragglers]
    for who, looks in (("ranks", RANK), ("coordinator", COORDINATOR)):
        legend = "  ".join(f"{mark} {phase}" for phase, (mark, _) in looks.items())
        lines.append(styled(f"{who}: {legend}", "dim"))
    return lines


def _draw_bar(
    spans: tuple[Span, ...], end_s: float, width: int, looks: dict[str, tuple[str, str]]
) -> str:
    cells = [(" ", "")] * width
    for span in stacked(spans):
        first = min(int(span.start_s / end_s * width), width - 1)
        # Why at least one cell: a phase of no duration happened, too.
        last = max(first + 1, min(round(span.stop_s / end_s * width), width))
        for cell in range(max(first, 0), last):
            cells[cell] = looks.get(span.phase, ("?", ""))
    runs = ((style, [*run]) for style, run in groupby(cells, lambda cell: cell[1]))
    return "".join(styled("".join(mark for mark, _ in run), style) for style, run in runs)


_MOST_KEYS, _MOST_CODE, _MOST_RUNS = 8, 90, 20
_MOST_VALUE = 12
_CONFIG_BYTES = 1 << 20
_WRITERS = {"native": "ray_dcp", "stock": "torch.distributed.checkpoint"}


def writer_text(view: CheckpointView) -> str:
    """Returns what a checkpoint is and who wrote it, as text."""
    ranks = "" if view.world_size is None else f", saved by {count_text(view.world_size, 'rank')}"
    age = "" if view.created_s is None else f" {age_text(time.time() - view.created_s)} ago"
    if view.kind != "safetensors":
        return f"a checkpoint of {_WRITERS[view.kind]}{ranks}{age}"
    config: Any = None
    with suppress(CheckpointError, ValueError):
        config = json.loads(read_if_there(view.storage, "config.json", _CONFIG_BYTES) or b"null")
    if not isinstance(config, dict):
        return f"safetensors{ranks}"
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else config.get("model_type")
    version = config.get("transformers_version")
    by = f", written by transformers {version}" if isinstance(version, str) else ""
    return f"a Hugging Face model{f' {name}' if isinstance(name, str) else ''} in safetensors{by}"


def _loading_code(view: CheckpointView, path: str) -> list[str]:
    """Returns three lines of Python that load a checkpoint, for its own names.

    Args:
        view: The checkpoint.
        path: Its path or URL.
    """
    where = to_json(path)
    state = _state_code(view)
    if state is None:
        read = [f"state = dcp.read_state_dict({where})", "model.load_state_dict(state)"]
        return ["import ray_dcp as dcp", *read]
    imports = "import torch, ray_dcp as dcp" if "torch." in state else "import ray_dcp as dcp"
    return [imports, f"state = {state}", f"dcp.load(state, checkpoint_id={where})"]


def _state_code(view: CheckpointView) -> str | None:
    """Returns a state dict with the keys of a checkpoint as code; None if it is a flat one."""
    found: dict[str, str] = {}
    is_flat = True
    for name, path in zip(view.names, view.checkpoint.table.paths, strict=True):
        key = (path or (name,))[0]
        if not isinstance(key, str) or len(found) > _MOST_KEYS:
            return None
        info = view.tensors.get(name)
        if path is not None and len(path) > 1:
            is_flat = False
            found[key] = key if key.isidentifier() and not keyword.iskeyword(key) else "model"
        elif info is None:
            is_flat = False
            found[key] = _literal(view.small_values.get(name, "None"))
        else:
            found[key] = f"torch.empty({info.shape}, dtype=torch.{info.dtype})"
    text = ", ".join(f"{to_json(key)}: {value}" for key, value in found.items())
    return None if is_flat or len(text) > _MOST_CODE else f"{{{text}}}"


def _literal(value: str) -> str:
    """Returns the `repr` of a value if that is short and is Python, else `None`."""
    with suppress(ValueError, SyntaxError):
        ast.literal_eval(value)
        return value if len(value) <= _MOST_VALUE else "None"
    return "None"


def checkpoint_lines(view: CheckpointView, path: str) -> list[str]:
    """Returns the lines of text how to load a checkpoint, or a step of items.

    Args:
        view: The checkpoint.
        path: Its path or URL.
    """
    parts: Mapping[str, StepPart] = {}
    if view.place is not None:
        with suppress(CheckpointError):
            parts = view.parts
    lines = []
    if parts and view.place is not None:
        what = "parts" if KEY in view.objects else "items"
        told = [one.in_words(name) for name, one in parts.items()]
        lines.append(f"a step of the {what} {few(told)}, each a checkpoint below it")
        first = next(iter(parts.values())).folder
        view, path = read_view(place_below(view.place, first)), f"{path}/{first}"
    return [*lines, *_code_lines("to load it", _loading_code(view, path))]


def run_lines(run: RunView, path: str) -> Iterator[str]:
    """Yields the description of a run, or of a directory of runs, as lines of text.

    Args:
        run: The run.
        path: Its path or URL.
    """
    runs, size = run.runs, size_text(sum(step.num_bytes for step in run))
    if len(runs) == 1:
        folder = folder_of(runs[0], run)
        path = path if folder == "." else f"{path.rstrip('/')}/{folder}"
        yield f"{path}: a run of {count_text(len(whole_steps(run.present)), 'checkpoint')}, {size}"
        yield from _of_run(runs[0], path)
        return
    yield f"{path}: {len(runs)} runs of {count_text(len(run.present), 'checkpoint')}, {size}"
    rows = [{"run": folder_of(one, run), **_run_row(one)} for one in runs[:_MOST_RUNS]]
    yield from table(rows, left=("run", "newest", "states"), least=("size", "states"))
    if len(runs) > _MOST_RUNS:
        yield f"… and {len(runs) - _MOST_RUNS} more"
    yield f"each step: ray-dcp ls {path}"
    newest = max(runs, key=lambda one: max((s.created_s or 0.0 for s in one), default=0.0))
    folder = folder_of(newest, run)
    yield f"the run that was saved to last: {folder}"
    yield from _to_load(newest, path if folder == "." else f"{path.rstrip('/')}/{folder}")


def _of_run(run: RunView, path: str) -> Iterator[str]:
    newest = newest_of(run)
    if newest is not None:
        ranks = "" if newest.num_ranks is None else f", {count_text(newest.num_ranks, 'rank')}"
        since = newest.created_s
        age = "" if since is None else f", {age_text(time.time() - since)} ago"
        yield f"newest that is whole: {newest.name}{age}{ranks}, {size_text(newest.whole_bytes)}"
        with suppress(CheckpointError):
            yield f"written by: {_WRITERS.get(newest.view.kind, newest.view.kind)}"
    yield f"states, by names and lengths of files: {_states(run)}"
    for step in run:
        if step.state in ("damaged", "unreadable"):
            yield f"{step.name}: {step.state}: {step.detail}"
    yield f"each step: ray-dcp ls {path}; what is in one: ray-dcp show {path}@latest"
    yield from _to_load(run, path)


def _to_load(run: RunView, path: str) -> Iterator[str]:
    newest = newest_of(run)
    if newest is None:
        yield "nothing in it can be loaded"
        return
    place = f"{path.rstrip('/')}/{newest.name}"
    try:
        if newest.items:
            yield from checkpoint_lines(newest.view, place)
            return
        code = _loading_code(newest.view, place)
    except CheckpointError as error:
        yield f"{newest.name}: {error.message}"
        return
    if code[-1].startswith("dcp.load(") and newest.step is not None:
        code[-1] = f"dcp.load_newest(state, {to_json(path)})"
    yield from _code_lines("to load the newest that is whole", code)


def newest_of(run: RunView) -> StepView | None:
    """Returns the newest step of a run that can be loaded; None if there is none."""
    try:
        return run.step("latest")
    except CheckpointError:
        return None


def _run_row(run: RunView) -> dict[str, str]:
    newest = newest_of(run)
    since = None if newest is None else newest.created_s
    return {
        "newest": "" if newest is None else newest.name,
        "age": "" if since is None else age_text(time.time() - since),
        "size": size_text(sum(step.num_bytes for step in run)),
        "states": _states(run),
    }


def _states(run: RunView) -> str:
    counts = Counter(step.state for step in whole_steps(run.steps))
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _code_lines(what: str, lines: Sequence[str]) -> list[str]:
    where = "on any number of ranks" if lines[-1].startswith("dcp.load") else "in one process"
    return ["", styled(f"{what}, {where}:", "bold"), *(f"    {line}" for line in lines)]
