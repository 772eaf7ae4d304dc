"""A write queue writes what ranks hand over, as they would; what stays in memory is the same."""

from __future__ import annotations

import os
import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from ray_dcp import errors
from ray_dcp.commit_protocol.messages import OpKey, Target
from ray_dcp.io.writer import file_layout
from ray_dcp.options import SaveOptions
from ray_dcp.stage import link, write_queue
from ray_dcp.stage.link import transfer
from ray_dcp.stage.orders import StagedWindow, StageKey
from ray_dcp.stage.private_memory import PrivateMemory
from ray_dcp.stage.tier_files import too_many
from ray_dcp.stage.window_filler import HostFiller
from ray_dcp.stage.write_queue import WriteQueue
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import PublishedFile
from tests.support.processes import eventually
from tests.support.staging import MIB, Rank, Share, same_files, scribbled, share
from tests.support.storages import Gate

# --- The write queue ------------------------------------------------------------------------------


SLOT = 2 * MIB
KEY = StageKey(OpKey("s", 0), 0, "a1")


class Node:
    """A write queue with room for a few windows, and what it reported."""

    def __init__(self, num_slots: int, opener=None) -> None:
        self.reports = []
        self.may_report = threading.Event()
        self.may_report.set()
        more = {} if opener is None else {"opener": opener}
        limit_bytes = num_slots * SLOT
        self.queue = WriteQueue(limit_bytes, SLOT, self.take, linger_s=0.001, **more)

    def take(self, reporter, report) -> None:
        self.may_report.wait(180)
        self.reports.append(report)

    def rank(self, what: Share, target: Target, save: str = "s", **order) -> Rank:
        made = what.order(StageKey(OpKey(save, 0), 0, "a1"), target, SLOT, **order)
        return Rank(self.queue, what, made)

    def idle(self) -> bool:
        return eventually(lambda: self.queue.num_active() == 0 and not self.queue.used_bytes())


@pytest.fixture
def places(tmp_path: Path) -> tuple[Target, Target]:
    return Target(str(tmp_path / "queue")), Target(str(tmp_path / "rank"))


MIXED = [5 * MIB + 123, 7, 0, 100_000, 3 * MIB, 64 << 10, 1, 4096, 2 * MIB, 70_001, 0]


@pytest.mark.parametrize("num_slots", [4, 40])
def test_it_writes_the_bytes_that_the_rank_would_have_written(num_slots, places):
    what = share(MIXED * 3, [b"pickled", b"", os.urandom(3 * MIB)], part_bytes=9 * MIB)
    expected = what.written(places[1])
    node = Node(num_slots)
    rank = node.rank(what, places[0])
    rank.stage()
    scribbled(what)()
    assert node.idle()
    assert same_files(*places)
    found = {file.file: file for report in node.reports for file in report.files}
    assert [found[r.file].digest for r in expected] == [r.digest for r in expected]
    assert [found[r.file].deferred for r in expected] == [r.deferred for r in expected]


def published(what: Share, target: Target) -> dict[bytes, tuple[PublishedFile, ...]]:
    """Writes a share, and returns its files as those of a committed step."""
    files = tuple(
        PublishedFile(target.url, one.key, one.num_bytes, one.digest.hex())
        for one in what.written(target)
    )
    return {file_layout(file): files for file in what.plan.files}


def reused(node: Node) -> list[str]:
    return sorted(file.reused for report in node.reports for file in report.files)


@pytest.mark.parametrize(
    ("num_slots", "expected"),
    [(40, ["linked"] * 2), (9, ["linked"] * 2), (3, [""] * 2)],
)
def test_a_settled_file_is_linked_if_there_is_room_for_all_of_it(num_slots, expected, places):
    what = share([3 * MIB] * 6, part_bytes=10 * MIB, settled=True)
    files = published(what, places[1])
    node = Node(num_slots)
    node.rank(what, places[0], published=files, options=SaveOptions(num_threads=1)).stage()
    assert node.idle()
    assert same_files(*places)
    assert reused(node) == expected
    inodes = [{file.stat().st_ino for file in Path(place.url).glob("*.distcp")} for place in places]
    assert len(inodes[0] & inodes[1]) == sum(map(bool, expected))
    progress = node.queue.progress(StageKey(OpKey("s", 0), 0, "a1"))
    assert progress.written_bytes == progress.num_bytes == what.num_bytes


