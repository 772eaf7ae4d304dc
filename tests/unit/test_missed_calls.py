"""A rank that misses a call: one failed operation, and all ranks agree on the next one again."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from ray_dcp.commit_protocol.messages import SaveOutcome, Target
from ray_dcp.errors import CheckpointError, DeadlineError, RankDisagreementError
from ray_dcp.manager.collective_actions import agree
from ray_dcp.options import SaveOptions
from ray_dcp.runtime.activity import Activity
from ray_dcp.runtime.rank_load import drive
from tests.support.arrays import ArrayCapture, state_of
from tests.support.threads import RankThread, Shared
from tests.support.world import load_and_check, save_rank

LIMIT_S = 120.0
"""Far more than any call here takes, in seconds."""


class Rank(RankThread):
    def save(self, path):
        """Returns what came of a save: an outcome or an error."""
        try:
            with Activity(self, 60.0) as activity:
                return drive(
                    save_rank(
                        activity.next_key(), rank=self.rank, world_size=self.world_size,
                        target=Target(path), options=SaveOptions(), progress=activity.progress,
                        capture=lambda: ArrayCapture(state_of(1), self.rank, self.world_size),
                        memory=self.plans,
                    ),
                    activity.call,
                )  # fmt: skip
        except CheckpointError as error:
            return error

    def agree(self, what):
        """Returns what the ranks agree on: the highest of their numbers."""
        try:
            return agree(self, what, max, SaveOptions(), facts=self.rank, timeout_s=60.0)
        except CheckpointError as error:
            return error


class Job:
    def __init__(self, pool, world_size=2):
        self.pool, self.hub = pool, Shared()
        self.ranks = [Rank(self.hub, rank, world_size) for rank in range(world_size)]

    def all_do(self, what, *arguments):
        """Returns what comes of a call of all ranks."""
        calls = [self.pool.submit(getattr(rank, what), *arguments) for rank in self.ranks]
        return [call.result(LIMIT_S) for call in calls]

    def without_rank_1(self, what, *arguments):
        """Returns what comes of a call that rank 1 does not make."""
        others = [rank for rank in self.ranks if rank.rank != 1]
        calls = [self.pool.submit(getattr(rank, what), *arguments) for rank in others]
        self.hub.wait_for(*(rank.rank for rank in others))
        self.hub.expire()
        return [call.result(LIMIT_S) for call in calls]


@pytest.fixture
def job():
    with ThreadPoolExecutor(4) as pool:
        yield Job(pool, 3)


def test_a_save_that_one_rank_missed_fails_alone_and_the_next_ones_are_saved(job, tmp_path):
    for error in job.without_rank_1("save", str(tmp_path / "step-1")):
        assert type(error) is DeadlineError
        assert error.rank == 1
    for step in (2, 3):
        outcomes = job.all_do("save", str(tmp_path / f"step-{step}"))
        assert [type(outcome) for outcome in outcomes] == [SaveOutcome] * 3, outcomes
        load_and_check(state_of(1), 2, str(tmp_path / f"step-{step}"))


def test_a_rank_that_comes_first_after_a_call_that_it_missed_waits_for_the_others(job, tmp_path):
    job.without_rank_1("save", str(tmp_path / "step-1"))
    path = str(tmp_path / "step-2")
    early = job.pool.submit(job.ranks[1].save, path)
    job.hub.wait_for(1)
    calls = [early, *(job.pool.submit(job.ranks[rank].save, path) for rank in (0, 2))]
    outcomes = [call.result(LIMIT_S) for call in calls]
    assert [type(outcome) for outcome in outcomes] == [SaveOutcome] * 3, outcomes


def test_ranks_whose_calls_are_one_apart_agree_once_the_odd_one_has_failed(job, tmp_path):
    extra = job.pool.submit(job.ranks[0].save, str(tmp_path / "extra"))
    job.hub.wait_for(0)
    others = [job.pool.submit(job.ranks[rank].save, str(tmp_path / "step-1")) for rank in (1, 2)]
    for error in [call.result(LIMIT_S) for call in (extra, *others)]:
        assert type(error) is RankDisagreementError
    # Rank 0 comes to that step now, and the others go on.
    left = job.pool.submit(job.ranks[0].save, str(tmp_path / "step-1"))
    job.hub.wait_for(0)
    job.hub.expire()
    assert type(left.result(LIMIT_S)) is DeadlineError
    outcomes = job.all_do("save", str(tmp_path / "step-2"))
    assert [type(outcome) for outcome in outcomes] == [SaveOutcome] * 3, outcomes
