"""Planning and commit at scale: simulated ranks, real messages, the coordinator's real code.

Every request and reply is pickled and unpickled as Ray does it and goes through `Coordination`
and `perform`, as in the actor; from 65 ranks on by way of 64 gatherers at most, whose own CPU is
other processes'. Left out are Ray's transport, and the ranks' files: the storage says that they are
there. Only what the coordinator does is counted, in CPU seconds of all its threads.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import pickle
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.messages import (
    BatchedReplies,
    DeferredPlace,
    FileReceipt,
    MessageBatch,
    OpKey,
    SaveOutcome,
    SaveReceipt,
    Target,
)
from ray_dcp.commit_protocol.plan_cache import PlanMemory
from ray_dcp.coordinator.gatherer import BatchWindow, group_of
from ray_dcp.coordinator.tasks import perform
from ray_dcp.core.checksums import digest, length_with_checks, num_blocks_many
from ray_dcp.core.values import Columns, FilePlan, Kind, RankPlan
from ray_dcp.options import SaveOptions
from ray_dcp.place.attempt_id import new_attempt
from ray_dcp.store.memory import MemoryStorage
from tests.support.world import Batch, Shell, join_save

WORLDS = (64, 256, 1024, 2816, 4096, 10240)
TENSORS = 1000
WARM_SAVES = 3
"""Of which the median is told."""
COLUMNS = 64
OBJECT_BYTES = 1024
TARGET = Target("memory://bench")


# --- what the ranks hold ------------------------------------------------------------------------


def slabs(world_size: int, tensors: int, *, regular: bool) -> Iterator[Columns]:
    """Yields what each rank holds: a slab of every tensor, of equal or of uneven heights."""
    names = tuple(f"model.layers.{index}.weight" for index in range(tensors))
    rng = np.random.default_rng(world_size)
    high = np.full(tensors, 4, np.int64) if regular else rng.integers(8, 64, tensors)
    length = high * world_size
    # Uneven: every cut is moved by up to a quarter of a slab, another way for each tensor.
    phase = rng.integers(0, 1 << 30, tensors)

    def cut(rank: int) -> Any:
        if regular or rank in (0, world_size):
            return high * rank
        return high * rank + (phase * (rank + 1) * 2654435761 >> 7) % (high // 4)

    ones = np.ones(tensors, np.int8)
    shape = np.stack([length, np.full(tensors, COLUMNS)], axis=1)
    for rank in range(world_size):
        low, top = cut(rank), cut(rank + 1)
        yield Columns(
            names=names, paths=tuple((name,) for name in names), dtypes=("float32",),
            name=np.arange(tensors, dtype=np.int32), kind=ones * np.int8(Kind.TENSOR),
            dtype=ones * np.int8(0), ndim=ones * np.int8(2), shape=shape,
            offset=np.stack([low, np.zeros(tensors, np.int64)], axis=1),
            size=np.stack([top - low, np.full(tensors, COLUMNS)], axis=1),
            requires_grad=ones.astype(np.bool_), splittable=np.zeros(tensors, np.bool_),
            value=np.zeros(tensors, np.uint64), settled=np.zeros(tensors, np.int8),
        )  # fmt: skip


def meshed(world_size: int, tensors: int, layout: str) -> Iterator[Columns]:
    """Yields what each rank of a large job holds: slabs, some of them copied, scalars, an object.

    `"HSDP"`: shards over 64 ranks, copied by all others of their number. `"stages"`: 16 stages of
    a pipeline, in each of which tensors are cut for FSDP and, in columns, over 8 ranks for tensor
    parallelism, over which every fourth is copied; the object is one of each rank's own.
    With less than 8 ranks a stage (a job of 64) the latter are all of it.
    """
    stages, copies = (1, max(1, world_size // 64)) if layout == "HSDP" else (16, 1)
    size = world_size // stages
    inner = 1 if layout == "HSDP" else min(8, size)
    outer = size // copies // inner
    count = tensors - 2
    high, width = (1024, COLUMNS) if layout == "HSDP" else (16, COLUMNS // inner)
    copied = np.arange(count) % 4 == 3 if inner > 1 else np.zeros(count, bool)
    kinds = np.array([*[Kind.TENSOR] * (count + 1), Kind.OBJECT], np.int8)
    ndim = np.array([*[2] * count, 0, 0], np.int8)
    dtype, value = np.zeros((2, tensors), np.int8)
    dtype[-1], value[-2] = -1, 7
    shape = np.ones((tensors, 2), np.int64)
    shape[:count] = high * outer, COLUMNS
    for rank in range(world_size):
        stage, place = divmod(rank, size)
        if place == 0:
            words = (*(f"{stage}.layers.{index}.weight" for index in range(count)), "lr", "step")
            paths = tuple((name,) for name in words)
        if stages > 1:
            number = f"rank-{rank}-of-{world_size}"
            words = (*words[:-1], f"loader.{number}")
            paths = (*paths[:-1], ("loader", number))
        offset, lengths = np.zeros((tensors, 2), np.int64), np.ones((tensors, 2), np.int64)
        offset[:count, 0] = place // inner % outer * high
        offset[:count, 1] = np.where(copied, 0, place % inner * width)
        lengths[:count, 0], lengths[:count, 1] = high, np.where(copied, COLUMNS, width)
        yield Columns(
            names=words, paths=paths, dtypes=("float32",),
            name=np.arange(tensors, dtype=np.int32), kind=kinds, dtype=dtype, ndim=ndim,
            shape=shape, offset=offset, size=lengths, requires_grad=kinds == Kind.TENSOR,
            splittable=(kinds == Kind.TENSOR) & (ndim > 0), value=value.astype(np.uint64),
            settled=np.zeros(len(kinds), np.int8),
        )  # fmt: skip


def held(world_size: int, tensors: int, layout: str) -> Iterator[Columns]:
    """Yields what each rank holds, by the name of a layout."""
    if layout in ("regular", "irregular"):
        return slabs(world_size, tensors, regular=layout == "regular")
    return meshed(world_size, tensors, layout)


class Held:
    """What a simulated rank captured: columns without bytes."""

    warnings = ()
    tied = None

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def source(self, row: int, /) -> memoryview:
        """Never asked for."""
        raise NotImplementedError

    def deferred(self, row: int, /) -> bytes:
        """Never asked for."""
        raise NotImplementedError


def receipt_of(file: FilePlan, attempt: str) -> FileReceipt:
    """Returns what a rank says once it has written a file, with made-up checksums."""
    count = int(num_blocks_many(file.payload_bytes, file.block_bytes).sum()) + len(file.deferred)
    checks = np.random.default_rng(file.file).integers(0, 1 << 63, count, dtype=np.uint64)
    key, num_bytes = file.key.replace("{attempt}", attempt), file.num_bytes
    name, deferred = digest(checks), []
    for row in file.deferred.tolist():
        deferred.append(DeferredPlace(row, num_bytes, OBJECT_BYTES, OBJECT_BYTES))
        num_bytes += OBJECT_BYTES
    num_bytes = length_with_checks(num_bytes, count)
    return FileReceipt(file.file, key, num_bytes, name, tuple(deferred))


class Written(MemoryStorage):
    """A storage in which every part file is there, at the length that it should have."""

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Returns the last byte of a part file; what was written of others."""
        return b"x" if key.endswith(".distcp") else super().read(key, start, num_bytes)


