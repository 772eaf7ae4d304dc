"""Ranks that are threads of one process: sessions of one coordination, without Ray and clocks.

`run_as_ranks` runs calls of `ray_dcp.*` in a thread for each rank. `ThreadExchange` hands what
ranks read to each other, as ranks on Ray do.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import pytest

from ray_dcp import saving
from ray_dcp.commit_protocol.commands import step_of
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.load import SharedUnit
from ray_dcp.coordinator.tasks import perform
from ray_dcp.core import bounds
from ray_dcp.place.attempt_id import new_attempt
from ray_dcp.session.session import Session
from ray_dcp.session.transport import Presence, Transport
from tests.support.world import Shell

LIMIT_S = 300.0
"""How long a thread may wait for another one, in seconds."""


class DeadRankError(BaseException):
    """The rank died: no code of ours may catch it."""


class ThreadTransport(Transport):
    """The transport of a rank that is a thread.

    Args:
        shared: What the ranks share.
        rank: This one.
        dies: Whether it dies instead of sending a request; `after` its reply if the second
            argument is true.
    """

    def __init__(self, shared, rank, world_size, dies=lambda *_: False):
        super().__init__("threads", rank, world_size, who="the coordination", node="")
        self._shared, self._dies = shared, dies

    def call(self, request, silence_s, bound):
        if self._dies(request, False):
            self._shared.lose(request)
        reply = self._shared.call(request)
        if self._dies(request, True):
            self._shared.lose(request)
        return reply

    def ask(self, method, *arguments, bound):
        """Nothing can be cancelled."""
        return False

    def presence(self):
        return Unheard()

    def close(self):
        """Holds nothing."""


class Unheard(Presence):
    """The calls of a rank to which nobody listens."""

    add = remove = leave = lambda self, *_: None


class Shared:
    """The coordination of ranks that are threads; it has no clock."""

    def __init__(self):
        self._shell = Shell(Coordination(epoch=1, new_attempt=new_attempt), perform)
        self._changed = threading.Condition()
        self._replies, self._waiting = {}, set()

    def call(self, request):
        at = request.key, request.rank, step_of(request)
        with self._changed:
            self._waiting.add(at)
            refused = self._shell.receive(request)
            self._work_off()
            found = self._changed.wait_for(lambda: refused or at in self._replies, LIMIT_S)
            assert found, f"{at} hangs"
            self._waiting.discard(at)
            return self._replies.pop(at, refused)

    def wait_for(self, *ranks):
        """Returns when just these ranks wait for an answer."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: {at[1] for at in self._waiting - self._replies.keys()} == {*ranks}, LIMIT_S
            )

    def expire(self):
        """Lets the deadline pass for which ranks wait."""
        with self._changed:
            assert self._shell.expire()
            self._work_off()

    def lose(self, request):
        with self._changed:
            self._shell.lose(request)
            self._work_off()
        raise DeadRankError

    def _work_off(self):
        while self._shell.tasks:
            self._shell.perform(0)
        answers, self._shell.answers = self._shell.answers, []
        for one in answers:
            self._replies[(one.key, *one.ranks, one.step)] = one.reply
        self._changed.notify_all()


def run_as_ranks(work: Callable[[int], object], world_size: int, dies=lambda *_: False) -> list:
    """Runs work in a thread for each rank; returns what each returned or raised.

    Args:
        work: Of a rank; what it calls of ray_dcp finds the session of its thread.
        world_size: Number of ranks.
        dies: From rank, request and whether its reply came to whether the rank dies then.
    """
    shared, here, ended = Shared(), threading.local(), [None] * world_size

    def run(rank):
        here.session = Session(
            ThreadTransport(
                shared, rank, world_size, lambda request, after: dies(rank, request, after)
            )
        )
        try:
            ended[rank] = work(rank)
        except BaseException as error:
            ended[rank] = error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            saving, "current_session",
            lambda group, alone, *_: None if alone else getattr(here, "session", None),
        )  # fmt: skip
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
    return ended


# --- Shared reads among threads -------------------------------------------------------------------


class Board:
    """What all ranks of one load share.

    Attributes:
        units: By number.
        most: The most units that each reader ever had offered at a time.
    """

    def __init__(self) -> None:
        self.units: defaultdict[int, SharedUnit] = defaultdict(SharedUnit)
        self.changed = threading.Condition()
        self.most: Counter[int] = Counter()

    def states(self) -> list[str]:
        """Returns the state of each unit, by number."""
        return [unit.state for _, unit in sorted(self.units.items())]


class ThreadExchange:
    """The transport of shared reads for one rank; implements `UnitExchange`.

    Args:
        board: What the ranks of the load share.
        rank: This rank.
        refuses: Whether a unit that this rank has read can't be handed on.
        loses: Whether a unit that was handed on can't be had.
        most_units: Most units that it offers at a time.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        refuses: Callable[[int], bool] = lambda _: False,
        loses: Callable[[int], bool] = lambda _: False,
        most_units: int = 100,
    ) -> None:
        self._board, self._rank = board, rank
        self._refuses, self._loses = refuses, loses
        self._most_units = most_units
        self._given: set[int] = set()
        self._used: set[int] = set()
        self._left = False

    def offer(self, unit: int, takers: int, data: memoryview) -> memoryview | None:
        if self._refuses(unit):
            return None
        held, board = bytes(data), self._board
        with board.changed:
            self._given.add(unit)
            board.most[self._rank] = max(board.most[self._rank], len(self._given))
            board.units[unit].give(held, takers)
            board.changed.notify_all()
        return memoryview(held)

    def has_room(self) -> bool:
        board = self._board

        def is_so() -> bool:
            gone = {unit for unit in self._given if board.units[unit].state == "gone"}
            self._given -= gone & self._used
            return self._left or len(self._given) < self._most_units

        with board.changed:
            return board.changed.wait_for(is_so, bounds.SHARE_TIMEOUT_S) and not self._left

    def use(self, unit: int) -> None:
        with self._board.changed:
            self._used.add(unit)
            self._board.changed.notify_all()

    def decline(self, units: Sequence[int]) -> None:
        with self._board.changed:
            for unit in units:
                if self._board.units[unit].state == "open":
                    self._board.units[unit].withdraw()
            self._board.changed.notify_all()

    def take(self, unit: int, reader: int) -> memoryview | None:
        if self._loses(unit):
            return self.skip([unit])
        board = self._board
        with board.changed:
            came = board.changed.wait_for(
                lambda: self._left or board.units[unit].state != "open", LIMIT_S
            )
            assert came, f"nobody offers unit {unit}"
            found = board.units[unit].take(self._rank)
            board.changed.notify_all()
        return None if found is None else memoryview(found)

    def skip(self, units: Sequence[int]) -> None:
        with self._board.changed:
            for unit in units:
                self._board.units[unit].skip(self._rank)
            self._board.changed.notify_all()

    def leave(self) -> None:
        with self._board.changed:
            self._left = True
            self._board.changed.notify_all()
