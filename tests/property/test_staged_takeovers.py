"""Staged saves whose stagers die and lag, and whose coordinator dies, at any time: none gets stuck.

What would end only at its deadline counts as stuck: there are no deadlines here."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ray_dcp.core.values import RankPlan
from ray_dcp.errors import CheckpointError
from ray_dcp.protocol.commands import (
    Answer,
    Finished,
    OutcomeRead,
    Perform,
    Published,
    RecordCreated,
    step_of,
)
from ray_dcp.protocol.coordination import Coordination
from ray_dcp.protocol.messages import (
    Ack,
    PartsHeld,
    PartsWritten,
    Reply,
    Request,
    SaveStaged,
    TakeOver,
)
from tests.protocol_play import BUILT, KEY, NOTHING, join_of, planned, receipt_file
from tests.unit.test_protocol_staged import file_plan

# --- One asynchronous save, in any order of events ------------------------------------------------


RESULTS = {
    "ReadRecords": NOTHING,
    "BuildCommit": BUILT,
    "CreateRecord": RecordCreated(1),
    "CreateAbort": RecordCreated(1),
    "PublishMetadata": Published(),
}
"""By the name of a task; others are `Finished`."""


@dataclass(eq=False)
class Stager:
    """One process of a node's stager."""

    name: str
    is_dead: bool = False
    shares: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """By rank and incarnation: the files that are to be written of it."""
    helped: set[tuple[int, int]] = field(default_factory=set)
    """Of these the ones in which it helps another."""
    written: dict[int, PartsWritten] = field(default_factory=dict)
    plan: bytes | None = None


@dataclass(eq=False)
class Rank:
    """A rank: it hands its bytes in, then waits for the outcome, and hands them over if asked."""

    number: int
    node: int
    holder: Stager | None = None
    incarnation: int = 0
    said: Request | None = None
    """The call that it is in."""
    told: PartsHeld | None = None
    """What it said last of who holds its bytes."""
    asked: TakeOver | None = None
    outcome: Reply | None = None
    is_dead: bool = False
    takeovers: int = 0


