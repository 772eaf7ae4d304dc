"""Per-rank names, which are alike on all ranks but for the rank: `loader.rank-7-of-64`.

Ranks that differ only in their own number in such names hold the same items: the first halves of
their fingerprints are equal, and the rows of one rank determine those of the others
(`planning.regular`). Data that describes all of these ranks has a `*` in place of the number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ray_dcp.core.values import Columns, NamePath

ANY = "*"
"""Placeholder for a rank's own number."""

_NUMBER = re.compile(r"\.rank-(0|[1-9][0-9]{0,8})-of-[0-9]+")


def number_in(names: Sequence[str], world_size: int) -> int | None:
    """Returns the rank in the per-rank names of one rank; None if there is none, or several.

    Args:
        names: Names of the rank's items.
        world_size: Number of ranks, which these names contain too.

    Examples:
        >>> number_in(["w", "loader.rank-3-of-8"], 8), number_in(["loader.rank-3-of-8"], 4)
        (3, None)
    """
    end = f"-of-{world_size}"
    # Why this check first: per-rank names are rare, and a check of each name takes longer than the
    # rest.
    if f"{end}\0" not in "\0".join((*names, "")):
        return None
    found = {_number(name) for name in names if name.endswith(end)} - {None}
    return found.pop() if len(found) == 1 else None


def is_own(name: str, world_size: int) -> bool:
    """Returns whether a name is a per-rank name in the form that describes all ranks."""
    return name.endswith(f".{_part(ANY, world_size)}")


def without_rank(columns: Columns, world_size: int) -> Columns:
    """Returns columns with `*` in place of the rank's number, if their names contain one."""
    number = number_in(columns.names, world_size)
    return columns if number is None else _renumbered(columns, str(number), ANY, world_size)


def for_rank(columns: Columns, rank: int, world_size: int) -> Columns:
    """Returns columns with a rank's number in place of `*`."""
    return _renumbered(columns, ANY, str(rank), world_size)


def _renumbered(columns: Columns, old: str, new: str, world_size: int) -> Columns:
    before, after = _part(old, world_size), _part(new, world_size)
    end = f".{before}"
    names, paths = list(columns.names), list(columns.paths)
    for index, name in enumerate(names):
        if name.endswith(end):
            names[index] = name.removesuffix(before) + after
            paths[index] = _path(paths[index], before, after)
    return replace(columns, names=tuple(names), paths=tuple(paths))


def _path(path: NamePath | None, before: str, after: str) -> NamePath | None:
    return (*path[:-1], after) if path and path[-1] == before else path


@lru_cache(maxsize=1 << 12)
def _part(number: str, world_size: int) -> str:
    return f"rank-{number}-of-{world_size}"


def _number(name: str) -> int | None:
    match = _NUMBER.fullmatch(name[name.rfind(".rank-") :]) if ".rank-" in name else None
    return int(match[1]) if match else None
