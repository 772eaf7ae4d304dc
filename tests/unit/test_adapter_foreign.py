"""Third-party storage plug-ins: DCP's call order, one outcome on all ranks, no hang."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future as ConcurrentFuture
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.futures import Future

import ray_dcp.torch_adapter  # noqa: F401 - makes CheckpointError a CheckpointException
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitUnknownError,
    DeadlineError,
    MissingKeyError,
)
from ray_dcp.torch_adapter.foreign import foreign_load, foreign_save
from tests.support.adapter import OwnWriter, group, run

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)


class Counter:
    """A `Stateful` value, which notes when it is asked."""

    asked: list[str]

    def __init__(self, n: int, name: str = "", asked: list[str] | None = None) -> None:
        self.n, self.name, self.asked = n, name, asked if asked is not None else []

    def state_dict(self) -> dict[str, Any]:
        self.asked.append(self.name)
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked.append(self.name)
        self.n = state["n"]


def state(fill: float = 1.0) -> dict[str, Any]:
    return {
        "w": torch.full((4, 3), fill),
        "nested": {"b": torch.full((2,), fill), "steps": [1, 2], "name": "x"},
        "counter": Counter(int(fill)),
    }


class PlainWriter(OwnWriter):
    """One whose `set_up_storage_writer` takes no `**kwargs`."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:  # type: ignore[override]
        super().set_up_storage_writer(is_coordinator)


class FuturedWriter(OwnWriter):
    """One whose `write_data` gives what is made of its results."""

    def __init__(self, path: Path, make: Callable[[Any], Any]) -> None:
        super().__init__(path)
        self.make = make

    def write_data(self, plan: Any, planner: Any) -> Any:
        return self.make(super().write_data(plan, planner).value())


HOOKS = (
    "reset", "storage_meta", "read_metadata", "set_up_storage_writer", "set_up_storage_reader",
    "prepare_local_plan", "prepare_global_plan", "write_data", "read_data", "finish",
    "set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data",
    "load_bytes", "resolve_tensor", "commit_tensor",
)  # fmt: skip


def noted(thing: Any, calls: list[Any]) -> Any:
    """Makes a plug-in or planner note the calls of its hooks."""
    for name in HOOKS:
        if hasattr(thing, name):
            setattr(thing, name, _noting(getattr(thing, name), name, calls))
    return thing


def _noting(hook: Any, name: str, calls: list[Any]) -> Any:
    def brief(value: Any) -> Any:
        return value if isinstance(value, bool | int | None) else type(value).__name__

    @wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append((name, [*map(brief, args)], {k: brief(v) for k, v in kwargs.items()}))
        return hook(*args, **kwargs)

    return call


def save_all(world_size: int, make_writer: Callable[[int], Any], **how: Any) -> list[Any]:
    """Saves with a writer on each rank; each has a value of its own."""
    who = {key: how.pop(key) for key in ("timeout_s", "coordinator_rank") if key in how}
    return run(
        [
            foreign_save(
                group(rank, world_size, **who),
                {**state(), f"own-{rank}": torch.full((2,), float(rank))},
                make_writer(rank),
                **how,
            )
            for rank in range(world_size)
        ]
    )


def save_one(writer: Any, planner: Any = None, state_dict: Any = None, **options: Any) -> Metadata:
    seen: list[Any] = []
    values = state() if state_dict is None else state_dict
    saved = run([foreign_save(group(), values, writer, planner, **options)], seen=seen)[0].get()
    assert seen == []  # one rank exchanges nothing
    return saved


def load_all(world_size: int, make_reader: Any, make_state: Any) -> list[Any]:
    return run(
        [
            foreign_load(group(rank, world_size), make_state(rank), make_reader(rank))
            for rank in range(world_size)
        ]
    )


def load_one(target: Any, reader: Any, planner: Any = None, **options: Any) -> None:
    run([foreign_load(group(), target, reader, planner, **options)])[0].get()


# --- order of calls -----------------------------------------------------------------------------


@pytest.mark.parametrize("writer_class", [OwnWriter, PlainWriter])
@pytest.mark.parametrize("there", [None, "there"])
def test_save_makes_the_calls_of_stock_dcp_in_its_order(writer_class, there, tmp_path):
    told: list[list[Any]] = [[], []]
    writers = [noted(writer_class(tmp_path / "c"), calls) for calls in told]
    planners = [noted(dcp.DefaultSavePlanner(), calls) for calls in told]
    how = {"checkpoint_id": there and tmp_path / there}
    dcp.save(state(), storage_writer=writers[0], planner=planners[0], no_dist=True, **how)
    save_one(writers[1], planners[1], **how)
    assert len(told[1]) > 8
    assert told[1] == told[0]


