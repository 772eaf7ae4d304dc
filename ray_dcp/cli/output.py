"""Output of the commands: tables fitted to the terminal, JSON, questions, and progress."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from ray_dcp.cli.main import INTERRUPTED, JSON
from ray_dcp.errors import InvalidRequestError
from ray_dcp.view.drawing import shortened
from ray_dcp.view.progress import Meter, reporting
from ray_dcp.view.wording import printable

_LEAST_NAME = 12
"""Minimum number of characters to which a name is shortened if a table is too wide."""

dry_run = click.option("--dry-run", is_flag=True, help="Only print what would be done.")
yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


def says(option: str) -> bool:
    """Returns whether a common option was given: `JSON` or `VERBOSE` of `main`."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(option))


def told(value: Any, *lines: str) -> None:
    """Prints the result of a command: with `--json` a value as JSON, else lines for people."""
    if says(JSON):
        click.echo(json.dumps(value, indent=2, default=str))
    elif lines:
        click.echo("\n".join(lines))


def interrupted(value: dict[str, Any], *lines: str) -> NoReturn:
    """Prints the partial result after Ctrl-C, and ends the command."""
    told({**value, "interrupted": True}, *lines)
    click.echo("Error: interrupted", err=True)
    sys.exit(INTERRUPTED)


def screen_width() -> int | None:
    """Returns the width of the terminal in columns; None if the output is not a terminal.

    The environment variable `COLUMNS` takes precedence, as for other programs.
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
    """Returns a table as lines of text that fit the terminal.

    Columns without values are left out. If the table is too wide, columns of `least` are dropped in
    order; then the cells of the widest left-aligned column are shortened in the middle.

    Args:
        rows: Cells by column; all rows have the same columns.
        left: Columns that are left-aligned.
        least: Columns that may be dropped, the least important first.
        style: Returns the style of a cell on a terminal, by column and text.
    """
    cells = [{column: str(cell) for column, cell in row.items()} for row in rows]
    if sys.stdout.isatty():
        cells = [{column: printable(text) for column, text in row.items()} for row in cells]
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
    """Returns text with a style: a colour, `dim`, `bold`, or "" for none.

    click removes styles if the output is not a terminal.
    """
    if style in ("dim", "bold"):
        return click.style(text, **{style: True})
    return click.style(text, fg=style) if style else text


@contextmanager
def progress(doing: str, name: str, sizes: Sequence[int] = ()) -> Iterator[Meter]:
    """Shows progress on standard error: a bar on a terminal, else a line from time to time.

    Args:
        doing: As `Progress.doing`.
        name: As `Progress.name`.
        sizes: As for `Meter`.

    Yields:
        What the work counts into.
    """
    with reporting(True, doing, name, sizes=sizes, ends=False) as meter:
        yield meter or Meter(doing, name, sizes)


def printed(meter: Meter, *lines: str) -> None:
    """Prints a partial result as soon as there is one; nothing with `--json`."""
    if not says(JSON):
        with meter.hidden():
            click.echo("\n".join(lines))
            sys.stdout.flush()


def _is_asked() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def agree(question: str, *, yes: bool) -> None:
    """Asks the user to confirm a destructive operation; returns only if confirmed.

    Args:
        question: The question, without its question mark.
        yes: The option `--yes` was given.

    Raises:
        InvalidRequestError: The input is not a terminal.
        click.Abort: The answer is no.
    """
    if yes:
        return
    if not _is_asked():
        raise InvalidRequestError(f"{question}? The input is no terminal: give --yes, or --dry-run")
    if not click.confirm(f"{question}?", err=True):
        raise click.Abort
