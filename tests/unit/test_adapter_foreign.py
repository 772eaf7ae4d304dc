"""Third-party storage plug-ins: DCP's call order, one outcome on all ranks, no hang."""

from __future__ import annotations

import io
import logging
import threading
from concurrent.futures import Future as ConcurrentFuture
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import ray_dcp.torch_adapter  # noqa: F401 - makes CheckpointError a CheckpointException
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitUnknownError,
    DeadlineError,
    MissingKeyError,
    StateDictError,
)
from ray_dcp.torch_adapter.foreign import foreign_load, foreign_save
from ray_dcp.torch_adapter.state import Stored, stateful_to_load_targets
from tests.unit.adapter_ranks import group, run

SINGLE_PROCESS = "ignore:torch.distributed is disabled"


class Counter:
    """A `Stateful` value."""

    def __init__(self, n: int) -> None:
        self.n = n

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


def state(fill: float = 1.0) -> dict[str, Any]:
    return {
        "w": torch.full((4, 3), fill),
        "nested": {"b": torch.full((2,), fill), "steps": [1, 2], "name": "x"},
        "counter": Counter(int(fill)),
    }


def rows(rank: int, world_size: int) -> torch.Tensor:
    return torch.arange(world_size * 2 * 3, dtype=torch.float32).reshape(-1, 3)[
        2 * rank : 2 * rank + 2
    ]


class ShardPlanner(dcp.DefaultSavePlanner):
    """Plans `shard` as two rows of a tensor of all ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def create_local_plan(self) -> dcp.SavePlan:
        plan = super().create_local_plan()
        items = [self._item(i) if i.index.fqn == "shard" else i for i in plan.items]
        self.plan = dcp.SavePlan(items, planner_data=plan.planner_data)
        return self.plan

    def _item(self, item: dcp.WriteItem) -> dcp.WriteItem:
        offsets = torch.Size((2 * self.rank, 0))
        return dcp.WriteItem(
            MetadataIndex("shard", offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(offsets, torch.Size((2, 3))),
                TensorProperties(torch.float32),
                torch.Size((2 * self.world_size, 3)),
            ),
        )

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn == "shard":
            return self.state_dict["shard"]
        return super().lookup_object(index)


class Recorder:
    """Notes the calls of a plug-in and planner, with those arguments that DCP chooses."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def note(self, name: str, *what: Any) -> None:
        self.calls.append((name, *what))


