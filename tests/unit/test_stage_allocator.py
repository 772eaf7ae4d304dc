"""Slots are never given twice, waits end, and bytes that may be wanted once more stay."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ray_dcp.errors import InternalError
from ray_dcp.stage.allocator import SlotAllocator

NUM_SLOTS = 3


class Allocator(RuleBasedStateMachine):
    """Drives a `SlotAllocator` as ranks and writers do; a model says who may have which slot."""

    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(NUM_SLOTS)
        self.number = 0
        self.windows: dict[str, list[set[int]]] = {}
        self.slots: dict[tuple[str, int], object] = {}
        self.here: set[tuple[str, int]] = set()
        self.unread: dict[tuple[str, int], set[int]] = {}
        self.finished: dict[str, set[int]] = {}
        self.sealed: set[str] = set()

    @rule(
        target=jobs,
        files=st.lists(st.sets(st.integers(0, 2), min_size=1), max_size=5),
        keep=st.booleans(),
    )
    def begin(self, files, keep):
        self.number += 1
        job = f"job {self.number}"
        self.allocator.begin(job, f"rank {self.number % 2}", files, keep=keep)
        self.windows[job] = files
        self.finished[job] = set()
        self.unread.update({(job, w): set(f) for w, f in enumerate(files)})
        return job

    @rule()
    def grants(self):
        for grant in self.allocator.grants():
            at = (grant.job, grant.window)
            assert at not in self.slots
            granted = [w for (j, w) in self.slots if j == grant.job]
            assert grant.window == len(granted)
            assert not self.holder(grant.slot.index), "granted while it was still wanted"
            for slot in self.slots.values():
                if slot.index == grant.slot.index:
                    assert grant.slot.generation > slot.generation
            self.slots[at] = grant.slot

    def holder(self, index):
        """Returns which windows must still have a slot."""
        found = []
        for (job, window), slot in self.slots.items():
            if slot.index != index or job not in self.windows:
                continue
            newest = max(s.generation for s in self.slots.values() if s.index == index)
            if slot.generation != newest:
                continue
            is_here = (job, window) in self.here
            wanted = self.windows[job][window] - self.finished[job]
            unread = self.unread[job, window] - self.finished[job]
            if not is_here or (wanted and (unread or job in self.sealed)):
                found.append((job, window))
        return found

    @rule(job=jobs, window=st.integers(0, 4))
    def deliver(self, job, window):
        if (job, window) in self.slots and job in self.windows:
            self.allocator.delivered(job, window)
            self.here.add((job, window))

    @rule(job=jobs, window=st.integers(0, 4), file=st.integers(0, 2))
    def read(self, job, window, file):
        if (job, window) in self.here and job in self.windows:
            self.allocator.read(job, window, file)
            self.unread[job, window].discard(file)

    @rule(job=jobs, file=st.integers(0, 2))
    def finish(self, job, file):
        # Also of a file that failed before all its windows came.
        if job in self.windows:
            self.allocator.finished(job, file)
            self.finished[job].add(file)

    @rule(job=jobs)
    def seal(self, job):
        if job in self.windows and self.allocator.may_seal(job):
            every = range(len(self.windows[job]))
            assert all((job, window) in self.here for window in every)
            for window in self.allocator.freed(job):
                assert self.windows[job][window] <= self.finished[job]
            self.allocator.seal(job)
            self.sealed.add(job)

    @rule(job=consumes(jobs))
    def drop(self, job):
        self.allocator.drop(job)
        self.windows.pop(job, None)
        self.allocator.drop(job)

    @invariant()
    def never_more_than_there_are(self):
        assert 0 <= self.allocator.num_used <= NUM_SLOTS


TestAllocator = Allocator.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_slot_that_a_rank_still_fills_is_not_given_away_when_its_file_has_failed():
    allocator = SlotAllocator(1)
    allocator.begin("a", "x", [{0}])
    allocator.grants()
    allocator.begin("b", "y", [{0}])
    allocator.finished("a", 0)
    assert allocator.grants() == []
    allocator.delivered("a", 0)
    assert [grant.job for grant in allocator.grants()] == ["b"]


def test_jobs_that_wait_take_turns():
    allocator = SlotAllocator(3)
    allocator.begin("a", "x", [{0}] * 5)
    allocator.grants()
    allocator.begin("b", "y", [{0}] * 5)
    for window in (0, 1):
        allocator.delivered("a", window)
        allocator.read("a", window, 0)
    assert [(g.job, g.window) for g in allocator.grants()] == [("a", 3), ("b", 0)]


def test_a_sealed_job_keeps_its_slots_and_one_that_is_not_gives_what_was_read():
    allocator = SlotAllocator(2)
    allocator.begin("a", "x", [{0}])
    allocator.begin("b", "y", [{0}])
    allocator.grants()
    for job in "ab":
        allocator.delivered(job, 0)
        allocator.read(job, 0, 0)
    allocator.seal("a")
    allocator.begin("c", "z", [{0}, {0}])
    assert [(g.job, g.slot.index) for g in allocator.grants()] == [("c", 1)]
    assert not allocator.may_seal("b")
    allocator.finished("b", 0)
    assert allocator.may_seal("b")
    assert allocator.grants() == []
    allocator.finished("a", 0)
    assert [(g.window, g.slot.index) for g in allocator.grants()] == [(1, 0)]


def finish(allocator, job, windows):
    for window in range(windows):
        allocator.delivered(job, window)
        allocator.read(job, window, 0)
    allocator.finished(job, 0)


def test_a_kept_job_has_its_slots_until_others_need_them_the_oldest_first():
    allocator = SlotAllocator(4)
    for job in "ab":
        allocator.begin(job, "x", [{0}, {0}], keep=True)
        allocator.grants()
        assert not allocator.is_whole(job)
        finish(allocator, job, 2)
        assert allocator.is_whole(job)
    assert allocator.num_used == 4
    allocator.begin("c", "x", [{0}])
    assert [grant.job for grant in allocator.grants()] == ["c"]
    assert (allocator.is_whole("a"), allocator.is_whole("b")) == (False, True)
    assert allocator.num_used == 3
    allocator.drop("b")
    assert allocator.num_used == 1


def test_warm_slots_are_preferred_and_a_rank_keeps_its_own():
    allocator = SlotAllocator(6)
    assert allocator.expect("x", 2) == [0, 1]
    assert allocator.expect("y", 2) == [2, 3]
    assert allocator.expect("x", 3) == [0, 1, 4]
    for slot in (1, 2, 5):
        allocator.warmed(slot)
    assert allocator.is_warm(5)
    assert not allocator.is_warm(0)
    assert allocator.owned("x") == [1]
    allocator.begin("job", "x", [{0}] * 6)
    assert [grant.slot.index for grant in allocator.grants()] == [1, 0, 4, 5, 2, 3]
    assert allocator.owned("x") == [0, 1, 2, 3, 4, 5]
    allocator.drop("job")
    assert allocator.owned("x") == [0, 1, 2, 3, 4, 5]
    assert allocator.owned("y") == []


def test_a_window_that_nobody_wants_gives_its_slot_back_when_it_is_delivered():
    allocator = SlotAllocator(1)
    allocator.begin("a", "x", [set(), {0}])
    allocator.grants()
    allocator.delivered("a", 0)
    assert [grant.window for grant in allocator.grants()] == [1]


def test_the_same_job_twice_is_a_bug():
    allocator = SlotAllocator(1)
    allocator.begin("a", "x", [])
    with pytest.raises(InternalError):
        allocator.begin("a", "x", [])
