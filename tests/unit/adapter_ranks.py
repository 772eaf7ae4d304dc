"""Plays the ranks of generators over `Exchange` against the real protocol, in one thread."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_dcp.protocol.commands import Answer
from ray_dcp.protocol.coordination import Coordination
from ray_dcp.protocol.messages import Exchange, OpKey, Refused
from ray_dcp.torch_adapter.collective import Group


def keys(session: str = "test") -> Callable[[], OpKey]:
    """Returns what names the operations of one rank."""
    seq = itertools.count()
    return lambda: OpKey(session, next(seq))


@dataclass(frozen=True)
class OneOf:
    """A session of one of several ranks."""

    rank: int = 0
    world_size: int = 1
    next_key: Callable[[], OpKey] = field(default_factory=keys)


def group(
    rank: int = 0, world_size: int = 1, *, timeout_s: float = 60.0, coordinator_rank: int = 0
) -> Group:
    """Returns a rank's view of all."""
    return Group(OneOf(rank, world_size), timeout_s, "test", None, coordinator_rank)


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    value: Any = None
    error: BaseException | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


def run(
    ranks: Sequence[Generator[Any, Any, Any]],
    *,
    dies: Callable[[Exchange], bool] = lambda _: False,
    seen: list[Exchange] | None = None,
) -> list[Ended]:
    """Runs every rank to its end; a rank that `dies` at a request never goes on.

    Messages are pickled on the way, as between processes.
    """
    coordination = Coordination(epoch=1, new_attempt=lambda: "attempt-1")
    ends = [Ended(error=AssertionError("never ended")) for _ in ranks]
    waiting: dict[tuple[OpKey, int], int] = {}
    ready: list[tuple[int, Any]] = [(index, None) for index in range(len(ranks))]
    while ready or waiting:
        if not ready:
            key = min((key for key, _ in waiting), key=lambda key: (key.seq, key.step))
            commands = coordination.expired(key, "joining")
            assert commands, f"nothing will happen, and {waiting} wait"
        else:
            index, reply = ready.pop(0)
            try:
                request = ranks[index].send(reply)
            except StopIteration as end:
                ends[index] = Ended(value=end.value)
                continue
            except BaseException as error:
                ends[index] = Ended(error=error)
                continue
            assert isinstance(request, Exchange)
            if seen is not None:
                seen.append(request)
            if dies(request):
                continue
            waiting[request.key, request.rank] = index
            commands = coordination.receive(pickle.loads(pickle.dumps(request)))
        for command in commands:
            if isinstance(command, Answer):
                who = waiting.pop((command.key, command.rank))
                reply = pickle.loads(pickle.dumps(command.reply))
                assert not isinstance(reply, Refused) or reply.error is not command.reply.error
                ready.append((who, reply))
    return ends
