"""One soak under way: its saves, its strikes, what it reads beside them, and what is at the end.

Starting and ending Ray, and the command line, are in `soak`.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

import ray_dcp
from ray_dcp.errors import CheckpointError
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.runtime.actor_names import NAMESPACE
from ray_dcp.runtime.worker_group import WorkerGroup
from tests.bench import soak_leaks as leaks
from tests.bench import soak_programs as programs
from tests.bench.soak_ledger import DAMAGED, NOTHING, TORN, Ledger, Seen
from tests.bench.soak_reader import Reader, Reading
from tests.bench.soak_strikes import Striker, choose

PROBLEMS = (
    "torn", "lost", "appeared", "told both", "refused at rest", "hung", "damaged",
    "leaked files", "leaked temp files", "leaked actors", "leaked processes",
    "leaked shared memory", "leaked memory",
)  # fmt: skip
"""What must be 0."""

SABOTAGE = tuple(kind for kind in PROBLEMS if kind not in ("told both", "refused at rest", "hung"))
"""What `--sabotage` does on purpose, and must be told of."""

LITTER = "soak-litter-"
"""Beginning of the name of shared memory that sabotage leaves."""

CALM_SHARE = 0.4
CYCLE_S = 600.0
"""Each cycle ends with so much of it without strikes: memory is measured on those that live."""

LEAK_PER_MIN = 4 << 20
LEAK_AT_LEAST = 12 << 20
"""Growth of a process after its warm-up that counts as a leak, in bytes a minute and in all."""

PERIOD_S = 1.0
SAMPLE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class SoakOptions:
    """How to soak."""

    minutes: float
    seed: int
    path: str | None = None
    """Where to save; a temporary folder by default."""
    ranks: int = 3
    places: int = 4
    """Number of checkpoint ids."""
    saver: str = "sync"
    """One of `soak_programs.SAVERS`."""
    strikes: float = 0.4
    """Share of the saves during which somebody is killed or frozen."""
    sabotage: bool = False
    """Do one of each thing that must not happen; the soak is good when it finds them all."""


class SoakRun:
    """One run: its ranks, its reader, and what it has seen so far.

    Attributes:
        counts: What was done and what went wrong, by name.
        litter: What sabotage left outside of the folder of the saves.
        litter_name: Of its shared memory.
        mark: What the environment of every process of this run holds.
    """

    def __init__(self, options: SoakOptions, root: Path, mark: str) -> None:
        self.options = options
        self.mark = mark
        self.counts: Counter[str] = Counter()
        self.litter: list[Path] = []
        self.litter_name = f"{LITTER}{secrets.token_hex(8)}"
        self._root = root
        self._reports = root / "reports"
        self._reports.mkdir()
        self._places = [str(root / f"c{number}") for number in range(options.places)]
        self._numbers = random.Random(options.seed)
        self._ledger = Ledger()
        self._striker = Striker(mark)
        length_s = options.minutes * 60
        self._length_s = length_s
        self._cycle_s = min(CYCLE_S, length_s)
        calm_s = CALM_SHARE * self._cycle_s
        self._memory = leaks.MemoryLog(warm_up_s=calm_s / 4, least_s=calm_s / 2)
        self._started_s = time.monotonic()
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._step = 0
        self._read: dict[Path, int] = {}
        self._group: WorkerGroup | None = None
        self._reader: Reader | None = None
        self._hoarding: list[subprocess.Popen[bytes]] = []

    # The run

    def run(self) -> None:
        """Saves until the time is up, then once more onto each id in peace, and looks."""
        self._reader = Reader(self._root / "reader.log")
        self._group = WorkerGroup(self.options.ranks, run_timeout_s=60, release_s=15)
        self._group.run(programs.coordinator_pid)
        # Why only now: on a busy machine, ranks take a while to start.
        self._started_s = time.monotonic()
        self._sampler.start()
        minute = 1
        while time.monotonic() < self._started_s + self._length_s:
            began_s = time.monotonic()
            self._turn()
            self._take_reading()
            if time.monotonic() - self._started_s >= 60 * minute:
                self._print_line()
                minute += 1
            time.sleep(max(0.0, PERIOD_S - (time.monotonic() - began_s)))
        self._striker.stop()
        self._take_reading(wait=True)
        self._come_to_rest()
        self._print_line()

    def end(self) -> None:
        """Stops what it started."""
        self._over.set()
        self._striker.stop()
        if self._group is not None:
            self._group.shutdown()
        if self._reader is not None:
            self._reader.stop()

    def _turn(self) -> None:
        chance = self._numbers.random()
        place = self._numbers.choice(self._places)
        if chance < 0.07 and not self._is_calm:
            sizes = [1, 2, self.options.ranks, self.options.ranks, self.options.ranks + 1]
            self._resize(self._numbers.choice(sizes))
            self._load(place)
        elif chance < 0.11:
            self._delete(place)
        elif chance < 0.15:
            self._tool("collect", place)
        on_purpose = "memory" if self.options.sabotage else ""
        self._save(self._places[self._step % len(self._places)], sabotage=on_purpose)

    def _save(self, place: str, *, in_peace: bool = False, sabotage: str = "") -> str:
        group = self._living_group()
        self._step += 1
        is_hit = self._numbers.random() < self.options.strikes
        if is_hit and not in_peace and not self._is_calm:
            strike = choose(self._numbers, group.world_size)
            try:
                self._striker.strike(strike, group.pids, self._coordinator_pid)
            except (CheckpointError, ray.exceptions.RayError):
                self.counts["strikes missed"] += 1
        self._ledger.begin(place, self._step)
        try:
            group.run(
                programs.save_reported, self.options.saver, place, self._step,
                str(self._reports), _quick(SaveOptions), sabotage,
            )  # fmt: skip
        except (CheckpointError, ray.exceptions.RayError):
            self._repair()
        reports = self._new_reports()
        if self._ledger.disagree(reports):
            self.note("told both", [f"step {self._step} at {place}: {reports}"])
        return self._ledger.end(place, self._step, reports)

    @property
    def _is_calm(self) -> bool:
        at_s = (time.monotonic() - self._started_s) % self._cycle_s
        return at_s > (1 - CALM_SHARE) * self._cycle_s

    def _coordinator_pid(self) -> int | None:
        pid: int | None = self._living_group().run(programs.coordinator_pid)[0]
        return pid

    def _new_reports(self) -> list[str]:
        """Returns what the ranks were told of the save that has just ended."""
        found = []
        for path in sorted(self._reports.iterdir()):
            lines = path.read_text().splitlines()
            for line in lines[self._read.get(path, 0) :]:
                report = json.loads(line)
                if report["step"] == self._step:
                    found.append(report["told"])
            self._read[path] = len(lines)
        return found

    def _load(self, place: str) -> None:
        group = self._living_group()
        try:
            seen = set(group.run(programs.load_reported, place, _quick(LoadOptions)))
        except (CheckpointError, ray.exceptions.RayError):
            self._repair()
            return
        self.counts["loads by ranks"] += 1
        self._judge(place, seen.pop() if len(seen) == 1 else TORN)

    def _delete(self, place: str) -> None:
        self._ledger.begin_delete(place)
        done = self._tool("delete", place)
        self._ledger.end_delete(place, done)

    def _tool(self, name: str, place: str) -> bool:
        self.counts[f"{name}s"] += 1
        try:
            getattr(ray_dcp, name)(place)
        except CheckpointError as error:
            self.counts[f"{name}s: {type(error).__name__}"] += 1
            return False
        return True

    def _resize(self, world_size: int) -> None:
        self.counts["resizes"] += 1
        self._striker.wait()
        self._living_group().resize(world_size)

    def _repair(self) -> None:
        """Replaces the ranks that are gone, once those that are frozen have gone on."""
        self.counts["repairs"] += 1
        self._striker.wait()
        group = self._living_group()
        group.resize(group.world_size)

    def _living_group(self) -> WorkerGroup:
        assert self._group is not None
        return self._group

    # Reading

    def _take_reading(self, *, wait: bool = False) -> None:
        assert self._reader is not None
        try:
            reading = self._reader.answer(wait)
        except TimeoutError as error:
            self.note("hung", [str(error)])
            self._reader.stop()
            self._reader = Reader(self._root / "reader.log")
            return
        if reading is not None:
            self._judge_reading(reading)
        if self._reader.idle and not wait:
            place = self._numbers.choice(self._places)
            how = self._numbers.choice(["load", "stock", "verify"])
            watched = self._ledger.watch(place)
            self._reader.ask(how, place, (watched, set(watched)))

    def _judge_reading(self, reading: Reading) -> None:
        """Judges what was read while others may have saved."""
        watched, first = reading.note
        self._ledger.unwatch(watched)
        self.counts[f"reader: {reading.how}"] += 1
        moved = watched != first or len(watched) > 1
        if reading.seen in (NOTHING, DAMAGED) and moved:
            self.counts["reader: interrupted"] += 1
        elif reading.how == "verify":
            self.note("damaged", [reading.place] * (reading.seen == DAMAGED))
        elif not (reading.how == "stock" and reading.seen == NOTHING):
            # Stock DCP may see nothing, or the one before, after a coordinator was killed.
            self._judge(reading.place, reading.seen, watched, how=reading.how)

    def _judge(
        self, place: str, seen: Seen, possible: set[int] | None = None, how: str = "load"
    ) -> None:
        if how == "stock":
            verdict = self._ledger.judge_older(place, seen)
        else:
            verdict = self._ledger.judge(place, seen, possible)
        if verdict is not None:
            self.note(verdict.kind, [f"{how}: {verdict.text}"])

    # The end

    def _come_to_rest(self) -> None:
        """Saves onto each id in peace; then what it should be is there and nothing else."""
        group = self._living_group()
        group.resize(self.options.ranks)
        sabotage = self.options.sabotage
        for number, place in enumerate(self._places):
            on_purpose = ["torn", "", "appeared", ""][number % 4] if sabotage else ""
            told = self._save(place, in_peace=True, sabotage=on_purpose)
            if told != "committed" and not on_purpose:
                # Why once more: a coordinator that was just thawed may have won the race.
                told = self._save(place, in_peace=True)
            self.note("refused at rest", [place] * (told != "committed" and not on_purpose))
            self._tool("collect", place)
        if sabotage:
            self._sabotage()
        for place in self._places:
            self._load(place)
            for how in ("load", "stock", "verify"):
                self._read_at_rest(how, place)
            self.note("leaked files", leaks.leaked_files(Path(place)))
        self.note("leaked temp files", leaks.leaked_temp_files(self._root))
        self._over.set()
        self._sampler.join()
        grown = self._memory.leaks(LEAK_PER_MIN, LEAK_AT_LEAST)
        self.note("leaked memory", [str(growth) for growth in grown])
        for growth in self._memory.growths()[:8]:
            print(f"  memory of {growth}")
        group.shutdown()

    def _read_at_rest(self, how: str, place: str) -> None:
        assert self._reader is not None
        self._reader.ask(how, place)
        reading = self._reader.answer(wait=True)
        assert reading is not None
        self.counts[f"reader: {how}"] += 1
        if how == "verify":
            self.note("damaged", [place] * (reading.seen != "whole"))
        else:
            self._judge(place, reading.seen, how="load")

    def _sabotage(self) -> None:
        """Leaves one of each thing behind that must not be; what is torn was saved so."""
        second, last = Path(self._places[1]), Path(self._places[-1])
        max(second.glob("*.distcp"), key=lambda file: file.stat().st_size).unlink()
        (last / "__0_9.0123456789abcdef.distcp").write_bytes(b"left")
        (last / ".tmp-012345-__0_9.0123456789abcdef.distcp").write_bytes(b"left")
        actor = ray.remote(_Idle).options(
            name="sabotage", namespace=NAMESPACE, lifetime="detached", num_cpus=0
        )
        ray.get(actor.remote().ping.remote())
        self._hoarding.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        shared = leaks.SHARED_MEMORY / self.litter_name
        shared.write_bytes(b"left")
        self.litter.append(shared)

    # Counting

    def note(self, problem: str, found: list[str]) -> None:
        """Counts what went wrong, and prints it."""
        self.counts[problem] += len(found)
        for text in found[:20]:
            print(f"  {problem.upper()}: {text}", flush=True)

    def _sample(self) -> None:
        """In a thread: measures the memory of all of them until the run is over."""
        while not self._over.wait(SAMPLE_S):
            group = self._group
            pids = {"driver": os.getpid()}
            for rank, pid in enumerate(group.pids if group else ()):
                # Why not at once: it imports and allocates until it has saved.
                if self._read.get(self._reports / f"{pid}.jsonl", 0) >= 2:
                    pids[f"rank {rank}"] = pid
            self._memory.take(time.monotonic(), pids)
            for pid, command in leaks.marked(self.mark).items():
                if command.startswith("ray::Coordinator"):
                    self._memory.take(time.monotonic(), {"coordinator": pid})

    def _print_line(self) -> None:
        told, done = self._ledger.told, self._striker.done
        wrong = ", ".join(f"{kind} {self.counts[kind]}" for kind in PROBLEMS[:7])
        other = ", ".join(
            f"{name} {count}" for name, count in sorted(self.counts.items()) if name not in PROBLEMS
        )
        print(
            f"[{(time.monotonic() - self._started_s) / 60:5.1f} min] saves: "
            f"committed {told['committed']}, failed {told['failed']}, unknown {told['unknown']}"
            f" | {', '.join(f'{kind} {count}' for kind, count in sorted(done.items()))}"
            f" | {other} | {wrong}",
            flush=True,
        )

    def verdict(self) -> int:
        """Prints what must be 0, and returns the exit status."""
        for kind in PROBLEMS:
            print(f"{self.counts[kind]:6d}  {kind}")
        found = {kind for kind in PROBLEMS if self.counts[kind]}
        if not self.options.sabotage:
            return 1 if found else 0
        missed = set(SABOTAGE) - found
        print(f"sabotage: {len(SABOTAGE) - len(missed)} of {len(SABOTAGE)} found", *missed)
        return 1 if missed else 0


class _Idle:
    """The actor that sabotage leaves behind."""

    def ping(self) -> None:
        return None


def _quick(kind: type[SaveOptions] | type[LoadOptions]) -> dict[str, Any]:
    """Returns options with short deadlines, so that a frozen process is seen before it thaws."""
    quick = {
        "plan_timeout_s": 5.0, "write_timeout_s": 5.0, "commit_timeout_s": 5.0,
        "read_timeout_s": 10.0, "heartbeat_timeout_s": 5.0,
    }  # fmt: skip
    fields = kind.__dataclass_fields__
    return {name: value for name, value in quick.items() if name in fields}