class MemoryWriter(dcp.StorageWriter):
    """A third-party writer into a dict, whose `set_up_storage_writer` takes `**kwargs`."""

    def __init__(self, recorder: Recorder, store: dict[str, Any]) -> None:
        self.recorder, self.store, self.path = recorder, store, "start"

    def reset(self, checkpoint_id: Any = None) -> None:
        self.recorder.note("reset", checkpoint_id)
        self.path = checkpoint_id

    def storage_meta(self) -> Any:
        self.recorder.note("storage_meta")
        return dcp.metadata.StorageMeta(checkpoint_id=str(self.path), save_id="s")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.recorder.note("set_up_storage_writer", is_coordinator, args, kwargs)

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        self.recorder.note("prepare_local_plan", [i.index.fqn for i in plan.items])
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        self.recorder.note("prepare_global_plan", len(plans))
        return plans

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[Any]:
        self.recorder.note("write_data", [i.index for i in plan.items])
        results = []
        for item in plan.items:
            data = planner.resolve_data(item)
            self.store[repr(item.index)] = data if isinstance(data, io.BytesIO) else data.clone()
            results.append(WriteResult(item.index, 1, repr(item.index)))
        return self.future(results)

    def future(self, results: list[WriteResult]) -> Any:
        future: Future[Any] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.recorder.note("finish", [[r.index for r in rank] for rank in results])
        metadata.storage_data = {r.index: r.storage_data for rank in results for r in rank}
        self.store["metadata"] = metadata

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class PlainWriter(MemoryWriter):
    """The same without `**kwargs`."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:  # type: ignore[override]
        self.recorder.note("set_up_storage_writer", is_coordinator)


class MemoryReader(dcp.StorageReader):
    """Reads what `MemoryWriter` wrote."""

    def __init__(self, recorder: Recorder, store: dict[str, Any]) -> None:
        self.recorder, self.store = recorder, store

    def reset(self, checkpoint_id: Any = None) -> None:
        self.recorder.note("reset", checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.recorder.note("read_metadata", args, kwargs)
        return self.store["metadata"]

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self.recorder.note("set_up_storage_reader", is_coordinator, args, kwargs)

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        self.recorder.note("prepare_local_plan", [i.dest_index.fqn for i in plan.items])
        return plan

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        self.recorder.note("prepare_global_plan", len(plans))
        return plans

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        self.recorder.note("read_data", [i.dest_index for i in plan.items])
        for item in plan.items:
            stored = self.store[repr(item.storage_index)]
            if isinstance(stored, io.BytesIO):
                planner.load_bytes(item, io.BytesIO(stored.getvalue()))
                continue
            for dim, (low, n) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                stored = stored.narrow(dim, low, n)
            target = planner.resolve_tensor(item)
            target.copy_(stored)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def recording(planner: Any, recorder: Recorder) -> Any:
    """Makes a planner note its hooks' calls in the same record."""
    names = (
        "set_up_planner", "create_local_plan", "create_global_plan", "finish_plan",
        "resolve_data", "load_bytes", "resolve_tensor", "commit_tensor",
    )  # fmt: skip
    for name in names:
        if hasattr(planner, name):
            setattr(planner, name, _noting(getattr(planner, name), name, recorder))
    return planner


def _noting(hook: Any, name: str, recorder: Recorder) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        recorder.note(name, len(args), sorted(kwargs))
        return hook(*args, **kwargs)

    if name == "set_up_planner" and "storage_meta" in hook.__code__.co_varnames:

        def noted_set_up(
            state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
        ) -> Any:
            recorder.note(name, list(state_dict), storage_meta, is_coordinator)
            return hook(state_dict, storage_meta, is_coordinator)

        return noted_set_up
    return noted


def save_all(
    world_size: int, make_writer: Any, *, use_collectives: bool = True, **who: Any
) -> list[Any]:
    return run(
        [
            foreign_save(
                group(rank, world_size, **who),
                {**state(), "shard": rows(rank, world_size)},
                make_writer(rank),
                ShardPlanner(rank, world_size),
                use_collectives=use_collectives,
            )
            for rank in range(world_size)
        ]
    )


# --- order of calls -----------------------------------------------------------------------------


@pytest.mark.filterwarnings(SINGLE_PROCESS)
@pytest.mark.parametrize("writer_class", [MemoryWriter, PlainWriter])
@pytest.mark.parametrize("checkpoint_id", [None, "there"])
def test_save_makes_the_calls_of_stock_dcp_in_its_order(writer_class, checkpoint_id):
    stock, ours = Recorder(), Recorder()
    dcp.save(
        state(),
        checkpoint_id=checkpoint_id,
        storage_writer=writer_class(stock, {}),
        planner=recording(dcp.DefaultSavePlanner(), stock),
        no_dist=True,
    )
    planner = recording(dcp.DefaultSavePlanner(), ours)
    save_one(writer_class(ours, {}), planner, checkpoint_id=checkpoint_id)
    assert len(ours.calls) > 8
    assert list(map(repr, ours.calls)) == list(map(repr, stock.calls))


