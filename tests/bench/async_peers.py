"""Who saves beside training, each behind one call, and the training that they disturb.

A contestant's `save` returns when its state may change again, and gives a future of the moment
when the checkpoint stands. Every peer has the settings with which it does best here, and keeps its
staging memory from save to save.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import ray_dcp

State = dict[str, torch.Tensor]


class Contestant(Protocol):
    """One way to save beside training."""

    name: str

    def save(self, path: Path) -> Future[Any]:
        """Returns when the state may change; the future ends when the checkpoint stands."""
        ...

    def load(self, path: Path) -> None:
        """Loads the checkpoint into the state."""
        ...

    def close(self) -> None:
        """Gives up what it keeps from save to save."""
        ...


class Ours:
    """`ray_dcp.async_save` through the session of this process, and its stager."""

    name = "ray_dcp"

    def __init__(self, state: State) -> None:
        self._state = state

    def save(self, path: Path) -> Future[Any]:
        handle = ray_dcp.async_save(self._state, checkpoint_id=path)
        handle.staged(600)
        return handle

    def load(self, path: Path) -> None:
        ray_dcp.load(self._state, checkpoint_id=path)

    def close(self) -> None:
        pass


class Dcp:
    """DCP's `async_save` with a stager that keeps its memory."""

    def __init__(self, state: State, kind: AsyncCheckpointerType) -> None:
        self.name = f"torch DCP, {kind.value}"
        self._state = state
        self._kind = kind
        shared = kind is AsyncCheckpointerType.PROCESS
        self._stager = DefaultStager(StagingOptions(False, shared, False, False))

    def save(self, path: Path) -> Future[Any]:
        found = stock.async_save(
            self._state, checkpoint_id=path, async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )  # fmt: skip
        if isinstance(found, AsyncSaveResponse):
            found.staging_completion.result()
            return found.upload_completion
        return found

    def load(self, path: Path) -> None:
        stock.load(self._state, checkpoint_id=path)

    def close(self) -> None:
        self._stager.close()


class SynchronousDcp:
    """DCP's `save`: training waits until the checkpoint stands."""

    name = "torch DCP, synchronous"

    def __init__(self, state: State) -> None:
        self._state = state

    def save(self, path: Path) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(stock.save(self._state, checkpoint_id=path))
        return done

    def load(self, path: Path) -> None:
        stock.load(self._state, checkpoint_id=path)

    def close(self) -> None:
        pass


class TorchCheckpointing:
    """Its manager; direct I/O is off, as it fails on ext4. It makes nothing durable (no fsync)."""

    name = "torch_checkpointing"

    def __init__(self, state: State) -> None:
        import torch_checkpointing as tck
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        # Why not asynchronous: the state may change when `save` returns, as with all others.
        staging = CheckpointStagerConfig(
            use_pinned_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        self._state = state
        self._manager = tck.CheckpointManager(
            tck.CheckpointManager.Config(
                save=tck.AsyncCheckpointSaverConfig(staging_config=staging),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def save(self, path: Path) -> Future[Any]:
        written = self._manager.save(str(path), {"model": self._state})
        assert written is not None
        return written

    def load(self, path: Path) -> None:
        self._manager.load(str(path), {"model": self._state})

    def close(self) -> None:
        self._manager.close()


def peers(state: State) -> tuple[list[Contestant], list[str]]:
    """Returns the peers that are there, and a line for each that is not."""
    found: list[Contestant] = [Dcp(state, kind) for kind in AsyncCheckpointerType]
    found.append(SynchronousDcp(state))
    if importlib.util.find_spec("torch_checkpointing") is None:
        return found, ["torch_checkpointing is not installed: left out"]
    return [*found, TorchCheckpointing(state)], []


@dataclass(frozen=True)
class Lap:
    """The training of one round beside one save, or beside none."""

    wall_s: float
    steps: int
    """At least those that were asked for; more until the checkpoint stood."""
    stall_s: float = 0.0
    durable_s: float = 0.0

    def lost_s(self, alone: Lap) -> float:
        """Returns how much longer it took than as many steps without a save, in seconds."""
        return self.wall_s - self.steps * alone.wall_s / alone.steps


class Training:
    """A perceptron that trains on all processors. Steps are all the same work.

    Args:
        work_s: How long a round of it should take at least, in seconds.
    """

    def __init__(self, work_s: float) -> None:
        width = 1024
        layers = [torch.nn.Linear(width, width) for _ in range(4)]
        self._model = torch.nn.Sequential(*(m for x in layers for m in (x, torch.nn.ReLU())))
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-4)
        self._inputs, self._targets = torch.randn(2, 128, width)
        for _ in range(3):
            self._step()
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < work_s / 4:
            self._step()
            steps += 1
        self.steps = 4 * max(steps, 1)

    def lap(self, contestant: Contestant | None = None, path: Path | None = None) -> Lap:
        """Trains; a save begins before the first step, and has ended after the last one."""
        began, steps, stall_s, durable = time.perf_counter(), 0, 0.0, []
        saving: Future[Any] | None = None
        if contestant is not None and path is not None:
            saving = contestant.save(path)
            stall_s = time.perf_counter() - began
            saving.add_done_callback(lambda _: durable.append(time.perf_counter() - began))
        while steps < self.steps or (saving is not None and not saving.done()):
            self._step()
            steps += 1
        wall_s = time.perf_counter() - began
        if saving is not None:
            saving.result()
        return Lap(wall_s, steps, stall_s, durable[0] if durable else 0.0)

    def _step(self) -> None:
        self._optimizer.zero_grad()
        torch.nn.functional.mse_loss(self._model(self._inputs), self._targets).backward()
        self._optimizer.step()


def join_group() -> None:
    """Makes the process group of one rank that DCP's process needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def leave_group() -> None:
    """Ends it, and the writing processes that peers keep until the interpreter ends."""
    dist.destroy_process_group()
    for child in multiprocessing.active_children():
        child.terminate()
        child.join()