# --- the coordinator ----------------------------------------------------------------------------


class Counted:
    """A coordinator whose CPU seconds, messages and bytes are counted."""

    def __init__(self, storage: MemoryStorage) -> None:
        coordination = Coordination(epoch=1, new_attempt=new_attempt)
        self.cpu_s: dict[str, float] = defaultdict(float)
        self.bytes: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self.shell = Shell(coordination, partial(perform, opener=lambda target: storage))

    def take(self, blob: bytes, sort: str) -> None:
        """Takes a message as it comes over the wire."""
        self.messages[sort] += 1
        self.bytes[sort] += len(blob)
        with self._counting(sort):
            refused = self.shell.receive(pickle.loads(blob))
        if refused is not None:
            raise refused.error

    def take_together(self, blob: tuple[bytes, list[memoryview]], sort: str) -> Batch:
        """Takes what a gatherer sends, as it comes over the wire."""
        data, buffers = blob
        self.messages[sort] += 1
        self.bytes[sort] += len(data) + sum(map(len, buffers))
        with self._counting(sort):
            return self.shell.receive_batch(pickle.loads(data, buffers=buffers))

    def told(self, sort: str) -> list[tuple[Batch, BatchedReplies]]:
        """Returns what gatherers are told, as they read it."""
        with self._counting(sort):
            ready = self.shell.ready()
            sent = [pickle.dumps(BatchedReplies(tuple(batch.replies)), 5) for batch in ready]
        self.bytes[sort] += sum(map(len, sent))
        return list(zip(ready, map(pickle.loads, sent), strict=True))

    def work(self) -> None:
        """Performs all tasks."""
        while self.shell.tasks:
            with self._counting(type(self.shell.tasks[0].task).__name__):
                self.shell.perform(0)

    def answers(self, sort: str) -> dict[int, bytes]:
        """Returns the answers given, as they go over the wire."""
        answers, self.shell.answers = self.shell.answers, []
        with self._counting(sort):
            sent = {answer.ranks[0]: pickle.dumps(answer.reply, 5) for answer in answers}
        self.bytes[sort] += sum(map(len, sent.values()))
        return sent

    @contextmanager
    def _counting(self, sort: str) -> Iterator[None]:
        start_s = time.process_time()
        yield
        self.cpu_s[sort] += time.process_time() - start_s


