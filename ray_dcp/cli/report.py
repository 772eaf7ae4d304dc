"""The command `report`: one HTML file with pictures of a run. Imports neither torch nor Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator

import click

from ray_dcp.cli.output import told
from ray_dcp.cli.places import run_at, written
from ray_dcp.errors import CheckpointError
from ray_dcp.view.pictures import (
    Picture,
    line_chart,
    picture_diff,
    picture_layout,
    picture_reshard,
    picture_steps,
)
from ray_dcp.view.pictures.drawing import aside, div, heading
from ray_dcp.view.pictures.tables import run_text
from ray_dcp.view.run_view import RunView
from ray_dcp.view.wording import size_text


@click.command()
@click.argument("run")
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
    metrics = {name for step in run for name in step.metrics}
    steps = [step for step in run if step.step is not None]
    for name in sorted(metrics):
        points = [(float(s.step or 0), s.metrics[name]) for s in steps if name in s.metrics]
        yield heading(name), line_chart({name: points}).html
    if not any(step.is_readable for step in run):
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
