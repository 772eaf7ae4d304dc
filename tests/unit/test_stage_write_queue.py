"""A write queue writes what ranks hand over as they would, within its budget, whatever ends."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ray_dcp.errors import LimitError, ParticipantError, SaveCancelledError, StorageError
from ray_dcp.options import SaveOptions
from ray_dcp.protocol.messages import Target
from ray_dcp.stage.allocator import SlotAllocator
from ray_dcp.stage.memory import StagingMemory
from ray_dcp.stage.values import StageKey, StagerOptions, Unknown
from ray_dcp.stage.write_queue import Channel, WriteQueue
from tests.polling import eventually
from tests.staged import MIB, Rank, Share, same_files, scribbled, share

SLOT = 2 * MIB


class Node:
    """A write queue with staging memory of a few slots, and what it reported."""

    def __init__(self, num_slots: int, opener=None) -> None:
        self.arena = StagingMemory.create(num_slots, SLOT)
        self.channel = Channel(SLOT, SlotAllocator(num_slots), self.arena)
        self.reports = []
        self.may_report = threading.Event()
        self.may_report.set()
        more = {} if opener is None else {"opener": opener}
        self.queue = WriteQueue({"arena": self.channel}, StagerOptions(), self.take, **more)

    def take(self, reporter, report) -> None:
        self.may_report.wait(180)
        self.reports.append(report)

    def rank(self, what: Share, target: Target, save: str = "s", **order) -> Rank:
        made = what.order(StageKey(save, 0, "a1"), target, SLOT, **order)
        return Rank(self.queue, self.channel, what, made)

    def idle(self) -> bool:
        return eventually(lambda: self.queue.num_active() == 0 and not self.queue.used_bytes())


@pytest.fixture
def places(tmp_path: Path) -> tuple[Target, Target]:
    return Target(str(tmp_path / "queue")), Target(str(tmp_path / "rank"))


MIXED = [5 * MIB + 123, 7, 0, 100_000, 3 * MIB, 64 << 10, 1, 4096, 2 * MIB, 70_001, 0]


@pytest.mark.parametrize("container", ["torch_save", "safetensors"])
@pytest.mark.parametrize("num_slots", [4, 40])
def test_it_writes_the_bytes_that_the_rank_would_have_written(container, num_slots, places):
    what = share(MIXED * 3, [b"pickled", b"", os.urandom(3 * MIB)], container=container,
                 part_bytes=9 * MIB)  # fmt: skip
    expected = what.written(places[1])
    node = Node(num_slots)
    rank = node.rank(what, places[0])
    rank.stage()
    scribbled(what)()
    assert node.idle()
    assert same_files(*places)
    found = {report.file: report.receipt for report in node.reports}
    assert [found[r.file].digest for r in expected] == [r.digest for r in expected]
    assert [found[r.file].deferred for r in expected] == [r.deferred for r in expected]


def test_it_begins_to_write_with_the_first_window(places):
    what = share([6 * MIB])
    node = Node(8)
    rank = node.rank(what, places[0]).begin()
    rank.fill()
    assert eventually(lambda: node.queue.progress(rank.order.key).written_bytes > MIB)
    assert not node.queue.progress(rank.order.key).is_sealed
    assert node.queue.progress(rank.order.key).num_bytes == 6 * MIB


def test_one_word_delivers_a_window_and_all_before_it(places):
    """So a rank need not tell of each; what is told twice, or of windows without slots, is fine."""
    what = share([9 * MIB])
    node = Node(8)
    rank = node.rank(what, places[0]).begin()
    for _ in range(4):
        rank.fill(deliver=False)
    assert rank.num_windows == 5
    node.queue.deliver(rank.order.key, 2)
    assert eventually(lambda: node.queue.progress(rank.order.key).written_bytes >= 5 * MIB)
    for told in (3, 1, 99):
        node.queue.deliver(rank.order.key, told)
    rank.fill(deliver=False)
    assert node.queue.seal(rank.order.key).result(180) is True
    what.written(places[1])
    assert node.idle()
    node.queue.deliver(rank.order.key, 4)
    assert same_files(*places)
    assert node.queue.owned("rank 0") == tuple(sorted(slot.index for slot in rank.slots))


def test_a_state_larger_than_the_budget_goes_through_and_the_rank_waits_for_its_last_file(places):
    what = share([3 * MIB] * 10)
    node = Node(4)
    node.may_report.clear()
    rank = node.rank(what, places[0]).begin()
    for _ in range(rank.num_windows):
        rank.fill()
    waiting = node.queue.seal(rank.order.key)
    assert eventually(lambda: node.queue.progress(rank.order.key).reports)
    assert not waiting.done()
    node.may_report.set()
    assert waiting.result(180) is True
    what.written(places[1])
    assert node.idle()
    assert same_files(*places)


def test_bytes_stay_until_the_report_is_taken_also_when_another_save_waits_for_room(places):
    what = share([3 * MIB])
    node = Node(2)
    node.may_report.clear()
    first = node.rank(what, places[0])
    first.stage()
    assert eventually(lambda: node.queue.progress(first.order.key).reports)
    second = node.rank(share([3 * MIB], seed=1), places[1], save="t").begin()
    waiting = node.queue.more(second.order.key, 0)
    assert not waiting.done()
    assert node.queue.used_bytes() == 2 * SLOT
    assert all(node.arena.holds(slot) for slot in first.slots)
    node.may_report.set()
    assert waiting.result(180).slots
    assert not all(node.arena.holds(slot) for slot in first.slots)


def test_a_rank_gets_its_own_slots_again(places):
    node = Node(8)
    used = []
    for number in range(3):
        rank = node.rank(share([5 * MIB]), Target(f"{places[0].url}{number}"), save=str(number))
        rank.stage()
        used.append({slot.index for slot in rank.slots})
        assert node.idle()
        other = node.rank(share([MIB]), Target(f"{places[1].url}{number}"), save=f"o{number}",
                          owner="rank 1")  # fmt: skip
        other.stage()
        assert node.idle()
    assert used[0] == used[1] == used[2]


def test_a_rank_that_dies_in_the_middle_is_reported_and_its_slots_come_back(places):
    what = share([3 * MIB] * 2)
    node = Node(8)
    rank = node.rank(what, places[0]).begin()
    rank.fill()
    node.queue.process_died("p0")
    assert node.idle()
    assert [type(report.error) for report in node.reports] == [ParticipantError]
    assert not list(Path(places[0].url).rglob("*"))


def test_a_rank_that_dies_when_all_is_delivered_is_not_missed(places):
    what = share([3 * MIB] * 2)
    what.written(places[1])
    node = Node(8)
    rank = node.rank(what, places[0]).begin()
    for _ in range(rank.num_windows):
        rank.fill()
    node.queue.process_died("p0")
    assert node.idle()
    assert same_files(*places)


def test_a_cancelled_save_frees_its_slots_only_when_the_rank_has_stopped_filling_them(places):
    node = Node(8)
    rank = node.rank(share([5 * MIB]), places[0]).begin()
    rank.fill()
    node.queue.cancel(rank.order.key)
    with pytest.raises(SaveCancelledError):
        node.queue.more(rank.order.key, 9).result(180)
    with pytest.raises(SaveCancelledError):
        node.queue.seal(rank.order.key).result(180)
    assert eventually(lambda: not list(Path(places[0].url).glob("*")))
    # The first window was delivered, the rank may still fill the two others.
    assert eventually(lambda: node.queue.used_bytes() == 2 * SLOT)
    assert not node.channel.allocator.grants()
    node.queue.cancel(rank.order.key, by_rank=True)
    assert node.idle()
    assert node.reports == []


def test_a_storage_that_fails_is_reported_and_all_slots_come_back(places):
    def refuse(target):
        raise StorageError("no space left")

    node = Node(4, opener=refuse)
    rank = node.rank(share([3 * MIB] * 6), places[0])
    rank.stage()
    assert node.idle()
    assert [report.error.message for report in node.reports] == ["no space left"]


def test_any_number_of_ranks_gets_through_the_smallest_budget(places):
    node = Node(4)
    shares = [share([3 * MIB] * 3 + [500] * 40, seed=n, part_bytes=4 * MIB) for n in range(6)]
    ranks = [
        node.rank(what, Target(f"{places[0].url}{n}"), save=str(n), owner=str(n), process=str(n))
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


def test_what_a_dead_stager_held_is_written_by_the_next_one(places):
    what = share([3 * MIB] * 2 + [70], [b"note"])
    what.written(places[1])
    dead = Node(8, opener=lambda target: threading.Event().wait(60))
    rank = dead.rank(what, places[0])
    rank.stage()
    scribbled(what)()
    mine = StagingMemory.open(dead.arena.address)
    node = Node(4)
    order = what.order(StageKey("s", 0, "a1", 1), places[0], SLOT)
    assert node.queue.adopt(order, None, mine, tuple(rank.slots)) is True
    assert node.queue.adopt(order, None, mine, tuple(rank.slots)) is True
    assert eventually(lambda: node.reports)
    assert same_files(*places)
    assert node.queue.num_adopted() == 0


def test_adopted_bytes_that_were_overwritten_are_an_error_and_no_file(places):
    what = share([3 * MIB] * 2)
    dead = Node(8, opener=lambda target: threading.Event().wait(60))
    rank = dead.rank(what, places[0])
    rank.stage()
    slot = rank.slots[-1]
    dead.arena.mark(type(slot)(slot.index, slot.generation + 1))
    node = Node(4)
    order = what.order(StageKey("s", 0, "a1", 1), places[0], SLOT)
    node.queue.adopt(order, None, dead.arena, tuple(rank.slots))
    assert eventually(lambda: node.reports)
    assert isinstance(node.reports[0].error, ParticipantError)
    assert not list(Path(places[0].url).rglob("*"))


def test_only_the_files_that_are_asked_for_are_written_again(places):
    what = share([3 * MIB] * 4, part_bytes=3 * MIB)
    dead = Node(8, opener=lambda target: threading.Event().wait(60))
    rank = dead.rank(what, places[0])
    rank.stage()
    node = Node(4)
    order = what.order(StageKey("s", 0, "a1", 1), places[0], SLOT, files=(1, 3))
    node.queue.adopt(order, None, dead.arena, tuple(rank.slots))
    assert eventually(lambda: len(node.reports) == 2)
    assert {report.file for report in node.reports} == {1, 3}
    assert eventually(lambda: len(list(Path(places[0].url).glob("*"))) == 2)


def test_the_same_order_twice_is_one_job_and_a_plan_is_sent_once(places):
    what = share([MIB])
    node = Node(4)
    rank = node.rank(what, places[0]).begin()
    assert node.queue.begin(rank.order, None).slots == tuple(rank.slots)
    assert node.queue.used_bytes() == SLOT
    without = what.order(StageKey("t", 0, "a1"), places[0], SLOT, plan=None)
    assert node.queue.begin(without, None).slots
    other = share([2 * MIB]).order(StageKey("u", 0, "a1"), places[0], SLOT, plan=None)
    assert node.queue.begin(other, None) == Unknown("plan")


def test_what_is_not_known_is_said_or_ignored(places):
    node = Node(4)
    key = StageKey("s", 0, "a1")
    assert node.queue.more(key, 0).result(180) == Unknown("job")
    assert node.queue.seal(key).result(180) == Unknown("job")
    assert node.queue.progress(key) is None
    node.queue.deliver(key, 0)
    node.queue.cancel(key)
    node.queue.release(key)
    with pytest.raises(LimitError, match="windows of at most 0 bytes in the store"):
        node.queue.begin(share([1]).order(key, places[0], SLOT, channel="store"), None)


def test_reports_stay_until_they_are_released(places):
    node = Node(4)
    rank = node.rank(share([MIB]), places[0])
    rank.stage()
    assert node.idle()
    progress = node.queue.progress(rank.order.key)
    assert progress.written_bytes == progress.num_bytes == MIB
    assert progress.reports == tuple(node.reports)
    node.queue.release(rank.order.key)
    assert node.queue.progress(rank.order.key) is None


def test_release_in_the_middle_gives_up(places):
    node = Node(4, opener=lambda target: threading.Event().wait(60))
    rank = node.rank(share([MIB]), places[0])
    rank.begin()
    node.queue.release(rank.order.key)
    with pytest.raises(SaveCancelledError):
        node.queue.seal(rank.order.key).result(180)
    node.queue.cancel(rank.order.key, by_rank=True)
    assert node.queue.used_bytes() == 0


def test_windows_that_come_as_objects_are_counted_and_let_go(places):
    what = share([3 * MIB] * 4)
    what.written(places[1])
    reports = []
    allocator = SlotAllocator(2)
    queue = WriteQueue(
        {"store": Channel(SLOT, allocator)}, StagerOptions(), lambda _, r: reports.append(r)
    )
    order = what.order(StageKey("s", 0, "a1"), places[0], SLOT, channel="store")
    grant = queue.begin(order, None)
    slots, held, most = list(grant.slots), {}, 0
    from ray_dcp.stage.copying import HostFiller, fill_window
    from ray_dcp.stage.windows import lay_out_windows

    layout = lay_out_windows(what.plan, order.deferred_bytes, SLOT)
    for window in range(layout.num_windows):
        while window >= len(slots):
            grant = queue.more(order.key, len(slots)).result(180)
            slots += grant.slots
            for freed in grant.freed:
                held.pop(freed, None)
        import numpy as np

        held[window] = np.empty(layout.used_bytes[window], np.uint8)
        fill_window(layout, window, held[window], HostFiller(what.items.source), bytes)
        most = max(most, len(held))
        queue.deliver(order.key, window, memoryview(held[window]))
    assert queue.seal(order.key).result(180)
    assert eventually(lambda: reports and not allocator.num_used)
    assert most <= 2
    assert same_files(*places)


def without_threads(monkeypatch, after=0):
    """No thread can be started any more, but for the next few."""
    real, left = threading.Thread.start, [None] * after

    def start(thread):
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)


def test_a_rank_is_told_at_once_that_nobody_can_write_its_bytes(places, monkeypatch):
    what = share([3 * MIB] * 2)
    node = Node(4)
    rank = node.rank(what, places[0]).begin()
    with monkeypatch.context() as patch:
        without_threads(patch)
        for _ in range(rank.num_windows):
            rank.fill()
        with pytest.raises(LimitError, match="thread"):
            node.queue.seal(rank.order.key).result(180)
    node.queue.cancel(rank.order.key, by_rank=True)
    assert node.idle()
    what.written(places[1])
    node.rank(what, places[0], "again").stage()
    assert node.idle()
    assert same_files(*places)


def test_bytes_of_a_dead_stager_that_nobody_can_write_are_refused(places, monkeypatch):
    what = share([3 * MIB])
    rank = Node(8, opener=lambda target: threading.Event().wait(60)).rank(what, places[0])
    rank.stage()
    order = what.order(StageKey("s", 0, "a1", 1), places[0], SLOT)
    without_threads(monkeypatch)
    with pytest.raises(LimitError, match="thread"):
        Node(4).queue.adopt(order, None, rank.channel.arena, tuple(rank.slots))


def test_one_thread_writes_all_files_where_no_more_can_be_started(places, monkeypatch):
    what = share([3 * MIB] * 4, part_bytes=3 * MIB)
    what.written(places[1])
    assert len(what.plan.files) > 1
    node = Node(16)
    rank = node.rank(what, places[0], options=SaveOptions(num_threads=4))
    without_threads(monkeypatch, after=1)
    rank.stage()
    assert node.idle()
    assert same_files(*places)
    assert len(node.reports) == len(what.plan.files)


def test_every_file_is_reported_whatever_goes_wrong_beside_the_writing(places, monkeypatch):
    what = share([3 * MIB] * 2, part_bytes=3 * MIB)

    def refuse(*_):
        raise OSError("no such niceness")

    monkeypatch.setattr("ray_dcp.stage.write_queue.step_behind", refuse)
    node = Node(8)
    node.rank(what, places[0]).stage()
    assert node.idle()
    assert [report.file for report in node.reports] == [f.file for f in what.plan.files]
    assert all("no such niceness" in report.error.message for report in node.reports)


def memory(arena):
    """Returns the bytes that a machine spends on staging memory."""
    return os.fstat(arena.address.fd).st_blocks * 512


def test_memory_that_only_ranks_that_are_gone_have_used_is_given_back(places):
    node = Node(16)
    node.may_report.clear()  # so that each has slots of its own
    for number, owner in enumerate(["gone", "stays"]):
        what = share([7 * MIB], seed=number)
        node.rank(what, Target(f"{places[0].url}{number}"), str(number), owner=owner).stage()
    node.may_report.set()
    assert node.idle()
    before = memory(node.arena)
    node.queue.shrink({"gone", "stays"})
    assert memory(node.arena) == before
    node.queue.shrink({"stays"})
    assert memory(node.arena) <= before // 2 + MIB
    # What stays is warm still, and what went can be used again.
    assert len(node.queue.owned("stays")) == 4
    assert node.queue.owned("gone") == ()
    what = share([25 * MIB], seed=9)
    what.written(places[1])
    node.rank(what, places[0], "all", owner="new").stage()
    assert node.idle()
    assert same_files(*places)


def test_a_slot_that_a_rank_which_stays_once_used_keeps_its_memory(places):
    node = Node(4)
    for number, owner in enumerate(["stays", "gone"]):
        what = share([7 * MIB], seed=number)
        node.rank(what, Target(f"{places[0].url}{number}"), str(number), owner=owner).stage()
        assert node.idle()
    before = memory(node.arena)
    node.queue.shrink({"stays"})
    # It may have registered these pages with a device, which would go on writing to them.
    assert memory(node.arena) == before