def test_writers_that_hold_the_room_of_each_other_get_through(places, tmp_path):
    shares = [share([5 * MIB] * 3, seed=seed, settled=True) for seed in (0, 1)]
    node = Node(8)
    ranks = []
    for number, what in enumerate(shares):
        files = published(what, Target(str(tmp_path / f"before-{number}")))
        place = Target(str(tmp_path / f"after-{number}"))
        ranks.append(node.rank(what, place, save=f"s{number}", published=files).begin())
    threads = [threading.Thread(target=rank.stage) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert node.idle()
    for number in (0, 1):
        places = [Target(str(tmp_path / f"{when}-{number}")) for when in ("before", "after")]
        assert same_files(*places)


def test_a_save_that_is_cancelled_while_its_windows_are_held_gives_them_back(places):
    what = share([3 * MIB] * 6, settled=True)
    node = Node(40)
    rank = node.rank(what, places[0], published=published(what, places[1])).begin()
    rank.fill()
    node.queue.cancel(rank.order.key, by_rank=True)
    assert node.idle()
    assert not open_storage(places[0]).list()


def test_memory_is_free_for_another_save_once_its_bytes_are_written(places):
    node = Node(2)
    node.may_report.clear()
    node.rank(share([3 * MIB]), places[0]).stage()
    second = node.rank(share([3 * MIB], seed=1), places[1], save="t").begin()
    assert node.queue.more(second.order.key, 0).result(180).num_windows
    node.may_report.set()


def test_a_rank_that_dies_in_the_middle_is_reported_and_its_room_comes_back(places):
    what = share([3 * MIB] * 2)
    node = Node(8)
    rank = node.rank(what, places[0]).begin()
    rank.fill()
    node.queue.process_died("p0")
    assert node.idle()
    assert [type(report.error) for report in node.reports] == [errors.ParticipantError]
    assert not list(Path(places[0].url).rglob("*"))


def test_a_cancelled_save_frees_its_room_only_when_the_rank_has_stopped_filling_it(places):
    node = Node(8)
    rank = node.rank(share([5 * MIB]), places[0]).begin()
    rank.fill()
    assert node.queue.awaits(rank.order.key)
    node.queue.cancel(rank.order.key)
    assert not node.queue.awaits(rank.order.key)
    with pytest.raises(errors.SaveCancelledError):
        node.queue.more(rank.order.key, 9).result(180)
    with pytest.raises(errors.SaveCancelledError):
        node.queue.seal(rank.order.key).result(180)
    assert eventually(lambda: not list(Path(places[0].url).glob("*")))
    # The first window was delivered, the rank may still fill the two others.
    others = sum(rank.layout.used_bytes[1:].tolist())
    assert eventually(lambda: node.queue.used_bytes() == others)
    node.queue.cancel(rank.order.key, by_rank=True)
    assert node.idle()
    assert node.reports == []


def test_what_is_handed_over_is_written_though_its_rank_is_dead(places):
    what = share([3 * MIB] * 2)
    what.written(places[1])
    node = Node(8)
    node.rank(what, places[0]).stage()
    node.queue.process_died("p0")
    assert node.idle()
    assert same_files(*places)


def test_a_storage_that_fails_is_reported_and_all_room_comes_back(places):
    def refuse(target):
        raise errors.StorageError("no space left")

    node = Node(4, opener=refuse)
    rank = node.rank(share([3 * MIB] * 6), places[0])
    rank.stage()
    assert node.idle()
    assert [report.error.message for report in node.reports] == ["no space left"]
    assert node.reports[0].error.__traceback__ is None  # its frames hold the staged bytes
    assert node.reports[0].error.__cause__ is None
    assert "in refuse" in node.reports[0].error.__notes__[0], "who reads it finds the place"


def test_any_number_of_ranks_gets_through_the_smallest_budget(places):
    node = Node(4)
    shares = [share([3 * MIB] * 3 + [500] * 40, seed=n, part_bytes=4 * MIB) for n in range(6)]
    ranks = [
        node.rank(what, Target(f"{places[0].url}{n}"), save=str(n), process=str(n))
        for n, what in enumerate(shares)
    ]
    threads = [threading.Thread(target=rank.stage, daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
        assert not thread.is_alive()
    assert node.idle()
    for n, what in enumerate(shares):
        what.written(Target(f"{places[1].url}{n}"))
        assert same_files(Target(f"{places[0].url}{n}"), Target(f"{places[1].url}{n}"))


class Link:
    """The way to a write queue in this process, with a store of objects that counts them."""

    stager = "here"

    def __init__(self, node: Node) -> None:
        self.window_bytes = SLOT
        self.alive: weakref.WeakSet = weakref.WeakSet()
        self.most_bytes = 0
        self._queue = node.queue
        self._lock = threading.Lock()

    def call(self, method, *arguments, timeout_s=180.0, **_):
        if method in ("deliver", "seal"):
            self.take(*arguments)
            arguments = arguments[:1]
            if method == "deliver":
                return None
        arguments = arguments[1:-1] if method == "begin" else arguments
        arguments = arguments[:2] if method == "more" else arguments
        answer = getattr(self._queue, method)(*arguments)
        return answer.result(timeout_s) if isinstance(answer, Future) else answer

    def post(self, method, *arguments):
        assert method == "cancel"
        self._queue.cancel(arguments[0], by_rank=True)

    def take(self, key, refs):
        for number in refs:
            self._queue.deliver(key, number, refs[number])

    def put(self, parts):
        # An array that has a copy, as one of the store; who has a view of it keeps it alive.
        made = [Kept(part) for part in parts]
        with self._lock:
            self.alive.update(made)
            self.most_bytes = max(self.most_bytes, sum(one.nbytes for one in self.alive))
        return made


class Kept(np.ndarray):
    """An array that can be an element of a set."""

    def __new__(cls, part):
        return np.array(part).view(cls)

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def staged(node: Node, what: Share, target: Target, key=KEY, **more):
    """Stages a share through a link, and returns that."""
    link = Link(node)
    order = what.order(key, target, SLOT, **more)
    filler, deferred = HostFiller(what.items.source), what.items.deferred
    num_bytes = transfer(link, order, None, filler, deferred, timeout_s=180)
    assert num_bytes == what.num_bytes
    return link


def test_objects_count_until_nobody_refers_to_them(places):
    """The store never has more than the budget."""
    what = share([3 * MIB, 5000] * 6, part_bytes=7 * MIB)
    what.written(places[1])
    node = Node(3)
    link = staged(node, what, places[0])
    assert node.idle()
    assert same_files(*places)
    assert 2 * SLOT < link.most_bytes <= 3 * SLOT
    assert not link.alive


def test_a_transfer_that_fails_leaves_no_object(places, monkeypatch):
    """Its job is not released by anybody: there is no outcome to wait for."""
    node, put_by = Node(3), []

    def put(self, parts):
        put_by.append(self)
        if len(put_by) > 3:
            raise errors.StorageError("no room")
        return real(self, parts)

    real = Link.put
    monkeypatch.setattr(Link, "put", put)
    with pytest.raises(errors.StorageError, match="no room") as caught:
        staged(node, share([3 * MIB] * 4), places[0])
    assert eventually(lambda: not put_by[0].alive)
    assert node.idle()
    assert caught.value.__traceback__  # as the handle of a save keeps it


@pytest.mark.parametrize("error", [errors.StorageError("device is gone"), KeyboardInterrupt()])
def test_memory_of_a_window_that_can_not_be_filled_serves_the_next_transfer(
    error, places, monkeypatch
):
    def gone(row):
        raise error

    memory = PrivateMemory()
    monkeypatch.setattr(link, "_scratch", memory)
    what = share([5000] * 1600)
    staged(Node(8), what, places[0])
    kept_bytes = memory.idle_bytes
    assert kept_bytes > 0
    order = what.order(KEY, places[0], SLOT)
    with pytest.raises(type(error)):
        transfer(Link(Node(8)), order, None, HostFiller(gone), what.items.deferred, timeout_s=180)
    assert memory.idle_bytes == kept_bytes


def test_two_windows_are_put_at_a_time_each_from_memory_of_its_own(places, monkeypatch):
    """Small items are copied twice; those of the second window leave the first one's alone."""
    together, puts = threading.Barrier(2), []

    def put(self, parts):
        puts.append(self)
        together.wait(180)
        return real(self, parts)

    real = Link.put
    monkeypatch.setattr(Link, "put", put)
    monkeypatch.setattr("ray_dcp.stage.link.copying_threads", lambda: 2)
    # Why: a report waits for the windows before it, and on a slow machine one is due at once.
    monkeypatch.setattr("ray_dcp.stage.link.REPORT_S", 1e9)
    what = share([5000] * 1600)
    what.written(places[1])
    node = Node(8)
    staged(node, what, places[0])
    assert len(puts) == 4
    assert node.idle()
    assert same_files(*places)


def test_no_window_is_under_way_any_more_when_a_transfer_gives_up(places, monkeypatch):
    """What it is copied from may be somebody else's by then."""
    second_began, failed, under_way = threading.Event(), threading.Event(), []

    def put(self, parts):
        under_way.append(self)
        if len(under_way) == 1:
            second_began.wait(180)
            failed.set()
            raise errors.StorageError("no room")
        second_began.set()
        failed.wait(180)
        for _ in range(20):
            real(self, parts)
        under_way.clear()
        return real(self, parts)

    def post(self, method, *arguments):
        posted.append((method, list(under_way)))
        return real_post(self, method, *arguments)

    real, real_post, posted = Link.put, Link.post, []
    monkeypatch.setattr(Link, "put", put)
    monkeypatch.setattr(Link, "post", post)
    monkeypatch.setattr("ray_dcp.stage.link.copying_threads", lambda: 2)
    with pytest.raises(errors.StorageError, match="no room"):
        staged(Node(8), share([3 * MIB] * 4), places[0])
    assert posted == [("cancel", [])]


@pytest.mark.parametrize("num_slots", [2, 40])
def test_a_rank_that_reports_a_window_twice_does_no_harm(num_slots, places, monkeypatch):
    """As it does where an answer was lost."""

    def call(self, method, *arguments, **more):
        if method in ("deliver", "seal"):
            self.take(*arguments)
        return real(self, method, *arguments, **more)

    real = Link.call
    monkeypatch.setattr(Link, "call", call)
    monkeypatch.setattr(link, "REPORT_S", 0.0)
    what = share([3 * MIB] * 4)
    node = Node(num_slots)
    staged(node, what, places[0])
    assert node.idle()
    what.written(places[1])
    assert same_files(*places)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), errors.DeadlineError("no answer")])
