"""A driver, a stager and a node are killed: cells of the chaos matrix."""

from __future__ import annotations

import pytest

from tests.chaos.arena import Arena
from tests.chaos.cells import Cell
from tests.chaos.playing import cells_of, play

PLAYED = cells_of("driver", "stager", "node")


@pytest.mark.parametrize("cell", PLAYED, ids=[cell.name for cell in PLAYED])
def test_whoever_is_hit_is_named_in_time_and_a_whole_checkpoint_stands(arena: Arena, cell: Cell):
    play(arena, cell)
