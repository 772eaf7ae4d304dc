"""The load and exchange machines, fed by hand."""

from dataclasses import replace

import pytest

from ray_dcp.commit_protocol.commands import ReadCheckpoint
from ray_dcp.commit_protocol.load import MOST_SENT_BYTES
from ray_dcp.commit_protocol.messages import (
    Exchange,
    Exchanged,
    LoadDone,
    LoadGo,
    LoadJoin,
    LoadOutcome,
    LoadReady,
    ReadCounts,
    Refused,
    Target,
    Untaken,
)
from ray_dcp.commit_protocol.operation import GRACE_S
from ray_dcp.errors import (
    CheckpointNotFoundError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    ParticipantError,
    RankDisagreementError,
    StorageError,
)
from ray_dcp.options import LoadOptions
from tests.support.protocol import KEY, TARGET, Play

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
    play.join_load(0, error=StorageError("mine"))
    play.join_load(1)


def fails_to_plan(play):
    to_planning(play)
    play.send(LoadReady(KEY, 1))
    play.send(LoadReady(KEY, 0, StorageError("mine")))


def fails_to_read(play):
    to_reading(play)
    play.send(LoadDone(KEY, 0, error=StorageError("mine")))
    assert play.timer.after_s == GRACE_S
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
        (fails_to_join, "LoadJoin", StorageError),
        (fails_to_plan, "LoadReady", StorageError),
        (fails_to_read, "LoadDone", StorageError),
        (dies_while_planning, "LoadReady", ParticipantError),
        (dies_while_reading, "LoadDone", ParticipantError),
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
    play.fail(CheckpointNotFoundError("nothing here"))
    assert {type(e) for e in play.errors("LoadJoin").values()} == {CheckpointNotFoundError}
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
    assert type(error) is DeadlineError
    assert error.rank == 1
    assert said in error.message


def test_a_storage_that_does_not_show_the_checkpoint_in_time_ends_the_load():
    play = Play()
    play.join_load(0)
    play.join_load(1)
    play.expire()
    assert type(play.errors("LoadJoin")[1]) is DeadlineError
    play.done(FOUND)
    assert play.coordination.active == ()


def test_steps_out_of_order_are_refused_and_change_nothing():
    play = Play()
    play.join_load(0)
    with pytest.raises(InternalError, match="LoadJoin of rank 0"):
        play.send(LoadDone(KEY, 0))
    play.join_load(1)
    assert play.task == ReadCheckpoint(TARGET)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_world_is_refused(rank, world_size):
    play = Play()
    with pytest.raises(InvalidRequestError):
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


@pytest.mark.parametrize(
    ("outbox", "error", "said"),
    [({}, StorageError("mine"), "mine"), ({5: b""}, None, "rank 5")],
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
