"""The machines of loads, of exchanges and of shared reads, fed by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ray_dcp.errors import (
    DeadlineError,
    MissingKeyError,
    ParticipantError,
    RankDisagreementError,
    StorageError,
)
from ray_dcp.io.shared_read import SharedReadStorage
from ray_dcp.options import LoadOptions
from ray_dcp.planning.reads import Ranges, RankShare, ReadNeeds, ShareCost, merged, share_reads
from ray_dcp.protocol.commands import CheckpointRead, ReadCheckpoint, ShareReads
from ray_dcp.protocol.load import Enter, Leave, Offer, SharedReads, Use
from ray_dcp.protocol.messages import (
    Exchange,
    Exchanged,
    LoadDone,
    LoadGo,
    LoadOutcome,
    LoadProceed,
    LoadReady,
    OpKey,
    Target,
)
from ray_dcp.protocol.operation import GRACE_S
from ray_dcp.runtime.tasks import perform
from ray_dcp.store.memory import MemoryStorage
from tests.protocol_play import KEY, Play
from tests.thread_peers import Board, ThreadExchange

# --- Loads and exchanges --------------------------------------------------------------------------


FOUND = CheckpointRead("native", 3, b"manifest")


def to_planning(play):
    for rank in range(play.world_size):
        play.join_load(rank)
    play.done(FOUND)


def to_reading(play):
    to_planning(play)
    for rank in range(play.world_size):
        play.send(LoadReady(KEY, rank))


def test_the_checkpoint_is_looked_for_once_and_all_ranks_load_the_same():
    play = Play(world_size=3)
    to_planning(play)
    assert [type(c.task) for c in play.commands if hasattr(c, "task")] == [ReadCheckpoint]
    assert [play.reply(r, "LoadJoin") for r in range(3)] == [LoadGo("native", 3, b"manifest")] * 3


def test_no_rank_reads_before_every_rank_is_ready():
    play = Play()
    to_planning(play)
    assert play.send(LoadReady(KEY, 0)) is None
    assert play.send(LoadReady(KEY, 1)) == LoadProceed()
    assert play.reply(0, "LoadReady") == LoadProceed()


def test_a_rank_that_can_not_plan_refuses_the_load_on_all():
    play = Play()
    to_planning(play)
    play.send(LoadReady(KEY, 0))
    error = play.send(LoadReady(KEY, 1, MissingKeyError("no 'w'", key="w"))).error
    assert (type(error), error.rank, error.key) == (MissingKeyError, 1, "w")
    assert play.errors("LoadReady")[0] is error
    assert play.coordination.active == ()


def test_the_outcome_sums_the_bytes_of_all_ranks_each_once():
    play = Play()
    to_reading(play)
    first = LoadDone(KEY, 0, 10, 16, None, 1, 2, 3)
    assert play.send(first) is play.send(first) is None
    summed = LoadOutcome(15, 21, 2, 3, 4)
    assert play.send(LoadDone(KEY, 1, 5, 5, None, 1, 1, 1)) == summed
    assert play.reply(0, "LoadDone") == play.send(first) == summed
    assert play.coordination.active == ()


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
    assert type(error) is DeadlineError
    assert error.rank == 1
    assert said in error.message


@pytest.mark.parametrize("phase", [to_planning, to_reading])
def test_a_lost_rank_ends_the_load(phase):
    play = Play(world_size=3)
    phase(play)
    play.send((LoadReady if phase is to_planning else LoadDone)(KEY, 0))
    play.lose(1)
    play.expire()
    step = "LoadReady" if phase is to_planning else "LoadDone"
    error = play.errors(step)[0]
    assert (type(error), error.rank) == (ParticipantError, 1)


def test_a_rank_that_has_read_may_go():
    play = Play()
    to_reading(play)
    play.send(LoadDone(KEY, 1))
    play.lose(1)
    assert play.send(LoadDone(KEY, 0)) == LoadOutcome(0, 0)


def test_a_step_of_a_load_that_nobody_knows_says_to_call_again():
    with pytest.raises(ParticipantError, match="Call again"):
        Play().send(LoadReady(OpKey("run", 5), 0))


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
    assert play.timer.after_s == GRACE_S
    play.expire()
    error = play.reply(1, "Exchange").error
    assert type(error) is RankDisagreementError
    assert play.reply(0, "Exchange").error is error
    assert "'plans'" in error.message
    assert "'metadata'" in error.message
    play = Play(world_size=3)
    play.send(exchange(0, {}))
    assert type(play.send(exchange(0, {1: b""})).error) is RankDisagreementError


def test_an_exchange_has_a_deadline():
    play = Play(world_size=2)
    play.send(exchange(1, {}, 2))
    assert play.timer.after_s == 9.0
    play.expire()
    error = play.errors("Exchange")[1]
    assert (type(error), error.rank) == (DeadlineError, 0)
    assert "exchange 'plans'" in error.message


def test_storage_options_are_in_no_message():
    play = Play()
    play.join_load(0, target=Target("memory://a", {"token": "secret"}))
    error = play.join_load(1, target=Target("memory://b", {"token": "secret"})).error
    assert "secret" not in str(error)


# --- Shared reads ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize("come", [0, 1])
def test_without_two_ranks_that_would_share_nothing_is_asked_for(come):
    play = Play(world_size=3)
    to_planning(play)
    for rank in range(3):
        ready(play, rank, *([(0, 0, MIB)] if rank < come else []))
    assert play.reply(0, "LoadReady") == LoadProceed()


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


def test_a_load_goes_on_without_sharing_when_nobody_decides_in_time():
    play = Play(world_size=2)
    to_planning(play)
    ready(play, 0, (0, 0, MIB))
    ready(play, 1, (0, 0, MIB))
    play.expire()
    assert play.reply(0, "LoadReady") == play.reply(1, "LoadReady") == LoadProceed()
    shared(play)  # too late, and dropped
    play.send(LoadDone(KEY, 0, 10, 16))
    assert isinstance(play.send(LoadDone(KEY, 1, 5, 5)), LoadOutcome)


# The words


def words(*said):
    handover = SharedReads()
    for word in said:
        handover.take(word)
    return handover


def enter(rank, units=(0,), readers=(0,)):
    return Enter(KEY, rank, tuple(units), tuple(readers))


def heard(handover, rank, seen=0):
    return [(new.what, new.unit, new.handle) for new in handover.news(rank, seen)]


def test_words_may_be_heard_in_any_order():
    said = [
        enter(0, (0, 1, 2), (0, 0, 1)), enter(1, (0, 1, 2), (0, 0, 1)),
        Offer(KEY, 0, 0, 2, "h"), Use(KEY, 1, (0,)), Leave(KEY, 0, (0,)), Leave(KEY, 1),
    ]  # fmt: skip
    for order in itertools.permutations(said):
        handover = words(*order)
        assert handover.num_there == 0
        # What the reader is told last is that its unit is free, whoever was heard first.
        assert heard(handover, 0)[-1][:2] in {("free", 0), ("gone", 2)}
        assert ("free", 0, None) in heard(handover, 0)
        assert all(what == "gone" for what, unit, _ in heard(handover, 1) if unit == 1)


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


def test_a_reader_whose_storage_fails_tells_so_and_finds_out_itself():
    board = Board()
    mine = a_relay(ThreadExchange(board, 0), 0, budget_bytes=100)
    board.handover.take(Enter(KEY, 1, (0, 1, 2), (0, 0, 0)))
    mine._inner.delete(["f"])
    mine.start()
    with pytest.raises(StorageError):
        mine.read_into("f", 0, memoryview(bytearray(30)))
    mine.finish(failed=True)
    assert {new.what for new in board.handover.news(1, 0)} == {"gone"}
