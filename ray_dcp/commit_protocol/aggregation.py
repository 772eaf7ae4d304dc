"""Batched messages: the requests of several ranks in one message, and when to send it.

A rank of a large job sends its requests to the gatherer of its group of ranks, so that the
coordinator receives a few large messages instead of one from every rank. A batch stores fields that
are equal for all its ranks once, and has the same effect as its requests one by one.

All ranks of a group take part in each step, except those that are not asked, are dead or are late.
A batch is sent at once when the last request arrives. An incomplete batch is sent at growing
intervals, with the requests that have arrived, so that the coordinator can name the missing ranks.
This module is pure; the clock is an argument.

A gatherer holds nothing that its ranks don't hold as well. A rank whose gatherer dies or does not
answer sends the same request to the coordinator, which recognises a request that arrives twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ray_dcp.commit_protocol.commands import Answer, step_of
from ray_dcp.commit_protocol.messages import (
    FileReceipts,
    LoadDone,
    LoadJoin,
    LoadReady,
    OpKey,
    Reply,
    Request,
    SaveJoin,
    SaveReceipt,
    SaveStaged,
    SendItems,
    pack_receipts,
)
from ray_dcp.errors import InvalidRequestError
from ray_dcp.planning.fingerprint import FINGERPRINT_BYTES


@dataclass(frozen=True)
class BatchedJoins:
    """Joins, with only fingerprints, of ranks that make the same call and know the same plan."""

    first: SaveJoin
    """Join of the lowest rank."""
    ranks: tuple[int, ...]
    fingerprints: bytes
    """32 bytes for each rank."""
    values: tuple[bytes, ...]
    capture_s: tuple[float, ...]
    nodes: tuple[str, ...] = ()
    """Names of the nodes, each once."""
    node: bytes = b""
    """For each rank, the index into `nodes`, as int32."""

    def requests(self) -> list[SaveJoin]:
        """Returns the joins of the ranks."""
        shared = vars(self.first)
        on = np.frombuffer(self.node, np.int32).tolist()
        found = []
        for index, (rank, values) in enumerate(zip(self.ranks, self.values, strict=True)):
            # Why not `replace`: it takes as long as all other work of the coordinator on a join.
            join = object.__new__(SaveJoin)
            start = index * FINGERPRINT_BYTES
            name = self.fingerprints[start : start + FINGERPRINT_BYTES]
            vars(join).update(shared, rank=rank, fingerprint=name, values=values)
            vars(join)["capture_s"] = self.capture_s[index]
            vars(join)["node"] = self.nodes[on[index]]
            found.append(join)
        return found


@dataclass(frozen=True, eq=False)
class BatchedReceipts:
    """Receipts of ranks that wrote without an error."""

    first: SaveReceipt
    """Receipt of the lowest rank, without its files."""
    ranks: tuple[int, ...]
    num_files: tuple[int, ...]
    """Number of files of each rank."""
    staged: tuple[tuple[float, int], ...]
    files: FileReceipts

    def requests(self) -> list[SaveReceipt]:
        """Returns the receipts of the ranks."""
        files = iter(self.files)
        each = zip(self.ranks, self.num_files, self.staged, strict=True)
        return [
            replace(
                self.first,
                rank=rank,
                files=tuple(next(files) for _ in range(count)),
                staged=staged,
            )
            for rank, count, staged in each
        ]


@dataclass(frozen=True, eq=False)
class MessageBatch:
    """Gatherer → coordinator: the requests of these ranks in one step of an operation.

    Reply: `BatchedReplies`.
    """

    key: OpKey
    step: str
    ranks: tuple[int, ...]
    content: BatchedJoins | BatchedReceipts | tuple[Request, ...]

    def requests(self) -> Sequence[Request]:
        """Returns the requests of the ranks."""
        return self.content if isinstance(self.content, tuple) else self.content.requests()

    def only(self, ranks: Collection[int]) -> MessageBatch:
        """Returns the batch of only some of these ranks, which are not answered yet."""
        return batch_of(request for request in self.requests() if request.rank in ranks)


@dataclass(frozen=True, eq=False)
class BatchedReplies:
    """Coordinator → gatherer: replies to some of the ranks; the others still wait."""

    replies: tuple[tuple[tuple[int, ...], Reply], ...]
    epoch: int = 0
    """Epoch of the coordinator."""


def batch_of(requests: Iterable[Request]) -> MessageBatch:
    """Returns one message with several requests.

    Args:
        requests: Requests of one operation and step, each of another rank; at least one.
    """
    found = sorted(requests, key=lambda request: request.rank)
    first = found[0]
    ranks = tuple(request.rank for request in found)
    return MessageBatch(
        first.key, step_of(first), ranks, _joined(found, ranks) or _written(found, ranks)
    )


_OF_JOINS = frozenset({"rank", "fingerprint", "values", "capture_s", "node"})
_OF_RECEIPTS = frozenset({"rank", "files", "staged"})
"""The fields that may differ between ranks; all others must be equal."""


def _rest(request: Request, own: frozenset[str]) -> dict[str, object]:
    return {name: value for name, value in vars(request).items() if name not in own}


def _joined(requests: Sequence[Request], ranks: tuple[int, ...]) -> BatchedJoins | None:
    first = requests[0]
    joins = [request for request in requests if isinstance(request, SaveJoin)]
    if len(joins) < len(requests) or not isinstance(first, SaveJoin):
        return None

    alike = _rest(first, _OF_JOINS)
    if not all(
        _rest(join, _OF_JOINS) == alike
        and len(join.fingerprint) == FINGERPRINT_BYTES
        and join.known
        and not (join.columns or join.contents or join.asked)
        and not (join.error or join.target.filesystem is not None)
        for join in joins
    ):
        return None
    names = b"".join([join.fingerprint for join in joins])
    values = tuple([join.values for join in joins])
    nodes = {node: index for index, node in enumerate(dict.fromkeys(j.node for j in joins))}
    on = np.array([nodes[join.node] for join in joins], dtype=np.int32).tobytes()
    capture_s = tuple([join.capture_s for join in joins])
    return BatchedJoins(first, ranks, names, values, capture_s, tuple(nodes), on)


def _written(
    requests: Sequence[Request], ranks: tuple[int, ...]
) -> BatchedReceipts | tuple[Request, ...]:
    first = requests[0]
    receipts = [request for request in requests if isinstance(request, SaveReceipt)]
    alike = _rest(first, _OF_RECEIPTS)
    plain = all(
        receipt.error is None and _rest(receipt, _OF_RECEIPTS) == alike for receipt in receipts
    )
    if len(receipts) < len(requests) or not isinstance(first, SaveReceipt) or not plain:
        return tuple(requests)
    packed = pack_receipts(file for receipt in receipts for file in receipt.files)
    counts = tuple([len(receipt.files) for receipt in receipts])
    staged = tuple([receipt.staged for receipt in receipts])
    return BatchedReceipts(replace(first, files=()), ranks, counts, staged, packed)


@dataclass(eq=False)
class Batch:
    """One message of a gatherer that waits for replies."""

    key: OpKey
    step: str
    waiting: set[int]
    future: Any = None
    """The future on which the sender waits; set by the executor."""
    replies: list[tuple[tuple[int, ...], Reply]] = field(default_factory=list)

    def put(self, ranks: Iterable[int], reply: Reply) -> None:
        """Adds a reply for those of the ranks that wait in this message."""
        mine = self.waiting.intersection(ranks)
        if mine:
            self.waiting -= mine
            self.replies.append((tuple(sorted(mine)), reply))


class Batches:
    """The messages of gatherers that wait for replies of one coordinator."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[OpKey, str], list[Batch]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: MessageBatch) -> Batch:
        """Registers a message. Call it before its requests are passed to the coordination."""
        at = (message.key, message.step)
        batch = Batch(*at, set(message.ranks))
        self._waiting.setdefault(at, []).append(batch)
        return batch

    def remove(self, batch: Batch) -> None:
        """Removes a message whose sender no longer waits."""
        self._forget((batch.key, batch.step), [batch])

    def answer(self, answer: Answer) -> set[int]:
        """Adds an answer of the coordination; returns its ranks that wait in no message."""
        left = set(answer.ranks)
        for batch in self._waiting.get((answer.key, answer.step), ()):
            left -= batch.waiting
            batch.put(answer.ranks, answer.reply)
        return left

    def refuse(self, key: OpKey, reply: Reply) -> None:
        """Adds the same reply for all ranks that wait in an operation."""
        for (own, _), batches in self._waiting.items():
            if own == key:
                for batch in batches:
                    batch.put(batch.waiting, reply)

    def ready(self) -> Iterator[Batch]:
        """Removes and yields the messages that have replies."""
        for at, batches in list(self._waiting.items()):
            answered = [batch for batch in batches if batch.replies]
            if answered:
                self._forget(at, answered)
                yield from answered

    def _forget(self, at: tuple[OpKey, str], gone: Sequence[Batch]) -> None:
        left = [batch for batch in self._waiting.pop(at, ()) if batch not in gone]
        if left:
            self._waiting[at] = left