@pytest.mark.parametrize("there", [None, "there"])
def test_load_makes_the_calls_of_stock_dcp_in_its_order(there, tmp_path):
    save_one(OwnWriter(tmp_path))
    told: list[list[Any]] = [[], []]
    readers = [noted(dcp.FileSystemReader(tmp_path), calls) for calls in told]
    planners = [noted(dcp.DefaultLoadPlanner(), calls) for calls in told]
    by_stock, by_us = state(5.0), state(5.0)
    how = {"checkpoint_id": there and tmp_path}
    dcp.load(by_stock, storage_reader=readers[0], planner=planners[0], no_dist=True, **how)
    load_one(by_us, readers[1], planners[1], **how)
    assert len(told[1]) > 8
    assert told[1] == told[0]
    assert by_us["counter"].n == by_stock["counter"].n == 1
    assert torch.equal(by_us["w"], torch.full((4, 3), 1.0))


@pytest.mark.parametrize("coordinator_rank", [0, 2])
def test_only_the_coordinator_rank_plans_globally_and_finishes(coordinator_rank, tmp_path):
    told: list[list[Any]] = [[] for _ in range(4)]
    writers = [noted(OwnWriter(tmp_path), calls) for calls in told]
    ends = save_all(4, writers.__getitem__, coordinator_rank=coordinator_rank)
    central = {"prepare_global_plan", "finish"}
    for rank, calls in enumerate(told):
        names = [call[0] for call in calls]
        assert (central <= set(names)) == (rank == coordinator_rank)
        assert [n for n in names if n not in central][:4] == [
            "storage_meta", "set_up_storage_writer", "prepare_local_plan", "write_data",
        ]  # fmt: skip
        _, (is_coordinator,), more = calls[1]
        assert is_coordinator == (rank == coordinator_rank)
        assert more == {"rank": rank, "use_collectives": True}
    for end in ends:
        metadata = end.get()
        assert len(metadata.storage_data) == 5 + 4
        assert {f"own-{rank}" for rank in range(4)} < metadata.state_dict_metadata.keys()


def test_metadata_that_cannot_be_pickled_does_not_fail_a_committed_save(caplog, tmp_path):
    class Odd(OwnWriter):
        def finish(self, metadata: Metadata, results: Any) -> None:
            super().finish(metadata, results)
            metadata.storage_data = threading.Lock()

    with caplog.at_level(logging.WARNING):
        ends = save_all(2, lambda rank: Odd(tmp_path))
    assert ends[1].get().storage_data is None
    assert ends[1].get().state_dict_metadata.keys() == ends[0].get().state_dict_metadata.keys()
    assert "can't be pickled" in caplog.text


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 4])
def test_what_a_subclass_of_the_file_writer_saved_loads_in_stock_dcp(world_size, tmp_path):
    ends = save_all(world_size, lambda rank: OwnWriter(tmp_path))
    assert all(end.error is None for end in ends)
    own = {f"own-{rank}": torch.zeros(2) for rank in range(world_size)}
    target = {**state(7.0), **own}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert [target[name][0].item() for name in own] == [*range(world_size)]
    assert torch.equal(target["w"], state()["w"])
    assert target["nested"]["steps"] == [1, 2]
    assert target["counter"].n == 1


def test_without_collectives_every_rank_writes_its_own_metadata_and_reads_it(tmp_path):
    ends = save_all(2, lambda rank: OwnWriter(tmp_path), use_collectives=False)
    assert all(end.error is None for end in ends)
    names = sorted(path.name for path in tmp_path.glob("*.metadata"))
    assert names == ["__0.metadata", "__1.metadata"]
    reader, target = dcp.FileSystemReader(tmp_path), state(3.0)
    load_one(target, reader)
    assert reader.use_collectives is False
    assert torch.equal(target["w"], state()["w"])


# --- failures -----------------------------------------------------------------------------------


