"""Saves beside training: what they cost it, how soon they stand, and what they survive.

The limits (a copy into warm memory, a plain direct write) and the peers are measured in the same
rounds. `day` is its row of that name: what each contestant costs a day of training in which a kill
comes each hour.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.measure import drop_cache, state_of
from tests.support.processes import (
    cpu_s,
    descendants,
    eventually,
    leaked_shared_memory,
    memory_bytes,
    shared_memory,
    watched_memory,
)

RAY_SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    key: str
    title: str
    ship: float
    """What is good enough."""
    goal: float
    """What is aimed at; not below `ship` where more is better."""

    def missed(self, value: float) -> bool:
        """Returns whether a value is not good enough."""
        return value < self.ship if self.goal >= self.ship else value > self.ship


ROWS = (
    Row("stall", "steady stall / memcpy into warm memory", 1.25, 1.10),
    Row("first", "first stall / steady stall", 2.0, 1.5),
    Row("lost", "training time lost per save / better peer's", 0.333, 0.2),
    Row("day", "lost in a day with a kill an hour / better peer's", 0.333, 0.25),
    Row("durable", "durable committed bytes/s / raw direct I/O", 0.75, 0.90),
    Row("cpu", "CPU s per GB, all processes", 0.35, 0.20),
    Row("memory", "extra memory / state", 1.2, 1.05),
    Row("restore", "restore from memory after SIGKILL / memcpy", 2.0, 1.25),
)
KEYS = tuple(row.key for row in ROWS)
_ROW = {row.key: row for row in ROWS}


class Table:
    """Prints rows as they are measured."""

    def note(self, line: str) -> None:
        """Prints something that is not measured."""
        print(f"  {line}", flush=True)

    def fact(self, name: str, values: Iterable[float]) -> float:
        """Prints what the rows are made of, in seconds; returns the median."""
        found = list(values)
        median = statistics.median(found)
        print(f"  {name:52}{median:9.3f} s  ({min(found):.3f} to {max(found):.3f})", flush=True)
        return median

    def row(self, key: str, values: float | Sequence[float]) -> None:
        """Prints a row: the median of its values, one of each round."""
        row = _ROW[key]
        value = statistics.median(values) if isinstance(values, Sequence) else values
        missed = "   MISSED" if row.missed(value) else ""
        print(f"{row.title:52}{value:11.2f}   ship {row.ship:g}, goal {row.goal:g}{missed}")


@dataclass(frozen=True)
class Options:
    """What is asked for on the command line."""

    rounds: int
    num_bytes: int
    work_s: float
    rows: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Says what the command line may ask for."""
    parser.add_argument("--rows", nargs="+", choices=KEYS, default=KEYS, help="only these rows")
    parser.add_argument("--megabytes", type=float, default=1410, help="size of the state")
    parser.add_argument("--work-s", type=float, default=5, help="least length of a training round")


def command(given: argparse.Namespace) -> None:
    """Runs the bench."""
    options = Options(given.rounds, int(given.megabytes * 1e6), given.work_s, tuple(given.rows))
    os.environ.update(RAY_SETTINGS)
    table = Table()
    root = Path(tempfile.mkdtemp(prefix="bench-", dir=given.dir))
    before = shared_memory()
    try:
        _run(options, root, table)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    table.note(f"left in /dev/shm: {leaked_shared_memory(before) or 'nothing'}")


def _run(options: Options, root: Path, table: Table) -> None:
    from tests.bench import async_ranks

    state = state_of(options.num_bytes)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    print(
        f"\nasynchronous saves, {num_bytes / 1e9:.3f} GB in {len(state)} tensors   (load average "
        f"{os.getloadavg()[0]:.1f}; medians of {options.rounds})"
    )
    wanted = set(options.rows)
    # Staged bytes may take half of the store.
    with one_node(4 * options.num_bytes):
        if wanted & {"stall", "first", "durable", "cpu", "memory"}:
            _Saves(options, root, table, state).measure()
        if wanted & {"lost", "day"}:
            _training(options, root, table, state)
        del state
        if "restore" in wanted:
            async_ranks.restore(options.rounds, options.num_bytes, root, table)


