"""A node's stager writes what several ranks hand over into one file, within its budget."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ray_dcp.errors import CheckpointError, ParticipantError
from ray_dcp.options import SaveOptions
from ray_dcp.protocol.messages import Target
from ray_dcp.stage import joint_files
from ray_dcp.stage.arena import Arena
from ray_dcp.stage.filling import HostFiller, fill_window
from ray_dcp.stage.jobs import Channel
from ray_dcp.stage.layout import lay_out_windows
from ray_dcp.stage.slots import Line, SlotLedger
from ray_dcp.stage.spool import Spool
from ray_dcp.stage.values import StageKey, StageReport, StagerOptions
from ray_dcp.store.opening import open_storage
from tests.polling import eventually
from tests.staged import MIB, Rank, same_files, shares, written_together
from tests.unit.test_stage_spool import SLOT, Node

SIZES = [
    [5 * MIB + 123, 7, 0, 100_000, 3 * MIB],
    [64 << 10, 1, 4096],
    [],
    [2 * MIB, 70_001, 0, 4 * MIB],
]
OBJECTS = [[b"pickled", b""], [os.urandom(3 * MIB)], [b"of a rank without tensors"], []]


@pytest.fixture(scope="module", autouse=True)
def nothing_left():
    """Lets go of memory that only cycles hold, of which other tests count the descriptors."""
    yield
    gc.collect()


@pytest.fixture
def places(tmp_path: Path) -> tuple[Target, Target]:
    return Target(str(tmp_path / "spool")), Target(str(tmp_path / "rank"))


def ranks_of(node, found, target, **order):
    options = SaveOptions(write_timeout_s=30, **order)
    return [
        Rank(
            node.spool, node.channel, one,
            one.order(StageKey("s", rank, "a1"), target, SLOT, owner=f"rank {rank}",
                      process=f"p{rank}", options=options),
        )
        for rank, one in enumerate(found)
    ]  # fmt: skip


def stage_all(ranks, order=None):
    """Every rank stages in a thread of its own, as they do in processes of theirs."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(Rank.stage, order or ranks))


@pytest.mark.parametrize("num_slots", [4, 40])
@pytest.mark.parametrize("files_per_node", [1, 2, 3])
def test_several_ranks_write_into_few_files(num_slots, files_per_node, places):
    found = shares(SIZES, OBJECTS, files_per_node=files_per_node)
    expected = written_together(found, places[1])
    assert len(expected) == files_per_node
    node = Node(num_slots)
    # Whoever begins first: what is last in a file can't take the room of what is first.
    stage_all(ranks := ranks_of(node, found, places[0]), ranks[::-1])
    assert node.idle()
    assert [report.error for report in node.reports if report.error] == []
    assert same_files(*places)
    told = {report.file: report.receipt for report in node.reports}
    assert len(node.reports) == files_per_node
    assert [told[r.file].digest for r in expected] == [r.digest for r in expected]
    assert [told[r.file].deferred for r in expected] == [r.deferred for r in expected]
    for rank in ranks:
        assert node.spool.progress(rank.order.key).reports[0].receipt is not None


def test_many_ranks_with_little_go_through_few_slots(places):
    # What is joined with bytes of the next rank must not keep the memory of the one before.
    found = shares([[100]] * 10, [[b"object"]] * 10)
    written_together(found, places[1])
    node = Node(4)
    stage_all(ranks_of(node, found, places[0]))
    assert node.idle()
    assert same_files(*places)


def test_a_rank_goes_on_only_when_there_is_room_for_all(places):
    # The second one's bytes go through the memory that the first one's have left.
    found = shares([[6 * MIB], [6 * MIB]], [[], []])
    node = Node(4)
    one, two = ranks_of(node, found, places[0])
    one.begin()
    for _ in range(one.num_windows):
        one.fill()
    sealed = node.spool.seal(one.order.key)
    assert not sealed.done()
    two.stage()
    assert sealed.result(180) is True
    assert node.idle()