@pytest.mark.filterwarnings(SINGLE_PROCESS)
@pytest.mark.parametrize("checkpoint_id", [None, "there"])
def test_load_makes_the_calls_of_stock_dcp_in_its_order(checkpoint_id):
    store: dict[str, Any] = {}
    save_one(MemoryWriter(Recorder(), store))
    stock, ours = Recorder(), Recorder()
    by_stock, by_us = state(5.0), state(5.0)
    dcp.load(
        by_stock,
        checkpoint_id=checkpoint_id,
        storage_reader=MemoryReader(stock, store),
        planner=recording(dcp.DefaultLoadPlanner(), stock),
        no_dist=True,
    )
    load_one(
        by_us,
        MemoryReader(ours, store),
        recording(dcp.DefaultLoadPlanner(), ours),
        checkpoint_id=checkpoint_id,
    )
    assert len(ours.calls) > 8
    assert list(map(repr, ours.calls)) == list(map(repr, stock.calls))
    assert by_us["counter"].n == by_stock["counter"].n == 1
    assert torch.equal(by_us["w"], torch.full((4, 3), 1.0))


def save_one(writer: Any, planner: Any = None, **options: Any) -> Metadata:
    seen: list[Any] = []
    saved = run([foreign_save(group(), state(), writer, planner, **options)], seen=seen)[0].get()
    assert seen == []  # one rank exchanges nothing
    return saved


def load_one(target: Any, reader: Any, planner: Any = None, **options: Any) -> None:
    run([foreign_load(group(), target, reader, planner, **options)])[0].get()


@pytest.mark.parametrize("coordinator_rank", [0, 2])
def test_only_the_coordinator_rank_plans_globally_and_finishes(coordinator_rank):
    recorders = [Recorder() for _ in range(4)]
    store: dict[str, Any] = {}
    ends = save_all(
        4, lambda rank: MemoryWriter(recorders[rank], store), coordinator_rank=coordinator_rank
    )
    assert all(end.error is None for end in ends)
    central = {"prepare_global_plan", "finish"}
    for rank, recorder in enumerate(recorders):
        names = [call[0] for call in recorder.calls]
        assert (central <= set(names)) == (rank == coordinator_rank)
        assert [n for n in names if n not in central] == [
            "storage_meta", "set_up_storage_writer", "prepare_local_plan", "write_data",
        ]  # fmt: skip
        setting_up = recorder.calls[1]
        assert setting_up[1] == (rank == coordinator_rank)
        assert setting_up[3] == {"rank": rank, "use_collectives": True}


def test_every_rank_returns_the_metadata_that_finish_filled():
    store: dict[str, Any] = {}
    ends = save_all(3, lambda rank: MemoryWriter(Recorder(), store))
    assert ends[0].get() is store["metadata"]
    for end in ends:
        assert len(end.get().storage_data) == 3 + 5
        assert len(end.get().state_dict_metadata["shard"].chunks) == 3


def test_metadata_that_cannot_be_pickled_does_not_fail_a_committed_save(caplog):
    class Odd(MemoryWriter):
        def finish(self, metadata: Metadata, results: Any) -> None:
            super().finish(metadata, results)
            metadata.storage_data = threading.Lock()

    with caplog.at_level(logging.WARNING):
        ends = save_all(2, lambda rank: Odd(Recorder(), {}))
    assert ends[1].get().storage_data is None
    assert ends[1].get().state_dict_metadata.keys() == ends[0].get().state_dict_metadata.keys()
    assert "can't be pickled" in caplog.text


# --- checkpoints --------------------------------------------------------------------------------


class LoudWriter(dcp.FileSystemWriter):
    """A subclass of torch's writer."""

    finished = 0

    def finish(self, metadata: Metadata, results: Any) -> None:
        type(self).finished += 1
        super().finish(metadata, results)


@pytest.mark.filterwarnings(SINGLE_PROCESS)
@pytest.mark.parametrize("world_size", [1, 4])
def test_what_a_subclass_of_the_file_writer_saved_loads_in_stock_dcp(world_size, tmp_path):
    ends = save_all(world_size, lambda rank: LoudWriter(tmp_path))
    assert all(end.error is None for end in ends)
    whole = torch.cat([rows(rank, world_size) for rank in range(world_size)])
    target = {**state(7.0), "shard": torch.zeros_like(whole)}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(target["shard"], whole)
    assert torch.equal(target["w"], state()["w"])
    assert target["nested"]["steps"] == [1, 2]
    assert target["counter"].n == 1


