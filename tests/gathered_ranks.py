"""Ranks whose requests go by way of gatherers that may die, in one thread, in any order."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass, field

from ray_dcp.errors import CheckpointError
from ray_dcp.protocol.aggregation import (
    Batch,
    BatchedReplies,
    BatchWindow,
    MessageBatch,
    is_gathered,
)
from ray_dcp.protocol.coordination import Coordination
from ray_dcp.protocol.messages import Request
from ray_dcp.runtime.tasks import new_attempt, perform
from tests.inline_ranks import RankResult, Shell, Time


@dataclass
class _Group:
    ranks: range
    gathering: BatchWindow
    is_dead: bool = False
    outbox: list[MessageBatch] = field(default_factory=list)
    asking: list[tuple[MessageBatch, Batch]] = field(default_factory=list)
    asked: dict[int, Request] = field(default_factory=dict)


class Gathered:
    """Rank generators, gatherers and one coordination.

    Attributes:
        messages: How many the coordinator heard, by step; of gatherers, and of ranks.
        together: Which messages it was told in one go.
    """

    def __init__(self, groups, coordination=None, performer=perform):
        self.time = Time()
        self.coordination = coordination or Coordination(
            epoch=1, new_attempt=new_attempt, clock=self.time
        )
        self.shell = Shell(self.coordination, performer, self.time)
        self.groups = [_Group(ranks, BatchWindow(ranks, self.time)) for ranks in groups]
        self.messages, self.direct, self.batches = Counter(), Counter(), []

    def run(self, ranks, choose=lambda count: 0, kill=lambda group: False):
        """Runs generators to their ends; `kill` is asked before each event of a gatherer."""
        self.results = [RankResult(ended=False) for _ in ranks]
        self.generators, self.waiting = ranks, {}
        self.ready = [(rank, None) for rank in range(len(ranks))]
        while True:
            events = self._events()
            if not events:
                if not self.waiting:
                    return self.results
                self._pass_time()
                continue
            event = events[choose(len(events))]
            if isinstance(event[1], _Group) and not event[1].is_dead and kill(event[1]):
                self._kill(event[1])
            else:
                event[0](*event[1:])
            self._hand_out()

    def _events(self):
        return [
            *((self._advance, at) for at in range(len(self.ready))),
            *((self._send, group) for group in self.groups if group.outbox),
            *((self.shell.perform, at) for at in range(len(self.shell.tasks))),
        ]

    def _pass_time(self):
        due = [g.gathering.next_s for g in self.groups if not g.is_dead]
        due = [at_s for at_s in due if at_s is not None]
        if due:
            self.time.now_s = max(self.time.now_s, min(due))
            for group in self.groups:
                group.outbox += [] if group.is_dead else group.gathering.due()
            return
        beating = [("s", rank, 60.0) for rank in self.waiting]
        assert self.shell.expire(beating), f"nothing will ever happen for {self.waiting}"
        self._hand_out()

    def _advance(self, at):
        rank, reply = self.ready.pop(at)
        try:
            steps = self.generators[rank]
            request = next(steps) if reply is None else steps.send(reply)
        except StopIteration as end:
            self.results[rank] = RankResult(value=end.value)
            return
        except CheckpointError as error:
            self.results[rank] = RankResult(error=error)
            return
        self.waiting[rank] = request
        group = next((g for g in self.groups if rank in g.ranks), None)
        if group is None or group.is_dead or not is_gathered(request):
            self._call(rank, request)
        else:
            group.asked[rank] = request
            group.outbox += group.gathering.take(pickle.loads(pickle.dumps(request)))

    def _call(self, rank, request):
        self.direct[type(request).__name__] += 1
        refused = self.shell.receive(request, 60.0)
        if refused is not None and self.waiting.pop(rank, None):
            self.ready.append((rank, refused))

    def _send(self, group):
        message = pickle.loads(pickle.dumps(group.outbox.pop(0)))
        self.messages[message.step] += 1
        self.batches.append(message)
        group.asking.append((message, self.shell.receive_batch(message, 60.0)))

    def _kill(self, group):
        """What it holds is lost; its ranks notice, and say the same to the coordinator."""
        group.is_dead = True
        group.outbox.clear()
        for _, batch in group.asking:
            if not batch.replies:
                self.shell.batches.remove(batch)
        list(self.shell.batches.ready())
        group.asking.clear()
        asked, group.asked = group.asked, {}
        for rank, request in asked.items():
            if rank in self.waiting:
                self._call(rank, request)

    def _hand_out(self):
        answers, self.shell.answers = self.shell.answers, []
        for answer in answers:
            (rank,) = answer.ranks
            if self.waiting.pop(rank, None):
                self.ready.append((rank, answer.reply))
        list(self.shell.batches.ready())
        for group in self.groups:
            for message, batch in [*group.asking]:
                if batch.replies:
                    group.asking.remove((message, batch))
                    self._told(group, message, BatchedReplies(tuple(batch.replies)), batch.waiting)

    def _told(self, group, message, told, left):
        told = pickle.loads(pickle.dumps(told))
        group.gathering.replied(message, told)
        for ranks, reply in told.replies:
            for rank in ranks:
                group.asked.pop(rank, None)
                if self.waiting.pop(rank, None):
                    self.ready.append((rank, reply))
        if left:  # others wait still: the same is said again, for them
            group.outbox.append(message.only(left))
