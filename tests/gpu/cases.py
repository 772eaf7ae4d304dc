"""What must hold on a device, case by case. Each returns what it saw, or raises.

`PLAYED` are those that mean something with a played driver as well.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ray_dcp
from ray_dcp.options import SaveOptions
from ray_dcp.stage import staging_backend
from ray_dcp.torch_adapter.capture import capture, nonfinite_of
from ray_dcp.torch_adapter.content_digests import content_digests, content_digests_on_device
from ray_dcp.torch_adapter.tensors import dtype_name, host_bytes
from tests.gpu.machine import Gpu, Machine, mig_mode
from tests.support.processes import eventually

Case = Callable[[Machine, Path], str]
State = dict[str, torch.Tensor]
ALONE: dict[str, Any] = {"no_dist": True}
WAIT_S = 300.0


class NotHere(Exception):
    """The case can't be run on this machine; says why."""


DTYPES = (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda base: base,
    "transposed": lambda base: base.transpose(0, 1),
    "every other": lambda base: base[:, ::2],
    "unaligned": lambda base: base.view(-1)[1:],
    "expanded": lambda base: base[:1].expand(3, *base.shape[1:]),
    "scalar": lambda base: base[0, 0],
    "empty": lambda base: base[:0],
}


def random_bits(dtype: torch.dtype, rows: int, columns: int, seed: int) -> torch.Tensor:
    """Returns values of all bits of a dtype, NaN and infinities too."""
    values = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (rows, columns), generator=values).to(torch.bool)
    count = rows * columns * dtype.itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=values)
    return bits.view(dtype).view(rows, columns)


def state_of_all(machine: Machine, seed: int = 3) -> State:
    """Returns every dtype in every layout, small and large, on the device and beside it."""
    state: State = {"on the host": torch.randn(300, 70)}
    for number, dtype in enumerate(DTYPES):
        base = machine.place(random_bits(dtype, 40, 50, seed + number))
        for name, layout in LAYOUTS.items():
            state[f"{dtype_name(dtype)} {name}"] = layout(base)
    large = machine.place(random_bits(torch.bfloat16, 1000, 900, seed))
    state |= {"large": large, "large transposed": large.T, "large part": large[10:500]}
    numbers = machine.place(torch.randn(30, 40, dtype=torch.complex64))
    return state | {"conj": numbers.conj(), "neg": numbers.conj().imag}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(host_bytes(tensor.detach().cpu()))


def check_equal(found: State, expected: dict[str, bytes]) -> str:
    wrong = [name for name, data in expected.items() if bytes_of(found[name]) != data]
    if wrong:
        raise AssertionError(f"{len(wrong)} tensors differ: {wrong[:5]}")
    return f"{len(expected)} tensors, {sum(map(len, expected.values())) / 1e6:.1f} MB"


def like(state: State) -> State:
    return {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in state.items()}


# --- the bytes ----------------------------------------------------------------------------------


def staged_bits(machine: Machine, room: Path, *, staging: Any) -> str:
    """What was staged is what the device had at the call, also where training goes on."""
    state = state_of_all(machine)
    expected = {name: bytes_of(tensor) for name, tensor in state.items()}
    options = SaveOptions(staging=staging)
    handle = ray_dcp.async_save(state, checkpoint_id=room / "c", options=options, **ALONE)
    handle.staged(WAIT_S)
    for name in ("large", "on the host"):
        machine.launch(partial(state[name].zero_))
    handle.committed(WAIT_S)
    machine.synchronize()
    found = like(state)
    ray_dcp.load(found, checkpoint_id=room / "c", **ALONE)
    return check_equal(found, expected)


def loaded_bits(machine: Machine, room: Path) -> str:
    """What is loaded to the device is what was saved, in every layout."""
    state = state_of_all(machine)
    state = {name: one for name, one in state.items() if "expanded" not in name}
    expected = {name: bytes_of(tensor) for name, tensor in state.items()}
    ray_dcp.save(state, checkpoint_id=room / "c", **ALONE)
    found = {}
    for name, tensor in state.items():
        whole = machine.place(torch.zeros(tensor.numel() * 2 + 1, dtype=tensor.dtype))
        target = whole[: tensor.numel()].view(tensor.shape)
        found[name] = target.mT.contiguous().mT if target.dim() == 2 else target
    ray_dcp.load(found, checkpoint_id=room / "c", **ALONE)
    return check_equal(found, expected)


