"""The command `timeline`: the course of a save as bars for people, as JSON, or for Chrome's viewer.

It loads neither torch nor ray.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import click

from ray_dcp.cli.output import print_json, styled
from ray_dcp.cli.places import checkpoint_at
from ray_dcp.errors import CheckpointNotFoundError
from ray_dcp.format.save_trace import SaveTrace, Span
from ray_dcp.view.trace import chrome_trace
from ray_dcp.view.wording import count_text, seconds_text, size_text

MARKS = {"capture": "░", "plan": "·", "stage": "▒", "write": "█", "commit": "-"}
"""How a phase of a rank is drawn; also without colours."""
STYLES = {"capture": "yellow", "plan": "dim", "stage": "magenta", "write": "blue", "commit": "dim"}
COORDINATOR_MARKS = {"look": "·", "plan": "░", "build": "▒", "table": "▓", "record": "█"}

_WIDTH, _LEAST_BAR = 100, 20
_MOST_LANES = 64


@click.command()
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of bars.")
@click.option(
    "--chrome",
    "chrome_file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write the trace to FILE for chrome://tracing and ui.perfetto.dev.",
)
def timeline(path: str, as_json: bool, chrome_file: str | None) -> None:
    """Show what took how long on which rank when the checkpoint at PATH was saved.

    PATH may be RUN@STEP, as run@latest. Ranks that were late in a phase are marked with `!`. All
    times are those of the coordinator.
    """
    view = checkpoint_at(path)
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
        _write_whole(Path(chrome_file), chrome_trace(trace))
        if not as_json:
            click.echo(f"wrote {chrome_file}: open it in chrome://tracing or ui.perfetto.dev")
            return
    if as_json:
        print_json({"path": view.url, **asdict(trace)})
        return
    terminal = sys.stdout.isatty()
    width = min(shutil.get_terminal_size().columns, 160) if terminal else _WIDTH
    click.echo("\n".join(gantt(trace, view.url, max(width, 60))))


def gantt(trace: SaveTrace, title: str, width: int = _WIDTH) -> list[str]:
    """Returns a trace as lines of styled text, each at most `width` long but for the title.

    Args:
        trace: Of a save.
        title: Its path.
        width: Columns, at least 60.
    """
    found = trace.lanes()
    names = {lane: "coordinator" if lane is None else f"rank {lane}" for lane in found}
    left = max(len(name) for name in names.values())
    bar = max(width - left - 22, _LEAST_BAR)
    late = {straggler.rank for straggler in trace.stragglers}
    end_s = max([trace.committed_s, *(span.stop_s for span in trace.spans)]) or 1e-9
    lines = [
        f"{title}: {trace.mode}, {count_text(trace.world_size, 'rank')}, "
        f"{size_text(trace.num_bytes)}",
        f"committed after {seconds_text(trace.committed_s)}, "
        f"training waited {seconds_text(trace.stall_s)}",
        "",
    ]
    for lane, spans in [*found.items()][: _MOST_LANES + 1]:
        drawn = _bar(spans, end_s, bar, COORDINATOR_MARKS if lane is None else MARKS)
        mark = styled("!", "red") if lane in late else " "
        num_bytes = sum(span.num_bytes for span in spans if span.phase == "write")
        told = f" {size_text(num_bytes):>10}" if num_bytes else ""
        lines.append(f"{names[lane]:<{left}} {mark} {drawn}{told}")
    lines.append(_axis(left, bar, end_s))
    hidden = trace.world_size - len(trace.ranks)
    if hidden > 0:
        lines.append(f"… and {hidden} more ranks, which are in these numbers:")
    lines += ["", *_table(trace), ""]
    for straggler in trace.stragglers:
        where = f" ({straggler.where})" if straggler.where else ""
        lines.append(
            f"! rank {straggler.rank} ended {straggler.phase} after "
            f"{seconds_text(straggler.seconds)}, half of the ranks within "
            f"{seconds_text(straggler.median_s)}{where}"
        )
    lines += [f"! another stager took over from rank {r}'s" for r, _ in trace.takeovers]
    for who, marks in (("ranks", MARKS), ("coordinator", COORDINATOR_MARKS)):
        legend = "  ".join(f"{mark} {phase}" for phase, mark in marks.items())
        lines.append(styled(f"{who}: {legend}", "dim"))
    return lines


def _bar(spans: tuple[Span, ...], end_s: float, width: int, marks: dict[str, str]) -> str:
    cells = [(" ", "")] * width
    # Why in this order: a stager writes while the rank still copies, and waiting tells least.
    order = {"commit": 0, "write": 1}
    for span in sorted(spans, key=lambda span: order.get(span.phase, 2)):
        first = min(int(span.start_s / end_s * width), width - 1)
        # Why at least one: what took no time at all took place.
        last = max(first + 1, min(round(span.stop_s / end_s * width), width))
        for cell in range(max(first, 0), last):
            cells[cell] = marks.get(span.phase, "?"), STYLES.get(span.phase, "green")
    runs = ((style, "".join(mark for mark, _ in run)) for (_, style), run in groupby(cells))
    return "".join(styled(text, style) for style, text in runs)


def _axis(left: int, width: int, end_s: float) -> str:
    half = seconds_text(end_s / 2)
    end = seconds_text(end_s)
    middle = f"{'0':<{width // 2}}{half}"
    return styled(" " * (left + 3) + f"{middle:<{max(width - len(end), 0)}}{end}", "dim")


def _table(trace: SaveTrace) -> list[str]:
    lines = [f"{'PHASE':<8} {'RANKS':>6} {'MEDIAN':>9} {'P99':>9} {'MAX':>9} {'SIZE':>11}"]
    for phase in trace.phases:
        size = size_text(phase.num_bytes) if phase.num_bytes else "-"
        lines.append(
            f"{phase.phase:<8} {phase.num_ranks:>6} {seconds_text(phase.median_s):>9} "
            f"{seconds_text(phase.p99_s):>9} {seconds_text(phase.max_s):>9} {size:>11}"
        )
    return lines


def _write_whole(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all."""
    try:
        fd, temp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(fd, "w") as file:
                file.write(text)
            os.chmod(temp, 0o644)
            os.replace(temp, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temp)
            raise
    except OSError as error:
        raise click.ClickException(f"{path} can't be written: {error.strerror}") from error
