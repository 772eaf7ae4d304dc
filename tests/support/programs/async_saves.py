"""What ranks do with asynchronous saves in tests; importable on the ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ray_dcp
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.session.discovery import current_session
from ray_dcp.session.session import Session
from ray_dcp.stage import memory_tier
from tests.support.attempts import Attempt, attempt
from tests.support.processes import eventually
from tests.support.programs.held_writes import hold_writes

LARGE_BYTES = 40 << 20
"""What one rank writes, in several parts, where something happens before it is written."""

HELD: dict[str, Any] = {}


def mixed_state(step: int) -> dict[str, Any]:
    """Returns a state of every kind of value, all of which carry the step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    base = torch.arange(24, dtype=torch.float32).reshape(6, 4) + step
    tied = torch.full((5, 3), float(step))
    return {
        "own": {f"rank{rank}": torch.full((7,), step, dtype=torch.int32)},
        "sharded": distribute_tensor(base.clone(), mesh, [Shard(0)]),
        "replicated": distribute_tensor(base.clone(), mesh, [Replicate()]),
        "scalar": distribute_tensor(torch.tensor(float(step)), mesh, [Replicate()]),
        "transposed": base.clone().t(),
        "bf16": torch.full((3,), step, dtype=torch.bfloat16),
        "flags": torch.tensor([bool(step % 2), True]),
        "empty": torch.zeros(0, 3),
        "tied": tied,
        "tied_too": tied,
        "view": tied[1:3],
        "step": step,
        "log": [step] * 3,
    }


def change(state: dict[str, Any]) -> None:
    """Changes every value of a state in place."""
    for value in state.values():
        if isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            local.copy_(torch.zeros_like(local))
        elif isinstance(value, dict):
            change(value)
        elif isinstance(value, list):
            value.clear()


def mixed_is(path: str, step: int) -> bool:
    """Returns whether what stands loads as the whole state of one step."""
    expected, loaded = mixed_state(step), mixed_state(0)
    ray_dcp.load(loaded, checkpoint_id=path)
    return _equal(loaded, expected)


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return all(_equal(found[name], value) for name, value in expected.items())
    if isinstance(expected, torch.Tensor):
        local = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in (found, expected)]
        return torch.equal(*local)
    return bool(found == expected)


def save_and_change(path: str, step: int, **options: Any) -> Attempt:
    """Saves, changes the state at once, and waits for the commit."""

    def save() -> Any:
        state = mixed_state(step)
        handle = ray_dcp.async_save(state, checkpoint_id=path, options=SaveOptions(**options))
        handle.staged(180)
        change(state)
        assert isinstance(handle, Future)
        assert isinstance(handle, AsyncSaveResponse)
        metadata = handle.committed(180)
        assert handle.upload_completion.result(0) is metadata
        assert handle.progress.phase == "committed"
        return handle.report()

    return attempt(save)


