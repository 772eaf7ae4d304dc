"""The judge of the chaos matrix: what is wrong with a cell is told, each thing, and only that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_dcp.errors import (
    CheckpointError,
    CommitUnknownError,
    DeadlineError,
    ParticipantError,
    SaveCancelledError,
    StorageError,
)
from tests.chaos.cells import Cell, Result
from tests.chaos.judging import Expected, Seen, Told, judge
from tests.chaos.traps import Mark

BEFORE = frozenset({"__0_0.b.distcp", "manifest-00000001.json"})
WRITING = BEFORE | {".tmp-1-__1_0.a.distcp"}
PATH = "/somewhere/c"
DIED = ParticipantError("Expected rank 1 to take part, but it was lost", checkpoint_id=PATH, rank=1)
UNKNOWN = CommitUnknownError("Nobody said about rank 1", attempt="a", checkpoint_id=PATH)


def not_played(arena: object, cell: Cell) -> Result:
    return Result(False, None, "")


CELL = Cell("SIGKILL", "rank", "writing", not_played, 5.0)
EXPECTED = Expected(3, PATH, named=["rank 1"], lost={1})
FAILED = Seen(
    Mark(100.0, WRITING, 0), {0: Told(101.0, DIED), 2: Told(103.0, DIED)}, BEFORE, (), 1, 3
)
DONE = replace(FAILED, told={0: Told(101.0, None), 2: Told(103.0, None)}, step=2)


@pytest.mark.parametrize(("seen", "outcome"), [(FAILED, "ParticipantError"), (DONE, "done")])
def test_a_cell_in_which_all_is_well_tells_when_the_last_one_was_told(seen: Seen, outcome: str):
    assert judge(CELL, seen, EXPECTED, 5.0) == Result(True, 3.0, outcome)


def test_of_several_victims_an_error_must_name_one():
    assert judge(CELL, FAILED, replace(EXPECTED, named=["rank 7", "rank 1"]), 5.0).ok


def told(**ranks: Exception | None) -> dict[int, Told]:
    return {int(name[1:]): Told(101.0, error) for name, error in ranks.items()}


ELSEWHERE = ParticipantError("rank 1 was lost", checkpoint_id="/elsewhere")
NAMELESS = ParticipantError("somebody was lost", checkpoint_id=PATH)
LATE = DeadlineError("rank 1 did not come", checkpoint_id=PATH)


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (replace(FAILED, trouble=("the scene failed",)), "the scene failed"),
        (replace(FAILED, told={0: Told(101.0, DIED), 2: Told(110.1, DIED)}), "told after 10.1 s"),
        (replace(FAILED, told=told(r0=DIED)), "ranks [2] were never told"),
        (replace(FAILED, told=told(r0=DIED, r2=None)), "ranks [0] failed and [2] did not"),
        (replace(FAILED, told=told(r0=DIED, r1=None, r2=DIED)), "ranks [0, 2] failed and [1] did"),
        (replace(FAILED, told=told(r0=DIED, r2=LATE)), "were told different errors"),
        (replace(FAILED, told=told(r0=ELSEWHERE, r2=ELSEWHERE)), "was told no path"),
        (replace(FAILED, told=told(r0=NAMELESS, r2=NAMELESS)), "was told none of ['rank 1']"),
        (
            replace(FAILED, told=told(r0=ValueError(PATH), r2=ValueError(PATH))),
            "which is none of ours",
        ),
        (replace(FAILED, step=2), "step 2 stands, but after ParticipantError it may be [1]"),
        (replace(FAILED, step=None), "step None stands"),
        (replace(DONE, step=1), "step 1 stands, but after done it may be [2]"),
        (replace(FAILED, later=2), "step 3 was saved, but step 2 stands"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_thing_that_is_wrong_is_told(seen: Seen, problem: str):
    result = judge(CELL, seen, EXPECTED, 5.0)
    assert result.hit
    assert any(problem in found for found in result.problems), result.problems
    assert not result.ok


@pytest.mark.parametrize(
    ("mark", "problem"),
    [
        (None, "the blow did not fall"),
        (Mark(100.0, BEFORE, 0), "it fell in another phase: 0 ranks were told, new files []"),
        (Mark(100.0, WRITING, 1), "it fell in another phase: 1 ranks were told"),
    ],
)
def test_a_blow_that_did_not_fall_in_its_phase_is_no_hit(mark: Mark | None, problem: str):
    result = judge(CELL, replace(FAILED, mark=mark), EXPECTED, 5.0)
    assert not result.hit
    assert problem in result.problems[0]
    assert not result.ok


@pytest.mark.parametrize("step", [1, 2])
def test_after_an_unknown_commit_either_step_may_stand_and_ranks_may_differ(step: int):
    seen = replace(FAILED, told=told(r0=UNKNOWN, r2=DIED), step=step)
    assert judge(CELL, seen, EXPECTED, 5.0).ok
    assert not judge(CELL, replace(seen, step=3), EXPECTED, 5.0).ok


def test_one_that_was_hit_and_came_back_may_find_out_by_itself_that_it_failed():
    fenced = SaveCancelledError("declared failed by somebody else", checkpoint_id=PATH)
    seen = replace(FAILED, told=told(r0=DIED, r1=fenced, r2=DIED))
    assert judge(CELL, seen, EXPECTED, 5.0).ok
    seen = replace(FAILED, told=told(r0=DIED, r1=ValueError(PATH), r2=DIED))
    assert not judge(CELL, seen, EXPECTED, 5.0).ok


def test_one_that_comes_back_may_have_loaded_but_not_have_saved_what_failed_for_the_others():
    seen = replace(FAILED, told=told(r0=DIED, r1=None, r2=DIED))
    assert not judge(CELL, seen, EXPECTED, 5.0).ok
    loaded = replace(seen, mark=Mark(100.0, BEFORE, 0))
    assert judge(replace(CELL, phase="loading"), loaded, EXPECTED, 5.0).ok


def test_a_load_leaves_the_step_that_it_read_and_a_scene_may_say_what_stands():
    cell = replace(CELL, phase="loading")
    seen = replace(DONE, mark=Mark(100.0, BEFORE, 0), step=1)
    assert judge(cell, seen, EXPECTED, 5.0).ok
    assert not judge(cell, replace(seen, step=2), EXPECTED, 5.0).ok
    assert judge(CELL, replace(DONE, step=1), replace(EXPECTED, steps={1}), 5.0).ok


def test_without_a_victim_to_name_any_error_of_ours_will_do():
    full = StorageError("disk full", checkpoint_id=PATH)
    seen = replace(FAILED, told=told(r0=full, r1=full, r2=full))
    assert judge(CELL, seen, Expected(3, PATH), 5.0).ok
    assert isinstance(full, CheckpointError)