class Unpicklable(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def failing(thing: Any, where: str, error: BaseException) -> Any:
    """Something that fails in one call."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    setattr(thing, where, fail)
    return thing


def save_failing(world_size: int, path: Path, where: str, errors: dict[int, BaseException]) -> Any:
    return save_all(
        world_size,
        lambda rank: (
            failing(OwnWriter(path), where, errors[rank]) if rank in errors else OwnWriter(path)
        ),
    )


@pytest.mark.parametrize(
    ("where", "rank", "error"),
    [
        ("storage_meta", 1, OSError(28, "No space left on device")),
        ("prepare_local_plan", 1, CheckpointException("planned", {})),
        ("write_data", 1, Unpicklable("a", "b")),
        ("prepare_global_plan", 0, BaseException("worst")),
        ("finish", 0, OSError(28, "No space left on device")),
    ],
)
def test_an_error_on_one_rank_is_the_same_error_on_all(where, rank, error, tmp_path):
    ends = save_failing(3, tmp_path, where, {rank: error})
    for end in ends:
        assert isinstance(end.error, CheckpointError)
        assert isinstance(end.error, CheckpointException)
        assert set(end.error.failures) == {rank}
        told, stack = end.error.failures[rank]
        assert str(error) in str(told)
        assert stack[-1].name == "fail"
    assert len({str(end.error) for end in ends}) == 1
    assert ends[rank].error.__cause__ is error


def test_an_interrupted_rank_stops_and_tells_the_others(tmp_path):
    ends = save_failing(3, tmp_path, "write_data", {2: KeyboardInterrupt()})
    assert isinstance(ends[2].error, KeyboardInterrupt)
    for end in ends[:2]:
        assert isinstance(end.error, CheckpointError)
        assert "KeyboardInterrupt" in str(end.error)


class WaitOnly:
    """A future with DCP's two methods and nothing else."""

    def __init__(self, results: Any) -> None:
        self.results = results

    def wait(self) -> None:
        return None

    def value(self) -> Any:
        return self.results


def late(results: Any, error: BaseException | None = None) -> Future[Any]:
    """A future that another thread completes."""
    future: Future[Any] = Future()
    end = (future.set_exception, error) if error else (future.set_result, results)
    threading.Timer(0.05, end[0], (end[1],)).start()
    return future


def concurrent(results: Any) -> ConcurrentFuture[Any]:
    future: ConcurrentFuture[Any] = ConcurrentFuture()
    future.set_result(results)
    return future


@pytest.mark.parametrize("make", [late, WaitOnly, concurrent])
def test_futures_of_every_kind_are_waited_for(make, tmp_path):
    ends = save_all(2, lambda rank: FuturedWriter(tmp_path, make))
    assert len(ends[1].get().storage_data) == 5 + 2


@pytest.fixture
def pending():
    """Returns a future that completes only when the test has ended, with the thread that waits."""
    future: Future[Any] = Future()
    yield future
    future.set_result(None)


def test_a_future_that_never_completes_fails_every_rank_at_the_deadline(pending, tmp_path):
    check_failed_future(
        lambda results: pending, DeadlineError, "FuturedWriter.write_data", tmp_path
    )


@pytest.mark.parametrize(
    ("make", "kind", "told"),
    [
        (lambda results: late(results, OSError("late")), CheckpointError, "late"),
        (lambda results: results, CheckpointError, "FuturedWriter.write_data must return "),
        (lambda results: concurrent([threading.Lock()]), CheckpointError, "pickle"),
    ],
    ids=["fails later", "no future", "can't be pickled"],
)
def test_a_future_that_fails_fails_every_rank_and_names_its_own(make, kind, told, tmp_path):
    check_failed_future(make, kind, told, tmp_path)


def check_failed_future(make, kind, told, tmp_path):
    """Checks that every rank fails as one rank's future does, and names that rank."""

    def writer(rank: int) -> OwnWriter:
        return FuturedWriter(tmp_path, make) if rank == 1 else OwnWriter(tmp_path)

    for end in save_all(2, writer, timeout_s=0.2):
        assert isinstance(end.error, kind)
        assert told in str(end.error)
        assert set(end.error.failures) == {1}


def save_dying(rank: int, tag: str, path: Path) -> list[Any]:
    """Returns how the others end when a rank dies at a request."""
    ends = run(
        [foreign_save(group(r, 3), state(), OwnWriter(path)) for r in range(3)],
        dies=lambda request: request.rank == rank and request.tag == tag,
    )
    return [end for r, end in enumerate(ends) if r != rank]


@pytest.mark.parametrize("tag", ["plan/gather", "plan/scatter", "write/gather"])
def test_a_rank_that_dies_before_the_commit_fails_the_others_and_is_named(tag, tmp_path):
    for end in save_dying(1, tag, tmp_path):
        assert isinstance(end.error, DeadlineError)
        assert "rank 1" in str(end.error)
    assert not (tmp_path / ".metadata").exists()


def test_when_the_coordinator_rank_dies_after_finish_the_outcome_is_unknown(tmp_path):
    for end in save_dying(0, "write/scatter", tmp_path):
        assert isinstance(end.error, CommitUnknownError)
    assert (tmp_path / ".metadata").exists()


def test_the_coordinator_rank_knows_of_its_commit_even_if_another_rank_is_gone(tmp_path):
    ends = save_dying(2, "write/scatter", tmp_path)
    assert isinstance(ends[0].get(), Metadata)
    assert isinstance(ends[1].error, CommitUnknownError)


# --- loading failures ---------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    save_one(OwnWriter(tmp_path))
    return tmp_path


def test_a_missing_key_is_a_missing_key_error_on_every_rank(saved):
    ends = load_all(
        2,
        lambda rank: dcp.FileSystemReader(saved),
        lambda rank: {**state(), **({"more": torch.zeros(1)} if rank else {})},
    )
    for end in ends:
        assert isinstance(end.error, MissingKeyError)
        assert isinstance(end.error, RuntimeError)
        assert set(end.error.failures) == {1}


def test_no_checkpoint_is_told_as_such(tmp_path):
    ends = load_all(2, lambda rank: dcp.FileSystemReader(tmp_path / "none"), lambda rank: state())
    for end in ends:
        assert isinstance(end.error, CheckpointNotFoundError)
        assert "FileSystemReader.read_metadata" in str(end.error)
    reader = failing(dcp.FileSystemReader(tmp_path), "read_metadata", TimeoutError("slow store"))
    with pytest.raises(CheckpointError, match="slow store") as raised:
        load_one(state(), reader)
    assert not isinstance(raised.value, CheckpointNotFoundError)


def test_no_stateful_gets_its_state_when_another_rank_failed_to_read(saved):
    readers = [dcp.FileSystemReader(saved) for _ in range(2)]
    failing(readers[1], "read_data", OSError("gone"))
    targets = [state(8.0), state(8.0)]
    ends = load_all(2, readers.__getitem__, targets.__getitem__)
    assert all(set(end.error.failures) == {1} for end in ends)
    assert [target["counter"].n for target in targets] == [8, 8]


def test_a_stateful_that_refuses_its_state_fails_every_rank(saved):
    counters = [Counter(4), failing(Counter(4), "load_state_dict", ValueError("not mine"))]
    ends = load_all(
        2, lambda rank: dcp.FileSystemReader(saved), lambda rank: {"counter": counters[rank]}
    )
    assert [str(end.error.failures[1][0]) for end in ends] == ["not mine", "not mine"]


# --- older and odd planners ---------------------------------------------------------------------


def test_a_planner_without_storage_meta_is_called_as_before_with_a_warning(tmp_path):
    class Old(dcp.DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, is_coordinator: bool) -> None:  # type: ignore[override]
            super().set_up_planner(state_dict, None, is_coordinator)

    with pytest.warns(UserWarning, match="Old.set_up_planner has no storage_meta"):
        save_one(OwnWriter(tmp_path), Old())


def test_a_global_plan_of_the_wrong_length_is_refused(tmp_path):
    class Short(OwnWriter):
        def prepare_global_plan(self, plans: Any) -> Any:
            return plans[:1]

    for end in save_all(2, lambda rank: Short(tmp_path)):
        assert "one plan for each of the 2 ranks, but returned 1" in str(end.error)


# --- stateful -----------------------------------------------------------------------------------


def test_stateful_values_are_asked_in_the_order_of_their_keys(tmp_path):
    asked: list[str] = []
    values = {name: Counter(0, name, asked) for name in "cab"}
    save_one(OwnWriter(tmp_path), state_dict=values)
    asked.clear()
    load_one(values, dcp.FileSystemReader(tmp_path))
    assert asked == ["a", "b", "c", "a", "b", "c"]


@pytest.mark.parametrize("wrong", [[1], torch.nn.Linear(1, 1), None])
def test_what_is_no_state_dict_is_named(wrong, tmp_path):
    save_one(OwnWriter(tmp_path))
    with pytest.raises(CheckpointError, match=type(wrong).__name__):
        load_one(wrong, dcp.FileSystemReader(tmp_path))