def earlier_work_is_in_it(machine: Machine, room: Path) -> str:
    """Kernels that were given before the call are in the copy; those after `staged` are not."""
    weight = machine.place(torch.zeros(1 << 20))
    for _ in range(200):
        machine.launch(partial(weight.add_, 1))
    options = SaveOptions(staging="background")
    handle = ray_dcp.async_save({"w": weight}, checkpoint_id=room / "c", options=options, **ALONE)
    handle.staged(WAIT_S)
    machine.launch(partial(weight.fill_, -1))
    handle.committed(WAIT_S)
    machine.synchronize()
    found = ray_dcp.open(room / "c")["w"][:]
    assert (found == 200).all(), found
    return "200 kernels"


def a_stream_of_the_user_s(machine: Machine, room: Path) -> str:
    """The caller's stream is the one that the call is made on, in the caller's thread."""
    if not isinstance(machine, Gpu):
        raise NotHere("a played driver has one stream of the caller's")
    weight = machine.place(torch.zeros(64 << 20))
    stream = torch.cuda.Stream(machine.device)
    with torch.cuda.stream(stream):
        for _ in range(200):
            weight.add_(1)
        options = SaveOptions(staging="background")
        handle = ray_dcp.async_save(
            {"w": weight}, checkpoint_id=room / "c", options=options, **ALONE
        )
        handle.staged(WAIT_S)
        weight.zero_()
    handle.committed(WAIT_S)
    found = {"w": torch.zeros(64 << 20)}
    ray_dcp.load(found, checkpoint_id=room / "c", **ALONE)
    assert (found["w"] == 200).all()
    return "200 kernels on another stream"


def digests(machine: Machine, room: Path) -> str:
    """Replicas on devices have the digests that they have on the host."""
    tensors = list(state_of_all(machine).values())
    tensors.append(machine.place(random_bits(torch.uint8, 1000, 4097, 1)))
    there = [content_digests_on_device([tensor])[0] for tensor in tensors]
    assert there == content_digests([tensor.cpu() for tensor in tensors])
    return f"{len(there)} digests"


def nonfinite(machine: Machine, room: Path) -> str:
    """NaN and infinities are counted as on the host."""
    state = {
        name: tensor for name, tensor in state_of_all(machine).items()
        if "uint64" not in name and "float64" not in name and "complex128" not in name
    }  # fmt: skip
    there = nonfinite_of(state.__getitem__, state)
    assert there == nonfinite_of(lambda name: state[name].cpu(), state)
    return f"{len(state)} tensors"


def synchronisations(machine: Machine, room: Path) -> str:
    """A capture of many replicas waits for the device a few times, not once a tensor."""
    if not isinstance(machine, Gpu):
        raise NotHere("only a driver counts how often it is waited for")
    state = {f"{i}": torch.randn(64, 64, device=machine.device) for i in range(2000)}
    options = SaveOptions()
    capture(state, rank=0, world_size=2, options=options)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            capture(state, rank=0, world_size=2, options=options)
            nonfinite_of(state.__getitem__, state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in told if "synchronizing" in str(one.message)]
    assert len(waits) <= 8, len(waits)
    return f"{len(waits)} for {len(state)} tensors"


# --- memory -------------------------------------------------------------------------------------