class StagedWorld:
    """A save that is planned, and whose bytes are to be staged and written.

    Args:
        nodes: Of each rank.
        files: Of each rank.
    """

    def __init__(self, nodes: Sequence[int], files: Sequence[set[int]]) -> None:
        self.files = [set(own) for own in files]
        self.ranks = [Rank(number, node) for number, node in enumerate(nodes)]
        self.stagers = [Stager(f"{node}#0") for node in range(max(nodes) + 1)]
        self.others: list[Stager] = []
        self.epoch = 0
        self.record: OutcomeRead = OutcomeRead()
        """What the storage says of the attempt."""
        self.kept: tuple[list[Stager], list[Stager]] = ([], [])
        self.holders: list[Stager] = []
        self.asked: list[Stager] | None = None
        self._begin_coordinator()
        for rank in range(len(nodes)):
            self.send(join_of(rank, len(nodes), staged=True))
        parts = tuple(
            RankPlan(rank, "torch_save", tuple(map(file_plan, sorted(own))))
            for rank, own in enumerate(self.files)
        )
        self.plan = replace(planned(len(nodes)), parts=parts)
        self.work()

    # The coordinator

    def _begin_coordinator(self) -> None:
        self.epoch += 1
        self.coordination = Coordination(epoch=self.epoch, new_attempt=lambda: "a1")
        self.todo: list[Perform] = []
        self.armed = False

    def send(self, request: Request) -> None:
        commands = self.coordination.receive(pickle.loads(pickle.dumps(request)))
        held = request.held if isinstance(request, SaveStaged) else request
        if isinstance(held, PartsHeld) and self.coordination.staged_plan(KEY) is not None:
            stager = self.stager(held.stager)
            if stager not in self.holders:
                self.holders.append(stager)
                if self.asked is not None and stager not in self.asked:
                    self._ask(stager)
        self._take(commands)

    def _take(self, commands) -> None:
        for command in commands:
            match command:
                case Answer():
                    self._answer(command.ranks, command.step, command.reply)
                case Perform():
                    self.todo.append(command)

    def _answer(self, ranks, step: str, reply: Reply) -> None:
        for number in ranks:
            rank = self.ranks[number]
            if rank.is_dead or rank.said is None or step_of(rank.said) != step:
                continue
            said, rank.said = rank.said, None
            if isinstance(said, PartsHeld) and isinstance(reply, Ack):
                self.keep()  # before it is told
            if not isinstance(said, SaveStaged):
                continue
            if isinstance(reply, TakeOver):
                rank.asked = reply
                rank.takeovers += 1
            else:
                rank.outcome = reply

    def work(self) -> None:
        """Ends all tasks of the coordinator."""
        while self.todo:
            todo = self.todo.pop(0)
            name = type(todo.task).__name__
            result = {"MakePlan": self.plan, "ReadOutcome": self.record, **RESULTS}.get(
                name, Finished()
            )
            if name in ("CreateRecord", "CreateAbort"):
                self.record = OutcomeRead(1, b"manifest" if name == "CreateRecord" else b"")
            self._take(self.coordination.performed(todo.key, todo.task, result))

    def keep(self) -> None:
        """Puts the plan where the next coordinator finds it, with two of those that hold bytes."""
        planned_save = self.coordination.staged_plan(KEY)
        if planned_save is None or not self.holders:
            return
        copies = [one for one in self.kept[0] if one in self.holders]
        copies += [one for one in self.holders if one not in copies and not one.is_dead]
        for stager in copies[:2]:
            stager.plan = pickle.dumps(planned_save)
        self.kept = (copies[:2], list(self.holders))

    def restart(self) -> bool:
        """Another coordinator comes; returns whether it could take the save up, if need be.

        Also where the one before had ended it, and could not forget its plan any more.
        """
        copies, holders = self.kept
        plans = [one.plan for one in copies if not one.is_dead and one.plan is not None]
        if not plans:
            return self.is_over
        self._begin_coordinator()
        self.holders, self.asked = [], holders
        self._take(self.coordination.resume(pickle.loads(plans[0])))
        for stager in holders:
            self._ask(stager)
        for rank in self.ranks:
            if rank.said is not None and not rank.is_dead:
                self.send(rank.said)
        return True

    def _ask(self, stager: Stager) -> None:
        """A coordinator that took the save up hears what a stager had told the one before."""
        if stager.is_dead:
            return
        # Of the epoch in which it was planned: that is in the names of shares.
        for number, incarnation in stager.shares:
            helps = (number, incarnation) in stager.helped
            self.send(PartsHeld(KEY, number, "a1", 1, stager.name, incarnation, helps))
        for report in stager.written.values():
            self.send(report)

    def look(self) -> None:
        """The coordinator asks the stagers that it needs whether they live."""
        for name in self.coordination.stagers():
            if self.stager(name).is_dead:
                self._take(self.coordination.stager_lost(name, "it died"))

    def lag(self, number: int) -> None:
        """The coordinator sees that a rank's stager is slow."""
        self._take(self.coordination.reassign(KEY, number, "it is slow"))

    # Ranks

    def step(self, number: int, *, helps: bool = True) -> bool:
        """A rank goes on by one call; returns False when it has to wait.

        Args:
            number: Which.
            helps: Whether a stager that only helps takes its bytes.
        """
        rank = self.ranks[number]
        if rank.is_dead or rank.outcome is not None or rank.said is not None:
            return False
        if rank.holder is None:
            self._hand(rank, self._own_stager(rank), 0, self.files[number])
        elif rank.asked is not None:
            self._hand_over(rank, rank.asked, helps)
        else:
            staged = SaveStaged(KEY, number, "a1", 1, rank.incarnation, held=rank.told)
            self._call(rank, staged)
        return True

    def _own_stager(self, rank: Rank) -> Stager:
        stager = self.stagers[rank.node]
        return self._replaced(rank.node) if stager.is_dead else stager

    def _replaced(self, node: int) -> Stager:
        old = self.stagers[node]
        old.is_dead = True
        self.others.append(old)
        count = int(old.name.partition("#")[2]) + 1
        self.stagers[node] = Stager(f"{node}#{count}")
        return self.stagers[node]

    def _hand_over(self, rank: Rank, asked: TakeOver, helps: bool) -> None:
        rank.asked, rank.incarnation = None, asked.incarnation
        files = set(asked.files)
        if asked.lost:
            # Its own node's: who is said to be lost is ended first, a helper's place is not.
            own = self.stagers[rank.node]
            own = self._replaced(rank.node) if own is rank.holder else self._own_stager(rank)
            self._hand(rank, own, asked.incarnation, files)
            return
        found = [self.stager(name) for name in asked.helpers]
        found = [found[(rank.number + turn) % len(found)] for turn in range(len(found))]
        if helps and found and not found[0].is_dead:
            self._hand(rank, found[0], asked.incarnation, files, helps=True)

    def _hand(
        self, rank: Rank, stager: Stager, incarnation: int, files: set[int], *, helps: bool = False
    ) -> None:
        assert (rank.number, incarnation) not in stager.shares, "handed over twice"
        stager.shares[rank.number, incarnation] = set(files)
        stager.helped |= {(rank.number, incarnation)} if helps else set()
        rank.holder = stager
        rank.told = PartsHeld(KEY, rank.number, "a1", 1, stager.name, incarnation, helps)
        self._call(rank, rank.told)

    def _call(self, rank: Rank, request: Request) -> None:
        rank.said = request
        try:
            self.send(request)
        except CheckpointError as error:
            rank.said, rank.outcome = None, error

    def kill_rank(self, number: int) -> None:
        rank = self.ranks[number]
        rank.is_dead = True
        self._take(self.coordination.lost(KEY.session, [number], "killed"))

    # Stagers

    def stager(self, name: str) -> Stager:
        return next(one for one in (*self.stagers, *self.others) if one.name == name)

    def kill_stager(self, node: int) -> None:
        self.stagers[node].is_dead = True

    def write(self, node: int) -> bool:
        """A stager writes one of its files; returns False when there is none."""
        stager = self.stagers[node]
        if stager.is_dead:
            return False
        for file in sorted({file for own in stager.shares.values() for file in own}):
            if file in stager.written:
                continue
            rank, newest = max(name for name, own in stager.shares.items() if file in own)
            receipt = receipt_file(file)
            report = PartsWritten(KEY, rank, "a1", 1, stager.name, newest, (receipt,))
            stager.written[file] = report
            try:
                self.send(report)
            except CheckpointError:
                return True  # nobody needs it any more
            return True
        return False

    # The end

    @property
    def is_over(self) -> bool:
        return self.coordination.outcome(KEY) is not None

    def settle(self) -> None:
        """Lets all go on that can, until nothing happens any more."""
        for _ in range(100):
            self.work()
            self.look()
            stepped = [self.step(rank.number) for rank in self.ranks]
            written = [self.write(node) for node in range(len(self.stagers))]
            if not any(stepped) and not any(written) and not self.todo:
                return
        raise AssertionError(f"it never ends: {self.ranks}")

    @property
    def is_unprotected(self) -> bool:
        """Nobody was told that it holds bytes, or each stager that had the plan has died."""
        copies, _ = self.kept
        return all(stager.is_dead for stager in copies)

    @property
    def committed(self) -> bool:
        return bool(self.record.record)


