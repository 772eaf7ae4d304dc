"""Plays a cell in an arena: sets the trap, runs the ranks into it, looks what came of it.

Afterwards every scene looks whether what stands is whole, saves once more, and looks again. What is
right or wrong about all that is said in `judging`.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray_dcp
from ray_dcp.errors import CheckpointError
from tests.chaos import victims
from tests.chaos.arena import NUM_RANKS, Arena
from tests.chaos.cells import Cell, Result
from tests.chaos.judging import Expected, Seen, Told, judge
from tests.chaos.traps import Blow, Mark, count_calls, counted, read_mark
from tests.support.attempts import save_sound, step_that_loads
from tests.support.processes import eventually, lives

FROZEN_S = 4.0
"""The heartbeat timeout of these cells, in seconds: every other deadline is as by default."""
HIT_S = 40.0
"""How long the ranks may take to run into the trap, in seconds."""
LEFT_S = 120.0
"""How long what has nobody left may live on, in seconds."""
PATIENCE_S = 30.0
"""How much longer than the ceiling is waited, so that a number can be told, in seconds."""


def margin_s() -> float:
    """Returns what is added to a ceiling before it counts as missed, in seconds.

    Why: it is a few processes that are measured, and the machine may have others to run.
    """
    return min(5.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), 15.0)


def ranks(arena: Arena, cell: Cell) -> Result:
    """A rank, the coordinator or the node's stager is hit."""
    group = arena.ranks(cell.group)
    path, marks = _standing(arena, group)
    facts = group.run(victims.session_facts)[0]
    victim = cell.details.get("rank", 1)
    hits_rank = cell.participant == "rank"
    pid = group.pids[victim] if hits_rank else facts["pid"]
    if cell.details.get("asynchronous"):
        stager_pid = group.run(victims.stager_pid)[0]
        arena.note([stager_pid])
        pid = stager_pid if cell.participant == "stager" else pid
    arena.note([facts["pid"]])
    blow = Blow(cell.signal, (pid,), str(path), str(marks))
    victims.spring_trap(group, cell.trap, blow, rank=victim, actor=facts["actor"])
    lost = {victim} if hits_rank else set()

    def release() -> None:
        if cell.signal == signal.SIGSTOP:
            # Suppressed: who finds a stager frozen ends it.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    living = set(range(NUM_RANKS)) - lost
    seen = _played(group, cell, path, marks, victim, living, release)
    # One that thaws is told as well; one that was killed is not.
    named = [f"rank {victim}"] if hits_rank else [cell.participant]
    return _judged(arena.mend, cell, seen, Expected(NUM_RANKS, str(path), named, lost))


def node(arena: Arena, cell: Cell) -> Result:
    """The second node is hit, with the ranks on it, and the coordinator if it is there."""
    group = arena.ranks(cell.group)
    node_id = arena.node().node_id
    with_coordinator = cell.details.get("with_coordinator", False)
    session = arena.coordinator_on(node_id if with_coordinator else arena.head_id)
    group.run(victims.connect, session)
    path, marks = _standing(arena, group)
    facts = group.run(victims.session_facts)[0]
    arena.note([facts["pid"]])
    pids = arena.node_pids()
    lost = {rank for rank, pid in enumerate(group.pids) if pid in pids}
    blow = Blow(cell.signal, pids, str(path), str(marks))
    victims.spring_trap(group, cell.trap, blow, rank=min(lost), actor=facts["actor"])

    def release() -> None:
        if cell.signal == signal.SIGSTOP:
            # A node that comes back: it learns that nobody counts on it any more.
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            eventually(lambda: lost <= victims.told(marks).keys() or not lives(pids[0]), 10)
        arena.end_node()

    def shrunk() -> Any:
        # Fewer ranks load it as well, and the next cell needs a new node anyway.
        return arena.mend() if 0 in lost else arena.shrink()

    living = set(range(NUM_RANKS)) - lost
    at_once = cell.signal == signal.SIGKILL
    seen = _played(group, cell, path, marks, min(lost), living, release, at_once=at_once)
    named = [f"rank {rank}" for rank in lost] + (["coordinator"] if with_coordinator else [])
    if len(lost) != 2 or (facts["pid"] in pids) != with_coordinator:
        wrong = f"the node had ranks {lost} of {group.pids}, and pids {pids}; coordinator: {facts}"
        seen = replace(seen, trouble=(*seen.trouble, wrong))
    return _judged(shrunk, cell, seen, Expected(NUM_RANKS, str(path), named, lost))