def test_a_transfer_that_is_left_while_its_job_begins_leaves_no_job(places, monkeypatch, error):
    def call(self, method, *arguments, **more):
        answer = real(self, method, *arguments, **more)
        if method == "begin":
            raise error
        return answer

    real = Link.call
    monkeypatch.setattr(Link, "call", call)
    node = Node(8)
    with pytest.raises(type(error)):
        staged(node, share([3 * MIB] * 2), places[0])
    assert node.idle()


def test_a_rank_is_told_at_once_that_nobody_can_write_its_bytes(places, monkeypatch):
    what = share([3 * MIB] * 2)
    node = Node(4)
    rank = node.rank(what, places[0]).begin()

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(rank.num_windows):
            rank.fill()
        with pytest.raises(errors.LimitError, match="thread"):
            node.queue.seal(rank.order.key).result(180)
    node.queue.cancel(rank.order.key, by_rank=True)
    assert node.idle()
    what.written(places[1])
    node.rank(what, places[0], "again").stage()
    assert node.idle()
    assert same_files(*places)


@pytest.mark.parametrize("how", ["cancelled", "for longer than it may"])
def test_writers_that_hang_in_a_storage_are_told_and_hold_no_other_save_up(
    places, monkeypatch, how
):
    what = share([2 * MIB] * 8, part_bytes=2 * MIB)
    gate = Gate()
    hanging, other = Target(str(places[0].url) + "-hangs"), places[0]
    came = []

    def opener(target):
        came.append(target)
        return gate.opener(target) if target == hanging else open_storage(target)

    node = Node(40, opener)
    real, ahead_s = time.monotonic, [0.0]
    monkeypatch.setattr(write_queue.time, "monotonic", lambda: real() + ahead_s[0])
    hung = node.rank(what, hanging, "hangs")
    hung.stage()
    assert eventually(lambda: len(came) == 2)
    try:
        ahead_s[0] += 31.0
        assert node.queue.stuck(30.0) == []  # it may be slow
        if how == "cancelled":
            node.queue.cancel(hung.order.key, by_rank=True)
        else:
            ahead_s[0] += SaveOptions().write_timeout_s
        second = node.rank(what, other, "goes on")
        second.stage()
        assert eventually(lambda: len(node.reports) == 8)
        what.written(places[1])
        assert same_files(*places)
        node.queue.stuck(30.0)  # cancels what takes longer than it may
        # Its memory hangs: whoever has no other use for the stager is to replace it.
        ahead_s[0] += 31.0
        assert not node.queue.is_needed()
        assert node.queue.stuck(30.0)
    finally:
        gate.open()
    for rank in (hung, second):
        node.queue.release(rank.order.key)
    assert node.idle()
    assert not node.queue.stuck(0.0)


