"""When a gatherer sends on what the ranks of its group say. Pure, over a clock that is handed in.

All ranks of a group come to each step, but for those that are not asked, have died or are late.
So a message is complete when the last one comes, and goes at once. A step that stays incomplete is
told as far as it is, so that the coordinator can name who is missing; less and less often.

A gatherer holds nothing that is not held elsewhere: a rank whose gatherer dies or stays silent says
the same to the coordinator itself, which knows a request that comes twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ray_dcp.errors import InvalidRequestError
from ray_dcp.protocol.commands import step_of
from ray_dcp.protocol.messages import (
    LoadDone,
    LoadJoin,
    LoadReady,
    OpKey,
    Request,
    SaveJoin,
    SaveReceipt,
    SaveStaged,
    SendItems,
)
from ray_dcp.protocol.together import Together, Told, together

__all__ = ["MOST_GATHERERS", "Gathering", "group_of", "is_gathered"]

MOST_GATHERERS = 64
"""How many messages a coordinator hears in a phase. A job of no more ranks needs no gatherers."""

FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 4.0
"""How long a message waits for the ranks that are missing, in seconds: twice as long each time."""

_STEPS_KEPT = 256


def group_of(rank: int, world_size: int, most: int = MOST_GATHERERS) -> range | None:
    """Returns the ranks whose gatherer a rank uses; None where it calls the coordinator itself.

    Ranks with neighbouring numbers, which are on one node or few.

    Args:
        rank: Which.
        world_size: Number of ranks.
        most: Number of gatherers.

    Raises:
        InvalidRequestError: There is no such rank.

    Example:
        >>> group_of(7, 10, most=4), group_of(7, 4096), group_of(7, 64)
        (range(6, 9), range(0, 64), None)
    """
    if not 0 <= rank < world_size:
        raise InvalidRequestError(
            f"expected a rank from 0 to {world_size - 1}, found {rank}", rank=rank
        )
    if world_size <= most:
        return None
    size = -(-world_size // most)
    start = rank - rank % size
    return range(start, min(start + size, world_size))


def is_gathered(request: Request) -> bool:
    """Whether a request goes by way of a gatherer: one that every rank makes at about one time."""
    steps = SaveJoin | SaveReceipt | SaveStaged | LoadJoin | LoadReady | LoadDone
    failed = getattr(request, "error", None) is not None
    return isinstance(request, steps) and not failed


@dataclass
class _Step:
    """What came of one step, and is not sent yet."""

    requests: dict[int, Request] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)
    due_s: float = 0.0
    wait_s: float = FIRST_WAIT_S


class Gathering:
    """What one gatherer has heard and not sent yet.

    Args:
        ranks: Of its group.
        clock: Seconds that never go back.

    Example:
        >>> from ray_dcp.options import LoadOptions
        >>> from ray_dcp.protocol.messages import Target
        >>> def join(rank):
        ...     return LoadJoin(OpKey("run", 0), rank, 128, Target("memory://x"), LoadOptions())
        >>> gathering = Gathering(range(2, 4), lambda: 0.0)
        >>> gathering.take(join(3))
        []
        >>> [message.ranks for message in gathering.take(join(2))]
        [(2, 3)]
    """

    def __init__(self, ranks: Iterable[int], clock: Callable[[], float]) -> None:
        self._ranks = frozenset(ranks)
        self._clock = clock
        self._steps: dict[tuple[OpKey, str], _Step] = {}
        self._asked: dict[tuple[OpKey, str], set[int]] = {}

    def take(self, request: Request) -> list[Together]:
        """Takes what a rank says; returns what is to be sent now."""
        at = (request.key, step_of(request))
        step = self._steps.get(at)
        if step is None:
            self._trim()
            step = self._steps[at] = _Step()
        if not step.requests:
            step.due_s = self._clock() + step.wait_s
        step.requests[request.rank] = request
        awaited = self._asked.get(at, self._ranks)
        if awaited <= step.requests.keys() | step.sent:
            return self._sent(step)
        return []

    def due(self) -> list[Together]:
        """Returns what is to be sent although ranks are missing. To be called at `next_s`."""
        now_s = self._clock()
        late = [step for step in self._steps.values() if step.requests and step.due_s <= now_s]
        return [message for step in late for message in self._sent(step)]

    @property
    def next_s(self) -> float | None:
        """When, by the clock, something is to be sent that stays incomplete."""
        return min((step.due_s for step in self._steps.values() if step.requests), default=None)

    def told(self, message: Together, told: Told) -> None:
        """Takes what ranks are told: those that are asked for more will come again, no others."""
        if message.step.partition(" ")[0] != "SaveJoin":
            return
        for ranks, reply in told.replies:
            if isinstance(reply, SendItems):
                asked = int(message.step.partition(" ")[2] or 0) + 1
                self._asked.setdefault((message.key, f"SaveJoin {asked}"), set()).update(ranks)

    def _sent(self, step: _Step) -> list[Together]:
        messages = [together(step.requests.values())]
        step.sent.update(step.requests)
        step.requests = {}
        step.wait_s = min(2 * step.wait_s, LONGEST_WAIT_S)
        return messages

    def _trim(self) -> None:
        for steps in (self._steps, self._asked):
            for at in [*steps][:-_STEPS_KEPT]:
                if steps is self._asked or not self._steps[at].requests:
                    del steps[at]