def large_state(step: int, num_bytes: int = LARGE_BYTES) -> dict[str, Any]:
    """Returns a tensor that only this rank has, full of the step."""
    return {f"large{dist.get_rank()}": torch.full((num_bytes // 4,), float(step)), "step": step}


def begin_large(path: str, step: int, **options: Any) -> Path:
    """Begins a large save, keeps its handle, and notes its attempt in `path + ".attempt"`.

    Returns:
        Who writes it waits until this file is there, unless it is another stager than the one that
        it was staged with: all ranks have staged it, and it is not committed.
    """
    gate = Path(f"{path}.gate")
    # On all ranks: to make a session takes all of them.
    session = current_session()
    if dist.get_rank() == 0:
        hold_writes(session, gate)
    dist.barrier()
    options = {"part_bytes": 16 << 20, "num_threads": 1, **options}
    handle = ray_dcp.async_save(
        large_state(step), checkpoint_id=path, options=SaveOptions(**options)
    )
    HELD["handle"] = handle
    handle.staged(180)
    attempt_id = handle.report().attempt
    assert attempt_id is not None
    Path(f"{path}.attempt").write_text(attempt_id)
    dist.barrier()
    assert not handle.done()
    return gate


def save_large(
    path: str,
    step: int,
    hit: str = "",
    number: int = signal.SIGKILL,
    *,
    victims: Sequence[int] = (),
    canceller: int = -1,
    **options: Any,
) -> Attempt:
    """Begins a large save, and waits for its outcome after a blow, before any of it is written.

    Args:
        path: Of the checkpoint.
        step: Of the values.
        hit: Rank 0 signals the `coordinator`, or the `stager` of the node.
        number: The signal.
        victims: Ranks that are killed.
        canceller: The rank that cancels the save.
        **options: Of the save.
    """

    def save() -> Any:
        session, rank = current_session(), dist.get_rank()
        pid = {"coordinator": coordinator_facts, "stager": stager_facts}.get(hit, dict)().get("pid")
        gate = begin_large(path, step, **options)
        if rank == 0 and pid:
            os.kill(pid, number)
        if rank == canceller:
            assert HELD["handle"].cancel()
        if hit == "coordinator" or canceller >= 0:
            gate.touch()
        if rank in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        HELD["handle"].committed(180)
        return session.coordinator_info()["epoch"], HELD["handle"].report().attempt

    return attempt(save)


def large_is(path: str, step: int, world_size: int) -> bool:
    """Returns whether what stands is the whole large state of one step."""
    names = {f"large{rank}": torch.zeros(LARGE_BYTES // 4) for rank in range(world_size)}
    state: dict[str, Any] = {**names, "step": 0}
    ray_dcp.load(state, checkpoint_id=path, no_dist=True)
    return state["step"] == step and all(bool((state[name] == step).all()) for name in names)


def stager_facts() -> dict[str, Any]:
    """Returns what this rank's stager says of itself."""
    return current_session().ray.staging().info()


def coordinator_facts() -> dict[str, Any]:
    """Returns what the coordinator says of itself."""
    return current_session().coordinator_info()


def save_twice(path: str, when_full: str, max_pending: int) -> list[str]:
    """Begins two large saves right after each other; returns how each ended."""
    handles = [
        ray_dcp.async_save(
            large_state(step),
            checkpoint_id=f"{path}-{step}",
            options=SaveOptions(when_full=when_full, max_pending=max_pending),
        )
        for step in (1, 2)
    ]
    return [type(handle.exception(120)).__name__ for handle in handles]


def save_many(path: str, number: int) -> tuple[int, int, int]:
    """Saves again and again; returns open files of rank and stager, and named actors, after that.

    Args:
        path: Of the checkpoint.
        number: How many saves.
    """
    state = {**mixed_state(1), **large_state(1, 3 << 20)}
    options = SaveOptions(keep_in_memory=1)
    for _ in range(number):
        ray_dcp.async_save(state, checkpoint_id=path, options=options).committed(180)
    pids = (os.getpid(), stager_facts()["pid"])
    rank, stager = (len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    return rank, stager, len(ray.util.list_named_actors(all_namespaces=True))


def save_kept(path: str, step: int, keep: int = 1, await_files: int | None = None) -> int:
    """Saves a state of which the nodes keep so many in memory; returns when this node does.

    Args:
        path: Of the run.
        step: Of the values.
        keep: `SaveOptions.keep_in_memory`.
        await_files: How many files are of this node's ranks; all by default.
    """
    options = SaveOptions(keep_in_memory=keep)
    handle = ray_dcp.async_save(
        kept_state(step), checkpoint_id=f"{path}/step-{step}", options=options
    )
    handle.committed(180)
    await_kept(current_session(), handle.report().attempt, await_files or dist.get_world_size())
    return step


def await_kept(session: Session, attempt_id: str | None, num_files: int) -> None:
    """Returns when the stager of this node keeps so many files of an attempt."""
    stager = session.ray.staging().link().handle

    def is_kept() -> bool:
        found = ray.get(stager.kept.remote(attempt_id))
        return found is not None and len(found.files) == num_files

    # Why: the outcome may be known before the stager has the answer to its last report.
    assert eventually(is_kept)


def kept_state(step: int) -> dict[str, Any]:
    """Returns tensors of several layouts, and an object."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024) + step
    return {
        "sharded": distribute_tensor(base.clone(), mesh, [Shard(0)]),
        "columns": distribute_tensor(base * 2, mesh, [Shard(1)]),
        **{f"small{i}": torch.full((9,), float(step + i)) for i in range(40)},
        "large": torch.full((6 << 20,), float(step)),
        "log": {"step": step},
    }


def kept_is(
    path: str,
    step: int,
    unreachable: bool = False,
    opens: str = "",
    mapped: bool = False,
    **options: Any,
) -> Attempt:
    """Loads the state of a step and compares it; returns the bytes that were read, and how.

    Args:
        path: Of the checkpoint.
        step: Of the values.
        unreachable: This process can't map the node's windows, as if it were on another machine.
        opens: File that is made when the load has found a save whose outcome is open.
        mapped: The stager sends nothing: what this process does not map comes from storage.
        **options: Of the load.
    """

    is_open = memory_tier._is_open

    def found_open(one: Any) -> bool:
        found: bool = is_open(one)
        if found:
            Path(opens).touch()
        return found

    def load() -> Any:
        expected, loaded = kept_state(step), kept_state(0)
        with ExitStack() as stack:
            if unreachable:
                stack.enter_context(patch.object(memory_tier._Loan, "map", lambda *_: None))
                stack.enter_context(patch.object(memory_tier, "FETCH_BYTES", 1 << 20))
            if mapped:
                stack.enter_context(patch.object(memory_tier._InMemory, "_fetch", lambda *_: False))
            if opens:
                stack.enter_context(patch.object(memory_tier, "_is_open", found_open))
            report = ray_dcp.load(loaded, checkpoint_id=path, options=LoadOptions(**options))
        assert loaded["log"] == {"step": step}
        assert _equal(loaded, expected)
        return report.bytes_read, report.bytes_from_memory

    return attempt(load)


def scribble(attempt_id: str) -> bool:
    """Changes what this node keeps of an attempt in memory; returns whether it keeps some."""

    def spoil(stager: Any) -> bool:
        kept = [job for job in stager._queue._kept_jobs() if job.order.key.attempt == attempt_id]
        for job in kept:
            for window in job.windows.values():
                window.ref = ray.put([np.frombuffer(run, np.uint8) ^ 255 for run in window._runs])
        return bool(kept)

    stager = current_session().ray.staging().link().handle
    return bool(ray.get(stager.__ray_call__.remote(spoil)))


def stage_kept_and_die(path: str, step: int, gate: str) -> None:
    """Begins a save that is kept, and dies when it is staged on all ranks.

    Args:
        path: Of the checkpoint.
        step: Of the values.
        gate: It is written when this file is there.
    """
    options = SaveOptions(keep_in_memory=1, num_threads=1)
    state = {**kept_state(step), f"more{dist.get_rank()}": torch.zeros(LARGE_BYTES // 4)}
    session = current_session()
    if dist.get_rank() == 0:
        hold_writes(session, Path(gate))
    dist.barrier()
    handle = ray_dcp.async_save(state, checkpoint_id=path, options=options)
    handle.staged(180)
    # Suppressed: a rank that has died meanwhile had passed it.
    with suppress(RuntimeError):
        dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


class Polls:
    """Counts how often it was asked whether to stop; never stops."""

    num_asked = 0

    @property
    def asked(self) -> bool:
        self.num_asked += 1
        return False


def polls_for_staged(folder: str) -> int:
    """Returns how often it was looked for staged saves below a folder until there was none."""
    polls = Polls()
    memory_tier.NodeMemory(current_session().namespace).await_staged(folder, 60.0, polls)
    return polls.num_asked


def warm(num_bytes: int) -> int:
    """Gets ready for a state that only this rank has a part of; returns its shared memory."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(torch.zeros(num_bytes // 4), mesh, [Shard(0)])}
    ray_dcp.warm_up(state).result(180)
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssShmem"))


def save_and_kill_coordinator(path: str, steps: int) -> Attempt:
    """Saves again and again; rank 0 kills the coordinator as soon as it knows of each commit."""

    def save() -> Any:
        for step in range(1, steps + 1):
            pid = coordinator_facts()["pid"]
            handle = ray_dcp.async_save(mixed_state(step), checkpoint_id=path)
            handle.committed(180)
            if dist.get_rank() == 0:
                os.kill(pid, signal.SIGKILL)
            dist.barrier()
        return coordinator_facts()["epoch"]

    return attempt(save)