def wired(message: MessageBatch) -> tuple[bytes, list[memoryview]]:
    """Returns a message as Ray sends it: arrays beside the pickle, which the receiver maps."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(message, 5, buffer_callback=buffers.append)
    return data, [memoryview(buffer.raw().tobytes()) for buffer in buffers]


class Ranks:
    """How the ranks' requests come to a coordinator and its answers to them: directly, or by way
    of gatherers, of which each is in a process of its own else."""

    def __init__(self, counted: Counted, world_size: int) -> None:
        self._counted = counted
        groups = {group_of(rank, world_size) for rank in range(world_size)} - {None}
        self._gatherings = [
            (group, BatchWindow(group, itertools.count().__next__))
            for group in sorted(groups, key=min)
        ]
        self._sent: dict[int, MessageBatch] = {}

    def say(self, requests: dict[int, Any], sort: str) -> None:
        """Hands over one request of each of these ranks."""
        if not self._gatherings:
            for request in requests.values():
                self._counted.take(pickle.dumps(request, 5), sort)
        messages = []
        for group, gathering in self._gatherings:
            for rank in group:
                if rank in requests:
                    messages += gathering.take(pickle.loads(pickle.dumps(requests[rank], 5)))
            messages += gathering.due()
        self._send([(message, wired(message)) for message in messages], sort)

    def _send(self, messages: list[tuple[MessageBatch, Any]], sort: str) -> None:
        gc.collect()
        gc.freeze()
        for message, blob in messages:
            self._sent[id(self._counted.take_together(blob, sort))] = message

    def hear(self, sort: str) -> dict[int, Any]:
        """Returns what ranks are told."""
        told = {rank: pickle.loads(blob) for rank, blob in self._counted.answers(sort).items()}
        again = []
        for batch, one in self._counted.told(sort) if self._gatherings else ():
            message = self._sent.pop(id(batch))
            told.update(one.replies)
            left = set(message.ranks) - {rank for rank, _ in one.replies}
            if left:
                # Those that still wait: a gatherer says the same again for them.
                rest = message.only(left)
                again.append((rest, wired(rest)))
        self._send(again, "again")
        return told


def save(counted: Counted, seq: int, world_size: int, held: Callable[[int], Columns],
         memories: list[PlanMemory], options: SaveOptions) -> dict[str, Any]:  # fmt: skip
    """Plays one save of all ranks; returns what the coordinator spent on it."""
    # What simulated ranks hold is in other processes else: the collector must not walk it here.
    gc.collect()
    gc.freeze()
    counted.cpu_s.clear()
    counted.bytes.clear()
    counted.messages.clear()
    key = OpKey("bench", seq)
    joins: dict[int, Any] = {}
    sending: dict[int, Any] = {}
    for rank in range(world_size):
        joins[rank] = join_save(
            key, rank=rank, world_size=world_size, target=TARGET, options=options,
            capture=partial(Held, held(rank)), memory=memories[rank],
            node=f"node {rank // RANKS_A_NODE}",
        )  # fmt: skip
        sending[rank] = next(joins[rank])
    gc.freeze()
    rows_moved = 0
    ranks = Ranks(counted, world_size)
    plans: list[tuple[Any, RankPlan]] = []
    while sending:
        rows_moved += sum(len(held(rank)) for rank, one in sending.items() if one.columns)
        ranks.say(sending, "join")
        counted.work()
        sending = {}
        for rank, reply in sorted(ranks.hear("go").items()):
            try:
                sending[rank] = joins[rank].send(reply)
            except StopIteration as end:
                plans.append((end.value[0], end.value[0].plan))
    written: Counter[int] = Counter()
    receipts = {}
    for go, plan in plans:
        files = tuple(receipt_of(file, go.attempt) for file in plan.files)
        written[plan.rank] += sum(int(file.payload_bytes.sum()) for file in plan.files)
        receipts[plan.rank] = SaveReceipt(key, plan.rank, go.attempt, go.epoch, files)
    ranks.say(receipts, "receipt")
    del receipts
    counted.work()
    outcomes = ranks.hear("outcome")
    first = outcomes[0]
    if not isinstance(first, SaveOutcome) or len(outcomes) != world_size:
        raise AssertionError(f"expected {world_size} commits, found {len(outcomes)}: {first}")
    return {
        "cpu_s": dict(counted.cpu_s),
        "bytes": counted.bytes.copy(),
        "messages": sum(counted.messages.values()),
        "rows moved": rows_moved,
        "balance": max(written.values()) * world_size / max(1, sum(written.values())),
    }


def measure(
    world_size: int, tensors: int, layout: str, saves: int, metadata: bool = False
) -> dict[str, Any]:
    """Saves a state several times; returns what each save cost, and the peak memory."""
    storage = Written("bench")
    counted = Counted(storage)
    columns = list(held(world_size, tensors, layout))
    memories = [PlanMemory() for _ in range(world_size)]
    options = SaveOptions(stock_metadata=metadata)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = [
        save(counted, seq, world_size, columns.__getitem__, memories, options)
        for seq in range(saves)
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sizes = {
        key: len(storage.read(key))
        for key in (entry.key for entry in storage.list())
        if "distcp" not in key
    }
    return {"saves": found, "peak_bytes": (peak - before) << 10, "files": sizes}


def measured(measure: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Measures in a process of its own, so that peaks do not add up."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


# --- the table ----------------------------------------------------------------------------------

PLANNING = ("join", "again", "go", "ReadRecords", "MakePlan")


def stock_row_us(world_size: int, tensors: int) -> float:
    """Returns what stock DCP's coordinator spends on a row, in microseconds: the peer."""
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    plans = []
    for columns in slabs(world_size, tensors, regular=False):
        rows = zip(
            columns.names, columns.shape.tolist(), columns.offset.tolist(), columns.size.tolist(),
            strict=True,
        )  # fmt: skip
        items = [
            WriteItem(
                MetadataIndex(name, torch.Size(offset)), WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offset), torch.Size(size)),
                    TensorProperties(torch.float32), torch.Size(shape),
                ),
            )
            for name, shape, offset, size in rows
        ]  # fmt: skip
        plans.append(pickle.dumps(SavePlan(items)))
    start_s = time.process_time()
    made, metadata = create_default_global_save_plan([pickle.loads(plan) for plan in plans])
    sent = [pickle.dumps(plan) for plan in made]
    pickle.dumps(metadata)
    spent_s = time.process_time() - start_s
    return spent_s / (world_size * tensors) * 1e6 if sent else 0.0