@contextlib.contextmanager
def one_node(store_bytes: int = 256 << 20) -> Iterator[None]:
    """A Ray of one node, which ends with it; the one that this process is in, if there is one."""
    import ray

    if ray.is_initialized():
        yield
        return
    # Why /tmp and short: the paths of Ray's sockets below it must stay under 107 bytes.
    directory = tempfile.mkdtemp(prefix="rb", dir="/tmp")
    ray.init(
        num_cpus=4, object_store_memory=store_bytes, include_dashboard=False, log_to_driver=False,
        configure_logging=False, _temp_dir=directory,
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def session_of(namespace: str) -> Iterator[Any]:
    """A session of this process, whose coordinator and stager end with it."""
    import ray

    import ray_dcp

    session = ray_dcp.connect(namespace=namespace, name=namespace)
    try:
        yield session
    finally:
        ended = [session.ray.coordinator(), session.ray.staging().link().handle]
        session.close()
        for actor in ended:
            ray.kill(actor)


def warm_up(state: dict[str, Any]) -> None:
    """Warms the session's memory up, as a job does before it trains."""
    import ray_dcp

    ray_dcp.warm_up(state).result(600)


class MemoryCopy:
    """The limit of staging: a copy of the same tensors into warm memory of this process."""

    def __init__(self, state: dict[str, Any]) -> None:
        import torch

        self._arrays = [t.view(-1).view(torch.uint8).numpy() for t in state.values()]
        self._into = np.ones(sum(array.nbytes for array in self._arrays), dtype=np.uint8)
        self.seconds()

    def seconds(self) -> float:
        """Returns how long it takes now."""
        began, at = time.perf_counter(), 0
        for array in self._arrays:
            np.copyto(self._into[at : at + array.size], array)
            at += array.size
        return time.perf_counter() - began


def raw_write_s(path: Path, num_bytes: int) -> float:
    """Returns how long a plain direct write of as many bytes takes until it is durable."""
    from tests.bench.single import raw_write

    began = time.perf_counter()
    raw_write(path, num_bytes)
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


class _Saves:
    """A session after another, each with a first save and steady ones."""

    steady_saves = 2

    def __init__(self, options: Options, root: Path, table: Table, state: dict[str, Any]) -> None:
        self._options, self._root, self._table, self._state = options, root, table, state
        self._num_bytes = sum(tensor.nbytes for tensor in state.values())
        self._copy = MemoryCopy(state)
        self._found: dict[str, list[float]] = {}

    def measure(self) -> None:
        """Measures and tells the rows."""
        for number in range(self._options.rounds + 1):
            with session_of(f"saves{number}") as session:
                if number == 0:
                    # It does not count for the times: watching costs some, and first imports.
                    self._watch(session)
                    self._found.clear()
                    continue
                warm_up(self._state)
                self._save("first ")
                for _ in range(self.steady_saves):
                    assert eventually(lambda: not session.ray.staging().info()["used_bytes"])
                    self._note("memcpy", self._copy.seconds())
                    self._note("raw direct write", raw_write_s(self._root / "raw", self._num_bytes))
                    self._save("", session)
        self._tell()

    def _watch(self, session: Any) -> None:
        import ray_dcp

        ray_dcp.async_save({}, checkpoint_id=self._root / "small").committed(600)
        pids = self._pids(session)
        idle = memory_bytes(pids)
        with watched_memory(pids) as peak:
            warm_up(self._state)
            for _ in range(2):
                # Jobs save less often than it takes until the memory of a save is free.
                assert eventually(lambda: not session.ray.staging().info()["used_bytes"])
                self._save("", session)
        self._extra = (peak.num_bytes - idle) / self._num_bytes
        self._idle = memory_bytes(pids[1:]) - (memory_bytes(pids) - idle)

    def _pids(self, session: Any) -> list[int]:
        stager = session.ray.staging().info()["pid"]
        return [os.getpid(), stager, session.coordinator_info()["pid"]]

    def _save(self, kind: str, session: Any = None) -> None:
        import ray_dcp

        target = self._root / "ours"
        pids = self._pids(session) if session is not None else []
        rays = [pid for pid in descendants(os.getpid()) if pid not in pids] if pids else []
        cpu, of_ray, began = cpu_s(pids), cpu_s(rays), time.perf_counter()
        handle = ray_dcp.async_save(self._state, checkpoint_id=target)
        handle.staged(600)
        self._note(f"{kind}stall", time.perf_counter() - began)
        handle.committed(600)
        self._note(f"{kind}durable", time.perf_counter() - began)
        if pids:
            self._note("CPU", cpu_s(pids) - cpu)
            self._note("CPU of Ray's own processes", cpu_s(rays) - of_ray)
        shutil.rmtree(target)

    def _note(self, name: str, value: float) -> None:
        self._found.setdefault(name, []).append(value)

    def _tell(self) -> None:
        table, found, gigabytes = self._table, self._found, self._num_bytes / 1e9
        median = {name: table.fact(name, values) for name, values in found.items()}
        wanted = self._options.rows
        if "stall" in wanted:
            table.row("stall", median["stall"] / median["memcpy"])
        if "first" in wanted:
            table.row("first", median["first stall"] / median["stall"])
        if "durable" in wanted:
            table.row("durable", median["raw direct write"] / median["durable"])
        if "cpu" in wanted:
            table.row("cpu", median["CPU"] / gigabytes)
        if "memory" in wanted:
            table.row("memory", self._extra)


def _training(options: Options, root: Path, table: Table, state: dict[str, Any]) -> None:
    """A round: training alone, then beside a save of each contestant."""
    from tests.bench import async_peers as peers

    peers.join_group()
    contestants, missing = peers.peers(state)
    for line in missing:
        table.note(line)
    training = peers.Training(options.work_s)
    laps: dict[str, list[peers.Lap]] = {}
    lost: dict[str, list[float]] = {}
    loads: dict[str, list[float]] = {}
    with session_of("training"):
        warm_up(state)
        contestants.insert(0, peers.Ours(state))
        for number in range(options.rounds + 1):
            alone = training.lap()
            for contestant in contestants:
                # The first round starts processes, which log, and touches memory, on all sides.
                with contextlib.nullcontext() if number else _silenced():
                    lap = training.lap(contestant, root / "lap")
                    # A kill takes the page cache along where the next node is another one.
                    drop_cache(root)
                    began = time.perf_counter()
                    contestant.load(root / "lap")
                    load_s = time.perf_counter() - began
                shutil.rmtree(root / "lap")
                if number:
                    laps.setdefault(contestant.name, []).append(lap)
                    lost.setdefault(contestant.name, []).append(lap.lost_s(alone))
                    loads.setdefault(contestant.name, []).append(load_s)
        for contestant in contestants:
            contestant.close()
    peers.leave_group()
    table.note(f"a round of training: {training.steps} steps, {alone.wall_s:.2f} s alone")
    median, day = {}, {}
    for name, values in lost.items():
        median[name] = table.fact(f"lost to {name}", values)
        table.fact(f"  stall of {name}", [lap.stall_s for lap in laps[name]])
        durable_s = table.fact(f"  until it stands, {name}", [lap.durable_s for lap in laps[name]])
        load_s = table.fact(f"  load, {name}", loads[name])
        day[name] = _lost_in_a_day(table, median[name], durable_s, load_s)
    # Why at least: where the disk is quick, a peer may lose no more than the noise of training.
    if "lost" in options.rows:
        table.row("lost", median.pop("ray_dcp") / max(min(median.values()), 1e-3))
    if "day" in options.rows:
        table.row("day", day.pop("ray_dcp") / min(day.values()))


def _lost_in_a_day(table: Table, cost_s: float, durable_s: float, load_s: float) -> float:
    """Returns what a day with a kill an hour costs training at the best interval, in seconds."""
    from ray_dcp.manager import EveryOptimal, SaveFacts

    policy = EveryOptimal(mtbf_hours=1, least_s=durable_s)
    facts = SaveFacts(step=0, cost_s=max(cost_s, 1e-3), durable_s=durable_s)
    lost_s = 86400 * policy.expected_loss(facts) + 24 * load_s
    table.fact("  a save each", [policy.interval_s(facts)])
    return table.fact("  lost in a day with a kill an hour", [lost_s])


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """What processes that are started meanwhile write to stderr is lost."""
    with open(os.devnull, "w") as nothing:
        stderr = os.dup(2)
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
