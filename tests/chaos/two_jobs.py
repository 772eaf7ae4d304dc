"""A player of two jobs on one Ray: equal and other names, namespaces and environments; one dies.

Each job has a driver of its own: what one driver starts is one job. In each round two jobs save and
load at random, and one of them is struck: its rank, its stager or its coordinator is killed at a
random moment. The other one must not notice: each of its calls succeeds, and what it saved is there
with its values. What the struck one had staged when its rank was killed is committed, and its
errors are errors of ray_dcp.

By hand: `python -m tests.chaos.two_jobs --rounds 100 --seed 1`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch

import ray_dcp
from tests.support.processes import eventually

RANKS = "ranks"
"""Namespace of the ranks' actors."""
SIZES = (1 << 10, 1 << 18, 1 << 22)
STRIKES = ("nothing", "rank", "stager", "coordinator")


class Rank:
    """The only rank of a job."""

    def __init__(self, name: str, namespace: str) -> None:
        self.session: Any = ray_dcp.connect(name=name, namespace=namespace)

    def pids(self) -> dict[str, Any]:
        """Returns the process of this rank, and that of its stager."""
        return {"rank": os.getpid(), "stager": self.session.ray.staging().info()["pid"]}

    def end_coordinator(self) -> None:
        """Kills the coordinator of this job, as its node would by ending."""
        ray.kill(self.session.ray.coordinator(), no_restart=False)

    def save(self, path: str, value: float, num_bytes: int, how: str) -> str:
        """Saves; returns the attempt, or "" and the name of the error."""
        state = {"w": torch.full((num_bytes // 4,), value)}
        try:
            if how == "sync":
                return str(ray_dcp.save(state, checkpoint_id=path).attempt)
            handle = ray_dcp.async_save(state, checkpoint_id=path)
            handle.staged(120)
            state["w"].zero_()
            if how == "committed":
                handle.result(120)
            return str(handle.report().attempt)
        except ray_dcp.CheckpointError as error:
            return f"!{type(error).__name__}: {error}"

    def load(self, path: str, value: float, num_bytes: int) -> str:
        """Loads; returns "" if the values are right."""
        found = {"w": torch.zeros(num_bytes // 4)}
        try:
            ray_dcp.load(found, checkpoint_id=path)
        except ray_dcp.CheckpointError as error:
            return f"!{type(error).__name__}: {error}"
        return "" if bool((found["w"] == value).all()) else "!wrong values"


class Driver:
    """The driver of a job, in a process of its own; it starts ranks."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-m", "tests.chaos.two_jobs", "--driver", address]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip

    def rank(self, name: str, namespace: str, profile: str) -> Any:
        """Starts a rank of this job, and returns its handle."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        actor = secrets.token_hex(8)
        print(json.dumps([actor, name, namespace, profile]), file=self._process.stdin, flush=True)
        while (told := self._process.stdout.readline().strip()) != actor:
            assert told, "the driver of a job has ended"
        return ray.get_actor(actor, namespace=RANKS)

    def close(self) -> None:
        """Ends the driver."""
        self._process.communicate(timeout=60)


def drive(address: str) -> None:
    """Starts each rank that is asked for by a line, until there are no more lines."""
    ray.init(address, log_to_driver=False)
    for line in sys.stdin:
        actor, name, namespace, profile = json.loads(line)
        ray.remote(num_cpus=0)(Rank).options(
            name=actor,
            namespace=RANKS,
            lifetime="detached",  # so that the player has its handle, too
            runtime_env={"env_vars": {"AWS_PROFILE": profile}},
        ).remote(name, namespace)
        print(actor, flush=True)


def play(seed: int, folder: Path, drivers: Sequence[Driver]) -> tuple[str, list[str]]:
    """Plays a round; returns what was struck, and what the jobs noticed of each other."""
    chance, mark = random.Random(seed), secrets.token_hex(4)
    names = [f"train-{mark}", f"train-{mark}" if chance.random() < 0.5 else f"train-{mark}:1"]
    spaces = ["team-A", "team-A" if names[0] != names[1] and chance.random() < 0.5 else "team-B"]
    profiles = ["a", chance.choice(["a", "b"])]
    made = [
        driver.rank(name, space, profile)
        for driver, name, space, profile in zip(drivers, names, spaces, profiles, strict=True)
    ]
    victim = chance.randrange(2)
    other, struck = made[1 - victim], made[victim]
    strike, wrong = chance.choice(STRIKES), list[str]()
    pids, same = ray.get(struck.pids.remote()), ray.get(other.pids.remote())
    if pids["stager"] == same["stager"]:
        wrong.append("both jobs have one stager")
    num_bytes, value = chance.choice(SIZES), float(1 + seed % 97)
    staged = folder / "victim"
    attempt = ray.get(struck.save.remote(str(staged), value, num_bytes, "staged"))
    going = [
        (number, other.save.remote(str(folder / f"{number}"), value + number, num_bytes, how))
        for number, how in enumerate(chance.choices(["sync", "staged", "committed"], k=4))
    ]
    time.sleep(chance.random() * 0.2)  # the moment is what is played
    if strike in pids:
        os.kill(pids[strike], signal.SIGKILL)
    elif strike == "coordinator":
        ray.get(struck.end_coordinator.remote())
    if strike in ("nothing", "rank") and attempt.startswith("!"):
        wrong.append(f"the victim's save failed before: {attempt}")
    for number, ref in going:
        told = ray.get(ref)
        if told.startswith("!"):
            wrong.append(f"save {number} of the other job: {told}")
            continue
        path = folder / f"{number}"
        if not eventually(lambda path=path, told=told: ray_dcp.outcome(path, told) == "committed"):
            wrong.append(f"save {number} of the other job is not committed")
        found = ray.get(other.load.remote(str(path), value + number, num_bytes))
        if found:
            wrong.append(f"load {number} of the other job: {found}")
    if strike in ("nothing", "rank") and not attempt.startswith("!"):
        if not eventually(lambda: ray_dcp.outcome(staged, attempt) == "committed"):
            wrong.append("what the victim had staged is not committed")
        elif found := ray.get(other.load.remote(str(staged), value, num_bytes)):
            wrong.append(f"what the victim had staged: {found}")
    for one in made:
        ray.kill(one)
    names_equal, spaces_equal = names[0] == names[1], spaces[0] == spaces[1]
    kind = f"{strike}, names {'equal' if names_equal else 'other'}"
    return f"{kind}, namespaces {'equal' if spaces_equal else 'other'}", wrong


def main() -> None:
    """Plays the rounds, and ends with 1 if a job noticed the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--driver", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.driver:
        drive(chosen.driver)
        return
    root = Path(tempfile.mkdtemp(prefix="two-jobs-"))
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(
        num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False
    )
    drivers = [Driver(ray.get_runtime_context().gcs_address) for _ in range(2)]
    kinds, bad = Counter[str](), 0
    try:
        for number in range(chosen.rounds):
            folder = root / str(number)
            folder.mkdir()
            kind, wrong = play(chosen.seed + number, folder, drivers)
            kinds[kind] += 1
            bad += bool(wrong)
            for one in wrong:
                print(f"round {number} (seed {chosen.seed + number}, {kind}): {one}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        for driver in drivers:
            driver.close()
        ray.shutdown()
        shutil.rmtree(root, ignore_errors=True)
    for kind, count in sorted(kinds.items()):
        print(f"{count:4} {kind}")
    print(f"{chosen.rounds} rounds, {bad} in which a job noticed the other")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
