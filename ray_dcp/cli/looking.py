"""The commands `du` and `watch`: what takes space, and what happens. No torch, no ray."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter

import click

from ray_dcp.cli.listing import listed, run_of
from ray_dcp.cli.output import Rows, as_json, print_json
from ray_dcp.view.run_view import RunView
from ray_dcp.view.usage import KINDS, usage_of
from ray_dcp.view.wording import size_text

__all__ = ["changes", "du", "watch"]


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
@click.option("--interval", type=click.FloatRange(0.0), default=5.0, show_default=True,
              help="Seconds between looks.")  # fmt: skip
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
