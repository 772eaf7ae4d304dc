"""The chaos matrix: every cell that is played, and why the others are not.

A new participant or phase only adds entries to `CELLS`.
"""

from __future__ import annotations

from typing import Any

from tests.chaos import scenes
from tests.chaos.arena import DROPS
from tests.chaos.cells import SIGNALS, Cell, Trap

KILLED_S = 5.0
"""How soon the death of a process must be told, in seconds."""
NODE_S = 20.0
"""How soon that of a node must be told: Ray itself needs up to 12 s to see it die."""
FREEZE_S = scenes.FROZEN_S + 2.0
"""How soon a frozen process must be told, with the heartbeat timeout of these cells."""

CAPTURE = Trap("rank", "ray_dcp.saving:capture")
WRITE = Trap("rank", "ray_dcp.store.local:_pwrite", call=2)
BEAT = Trap("rank", "ray_dcp.session.heartbeat:Heartbeat", call=2)
STAGE = Trap("rank", "ray_dcp.stage.link:window_parts")
WRITE_STAGED = Trap("stager", "ray_dcp.store.local:_pwrite", call=2)
READ = Trap("rank", "ray_dcp.io.reader:read_stored", call=2)


def task(name: str, *, after: bool = False) -> Trap:
    """Returns a trap at a task of the coordinator: before it is begun, or after it is done."""
    return Trap("coordinator", "ray_dcp.coordinator.loop:perform", about=name, after=after)


COMMIT = task("WriteTable")

CELLS: list[Cell] = []
NOT_PLAYED = {
    "stager planning": "a stager takes part only after the plan",
    "stager loading": "no stager takes part in a load",
}
"""Why no signal is sent to whom in which phase."""

CI = {
    "SIGKILL rank planning",
    "SIGKILL stager staging",
    "SIGKILL stager writing",
    "SIGKILL driver writing",
    "SIGKILL node committing (with the coordinator)",
    "SIGKILL coordinator loading (while it opens)",
    "SIGSTOP rank writing",
}
"""What `pytest` plays: a kill of each participant and in each phase, and one that is frozen."""


def add(blow: str, who: str, phase: str, trap: Trap | None, variant: str = "", **more: Any) -> None:
    scene = {"driver": scenes.driver, "node": scenes.node}.get(who, scenes.ranks)
    ceiling_s = FREEZE_S if blow == "SIGSTOP" else NODE_S if who == "node" else KILLED_S
    group = "nodes" if who == "node" else "head"
    CELLS.append(Cell(blow, who, phase, scene, ceiling_s, trap, variant, group, more))


def coordinator_cells(blow: str) -> None:
    add(blow, "coordinator", "planning", task("ReadRecords"))
    add(blow, "coordinator", "planning", CAPTURE, "while ranks join")
    add(blow, "coordinator", "writing", WRITE)
    add(blow, "coordinator", "committing", COMMIT, "before the table")
    add(blow, "coordinator", "committing", task("CreateRecord"), "before the record")
    add(blow, "coordinator", "committing", task("CreateRecord", after=True), "after the record")
    add(blow, "coordinator", "committing", task("PublishMetadata", after=True), "after .metadata")
    add(blow, "coordinator", "loading", task("ReadCheckpoint"), "while it opens")
    add(blow, "coordinator", "loading", READ)


# Who was never heard in a save, and freezes before it joins, may as well be somewhere else: this
# is for the deadline of the plans.
UNHEARD = {"options": {"plan_timeout_s": scenes.FROZEN_S}}

for _blow in SIGNALS:
    for _who in ("rank", "driver", "node"):
        add(_blow, _who, "planning", CAPTURE, **(UNHEARD if _who != "driver" else {}))
        add(_blow, _who, "writing", WRITE)
        add(_blow, _who, "committing", COMMIT)
        add(_blow, _who, "loading", READ)
    add(_blow, "rank", "planning", CAPTURE, "rank 0", rank=0, **UNHEARD)
    add(_blow, "rank", "loading", READ, "rank 0", rank=0)
    coordinator_cells(_blow)
    for _phase, _trap in [("writing", WRITE), ("committing", COMMIT), ("loading", READ)]:
        add(_blow, "node", _phase, _trap, "with the coordinator", with_coordinator=True)

add("SIGSTOP", "rank", "planning", BEAT, "while it beats", slow=True)
add("SIGSTOP", "node", "planning", BEAT, "while they beat", slow=True)
add("SIGKILL", "stager", "staging", STAGE, asynchronous=True)
for _blow in SIGNALS:
    add(_blow, "stager", "writing", WRITE_STAGED, asynchronous=True)
    add(_blow, "stager", "committing", COMMIT, asynchronous=True)
    for _who in ("rank", "coordinator", "driver", "node"):
        add(_blow, _who, "staging", STAGE, asynchronous=True)
add("SIGSTOP", "stager", "staging", STAGE, asynchronous=True)

for _drop in DROPS:
    for _phase in ("committing", "loading"):
        CELLS.append(
            Cell(f"lost {_drop}", "coordinator", _phase, scenes.lost_calls, 30.0, group=_drop)
        )
