"""Output of the commands: tables fitted to the terminal, JSON, questions, and progress."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import click

from ray_dcp.cli.main import INTERRUPTED, JSON, exit_code_of
from ray_dcp.core.json_text import to_json
from ray_dcp.errors import InvalidRequestError
from ray_dcp.view.progress import Meter, reporting
from ray_dcp.view.wording import printable

_LEAST_TEXT = 12
"""Minimum number of characters of a line of a head, and of a name where 24 are too many."""
_LEAST_NAME = 24
"""Minimum number of characters of a line of a name that wraps."""
_BREAKS = re.compile(r"[./_=\- ]")
"""Characters after which a name wraps."""

dry_run = click.option("--dry-run", is_flag=True, help="Only print what would be done.")
pattern = click.option("--tensor", "pattern", metavar="GLOB", help="Only names that match.")
part = click.option("--part", metavar="NAME", help="This part, or item, of a step.")
patterns = click.option(
    "--tensor",
    "include",
    metavar="GLOB",
    multiple=True,
    help="Only names that match; may be given often.",
)
dtype = click.option("--dtype", help="What floating tensors are cast to, as bf16 or float32.")
yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


def says(option: str) -> bool:
    """Returns whether a common option was given: `JSON` or `VERBOSE` of `main`."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(option))


def told(value: Any, *lines: str) -> None:
    """Prints the result of a command: with `--json` a value as JSON, else lines for people."""
    if says(JSON):
        click.echo(to_json(value, indent=2, default=str))
    elif lines:
        click.echo("\n".join(lines))


def interrupted(value: dict[str, Any], *lines: str) -> NoReturn:
    """Prints the partial result after Ctrl-C or another signal, and ends the command."""
    code = exit_code_of(sys.exc_info()[1])
    try:
        told({**value, "interrupted": True}, *lines)
        click.echo("Error: interrupted", err=True)
    except OSError:
        # After SIGHUP there is no terminal any more.
        if code == INTERRUPTED:
            raise
    sys.exit(code)


def screen_width() -> int | None:
    """Returns the width of the terminal in columns; None if the output is not a terminal.

    The environment variable `COLUMNS` takes precedence, as for other programs.
    """
    if "COLUMNS" not in os.environ and not sys.stdout.isatty():
        return None
    return max(shutil.get_terminal_size().columns, 20)


def fitted(text: str, *, indent: int = 0) -> list[str]:
    """Returns the lines of a text for the terminal; all but the first are indented.

    Args:
        text: The text.
        indent: Number of characters before the text in the first line.
    """
    room = screen_width()
    if room is None:
        return [text]
    lines = textwrap.wrap(text, max(room - indent, _LEAST_NAME), break_long_words=False) or [""]
    return [lines[0], *(f"{' ' * indent}{line}" for line in lines[1:])]


def table(
    rows: Sequence[Mapping[str, object]],
    *,
    left: Sequence[str] = (),
    least: Sequence[str] = (),
    last: Sequence[str] = (),
    style: Callable[[str, str], str] = lambda column, cell: "",
) -> list[str]:
    """Returns a table as lines of text that fit the terminal.

    Columns without values are left out. If the table is too wide, long heads wrap; columns of
    `least` are dropped; then long cells of the other left-aligned columns wrap; then columns of
    `last` are dropped. The last line lists what was dropped. No cell is shortened.

    Args:
        rows: Cells by column; all rows have the same columns.
        left: Columns that are left-aligned.
        least: Columns that are dropped before names wrap, the least important first.
        last: Columns that are dropped if names wrap and the table is still too wide.
        style: Returns the style of a cell on a terminal, by column and text.
    """
    cells = [{column: str(cell) for column, cell in row.items()} for row in rows]
    if sys.stdout.isatty() or _has_colors():
        cells = [{column: printable(text) for column, text in row.items()} for row in cells]
    columns = [column for column in cells[0] if any(row[column] for row in cells)] if cells else []
    width = {column: max(len(column), *(len(row[column]) for row in cells)) for column in columns}
    room = screen_width()
    if room is not None and sum(width.values()) + 2 * (len(width) - 1) > room:
        for column in width:  # long heads, such as names of metrics, wrap first
            least_head = min(len(column), _LEAST_TEXT)
            width[column] = max(least_head, *(len(row[column]) for row in cells))
    shown = width if room is None else _fit_columns(width, room, left, least, last)

    def lines(row: Mapping[str, str], look: Callable[[str, str], str]) -> Iterator[str]:
        parts: dict[str, list[str]] = {}
        for column, most in shown.items():
            text = row[column] if row[column] or column in left else "-"
            parts[column] = _wrap(text, most)
        for number in range(max(map(len, parts.values()))):
            found = []
            for column, most in shown.items():
                text = parts[column][number] if number < len(parts[column]) else ""
                text = text.ljust(most) if column in left else text.rjust(most)
                found.append(styled(text, look(column, row[column])))
            yield "  ".join(found).rstrip()

    if not columns:
        return []
    head = lines({column: column.upper() for column in columns}, lambda column, cell: "")
    body = [line for row in cells for line in lines(row, style)]
    missing = [column for column in columns if column not in shown]
    note = f"left out: {', '.join(missing)} (a wider screen or --json has them)" if missing else ""
    notes = [styled(line, "dim") for line in fitted(note)] if missing else []
    return [*(styled(line, "bold") for line in head), *body, *notes]


