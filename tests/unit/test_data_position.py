"""The place in the data: with torch's and torchdata's loaders, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import ray_dcp
from ray_dcp.data import (
    ElasticBatchSampler,
    ElasticStream,
    Frontier,
    FrontierStatus,
    LoaderPosition,
    RowsSeen,
    SampleOrder,
    merged,
)
from ray_dcp.errors import InvalidRequestError, LimitError, StateDictError


def sampler_of(rank=0, world_size=1, num_samples=24, **more):
    how = {"global_batch_size": 6, **more}
    return ElasticBatchSampler(num_samples, rank=rank, world_size=world_size, **how)


# Data sets with indices


def test_the_order_stays_what_it_is_for_ever():
    """Places that are saved mean these samples; another order needs another ORDER_VERSION."""
    order = SampleOrder(10, seed=2**40 + 7)
    assert order.samples(0, 10).tolist() == [7, 9, 2, 1, 8, 4, 5, 0, 3, 6]
    assert order.samples(10, 20).tolist() == [5, 2, 9, 3, 1, 8, 4, 6, 7, 0]
    assert SampleOrder(4, shuffle=False).samples(2, 7).tolist() == [2, 3, 0, 1, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_loader_has_fetched_ahead_is_not_consumed(workers, tmp_path):
    seen = []
    for rank in range(2):
        sampler = sampler_of(rank, 2)
        loader = DataLoader(range(24), batch_sampler=sampler, num_workers=workers)
        assert len(loader) == 4
        batches = sampler.follow(loader)
        seen += next(batches).tolist()
        seen += next(batches).tolist()
        assert sampler.consumed == 12
        batches.close()
    ray_dcp.save({"data": sampler}, checkpoint_id=tmp_path / "c")
    for rank in range(3):
        sampler = sampler_of(rank, 3, seed=5)
        ray_dcp.load({"data": sampler}, checkpoint_id=tmp_path / "c")
        loader = DataLoader(range(24), batch_sampler=sampler, num_workers=workers)
        assert len(loader) == 2
        for batch in sampler.follow(loader):
            seen += batch.tolist()
        assert (sampler.epoch, sampler.consumed) == (1, 0)
    assert Counter(seen) == Counter(range(24))


def test_a_loader_that_is_not_followed_or_goes_by_something_else_does_not_give_a_wrong_place():
    sampler = sampler_of()
    next(iter(DataLoader(range(24), batch_sampler=sampler)))
    with pytest.raises(StateDictError, match=r"for batch in sampler\.follow\(loader\)"):
        sampler.state_dict()
    sampler.load_state_dict(sampler_of().state_dict())
    assert sampler.state_dict()["place"] == 0
    for batches, what in ((3, "fewer batches"), (5, "more batches")):
        with pytest.raises(InvalidRequestError, match=what):
            list(sampler_of().follow([0] * batches))


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"num_samples": 0}, "num_samples"), ({"seed": -1}, "seed"), ({"seed": 2**64}, "seed"),
        ({"rank": 1}, "rank"), ({"rank": -1}, "rank"), ({"world_size": 7}, "global_batch_size"),
        ({"global_batch_size": None}, "global_batch_size"),
        ({"batch_size": 2}, "global_batch_size"),
        ({"global_batch_size": None, "batch_size": 1.5}, "batch_size"),
        ({"last": "pad"}, "last"), ({"last": "drop", "num_samples": 5}, "last"),
    ],
)  # fmt: skip
def test_a_sampler_refuses_what_it_cant_do(more, key):
    with pytest.raises(InvalidRequestError) as caught:
        sampler_of(**more)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"num_samples": 25}, "num_samples=24, found 25"),
        ({"order_version": 2}, "order_version=1, found 2"),
        ({"place": -1}, "can't be -1"),
        ({"place": "7"}, "the state of an ElasticBatchSampler"),
        ({"shuffle": 1}, "the state of an ElasticBatchSampler"),
    ],
)
def test_a_place_in_other_data_is_refused_and_changes_nothing(change, what):
    sampler = sampler_of(seed=3)
    before = sampler.state_dict()
    with pytest.raises(StateDictError, match=what):
        sampler.load_state_dict({**sampler_of(seed=9).state_dict(), **change})
    assert sampler.state_dict() == before
    for foreign in (None, {}, [1]):
        with pytest.raises(StateDictError):
            sampler.load_state_dict(foreign)


# Files, through torchdata's loader

SOURCES = {name: [f"{name}{number}" for number in range(7)] for name in "abcde"}
EVERYTHING = Counter(sample for samples in SOURCES.values() for sample in samples)


def read(source, start):
    return SOURCES[source][start:]


def test_numbers_of_a_sampler_may_be_numpys():
    numbers = {"rank": 1, "world_size": 2, "global_batch_size": 6, "seed": 3}
    plain = ElasticBatchSampler(24, **numbers)
    numpys = ElasticBatchSampler(np.int64(24), **{n: np.int64(v) for n, v in numbers.items()})
    assert "np." not in repr(numpys.state_dict())
    assert [*numpys] == [*plain]
    stream = ElasticStream(list(SOURCES), read, rank=np.int64(0), world_size=np.int64(1))
    stream.set_epoch(np.int64(2))
    assert type(stream.epoch) is int


def loader_of(rank, world_size, workers=0, **more):
    stream = ElasticStream(list(SOURCES), read, rank=rank, world_size=world_size)
    loader = StatefulDataLoader(stream, batch_size=2, num_workers=workers, **more)
    return stream, loader, LoaderPosition(loader)


def take(loader, batches):
    iterator = iter(loader)
    return [sample for _ in range(batches) for sample in next(iterator)]


def resume(positions, others):
    """Gives places to other ranks as a load does: to each its own, or by the rule."""
    states = [position.state_dict() for position in positions]
    values = [state["loader"].value for state in states]
    for rank, other in enumerate(others):
        target = other.state_dict()["loader"]
        if len(others) == len(values):
            target.value = values[rank]
        else:
            target.value = target.resized(values, rank, len(others))
        other.load_state_dict({"loader": target})


@pytest.mark.parametrize("workers", [0, 2])
def test_files_are_read_once_across_a_resize_and_a_restart(workers):
    first = [loader_of(rank, 2, workers) for rank in range(2)]
    seen = [sample for _, loader, _ in first for sample in take(loader, 3)]
    restarted = [loader_of(rank, 2, workers) for rank in range(2)]
    resume([each[2] for each in first], [each[2] for each in restarted])
    seen += [sample for _, loader, _ in restarted for sample in take(loader, 1)]
    resized = [loader_of(rank, 3) for rank in range(3)]
    resume([each[2] for each in restarted], [each[2] for each in resized])
    for _, loader, _ in resized:
        seen += [sample for batch in loader for sample in batch]
    assert Counter(seen) == EVERYTHING


def test_a_resize_of_loaders_goes_through_a_checkpoint(tmp_path):
    _, loader, position = loader_of(0, 1)
    seen = take(loader, 4)
    ray_dcp.save({"data": position}, checkpoint_id=tmp_path / "c")
    stream, loader, position = loader_of(0, 1)
    ray_dcp.load({"data": position}, checkpoint_id=tmp_path / "c")
    seen += [sample for batch in loader for sample in batch]
    assert Counter(seen) == EVERYTHING
    # At the end of an epoch nothing is read again, until the next one begins.
    ray_dcp.save({"data": position}, checkpoint_id=tmp_path / "end")
    stream, loader, position = loader_of(0, 1)
    ray_dcp.load({"data": position}, checkpoint_id=tmp_path / "end")
    assert list(loader) == []
    stream.set_epoch(stream.epoch + 1)
    assert Counter(sample for batch in loader for sample in batch) == EVERYTHING


def test_a_loader_without_a_rule_says_so_and_a_rule_is_used():
    numbers = [StatefulDataLoader(range(4)) for _ in range(3)]
    assert LoaderPosition(numbers[0]).state_dict()["loader"].resized == "error"
    asked = []

    def rule(states, rank, world_size):
        asked.append((len(states), rank, world_size))
        return states[0]

    positions = [LoaderPosition(loader, resized=rule) for loader in numbers]
    next(iter(numbers[0]))
    resume(positions[:1], positions[1:])
    assert asked == [(1, 0, 2), (1, 1, 2)]
    assert [batch.tolist() for batch in numbers[2]] == [[1], [2], [3]]


def stream_of(sources=("a",), reads=read, rank=0):
    return ElasticStream(sources, reads, rank=rank, world_size=1)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: DataLoader(range(3)), "torchdata's StatefulDataLoader"),
        (lambda: StatefulDataLoader(range(24), batch_sampler=sampler_of()), "put the sampler into"),
        (
            lambda: StatefulDataLoader(stream_of(), persistent_workers=True, num_workers=1),
            "needs persistent_workers=",
        ),
        (
            lambda: StatefulDataLoader(stream_of(), snapshot_every_n_steps=2),
            "needs snapshot_every_n_steps=",
        ),
        (lambda: stream_of(["a", "a"]), "each of them once"),
        (lambda: stream_of("abc"), "each of them once, but is 'abc'"),
        (lambda: stream_of([1]), "names"),
        (lambda: stream_of([]), "num_samples"),
        (lambda: stream_of(rank=1), "rank"),
        (lambda: stream_of(reads="read"), "read"),
        (lambda: stream_of().set_epoch(-1), "epoch"),
    ],
)
def test_a_loader_or_stream_whose_place_is_not_known_is_refused(make, what):
    with pytest.raises(InvalidRequestError, match=what):
        LoaderPosition(make())


def test_what_is_no_place_is_refused_and_changes_nothing():
    with pytest.raises(InvalidRequestError, match="resized"):
        LoaderPosition(StatefulDataLoader(range(3)), resized="wrap")
    with pytest.raises(StateDictError):
        LoaderPosition(StatefulDataLoader(range(3))).load_state_dict({"loader": 3})
    stream = stream_of()
    place = stream.state_dict()
    for change in ({"own": {"b": 1}}, {"own": {"a": -2}}, {"epoch": "0"}, {"ended": 0}):
        with pytest.raises(StateDictError):
            stream.load_state_dict({**place, **change})
    assert stream.state_dict() == place


# Rows of Ray Data


def test_rows_go_through_a_checkpoint_and_what_is_left_is_the_rest(tmp_path):
    rows = RowsSeen("id")
    batches = [{"id": torch.tensor([7, 2, 3])}, {"id": np.array([1], np.uint16)}]
    assert len(list(rows.follow(batches))) == 2
    ray_dcp.save({"rows": rows}, checkpoint_id=tmp_path / "c")
    again = RowsSeen("id")
    ray_dcp.load({"rows": again}, checkpoint_id=tmp_path / "c")
    left = again.unseen({"id": np.arange(9), "x": np.arange(9) * 2})
    assert (left["id"].tolist(), left["x"].tolist()) == ([0, 4, 5, 6, 8], [0, 8, 10, 12, 16])
    again.set_epoch(0)
    assert again.num_seen == 4
    again.set_epoch(1)
    assert (again.epoch, again.num_seen) == (1, 0)


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        ({"other": [1]}, "a column 'id', found dict with .'other'"),
        ([1, 2], "a column 'id', found list"),
        ({"id": ["a"]}, "must be whole numbers"),
        ({"id": [1.5]}, "must be whole numbers"),
        ({"id": [[1]]}, "in one dimension"),
    ],
)
def test_batches_without_ids_are_refused_before_they_are_trained_on(batch, what):
    with pytest.raises(InvalidRequestError, match=what):
        list(RowsSeen("id").follow([batch]))


def test_rows_of_many_batches_are_one_set():
    rows, ids = RowsSeen("id"), np.random.default_rng(0).permutation(9000)
    for _ in rows.follow({"id": ids[at : at + 2]} for at in range(0, 9000, 2)):
        pass
    assert rows.num_seen == 9000
    assert rows.unseen({"id": np.array([-1, 8999, 0, 9000])})["id"].tolist() == [-1, 9000]


def test_rows_refuse_what_is_not_theirs():
    rows = RowsSeen("id")
    for column in ("", 3):
        with pytest.raises(InvalidRequestError, match="column"):
            RowsSeen(column)
    with pytest.raises(InvalidRequestError, match=r"ray\.data\.Dataset"):
        rows.left([1, 2])
    with pytest.raises(InvalidRequestError, match="epoch"):
        rows.set_epoch("1")
    for state in (None, {}, {"seen": 1, "epoch": 0}, {**rows.state_dict(), "epoch": "0"}):
        with pytest.raises(StateDictError):
            rows.load_state_dict(state)
    for runs in ([[3, 3]], [[5, 6], [1, 2]], [1, 2], [[1.0, 2.0]], [[1, 3], [2, 4]]):
        with pytest.raises(StateDictError):
            rows.load_state_dict({"epoch": 0, "seen": ray_dcp.PerRank(runs)})


def test_places_of_other_workers_or_of_two_epochs_are_not_one():
    _, loader, position = loader_of(0, 1)
    take(loader, 1)
    with pytest.raises(StateDictError, match="with 0 workers, but this one has 1"):
        resume([position], [loader_of(0, 1, workers=1)[2]])
    one, other = stream_of(), stream_of()
    other.set_epoch(1)
    with pytest.raises(StateDictError, match=r"found epochs \[0, 1\]"):
        merged([one.state_dict(), other.state_dict()])


# --- any sequence of resizes --------------------------------------------------------------------


SEGMENTS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9), st.integers(0, 4)), max_size=8)
"""Ranks, samples in a global batch beyond one a rank, steps until the next resize."""


def run_segment(make, state, world_size, steps):
    """Plays the ranks of one attempt; returns what each step consumed, and the state after it."""
    ranks = []
    for rank in range(world_size):
        sampler = make(rank, world_size)
        if state is not None:
            sampler.load_state_dict(json.loads(json.dumps(state)))
        # Why a list: a loader that has fetched all ahead is the worst one.
        ranks.append((sampler, sampler.follow(list_when_iterated(sampler))))
    consumed = []
    for _ in range(steps):
        epoch = ranks[0][0].epoch
        batches = []
        for number, (sampler, batches_of_rank) in enumerate(ranks):
            batch = next(batches_of_rank, None)
            if batch is None:
                batches_of_rank = sampler.follow(list_when_iterated(sampler))
                ranks[number] = (sampler, batches_of_rank)
                batch = next(batches_of_rank)
            batches.append(batch)
        consumed.append((epoch, batches))
    states = [sampler.state_dict() for sampler, _ in ranks]
    assert all(each == states[0] for each in states)
    return consumed, states[0]


class list_when_iterated:  # noqa: N801 - reads as a function
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(list(self.sampler))


@settings(max_examples=30)
@given(
    num_samples=st.integers(1, 60),
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.booleans(),
    last=st.sampled_from(["wrap", "short"]),
    segments=SEGMENTS,
)
def test_after_any_resizes_the_samples_consumed_are_whole_epochs_and_the_begin_of_one(
    num_samples, seed, shuffle, last, segments
):
    state, stream = None, []
    for world_size, beyond, steps in segments:

        def make(rank, world_size=world_size, beyond=beyond):
            return ElasticBatchSampler(
                num_samples, rank=rank, world_size=world_size, last=last, seed=seed,
                shuffle=shuffle, global_batch_size=world_size + beyond,
            )  # fmt: skip

        consumed, state = run_segment(make, state, world_size, steps)
        for _, batches in consumed:
            stream += [sample for batch in batches for sample in batch]
    for begin in range(0, len(stream), num_samples):
        epoch = stream[begin : begin + num_samples]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(num_samples))
    if state is not None:
        assert state["place"] == len(stream)


@settings(max_examples=40)
@given(num_samples=st.integers(5, 60), segments=SEGMENTS, each=st.integers(1, 2))
def test_dropping_the_last_loses_less_than_a_batch_an_epoch_and_repeats_none(
    num_samples, segments, each
):
    state, epochs = None, Counter()
    for world_size, _, steps in segments:
        if each * world_size > num_samples:
            continue

        def make(rank, world_size=world_size):
            return ElasticBatchSampler(
                num_samples, rank=rank, world_size=world_size, batch_size=each, last="drop"
            )

        consumed, state = run_segment(make, state, world_size, steps)
        for epoch, batches in consumed:
            assert {len(batch) for batch in batches} == {each}
            epochs.update((epoch, sample) for batch in batches for sample in batch)
    assert set(epochs.values()) <= {1}
    if state is not None:
        for epoch in range(state["place"] // num_samples):
            seen = sum(1 for each_epoch, _ in epochs if each_epoch == epoch)
            assert seen > num_samples - 2 * 5


def read_numbers(source, start):
    name, count = source.split(":")
    return [f"{name}-{number}" for number in range(start, int(count))]


@settings(max_examples=30)
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=9),
    segments=st.lists(st.tuples(st.integers(1, 4), st.data()), min_size=1, max_size=5),
)
def test_after_any_resizes_every_source_is_read_to_its_end_once(counts, segments):
    sources = [f"s{number}:{count}" for number, count in enumerate(counts)]
    states, seen = [], []
    for attempt, (world_size, data) in enumerate(segments):
        place = merged(states) if states else None
        states = []
        for rank in range(world_size):
            stream = ElasticStream(sources, read_numbers, rank=rank, world_size=world_size)
            if place is not None:
                stream.load_state_dict(place)
            # Restarts on as many ranks take each rank's own place.
            for _ in range(2):
                most = 99 if attempt == len(segments) - 1 else data.draw(st.integers(0, 4))
                seen += islice(stream, most)
                again = ElasticStream(sources, read_numbers, rank=rank, world_size=world_size)
                again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
                stream = again
            states.append(stream.state_dict())
    everything = [sample for source in sources for sample in read_numbers(source, 0)]
    assert Counter(seen) == Counter(everything)


@settings(max_examples=30)
@given(st.permutations(range(24)), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_rows_dealt_in_any_order_come_once_whoever_gets_them(order, sizes, data):
    """Plays Ray Data: what is left is dealt to the ranks in an order that nobody promises."""
    states, seen = None, []
    for world_size in sizes:
        ranks = [RowsSeen("id") for _ in range(world_size)]
        driver = RowsSeen("id")
        if states is not None:
            for number, each in [*enumerate(ranks), (0, driver)]:
                size = 1 if each is driver else world_size
                each.load_state_dict(as_loaded(states, number, size))
        left = driver.unseen({"id": np.array(data.draw(st.permutations(order)))})["id"]
        for rank, each in enumerate(ranks):
            mine = left[rank::world_size]
            for batch in each.follow([{"id": mine[: data.draw(st.integers(0, len(mine)))]}]):
                seen += batch["id"].tolist()
        states = [each.state_dict() for each in ranks]
    assert len(set(seen)) == len(seen)
    driver = RowsSeen("id")
    driver.load_state_dict(as_loaded(states, 0, 1))
    assert driver.num_seen == len(seen)
    left = driver.unseen({"id": np.array(order)})["id"].tolist()
    assert sorted(left + seen) == list(range(24))


def as_loaded(states, rank, world_size):
    """Gives a rank its state as a load does: its own, or by the rule where the number changed."""
    own = states[0]["seen"]
    values = [state["seen"].value for state in states]
    value = values[rank] if world_size == len(states) else own.resized(values, rank, world_size)
    return {"epoch": states[0]["epoch"], "seen": type(own)(value)}


# Ordinals that are done in any order


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_frontier_hands_out_what_is_open_again_and_before_what_is_new(tmp_path):
    frontier = Frontier(8, stop=12)
    assert frontier.take(6) == [0, 1, 2, 3, 4, 5]
    frontier.done([4, 1])
    frontier.give_back(np.int64(2))
    assert frontier.take(2) == [2, 6]
    ray_dcp.save({"prompts": frontier}, checkpoint_id=tmp_path / "c")
    frontier.done([0, 2, 3, 5, 6])
    stock = {"prompts": {"next": 0, "open": ""}}
    dcp.load(stock, checkpoint_id=tmp_path / "c", no_dist=True)
    assert stock == {"prompts": {"next": 7, "open": "0,2-3,5-6"}}
    dcp.save(stock, checkpoint_id=tmp_path / "stock", no_dist=True)
    for place in ("c", "stock"):
        resumed = Frontier(4, stop=12)
        resumed.take(2)
        ray_dcp.load({"prompts": resumed}, checkpoint_id=tmp_path / place)
        assert resumed.status() == FrontierStatus(next=7, num_open=5, num_out=0, finished=False)
        with pytest.raises(InvalidRequestError, match="since the last restore"):
            resumed.done(0)
        assert resumed.take(4) == [0, 2, 3, 5]
        assert "next 7, 5 open, 4 of at most 4 handed out" in repr(resumed)
        resumed.done([0, 2, 3, 5])
        assert resumed.take(4) == [6, 7, 8, 9]
        resumed.done([6, 7, 8, 9])
        assert resumed.take(4) == [10, 11]
        assert resumed.take(4) == []
        assert not resumed.status().finished
        resumed.done([11, 10])
        assert resumed.status() == FrontierStatus(next=12, num_open=0, num_out=0, finished=True)


def test_a_frontier_at_its_limit_says_so_and_waits_only_when_asked_to():
    frontier = Frontier(3)
    frontier.take(2)
    with pytest.raises(LimitError, match="found 2 handed out of at most 3: report some as done"):
        frontier.take(2)
    assert frontier.state_dict() == {"next": 2, "open": "0-1"}
    taken = []
    waits = threading.Thread(target=lambda: taken.append(frontier.take(3, timeout_s=60)))
    waits.start()
    frontier.done(1)
    frontier.give_back(0)
    waits.join(60)
    assert taken == [[0, 2, 3]]


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda frontier: Frontier(0), "max_open must be a whole number from 1"),
        (lambda frontier: Frontier(2, stop=True), "stop must be a whole number"),
        (lambda frontier: Frontier(2, stop=2**63), r"stop must be below 2\*\*63"),
        (lambda frontier: frontier.take(0), "num must be a whole number from 1"),
        (lambda frontier: frontier.take(5), "num must be at most max_open, 4"),
        (lambda frontier: frontier.take(1, timeout_s=-1), "timeout_s must be 0 or a number"),
        (lambda frontier: frontier.done("01"), "ordinals must be a whole number"),
        (lambda frontier: frontier.done([0, 0]), "each once, found 0"),
        (lambda frontier: frontier.done([0, 1]), r"found 1 \(next is 2\): done or given back"),
        (lambda frontier: frontier.give_back([0, 7]), "found 7"),
        (pickle.dumps, "two of them would hand out the same ordinals"),
        (copy.deepcopy, "two of them would hand out the same ordinals"),
    ],
)
def test_a_frontier_refuses_a_wrong_call_and_is_as_before(call, what):
    frontier = Frontier(4)
    frontier.take(2)
    frontier.done(1)
    with pytest.raises(InvalidRequestError, match=what):
        call(frontier)
    assert frontier.state_dict() == {"next": 2, "open": "0"}
    assert frontier.status().num_out == 1


@pytest.mark.parametrize(
    "state",
    [None, {}, {"next": 3}, {"next": 3, "open": [0]}, {"next": True, "open": ""},
     {"next": -1, "open": ""}, {"next": 2**63, "open": ""}, {"next": 11, "open": ""}]
    + [{"next": 9, "open": text} for text in (
        "a", "1,", "-1", "1-", "3-1", "4,2", "2,2", "1-3,3", "9", "7-9", " 1", "1--2", "\u0662",
        "1" * 5000)],
)  # fmt: skip
def test_what_is_no_state_of_a_frontier_is_refused_and_changes_nothing(state):
    frontier = Frontier(4, stop=10)
    frontier.take(3)
    with pytest.raises(StateDictError, match=r"expected (the|a) state"):
        frontier.load_state_dict(state)
    assert frontier.state_dict() == {"next": 3, "open": "0-2"}
    frontier.done([0, 1, 2])


def test_a_frontier_with_very_many_open_ordinals_is_restored_as_runs():
    frontier = Frontier(2)
    frontier.load_state_dict({"next": 2**62, "open": f"7-{2**62 - 2}"})
    assert frontier.take(2) == [7, 8]
    assert frontier.state_dict() == {"next": 2**62, "open": f"7-{2**62 - 2}"}


FRONTIER_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "done", "done", "late", "give_back", "save", "kill"]),
        st.integers(1, 4),
        st.randoms(use_true_random=False),
    ),
    min_size=15,
    max_size=60,
)


@settings(max_examples=60)
@given(max_open=st.integers(1, 6), stop=st.integers(1, 30), events=FRONTIER_EVENTS)
def test_after_any_kills_each_ordinal_is_done_once_in_the_history_that_survives(
    max_open, stop, events
):
    """The worker of `late` was given its ordinals before a kill or a return, and does not know."""
    frontier, used = Frontier(max_open, stop=stop), []
    saved, out, late = (frontier.state_dict(), 0), set(), []
    for event, number, random in events:
        if event == "take":
            num = min(number, max_open)
            status = frontier.status()
            left = stop - status.next + status.num_open - status.num_out
            if len(out) + min(num, left) > max_open:
                with pytest.raises(LimitError):
                    frontier.take(num)
            else:
                before = frontier.state_dict()
                taken = frontier.take(num)
                assert len(taken) == min(num, left)
                again = sorted(set(expanded(before["open"])) - out)[: len(taken)]
                new = range(before["next"], before["next"] + len(taken) - len(again))
                assert taken == [*again, *new]
                out |= {*taken}
                late += taken
        elif event in ("done", "give_back") and out:
            some = random.sample(sorted(out), min(number, len(out)))
            getattr(frontier, event)(some)
            out -= {*some}
            used += some if event == "done" else []
        elif event == "late" and late:
            one = random.choice(late)
            if one in out:
                frontier.done(one)
                out.remove(one)
                used.append(one)
            else:
                with pytest.raises(InvalidRequestError):
                    frontier.done(one)
        elif event == "save":
            saved = json.loads(json.dumps(frontier.state_dict())), len(used)
        elif event == "kill":
            frontier, out = Frontier(max_open, stop=stop), set()
            frontier.load_state_dict(saved[0])
            used = used[: saved[1]]
        status = frontier.status()
        assert status.num_out == len(out) <= max_open
        assert expanded(frontier.state_dict()["open"]) == sorted({*range(status.next)} - {*used})
    frontier.give_back(out)
    while taken := frontier.take():
        frontier.done(taken)
        used += taken
    assert sorted(used) == [*range(stop)]
    assert frontier.status().finished


def expanded(text):
    runs = [[int(one) for one in part.split("-")] for part in text.split(",") if part]
    return [one for run in runs for one in range(run[0], run[-1] + 1)]


def test_threads_that_share_a_frontier_use_each_ordinal_once_though_the_owner_is_killed():
    """The threads of the frontier that was killed go on beside those of the restored one."""
    stop, used, moment, restored = 1500, [], threading.Lock(), threading.Event()
    first, second = Frontier(7, stop=stop), Frontier(7, stop=stop)
    owner, saved = [first], []

    def work(frontier):
        assert frontier is first or restored.wait(60)
        while ordinals := frontier.take(2, timeout_s=60):
            with moment:
                if frontier is not owner[0]:
                    return
                frontier.done(ordinals)
                used.extend(ordinals)
                assert frontier.status().num_out <= 7
                if frontier is first and len(used) == 500:
                    saved[:] = [frontier.state_dict(), len(used)]
                if frontier is first and len(used) == 700:
                    second.load_state_dict(saved[0])
                    del used[saved[1] :]
                    owner[0] = second
                    restored.set()
                    return

    workers = [threading.Thread(target=work, args=(one,)) for one in 3 * [first, second]]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert sorted(used) == [*range(stop)]
    assert second.status().finished
