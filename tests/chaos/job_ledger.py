"""A player of the program in docs/examples/rl_on_ray.py, of which something is killed in a step.

In each game a driver goes on from the newest step of a run, and one of its processes is killed in
one phase of a step: a trainer, the critic, the buffer, what samples, the driver, the job's
coordinator, the stager, the writer of values, all processes of the job, or the whole Ray. The next
game goes on from what that left. After each game: the step is committed where nothing could stop
it, and not where nothing could commit it; of each step that is there, all parts are whole; each
prompt was trained on once, waits in the buffer, or comes next; the error that the driver had is one
of ray_dcp or Ray; and no actor and no process of the job is left.

By hand: `python -m tests.chaos.job_ledger --rounds 5 --seed 1`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import torch

import ray_dcp
from ray_dcp.core.bounds import ACTOR_LEASE_S
from ray_dcp.data import Frontier
from ray_dcp.errors import CheckpointError
from ray_dcp.format.manifest import DeleteRecord, decode_record
from ray_dcp.session.names import NAMESPACE, job_coordinator_name
from tests.support.daemons import Daemons
from tests.support.processes import eventually, marked
from tests.support.programs import forks
from tests.support.programs.forks import Program, Programs

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "rl_on_ray.py"

PHASES = ("training", "opened", "saving", "given", "durable", "committed")
"""Before the step; after it was opened; while the policy is saved; when all parts are staged, in
the block; before the record is created; after that, before anybody is told."""

LASTING = ("trainer", "critic", "buffer", "rollout", "stager", "writer")
"""Victims without which a step that is staged is committed."""
VICTIMS = (*LASTING, "coordinator", "driver", "job", "ray")

SETTINGS = {
    "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1", "RAY_memory_monitor_refresh_ms": "0",
}  # fmt: skip
QUIET_S = 60.0
"""How soon all that a driver started has ended after it, in seconds."""
LEASED = ("Coordinator", "Stager")
"""Those that stay for their lease besides, where no rank ever came to them."""
MOST_STEPS = 60
"""Most steps of a run: the program has so many prompts."""


@dataclass(frozen=True)
class Blow:
    """What is killed, and when."""

    victim: str
    phase: str
    nth: int
    """In which step of the driver, from 1."""
    delay_s: float

    def commits(self) -> bool | None:
        """Returns whether the step must be committed, or must not; None if it may be."""
        if self.victim == "rollout" or self.phase == "committed":
            return True  # Ray samples again.
        if self.phase == "durable":
            return self.victim in LASTING or self.victim == "driver"
        if self.victim in ("driver", "job", "ray") and self.phase in ("training", "opened"):
            return False
        return False if (self.victim, self.phase) == ("coordinator", "opened") else None

    def ends_driver(self) -> bool:
        return self.victim in ("driver", "job", "ray")

    def may_be_missing(self) -> bool:
        """Returns whether the victim may have been made later, or is the driver itself."""
        later = {
            "coordinator": ("training",),
            "stager": ("training", "opened", "saving"),
            "writer": ("training", "opened", "saving"),
        }
        return self.victim == "driver" or self.phase in later.get(self.victim, ())


# --- the ledger ----------------------------------------------------------------------------------


def wrong_in(run: Path) -> list[str]:
    """Returns what is wrong in the history of a run of the example."""
    found = ray_dcp.JobCheckpoints(run, ("any",), read_only=True)
    wrong = []
    for number in found.all_steps():
        checked = ray_dcp.verify(run / f"step-{number:08}")
        if not checked.ok:
            wrong.append(f"step {number} is not whole: {[*map(str, checked.problems)]}")
    last = None if wrong else found.latest()
    return wrong if last is None else wrong_in_step(last)


def wrong_in_step(last: ray_dcp.CommittedStep) -> list[str]:
    """Returns which prompts a step of the example has lost, or has trained on twice."""
    with last:
        trained = ray_dcp.read_state_dict(last.part("policy"))["trained"].tolist()
        cursor, held = last.value("cursor"), [*map(int, last.value("buffer")["samples"])]
    prompts = Frontier(max_open=64)
    prompts.load_state_dict(cursor)
    is_open = {*prompts.take(prompts.status().num_open)}
    once = [prompt for prompt, count in enumerate(trained) if count == 1]
    wrong = []
    if {*trained} - {0, 1} or len(once) != 3 * last.step:
        wrong.append(f"step {last.step} has trained on prompts so often: {Counter(trained)}")
    # Each was trained on, waits in the buffer, or comes next.
    if sorted([*once, *held, *is_open]) != [*range(cursor["next"])]:
        wrong.append(f"step {last.step} of {cursor} has trained on {once}, and holds {held}")
    return wrong


# --- a driver ------------------------------------------------------------------------------------


def coordinator_of(run: str) -> Any:
    return ray.get_actor(job_coordinator_name(run, NAMESPACE), NAMESPACE)


def hold_record(run: str, step: int, marks: Path) -> None:
    """Has the coordinator wait before and after it creates the record of a step."""

    def hold(_: Any) -> None:
        from ray_dcp.job import coordinator as module

        create = module.create_record

        def held(writer: Any, place: Any, records: Any) -> Any:
            if place.step != step:
                return create(writer, place, records)
            wait("durable")
            error = create(writer, place, records)
            wait("committed")
            return error

        def wait(phase: str) -> None:
            (marks / phase).touch()
            assert eventually((marks / f"{phase}-over").exists)

        module.create_record = held

    ray.get(coordinator_of(run).__ray_call__.remote(hold))


class Player:
    """The driver of a game: runs the example, and kills once."""

    def __init__(self, run: str, marks: Path, blow: Blow, mark: str) -> None:
        self.run, self.marks, self.blow, self.mark = run, marks, blow, mark
        self.num_steps = self.step = 0
        self.group: Any = None

    def play(self, last_step: int, num_ranks: int) -> int:
        """Returns the step that the example went on from."""
        program = runpy.run_path(str(EXAMPLE))
        names = program["main"].__globals__
        names["roll_out"] = _rollout_of(self.marks)
        player = self

        class Group(ray_dcp.WorkerGroup):
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named)
                player.group = self

        class Checkpoints(ray_dcp.JobCheckpoints):
            def step(self, step: int, **named: Any) -> ray_dcp.JobStep:
                return player.opened(step, lambda: super(Checkpoints, self).step(step, **named))

        ray_dcp.WorkerGroup, ray_dcp.JobCheckpoints = Group, Checkpoints  # type: ignore[misc]
        first: int = program["main"](self.run, last_step, num_ranks, self.given)
        return first

    def opened(self, number: int, open_step: Callable[[], ray_dcp.JobStep]) -> ray_dcp.JobStep:
        """Opens a step."""
        self.num_steps, self.step = self.num_steps + 1, number
        if self.num_steps != self.blow.nth:
            return open_step()
        if self.blow.phase == "training":
            self.strike(number)
        step = open_step()
        if self.blow.phase == "opened":
            self.strike(number)
        elif self.blow.phase in ("durable", "committed"):
            hold_record(self.run, number, self.marks)
        if self.blow.phase in ("saving", "durable", "committed"):
            threading.Thread(target=self.strike_later, args=[step], daemon=True).start()
        return step

    def given(self, *_: Any) -> None:
        """Is called within a step, once all parts are staged or soon will be."""
        if (self.num_steps, self.blow.phase) == (self.blow.nth, "given"):
            self.strike(self.step)

    def strike_later(self, step: ray_dcp.JobStep) -> None:
        """Strikes once a step is in the phase."""
        phase = self.blow.phase
        if phase == "saving":
            assert eventually(lambda: step.report().parts["policy"].is_begun)
            return self.strike(step.step)
        if phase == "committed":
            (self.marks / "durable-over").touch()
        assert eventually((self.marks / phase).exists)
        self.strike(step.step)
        for name in ("durable-over", "committed-over"):
            (self.marks / name).touch()
        return None

    def strike(self, number: int) -> None:
        """Kills the victim in a step; the driver may have opened the next one meanwhile."""
        victim, working = self.blow.victim, working_for_jobs(self.mark)
        match victim:
            case "trainer":
                pids = self.group.pids[-1:]
            case "rollout":
                pids = [int(file.name) for file in (self.marks / "rollouts").iterdir()]
            case "job":
                pids = [*working]
            case "ray":
                pids = [*marked(self.mark)]
            case _:
                pids = [pid for pid, title in working.items() if title in TITLES.get(victim, ())]
        threading.Event().wait(self.blow.delay_s)
        (self.marks / "struck").write_text(json.dumps([number, len(pids)]))
        if self.blow.ends_driver():
            pids.append(os.getpid())
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


TITLES = {
    "critic": ("Critic",), "buffer": ("Buffer",), "coordinator": ("JobCoordinator",),
    "stager": ("Stager",), "writer": ("ValueWriter",),
}  # fmt: skip
"""What Ray calls the processes of victims."""
OF_RUN = ("JobCoordinator", "ValueWriter")
"""What it calls those that several drivers share."""
OF_RAY = ("IDLE", "DashboardAgent", "RuntimeEnvAgent")
"""What it calls those that belong to no job."""


def working_for_jobs(mark: str) -> dict[int, str]:
    """Returns the processes of a Ray that are actors or run tasks, with their titles."""
    found = {
        pid: command.removeprefix("ray::").partition(".")[0].partition("(")[0].strip()
        for pid, command in marked(mark).items()
        if command.startswith("ray::")
    }
    return {pid: title for pid, title in found.items() if not title.startswith(OF_RAY)}


def _rollout_of(marks: Path) -> Any:
    """Returns the task that samples, as one that takes a while and tells its process."""

    def roll_out(prompt: int) -> tuple[int, torch.Tensor]:
        (marks / "rollouts" / str(os.getpid())).touch()
        threading.Event().wait(0.02 * (prompt % 4))
        return prompt, torch.full((8,), prompt / 400)

    return ray.remote(num_cpus=0)(roll_out)


def drive(given: str) -> None:
    """Is the driver of a game; tells the step that it went on from, and its error."""
    game = json.loads(given)
    ray.init(game["address"], log_to_driver=False, configure_logging=False)
    player = Player(game["run"], Path(game["marks"]), Blow(**game["blow"]), game["mark"])
    told = {"first": None, "error": ""}
    try:
        told["first"] = player.play(game["last_step"], game["num_ranks"])
    except (CheckpointError, ray.exceptions.RayError) as error:
        told["error"] = f"{type(error).__name__}: {error}"
    (player.marks / "told").write_text(json.dumps(told))


# --- the games -----------------------------------------------------------------------------------


class Table:
    """Plays games on one Ray, and on one run after another."""

    def __init__(self, root: Path) -> None:
        self._programs, self._daemons, self._root = Programs(), Daemons(), root
        self._num_runs, self._ended_s = 0, dict[int, float]()
        self.longest: dict[str, float] = {}
        """For how long processes were seen to outlive their driver, by title, in seconds."""
        self._new_run()

    def _new_run(self) -> None:
        self._num_runs += 1
        self._run = self._root / f"run-{self._num_runs}"

    def close(self) -> None:
        self._daemons.close()
        self._programs.close()

    def committed(self) -> list[int]:
        return ray_dcp.JobCheckpoints(self._run, ("any",), read_only=True).all_steps()

    def was_committed(self, step: int) -> bool:
        """Returns whether a step is committed, or was until two later ones were."""
        decided = [
            one.committed
            for file in self._run.glob(f"step-{step:08}/manifest-*")
            if isinstance(record := decode_record(file.read_bytes(), key=file.name), DeleteRecord)
            for one in record.decided
        ]
        return step in self.committed() or any(decided)

    def play(self, blow: Blow, num_ranks: int, number: int) -> list[str]:
        """Returns what was wrong in a game."""
        if (self.committed() or [0])[-1] > MOST_STEPS:
            self._new_run()
        before = self.committed()
        marks = self._root / f"game-{number}"
        (marks / "rollouts").mkdir(parents=True)
        address = self._daemons.address()
        mark = f"RAY_TMPDIR={self._daemons.directory}"
        game = {
            "address": address, "run": str(self._run), "marks": str(marks), "mark": mark,
            "blow": asdict(blow), "num_ranks": num_ranks,
            "last_step": (before or [0])[-1] + blow.nth + 2,
        }  # fmt: skip
        line = ("-m", "tests.chaos.job_ledger", "--driver", json.dumps(game))
        driver = self._programs.start(*line)
        try:
            wrong = self._wrong_driver(driver, marks, blow, before)
        finally:
            driver.kill()
        if not (marks / "struck").exists():
            return [*wrong, "nothing was struck"]
        struck, num_killed = json.loads((marks / "struck").read_text())
        if not num_killed and not blow.may_be_missing():
            wrong.append("the victim was not there")
        for name in ("durable-over", "committed-over"):
            (marks / name).touch()
        wrong += self._overdue(mark)
        if blow.commits():
            # Nobody waits for it where the driver was killed.
            eventually(lambda: self.was_committed(struck))
        after, was_committed = self.committed(), self.was_committed(struck)
        if blow.commits() not in (None, was_committed):
            wrong.append(f"step {struck} is {'not ' * (not was_committed)}committed")
        if not {*before[-1:]} <= {*after} and len(after) < 2:
            wrong.append(f"there were the steps {before}, and now there are {after}")
        return [*wrong, *wrong_in(self._run)]

    def _wrong_driver(
        self, driver: Program, marks: Path, blow: Blow, before: Sequence[int]
    ) -> list[str]:
        try:
            ended = driver.wait()
        except TimeoutError:
            return ["the driver hangs"]
        if blow.ends_driver():
            return [] if ended == -signal.SIGKILL else [f"the driver ended with {ended}"]
        if ended:
            return [f"the driver ended with {ended}"]
        told = json.loads((marks / "told").read_text())
        if not told["error"] and told["first"] < (before or [0])[-1]:
            return [f"the driver went on from {told['first']}, but there was {before}"]
        if told["error"] and blow.victim == "rollout":
            return [f"the driver failed: {told['error']}"]
        return []

    def _overdue(self, mark: str) -> list[str]:
        """Returns what has outlived its driver by more than it may."""
        working, now_s = working_for_jobs(mark), time.monotonic()
        self._ended_s = {pid: self._ended_s.get(pid, now_s) for pid in working}
        # Those of a run serve the next driver.
        old_s = {p: now_s - s for p, s in self._ended_s.items() if working[p] not in OF_RUN}
        for pid, age_s in old_s.items():
            self.longest[working[pid]] = max(age_s, self.longest.get(working[pid], 0.0))
        late = [
            f"{working[pid]} {pid} after {age_s:.0f} s"
            for pid, age_s in old_s.items()
            if age_s > QUIET_S + ACTOR_LEASE_S * (working[pid] in LEASED)
        ]
        return [f"there are still {', '.join(late)}"] if late else []

    def left(self) -> list[str]:
        """Returns what of all games is still there after a while."""
        mark = f"RAY_TMPDIR={self._daemons.directory}"

        def unleased() -> list[str]:
            return [title for title in working_for_jobs(mark).values() if title not in LEASED]

        if not eventually(lambda: not unleased(), QUIET_S):
            return [f"{QUIET_S:g} s after the last game there are {unleased()}"]
        if not eventually(lambda: not working_for_jobs(mark), ACTOR_LEASE_S):
            return [f"after their lease there are {working_for_jobs(mark)}"]
        return []


def main() -> None:
    """Plays the games, and ends with 1 if one of them was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="games of each victim in each phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--driver", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.driver:
        drive(chosen.driver)
        return
    os.environ |= SETTINGS
    forks.LIMIT_S = 240.0
    chance = random.Random(chosen.seed)
    cells = [(v, p) for _ in range(chosen.rounds) for v in chosen.victims for p in chosen.phases]
    root = Path(tempfile.mkdtemp(prefix="job-ledger-"))
    bad, number = 0, 0
    try:
        with closing(Table(root)) as table:
            for number, (victim, phase) in enumerate(cells, 1):
                blow = Blow(victim, phase, chance.choice([1, 2]), chance.choice([0.0, 0.02, 0.1]))
                num_ranks = chance.choice([1, 2, 2])
                begin_s = time.monotonic()
                wrong = table.play(blow, num_ranks, number)
                bad += bool(wrong)
                told = f"game {number:4} {victim:11} {phase:9} {time.monotonic() - begin_s:6.1f} s"
                print(f"{told}: {'; '.join(wrong) or 'as it must'}", flush=True)
            for one in table.left():
                bad += 1
                print(one, flush=True)
            ages = ", ".join(f"{title} {age_s:.0f} s" for title, age_s in table.longest.items())
            print(f"outlived their driver, where seen: {ages or 'none'}", flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"{number} games (seed {chosen.seed}), {bad} in which something was wrong")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
