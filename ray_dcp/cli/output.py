"""What commands print with: tables that fit, JSON, questions, and bars on standard error."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from ray_dcp.cli.main import INTERRUPTED, JSON
from ray_dcp.errors import InvalidRequestError
from ray_dcp.view.pictures.drawing import shortened

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_LEAST_NAME = 12
"""Letters to which a name is shortened at most where a table is too wide."""

dry_run = click.option("--dry-run", is_flag=True, help="Only print what would be done.")
yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


def says(option: str) -> bool:
    """Whether an option of every command was given: `JSON` or `VERBOSE` of `main`."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(option))


def told(value: Any, *lines: str) -> None:
    """Prints what a command found or did: with `--json` a value as JSON, else lines for people."""
    if says(JSON):
        click.echo(json.dumps(value, indent=2, default=str))
    elif lines:
        click.echo("\n".join(lines))


def interrupted(value: dict[str, Any], *lines: str) -> NoReturn:
    """Prints what was found or done until Ctrl-C, and ends the command."""
    told({**value, "interrupted": True}, *lines)
    click.echo("Error: interrupted", err=True)
    sys.exit(INTERRUPTED)


def screen_width() -> int | None:
    """Returns how many columns there are; None where the output is no terminal.

    `COLUMNS` counts in any case, as for other programs.
    """
    if "COLUMNS" not in os.environ and not sys.stdout.isatty():
        return None
    return max(shutil.get_terminal_size().columns, 20)


def table(
    rows: Sequence[Mapping[str, object]],
    *,
    left: Sequence[str] = (),
    least: Sequence[str] = (),
    style: Callable[[str, str], str] = lambda column, cell: "",
) -> list[str]:
    """Returns a table as lines of text that are no wider than the screen.

    Columns without a value are left out. Where there is no room the columns of `least` are dropped,
    the first of them first; then the longest left-aligned column is shortened in its middle.

    Args:
        rows: Cells by column, the same columns in each.
        left: Columns whose cells begin at the left.
        least: Columns that may be dropped, the least important first.
        style: Style of a cell on a terminal, by column and text.
    """
    cells = [{column: str(cell) for column, cell in row.items()} for row in rows]
    if sys.stdout.isatty():
        # Why: a name in a checkpoint must not move the cursor of who looks at it.
        cells = [
            {c: _CONTROL.sub("\N{REPLACEMENT CHARACTER}", t) for c, t in r.items()} for r in cells
        ]
    columns = [column for column in cells[0] if any(row[column] for row in cells)] if cells else []
    width = {column: max(len(column), *(len(row[column]) for row in cells)) for column in columns}
    room = screen_width()
    for column in least:
        if room is None or sum(width[c] + 2 for c in columns) - 2 <= room:
            break
        columns = [one for one in columns if one != column]
    over = 0 if room is None else sum(width[c] + 2 for c in columns) - 2 - room
    names = [column for column in columns if column in left]
    if over > 0 and names:
        longest = max(names, key=lambda column: width[column])
        width[longest] = max(width[longest] - over, _LEAST_NAME)

    def line(row: Mapping[str, str], look: Callable[[str, str], str]) -> str:
        told = []
        for column in columns:
            text, is_left = row[column], column in left
            text = shortened(text if text or is_left else "-", width[column])
            text = text.ljust(width[column]) if is_left else text.rjust(width[column])
            told.append(styled(text, look(column, row[column])))
        return "  ".join(told).rstrip()

    head = line({column: column.upper() for column in columns}, lambda column, cell: "")
    return [styled(head, "bold"), *(line(row, style) for row in cells)] if columns else []


def styled(text: str, style: str) -> str:
    """Returns text with a style on a terminal: a colour, `dim` or `bold`; plain where that is "".

    Where the output is no terminal click takes the style away.
    """
    if style in ("dim", "bold"):
        return click.style(text, **{style: True})
    return click.style(text, fg=style) if style else text


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Draws a bar on a terminal's standard error, for long work; draws nothing elsewhere.

    Args:
        what: Is done, in words.

    Yields:
        A callback for bytes done and in all, from any thread; None where nothing is drawn.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.DownloadColumn(binary_units=True),
        rich.TransferSpeedColumn(),
        rich.TimeElapsedColumn(),
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _is_asked() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def agree(question: str, *, yes: bool) -> None:
    """Asks whether to destroy something; returns only if the answer is yes.

    Args:
        question: Without its question mark.
        yes: The option was given.

    Raises:
        InvalidRequestError: Nobody can be asked.
        click.Abort: The answer is no.
    """
    if yes:
        return
    if not _is_asked():
        raise InvalidRequestError(f"{question}? The input is no terminal: give --yes, or --dry-run")
    if not click.confirm(f"{question}?", err=True):
        raise click.Abort
