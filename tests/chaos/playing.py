"""Plays cells of the chaos matrix as tests; `python -m tests.chaos --all` plays all of them."""

from __future__ import annotations

from tests.chaos.arena import Arena
from tests.chaos.cells import Cell, chosen
from tests.chaos.matrix import CELLS, CI


def cells_of(*participants: str) -> list[Cell]:
    """Returns what is played each time, of the cells in which one of these is hit."""
    return [c for c in chosen(CELLS) if c.name in CI and c.participant in participants]


def play(arena: Arena, cell: Cell) -> None:
    """Plays a cell: whoever is hit is named in time, and a whole checkpoint stands."""
    result = cell.scene(arena, cell)
    assert result.hit, result
    assert result.problems == ()
    assert result.seconds is not None
