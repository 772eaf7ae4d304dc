"""Cells of the chaos matrix, its table, and a kill that is none of its cells.

`python -m tests.chaos --all` plays all cells.
"""

from __future__ import annotations

import resource
import signal
from itertools import product

import pytest
import torch.distributed as dist

from ray_dcp.errors import ParticipantError
from tests.chaos import victims
from tests.chaos.arena import Arena
from tests.chaos.cells import PARTICIPANTS, PHASES, SIGNALS, Cell, chosen, is_in_phase
from tests.chaos.matrix import CELLS, CI, NOT_PLAYED
from tests.chaos.scenes import REPEAT
from tests.chaos.traps import function_at
from tests.support.attempts import save_sound, step_that_loads

IN_CI = [cell for cell in chosen(CELLS) if cell.name in CI]


@pytest.mark.parametrize("cell", IN_CI, ids=[cell.name for cell in IN_CI])
def test_whoever_is_hit_is_named_in_time_and_a_whole_checkpoint_stands(arena: Arena, cell: Cell):
    result = cell.scene(arena, cell)
    assert result.hit, result
    assert result.problems == ()
    assert result.seconds is not None


def save_with_little_room(path: str, num_bytes: int) -> None:
    """Saves step 2; the kernel ends rank 1 in the middle of its file, after so many bytes."""
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    victims.save_full(path, 2)


def test_a_rank_that_the_kernel_ends_in_the_middle_of_its_file_leaves_the_checkpoint_before(
    arena: Arena,
):
    ranks = arena.ranks("head")
    path, _ = arena.new_place()
    ranks.run(save_sound, str(path), 1)
    with pytest.raises(ParticipantError, match="rank 1 died") as caught:
        ranks.run(save_with_little_room, str(path), 1 << 20)
    assert [file.stat().st_size for file in path.glob(".tmp-*__1_*")] == [1 << 20]
    for rank in (0, 2):
        told = caught.value.failures[rank][0]
        assert isinstance(told, ParticipantError)
        assert told.rank == 1
        assert str(path) in str(told)
    assert arena.mend().run(step_that_loads, str(path)) == [1, 1, 1]


# The matrix itself


def test_every_place_of_the_matrix_is_played_or_says_why_not():
    names = {cell.name for cell in CELLS}
    assert len(names) == len(CELLS)
    played = {(cell.blow, f"{cell.participant} {cell.phase}") for cell in CELLS}
    places = {f"{who} {phase}" for who, phase in product(PARTICIPANTS, PHASES)}
    for blow in SIGNALS:
        assert {place for place in places if (blow, place) not in played} == NOT_PLAYED.keys()


def test_what_is_played_each_time_has_each_participant_and_each_phase():
    assert {cell.name for cell in IN_CI} == CI
    killed = [cell for cell in IN_CI if cell.blow == "SIGKILL"]
    assert {cell.participant for cell in killed} == set(PARTICIPANTS)
    assert {cell.phase for cell in killed} == set(PHASES)
    assert {cell.blow for cell in IN_CI} == set(SIGNALS)


def test_every_trap_is_at_a_function_that_there_is():
    places = {cell.trap.where for cell in CELLS if cell.trap} | {REPEAT}
    assert len(places) > 5
    for place in places:
        assert callable(function_at(place)[2])


@pytest.mark.parametrize(
    ("new", "phases"),
    [
        ([], {"planning", "staging", "loading"}),
        ([".tmp-1-__0_0.a.distcp"], {"staging", "writing"}),
        ([".tmp-1-__0_0.a.distcp", "__1_0.a.distcp"], {"staging", "writing"}),
        (["__0_0.a.distcp", "__1_0.a.distcp"], {"staging", "committing"}),
        (["__0_0.a.distcp", "chunks.a.table"], {"committing"}),
        (["__0_0.a.distcp", "chunks.a.table", "manifest-00000002.json"], {"committing"}),
        ([".tmp-1-__0_0.a.distcp", "chunks.a.table"], set()),
    ],
)
def test_the_files_of_a_blow_tell_in_which_phase_it_fell(new: list[str], phases: set[str]):
    before = {"__0_0.b.distcp", "chunks.b.table", "manifest-00000001.json", ".metadata"}
    found = {phase for phase in PHASES if is_in_phase(phase, before, before | set(new))}
    assert found == phases