MOST_GATHERERS = 64
"""Most gatherers, so also most messages that a coordinator receives in a phase. A job with no more
ranks than this needs no gatherers."""

FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 4.0
"""How long a message waits for missing ranks, in seconds: first and at most; doubles each time."""

_STEPS_KEPT = 256


def group_of(rank: int, world_size: int, most: int = MOST_GATHERERS) -> range | None:
    """Returns the group of ranks that share a rank's gatherer; None if there are no gatherers.

    A group has consecutive ranks, which are on one node or few.

    Args:
        rank: The rank.
        world_size: Number of ranks.
        most: Most gatherers.

    Raises:
        InvalidRequestError: The rank is not between 0 and `world_size - 1`.

    Examples:
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
    """Returns whether a request is sent to a gatherer: all ranks make it at about the same time."""
    steps = SaveJoin | SaveReceipt | SaveStaged | LoadJoin | LoadReady | LoadDone
    failed = getattr(request, "error", None) is not None
    return isinstance(request, steps) and not failed


@dataclass
class _Step:
    """The requests of one step that have arrived, and the ranks whose requests were sent."""

    requests: dict[int, Request] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)
    due_s: float = 0.0
    wait_s: float = FIRST_WAIT_S


class BatchWindow:
    """The requests that one gatherer has received and not sent yet.

    Args:
        ranks: Ranks of its group.
        clock: Returns monotonic seconds.

    Examples:
        >>> from ray_dcp.options import LoadOptions
        >>> from ray_dcp.commit_protocol.messages import Target
        >>> def join(rank):
        ...     return LoadJoin(OpKey("run", 0), rank, 128, Target("memory://x"), LoadOptions())
        >>> window = BatchWindow(range(2, 4), lambda: 0.0)
        >>> window.take(join(3))
        []
        >>> [message.ranks for message in window.take(join(2))]
        [(2, 3)]
    """

    def __init__(self, ranks: Iterable[int], clock: Callable[[], float]) -> None:
        self._ranks = frozenset(ranks)
        self._clock = clock
        self._steps: dict[tuple[OpKey, str], _Step] = {}
        self._asked: dict[tuple[OpKey, str], set[int]] = {}

    def take(self, request: Request) -> list[MessageBatch]:
        """Adds a rank's request; returns the messages to send now."""
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

    def due(self) -> list[MessageBatch]:
        """Returns the messages to send although ranks are missing. Call it at `next_s`."""
        now_s = self._clock()
        late = [step for step in self._steps.values() if step.requests and step.due_s <= now_s]
        return [message for step in late for message in self._sent(step)]

    @property
    def next_s(self) -> float | None:
        """The clock time at which the next incomplete message is due; None if there is none."""
        return min((step.due_s for step in self._steps.values() if step.requests), default=None)

    def replied(self, message: MessageBatch, batched: BatchedReplies) -> None:
        """Records which ranks the replies ask for items: only they send the next step."""
        if message.step.partition(" ")[0] != "SaveJoin":
            return
        for ranks, reply in batched.replies:
            if isinstance(reply, SendItems):
                asked = int(message.step.partition(" ")[2] or 0) + 1
                self._asked.setdefault((message.key, f"SaveJoin {asked}"), set()).update(ranks)

    def _sent(self, step: _Step) -> list[MessageBatch]:
        messages = [batch_of(step.requests.values())]
        step.sent.update(step.requests)
        step.requests = {}
        step.wait_s = min(2 * step.wait_s, LONGEST_WAIT_S)
        return messages

    def _trim(self) -> None:
        for steps in (self._steps, self._asked):
            for at in [*steps][:-_STEPS_KEPT]:
                if steps is self._asked or not self._steps[at].requests:
                    del steps[at]
