"""A storage that can't create a key only if it is absent: what a save there still promises."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import ClassVar

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import ray_dcp
from ray_dcp.commit_protocol.commands import (
    CreateAbort,
    CreateRecord,
    ReadRecord,
    RecordsRead,
    SlotFree,
)
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.messages import SaveReceipt
from ray_dcp.errors import CheckpointExistsError, CommitUnknownError, StorageError
from ray_dcp.format.manifest import record_key
from ray_dcp.runtime.tasks import new_attempt, outcome, perform
from ray_dcp.store.location import Location
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import MemoryStorage
from ray_dcp.testing import StorageConformance
from tests.crash.crashes import OPERATIONS, check_crashes
from tests.crash.invariants import INVARIANTS, nothing_is_left
from tests.support.arrays import state_of
from tests.support.protocol import Play
from tests.support.storages import UnconditionalStorage
from tests.support.world import load_and_check, loads_whole, run_ranks, save, save_ranks

OLD, NEW, NEXT = state_of(1), state_of(2), state_of(3)
STATES = [OLD, NEW, NEXT]


class TestUnconditional(StorageConformance):
    @pytest.fixture
    def storage(self, request):
        return UnconditionalStorage(MemoryStorage(place_of(request)))


def place_of(request):
    return "unconditional-" + "".join(c if c.isalnum() else "-" for c in request.node.name)


@pytest.fixture
def place(request):
    return MemoryStorage(place_of(request))


def opener(place, **more):
    return lambda _: UnconditionalStorage(place, **more)


def save_without(place, state, world_size=2, *, opened=None, **more):
    """Returns how each rank's save ended on a place that has no conditions."""
    opened = opened or opener(place)
    ranks = save_ranks(state, world_size, place.url, opener=opened, **more)
    return run_ranks(ranks, performer=partial(perform, opener=opened))


def test_a_save_says_that_its_coordinator_alone_decides_and_loads(place):
    for step, state in enumerate([OLD, NEW], 1):
        results = save_without(place, state)
        for result in results:
            (warning,) = result.get().warnings
            assert "coordinator alone decides" in warning
            assert place.url in warning
            assert result.get().slot == step
        load_and_check(state, 3, place.url)
    (with_conditions,) = save(NEXT, 1, place.url)
    assert with_conditions.warnings == ()


INTERRUPTED = {"save.overwrite", "delete", "collect"}


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.name in INTERRUPTED], ids=str)
def test_whatever_is_interrupted_leaves_a_whole_checkpoint(operation):
    """All invariants but one: what an undecided attempt left is not collected by a later save.

    Whether it is still at work can't be told where it can't be fenced off.
    """
    numbers = count()
    kept = [invariant for invariant in INVARIANTS if invariant is not nothing_is_left]
    reached = check_crashes(
        operation,
        storage=lambda: UnconditionalStorage(
            MemoryStorage(f"unconditional-{operation}-{next(numbers)}")
        ),
        invariants=kept,
        every=15,
    )
    assert sum(reached.stood.values()) == sum(reached.points.values()) > 4


# two jobs at once: what the warning warns of


def test_of_two_jobs_that_save_at_once_the_later_record_stands_and_loads_whole(place):
    """Not protected: both are told of success. What stands is one of them, never a mixture."""
    theirs = []

    def other_job(key):
        if key == record_key(1) and not theirs:
            theirs.append(None)  # once: the other job puts this key as well
            theirs[:] = save_without(place, NEXT, session="other")

    ours = save_without(place, NEW, opened=opener(place, between=other_job))
    assert {result.get().slot for result in (*ours, *theirs)} == {1}
    assert place.read(record_key(1)) == ours[0].get().manifest
    assert loads_whole(place.url, STATES) == 1


def test_a_job_that_finds_another_record_after_its_own_lost(place):
    started = []

    class Slow(UnconditionalStorage):
        """Writes its record, and another job that had looked before it does so as well."""

        def write(self, key, data, *, create=False):
            super().write(key, data, create=create)
            if key == record_key(1):
                started.append(key)
                place.write(key, theirs)

    (lone,) = save(OLD, 1, "memory://unconditional-lender")
    theirs = lone.manifest
    results = save_without(place, NEW, opened=lambda _: Slow(place))
    assert started
    assert {type(result.error) for result in results} == {CheckpointExistsError}
    assert lone.attempt in str(results[0].error)


class Forgetful(UnconditionalStorage):
    """Answers that a record was written, and does nothing, as HDFS does where it can't rename."""

    def write(self, key, data, *, create=False):
        if not key.startswith("manifest-"):
            super().write(key, data, create=create)


