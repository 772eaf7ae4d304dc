"""Rates and stalls on a device, beside the limit and stock DCP. Each returns rows of the table."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import ray_dcp
from ray_dcp.options import SaveOptions
from ray_dcp.stage import staging_backend
from tests.gpu.cases import ALONE, WAIT_S, NotHere, State
from tests.gpu.machine import Gpu, Machine

BACKGROUND = SaveOptions(staging="background")
ROUNDS = 3


@dataclass(frozen=True)
class Rate:
    """A row: what was seen, and what it is held against."""

    what: str
    seen: str
    limit: str
    is_met: bool | None
    """None where there is nothing to meet."""


def state_of(machine: Machine) -> State:
    """Returns a state as of a model in bf16: 64 tensors, and many small ones."""
    each = machine.state_bytes // 64 // 2
    state = {
        f"layers.{i}.weight": torch.randn(each, device=machine.device, dtype=torch.bfloat16)
        for i in range(64)
    }
    small = {f"layers.{i}.bias": torch.randn(64, device=machine.device) for i in range(2000)}
    for tensor in (*state.values(), *small.values()):
        machine.place(tensor)
    return state | small


def seconds(machine: Machine, work: Callable[[], Any]) -> float:
    machine.synchronize()
    began_s = time.perf_counter()
    work()
    machine.synchronize()
    return time.perf_counter() - began_s


def pinned_copies(machine: Machine, state: State) -> tuple[float, float]:
    """Returns seconds of the raw copy of a state to pinned memory, and of that back."""
    if machine.is_played:
        raise NotHere("a played device has no rate")
    homes = {
        name: torch.empty_like(one, device="cpu", pin_memory=True) for name, one in state.items()
    }

    def out() -> None:
        for name, one in state.items():
            homes[name].copy_(one, non_blocking=True)

    def back() -> None:
        for name, one in state.items():
            one.copy_(homes[name], non_blocking=True)

    return (
        min(seconds(machine, out) for _ in range(ROUNDS)),
        min(seconds(machine, back) for _ in range(ROUNDS)),
    )


def saves(machine: Machine, room: Path) -> list[Rate]:
    """The stall of a first and of later saves, and the rate of staging."""
    state = state_of(machine)
    num_bytes = sum(one.nbytes for one in state.values())
    out_s, _ = pinned_copies(machine, state)
    rows = [Rate("pinned copy from the device", _rate(num_bytes, out_s), "", None)]
    staging_backend._memory.clear()
    for name, options in (("call", SaveOptions()), ("background", BACKGROUND)):
        stalls, staged, planned = [], [], []
        for number in range(ROUNDS + 1):
            machine.synchronize()
            began_s = time.perf_counter()
            place = room / f"{name}{number}"
            handle = ray_dcp.async_save(state, checkpoint_id=place, options=options, **ALONE)
            stalls.append(time.perf_counter() - began_s)
            handle.staged(WAIT_S)
            staged.append(time.perf_counter() - began_s)
            handle.committed(WAIT_S)
            report = handle.report()
            planned.append(report.seconds["capture"] + report.seconds["plan"])
            shutil.rmtree(place)
        stall_s, staged_s, plan_s = min(stalls[1:]), min(staged[1:]), min(planned[1:])
        rows.append(Rate(f"stall, {name}, first save", f"{stalls[0]:.3f} s", "", None))
        if name == "background":
            limit_s = plan_s * 1.1 + 0.001
            limit = f"<= {limit_s:.3f} s (capture + plan + 10 %)"
            rows.append(Rate(f"stall, {name}", f"{stall_s:.3f} s", limit, stall_s <= limit_s))
        else:
            rows.append(Rate(f"stall, {name}", f"{stall_s:.3f} s", f"copy {out_s:.3f} s", None))
        copied_s = staged_s - plan_s
        met = copied_s <= out_s / 0.9
        limit = f">= 0.9 of {_rate(num_bytes, out_s)}"
        rows.append(Rate(f"staging, {name}", _rate(num_bytes, copied_s), limit, met))
    rows += _stock(machine, state, room)
    return rows


def _stock(machine: Machine, state: State, room: Path) -> list[Rate]:
    """The same saves by stock DCP, with a stager that copies beside training."""
    options = StagingOptions(
        use_pinned_memory=True,
        use_shared_memory=False,
        use_async_staging=True,
        use_non_blocking_copy=True,
    )
    stalls, staged = [], []
    try:
        with warnings.catch_warnings(), closing(DefaultStager(options)) as stager:
            warnings.simplefilter("ignore")
            for number in range(ROUNDS):
                place = room / f"stock{number}"
                machine.synchronize()
                began_s = time.perf_counter()
                response = stock.async_save(
                    state, checkpoint_id=place, async_stager=stager, no_dist=True
                )
                stalls.append(time.perf_counter() - began_s)
                response.staging_completion.result(WAIT_S)
                staged.append(time.perf_counter() - began_s)
                response.upload_completion.result(WAIT_S)
                shutil.rmtree(place)
    except Exception as error:  # a torch whose stager can't do it is no failure of ours
        return [Rate("stock DCP", f"{type(error).__name__}: {error}"[:60], "", None)]
    return [
        Rate("stock DCP, stall, first save", f"{stalls[0]:.3f} s", "", None),
        Rate("stock DCP, stall", f"{min(stalls[1:]):.3f} s", "", None),
        Rate("stock DCP, until staged", f"{min(staged[1:]):.3f} s", "", None),
    ]


def loads(machine: Machine, room: Path) -> list[Rate]:
    """The rate of a load to the device from the page cache, beside the copy back alone."""
    state = state_of(machine)
    num_bytes = sum(one.nbytes for one in state.values())
    _, back_s = pinned_copies(machine, state)
    ray_dcp.save(state, checkpoint_id=room / "c", **ALONE)
    times = [
        seconds(machine, lambda: ray_dcp.load(state, checkpoint_id=room / "c", **ALONE))
        for _ in range(ROUNDS)
    ]
    on_host = {name: torch.empty_like(one, device="cpu") for name, one in state.items()}
    host_s = min(
        seconds(machine, lambda: ray_dcp.load(on_host, checkpoint_id=room / "c", **ALONE))
        for _ in range(ROUNDS)
    )
    limit = f">= 0.85 of {_rate(num_bytes, back_s)}"
    return [
        Rate("pinned copy to the device", _rate(num_bytes, back_s), "", None),
        Rate("load to the host", _rate(num_bytes, host_s), "", None),
        Rate("load, first", _rate(num_bytes, times[0]), "", None),
        Rate("load", _rate(num_bytes, min(times[1:])), limit, min(times[1:]) <= back_s / 0.85),
    ]


def overlap(machine: Machine, room: Path) -> list[Rate]:
    """Training kernels run while a state is staged, by their events."""
    if not isinstance(machine, Gpu):
        raise NotHere("a played device does one thing at a time")
    state = state_of(machine)
    one = torch.randn(4096, 4096, device=machine.device, dtype=torch.bfloat16)

    def step() -> torch.cuda.Event:
        for _ in range(5):
            torch.mm(one, one)
        done = torch.cuda.Event(enable_timing=True)
        done.record()
        return done

    def steps_per_s(until: Callable[[], bool]) -> tuple[int, float]:
        began = torch.cuda.Event(enable_timing=True)
        began.record()
        ends: list[torch.cuda.Event] = []
        while not until():
            ends.append(step())
            # Why so many ahead: the device never waits for the host.
            if len(ends) > 8:
                ends[-8].synchronize()
        done = [end for end in ends if end.query()]
        return len(done), len(done) / (began.elapsed_time(done[-1]) / 1000) if done else 0.0

    for _ in range(20):
        step()
    machine.synchronize()
    end_s = time.perf_counter() + 1.0
    _, alone = steps_per_s(lambda: time.perf_counter() > end_s)
    machine.synchronize()
    # Why twice: a first save gets its memory.
    for number in range(2):
        handle = ray_dcp.async_save(
            state, checkpoint_id=room / f"{number}", options=BACKGROUND, **ALONE
        )
        count, beside = steps_per_s(handle.staging_completion.done)
        handle.committed(WAIT_S)
    seen = f"{count} steps, {beside / alone:.2f} of their rate alone"
    return [Rate("training beside staging", seen, ">= 0.8 of the rate", beside >= 0.8 * alone)]


def _rate(num_bytes: int, took_s: float) -> str:
    return f"{num_bytes / took_s / 1e9:.1f} GB/s"


RATES: dict[str, Callable[[Machine, Path], list[Rate]]] = {
    "overlap": overlap,
    "saves": saves,
    "loads": loads,
}
