"""The commands `ls`, `du`, `watch`, `doctor` and `report`, which show a whole run.

They import neither torch nor Ray.
"""

from __future__ import annotations

import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import click

import ray_dcp
from ray_dcp.cli.main import JSON, exit_code_of
from ray_dcp.cli.output import fitted, progress, says, styled, table, told
from ray_dcp.cli.places import PLACE, check_answers, run_at, written
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core.json_text import to_json
from ray_dcp.core.quantities import count_text, seconds_text, size_text
from ray_dcp.errors import CheckpointError, CheckpointNotFoundError
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import KeyExistsError, Storage
from ray_dcp.view.disk_usage import KINDS, Usage, usage_of
from ray_dcp.view.drawing import aside, div, heading
from ray_dcp.view.pictures import (
    Picture,
    line_chart,
    picture_diff,
    picture_layout,
    picture_reshard,
    picture_steps,
)
from ray_dcp.view.run_listing import list_checkpoints
from ray_dcp.view.run_view import (
    LEFT,
    MOST_DETAILED,
    RunView,
    StepView,
    folder_of,
    metric_names,
    nearest_paths,
    run_text,
    step_cells,
    whole_steps,
)
from ray_dcp.view.step_part import StepPart

_STYLES = {"committed": "green", "damaged": "red", "unreadable": "red", "in flight": "yellow",
           "aborted": "yellow", "deleted": "dim"}  # fmt: skip
_LEAST = ("layout", "ranks", "durable", "new", "tags", "age", "stall")


@click.command()
@click.argument("root", type=PLACE)
@click.option(
    "--full/--brief",
    default=None,
    help=f"Look into the steps for NEW, LAYOUT, STALL and DURABLE; default up to "
    f"{MOST_DETAILED} steps.",
)
@click.option("--all", "everything", is_flag=True, help="Also steps that were deleted.")
@click.option("--check", is_flag=True, help="Exit with 1 if a step is damaged.")
def ls(root: str, full: bool | None, everything: bool, check: bool) -> None:
    """List the checkpoints at and below ROOT; of several runs, one table each.

    STATE is committed, in flight (files of a save that may still be committed, or that crashed),
    aborted (the save failed), damaged (files are missing or have the wrong length, also those of
    one of its parts), stock (not written by ray_dcp), deleted, or unreadable. PARTS are those of a
    step of a job, or the items of a step; sizes are of all of them. SIZE is of all files, with
    their records and tables. NEW is the number of bytes of values that the step before in its run
    does not have, by stored hashes; all of them in its first step. Where a run has several metrics,
    a * is before the best value of each. TRUST is the verdict by the name with which the run's
    manager trusts steps. REUSED is the number of bytes that the save did not write, as it linked or
    copied files of an earlier step. STALL is how long training waited; DURABLE is the time until
    the commit.
    """
    run = run_of(root)
    steps = run.steps if everything else run.present
    looks_in = len(steps) <= MOST_DETAILED if full is None else full
    now_s = time.time()
    if says(JSON):
        told([listed(step, now_s, full=looks_in) for step in steps])
    else:
        shown = [(one, one.steps if everything else one.present) for one in run.runs]
        parts = [(one, whole_steps(some)) for one, some in shown]
        several, lines = len(parts) > 1, list[str]()
        for part, some in parts:
            if several and some:
                lines += ["", styled(f"{folder_of(part, run)}: {run_text(part)}", "bold")]
            lines += _lines(part, some, now_s, full=looks_in)
        if not lines:
            lines = [f"no checkpoints at or below {root}"]
        num_hidden = len(whole_steps(run.steps)) - len(whole_steps(steps))
        if num_hidden:
            lines.append(f"{count_text(num_hidden, 'deleted step')}: --all")
        told(None, *(lines[1:] if several else lines))
    if check and any(step.state == "damaged" for step in run):
        sys.exit(1)


def run_of(root: str) -> RunView:
    """Returns the run at a path; it is empty for a directory without checkpoints.

    Raises:
        CheckpointNotFoundError: The directory does not exist; the message suggests similar paths.
    """
    if os.path.isfile(root):
        raise CheckpointNotFoundError(
            f"expected a directory, but {root} is a file: ray-dcp show shows a safetensors file, "
            f"ray-dcp import makes a checkpoint of one of torch.save"
        )
    check_answers(root)
    place = Target(root)
    with progress("listing", root) as meter:
        run = RunView(place, list_checkpoints(place, told=partial(meter.begin, root)))
    if not len(run) and "://" not in root and not Path(root).exists():
        raise CheckpointNotFoundError(
            f"expected a directory, but there is no {root}{nearest_paths(root)}"
        )
    return run


