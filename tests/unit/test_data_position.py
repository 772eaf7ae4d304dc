"""The place in the data: with torch's and torchdata's loaders, and what is refused."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import ray_dcp
from ray_dcp.data import (
    ElasticBatchSampler,
    ElasticStream,
    LoaderPosition,
    RowsSeen,
    SampleOrder,
    merged,
)
from ray_dcp.errors import InvalidRequestError, StateDictError


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
