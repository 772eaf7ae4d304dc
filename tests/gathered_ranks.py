"""Ranks whose requests go by way of gatherers that may die, in one thread, in any order."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass, field

from ray_dcp.commit_protocol.aggregation import (
    Batch,
    BatchedReplies,
    BatchWindow,
    MessageBatch,
    is_gathered,
)
from ray_dcp.commit_protocol.commands import step_of
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.messages import Request
from ray_dcp.runtime.tasks import new_attempt, perform
from tests.inline_ranks import HEARTBEAT_S, Shell, Time, World


@dataclass
class _Group:
    ranks: range
    gathering: BatchWindow
    is_dead: bool = False
    outbox: list[MessageBatch] = field(default_factory=list)
    asking: list[tuple[MessageBatch, Batch]] = field(default_factory=list)
    asked: dict[int, Request] = field(default_factory=dict)


class Gathered(World):
    """Rank generators, gatherers and one coordination.

    Args:
        groups: The ranks of each gatherer.
        coordination: To go on with one that has a past.
        kill: From a gatherer to whether it dies; asked before each of its events.

    Attributes:
        messages: How many the coordinator heard of gatherers, by step.
        direct: How many it heard of ranks, by type.
        batches: Which messages it was told in one go.
    """

    def __init__(self, groups, coordination=None, kill=lambda group: False):
        self.time, self._kill = Time(), kill
        self.coordination = coordination or Coordination(
            epoch=1, new_attempt=new_attempt, clock=self.time
        )
        super().__init__(Shell(self.coordination, perform, self.time))
        self.groups = [_Group(ranks, BatchWindow(ranks, self.time)) for ranks in groups]
        self.messages, self.direct, self.batches = Counter(), Counter(), []

    def _events(self):
        return [*super()._events(), *((self._pass_on, g) for g in self.groups if g.outbox)]

    def _let_time_pass(self):
        living = [group for group in self.groups if not group.is_dead]
        due = [at_s for group in living if (at_s := group.gathering.next_s) is not None]
        if not due:
            return super()._let_time_pass()
        self.time.now_s = max(self.time.now_s, min(due))
        for group in living:
            group.outbox += group.gathering.due()
        return True

    def _send(self, which, request):
        group = next((g for g in self.groups if request.rank in g.ranks), None)
        if group is None or group.is_dead or not is_gathered(request):
            self.direct[type(request).__name__] += 1
            super()._send(which, request)
            return
        self._waiting[request.key, request.rank, step_of(request)] = which
        group.asked[request.rank] = request
        group.outbox += group.gathering.take(pickle.loads(pickle.dumps(request)))

    def _pass_on(self, group):
        if self._kill(group):
            self._die(group)
            return
        message = pickle.loads(pickle.dumps(group.outbox.pop(0)))
        self.messages[message.step] += 1
        self.batches.append(message)
        group.asking.append((message, self.shell.receive_batch(message, HEARTBEAT_S)))

    def _die(self, group):
        """What it holds is lost; its ranks notice, and say the same to the coordinator."""
        group.is_dead = True
        group.outbox.clear()
        for _, batch in group.asking:
            if not batch.replies:
                self.shell.batches.remove(batch)
        list(self.shell.batches.ready())
        group.asking.clear()
        asked, group.asked = group.asked, {}
        for request in asked.values():
            which = self._waiting.pop((request.key, request.rank, step_of(request)), None)
            if which is not None:
                self._send(which, request)

    def _hand_out(self):
        super()._hand_out()
        list(self.shell.batches.ready())
        for group in self.groups:
            for message, batch in [one for one in group.asking if one[1].replies]:
                group.asking.remove((message, batch))
                told = pickle.loads(pickle.dumps(BatchedReplies(tuple(batch.replies))))
                group.gathering.replied(message, told)
                for ranks, reply in told.replies:
                    for rank in ranks:
                        group.asked.pop(rank, None)
                        self._told(message.key, rank, message.step, reply)
                if batch.waiting:  # others wait still: the same is said again, for them
                    group.outbox.append(message.only(batch.waiting))