def test_what_one_rank_can_not_hand_over_none_has_written(places):
    found = shares([[6 * MIB], [6 * MIB], [1]], [[], [], []])
    node = Node(40)
    one, two, three = ranks_of(node, found, places[0])
    for rank in (one, two, three):
        rank.begin()
    for rank in (one, two, three):
        rank.fill()
    sealed = node.spool.seal(three.order.key)
    assert sealed.result(180) is True  # there is room for all
    node.spool.process_died("p1")
    assert eventually(lambda: node.reports)
    with pytest.raises(ParticipantError, match="rank 1 died"):
        raise node.reports[0].error
    node.spool.process_died("p0")
    node.spool.process_died("p2")
    assert node.idle()
    assert open_storage(places[0]).list() == []
    assert not list(Path(places[0].url).glob("*"))


def test_a_rank_that_never_comes_is_named(places):
    found = shares([[6 * MIB], [1]], [[], []])
    node = Node(40)
    one = ranks_of(node, found, places[0])[0]
    one.order = one.share.order(
        one.order.key, places[0], SLOT, options=SaveOptions(write_timeout_s=0.05)
    )
    one.begin()
    one.fill()
    assert eventually(lambda: node.reports)
    error = node.reports[0].error
    assert isinstance(error, ParticipantError)
    assert "ranks 1 did not" in str(error)


def test_a_rank_that_dies_while_it_waits_for_others_is_given_up(places):
    found = shares([[6 * MIB], [1]], [[], []])
    node = Node(40)
    one = ranks_of(node, found, places[0])[0]
    one.begin()
    for _ in range(one.num_windows):
        one.fill()
    node.spool.process_died("p0")
    assert node.idle()
    assert isinstance(node.reports[0].error, ParticipantError)


def test_a_cancelled_rank_takes_the_others_along(places):
    gate = threading.Event()

    def opener(target):
        gate.wait(180)
        return open_storage(target)

    found = shares([[6 * MIB], [6 * MIB]], [[], []])
    node = Node(40, opener)
    ranks = ranks_of(node, found, places[0])
    stage_all(ranks)
    node.spool.cancel(ranks[1].order.key, "by its rank", by_rank=True)
    # Its memory is somebody else's only when the writer has let go of it.
    assert node.spool.used_bytes() > 0
    gate.set()
    assert node.idle()
    assert node.reports == []
    with pytest.raises(CheckpointError):
        node.spool.more(ranks[0].order.key, 99).result(180)


def test_another_stager_writes_what_the_ranks_still_have_mapped(places):
    gate = threading.Event()

    def frozen(target):
        gate.wait(180)
        return open_storage(target)

    found = shares(SIZES, OBJECTS)
    written_together(found, places[1])
    first, second = Node(40, frozen), Node(4)
    ranks = ranks_of(first, found, places[0])
    stage_all(ranks)
    for number, rank in enumerate(ranks):
        key = StageKey("s", number, "a1", incarnation=1)
        order = rank.share.order(key, places[0], SLOT)
        assert second.spool.adopt(order, None, first.arena, tuple(rank.slots)) is True
    assert eventually(lambda: second.reports)
    assert second.reports[0].receipt is not None
    assert same_files(*places)
    # The first one wakes up: it finds its own bytes there.
    gate.set()
    assert eventually(lambda: first.reports)
    assert first.reports[0].receipt.digest == second.reports[0].receipt.digest
    assert same_files(*places)


