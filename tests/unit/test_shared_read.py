"""Shared reads: messages of a load, the phase in which it is decided, and ranks that give up."""

from __future__ import annotations

import asyncio
import itertools
import threading

import numpy as np
import pytest

from ray_dcp import saving
from ray_dcp.commit_protocol.commands import ShareReads
from ray_dcp.commit_protocol.load import Decline, Enter, Leave, Listen, Offer, SharedReads, Use
from ray_dcp.commit_protocol.messages import (
    LoadDone,
    LoadOutcome,
    LoadProceed,
    LoadReady,
    OpKey,
    ReadCounts,
)
from ray_dcp.errors import (
    LimitError,
    ParticipantError,
    SaveCancelledError,
    StorageError,
    UnsafeCheckpointError,
)
from ray_dcp.io import shared_read
from ray_dcp.io.shared_read import SharedReadStorage
from ray_dcp.options import LoadOptions
from ray_dcp.planning.reads import Ranges, RankShare, ReadNeeds, ShareCost, merged, share_reads
from ray_dcp.runtime.coordinator import SharedReadDispatch
from ray_dcp.runtime.rank_load import drive
from ray_dcp.runtime.shared_reads import RayTransport
from ray_dcp.runtime.tasks import perform
from ray_dcp.store.storage import MemoryStorage
from tests.support.arrays import ArrayWork
from tests.support.protocol import KEY, Play
from tests.support.threads import Board, ThreadExchange, run_as_ranks
from tests.support.world import load_ranks, save
from tests.unit.test_protocol_load import to_planning

MIB = 1 << 20


def needs(*rows: tuple[int, int, int], cost: ShareCost | None = None, node: str = "n"):
    columns = np.array(rows, np.int64)
    ranges = merged(columns[:, 0].astype(np.int32), columns[:, 1], columns[:, 2])
    return ReadNeeds(ranges.encode(), node, cost)


def ready(play: Play, rank: int, *rows: tuple[int, int, int], cost: ShareCost | None = None):
    return play.send(LoadReady(KEY, rank, needs=needs(*rows, cost=cost) if rows else None))


def shared(play: Play) -> None:
    """Does the task of the machine as a coordinator would."""
    (task,) = [c.task for c in play.commands if isinstance(getattr(c, "task", None), ShareReads)]
    play.done(perform(task))


def deciding() -> Play:
    """Returns a load of two ranks, which waits for who reads what."""
    play = Play(world_size=2)
    to_planning(play)
    for rank in range(2):
        ready(play, rank, (0, 0, MIB))
    return play


# The machine


def test_ranks_that_need_the_same_bytes_are_told_who_reads_them():
    play = Play(world_size=3)
    to_planning(play)
    ready(play, 0, (0, 0, 40 * MIB))
    ready(play, 1, (0, 0, 40 * MIB))
    assert ready(play, 2, (1, 0, 40 * MIB)) is None
    shared(play)
    first, second = (play.reply(rank, "LoadReady").share for rank in (0, 1))
    assert first.unit.tolist() == second.unit.tolist() == [0, 1, 2]
    assert first.reader.tolist() == second.reader.tolist()
    assert set(first.reader.tolist()) == {0, 1}
    assert first.ranks.tolist() == [2, 2, 2]
    assert play.reply(2, "LoadReady") == LoadProceed()


@pytest.mark.parametrize(
    ("cached", "nodes", "asks"), [(True, "nn", 0), (True, "nm", 1), (False, "nn", 1)]
)
def test_behind_one_cache_it_is_not_even_thought_about(cached, nodes, asks):
    play = Play(world_size=2)
    to_planning(play)
    cost = ShareCost(request_s=1e-3, bytes_per_s=1e8, cached=cached)
    for rank, node in enumerate(nodes):
        play.send(LoadReady(KEY, rank, needs=needs((0, 0, 40 * MIB), cost=cost, node=node)))
    tasks = [c for c in play.commands if isinstance(getattr(c, "task", None), ShareReads)]
    assert len(tasks) == asks
    if asks:
        shared(play)
    assert (play.reply(0, "LoadReady").share is not None) == bool(asks)


@pytest.mark.parametrize("fails", [False, True], ids=["in time", "at all"])
def test_a_load_goes_on_without_sharing_when_it_is_not_decided(fails):
    play = deciding()
    if fails:
        play.fail(StorageError("no memory"))
    else:
        play.expire()
        shared(play)  # too late, and dropped
    assert play.reply(0, "LoadReady") == play.reply(1, "LoadReady") == LoadProceed()
    play.send(LoadDone(KEY, 0, ReadCounts(10, 16)))
    assert isinstance(play.send(LoadDone(KEY, 1, ReadCounts(5, 5))), LoadOutcome)


# The messages


def enter(rank, units=(0,), readers=(0,)):
    return Enter(KEY, rank, tuple(units), tuple(readers))