# --- The memory tier ------------------------------------------------------------------------------


KEEP = SaveOptions(keep_in_memory=1)


def save(node, path, name, seed=0, options=KEEP, sizes=(3 * MIB,), objects=(), ref=None):
    """Stages and writes a share; returns its rank and what it was."""
    what = share(list(sizes), list(objects), seed=seed)
    rank = node.rank(what, Target(str(path / name)), save=name, options=options)
    rank.ref = ref
    rank.stage()
    return rank, what


def fetched(node, parts):
    runs = node.queue.fetch(parts)
    return None if runs is None else np.concatenate(runs)


def kept(node, rank):
    return node.queue.kept(rank.order.key.attempt)


def test_every_byte_of_a_payload_is_found_as_it_lies_in_its_file(tmp_path):
    node = Node(40)
    rank, _ = save(node, tmp_path, "c", sizes=MIXED * 3, objects=[b"pickled", bytes(3 * MIB)])
    assert eventually(lambda: kept(node, rank) is not None)
    found = kept(node, rank)
    num_bytes = 0
    for file in found.files:
        stored = np.frombuffer((tmp_path / "c" / file.key).read_bytes(), dtype=np.uint8)
        for start, length in zip(file.start.tolist(), file.num_bytes.tolist(), strict=True):
            got = fetched(node, file.find(start, length))
            assert np.array_equal(got, stored[start : start + length])
            num_bytes += length
        ends = file.start + file.num_bytes
        assert file.find(int(ends[-1]) - 1, 2) is None
        assert file.find(int(file.start[0]) - 1, 2) is None
        whole = file.find(int(file.start[0]), int(ends[-1] - file.start[0]))
        assert sum(part.num_bytes for part in whole) == ends[-1] - file.start[0]
    assert num_bytes == node.queue.progress(rank.order.key).num_bytes