def test_a_record_that_is_not_there_after_it_was_written_is_no_commit(place):
    save_without(place, OLD)
    before = [entry.key for entry in place.list()]
    results = save_without(place, NEW, opened=lambda _: Forgetful(place))
    assert {type(result.error) for result in results} == {CommitUnknownError}
    assert "is not there" in str(results[0].error)
    assert set(before) <= {entry.key for entry in place.list()}
    assert loads_whole(place.url, STATES) == 0


class HdfsRename(MemoryFileSystem):
    """Renames as HDFS does: never onto a file, and over HTTP without an error."""

    protocol = "hdfs-rename"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    refused: ClassVar[str | None] = None

    def mv(self, path1, path2, **kwargs):
        if not self.exists(path2) and not (self.refused and self.refused in path2):
            super().mv(path1, path2, **kwargs)


@pytest.fixture
def hdfs(monkeypatch):
    monkeypatch.setattr(HdfsRename, "store", {})
    monkeypatch.setattr(HdfsRename, "pseudo_dirs", [""])
    return Location("/run", filesystem=HdfsRename())


def test_where_a_rename_replaces_nothing_each_save_is_what_stock_dcp_sees(hdfs):
    for number in (1.0, 2.0):
        with pytest.warns(UserWarning, match="coordinator alone decides"):
            ray_dcp.save({"w": torch.full((4,), number)}, checkpoint_id=hdfs, no_dist=True)
    checkpoint = ray_dcp.open(hdfs).checkpoint
    assert not checkpoint.metadata_is_stale
    assert not open_storage(hdfs).unpublished()
    assert ray_dcp.read_state_dict(hdfs)["w"].tolist() == [2.0] * 4


@pytest.mark.parametrize("refused", ["manifest-", ".distcp", "chunks."])
def test_a_rename_that_does_nothing_fails_the_save_and_the_previous_one_stands(
    hdfs, monkeypatch, refused
):
    with pytest.warns(UserWarning, match="coordinator alone decides"):
        ray_dcp.save({"w": torch.ones(4)}, checkpoint_id=hdfs, no_dist=True)
    monkeypatch.setattr(HdfsRename, "refused", refused)
    kind = CommitUnknownError if refused == "manifest-" else StorageError
    with pytest.raises(kind, match="did not rename"):
        ray_dcp.save({"w": torch.zeros(4)}, checkpoint_id=hdfs, no_dist=True)
    assert ray_dcp.read_state_dict(hdfs)["w"].tolist() == [1.0] * 4


# who may decide


@pytest.mark.parametrize("there", [None, open_storage])
def test_a_rank_without_its_coordinator_only_looks(place, there):
    """The restarted coordinator knows nothing: with conditions the ranks would fence it off.

    Nor where a condition seems to hold on the rank's machine: what the coordinator saw counts.
    """
    restarted = Coordination(epoch=2, new_attempt=new_attempt)
    before = place.list()

    def to_the_next_life(generator):
        request = next(generator)
        while not isinstance(request, SaveReceipt):
            request = generator.send((yield request))
        asked.append(request.attempt)
        try:
            restarted.receive(request)
        except CommitUnknownError as error:
            generator.throw(error)

    asked = []
    ranks = save_ranks(NEW, 2, place.url, opener=there or opener(place))
    results = run_ranks(
        [to_the_next_life(rank) for rank in ranks], performer=partial(perform, opener=opener(place))
    )
    assert {type(result.error) for result in results} == {CommitUnknownError}
    assert before == []
    assert [entry.key for entry in place.list("manifest-")] == []
    (attempt,) = set(asked)
    assert outcome(place.url, attempt) == "open"
    # The place is as good as new.
    save_without(place, NEXT, session="after")
    assert loads_whole(place.url, STATES) == 2


@pytest.mark.parametrize("create_if_absent", [True, False])
def test_a_commit_that_may_still_arrive_is_not_declared_failed(create_if_absent):
    """An abort keeps a late manifest out only where a record is created if absent."""
    play = Play()
    play.to_record(RecordsRead(0, None, None, (), create_if_absent=create_if_absent))
    while isinstance(play.task, CreateRecord):
        play.fail(StorageError("the answer was lost"))
        if isinstance(play.task, ReadRecord):
            play.done(SlotFree(1))
    assert isinstance(play.task, CreateAbort) == create_if_absent
    if not create_if_absent:
        assert play.task is None
        errors = play.errors("SaveReceipt")
        assert {type(error) for error in errors.values()} == {CommitUnknownError}
        assert "the answer was lost" in str(errors[0])
