"""Staging: room is given out in windows, which are laid out and filled."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import InvalidRequestError
from ray_dcp.io.writer import write_part
from ray_dcp.options import SaveOptions
from ray_dcp.planning.global_plan import make_plan, rank_plan
from ray_dcp.stage import window_filling
from ray_dcp.stage.budget import Room, WindowBudget
from ray_dcp.stage.job_state import Event, JobState
from ray_dcp.stage.orders import StageKey, StagerOptions
from ray_dcp.stage.window_filling import copy_all, fill_window
from ray_dcp.stage.windows import lay_out_windows
from ray_dcp.stage.write_queue import WriteQueue
from ray_dcp.store.opening import open_storage
from ray_dcp.torch_adapter.capture import capture
from tests.support.processes import eventually
from tests.support.staging import MIB, Rank, Share, same_files, share

# --- Options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [
    {"limit_bytes": (8 << 20) - 1}, {"window_bytes": 1 << 20}, {"window_bytes": True},
    {"limit_bytes": 64e6}, {"limit_bytes": "64"}, {"window_bytes": None},
])  # fmt: skip
def test_options_that_can_not_be_are_refused(wrong):
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        StagerOptions(**wrong)


# --- The budget ---------------------------------------------------------------------------------


LIMIT = 12


class Budget(RuleBasedStateMachine):
    """Drives a `WindowBudget` as ranks and writers do; a model says which windows need room."""

    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.budget = WindowBudget(LIMIT)
        self.number = 0
        self.windows: dict[str, list[tuple[int, set[int]]]] = {}
        self.keeps: set[str] = set()
        self.granted: dict[tuple[str, int], int] = {}
        """Those that have room, and their lengths."""
        self.here: set[tuple[str, int]] = set()
        self.unread: dict[tuple[str, int], set[int]] = {}
        self.leaving: list[Room] = []

    @rule(
        target=jobs,
        windows=st.lists(
            st.tuples(st.integers(1, LIMIT), st.sets(st.integers(0, 2), min_size=1)), max_size=5
        ),
        keep=st.booleans(),
    )
    def begin(self, windows, keep):
        self.number += 1
        job = f"job {self.number}"
        self.budget.begin(job, windows, keep=keep)
        self.windows[job] = windows
        self.unread.update({(job, w): set(files) for w, (_, files) in enumerate(windows)})
        return job

    @rule()
    def end(self):
        for room in self.budget.ended():
            at = room.job, room.window
            assert self.granted.pop(at) == room.num_bytes
            # It is not in use any more, or its job was dropped.
            assert room.job not in self.windows or (at in self.here and not self.unread[at])
            self.leaving.append(room)

    @rule(data=st.data())
    def free(self, data):
        if self.leaving:
            index = data.draw(st.integers(0, len(self.leaving) - 1))
            self.budget.freed(self.leaving.pop(index))

    @rule()
    def grants(self):
        for room in self.budget.grants():
            at = room.job, room.window
            assert at not in self.granted
            assert at not in self.here
            assert room.num_bytes == self.windows[room.job][room.window][0]
            self.granted[at] = room.num_bytes

    @rule(job=jobs, window=st.integers(0, 4))
    def deliver(self, job, window):
        if (job, window) in self.granted and job in self.windows:
            self.budget.delivered(job, window)
            self.here.add((job, window))

    @rule(job=jobs, window=st.integers(0, 4), file=st.integers(0, 2))
    def read(self, job, window, file):
        if (job, window) in self.here and job in self.windows:
            self.budget.read(job, window, file)
            self.unread[job, window].discard(file)

    @rule(job=jobs, file=st.integers(0, 2))
    def finish(self, job, file):
        # Also of a file that failed before all its windows came.
        if job in self.windows:
            self.budget.finished(job, file)
            for window in range(len(self.windows[job])):
                self.unread[job, window].discard(file)

    @rule(job=consumes(jobs))
    def drop(self, job):
        self.budget.drop(job)
        self.windows.pop(job, None)
        self.budget.drop(job)

    @invariant()
    def what_has_room_counts_and_is_never_too_much(self):
        leaving = sum(room.num_bytes for room in self.leaving)
        assert self.budget.used_bytes <= LIMIT
        assert self.budget.used_bytes >= leaving + sum(self.granted.values())

    def teardown(self):
        """Whoever waits comes in when all that is needed is written."""
        for _ in range(200):
            self.grants()
            for job, window in list(self.granted):
                if job in self.windows:
                    self.deliver(job, window)
                    for file in range(3):
                        self.read(job, window, file)
            self.end()
            while self.leaving:
                self.budget.freed(self.leaving.pop())
        for job, windows in self.windows.items():
            assert all((job, window) in self.here for window in range(len(windows)))


TestBudget = Budget.TestCase
TestBudget.settings = settings(max_examples=30, stateful_step_count=40)


def test_a_window_that_a_rank_still_fills_keeps_its_room_when_its_file_has_failed():
    budget = WindowBudget(1)
    budget.begin("a", [(1, {0})])
    budget.grants()
    budget.begin("b", [(1, {0})])
    budget.finished("a", 0)
    assert budget.ended() == []
    budget.delivered("a", 0)
    (room,) = budget.ended()
    assert budget.grants() == []
    budget.freed(room)
    assert [room.job for room in budget.grants()] == ["b"]


def freed(budget):
    for room in budget.ended():
        budget.freed(room)


def test_jobs_that_wait_take_turns():
    budget = WindowBudget(3)
    budget.begin("a", [(1, {0})] * 5)
    budget.grants()
    budget.begin("b", [(1, {0})] * 5)
    for window in (0, 1):
        budget.delivered("a", window)
        budget.read("a", window, 0)
    freed(budget)
    assert [(room.job, room.window) for room in budget.grants()] == [("a", 3), ("b", 0)]


def finish(budget, job, windows):
    for window in range(windows):
        budget.delivered(job, window)
        budget.read(job, window, 0)


def test_a_kept_job_has_its_room_until_others_need_it_the_oldest_first():
    budget = WindowBudget(4)
    for job in "ab":
        budget.begin(job, [(1, {0}), (1, {0})], keep=True)
        budget.grants()
        assert not budget.is_whole(job)
        finish(budget, job, 2)
        assert budget.is_whole(job)
    assert budget.used_bytes == 4
    budget.begin("c", [(1, {0})])
    assert budget.grants() == []
    freed(budget)
    assert [room.job for room in budget.grants()] == ["c"]
    assert (budget.is_whole("a"), budget.is_whole("b")) == (False, True)
    budget.drop("b")
    freed(budget)
    assert budget.used_bytes == 1


def test_no_more_is_given_up_than_a_window_needs_while_room_is_about_to_be_free():
    budget = WindowBudget(2)
    for job in "ab":
        budget.begin(job, [(1, {0})], keep=True)
        budget.grants()
        finish(budget, job, 1)
    budget.begin("c", [(1, {0})])
    for _ in range(3):
        assert budget.grants() == []
    assert budget.is_whole("b")


def test_of_a_job_that_is_larger_than_the_budget_nothing_is_kept():
    budget = WindowBudget(2)
    budget.begin("a", [(1, {0})] * 5, keep=True)
    written = 0
    while granted := budget.grants():
        for room in granted:
            budget.delivered("a", room.window)
            budget.read("a", room.window, 0)
            written += 1
        budget.grants()
        freed(budget)
    assert written == 5
    assert not budget.is_whole("a")


# --- The states of a job --------------------------------------------------------------------------


EVENTS = get_args(Event)


def reachable() -> dict[JobState, dict[str, JobState]]:
    """Returns every state that events lead to, and what each event leads to from there."""
    found: dict[JobState, dict[str, JobState]] = {}
    left = [JobState()]
    while left:
        state = left.pop()
        if state not in found:
            found[state] = {event: state.after(event) for event in EVENTS}
            left += found[state].values()
    return found


def test_events_may_come_twice_and_no_part_of_a_job_ever_goes_back():
    order = {
        "rank": ["filling", "handed_over", "left"], "writers": ["idle", "working", "ended"],
        "fate": ["open", "failed", "cancelled", "committed", "released"],
    }  # fmt: skip
    states = reachable()
    assert len(states) > 30
    for state, after in states.items():
        for event, found in after.items():
            assert found.after(event) == found
            for part, values in order.items():
                before, now = getattr(state, part), getattr(found, part)
                assert values.index(now) >= values.index(before)
                assert before == now or before == values[0] or part != "rank"


def test_a_share_that_is_handed_over_is_needed_until_it_is_written():
    filling = JobState().after("writers_started")
    handed_over = filling.after("all_here")
    assert not filling.is_needed  # its rank has the bytes
    assert handed_over.is_needed
    assert handed_over.after("committed").is_needed
    assert not handed_over.after("cancelled").is_needed
    assert not handed_over.after("writers_ended").is_needed


def test_what_is_written_can_not_fail_any_more():
    written = JobState().after("writers_started").after("all_here").after("writers_ended")
    assert written.after("failed") == written


def test_memory_goes_only_when_neither_rank_nor_writers_use_it_and_stays_what_it_was():
    for state, after in reachable().items():
        assert state.is_at_rest == (state.rank != "filling" and state.writers == "ended")
        if state.is_at_rest:
            assert all(found.is_at_rest for found in after.values())
        if state.rank == "left" and state.fate == "open":
            # Somebody has to say why: nobody will ever write all of it.
            assert not state.is_needed
        # What was given up is not committed by a word that comes late.
        if state.fate in ("failed", "cancelled", "released"):
            assert not after["committed"].is_of_use
        # A rank that has gone leaves a whole share alone.
        if state.rank == "handed_over":
            assert after["rank_left"] == state


# --- Windows --------------------------------------------------------------------------------------


SIZES = st.lists(
    st.one_of(
        st.integers(0, 200),
        st.sampled_from([64 << 10, (64 << 10) - 1, 128 << 10, MIB, MIB + 1, 2 * MIB, 5 * MIB + 77]),
        st.integers(0, 3 * MIB),
    ),
    max_size=14,
)


def lengths_of(what):
    return [[len(what.items.deferred(row)) for row in f.deferred.tolist()] for f in what.plan.files]


@settings(max_examples=20)
@given(
    sizes=SIZES,
    deferred=st.lists(st.integers(0, 3 * MIB).map(bytes), max_size=3),
    part_bytes=st.sampled_from([MIB, 4 * MIB, 1 << 30]),
    window_bytes=st.sampled_from([2 * MIB, 3 * MIB, 64 * MIB]),
)
def test_segments_cover_each_piece_once_in_order_and_fit_their_windows(
    sizes, deferred, part_bytes, window_bytes
):
    what = share(sizes, deferred, part_bytes=part_bytes)
    lengths = lengths_of(what)
    layout = lay_out_windows(what.plan, lengths, window_bytes)
    assert layout.total_bytes == what.num_bytes
    line = layout.window.astype(np.int64) * window_bytes + layout.offset
    assert (layout.num_bytes > 0).all()
    assert (line[1:] >= (line + layout.num_bytes)[:-1]).all()
    assert (layout.offset + layout.num_bytes <= window_bytes).all()
    place = np.arange(len(layout.file))
    assert (np.diff(layout.file * (1 << 20) + layout.piece) >= 0).all()
    for index, file in enumerate(what.plan.files):
        own = slice(*layout.file_first[index : index + 2].tolist())
        assert set(layout.file[own].tolist()) <= {index}
        planned = [*file.payload_bytes.tolist(), *lengths[index]]
        rows = [*file.row.tolist(), *file.deferred.tolist()]
        for piece, num_bytes in enumerate(planned):
            found = place[own][layout.piece[own] == piece]
            assert layout.num_bytes[found].sum() == num_bytes
            assert set(layout.row[found].tolist()) <= {rows[piece]}
            assert set(layout.is_deferred[found].tolist()) <= {piece >= len(file.row)}
            ends = np.cumsum(layout.num_bytes[found])
            assert layout.start[found].tolist() == [0, *ends[:-1].tolist()][: len(found)]
            block = 1 if piece >= len(file.row) else int(file.block_bytes[piece])
            assert not (layout.num_bytes[found[:-1]] % block).any()
            if piece < len(file.row) and num_bytes >= 64 << 10:
                at = file.payload_offset[piece] + layout.start[found]
                assert ((layout.offset[found] - at) % 4096 == 0).all()
                assert layout.file_end[found].tolist() == (at + layout.num_bytes[found]).tolist()
            elif piece < len(file.row):
                assert len(found) <= 1
    for window in range(layout.num_windows):
        own = slice(*layout.window_first[window : window + 2].tolist())
        assert own.stop > own.start
        assert (layout.window[own] == window).all()
        used = (layout.offset + layout.num_bytes)[own].max()
        assert layout.used_bytes[window] == used
        assert layout.files_of(window) == set(layout.file[own].tolist())


def test_the_ends_of_deferred_items_are_where_they_are_written(tmp_path):
    what = share([100, 70_000], [b"a" * 100, b"", b"b" * 3, b"c" * 70_001])
    (receipt,) = what.written(Target(str(tmp_path)))
    layout = lay_out_windows(what.plan, lengths_of(what), 2 * MIB)
    ends = {p.row: p.item_offset + p.item_bytes for p in receipt.deferred if p.item_bytes}
    assert len(ends) == 3
    own = layout.is_deferred
    rows, found = layout.row[own].tolist(), layout.file_end[own].tolist()
    assert dict(zip(rows, found, strict=True)) == ends


# --- Filling windows ------------------------------------------------------------------------------


SLOT = 2 * MIB


def state() -> dict[str, object]:
    """Returns tensors of many kinds; some share their memory."""
    base = torch.arange(3 << 20, dtype=torch.int32)
    tied = torch.randn(700, 500)
    return {
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "fp8": torch.arange(100, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "bf16": torch.randn(300, 700).bfloat16(),
        "half": torch.randn(33).half(),
        "complex": torch.randn(64, 3, dtype=torch.complex64),
        "complex_conj": torch.randn(5000, 3, dtype=torch.complex128).conj(),
        "empty": torch.zeros(0, 7),
        "transposed": torch.randn(800, 900).t(),
        "strided": base[::2],
        "whole": base,
        "slice": base[10:100_000],
        "tied_a": tied,
        "tied_b": tied,
        "grad": torch.randn(40, 40, requires_grad=True),
        "many": [torch.full((n % 7,), n, dtype=torch.int64) for n in range(300)],
        "step": 10,
        "note": {"text": "hello", "items": [1, 2, {"a"}]},
    }


def test_every_kind_of_tensor_is_staged_as_it_is_written(tmp_path: Path):
    tensors = state()
    captured = capture(tensors, rank=0, world_size=1)
    plan = make_plan([captured.columns], part_bytes=6 * MIB)
    what = Share(captured, rank_plan(plan, 0), 0)
    places = Target(str(tmp_path / "staged")), Target(str(tmp_path / "rank"))
    write_part(
        open_storage(places[1]), what.plan, "a1",
        source=captured.source, deferred=captured.deferred, options=SaveOptions(),
    )  # fmt: skip
    reports = []
    queue = WriteQueue(6 * SLOT, SLOT, lambda _, report: reports.append(report), linger_s=0.001)
    rank = Rank(queue, what, what.order(StageKey("s", 0, "a1"), places[0], SLOT))
    rank.stage()
    for value in tensors.values():
        if isinstance(value, torch.Tensor) and not value.requires_grad and value.numel():
            value.zero_()
    assert eventually(lambda: len(reports) == len(what.plan.files))
    assert not [report.error for report in reports if report.error]
    assert same_files(*places)


def filled(what: Share, filler) -> list[bytes]:
    lengths = [[len(what.items.deferred(r)) for r in f.deferred.tolist()] for f in what.plan.files]
    layout = lay_out_windows(what.plan, lengths, SLOT)
    windows = []
    for window in range(layout.num_windows):
        into = np.zeros(layout.used_bytes[window], np.uint8)
        fill_window(layout, window, into, filler, what.items.deferred)
        windows.append(into.tobytes())
    return windows


# copies


def pairs(*lengths: int) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(3)
    return [
        (np.zeros(length, np.uint8), random.integers(1, 256, length, dtype=np.uint8))
        for length in lengths
    ]


@pytest.mark.parametrize("num_threads", [None, 1, 3, 99])
def test_every_byte_of_every_length_is_copied(num_threads):
    given = pairs(0, 1, 9 * MIB + 5, 4 * MIB, 3, *range(200))
    copy_all(iter(given), num_threads)
    assert all(np.array_equal(into, found) for into, found in given)


def test_who_is_interrupted_leaves_nobody_who_goes_on_copying(monkeypatch):
    """The caller may use the memory for something else then."""
    begun, interrupted, copied = threading.Event(), threading.Event(), []

    def copyto(*pair):
        if threading.get_ident() == caller:
            assert begun.wait(180)
            interrupted.set()
            raise KeyboardInterrupt
        begun.set()
        assert interrupted.wait(180)
        copied.append(pair)

    caller = threading.get_ident()
    monkeypatch.setattr(window_filling.np, "copyto", copyto)
    monkeypatch.setattr(window_filling, "deque", SlowToEmpty)
    with pytest.raises(KeyboardInterrupt):
        copy_all(pairs(40 * MIB), 2)
    assert len(copied) == 1


class SlowToEmpty(deque):
    """Gives nothing more once it was asked by two threads, until it is empty."""

    def popleft(self):
        if len(self) < 9:
            assert eventually(lambda: not self)
        return super().popleft()
