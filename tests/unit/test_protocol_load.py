"""The load and exchange machines, fed by hand, and shared reads."""

from __future__ import annotations

import asyncio
import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest

from ray_dcp import errors, saving
from ray_dcp.commit_protocol.commands import ReadCheckpoint, ShareReads
from ray_dcp.commit_protocol.load import MOST_SENT_BYTES, Decline, Give, SharedUnit, Take
from ray_dcp.commit_protocol.messages import (
    Exchange,
    Exchanged,
    LoadDone,
    LoadGo,
    LoadJoin,
    LoadOutcome,
    LoadProceed,
    LoadReady,
    OpKey,
    ReadCounts,
    Refused,
    Target,
    Untaken,
)
from ray_dcp.coordinator.actor import SharedReadDispatch
from ray_dcp.coordinator.tasks import perform
from ray_dcp.core import bounds
from ray_dcp.io.shared_read import SharedReadStorage
from ray_dcp.options import LoadOptions
from ray_dcp.planning.reads import Ranges, RankShare, ReadNeeds, ShareCost, merged, share_reads
from ray_dcp.rank.rank_load import drive
from ray_dcp.store.memory import MemoryStorage
from tests.support.arrays import ArrayWork
from tests.support.protocol import KEY, TARGET, Play
from tests.support.threads import Board, ThreadExchange, run_as_ranks
from tests.support.world import load_ranks, save

FOUND = LoadGo("native", 3, b"manifest")


def to_planning(play):
    for rank in range(play.world_size):
        play.join_load(rank)
    play.done(FOUND)


def to_reading(play):
    to_planning(play)
    for rank in range(play.world_size):
        play.send(LoadReady(KEY, rank))