def driver(arena: Arena, cell: Cell) -> Result:
    """The process that made the ranks is hit. Killed, it takes its ranks along; frozen, not."""
    path, marks = arena.new_place()
    order = {
        "path": str(path), "marks": str(marks), "phase": cell.phase, "signal": cell.signal,
        "trap": vars(cell.trap), "options": _options(cell), "how": _how(cell),
    }  # fmt: skip
    process = arena.start("-m", "tests.chaos.victims", arena.address, json.dumps(order))
    assert process.stdout is not None
    trouble: list[str] = []
    try:
        facts = json.loads(process.stdout.readline() or "{}")
        if not facts:
            return Result(False, None, "the driver did not start", ("the driver did not start",))
        arena.note([process.pid, *facts["ranks"], facts["coordinator"]])
        eventually(lambda: read_mark(marks), HIT_S)
        mark = read_mark(marks)
        ended_s = None
        if cell.signal == signal.SIGSTOP:
            eventually(lambda: len(victims.told(marks)) == NUM_RANKS, cell.ceiling_s + PATIENCE_S)
        elif eventually(lambda: not any(map(lives, facts["ranks"])), PATIENCE_S):
            ended_s = time.monotonic()
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()
    if not eventually(lambda: not any(map(lives, facts["ranks"])), LEFT_S):
        trouble.append(f"the ranks outlive their driver by {LEFT_S:g} s")
    if not eventually(lambda: not lives(facts["coordinator"]), LEFT_S):
        trouble.append(f"the coordinator outlives its ranks by {LEFT_S:g} s")
    told = victims.told(marks)
    if mark is not None and ended_s is not None:
        # Nobody is left to be told: the end of the ranks is what counts.
        told = {rank: Told(ended_s, None) for rank in range(NUM_RANKS)}
    seen = Seen(mark, told, frozenset(facts["before"]), tuple(trouble))
    group = arena.ranks(cell.group)
    killed = cell.signal == signal.SIGKILL
    steps = {1, 2} if killed and cell.phase != "loading" else ()
    result = _judged(lambda: group, cell, seen, Expected(NUM_RANKS, str(path), steps=steps))
    return replace(result, outcome="all ended") if killed else result


REPEAT = "ray_dcp.session.ray_calls:_pause"


def lost_calls(arena: Arena, cell: Cell) -> Result:
    """Half of the ranks' calls are lost, on the way there or back: they are repeated."""
    group = arena.ranks(cell.group)
    path, marks = _standing(arena, group)
    before = frozenset(os.listdir(path))
    group.run(count_calls, REPEAT)
    started_s = time.monotonic()
    group.run(victims.play, str(path), str(marks), cell.phase, {})
    repeats = group.run(counted, REPEAT)
    # Why the names afterwards: calls are lost in every phase, no moment stands out.
    mark = Mark(started_s, frozenset(os.listdir(path)), 0) if sum(repeats) else None
    seen = Seen(mark, victims.told(marks), before)
    steps = {1} if cell.phase == "loading" else {2}
    return _judged(lambda: group, cell, seen, Expected(NUM_RANKS, str(path), steps=steps))


# What all scenes share


def _options(cell: Cell) -> dict[str, float]:
    """Returns how soon a frozen participant is to be noticed."""
    if cell.signal != signal.SIGSTOP:
        return {}
    return {"heartbeat_timeout_s": FROZEN_S, **cell.details.get("options", {})}


def _how(cell: Cell) -> dict[str, bool]:
    """Returns whether it saves in the background."""
    return {"asynchronous": True} if cell.details.get("asynchronous") else {}


def _standing(arena: Arena, group: Any) -> tuple[Path, Path]:
    """Returns a place where step 1 stands, and where the marks go."""
    path, marks = arena.new_place()
    group.run(victims.save_full, str(path), 1)
    return path, marks


def _played(
    group: Any,
    cell: Cell,
    path: Path,
    marks: Path,
    victim: int,
    living: Collection[int],
    release: Callable[[], None],
    *,
    at_once: bool = False,
) -> Seen:
    """Runs the ranks into the trap; `release` is called when those that live were told."""
    before = frozenset(os.listdir(path))
    trouble: list[str] = []
    over = threading.Event()

    def watch() -> None:
        if eventually(lambda: read_mark(marks) or over.is_set(), HIT_S) and read_mark(marks):
            patience_s = 0.0 if at_once else cell.ceiling_s + PATIENCE_S
            eventually(lambda: set(living) <= victims.told(marks).keys(), patience_s)
            try:
                release()
            except Exception as error:
                trouble.append(f"release failed: {error!r}")

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        slow = {"slow": victim} if cell.details.get("slow") else {}
        arguments = (str(path), str(marks), cell.phase, _options(cell))
        group.run(victims.play, *arguments, **slow, **_how(cell))
    except CheckpointError as error:
        if read_mark(marks) is None:
            trouble.append(f"the ranks failed before the blow: {error}")
    finally:
        over.set()
        thread.join()
    return Seen(read_mark(marks), victims.told(marks), before, tuple(trouble))


def _judged(mend: Callable[[], Any], cell: Cell, seen: Seen, expected: Expected) -> Result:
    """Looks what stands, saves again, looks again, and says what came of it all."""
    path = Path(expected.path)
    trouble = list(seen.trouble)
    step = later = None
    try:
        group = mend()
        step = _step(group, path, trouble)
        group.run(save_sound, str(path), 3)
        later = _step(group, path, trouble)
    except (CheckpointError, AssertionError) as error:
        trouble.append(f"afterwards: {type(error).__name__}: {error}")
    seen = replace(seen, trouble=tuple(trouble), step=step, later=later)
    return judge(cell, seen, expected, margin_s())


def _step(group: Any, path: Path, trouble: list[str]) -> int:
    report = ray_dcp.verify(path)
    if not report.ok:
        trouble.append(f"damaged: {report.problems}")
    (step,) = set(group.run(step_that_loads, str(path)))
    return int(step)
