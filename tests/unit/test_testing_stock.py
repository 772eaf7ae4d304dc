"""What the harness says of stock DCP and of ranks that were told different things can be false."""

from __future__ import annotations

import pytest

from ray_dcp.errors import CommitUnknownError, DamagedCheckpointError, StorageError
from ray_dcp.protocol.messages import SaveOutcome
from ray_dcp.store.local import LocalStorage
from tests.crash import stock_calls as calls
from tests.crash.invariants import Aftermath, standing_state, stock_state
from tests.crash.ranks import one_outcome
from tests.crash.registry import NEW, NEXT, OLD, Place
from tests.inline_ranks import RankResult


@pytest.fixture
def local(tmp_path):
    return LocalStorage(tmp_path / "step-1")


def over_ours(local):
    Place(local).save(OLD)
    calls.save_by_stock(Place(local))
    return Aftermath(local, allowed=(OLD, NEW), earlier=(OLD,))


def test_an_error_that_names_both_is_right_and_any_other_is_told(local):
    after = over_ours(local)
    calls.ours_stands_or_both_are_named(after)
    calls.stock_dcp_sees_no_mixture(after)

    class Mute(Aftermath):
        @property
        def standing(self):
            raise DamagedCheckpointError("something is wrong")

    with pytest.raises(AssertionError, match=r"'00000001', .*in: something is wrong"):
        calls.ours_stands_or_both_are_named(Mute(local, allowed=()))


def test_another_state_than_ours_is_told(local):
    Place(local).save(NEW)
    after = Aftermath(local, allowed=(OLD,), earlier=(OLD,), others=(NEW,))
    with pytest.raises(AssertionError, match="the state of 2 stands"):
        calls.ours_stands_or_both_are_named(after)


def test_a_mixture_that_stock_dcp_loads_is_told(local):
    after = over_ours(local)
    calls.save_by_stock(Place(local), {**NEW, "a": NEXT["a"]})
    with pytest.raises(AssertionError, match="stock DCP gives none of 3 states"):
        calls.stock_dcp_sees_no_mixture(after)


def test_stock_dcp_is_back_to_normal_afterwards(local):
    with calls.interrupted_stock(local, None, "before") as (_, interruption):
        calls.save_by_stock(Place(local))
    made = len(interruption.steps)
    assert stock_state(local, (NEW,)) is NEW
    calls.save_by_stock(Place(local), NEXT)
    assert len(interruption.steps) == made
    with calls.interrupted_stock(local, 0, "lost"), pytest.raises(BaseException, match="only die"):
        calls.save_by_stock(Place(local))


COMMITTED = RankResult(value=SaveOutcome("a1", 1, b"", ()))
UNKNOWN = RankResult(error=CommitUnknownError("who knows", attempt="a1"))
FAILED = RankResult(error=StorageError("it failed"))


def test_one_rank_that_knows_of_the_commit_tells_for_all():
    assert one_outcome([COMMITTED, UNKNOWN]).attempt == "a1"
    with pytest.raises(CommitUnknownError):
        one_outcome([FAILED, UNKNOWN])
    with pytest.raises(StorageError):
        one_outcome([FAILED, FAILED])


def test_ranks_that_are_told_of_a_commit_and_of_a_failure_are_a_bug():
    with pytest.raises(AssertionError, match="some ranks were told of a commit, and 1 that it f"):
        one_outcome([COMMITTED, FAILED])


def test_what_stands_is_looked_at_without_changing_it(local):
    Place(local).save(OLD)
    (stale,) = [local.read(".metadata")]
    local.delete([".metadata"])
    assert standing_state(local, (OLD,)) is OLD
    assert ".metadata" not in [entry.key for entry in local.list()]
    assert stale
