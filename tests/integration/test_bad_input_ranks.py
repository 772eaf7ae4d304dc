"""Bad input on real ranks: one error for all, in seconds, and the session goes on."""

from __future__ import annotations

import resource
import threading
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ray_dcp
from ray_dcp.errors import (
    CheckpointError,
    MissingKeyError,
    RankDisagreementError,
    StorageError,
    UncommittedCheckpointError,
    UnsupportedValueError,
)
from ray_dcp.session.discovery import current_session
from tests.support.attempts import (
    attempt,
    files_at,
    names_at,
    one_error,
    save_sound,
    step_that_loads,
    try_load,
    try_save,
)
from tests.support.plan_cases import ALL
from tests.support.processes import eventually

NUM_RANKS = 3


class BrokenStateful:
    """Can't say its state on one rank."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self):
        if self.fails:
            raise ZeroDivisionError("the scheduler divides by nothing")
        return {"lr": 0.1}

    def load_state_dict(self, state):
        raise AssertionError("nothing is loaded")


BAD_STATES = {
    "an object that does not pickle": (
        lambda rank: {"ok": 1, "lock": threading.Lock() if rank == 1 else None},
        UnsupportedValueError,
        ["'lock'", "can't be pickled", "rank 1"],
    ),
    "a state_dict() that raises": (
        lambda rank: {"scheduler": BrokenStateful(fails=rank == 1)},
        CheckpointError,
        ["ZeroDivisionError: the scheduler divides by nothing", "rank 1"],
    ),
}
"""What else no state can hold is refused alike by one rank: `test_adapter_capture` has it."""


@pytest.fixture
def place(ranks, tmp_path: Path):
    """Where the checkpoint of step 1 stands; after the test it must stand, and a save must work."""
    path = tmp_path / "c"
    ranks.run(save_sound, str(path), 1)
    sessions = ranks.run(session_name)
    yield path
    assert set(ranks.run(step_that_loads, str(path))) == {1}
    assert ray_dcp.verify(path).ok
    ranks.run(save_sound, str(path), 2)
    assert set(ranks.run(step_that_loads, str(path))) == {2}
    assert ranks.run(session_name) == sessions


def session_name() -> str:
    return current_session().name


# Saves


@pytest.mark.parametrize(("state", "kind", "told"), BAD_STATES.values(), ids=BAD_STATES.keys())
def test_a_state_that_can_not_be_saved_is_one_error_before_anything_is_written(
    ranks, place, state, kind, told
):
    before = files_at(place)
    one_error(ranks.run(try_save, str(place), state), kind, str(place), *told)
    assert files_at(place) == before
    fresh = place.parent / "fresh"
    one_error(ranks.run(try_save, str(fresh), state), kind, str(fresh), *told)
    assert not fresh.exists()


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
def test_all_conflicts_of_one_save_are_told_together(ranks, place, is_async):
    def save(path: str):
        state = ALL.state(dist.get_rank())
        if not is_async:
            return attempt(lambda: ray_dcp.save(state, checkpoint_id=path))
        return attempt(lambda: ray_dcp.async_save(state, checkpoint_id=path).result())

    before = files_at(place)
    one_error(ranks.run(save, str(place)), ALL.kind, str(place), *ALL.told)
    assert files_at(place) == before


def limited(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size < 0 else size, hard))


def test_a_rank_that_can_not_write_fails_the_save_for_all_and_leaves_no_data(ranks, place):
    def save(path: str):
        rank = dist.get_rank()
        limited(2 << 20 if rank == 1 else -1)
        try:
            return try_save(path, lambda rank: {f"w{rank}": torch.ones(1 << 20)})
        finally:
            limited(-1)

    before = names_at(place)
    error = one_error(
        ranks.run(save, str(place)), StorageError, "File too large", str(place), "rank 1"
    )
    assert error.rank == 1
    # What remains says that the attempt failed; the ranks know before all else is deleted.
    assert eventually(lambda: names_at(place) - before == {"manifest-00000002.json"})
    fresh = place.parent / "fresh"
    one_error(ranks.run(save, str(fresh)), StorageError, "File too large", str(fresh))
    assert eventually(lambda: names_at(fresh) == {"manifest-00000001.json"})
    with pytest.raises(UncommittedCheckpointError):
        ray_dcp.load({"w0": torch.zeros(1)}, checkpoint_id=fresh, no_dist=True)


def test_a_path_that_is_or_goes_through_a_file_is_a_storage_error_that_names_it(ranks, place):
    file = place.parent / "file"
    file.write_text("not a folder")
    for call, path in product([try_load, try_save], [str(file), str(file / "step-1")]):
        one_error(ranks.run(call, path, lambda rank: {"w": torch.zeros(2)}), StorageError, path)


# Ranks that differ


@pytest.mark.parametrize(
    ("odd", "call", "suffix", "told"),
    [
        (1, try_save, "-other", "rank 1: save to {path}-other"),
        (2, try_load, "", "rank 2: load from {path}"),
    ],
)
def test_a_rank_that_calls_something_else_is_named_with_what_all_asked_for(
    ranks, place, odd, call, suffix, told
):
    def act(path: str):
        mine = (call, path + suffix) if dist.get_rank() == odd else (try_save, path)
        return mine[0](mine[1], lambda rank: {"w": torch.zeros(2)})

    before = files_at(place)
    words = told.format(path=place), f"save to {place}, world size 3"
    one_error(ranks.run(act, str(place)), RankDisagreementError, *words)
    assert files_at(place) == before
    assert not Path(f"{place}-other").exists()


# Values that differ


def differing(rank: int):
    return {"rng": torch.arange(100) + 1000 * rank, "same": torch.ones(3), "who": f"rank {rank}"}


def test_values_that_differ_are_the_lowest_ranks_on_all_with_a_warning_that_names_them(
    ranks, place
):
    other = str(place.parent / "other")
    attempts = ranks.run(try_save, other, differing)
    assert [seen.error for seen in attempts] == [None] * 3
    (warning,) = [text for text in attempts[0].warnings if "differ" in text]
    assert "'rng' on ranks 1, 2" in warning
    assert "'who' on ranks 1, 2" in warning
    assert "'same'" not in warning
    for seen in ranks.run(try_load, other, lambda rank: differing(9)):
        assert torch.equal(seen.value["rng"], torch.arange(100))
        assert seen.value["who"] == "rank 0"


# Loads


def test_a_target_that_does_not_fit_on_one_rank_changes_nothing_on_any(ranks, place):
    def load(path: str):
        plain = torch.full((7,), 5)
        state = {"plain": plain, **({"absent": 0} if dist.get_rank() == 2 else {})}
        return attempt(lambda: ray_dcp.load(state, checkpoint_id=path)), plain.tolist()

    for seen, plain in ranks.run(load, str(place)):
        assert isinstance(seen.error, MissingKeyError)
        assert seen.error.rank == 2
        assert plain == [5] * 7