def updates(reads, rank):
    return [(new.what, new.unit, new.handle) for new in reads.updates(rank, 0)]


BOTH = (enter(0), enter(1))
TWO_UNITS = (enter(0, (0, 1), (0, 0)), enter(1, (0, 1), (0, 0)))
OFFER, THERE, FREE = Offer(KEY, 0, 0, 2, "h"), ("there", 0, "h"), ("free", 0, None)
TO_THREE = (*BOTH, enter(2), Use(KEY, 1, (0,)), Offer(KEY, 0, 0, 3, "h"))
GONE = [("gone", 0, None), ("gone", 1, None)]


@pytest.mark.parametrize(
    ("messages", "num_there", "expected"),
    [
        ((enter(0), OFFER, enter(1)), 1, {1: [THERE]}),
        ((*BOTH, *BOTH, OFFER, OFFER, Use(KEY, 0, (0,)), Use(KEY, 0, (0,))), 1, {1: [THERE]}),
        (TO_THREE, 1, {2: [THERE], 1: []}),
        ((*TO_THREE, Use(KEY, 0, (0,))), 1, {0: []}),
        ((*TO_THREE, Use(KEY, 0, (0,)), Use(KEY, 2, (0,))), 0, {0: [FREE], 2: [FREE]}),
        ((*TWO_UNITS, Decline(KEY, 0, (0,)), Leave(KEY, 0)), 0, {1: GONE}),
        ((*TWO_UNITS, Leave(KEY, 0), Offer(KEY, 0, 1, 2, "late")), 0, {}),
        ((*BOTH, Offer(KEY, 1, 0, 2, "false"), Decline(KEY, 1, (0,))), 0, {1: []}),
        ((*BOTH, OFFER, Leave(KEY, 1), Use(KEY, 0, (0,))), 0, {}),
        ((*BOTH, OFFER, Leave(KEY, 1), Use(KEY, 0, (0,)), enter(1)), 0, {1: [FREE]}),
    ],
    ids=["late", "twice", "offered", "in use", "free", "declined", "left", "false", "gone", "back"],
)
def test_messages_decide_which_units_are_there(messages, num_there, expected):
    reads = SharedReads()
    for message in messages:
        reads.take(message)
    assert reads.num_there == num_there
    assert {rank: updates(reads, rank) for rank in expected} == expected


def test_messages_may_come_in_any_order():
    said = [
        enter(0, (0, 1, 2), (0, 0, 1)), enter(1, (0, 1, 2), (0, 0, 1)),
        OFFER, Use(KEY, 1, (0,)), Leave(KEY, 0, (0,)), Leave(KEY, 1),
    ]  # fmt: skip
    for order in itertools.permutations(said):
        reads = SharedReads()
        for message in order:
            reads.take(message)
        assert reads.num_there == 0
        # The last thing that the reader learns is that its unit is free, in whatever order.
        assert updates(reads, 0)[-1][:2] in {("free", 0), ("gone", 2)}
        assert FREE in updates(reads, 0)
        assert all(what == "gone" for what, unit, _ in updates(reads, 1) if unit == 1)


@pytest.mark.parametrize("last", [0, 1])
def test_a_unit_stays_until_its_last_byte_was_read(last):
    board = Board()
    mine = a_relay(ThreadExchange(board, 0), 0, budget_bytes=100)
    board.handover.take(Enter(KEY, 1, (0, 1, 2), (0, 0, 0)))
    board.handover.take(Leave(KEY, 1))
    mine.start()
    mine.read_into("f", 0, memoryview(bytearray(29 + last)))
    free = {new.unit for new in board.handover.updates(0, 0) if new.what == "free"}
    mine.finish()
    assert (2 in free) == bool(last)


# Where they are kept


def test_who_listens_is_answered_as_soon_as_something_is_new():
    over: set[OpKey] = set()

    async def play():
        board = SharedReadDispatch(lambda key: key in over)
        await board.share(enter(1))
        waiting = asyncio.ensure_future(board.share(Listen(KEY, 1, 0, 60.0)))
        await asyncio.sleep(0)
        await board.share(Offer(KEY, 0, 0, 2, "h"))
        news = await asyncio.wait_for(waiting, 10)
        nothing = await board.share(Listen(KEY, 1, 1, 0.0))
        waiting = asyncio.ensure_future(board.share(Listen(KEY, 1, 1, 60.0)))
        await asyncio.sleep(0)
        over.add(KEY)
        board.tidy()
        return news, nothing, await asyncio.wait_for(waiting, 10), await board.share(enter(2))

    news, nothing, at_the_end, after_it = asyncio.run(play())
    assert [new.handle for new in news] == ["h"]
    assert not nothing
    assert at_the_end is None
    assert after_it is None


# One who waits for the others