def _fit_columns(
    width: Mapping[str, int],
    room: int,
    left: Sequence[str],
    least: Sequence[str],
    last: Sequence[str],
) -> dict[str, int]:
    """Returns the columns that are shown, with their widths; see `table`. Pure."""
    shown = dict(width)

    def free() -> int:
        return room - sum(shown.values()) - 2 * (len(shown) - 1)

    def drop(some: Sequence[str]) -> None:
        dropped = []
        for column in some:
            if free() < 0 and column in shown:
                del shown[column]
                dropped.append(column)
        for column in reversed(dropped):  # what fits without those before it comes back
            if free() - 2 >= width[column]:
                shown[column] = width[column]

    drop(least)
    names = [column for column in width if column in left and column not in least]

    def wrap(most: int) -> None:
        for name in sorted(shown.keys() & names, key=lambda column: -width[column]):
            if free() < 0:
                shown[name] = max(shown[name] + free(), min(shown[name], most))

    wrap(_LEAST_NAME)
    drop(last)
    wrap(_LEAST_TEXT)
    return {column: shown[column] for column in width if column in shown}


def _wrap(text: str, most: int) -> list[str]:
    """Returns the lines of a text, which break after a separator where that is possible.

    Examples:
        >>> _wrap("model.layers.17.attention.weight", 16)
        ['model.layers.17.', 'attention.weight']
        >>> _wrap("w", 16), _wrap("a" * 20, 16)
        (['w'], ['aaaaaaaaaaaaaaaa', 'aaaa'])
    """
    lines = []
    while len(text) > most:
        ends = [found.end() for found in _BREAKS.finditer(text, 0, most)]
        end = ends[-1] if ends and 2 * ends[-1] > most else most
        lines.append(text[:end])
        text = text[end:]
    return [*lines, text]


def styled(text: str, style: str) -> str:
    """Returns text with a style: a colour, `dim`, `bold`, or "" for none.

    click removes styles if the output is not a terminal, unless `colors_wanted` says otherwise.
    """
    if style in ("dim", "bold"):
        return click.style(text, **{style: True})
    return click.style(text, fg=style) if style else text


def progress(doing: str, name: str, sizes: Sequence[int] = ()) -> AbstractContextManager[Meter]:
    """Shows progress on standard error: a bar on a terminal, else a line from time to time.

    Args:
        doing: As `Progress.doing`.
        name: As `Progress.name`.
        sizes: As for `Meter`.

    Returns:
        A context whose value the work counts into.
    """
    return reporting(True, doing, name, sizes=sizes, ends=False)


def printed(meter: Meter, *lines: str) -> None:
    """Prints a partial result as soon as there is one; nothing with `--json`."""
    if not says(JSON):
        with meter.hidden():
            click.echo("\n".join(lines))
            sys.stdout.flush()


def _has_colors() -> bool:
    """Returns whether styles are printed where the output is no terminal."""
    context = click.get_current_context(silent=True)
    return context is not None and context.color is True


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
