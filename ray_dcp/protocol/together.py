"""What several ranks say in one message, and what they are told in one.

A rank of a large job hands its requests to the gatherer of its group of ranks (`gathering`), so
that the coordinator hears a few messages with much in them, and not one of every rank. What is the
same for all ranks is said once. A message means exactly what its requests would mean one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ray_dcp.plan.fingerprint import FINGERPRINT_BYTES
from ray_dcp.protocol.commands import Answer, Answers, step_of
from ray_dcp.protocol.messages import OpKey, Reply, Request, SaveJoin, SaveReceipt
from ray_dcp.protocol.receipts import FileReceipts, pack_receipts

__all__ = ["Batch", "Batches", "JoinedTogether", "Together", "Told", "WrittenTogether", "together"]


@dataclass(frozen=True)
class JoinedTogether:
    """Joins with fingerprints alone, of ranks that know the same plan and call the same."""

    first: SaveJoin
    """Of the lowest rank."""
    ranks: tuple[int, ...]
    fingerprints: bytes
    """32 bytes for each rank."""
    values: tuple[bytes, ...]
    capture_s: tuple[float, ...]
    nodes: tuple[str, ...] = ()
    """The names of their nodes, each once."""
    node: bytes = b""
    """Which of them each rank is on: int32."""

    def requests(self) -> list[SaveJoin]:
        """Returns what the ranks sent."""
        shared = vars(self.first)
        on = np.frombuffer(self.node, np.int32).tolist()
        found = []
        for index, (rank, values) in enumerate(zip(self.ranks, self.values, strict=True)):
            # Why not `replace`: it takes as long as all else that becomes of a join.
            join = object.__new__(SaveJoin)
            start = index * FINGERPRINT_BYTES
            name = self.fingerprints[start : start + FINGERPRINT_BYTES]
            vars(join).update(shared, rank=rank, fingerprint=name, values=values)
            vars(join)["capture_s"] = self.capture_s[index]
            vars(join)["node"] = self.nodes[on[index]]
            found.append(join)
        return found


@dataclass(frozen=True, eq=False)
class WrittenTogether:
    """Receipts of ranks that wrote without an error."""

    first: SaveReceipt
    """Of the lowest rank, without its files."""
    ranks: tuple[int, ...]
    num_files: tuple[int, ...]
    """Of each rank."""
    staged_s: tuple[float, ...]
    files: FileReceipts

    def requests(self) -> list[SaveReceipt]:
        """Returns what the ranks sent."""
        files = iter(self.files)
        each = zip(self.ranks, self.num_files, self.staged_s, strict=True)
        return [
            replace(
                self.first, rank=rank, files=tuple(next(files) for _ in range(count)),
                staged_s=staged_s,
            )
            for rank, count, staged_s in each
        ]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Together:
    """Gatherer → coordinator: what these ranks say in one step of an operation. Reply: `Told`."""

    key: OpKey
    step: str
    ranks: tuple[int, ...]
    said: JoinedTogether | WrittenTogether | tuple[Request, ...]

    def requests(self) -> Sequence[Request]:
        """Returns what the ranks sent, one by one."""
        return self.said if isinstance(self.said, tuple) else self.said.requests()

    def only(self, ranks: Collection[int]) -> Together:
        """Returns what some of these ranks say: those that are not answered yet."""
        return together(request for request in self.requests() if request.rank in ranks)


@dataclass(frozen=True, eq=False)
class Told:
    """Coordinator → gatherer: replies to some of the ranks; the others still wait."""

    replies: tuple[tuple[tuple[int, ...], Reply], ...]
    epoch: int = 0
    """Of the coordinator."""


def together(requests: Iterable[Request]) -> Together:
    """Returns one message that says what these do.

    Args:
        requests: At least one, of one operation and step, each of another rank.
    """
    found = sorted(requests, key=lambda request: request.rank)
    first = found[0]
    ranks = tuple(request.rank for request in found)
    return Together(
        first.key, step_of(first), ranks, _joined(found, ranks) or _written(found, ranks)
    )


_OF_JOINS = frozenset({"rank", "fingerprint", "values", "capture_s", "node"})
_OF_RECEIPTS = frozenset({"rank", "files", "staged_s"})
"""What is said for each rank; all else has to be the same, whatever there is."""


def _rest(request: Request, own: frozenset[str]) -> dict[str, object]:
    return {name: value for name, value in vars(request).items() if name not in own}


def _joined(requests: Sequence[Request], ranks: tuple[int, ...]) -> JoinedTogether | None:
    first = requests[0]
    joins = [request for request in requests if isinstance(request, SaveJoin)]
    if len(joins) < len(requests) or not isinstance(first, SaveJoin):
        return None

    alike = _rest(first, _OF_JOINS)
    if not all(
        _rest(join, _OF_JOINS) == alike
        and len(join.fingerprint) == FINGERPRINT_BYTES
        and join.known
        and not (join.columns or join.contents or join.asked or join.stats)
        and not (join.error or join.target.filesystem is not None)
        for join in joins
    ):
        return None
    names = b"".join([join.fingerprint for join in joins])
    values = tuple([join.values for join in joins])
    nodes = {node: index for index, node in enumerate(dict.fromkeys(j.node for j in joins))}
    on = np.array([nodes[join.node] for join in joins], dtype=np.int32).tobytes()
    capture_s = tuple([join.capture_s for join in joins])
    return JoinedTogether(first, ranks, names, values, capture_s, tuple(nodes), on)


def _written(
    requests: Sequence[Request], ranks: tuple[int, ...]
) -> WrittenTogether | tuple[Request, ...]:
    first = requests[0]
    receipts = [request for request in requests if isinstance(request, SaveReceipt)]
    alike = _rest(first, _OF_RECEIPTS)
    plain = all(
        receipt.error is None and _rest(receipt, _OF_RECEIPTS) == alike for receipt in receipts
    )
    if len(receipts) < len(requests) or not isinstance(first, SaveReceipt) or not plain:
        return tuple(requests)
    packed = pack_receipts(file for receipt in receipts for file in receipt.files)
    if packed.bad_digests():
        return tuple(requests)  # the coordinator says what is wrong, and of whom
    counts = tuple([len(receipt.files) for receipt in receipts])
    staged_s = tuple([receipt.staged_s for receipt in receipts])
    return WrittenTogether(replace(first, files=()), ranks, counts, staged_s, packed.proven())


@dataclass(eq=False)
class Batch:
    """One message of a gatherer that waits for answers."""

    key: OpKey
    step: str
    waiting: set[int]
    ranks: tuple[int, ...]
    told: list[tuple[tuple[int, ...], Reply]] = field(default_factory=list)

    def put(self, ranks: Iterable[int], reply: Reply) -> None:
        """Takes a reply for those of the ranks that wait in it."""
        mine = self.waiting.intersection(ranks)
        if mine:
            self.waiting -= mine
            self.told.append((tuple(sorted(mine)), reply))


class Batches:
    """The messages of gatherers that wait for answers, in one coordinator."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[OpKey, str], list[Batch]] = {}
        self._of_rank: dict[tuple[OpKey, str], dict[int, list[Batch]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: Together) -> Batch:
        """Takes that a message waits; to be called before it is handed on."""
        at = (message.key, message.step)
        batch = Batch(*at, set(message.ranks), message.ranks)
        self._waiting.setdefault(at, []).append(batch)
        self._of_rank.pop(at, None)
        return batch

    def remove(self, batch: Batch) -> None:
        """Takes that nobody waits for a message's answer any more."""
        self._forget((batch.key, batch.step), [batch])

    def answer(self, answer: Answer | Answers) -> set[int]:
        """Takes an answer of the coordination; returns the ranks that wait in no message."""
        at = (answer.key, answer.step)
        if isinstance(answer, Answer):
            batches = self._batches_of(at).get(answer.rank, ())
            ranks: tuple[int, ...] = (answer.rank,)
        else:
            batches, ranks = self._waiting.get(at, ()), answer.ranks
        left = set(ranks)
        for batch in batches:
            left -= batch.waiting
            batch.put(ranks, answer.reply)
        return left

    def refuse(self, key: OpKey, reply: Reply) -> None:
        """Takes that all who wait in an operation are told the same."""
        for (own, _), batches in self._waiting.items():
            if own == key:
                for batch in batches:
                    batch.put(batch.waiting, reply)

    def ready(self) -> Iterator[Batch]:
        """Yields those that have something to tell, and forgets them."""
        for at, batches in list(self._waiting.items()):
            told = [batch for batch in batches if batch.told]
            if told:
                self._forget(at, told)
                yield from told

    def _batches_of(self, at: tuple[OpKey, str]) -> dict[int, list[Batch]]:
        """Returns the messages of each rank. Why only then: all are told the same in most saves."""
        found = self._of_rank.get(at)
        if found is None:
            found = self._of_rank[at] = {}
            for batch in self._waiting.get(at, ()):
                for rank in batch.ranks:
                    found.setdefault(rank, []).append(batch)
        return found

    def _forget(self, at: tuple[OpKey, str], gone: Sequence[Batch]) -> None:
        left = [batch for batch in self._waiting.pop(at, ()) if batch not in gone]
        self._of_rank.pop(at, None)
        if left:
            self._waiting[at] = left