def test_the_next_committed_one_takes_its_place_and_not_one_that_failed(tmp_path):
    node = Node(20)
    ranks = []
    for number, committed in enumerate([True, False, True]):
        what = share([3 * MIB], seed=number)
        rank = node.rank(
            what, Target(str(tmp_path / f"c{number}")), save=f"s{number}", options=KEEP
        )
        object.__setattr__(rank.order.key, "attempt", f"a{number}")
        rank.stage()
        assert eventually(lambda: kept(node, rank) is not None)  # noqa: B023
        assert node.queue.in_flight(str(tmp_path))[-1].is_written
        assert node.queue.awaits(rank.order.key)
        node.queue.release(rank.order.key, committed=committed)
        assert not node.queue.awaits(rank.order.key)
        assert not node.queue.in_flight(str(tmp_path))
        ranks.append(rank)
        if number == 1:
            assert kept(node, ranks[0])
            assert kept(node, rank) is None
    assert node.queue.kept_attempts() == {"a2"}
    assert node.queue.num_active() == 0


@pytest.mark.parametrize("sizes", [[5000], []], ids=["a file", "no file"])
def test_loads_learn_which_file_a_written_share_has_on_storage(sizes, tmp_path):
    """A share without files has none that a removed folder could have lost."""
    node, target = Node(2), Target(str(tmp_path))
    staged(node, share(sizes), target, options=KEEP)
    assert eventually(lambda: node.queue.in_flight(target.url)[0].is_written)
    (found,) = node.queue.in_flight(target.url)
    assert (found.file is not None) == bool(sizes)
    assert [entry.key for entry in open_storage(target).list(found.file or "")] == (
        [found.file] if sizes else []
    )