def listed(step: StepView, now_s: float, *, full: bool) -> dict[str, Any]:
    """Returns a step as a value for JSON."""
    looks_in = full and step.is_readable
    return {
        "name": step.name,
        "step": step.step,
        "state": step.state,
        "num_bytes": step.num_bytes,
        "num_ranks": step.num_ranks,
        "age_s": None if step.created_s is None else round(max(0.0, now_s - step.created_s), 3),
        "detail": step.detail,
        "in_flight": list(step.in_flight),
        "metrics": dict(step.metrics),
        "metadata": dict(step.metadata),
        "tags": list(step.tags),
        "trusted": step.is_trusted,
        "note": step.note,
        **_parts_value(step, full=full),
        "new_bytes": step.new_bytes if looks_in else None,
        "layout": step.layout if looks_in else None,
        "stall_s": step.stall_s if full else None,
        "durable_s": step.durable_s if full else None,
        **({f"{how}_bytes": count for how, count in step.reused_bytes.items()} if full else {}),
    }


def _parts_value(step: StepView, *, full: bool) -> dict[str, Any]:
    if not step.items:
        return {}
    known = step.parts if full else {n: StepPart(folder=one) for n, one in step.items.items()}
    return {"parts": {name: asdict(one) for name, one in known.items()}}


def _lines(run: RunView, steps: Sequence[StepView], now_s: float, *, full: bool) -> list[str]:
    rows = step_cells(run, steps, details=full, now_s=now_s)
    notes = []
    for step, row in zip(steps, rows, strict=True):
        # Why dropped: the name ends with the number of the step, and notes get lines of their own.
        del row["step"], row["note"]
        if step.detail and (step.items or step.state in ("committed", "damaged", "unreadable")):
            notes.append(f"{step.name}: {step.detail}")
        elif step.in_flight and step.state != "in flight":
            notes.append(
                f"{step.name}: {count_text(len(step.in_flight), 'save')} over it in flight"
            )
        if step.note:
            notes.append(f"{step.name}: {step.note}")
    metrics = reversed(metric_names(run))
    lines = table(
        rows,
        left=LEFT,
        least=(*_LEAST, *metrics),
        last=("size",),
        style=lambda column, cell: _STYLES.get(cell, "") if column == "state" else "",
    )
    return [*lines, *notes]


@click.command()
@click.argument("root", type=PLACE)
def du(root: str) -> None:
    """Show the disk usage of each step at and below ROOT.

    DATA belongs to committed checkpoints, LEFT to saves that failed or crashed (see gc). RECORDS
    are manifests, chunk tables and .metadata. OTHER was written by other programs. SHARED takes no
    space of its own: files above have the same bytes (hard links); it is not part of ALL. The total
    includes the records of deleted steps.
    """
    run = run_of(root)
    rows = usage_of(run)
    sums: dict[str, int] = {kind: sum(row.num_bytes[kind] for row in rows) for kind in KINDS}
    total = Usage("total", sums, sum(row.shared_bytes for row in rows))

    def sizes(row: Usage) -> dict[str, int]:
        return {**row.num_bytes, **({"shared": row.shared_bytes} if total.shared_bytes else {})}

    gone = {step.name for step in run} - {step.name for step in run.present}
    cells = [
        {"name": row.name, **{kind: size_text(size) for kind, size in sizes(row).items()},
         "all": size_text(row.total_bytes)}
        for row in (*(one for one in rows if one.name not in gone), total)
    ]  # fmt: skip
    steps = [{"name": row.name, **sizes(row)} for row in rows]
    value = {"path": run.url, "steps": steps, "total": sizes(total)}
    unread = [f"{step.name}: {step.detail}" for step in run if step.state == "unreadable"]
    told(value, *table(cells, left=("name",)), *unread)


@click.command()
@click.argument("root", type=PLACE)
@click.option(
    "--interval",
    type=click.FloatRange(0.0),
    default=5.0,
    show_default=True,
    help="Seconds between looks.",
)
@click.option("--looks", type=click.IntRange(1), help="End after so many looks; else with Ctrl-C.")
def watch(root: str, interval: float, looks: int | None) -> None:
    """Print changes of the run at ROOT: steps that appear, change their state, or disappear.

    Each change is printed as one line or, with --json, as one object per line.
    """
    before: dict[str, str] = {}
    number = 0
    try:
        while looks is None or number < looks:
            if number:
                threading.Event().wait(interval)
            run = run_of(root)
            for change in changes(run, before):
                _print_change(run, *change, first=not number)
            sys.stdout.flush()
            before = {step.name: step.state for step in run if not step.is_item}
            number += 1
    except KeyboardInterrupt as error:
        sys.exit(exit_code_of(error))  # without a message: it is the normal end


