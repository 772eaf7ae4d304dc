"""Ranks that save again and again through one coordination, and what they say meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from ray_dcp.commit_protocol.commands import MakePlan
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.messages import SaveAgain, SaveJoin, SendItems
from ray_dcp.errors import CheckpointError
from ray_dcp.options import SaveOptions
from ray_dcp.runtime.rank_save import PlanMemory
from ray_dcp.runtime.tasks import new_attempt, perform
from tests.crash.array_states import ArrayCapture
from tests.crash.ranks import save_ranks
from tests.inline_ranks import run_ranks


class Warm:
    """A session of ranks.

    Attributes:
        joins: Of the last save.
        replies: To them.
        plans_made: In the last save.
        nodes: Names of the nodes that the ranks are on.
        staged: Whether stagers write what they save.
    """

    def __init__(self, world_size: int, url: str) -> None:
        self.url = url
        self.staged = False
        self.numbers = count()
        self.restart(world_size)
        self.restart_coordinator()

    def restart(self, world_size: int) -> None:
        """Begins with other processes."""
        self.world_size = world_size
        self.memories = [PlanMemory() for _ in range(world_size)]
        self.nodes = [""] * world_size

    def restart_coordinator(self) -> None:
        self.coordination = Coordination(epoch=next(self.numbers) + 1, new_attempt=new_attempt)

    def save(self, states, *, options=None, capture=ArrayCapture, choose=None, fate=None, url=None):
        """Saves; returns what each rank was told. `states`: one of all ranks, or one each."""
        states = states if isinstance(states, list) else [states] * self.world_size
        self.joins, self.replies, self.plans_made = [], [], 0
        ranks = save_ranks(
            {}, self.world_size, url or self.url, session="warm", seq=next(self.numbers),
            options=options or SaveOptions(num_threads=1), states=states, capture=capture,
            staged=self.staged, nodes=self.nodes, memories=self.memories,
        )  # fmt: skip
        ranks = [self.listened(rank) for rank in ranks]
        return run_ranks(
            ranks, performer=self.perform, coordination=self.coordination, choose=choose, fate=fate
        )

    def listened(self, steps):
        request = next(steps)
        while True:
            try:
                if isinstance(request, SaveJoin):
                    self.joins.append(request)
                try:
                    reply = yield request
                except CheckpointError as error:
                    request = steps.throw(error)
                    continue
                if isinstance(reply, SaveAgain | SendItems):
                    self.replies.append(reply)
                request = steps.send(reply)
            except StopIteration as end:
                return end.value

    def perform(self, task):
        self.plans_made += isinstance(task, MakePlan)
        return perform(task)

    @property
    def senders(self) -> set[int]:
        """Ranks that sent rows."""
        return {join.rank for join in self.joins if join.columns}

    @property
    def was_warm(self) -> bool:
        """No rows, no values, no plan moved, and none was made."""
        quiet = not self.senders and not any(join.contents for join in self.joins)
        again = all(type(reply) is SaveAgain for reply in self.replies)
        return quiet and again and not self.plans_made


def committed(results: Iterable[Any]) -> list[Any]:
    """Returns what each rank's save returned, and raises what one raised."""
    return [result.get() for result in results]
