"""The commands `ls`, `du` and `watch`: the steps of a run, what takes space, and what happens.

They load neither torch nor ray.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click

from ray_dcp.cli.output import Rows, as_json, number_text, print_json, progress
from ray_dcp.cli.places import check_answers
from ray_dcp.errors import CheckpointError, CheckpointNotFoundError
from ray_dcp.protocol.messages import Target
from ray_dcp.view.listing import list_checkpoints
from ray_dcp.view.run_view import KINDS, RunView, StepView, nearest_paths, usage_of
from ray_dcp.view.wording import age_text, count_text, metric_names, seconds_text, size_text

MOST_LOOKED_INTO = 50
"""Of so many steps what is in them is told without being asked for."""
_MOST_METRICS = 4
_STYLES = {"committed": "green", "damaged": "red", "in flight": "yellow", "aborted": "yellow",
           "deleted": "dim"}  # fmt: skip


@click.command()
@click.argument("root")
@click.option(
    "--full/--brief",
    default=None,
    help=f"Look into the steps for NEW, LAYOUT, STALL and DURABLE; default up to "
    f"{MOST_LOOKED_INTO} steps.",
)
@as_json
def ls(root: str, full: bool | None, as_json: bool) -> None:
    """List the checkpoints at and below ROOT.

    STATE is committed, in flight (files of a save that may still be committed, or that crashed),
    aborted (a save failed), damaged (files are missing or have another length), stock (not written
    by ray_dcp), or deleted. NEW are the bytes that the step before does not have, by stored hashes;
    STALL is how long training waited, DURABLE how long it took until the commit.
    """
    run = run_of(root)
    looks_in = len(run) <= MOST_LOOKED_INTO if full is None else full
    now_s = time.time()
    if as_json:
        print_json([listed(step, now_s, full=looks_in) for step in run])
        return
    if not len(run):
        click.echo(f"no checkpoints at or below {root}")
        return
    _print(run, now_s, full=looks_in)


def run_of(root: str) -> RunView:
    """Returns a run; an empty one for a directory without checkpoints.

    Raises:
        CheckpointNotFoundError: There is no such directory; the message offers the nearest.
    """
    if os.path.isfile(root):
        raise CheckpointNotFoundError(
            f"expected a directory, but {root} is a file: ray-dcp show shows a safetensors file, "
            f"ray-dcp import makes a checkpoint of one of torch.save"
        )
    check_answers(root)
    place = Target(root)
    with progress("looking") as told:
        run = RunView(place, list_checkpoints(place, told=told))
    if not len(run) and "://" not in root and not Path(root).exists():
        raise CheckpointNotFoundError(
            f"expected a directory, but there is no {root}{nearest_paths(root)}"
        )
    return run


def listed(step: StepView, now_s: float, *, full: bool) -> dict[str, Any]:
    """Returns a step as JSON has it."""
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
        "note": step.note,
        "new_bytes": step.new_bytes if looks_in else None,
        "layout": step.layout if looks_in else None,
        "stall_s": step.stall_s if full else None,
        "durable_s": step.durable_s if full else None,
    }


def _print(run: RunView, now_s: float, *, full: bool) -> None:
    metrics = metric_names(((step.step, step.metrics) for step in run), _MOST_METRICS)
    has_tags = any(step.tags for step in run)
    more = ("new<", "layout", "stall<", "durable<") if full else ()
    table = Rows(
        "name",
        "step<",
        "state",
        "size<",
        "ranks<",
        "age<",
        *more,
        *(f"{name}<" for name in metrics),
        *(["tags"] if has_tags else []),
    )
    latest, best = _marked(run)
    for step in run:
        mark = " *latest" if step is latest else ""
        mark += " *best" if step is best else ""
        state = f"{step.state}{mark}"
        table.add(
            step.name,
            "-" if step.step is None else step.step,
            state,
            size_text(step.num_bytes),
            "-" if step.num_ranks is None else step.num_ranks,
            "-" if step.created_s is None else age_text(now_s - step.created_s),
            *(_details(step) if full else ()),
            *(number_text(step.metrics[n]) if n in step.metrics else "-" for n in metrics),
            *([" ".join(step.tags)] if has_tags else []),
            styled=(2, _STYLES.get(step.state, "")),
        )
    table.print()
    for step in run:
        if step.state == "damaged":
            click.echo(f"{step.name}: {step.detail}")
        elif step.in_flight and step.state != "in flight":
            click.echo(f"{step.name}: {count_text(len(step.in_flight), 'save')} over it in flight")
        if step.note:
            click.echo(f"{step.name}: {step.note}")


def _marked(run: RunView) -> tuple[StepView | None, StepView | None]:
    """Returns the latest and the best step, where it is clear which that are."""
    found: list[StepView | None] = []
    for key in ("latest", "best"):
        try:
            found.append(run.step(key))
        except CheckpointError:
            found.append(None)
    return found[0], found[1]


def _details(step: StepView) -> list[str]:
    new = step.new_bytes if step.is_readable else None
    return [
        "-" if new is None else size_text(new),
        (step.layout if step.is_readable else None) or "-",
        "-" if step.stall_s is None else seconds_text(step.stall_s),
        "-" if step.durable_s is None else seconds_text(step.durable_s),
    ]


@click.command()
@click.argument("root")
@as_json
def du(root: str, as_json: bool) -> None:
    """Tell what takes how much space at and below ROOT, step by step.

    DATA is of what stands, LEFT of attempts that do not stand (see gc), RECORDS are manifests,
    chunk tables and .metadata, OTHER is what other programs wrote.
    """
    run = run_of(root)
    rows = usage_of(run)
    total = sum((Counter(row.num_bytes) for row in rows), Counter[str]())
    if as_json:
        print_json(
            {
                "path": run.url,
                "steps": [{"name": row.name, **row.num_bytes} for row in rows],
                "total": {kind: total[kind] for kind in KINDS},
            }
        )
        return
    table = Rows("name", *(f"{kind}<" for kind in KINDS), "all<")
    for name, found in [*((row.name, row.num_bytes) for row in rows), ("total", dict(total))]:
        sizes = [found.get(kind, 0) for kind in KINDS]
        table.add(name, *map(size_text, sizes), size_text(sum(sizes)))
    table.print()


@click.command()
@click.argument("root")
@click.option(
    "--interval",
    type=click.FloatRange(0.0),
    default=5.0,
    show_default=True,
    help="Seconds between looks.",
)
@click.option("--looks", type=click.IntRange(1), help="End after so many; else with Ctrl-C.")
@as_json
def watch(root: str, interval: float, looks: int | None, as_json: bool) -> None:
    """Tell what happens to the run at ROOT: steps that come, change their state, and go.

    A line for each; with --json an object for each line.
    """
    before: dict[str, str] = {}
    waiting = threading.Event()
    number = 0
    try:
        while True:
            run = run_of(root)
            _tell(run, before, first=not number, as_json=as_json)
            before = {step.name: step.state for step in run}
            number += 1
            if looks is not None and number >= looks:
                return
            waiting.wait(interval)
    except KeyboardInterrupt:
        return  # that is how it ends


def changes(run: RunView, before: dict[str, str]) -> list[tuple[str, str, str]]:
    """Returns `(name, state before, state now)` of each step that is not as it was.

    Args:
        run: As it is now.
        before: State by name, as it was. One that was not there, or is not any more, has "".
    """
    now = {step.name: str(step.state) for step in run}
    return [
        (name, before.get(name, ""), now.get(name, ""))
        for name in [*now, *(name for name in before if name not in now)]
        if before.get(name, "") != now.get(name, "")
    ]


def _tell(run: RunView, before: dict[str, str], *, first: bool, as_json: bool) -> None:
    now_s = time.time()
    for name, was, state in changes(run, before):
        if as_json:
            row = listed(run.step(name), now_s, full=False) if state else {"name": name}
            click.echo(json.dumps({"was": was, **row, "state": state or "gone"}))
            continue
        size = size_text(run.step(name).num_bytes) if state else ""
        moment = "" if first else time.strftime("%H:%M:%S ")
        what = state or "gone"
        click.echo(
            f"{moment}{name}: {f'{was} -> ' if was else ''}{what}{f', {size}' if size else ''}"
        )
    sys.stdout.flush()
