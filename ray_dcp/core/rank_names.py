"""Names that each rank has for itself, alike on all ranks: `loader.rank-7-of-64`.

Ranks that differ in nothing but their own number in such names hold the same items: their
fingerprints begin alike, and the rows of one tell those of the others (`planning.regular`). In what
is said of all of them the number is a `*`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ray_dcp.core.values import Columns, NamePath

ANY = "*"
"""Stands for a rank's own number."""

_NUMBER = re.compile(r"\.rank-(0|[1-9][0-9]{0,8})-of-[0-9]+")


def number_in(names: Sequence[str], world_size: int) -> int | None:
    """Returns the number that stands in the names of one rank; None where none does, or several.

    Args:
        names: Of its items.
        world_size: Number of ranks, which stands there too.

    Examples:
        >>> number_in(["w", "loader.rank-3-of-8"], 8), number_in(["loader.rank-3-of-8"], 4)
        (3, None)
    """
    end = f"-of-{world_size}"
    # Why first: as a rule there is none, and a look at each name takes longer than all else.
    if f"{end}\0" not in "\0".join((*names, "")):
        return None
    found = {_number(name) for name in names if name.endswith(end)} - {None}
    return found.pop() if len(found) == 1 else None


def is_own(name: str, world_size: int) -> bool:
    """Whether a name is that of an item which each rank has for itself, for all ranks."""
    return name.endswith(f".{_part(ANY, world_size)}")


def without_rank(columns: Columns, world_size: int) -> Columns:
    """Returns columns with `*` in the place of the rank's number, where there is one."""
    number = number_in(columns.names, world_size)
    return columns if number is None else _renumbered(columns, str(number), ANY, world_size)


def for_rank(columns: Columns, rank: int, world_size: int) -> Columns:
    """Returns columns with the number of a rank in the place of `*`."""
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