def changes(run: RunView, before: dict[str, str]) -> list[tuple[str, str, str]]:
    """Returns `(name, state before, state now)` of each step whose state has changed.

    The state of a step that does not exist is "".

    Args:
        run: The current run.
        before: Earlier state of each step, by name.
    """
    now = {step.name: str(step.state) for step in run if not step.is_item}
    states = [(name, before.get(name, ""), now.get(name, "")) for name in {**now, **before}]
    return [one for one in states if one[1] != one[2] and one[1:] != ("", "deleted")]


def _print_change(run: RunView, name: str, was: str, state: str, *, first: bool) -> None:
    if says(JSON):
        row = listed(run.step(name), time.time(), full=False) if state else {"name": name}
        click.echo(to_json({"was": was, **row, "state": state or "gone"}))
        return
    size = f", {size_text(run.step(name).whole_bytes)}" if state else ""
    moment = "" if first else time.strftime("%H:%M:%S ")
    click.echo(f"{moment}{name}: {f'{was} -> ' if was else ''}{state or 'gone'}{size}")


Level = Literal["ok", "note", "wrong"]
_LEVELS = {"ok": "green", "note": "yellow", "wrong": "red"}
_PACKAGES = ("torch", "ray", "numpy", "pyarrow", "fsspec", "obstore")
_PROBE_BYTES = 16 << 20
_CLOCK_S = 300.0
_LIFECYCLE = (
    "the bucket needs a lifecycle rule AbortIncompleteMultipartUpload (of 7 days, say): parts of "
    "uploads that a killed process began appear in no listing and are paid for"
)


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    level: Level
    what: str
    told: str


@click.command()
@click.argument("root", type=PLACE)
@click.option(
    "--write",
    is_flag=True,
    help="Try to write as well: whether names can be created once, and how fast. Cleans up.",
)
def doctor(root: str, write: bool) -> None:
    """Find problems of the run at ROOT, or of its storage.

    Exit status: 0 no problem, 1 a checkpoint is damaged, 2 the storage refuses.
    """
    found = [_versions()]
    storage = open_storage(root)
    began_s = time.perf_counter()
    run = run_of(root)
    took = seconds_text(time.perf_counter() - began_s)
    found.append(Finding("ok", "reading", f"{count_text(len(run), 'checkpoint')} listed in {took}"))
    if storage.url.startswith(("s3://", "gs://")):
        found.append(Finding("note", "uploads", _LIFECYCLE))
    found += _steps(run)
    refused = False
    if write:
        try:
            found += _probe(storage)
        except CheckpointError as error:
            refused = True
            found.append(Finding("wrong", "writing", str(error)))
    findings = [asdict(one) for one in found]
    width = max(len(one.what) for one in found)
    lines = []
    for one in found:
        level = styled(f"{one.level:<5}", _LEVELS[one.level])
        parts = fitted(one.told, indent=width + 7)
        lines += [f"{level} {one.what:<{width}} {parts[0]}", *parts[1:]]
    told({"path": run.url, "findings": findings}, *lines)
    if refused:
        sys.exit(2)
    if any(one.level == "wrong" for one in found):
        sys.exit(1)


def _versions() -> Finding:
    told = [f"python {platform.python_version()}", f"ray-dcp {ray_dcp.__version__}"]
    for name in _PACKAGES:
        try:
            told.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            told.append(f"no {name}")
    return Finding("ok", "versions", ", ".join(told))


def _steps(run: RunView) -> Iterator[Finding]:
    for step in run:
        for level, what in _warnings_of(step):
            yield Finding(level, step.name, what)
    for part in run.runs:
        folder = folder_of(part, run)
        yield from _latest(part, "latest" if folder == "." else f"{folder}@latest")


def _latest(run: RunView, name: str) -> Iterator[Finding]:
    """Yields whether the newest step of a single run can be opened."""
    if not any(step.is_readable for step in run):
        yield Finding("note", name, "there is no checkpoint to load")
        return
    try:
        newest = run.step("latest")
    except CheckpointError as error:
        yield Finding("wrong", name, str(error))
        return
    try:
        if newest.view.checkpoint.metadata_is_stale:
            told = ".metadata is missing or older: stock DCP does not see it; see ray-dcp metadata"
            yield Finding("note", newest.name, told)
        size = size_text(newest.view.num_bytes)
        yield Finding("ok", name, f"{newest.name} can be opened, {size}")
    except CheckpointError as error:
        yield Finding("wrong", newest.name, str(error))