def test_what_is_kept_is_found_in_the_joint_file(places):
    found = shares(SIZES, OBJECTS)
    node = Node(40)
    ranks = ranks_of(node, found, places[0], keep_in_memory=1)
    stage_all(ranks)
    assert eventually(lambda: node.spool.num_kept() == 4)
    (file,) = node.spool.kept("a1").files
    data = open_storage(places[0]).read(file.key)
    looked_at = 0
    for share in found:
        plan = share.plan.files[0]
        for place, length in zip(plan.payload_offset, plan.payload_bytes, strict=True):
            parts = file.find(int(place), int(length)) if length else []
            assert parts is not None
            at = node.spool.fetch(parts).tobytes()
            assert at == data[place : place + length]
            looked_at += len(at)
    assert looked_at == sum(map(sum, SIZES))
    # Where objects end up is not known to those who staged them.
    assert file.num_bytes.sum() == sum(map(sum, SIZES))


def test_nobody_lets_go_of_bytes_that_are_still_being_written():
    joint = joint_files._Joint((0, 1), threading.Condition(), is_writing=True, is_told=True)
    with joint.changed:
        joint.end(StageReport(StageKey("s", 1, "a1"), 0, None, CheckpointError("gave up")))
    assert not joint.is_known()
    joint.is_writing = False
    assert joint.is_known()


def test_windows_of_a_line_are_granted_in_the_order_of_the_file():
    ledger = SlotLedger(3)
    ledger.begin("b", "rank 1", [{0}, {0}], line=Line("x", 1, 2, 1))
    assert ledger.grants() == []  # nobody knows as yet how much the first one needs
    ledger.begin("a", "rank 0", [{0}, {0}, {0}], line=Line("x", 0, 2, 2))
    found = [(grant.job, grant.window) for grant in ledger.grants()]
    assert found == [("a", 0), ("a", 1), ("b", 0)]
    ledger.delivered("a", 0)
    ledger.read("a", 0, 0)
    assert [(grant.job, grant.window) for grant in ledger.grants()] == [("a", 2)]
    for window in (1, 2):
        ledger.delivered("a", window)
    assert not ledger.may_seal("a")
    ledger.read("a", 1, 0)
    assert [(grant.job, grant.window) for grant in ledger.grants()] == [("b", 1)]
    ledger.finished("a", 0)
    assert ledger.may_seal("a")
    for job in "ab":
        ledger.drop(job)
    ledger.begin("c", "rank 1", [{0}], line=Line("x", 1, 2, 1))
    assert ledger.grants() == []  # of those that were before nothing is left


def test_fixed_and_deferred_items_of_a_joint_file_are_in_windows_of_their_own():
    one, _ = shares([[100, 3 * MIB], [5]], [[b"x", b"yy"], []])
    layout = lay_out_windows(one.plan, [[1, 2]], SLOT)
    assert layout.num_fixed_windows == layout.num_windows - 1
    late = layout.window[layout.is_deferred]
    assert np.unique(late).tolist() == [layout.num_windows - 1]
    assert not np.isin(layout.window[~layout.is_deferred], late).any()


def test_ranks_share_a_file_also_where_one_of_them_can_not_map_the_memory(places):
    """Its bytes come as objects of the store, which have a ledger of their own."""
    found = shares([[6 * MIB], [6 * MIB]], [[], [b"x"]])
    written_together(found, places[1])
    arena = Arena.create(4, SLOT)
    channels = {
        "arena": Channel(SLOT, SlotLedger(4), arena), "store": Channel(SLOT, SlotLedger(4))
    }  # fmt: skip
    reports = []
    spool = Spool(channels, StagerOptions(), lambda _, report: reports.append(report))
    one, two = (
        Rank(spool, channels["arena"], share, share.order(StageKey("s", n, "a1"), places[0], SLOT))
        for n, share in enumerate(found)
    )
    order = replace(two.order, channel="store")
    assert spool.begin(order, None).slots == ()
    one.begin()
    layout = lay_out_windows(two.share.plan, order.deferred_bytes, SLOT)
    slots = list(spool.more(order.key, 0).result(180).slots)
    items = two.share.items
    for window in range(layout.num_windows):
        while window >= len(slots):
            slots += spool.more(order.key, len(slots)).result(180).slots
        into = np.zeros(layout.used_bytes[window], np.uint8)
        fill_window(layout, window, into, HostFiller(items.source), items.deferred)
        spool.deliver(order.key, window, memoryview(into))
    for _ in range(one.num_windows):
        one.fill()
    assert spool.seal(order.key).result(180) is True
    assert spool.seal(one.order.key).result(180) is True
    assert eventually(lambda: reports)
    assert reports[0].error is None
    assert same_files(*places)