@pytest.mark.filterwarnings(SINGLE_PROCESS)
def test_what_stock_dcp_saved_loads_on_three_ranks(tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    targets = [state(9.0) for _ in range(3)]
    ends = load_all(3, lambda rank: dcp.FileSystemReader(tmp_path), targets.__getitem__)
    for end, target in zip(ends, targets, strict=True):
        end.get()
        assert torch.equal(target["w"], state()["w"])
        assert target["counter"].n == 1


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_without_collectives_every_rank_writes_its_own_metadata_and_reads_it(tmp_path):
    ends = save_all(2, lambda rank: LoudWriter(tmp_path), use_collectives=False)
    assert all(end.error is None for end in ends)
    assert sorted(p.name for p in tmp_path.glob("*.metadata")) == [
        "__0.metadata", "__1.metadata",
    ]  # fmt: skip
    reader = dcp.FileSystemReader(tmp_path)
    target = {**state(3.0)}
    load_one(target, reader)
    assert reader.use_collectives is False
    assert torch.equal(target["w"], state()["w"])


# --- failures -----------------------------------------------------------------------------------


class Failing(MemoryWriter):
    """Fails in one call."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__(Recorder(), {})
        self.where, self.error = where, error

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "__dict__").get("where"):

            def fail(*args: Any, **kwargs: Any) -> Any:
                raise self.error

            return fail
        return super().__getattribute__(name)


class Unpicklable(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


RANK_STEPS = ["storage_meta", "prepare_local_plan", "write_data"]


@pytest.mark.parametrize("where", RANK_STEPS)
@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        CheckpointException("planned", {}),
        Unpicklable("a", "b"),
        BaseException("worst"),
    ],
    ids=["OSError", "CheckpointException", "unpicklable", "BaseException"],
)
def test_an_error_on_one_rank_is_the_same_error_on_all(where, error):
    ends = save_all(
        3, lambda rank: Failing(where, error) if rank == 1 else MemoryWriter(Recorder(), {})
    )
    for end in ends:
        assert isinstance(end.error, CheckpointError)
        assert isinstance(end.error, CheckpointException)
        assert set(end.error.failures) == {1}
        told, stack = end.error.failures[1]
        assert str(error) in str(told)
        assert stack[-1].name == "fail"
    assert len({str(end.error) for end in ends}) == 1
    assert ends[1].error.__cause__ is error


@pytest.mark.parametrize("where", ["prepare_global_plan", "finish"])
def test_an_error_on_the_coordinator_rank_reaches_all(where):
    ends = save_all(
        3,
        lambda rank: (
            Failing(where, ValueError("no")) if rank == 0 else MemoryWriter(Recorder(), {})
        ),
    )
    for end in ends:
        assert isinstance(end.error, CheckpointError)
        assert set(end.error.failures) == {0}
        assert isinstance(end.error.failures[0][0], ValueError)


def test_several_ranks_that_fail_are_told_together():
    errors = {1: OSError("disk"), 3: ValueError("shape")}
    ends = save_all(
        4,
        lambda rank: (
            Failing("write_data", errors[rank]) if rank in errors else MemoryWriter(Recorder(), {})
        ),
    )
    for end in ends:
        assert {r: str(e) for r, (e, _) in end.error.failures.items()} == {1: "disk", 3: "shape"}
        assert "2 of 4 ranks" in str(end.error)


class LateWriter(MemoryWriter):
    """Completes its future from another thread."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(Recorder(), {})
        self.error = error

    def future(self, results: list[WriteResult]) -> Any:
        future: Future[Any] = Future()

        def complete() -> None:
            if self.error is None:
                future.set_result(results)
            else:
                future.set_exception(self.error)

        timer = threading.Timer(0.05, complete)
        timer.start()
        self.timer = timer
        return future


def test_a_future_that_is_not_complete_yet_is_waited_for():
    writers = [LateWriter(), LateWriter()]
    ends = save_all(2, writers.__getitem__)
    for writer in writers:
        writer.timer.join()
    assert len(ends[1].get().storage_data) == 2 + 5


def test_a_future_that_fails_later_fails_every_rank():
    writers = [LateWriter(), LateWriter(OSError("late"))]
    ends = save_all(2, writers.__getitem__)
    for writer in writers:
        writer.timer.join()
    for end in ends:
        assert "late" in str(end.error.failures[1][0])


class NeverWriter(MemoryWriter):
    def future(self, results: list[WriteResult]) -> Any:
        return Future()


def test_a_future_that_never_completes_ends_at_the_deadline_and_names_the_rank():
    ends = save_all(
        2,
        lambda rank: (NeverWriter if rank == 1 else MemoryWriter)(Recorder(), {}),
        timeout_s=0.1,
    )
    for end in ends:
        assert isinstance(end.error, DeadlineError)
        assert "NeverWriter.write_data" in str(end.error)
        assert set(end.error.failures) == {1}


class WaitOnly:
    """A future with DCP's two methods and nothing else."""

    def __init__(self, results: Any) -> None:
        self.results = results

    def wait(self) -> None:
        return None

    def value(self) -> Any:
        return self.results


@pytest.mark.parametrize("kind", ["wait and value", "concurrent"])
def test_other_futures_are_waited_for(kind):
    class Other(MemoryWriter):
        def future(self, results: list[WriteResult]) -> Any:
            if kind == "wait and value":
                return WaitOnly(results)
            done: ConcurrentFuture[Any] = ConcurrentFuture()
            done.set_result(results)
            return done

    assert len(save_one(Other(Recorder(), {})).storage_data) == 5


def test_a_result_that_is_no_future_is_named():
    class Wrong(MemoryWriter):
        def future(self, results: list[WriteResult]) -> Any:
            return results

    with pytest.raises(CheckpointError, match=r"Wrong.write_data must return .* returned list"):
        save_one(Wrong(Recorder(), {}))


def test_a_result_that_cannot_be_pickled_fails_instead_of_hanging():
    class Locked(MemoryWriter):
        def future(self, results: list[WriteResult]) -> Any:
            return super().future([threading.Lock()])  # type: ignore[list-item]

    ends = save_all(3, lambda rank: (Locked if rank == 1 else MemoryWriter)(Recorder(), {}))
    for end in ends:
        assert set(end.error.failures) == {1}
        assert "pickle" in str(end.error)


def test_an_interrupted_rank_stops_and_tells_the_others():
    ends = save_all(
        3,
        lambda rank: (
            Failing("write_data", KeyboardInterrupt())
            if rank == 2
            else MemoryWriter(Recorder(), {})
        ),
    )
    assert isinstance(ends[2].error, KeyboardInterrupt)
    for end in ends[:2]:
        assert isinstance(end.error, CheckpointError)
        assert "KeyboardInterrupt" in str(end.error)


def save_dying(rank: int, tag: str) -> tuple[list[Any], dict[str, Any]]:
    store: dict[str, Any] = {}
    ends = run(
        [foreign_save(group(r, 3), state(), MemoryWriter(Recorder(), store)) for r in range(3)],
        dies=lambda request: request.rank == rank and request.tag == tag,
    )
    return [end for r, end in enumerate(ends) if r != rank], store


@pytest.mark.parametrize("tag", ["plan/gather", "plan/scatter", "write/gather"])
def test_a_rank_that_dies_before_the_commit_fails_the_others_and_is_named(tag):
    ends, store = save_dying(1, tag)
    for end in ends:
        assert isinstance(end.error, DeadlineError)
        assert "rank 1" in str(end.error)
    assert "metadata" not in store


def test_when_the_coordinator_rank_dies_after_finish_the_outcome_is_unknown():
    ends, store = save_dying(0, "write/scatter")
    for end in ends:
        assert isinstance(end.error, CommitUnknownError)
    assert "metadata" in store


def test_the_coordinator_rank_knows_of_its_commit_even_if_another_rank_is_gone():
    ends, _ = save_dying(2, "write/scatter")
    assert isinstance(ends[0].get(), Metadata)
    assert isinstance(ends[1].error, CommitUnknownError)


# --- loading failures ---------------------------------------------------------------------------


def load_all(world_size: int, make_reader: Any, make_state: Any) -> list[Any]:
    return run(
        [
            foreign_load(group(rank, world_size), make_state(rank), make_reader(rank))
            for rank in range(world_size)
        ]
    )


def test_a_missing_key_is_a_missing_key_error_on_every_rank():
    store: dict[str, Any] = {}
    save_one(MemoryWriter(Recorder(), store))
    ends = load_all(
        2,
        lambda rank: MemoryReader(Recorder(), store),
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


def test_metadata_that_cannot_be_read_for_another_reason_is_not_called_missing():
    class Broken(MemoryReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            raise TimeoutError("slow store")

    with pytest.raises(CheckpointError, match="slow store") as raised:
        load_one(state(), Broken(Recorder(), {}))
    assert not isinstance(raised.value, CheckpointNotFoundError)


def test_no_stateful_gets_its_state_when_another_rank_failed_to_read():
    store: dict[str, Any] = {}
    save_one(MemoryWriter(Recorder(), store))

    class Broken(MemoryReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            raise OSError("gone")

    targets = [state(8.0), state(8.0)]
    ends = load_all(
        2,
        lambda rank: (Broken if rank == 1 else MemoryReader)(Recorder(), store),
        targets.__getitem__,
    )
    assert all(set(end.error.failures) == {1} for end in ends)
    assert [target["counter"].n for target in targets] == [8, 8]


def test_a_stateful_that_refuses_its_state_fails_every_rank():
    store: dict[str, Any] = {}
    save_one(MemoryWriter(Recorder(), store))

    class Refusing(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("not mine")

    ends = load_all(
        2,
        lambda rank: MemoryReader(Recorder(), store),
        lambda rank: {"counter": (Refusing if rank else Counter)(4)},
    )
    assert [str(end.error.failures[1][0]) for end in ends] == ["not mine", "not mine"]


# --- older and odd planners ---------------------------------------------------------------------


def test_a_planner_without_storage_meta_is_called_as_before_with_a_warning():
    class Old(dcp.DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, is_coordinator: bool) -> None:  # type: ignore[override]
            super().set_up_planner(state_dict, None, is_coordinator)

    with pytest.warns(UserWarning, match="Old.set_up_planner has no storage_meta"):
        save_one(MemoryWriter(Recorder(), {}), Old())


def test_a_global_plan_of_the_wrong_length_is_refused():
    class Short(MemoryWriter):
        def prepare_global_plan(self, plans: Any) -> Any:
            return plans[:1]

    ends = save_all(2, lambda rank: Short(Recorder(), {}))
    for end in ends:
        assert "one plan for each of the 2 ranks, but returned 1" in str(end.error)


# --- stateful -----------------------------------------------------------------------------------

NOTHING_STORED = Stored((), lambda name: False)


def test_stateful_values_are_asked_in_the_order_of_their_keys():
    asked: list[str] = []

    class Asked(Counter):
        def __init__(self, name: str) -> None:
            super().__init__(0)
            self.name = name

        def state_dict(self) -> dict[str, Any]:
            asked.append(self.name)
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            asked.append(self.name)

    values = {name: Asked(name) for name in "cab"}
    stateful_to_load_targets(values, NOTHING_STORED).put_back(values)
    assert asked == ["a", "b", "c", "a", "b", "c"]


@pytest.mark.parametrize("wrong", [[1], torch.nn.Linear(1, 1), None])
def test_what_is_no_state_dict_is_named(wrong):
    with pytest.raises(StateDictError, match=type(wrong).__name__):
        stateful_to_load_targets(wrong, NOTHING_STORED)


def test_paths_are_accepted_as_checkpoint_ids(tmp_path: Path):
    recorder = Recorder()
    save_one(MemoryWriter(recorder, {}), checkpoint_id=tmp_path)
    assert recorder.calls[0] == ("reset", tmp_path)