@pytest.mark.parametrize(("world_size", "is_sent"), [(2, True), (3, False)])
def test_a_chunk_table_is_sent_to_all_ranks_unless_that_is_much(world_size, is_sent):
    play, table = Play(world_size), bytes(MOST_SENT_BYTES // 2)
    for rank in range(world_size):
        play.join_load(rank)
    play.done(replace(FOUND, table=table))
    assert [play.reply(rank, "LoadJoin").table for rank in range(world_size)] == (
        [table if is_sent else b""] * world_size
    )


def test_what_one_rank_leaves_another_may_take_and_all_learn_what_nobody_takes():
    names = ("first", "second", "third", "spare")
    leaves = [
        Untaken.of(names, {"second", "third", "spare"}, {"second", "third"}),
        Untaken.of(names, {"first", "third", "spare"}, {"first"}),
        Untaken.of(names, {"first", "spare"}, ()),
    ]

    def told(*some):
        play = Play(len(some))
        to_planning(play)
        for rank, untaken in enumerate(some):
            play.send(LoadReady(KEY, rank, untaken=untaken))
        replies = [play.reply(rank, "LoadReady").untaken for rank in range(len(some))]
        assert replies == replies[:1] * len(some)
        return replies[0] and replies[0].refused_of(names)

    assert told(*leaves[:2]) == ["third"]
    assert told(*leaves) is None
    assert told(leaves[0], None) is None
    assert told(leaves[2], leaves[2]) is None


def test_the_outcome_sums_the_bytes_of_all_ranks_each_once():
    play = Play()
    to_reading(play)
    first = LoadDone(KEY, 0, ReadCounts(10, 16, 1, 2, 3))
    assert play.send(first) is play.send(first) is None
    summed = LoadOutcome(ReadCounts(15, 21, 2, 3, 4))
    assert play.send(LoadDone(KEY, 1, ReadCounts(5, 5, 1, 1, 1))) == summed
    assert play.reply(0, "LoadDone") == play.send(first) == summed
    assert play.coordination.active == ()


def fails_to_join(play):
    play.join_load(0, error=errors.StorageError("mine"))
    play.join_load(1)


def fails_to_plan(play):
    to_planning(play)
    play.send(LoadReady(KEY, 1))
    play.send(LoadReady(KEY, 0, errors.StorageError("mine")))


def fails_to_read(play):
    to_reading(play)
    play.send(LoadDone(KEY, 0, error=errors.StorageError("mine")))
    assert play.timer.after_s == bounds.ERRORS_S
    play.send(LoadDone(KEY, 1, ReadCounts(5, 5)))


def dies_while_planning(play):
    to_planning(play)
    play.send(LoadReady(KEY, 1))
    play.lose(0)


def dies_while_reading(play):
    to_reading(play)
    play.send(LoadDone(KEY, 1))
    play.lose(0)


@pytest.mark.parametrize(
    ("fail", "step", "kind"),
    [
        (fails_to_join, "LoadJoin", errors.StorageError),
        (fails_to_plan, "LoadReady", errors.StorageError),
        (fails_to_read, "LoadDone", errors.StorageError),
        (dies_while_planning, "LoadReady", errors.ParticipantError),
        (dies_while_reading, "LoadDone", errors.ParticipantError),
    ],
)
def test_what_happens_to_one_rank_ends_the_load_on_all(fail, step, kind):
    play = Play()
    fail(play)
    error = play.errors(step)[1]
    assert (type(error), error.rank) == (kind, 0)
    assert play.coordination.active == ()


def test_what_the_storage_says_is_told_to_all_and_a_rank_that_has_read_may_go():
    play = Play()
    play.join_load(0)
    play.join_load(1)
    play.fail(errors.CheckpointNotFoundError("nothing here"))
    assert {type(e) for e in play.errors("LoadJoin").values()} == {errors.CheckpointNotFoundError}
    play = Play()
    to_reading(play)
    play.send(LoadDone(KEY, 1))
    play.lose(1)
    assert play.send(LoadDone(KEY, 0)) == LoadOutcome(ReadCounts())


@pytest.mark.parametrize(
    ("arrive", "step", "said"),
    [
        (lambda play: play.join_load(0), "LoadJoin", "join the load within 3 s"),
        (
            lambda play: (to_planning(play), play.send(LoadReady(KEY, 0))),
            "LoadReady", "plan its reads within 3 s",
        ),
        (
            lambda play: (to_reading(play), play.send(LoadDone(KEY, 0))),
            "LoadDone", "read its share within 4 s",
        ),
    ],
)  # fmt: skip
def test_every_wait_for_ranks_has_a_deadline_that_names_them(arrive, step, said):
    play = Play(load_options=LoadOptions(plan_timeout_s=3, read_timeout_s=4))
    arrive(play)
    play.expire()
    error = play.errors(step)[0]
    assert type(error) is errors.DeadlineError
    assert error.rank == 1
    assert said in error.message


def test_a_storage_that_does_not_show_the_checkpoint_in_time_ends_the_load():
    play = Play()
    play.join_load(0)
    play.join_load(1)
    play.expire()
    assert type(play.errors("LoadJoin")[1]) is errors.DeadlineError
    play.done(FOUND)
    assert play.coordination.active == ()


def test_steps_out_of_order_are_refused_and_change_nothing():
    play = Play()
    play.join_load(0)
    with pytest.raises(errors.InternalError, match="LoadJoin of rank 0"):
        play.send(LoadDone(KEY, 0))
    play.join_load(1)
    assert play.task == ReadCheckpoint(TARGET)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_world_is_refused(rank, world_size):
    play = Play()
    with pytest.raises(errors.InvalidRequestError):
        play.send(LoadJoin(KEY, rank, world_size, TARGET, LoadOptions()))
    assert play.coordination.active == ()


# Exchange


def exchange(rank, outbox, world_size=3, tag="plans", error=None):
    return Exchange(KEY, rank, world_size, tag, outbox, 9.0, error)


def test_an_exchange_gives_each_rank_what_the_others_had_for_it():
    play = Play(world_size=3)
    play.send(exchange(0, {1: b"0to1", 2: b"0to2"}))
    play.send(exchange(1, {0: b"1to0", 1: b"1to1"}))
    play.send(exchange(2, {}))
    assert [play.reply(rank, "Exchange") for rank in range(3)] == [
        Exchanged({1: b"1to0"}), Exchanged({0: b"0to1", 1: b"1to1"}), Exchanged({0: b"0to2"})
    ]  # fmt: skip
    assert play.send(exchange(0, {1: b"0to1", 2: b"0to2"})) == Exchanged({1: b"1to0"})
    assert play.coordination.active == ()


def test_an_exchange_with_other_tags_or_content_disagrees():
    play = Play(world_size=3)
    play.send(exchange(0, {}))
    assert play.send(exchange(1, {}, tag="metadata")) is None
    assert play.timer.after_s == bounds.ERRORS_S
    play.expire()
    error = play.reply(1, "Exchange").error
    assert type(error) is errors.RankDisagreementError
    assert play.reply(0, "Exchange").error is error
    assert "'plans'" in error.message
    assert "'metadata'" in error.message
    play = Play(world_size=3)
    play.send(exchange(0, {}))
    assert type(play.send(exchange(0, {1: b""})).error) is errors.RankDisagreementError


@pytest.mark.parametrize(
    ("outbox", "error", "said"),
    [({}, errors.StorageError("mine"), "mine"), ({5: b""}, None, "rank 5")],
    ids=["an error", "bytes for a rank outside the world"],
)
def test_what_is_wrong_with_one_rank_fails_an_exchange_on_all(outbox, error, said):
    play = Play(world_size=2)
    play.send(exchange(0, outbox, 2, error=error))
    reply = play.send(exchange(1, {0: b"x"}, 2))
    assert isinstance(reply, Refused)
    assert (reply.error.rank, said in reply.error.message) == (0, True)


def test_storage_options_are_in_no_message():
    play = Play()
    play.join_load(0, target=Target("memory://a", {"token": "secret"}))
    error = play.join_load(1, target=Target("memory://b", {"token": "secret"})).error
    assert "secret" not in str(error)


# --- shared reads ---------------------------------------------------------------------------------


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
        play.fail(errors.StorageError("no memory"))
    else:
        play.expire()
        shared(play)  # too late, and dropped
    assert play.reply(0, "LoadReady") == play.reply(1, "LoadReady") == LoadProceed()
    play.send(LoadDone(KEY, 0, ReadCounts(10, 16)))
    assert isinstance(play.send(LoadDone(KEY, 1, ReadCounts(5, 5))), LoadOutcome)


# The messages


GIVE = ("give", "h", 2)


@pytest.mark.parametrize(
    ("events", "state", "got"),
    [
        ([GIVE, ("take", 1)], "there", ["h"]),
        ([GIVE, ("take", 1), ("take", 1)], "there", ["h", "h"]),
        ([GIVE, ("take", 1), ("take", 2)], "gone", ["h", "h"]),
        ([GIVE, ("take", 1), ("take", 2), ("take", 1)], "gone", ["h", "h", None]),
        ([GIVE, GIVE, ("skip", 1), ("take", 2)], "gone", ["h"]),
        ([("skip", 1), ("skip", 2), GIVE], "gone", []),
        ([("withdraw",), GIVE, ("take", 1)], "gone", [None]),
    ],
    ids=["one", "twice", "both", "late", "skipped", "nobody", "declined"],
)
def test_a_unit_is_there_until_all_who_need_it_have_it(events, state, got):
    unit = SharedUnit()
    found = [getattr(unit, what)(*how) for what, *how in events]
    assert unit.state == state
    takes = [answer for answer, (what, *_) in zip(found, events, strict=True) if what == "take"]
    assert takes == got
    assert (unit.handle is None) == (state == "gone")


def test_calls_about_a_unit_may_come_in_any_order():
    for order in itertools.permutations([GIVE, ("skip", 1), ("skip", 2)]):
        unit = SharedUnit()
        for what, *how in order:
            getattr(unit, what)(*how)
        assert (unit.state, unit.is_taken) == ("gone", True)


@pytest.mark.parametrize("last", [0, 1])
def test_a_unit_takes_room_until_its_last_byte_was_read(last):
    board = Board()
    exchange = ThreadExchange(board, 0)
    mine = a_relay(exchange, 0)
    ThreadExchange(board, 1).skip([0, 1, 2])
    mine.start()
    mine.read_into("f", 0, memoryview(bytearray(29 + last)))
    assert exchange.has_room()
    assert (2 not in exchange._given) == bool(last)
    mine.finish()


# Where they are kept


def test_calls_are_answered_as_soon_as_a_unit_is_there_or_gone():
    over: set[OpKey] = set()

    async def play():
        board = SharedReadDispatch(lambda key: key in over)
        takes = [asyncio.ensure_future(board.share(Take(KEY, rank, 0, 60.0))) for rank in (1, 2)]
        await asyncio.sleep(0)
        give = asyncio.ensure_future(board.share(Give(KEY, 0, 2, "h")))
        assert [await asyncio.wait_for(each, 10) for each in takes] == ["h", "h"]
        await asyncio.wait_for(give, 10)
        assert await board.share(Take(KEY, 1, 1, 0.0)) is None  # not in time
        await board.share(Decline(KEY, (1,)))
        assert await board.share(Take(KEY, 1, 1, 60.0)) == ()
        waiting = [
            asyncio.ensure_future(board.share(message))
            for message in (Give(KEY, 2, 1, "h"), Take(KEY, 1, 3, 60.0))
        ]
        await asyncio.sleep(0)
        over.add(KEY)
        board.tidy()
        assert [await asyncio.wait_for(each, 10) for each in waiting] == [None, None]
        assert await board.share(Take(KEY, 1, 2, 60.0)) is None
        assert not board._loads
        assert not board._changes

    asyncio.run(play())


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
    monkeypatch.setattr(bounds, "SHARE_TIMEOUT_S", 0.3)
    board = Board()
    mine = a_relay(ThreadExchange(board, 0, most_units=1), 0)
    mine.start()
    target = bytearray(30)
    mine.read_into("f", 0, memoryview(target))
    mine.finish()
    assert target == bytes(range(30))
    assert board.states() == ["there", "gone", "gone"]


def test_a_load_that_failed_elsewhere_ends_the_wait():
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise errors.SaveCancelledError("failed elsewhere")

    class Deaf(ThreadExchange):
        def offer(self, unit, takers, data):
            stop.set()
            threading.Event().wait(5)
            return

    mine = a_relay(Deaf(Board(), 0), 0, check=check)
    mine.start()
    with pytest.raises(errors.SaveCancelledError):
        mine.read_into("f", 0, memoryview(bytearray(30)))


def test_a_reader_whose_storage_fails_tells_so_and_finds_out_itself():
    board = Board()
    mine = a_relay(ThreadExchange(board, 0), 0)
    mine._inner.delete(["f"])
    mine.start()
    with pytest.raises(errors.StorageError):
        mine.read_into("f", 0, memoryview(bytearray(30)))
    mine.finish(failed=True)
    assert board.states() == ["gone"] * 3


@pytest.fixture
def no_threads(monkeypatch):
    """Refuses the threads of shared reads."""
    begin = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "ray_dcp reads for all":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_a_reader_without_a_thread_fails_and_keeps_nobody_waiting(no_threads):
    board = Board()
    mine = a_relay(ThreadExchange(board, 0), 0)
    with pytest.raises(errors.LimitError, match="start a thread"):
        mine.start()
    mine.finish(failed=True)
    assert board.states() == ["gone"] * 3


class Peers:
    """The other ranks of a load, which are threads; a part of `RayPeers`."""

    node = "n"

    def __init__(self) -> None:
        self.board = Board()

    def exchange(self, key: OpKey, rank: int, ranks_here: int, check: object) -> ThreadExchange:
        return ThreadExchange(self.board, rank, most_units=1)


def test_a_rank_that_can_not_load_keeps_nobody_waiting_for_what_it_would_read(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(bounds, "SHARE_TIMEOUT_S", 3600.0)
    state = {"rep.w": np.arange(40 * MIB, dtype=np.uint8), "note": {"text": "hello"}}
    save(state, 1, str(tmp_path))
    options = LoadOptions(share_reads=True, read_timeout_s=10.0)
    ranks, works = load_ranks(state, 2, str(tmp_path), options=options, peers=Peers())
    place = ArrayWork._place

    def refuse(work: ArrayWork, name: str, data: bytes) -> None:
        if work is works[0]:
            raise errors.UnsafeCheckpointError("no such object on this rank")
        place(work, name, data)

    monkeypatch.setattr(ArrayWork, "_place", refuse)
    ended = run_as_ranks(
        lambda rank: drive(ranks[rank], saving.current_session(None, False).call), 2
    )
    assert [type(error) for error in ended] == [errors.UnsafeCheckpointError] * 2
    assert works[1].finished