def one_share(reader: int, ranks: int, units: int = 3) -> RankShare:
    both = Ranges(np.zeros(1, np.int32), np.zeros(1, np.int64), np.full(1, 10 * units))
    shares = share_reads({0: both, 1: both}, world_size=2, unit_bytes=10, min_saved_bytes=1)
    part = shares.of_rank(0)
    return RankShare(
        part.unit, part.file, part.low, part.high,
        np.full(units, reader, np.int32), np.full(units, ranks, np.int32),
    )  # fmt: skip


def a_relay(exchange, reader: int, **more) -> SharedReadStorage:
    storage = MemoryStorage("a-relay")
    storage.write("f", bytes(range(30)))
    reads = (np.zeros(1, np.int32), np.zeros(1, np.int64), np.full(1, 30))
    share = one_share(reader, ranks=2)
    return SharedReadStorage(storage, ("f",), share, 0, reads, exchange, num_threads=1, **more)


def test_a_reader_whose_units_nobody_takes_leaves_the_rest_to_the_others(monkeypatch):
    monkeypatch.setattr(shared_read, "SHARE_TIMEOUT_S", 0.3)
    board = Board()
    mine = a_relay(ThreadExchange(board, 0), 0, budget_bytes=10)
    board.handover.take(Enter(KEY, 1, (0, 1, 2), (0, 0, 0)))
    mine.start()
    target = bytearray(30)
    mine.read_into("f", 0, memoryview(target))
    mine.finish()
    assert target == bytes(range(30))
    assert [new.what for new in board.handover.updates(1, 0)] == ["there", "gone", "gone"]


def test_a_load_that_failed_elsewhere_ends_the_wait():
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise SaveCancelledError("failed elsewhere")

    class Deaf(ThreadExchange):
        def offer(self, unit, ranks, data):
            stop.set()
            threading.Event().wait(5)
            return

    mine = a_relay(Deaf(Board(), 0), 0, budget_bytes=10, check=check)
    mine.start()
    with pytest.raises(SaveCancelledError):
        mine.read_into("f", 0, memoryview(bytearray(30)))


def test_a_reader_whose_storage_fails_tells_so_and_finds_out_itself():
    board = Board()
    mine = a_relay(ThreadExchange(board, 0), 0, budget_bytes=100)
    board.handover.take(Enter(KEY, 1, (0, 1, 2), (0, 0, 0)))
    mine._inner.delete(["f"])
    mine.start()
    with pytest.raises(StorageError):
        mine.read_into("f", 0, memoryview(bytearray(30)))
    mine.finish(failed=True)
    assert {new.what for new in board.handover.updates(1, 0)} == {"gone"}


@pytest.fixture
def no_threads(monkeypatch):
    """Refuses the threads of shared reads."""
    begin = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name in ("ray_dcp reads for all", "ray_dcp shared reads"):
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_a_reader_without_a_thread_fails_and_keeps_nobody_waiting(no_threads):
    board = Board()
    mine = a_relay(ThreadExchange(board, 0), 0, budget_bytes=100)
    board.handover.take(Enter(KEY, 1, (0, 1, 2), (0, 0, 0)))
    with pytest.raises(LimitError, match="start a thread"):
        mine.start()
    mine.finish(failed=True)
    assert {new.what for new in board.handover.updates(1, 0)} == {"gone"}


def test_shared_reads_fail_without_a_thread_that_hears_of_them(no_threads):
    def out_of_reach() -> None:
        raise ParticipantError("no coordinator")

    with pytest.raises(LimitError, match="start a thread"):
        RayTransport(out_of_reach, KEY, 0).enter(one_share(0, 2), lambda unit: None)


class Peers:
    """The other ranks of a load, which are threads; a part of `RayPeers`."""

    node = "n"

    def __init__(self) -> None:
        self.board = Board()

    def exchange(self, key: OpKey, rank: int, check: object) -> ThreadExchange:
        return ThreadExchange(self.board, rank)

    def budget_bytes(self, ranks_here: int) -> int:
        return 1


def test_a_rank_that_can_not_load_keeps_nobody_waiting_for_what_it_would_read(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(shared_read, "SHARE_TIMEOUT_S", 3600.0)
    state = {"rep.w": np.arange(40 * MIB, dtype=np.uint8), "note": {"text": "hello"}}
    save(state, 1, str(tmp_path))
    options = LoadOptions(share_reads=True, read_timeout_s=10.0)
    ranks, works = load_ranks(state, 2, str(tmp_path), options=options, peers=Peers())
    place = ArrayWork._place

    def refuse(work: ArrayWork, name: str, data: bytes) -> None:
        if work is works[0]:
            raise UnsafeCheckpointError("no such object on this rank")
        place(work, name, data)

    monkeypatch.setattr(ArrayWork, "_place", refuse)
    ended = run_as_ranks(
        lambda rank: drive(ranks[rank], saving.current_session(None, False).call), 2
    )
    assert [type(error) for error in ended] == [UnsafeCheckpointError] * 2
    assert works[1].finished