def _warnings_of(step: StepView) -> Iterator[tuple[Level, str]]:
    if step.state in ("damaged", "unreadable"):
        yield "wrong", f"{step.state}: {step.detail}"
    if step.state == "in flight":
        yield "note", f"a save under way, or that crashed: {step.detail}; see ray-dcp gc"
    elif step.in_flight:
        saves = count_text(len(step.in_flight), "save")
        yield "note", f"{saves} over it under way, or crashed; see ray-dcp gc"
    if step.state in ("committed", "aborted", "deleted") and step.detail:
        yield "note", f"{step.state}: {step.detail}"
    if step.created_s is not None and step.created_s > time.time() + _CLOCK_S:
        yield "note", "was saved in the future: the clocks of this machine and of the job differ"


def _probe(storage: Storage) -> Iterator[Finding]:
    """Tries the operations of a save, on keys of its own, and removes these again."""
    key = f".ray-dcp-doctor-{secrets.token_hex(6)}"
    try:
        storage.write(key, b"1", create=True)
        once = False
        try:
            storage.write(key, b"2", create=True)
        except KeyExistsError:
            once = storage.traits.create_if_absent
        told = "created twice: only one job at a time may save to a checkpoint"
        if once:
            told = "created once, whoever tries: saves of two jobs can't mix"
        yield Finding("ok" if once else "note", "commit", f"a name can be {told}")
        data = secrets.token_bytes(1 << 20)
        began_s = time.perf_counter()
        writer = storage.open_writer(f"{key}.part")
        try:
            for _ in range(_PROBE_BYTES >> 20):
                writer.write(data)
            writer.commit()
        finally:
            writer.abort()
        speed = size_text(int(_PROBE_BYTES / (time.perf_counter() - began_s)))
        began_s = time.perf_counter()
        same = storage.read(f"{key}.part", _PROBE_BYTES - len(data), len(data)) == data
        took = seconds_text(time.perf_counter() - began_s)
        told = f"{speed}/s by one thread; 1 MiB read in {took}"
        yield Finding("ok" if same else "wrong", "writing", told)
    finally:
        storage.delete([key, f"{key}.part"])


@click.command()
@click.argument("run", type=PLACE)
@click.argument("file", default="report.html", type=click.Path(dir_okay=False))
def report(run: str, file: str) -> None:
    """Write pictures of the steps of RUN, and of its newest step, as one page to FILE.

    The page is self-contained. No tensor is read.
    """
    found = run_at(run)
    parts = [part for section in _sections(found) for part in section]
    page = Picture(div(*parts)).page(f"{found.url}: {run_text(found)}")
    written(file, page)
    path, num_bytes = os.path.abspath(file), len(page.encode())
    value = {"path": found.url, "file": path, "num_bytes": num_bytes}
    told(value, f"wrote {path}, {size_text(num_bytes)}")


def _sections(run: RunView) -> Iterator[tuple[str, str]]:
    """Yields headings with pictures, or with the reason why a picture can't be drawn."""
    yield "", picture_steps(run).html
    for name in sorted({name for step in run for name in step.metrics}):
        lines = {
            name if len(run.runs) == 1 else folder_of(part, run): [
                (float(one.step), one.metrics[name])
                for one in part
                if one.step is not None and name in one.metrics
            ]
            for part in run.runs
        }
        yield heading(name), line_chart(lines).html
    if len(run.runs) > 1 or not any(step.is_readable for step in run):
        return
    try:
        newest = run.step("latest")
        view = newest.view
        yield heading("the newest step"), Picture(view._repr_html_()).html
        largest = max(view.tensors, key=lambda name: view.tensors[name].num_bytes, default=None)
        if largest is not None:
            ranks = max(1, (view.world_size or 1) * 2)
            yield heading("its largest tensor"), picture_layout(view, largest).html
            drawn = picture_reshard(view, largest, ranks)
            yield heading("the same on twice as many ranks"), drawn.html
        before = run.before(newest)
        if before is not None:
            diff = before.view.diff(view, read=False)
            yield heading("what changed since the step before"), picture_diff(diff).html
    except CheckpointError as error:
        yield "", aside(error.message)
