"""Whatever the sequence of resizes, every sample of an epoch is consumed exactly once."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dcp.data import ElasticBatchSampler, ElasticStream, RowsSeen, merged

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