RANKS_A_NODE = 8


def plan(tensors: int, largest: int) -> int:
    """Prints what planning and committing cost, for growing numbers of ranks."""
    worlds = [world for world in WORLDS if world <= largest]
    print(__doc__.split("\n\n", 1)[1])
    stock_us = stock_row_us(32, tensors)
    print(f"stock DCP's create_global_plan: {stock_us:.1f} us a row at 32 ranks\n")
    print(f"{'ranks':>6} {'tensors':>7} {'layout':>9} {'save':>5} {'CPU s':>8}", end="")
    print(f" {'plan us/row':>11}", end="")
    print(f" {'rows moved':>10} {'in MB':>7} {'out MB':>7} {'messages':>8}", end="")
    print(f" {'table B/row':>11} {'peak MiB':>8}")
    slopes: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    sorts = ("irregular", "regular", "HSDP", "stages") if tensors > 2 else ("irregular", "regular")
    for count, layout in (*((tensors, sort) for sort in sorts), (1, "irregular")):
        for world in worlds:
            found = measured(measure, world, count, layout, 1 + WARM_SAVES)
            table = sum(size for key, size in found["files"].items() if key.endswith(".table"))
            rows = world * count
            cold, *again = found["saves"]
            warm = sorted(again, key=lambda cost: sum(cost["cpu_s"].values()))[len(again) // 2]
            for name, cost in (("cold", cold), ("warm", warm)):
                cpu, moved = cost["cpu_s"], cost["bytes"]
                slopes[count, layout, name].append(sum(cpu.values()))
                planning = sum(cpu.get(step, 0.0) for step in PLANNING)
                print(
                    f"{world:>6} {count:>7} {layout:>9} {name:>5} {sum(cpu.values()):>8.3f} "
                    f"{planning / rows * 1e6:>11.2f} {cost['rows moved']:>10} "
                    f"{(moved['join'] + moved['again'] + moved['receipt']) / 1e6:>7.1f} "
                    f"{(moved['go'] + moved['outcome']) / 1e6:>7.1f} {cost['messages']:>8} "
                    f"{table / rows:>11.1f} {found['peak_bytes'] >> 20:>8}"
                )
                print(f"{'':>21}" + ", ".join(f"{k} {v:.3f}" for k, v in cpu.items() if v >= 5e-4))
    for (count, layout, name), spent in slopes.items():
        steps = [b / a for a, b in pairwise(spent)]
        print(
            f"{name}, {count} tensors, {layout}: CPU x {spent[-1] / spent[0]:.1f} for ranks x "
            f"{worlds[-1] // worlds[0]} (steps {', '.join(f'{step:.1f}' for step in steps)})"
        )
    return 0
