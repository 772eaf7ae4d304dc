"""Large jobs: gatherers send what ranks say in few messages, which mean what the requests mean."""

import pickle
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ray_dcp import errors
from ray_dcp.commit_protocol.messages import (
    FileReceipt,
    MessageBatch,
    OpKey,
    SaveJoin,
    SaveReceipt,
    Target,
    join_receipts,
    pack_receipts,
)
from ray_dcp.commit_protocol.planning import PlanMemory
from ray_dcp.core.checksums import digest
from ray_dcp.options import SaveOptions
from ray_dcp.runtime.gatherer import BatchWindow, group_of
from ray_dcp.store.storage import MemoryStorage
from tests.support.arrays import ArrayCapture, same_state, sample_state
from tests.support.world import World, load_state, save_rank

KEY = OpKey("run", 0)
WORLD = 6
GROUPS = (range(2), range(2, 4), range(4, 6))


class Job:
    """Ranks that save again and again."""

    def __init__(self, name):
        self.url = f"memory://{name}-{random.getrandbits(60):x}"
        self.memories = [PlanMemory() for _ in range(WORLD)]
        self.world = World(GROUPS)
        self.seq = 0

    def save(self, state, *, choose=None, options=None, urls=None, capture=ArrayCapture, **how):
        self.seq += 1
        world = World(GROUPS, self.world.coordination, **how)
        ranks = [
            save_rank(
                OpKey("s", self.seq), rank=rank, world_size=WORLD,
                target=Target(urls[rank] if urls else self.url),
                options=options or SaveOptions(num_threads=1), memory=self.memories[rank],
                capture=partial(capture, state, rank, WORLD),
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        return world, world.run(ranks, choose)

    @property
    def storage(self):
        return MemoryStorage(self.url.removeprefix("memory://"))

    def holds(self, state):
        return same_state(state, load_state(self.storage, state, 2))


def test_a_warm_save_is_one_message_of_each_group_in_each_phase():
    job = Job("warm")
    _, results = job.save(sample_state(0))
    assert {result.get().slot for result in results} == {1}
    world, results = job.save(sample_state(1))
    assert {result.get().slot for result in results} == {2}
    assert world.messages == {"SaveJoin": 3, "SaveReceipt": 3}
    assert not world.direct
    assert job.holds(sample_state(1))


@pytest.mark.parametrize("seed", range(8))
def test_in_any_order_and_whoever_dies_all_ranks_commit(seed):
    dice = random.Random(seed)
    job = Job(f"dice-{seed}")
    for number in range(2):
        state = sample_state(number)
        deaths = dice.choice((0.0, 0.1, 0.4))
        world, results = job.save(
            state, choose=dice.randrange, kill=lambda group, most=deaths: dice.random() < most
        )
        assert len({result.get().attempt for result in results}) == 1
        assert job.holds(state)
        assert bool(world.direct) == any(group.is_dead for group in world.groups)


def test_a_rank_that_fails_fails_all_at_once():
    class Failing(ArrayCapture):
        def source(self, row):
            if self.rank == 4:
                raise OSError("the disk is gone")
            return super().source(row)

        def __init__(self, state, rank, world_size):
            self.rank = rank
            super().__init__(state, rank, world_size)

    job = Job("fails")
    job.save(sample_state(0))
    world, results = job.save(sample_state(1), capture=Failing)
    for result in results:
        with pytest.raises(errors.CheckpointError, match="the disk is gone"):
            result.get()
    assert world.direct == {"SaveReceipt": 1}
    assert job.holds(sample_state(0))


# --- the gatherer by itself ---------------------------------------------------------------------


def join(rank, **changes):
    plain = SaveJoin(
        KEY, rank, 10, Target("memory://x"), SaveOptions(), b"",
        fingerprint=bytes([rank]) * 32, known=b"d" * 32, values=bytes([rank]),
    )  # fmt: skip
    return replace(plain, **changes)


def receipt_of(file, key=None, places=()):
    checks = np.arange(file + 1, dtype=np.uint64)
    return FileReceipt(file, key or f"__{file}_0.a1.distcp", 10, digest(checks), places)


def test_receipts_are_joined_by_file():
    whole = join_receipts([receipt_of(5), receipt_of(1), receipt_of(7)])
    assert whole.file.tolist() == [1, 5, 7]
    assert [one.key for one in whole] == [f"__{file}_0.a1.distcp" for file in (1, 5, 7)]
    assert [one.digest for one in whole] == [receipt_of(file).digest for file in (1, 5, 7)]
    with pytest.raises(errors.InternalError, match="one receipt for file 5, but found two"):
        join_receipts([receipt_of(5), receipt_of(5, key="again")])
    with pytest.raises(errors.InternalError, match="of one line"):
        pack_receipts([receipt_of(5, key="a\nb")])
    assert len(join_receipts([])) == 0


def test_a_message_is_sent_when_it_is_whole_or_has_waited():
    now = [0.0]
    window = BatchWindow(range(3), lambda: now[0])
    assert window.take(join(2)) == []
    assert window.take(join(0)) == []
    assert window.due() == []
    now[0] = window.next_s
    assert [message.ranks for message in window.due()] == [(0, 2)]
    assert window.next_s is None
    later = [join(rank, asked=1) for rank in (2, 0, 1)]
    assert [m.ranks for one in later for m in window.take(one)] == [(0, 1, 2)]


def test_joins_of_one_call_share_its_values_and_others_keep_their_own():
    """What all ranks of a message say alike is sent once."""
    window = BatchWindow(range(3), lambda: 0.0)
    other = Target("memory://x", {"token": "mine"})
    joins = [join(0), join(1, node="b"), join(2, target=other)]
    copies = [pickle.loads(pickle.dumps(one)) for one in joins]
    (message,) = [message for one in reversed(copies) for message in window.take(one)]
    assert list(message.requests) == joins
    first, second, third = message.requests
    assert first.target is second.target
    assert first.options is second.options
    assert third.target.storage_options == {"token": "mine"}
    assert message.only({1}).requests == (second,)


def test_groups_are_few_and_of_neighbours():
    for world_size in (65, 100, 128, 1000, 10240):
        groups = {group_of(rank, world_size) for rank in range(world_size)}
        assert len(groups) <= 64
        ranks = sorted(rank for group in groups for rank in group)
        assert ranks == list(range(world_size))
    assert group_of(0, 64) is None
    with pytest.raises(errors.InvalidRequestError, match="rank from 0 to 99, found 100"):
        group_of(100, 100)


def test_receipts_of_another_attempt_are_refused_one_by_one():
    job = Job("fence")
    job.save(sample_state(0))
    world = World(GROUPS, job.world.coordination)
    stray = [SaveReceipt(OpKey("s", 1), rank, "other", 1, (receipt_of(rank),)) for rank in range(2)]
    told = dict(world.shell.receive_batch(MessageBatch(KEY, "SaveReceipt", tuple(stray))).replies)
    assert set(told) == {0, 1}
    assert all(isinstance(reply.error, errors.CommitUnknownError) for reply in told.values())
