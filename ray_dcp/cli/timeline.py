"""The command `timeline`: shows the phases of a save as bars, as JSON, or as a Chrome trace.

It imports neither torch nor Ray.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby

import click

from ray_dcp.cli.main import JSON
from ray_dcp.cli.output import says, screen_width, styled, table, told
from ray_dcp.cli.places import checkpoint_at, written
from ray_dcp.errors import CheckpointNotFoundError
from ray_dcp.format.save_trace import SaveTrace, Span
from ray_dcp.view.trace import chrome_trace
from ray_dcp.view.wording import count_text, seconds_text, size_text

RANK = {"capture": ("░", "yellow"), "plan": ("·", "dim"), "stage": ("▒", "magenta"),
        "write": ("█", "blue"), "commit": ("-", "dim")}  # fmt: skip
"""Character and style of each phase of a rank; the character suffices without colours."""
COORDINATOR = {"look": ("·", "green"), "plan": ("░", "dim"), "build": ("▒", "green"),
               "table": ("▓", "green"), "record": ("█", "green")}  # fmt: skip

_WIDTH, _LEAST_WIDTH, _MOST_WIDTH = 100, 60, 160
_MOST_LANES = 64


@click.command()
@click.argument("path")
@click.option(
    "--chrome",
    "chrome_file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write the trace to FILE for chrome://tracing and ui.perfetto.dev.",
)
def timeline(path: str, chrome_file: str | None) -> None:
    """Show the duration of each phase on each rank when the checkpoint at PATH was saved.

    PATH may be RUN@STEP, such as run@latest. Stragglers in a phase are marked with `!`. All times
    are by the clock of the coordinator.
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
        written(chrome_file, chrome_trace(trace))
        if not says(JSON):
            click.echo(f"wrote {chrome_file}: open it in chrome://tracing or ui.perfetto.dev")
            return
    width = min(max(screen_width() or _WIDTH, _LEAST_WIDTH), _MOST_WIDTH)
    told({"path": view.url, **asdict(trace)}, *gantt(trace, view.url, width))


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
    lines = [
        f"{title}: {trace.mode}, {count_text(trace.world_size, 'rank')}, "
        f"{size_text(trace.num_bytes)}",
        f"committed after {seconds_text(trace.committed_s)}, "
        f"training waited {seconds_text(trace.stall_s)}",
        "",
    ]
    for lane, spans in [*found.items()][: _MOST_LANES + 1]:
        drawn = _bar(spans, end_s, bar, COORDINATOR if lane is None else RANK)
        mark = styled("!", "red") if lane in late else " "
        num_bytes = sum(span.num_bytes for span in spans if span.phase == "write")
        size = f" {size_text(num_bytes):>10}" if num_bytes else ""
        lines.append(f"{names[lane]:<{left}} {mark} {drawn}{size}")
    half, end = seconds_text(end_s / 2), seconds_text(end_s)
    middle = f"{'0':<{bar // 2}}{half}"
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
    for one in trace.stragglers:
        where = f" ({one.where})" if one.where else ""
        lines.append(
            f"! rank {one.rank} ended {one.phase} after {seconds_text(one.seconds)}, half of the "
            f"ranks within {seconds_text(one.median_s)}{where}"
        )
    for who, looks in (("ranks", RANK), ("coordinator", COORDINATOR)):
        legend = "  ".join(f"{mark} {phase}" for phase, (mark, _) in looks.items())
        lines.append(styled(f"{who}: {legend}", "dim"))
    return lines


def _bar(
    spans: tuple[Span, ...], end_s: float, width: int, looks: dict[str, tuple[str, str]]
) -> str:
    cells = [(" ", "")] * width
    # Why in this order: a node agent writes while the rank still copies, so other phases cover
    # `write`, and all cover `commit`, which is mostly waiting.
    order = {"commit": 0, "write": 1}
    for span in sorted(spans, key=lambda span: order.get(span.phase, 2)):
        first = min(int(span.start_s / end_s * width), width - 1)
        # Why at least one cell: a phase of no duration happened, too.
        last = max(first + 1, min(round(span.stop_s / end_s * width), width))
        for cell in range(max(first, 0), last):
            cells[cell] = looks.get(span.phase, ("?", ""))
    runs = ((style, [*run]) for style, run in groupby(cells, lambda cell: cell[1]))
    return "".join(styled("".join(mark for mark, _ in run), style) for style, run in runs)