@pytest.mark.parametrize(
    ("sizes", "objects"),
    [([[], [SLOT * 10]], [[b"object"], []]), ([[0], [SLOT * 10]], [[], []])],
)
def test_room_is_made_even_if_what_the_first_rank_has_comes_last(sizes, objects, places):
    found = shares(sizes, objects)
    written_together(found, places[1])
    node = Node(4)
    stage_all(ranks_of(node, found, places[0]))
    assert node.idle()
    assert same_files(*places)


@pytest.mark.parametrize("together", [0, 1])
def test_ranks_with_many_small_tensors_do_not_wait_in_a_circle(together, places):
    # What is packed and not yet written lies in windows for whose slots the others wait.
    count = 8 if together else 4
    found = shares([[2000] * (3000 if together else 6000)] * count, [[]] * count, files_per_node=4)
    written_together(found, places[1])
    node = Node(4)
    ranks = ranks_of(node, found, places[0])
    for rank in ranks:
        rank.begin()

    def hand_over(rank):
        for _ in range(rank.num_windows):
            rank.fill()
        return node.spool.seal(rank.order.key).result(180)

    with ThreadPoolExecutor(count) as pool:
        assert all(pool.map(hand_over, ranks))
    assert node.idle()
    assert [report.error for report in node.reports if report.error] == []
    assert same_files(*places)


@pytest.mark.parametrize("sealed", [0, 1])
def test_one_is_adopted_and_the_other_hands_over_anew(sealed, places):
    """The stager dies when one of two ranks was told to go on, and the other still copies."""
    found = shares([[3 * MIB], [3 * MIB]], [[], []])
    written_together(found, places[1])
    gate = threading.Event()

    def frozen(target):
        assert gate.wait(180)
        return open_storage(Target(f"{target.url}-late"))

    first, second = Node(40, frozen), Node(40)
    ranks = ranks_of(first, found, places[0])
    for rank in ranks:
        rank.begin()
    done = ranks[sealed]
    for _ in range(done.num_windows):
        done.fill()
    assert first.spool.seal(done.order.key).result(180) is True
    anew = [replace(rank.order, key=replace(rank.order.key, incarnation=1)) for rank in ranks]
    assert second.spool.adopt(anew[sealed], None, first.arena, tuple(done.slots)) is True
    other = Rank(second.spool, second.channel, found[1 - sealed], anew[1 - sealed])
    staged = threading.Thread(target=other.stage, daemon=True)
    staged.start()
    staged.join(180)
    assert not staged.is_alive()
    assert eventually(lambda: second.reports)
    assert [report.error for report in second.reports if report.error] == []
    assert same_files(*places)
    assert second.spool._joint.lines == {}
    assert second.spool._joint._adopted == {}
    gate.set()
    for rank in ranks:
        first.spool.cancel(rank.order.key, by_rank=True)


def test_what_is_kept_of_a_file_is_kept_whole_or_not_at_all(places):
    # What is missing between what two ranks have of it would pass for frames.
    found = shares([[100_000]] * 3, [[]] * 3)
    node = Node(40)
    ranks = ranks_of(node, found, places[0], keep_in_memory=1)
    stage_all(ranks)
    assert eventually(lambda: node.reports and not node.spool.num_active())
    for rank in ranks:
        node.spool.release(rank.order.key, committed=True)
    assert node.spool.kept("a1") is not None
    job = node.spool._jobs[ranks[1].order.key]
    job.is_kept = False
    assert node.spool.kept("a1") is None