def no_leaks(machine: Machine, room: Path, *, num_saves: int = 200) -> str:
    """Memory of the device and of the host, pinned memory, files and threads stay what they are."""
    state = {f"{i}": machine.place(torch.randn(50, 300)).T for i in range(100)}
    options = SaveOptions(staging="background")
    counts: list[tuple[int, ...]] = []
    for number in range(num_saves):
        handle = ray_dcp.async_save(
            state, checkpoint_id=room / f"{number % 3}", options=options, **ALONE
        )
        handle.staged(WAIT_S)
        handle.committed(WAIT_S)
        if number in (num_saves // 4, num_saves - 1):
            del handle
            gc.collect()
            machine.synchronize()
            counts.append(held(machine))
    first, last = counts
    assert last[:2] == first[:2], counts
    assert last[2] <= first[2] + 2, counts
    # The last save's threads may still be at their end.
    assert eventually(lambda: threading.active_count() <= first[3] + 2), counts
    assert last[4] < first[4] + (64 << 20), counts
    return f"{num_saves} saves, resident +{(last[4] - first[4]) / 1e6:.1f} MB"


def held(machine: Machine) -> tuple[int, ...]:
    """Returns bytes of the device, pinned bytes, open files, threads and resident bytes."""
    on_device = 0 if machine.is_played else torch.cuda.memory_allocated(machine.device)
    with open("/proc/self/statm", encoding="ascii") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files = len(os.listdir("/proc/self/fd"))
    pinned = machine.registered_bytes()
    return on_device, pinned, files, threading.active_count(), resident


def pinned_memory_is_given_back(machine: Machine, room: Path) -> str:
    """What is pinned belongs to staging memory, and goes with it."""
    state = {"w": machine.place(torch.randn(3 << 20))}
    ray_dcp.async_save(state, checkpoint_id=room / "c", **ALONE).committed(WAIT_S)
    pinned = machine.registered_bytes()
    assert pinned >= state["w"].nbytes, pinned
    staging_backend._memory.clear()
    gc.collect()
    assert machine.registered_bytes() == 0
    return f"{pinned / 1e6:.0f} MB"


def out_of_memory(machine: Machine, room: Path) -> str:
    """A device that is full fails the save at most, and the next one is whole."""
    large = machine.place(torch.randn(4000, 1000))
    state = {"large": large.T, **{f"{i}": machine.place(torch.ones(99)) for i in range(50)}}
    expected = {name: bytes_of(tensor) for name, tensor in state.items()}
    seen = []
    for left_bytes in (4 << 20, 0, 1 << 40):
        machine.synchronize()
        whole = machine.fill_up(left_bytes) if left_bytes < 1 << 40 else None
        handle = ray_dcp.async_save(
            state, checkpoint_id=room / "c", options=SaveOptions(staging="background"), **ALONE
        )
        error = handle.exception(WAIT_S)
        del whole
        assert error is None or "out of memory" in str(error), error
        seen.append("saved" if error is None else "refused")
        if error is None:
            found = like(state)
            ray_dcp.load(found, checkpoint_id=room / "c", **ALONE)
            check_equal(found, expected)
    assert seen[-1] == "saved", seen
    return ", then ".join(seen)


def partitions_are_left_alone(machine: Machine, room: Path) -> str:
    """The mode of partitions (MIG) is what it was before the cases."""
    if not isinstance(machine, Gpu):
        raise NotHere("there is no device")
    assert mig_mode() == machine.mode, (machine.mode, mig_mode())
    return machine.mode


# --- whole jobs ---------------------------------------------------------------------------------


@contextmanager
def process_group(machine: Machine, room: Path) -> Iterator[None]:
    """One rank, over nccl on a GPU."""
    if dist.is_initialized():
        raise NotHere("this process has a process group of its own")
    backend = "gloo" if machine.is_played else "nccl"
    dist.init_process_group(backend, init_method=f"file://{room}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fsdp2(machine: Machine, room: Path, **how: Any) -> str:
    """FSDP2 trains on from a checkpoint as it would have without one, bit by bit."""
    from torch.distributed.fsdp import fully_shard

    how = how or ALONE

    def job() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(machine.device)
        for layer in (model[0], model[2]):
            fully_shard(layer)
        return fully_shard(model), torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = model(torch.ones(8, 64, device=machine.device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    with process_group(machine, room):
        model, optimizer = job()
        for _ in range(3):
            step(model, optimizer)
        handle = ray_dcp.async_save(
            {"model": model, "optimizer": optimizer},
            checkpoint_id=room / "c", options=SaveOptions(staging="background"), **how,
        )  # fmt: skip
        handle.before_step(optimizer)
        expected = [step(model, optimizer) for _ in range(3)]
        handle.committed(WAIT_S)
        stager = handle.report().staging
        again, its_optimizer = job()
        for _ in range(2):
            step(again, its_optimizer)
        state = {"model": again, "optimizer": its_optimizer}
        ray_dcp.load(state, checkpoint_id=room / "c", **how)
        assert [step(again, its_optimizer) for _ in range(3)] == expected
    return f"3 steps equal, staged by the {stager}"


def with_ray(machine: Machine, room: Path) -> str:
    """The node's stager holds what a device had: the same job through Ray's object store."""
    if importlib.util.find_spec("ray") is None:
        raise NotHere("ray is not installed here")
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        session = ray_dcp.connect()
        try:
            seen = fsdp2(machine, room, process_group=None)
        finally:
            session.close()
    finally:
        ray.shutdown()
    assert "object_store" in seen, seen
    return seen


CASES: dict[str, Case] = {
    **{
        f"staged bits, {staging}": partial(staged_bits, staging=staging)
        for staging in ("call", "background")
    },
    "loaded bits": loaded_bits,
    "earlier kernels are in it": earlier_work_is_in_it,
    "a stream of the user's": a_stream_of_the_user_s,
    "digests": digests,
    "NaN and infinities": nonfinite,
    "waits for the device": synchronisations,
    "pinned memory is given back": pinned_memory_is_given_back,
    "out of memory": out_of_memory,
    "no leaks": no_leaks,
    "FSDP2, one rank": fsdp2,
    "FSDP2 through Ray": with_ray,
    "partitions (MIG) left alone": partitions_are_left_alone,
}