# --- Histories ------------------------------------------------------------------------------------


NODES = [0, 0, 1, 1, 2]
LAYOUTS = {
    "own": [{0}, {1}, {2}, {3}, {4}],
    "several": [{0, 1}, {2}, {3}, {4}, set()],
}
RANKS, STAGERS = st.integers(0, 4), st.integers(0, 2)

events = st.one_of(
    st.tuples(st.just("step"), RANKS, st.booleans()),
    st.tuples(st.just("step"), RANKS, st.booleans()),
    st.tuples(st.just("step"), RANKS, st.booleans()),
    st.tuples(st.just("write"), STAGERS),
    st.tuples(st.just("lag"), RANKS),
    st.tuples(st.just("look")),
    st.tuples(st.just("kill stager"), STAGERS),
    st.tuples(st.just("restart")),
)


def play(world: StagedWorld, steps) -> bool:
    """Plays events; returns False when a coordinator could not take the save up."""
    for what, *how in steps:
        match what:
            case "step":
                world.step(how[0], helps=how[1])
            case "write":
                world.write(how[0])
            case "lag":
                world.lag(how[0])
            case "look":
                world.look()
            case "kill stager":
                world.kill_stager(how[0])
            case "kill rank":
                world.kill_rank(how[0])
            case "restart":
                if not world.restart():
                    return False
    return True


