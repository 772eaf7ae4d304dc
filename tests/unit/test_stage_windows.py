"""Staging: room is given out in windows, which are laid out and filled."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import Any, get_args

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

from ray_dcp.commit_protocol.messages import OpKey, Target
from ray_dcp.errors import InvalidRequestError
from ray_dcp.stage import copy_threads
from ray_dcp.stage import link as staging_link
from ray_dcp.stage.budget import Room, WindowBudget
from ray_dcp.stage.copy_threads import copy_all, copying_threads
from ray_dcp.stage.link import transfer
from ray_dcp.stage.orders import Grant, StageKey
from ray_dcp.stage.private_memory import PrivateMemory
from ray_dcp.stage.stager_options import StagerOptions
from ray_dcp.stage.window_filler import HostFiller, deferred_items, fill_window, window_parts
from ray_dcp.stage.windows import lay_out_windows
from ray_dcp.stage.write_job import Event, JobState
from ray_dcp.torch_adapter.capture import TensorBytes
from ray_dcp.torch_adapter.devices import DeviceFiller, Moment
from tests.gpu.played import Played
from tests.support.processes import eventually
from tests.support.staging import MIB, Share, share

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
    written = handed_over.after("writers_ended")
    assert not written.is_needed
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
    _, lengths = deferred_items(what.plan, what.items.deferred)
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


# --- Filling windows ------------------------------------------------------------------------------


SLOT = 2 * MIB


# copies


def pairs(*lengths: int) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(3)
    return [
        (np.zeros(length, np.uint8), random.integers(1, 256, length, dtype=np.uint8))
        for length in lengths
    ]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_byte_of_every_length_is_copied(num_threads, monkeypatch):
    monkeypatch.setattr(copy_threads, "copying_threads", lambda: num_threads)
    given = pairs(0, 1, 9 * MIB + 5, 4 * MIB, 3, *range(200))
    copy_all(iter(given))
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
    monkeypatch.setattr(copy_threads.np, "copyto", copyto)
    monkeypatch.setattr(copy_threads, "copying_threads", lambda: 2)
    monkeypatch.setattr(copy_threads, "deque", SlowToEmpty)
    with pytest.raises(KeyboardInterrupt):
        copy_all(pairs(40 * MIB))
    assert len(copied) == 1


class SlowToEmpty(deque):
    """Gives nothing more once it was asked by two threads, until it is empty."""

    def popleft(self):
        if len(self) < 9:
            assert eventually(lambda: not self)
        return super().popleft()


# --- Windows are handed to a stager ---------------------------------------------------------------


KEY = StageKey(OpKey("s", 0), 0, "a1")


class Stager:
    """The link to a stager that has room for a few windows more each time, and keeps what came."""

    stager = "played"
    window_bytes = SLOT

    def __init__(self, driver: Played, at_once: int) -> None:
        self.calls: list[tuple[str, int]] = []
        self.windows: dict[int, bytes] = {}
        self._driver = driver
        self._at_once = at_once
        self._granted = 0

    def call(self, method: str, *arguments: Any, **_: Any) -> Any:
        self.calls.append((method, self._driver.num_under_way))
        if method in ("deliver", "seal"):
            self.windows.update(arguments[1])
            return None
        self._granted += self._at_once
        return Grant(self._granted)

    def post(self, method: str, *_: Any) -> None:
        self.calls.append((method, self._driver.num_under_way))

    def put(self, parts: list[np.ndarray]) -> bytes:
        return b"".join(part.tobytes() for part in parts)


def filler_of(what: Share, driver: Played) -> DeviceFiller:
    tensors = [torch.from_numpy(value) for value in what.items.values]
    driver.own(*tensors)
    filler = Moment(tensors, driver).filler(tensors, HostFiller(TensorBytes(tensors)))
    assert filler is not None
    return filler


def handed(what: Share, link: Stager, filler: DeviceFiller) -> list[bytes]:
    order = what.order(KEY, Target("memory://x"), SLOT)
    transfer(link, order, None, filler, what.items.deferred, timeout_s=60)
    return [link.windows[number] for number in range(len(link.windows))]


def pieces(what: Share, windows: list[bytes]) -> list[bytes]:
    """Returns what is written of windows: what lies between is whatever it was."""
    order = what.order(KEY, Target("memory://x"), SLOT)
    layout = lay_out_windows(what.plan, order.deferred_bytes, SLOT)
    columns = (layout.window, layout.offset, layout.num_bytes)
    return [
        windows[w][at : at + n] for w, at, n in zip(*map(np.ndarray.tolist, columns), strict=True)
    ]


def windows_of(what: Share) -> list[bytes]:
    """Returns what each window holds when it is filled by itself."""
    order = what.order(KEY, Target("memory://x"), SLOT)
    layout = lay_out_windows(what.plan, order.deferred_bytes, SLOT)
    windows = [np.zeros(used, np.uint8) for used in layout.used_bytes.tolist()]
    fill = partial(fill_window, layout)
    for window, into in enumerate(windows):
        fill(window, into, HostFiller(what.items.source), what.items.deferred)
    return [into.tobytes() for into in windows]


@pytest.fixture(autouse=True)
def no_window_is_due_by_the_clock(monkeypatch):
    """Else a slow machine reports windows that a fast one does not."""
    monkeypatch.setattr(staging_link, "REPORT_S", 1e9)


@pytest.fixture
def scratch(monkeypatch):
    """Memory that nobody used before."""
    memory = PrivateMemory()
    monkeypatch.setattr(staging_link, "_scratch", memory)
    return memory


def test_memory_for_a_devices_windows_is_pinned_and_used_again_by_the_next_save(scratch):
    what, driver = share([5 * MIB, 1000, 2000, 3 * MIB]), Played()
    for _ in range(3):
        link = Stager(driver, 8)
        assert pieces(what, handed(what, link, filler_of(what, driver))) == pieces(
            what, windows_of(what)
        )
        assert link.calls == [("begin", 0), ("seal", 0)]
        assert 1 <= len(driver.registered) <= copying_threads() + 1
    pinned = len(driver.registered)
    assert scratch.idle_bytes == pinned * SLOT
    scratch.clear()
    assert not driver.registered


@pytest.mark.parametrize("report_s", [1e9, 0.0])
def test_what_is_reported_to_the_stager_is_there(report_s, monkeypatch):
    monkeypatch.setattr(staging_link, "REPORT_S", report_s)
    what, driver = share([9 * MIB]), Played()
    link = Stager(driver, 2)
    assert handed(what, link, filler_of(what, driver)) == windows_of(what)
    assert all(under_way == 0 for _, under_way in link.calls)
    methods = [method for method, _ in link.calls]
    assert methods.count("more") == 2
    # Before each wait for room, and each full window but the last where that is due.
    assert methods.count("deliver") == (2 if report_s else 4)


@pytest.mark.parametrize("where", ["a copy", "between two windows"])
def test_room_is_given_up_when_nothing_comes_from_the_device_any_more(where, scratch):
    what, driver = share([9 * MIB]), Played()
    link = Stager(driver, 8)
    filler = filler_of(what, driver)
    owner, name = (driver, "copy") if where == "a copy" else (link, "put")
    real, calls = getattr(owner, name), []

    def third_fails(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    setattr(owner, name, third_fails)
    with pytest.raises(KeyboardInterrupt) as kept:  # as whoever handles an error keeps its frames
        handed(what, link, filler)
    assert kept.traceback
    assert link.calls == [("begin", 0), ("cancel", 0)]
    assert driver.registered
    assert scratch.idle_bytes == len(driver.registered) * SLOT


def test_a_state_that_does_not_fit_is_told_with_the_way_out(caplog):
    what, driver = share([9 * MIB]), Played()
    link = Stager(driver, 2)
    call = link.call

    def short(method: str, *arguments: Any, **more: Any) -> Any:
        answer = call(method, *arguments, **more)
        told = method == "more" and answer.num_windows == 4
        return Grant(answer.num_windows, 3_000_000_000) if told else answer

    link.call = short
    handed(what, link, filler_of(what, driver))
    (said,) = caplog.messages
    assert "memory://x is 2.8 GiB larger than" in said
    assert "--object-store-memory that is 5.6 GiB larger, on a /dev/shm" in said


@pytest.mark.parametrize("where", ["host", "device"])
def test_the_runs_of_an_object_are_its_window_and_large_items_are_where_they_are(where):
    objects = [b"note", bytes(MIB)] if where == "host" else []
    what, driver = share([3 * MIB, 500, 70_000, 2 * MIB + 7], objects), Played()
    host = HostFiller(what.items.source)
    filler = host if where == "host" else filler_of(what, driver)
    order = what.order(KEY, Target("memory://x"), SLOT)
    layout = lay_out_windows(what.plan, order.deferred_bytes, SLOT)
    not_copied = 0
    for window, whole in enumerate(windows_of(what)):
        scratch = np.zeros(len(whole), np.uint8)
        parts = window_parts(layout, window, scratch, filler, what.items.deferred)
        assert b"".join(part.tobytes() for part in parts) == whole
        views = [len(part) for part in parts if not np.shares_memory(part, scratch)]
        assert max(views, default=0) <= MIB  # Ray copies longer ones by threads of their own
        not_copied += sum(views)
    assert not_copied >= 4 * MIB if where == "host" else not_copied == 0