def test_what_another_save_needs_is_given_up_and_noticed_by_who_reads(tmp_path):
    node = Node(2)
    rank, _ = save(node, tmp_path, "c")
    assert eventually(lambda: kept(node, rank) is not None)
    file = kept(node, rank).files[0]
    parts = file.find(int(file.start[0]), int(file.num_bytes[0]))
    assert node.queue.fetch(parts) is not None
    save(node, tmp_path, "d", seed=1, options=SaveOptions())
    assert node.idle()
    assert node.queue.fetch(parts) is None
    assert kept(node, rank) is None


def test_what_is_kept_is_lent_to_loads_and_counts_until_they_give_it_back(tmp_path):
    node = Node(2)
    rank, _ = save(node, tmp_path, "c", ref="ref")
    assert eventually(lambda: kept(node, rank) is not None)
    windows = [StagedWindow(rank.order.key, 0), StagedWindow(KEY, 7)]
    assert node.queue.lend("load", windows) == ["ref", None]
    assert node.queue.borrowers() == ["load"]
    node.queue.release(rank.order.key)
    second = node.rank(share([3 * MIB], seed=1), Target(str(tmp_path / "d")), save="t")
    key = second.begin().order.key
    assert node.queue.more(key, 1).cancel()  # in vain for as long as it waits; it asks again
    waiting = node.queue.more(key, 1)
    assert [future for _, future in node.queue._jobs[key].wants_more] == [waiting]
    assert not eventually(waiting.done, 0.1)
    node.queue.take_back("load")
    assert waiting.result(180).num_windows == 2


def test_what_a_load_has_counts_also_when_another_checkpoint_has_taken_its_place(tmp_path):
    node, lent = Node(8), []
    for number in range(2):
        what = share([3 * MIB], seed=number)
        rank = node.rank(what, Target(str(tmp_path / f"c{number}")), save=f"{number}", options=KEEP)
        object.__setattr__(rank.order.key, "attempt", f"a{number}")
        rank.ref = "ref"
        rank.stage()
        assert eventually(lambda: kept(node, rank) is not None)  # noqa: B023
        lent += node.queue.lend("load", [StagedWindow(rank.order.key, 0)])
        node.queue.release(rank.order.key, committed=True)
    assert lent == ["ref", "ref"]
    assert node.queue.kept_attempts() == {"a1"}
    first, second = rank.layout.used_bytes.tolist()
    expected = first + (first + second)  # what is lent of the one, and all that is kept
    assert not eventually(lambda: node.queue.used_bytes() < expected, 0.1)
    node.queue.take_back("load")
    assert eventually(lambda: node.queue.used_bytes() == first + second)


@pytest.mark.parametrize(("keep", "gone"), [(1, {"a", "b", "c"}), (2, {"a", "b"}), (3, {"b"})])
def test_the_last_committed_ones_stay_and_what_came_after_them(keep, gone):
    committed = {"a": True, "b": False, "c": True, "d": True, "e": False}
    seen = [("run", name, keep, is_committed) for name, is_committed in committed.items()]
    assert too_many(seen) == gone