@settings(max_examples=240, deadline=None)
@given(layout=st.sampled_from(sorted(LAYOUTS)), steps=st.lists(events, max_size=50))
def test_while_all_ranks_live_the_save_is_committed(layout, steps):
    world = StagedWorld(NODES, LAYOUTS[layout])
    if not play(world, steps):
        event("nobody had the plan")
        assert world.is_unprotected
        return
    world.settle()
    event(f"takeovers {min(3, sum(rank.takeovers for rank in world.ranks))}, epoch {world.epoch}")
    assert world.committed
    assert {type(rank.outcome).__name__ for rank in world.ranks} == {"SaveOutcome"}


@settings(max_examples=160, deadline=None)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    steps=st.lists(st.one_of(events, st.tuples(st.just("kill rank"), RANKS)), max_size=50),
)
def test_when_ranks_die_too_it_ends_one_way_for_all(layout, steps):
    world = StagedWorld(NODES, LAYOUTS[layout])
    if not play(world, steps):
        event("nobody had the plan")
        return
    world.settle()
    event(f"committed {world.committed}, epoch {world.epoch}")
    dead = [rank for rank in world.ranks if rank.is_dead]
    assert world.committed or dead
    told = {type(rank.outcome).__name__ for rank in world.ranks if not rank.is_dead}
    assert len(told) <= 1
    assert (told == {"SaveOutcome"}) == (world.committed and len(dead) < len(world.ranks))


STORIES = {
    "a helper that takes nothing, while the stager dies": (
        "own",
        [("lag", 0), ("kill stager", 0), ("look",), ("step", 0, False)],
    ),
    "one of two ranks finds no helper, then the stager dies": (
        "own",
        [("lag", 0), ("step", 0, True), ("step", 1, False), ("kill stager", 0)],
    ),
    "a coordinator that knows only of the helper": (
        "own",
        [("lag", 0), ("step", 0, True), ("step", 1, False), ("kill stager", 0), ("restart",)],
    ),
    "a coordinator that comes between the receipts": (
        "own", [("write", 0), ("restart",), ("write", 1)],
    ),
    "a coordinator that comes before the receipts, and one after": (
        "own", [("restart",), ("write", 1), ("restart",)],
    ),
    "a helper that dies with one of two ranks' bytes": (
        "own",
        [("lag", 0), ("step", 0, True), ("step", 1, False), ("kill stager", 2), ("look",)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_a_save_goes_on_after(story):
    layout, steps = STORIES[story]
    world = StagedWorld(NODES, LAYOUTS[layout])
    # Everybody has handed in and waits; who could help is done.
    for rank in range(len(NODES)):
        world.step(rank)
        world.step(rank)
    world.write(2)
    assert play(world, steps)
    world.settle()
    assert world.committed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_and_the_coordinator_may_die_once_all_is_staged(layout):
    world = StagedWorld(NODES, LAYOUTS[layout])
    for rank in range(len(NODES)):
        world.step(rank)
    for rank in range(len(NODES)):
        world.ranks[rank].is_dead = True
    assert world.restart()
    for rank in range(len(NODES)):
        world.kill_rank(rank)
    world.settle()
    assert world.committed


@pytest.mark.parametrize("ends", ["committed", "aborted"])
def test_a_coordinator_that_dies_right_after_the_end_leaves_nothing_to_wait_for(ends):
    world = StagedWorld(NODES, LAYOUTS["own"])
    for rank in range(len(NODES)):
        world.step(rank)
    if ends == "aborted":
        world.kill_stager(2)
        world.kill_rank(4)
    world.settle()
    assert world.committed == (ends == "committed")
    assert world.restart()
    world.work()
    assert world.coordination.active == ()
