"""How one save gets its plan: from the plan cache, or from rows that the ranks are asked for.

Ranks whose items are as in an earlier save join with a fingerprint. If the coordinator knows the
plan for all fingerprints, and no content differs that did not differ before, it uses that plan
again: no row moves. Otherwise it asks for what it lacks: the rows of one rank of each fingerprint,
and the content digests of all. What it lacks can delay a plan, and never makes it wrong.

`PlanCache` is soft state: whatever is missing in it is asked for. It is bounded by chunks; the
oldest plans are dropped first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from ray_dcp.commit_protocol.commands import MakePlan, Planned
from ray_dcp.commit_protocol.error_aggregation import name_ranks
from ray_dcp.commit_protocol.messages import PlanOrigin, SaveAgain, SaveJoin, SendItems
from ray_dcp.options import SaveOptions
from ray_dcp.planning.fingerprint import alike, plan_key
from ray_dcp.planning.global_plan import RankPlans
from ray_dcp.planning.merge import digests_of, find_disagreements, groups_of
from ray_dcp.planning.regular import probes
from ray_dcp.planning.sharing import node_numbers

MOST_PLANS = 8
"""A job that saves two layouts in turn (weights and their averages) uses two."""

MOST_PLAN_CHUNKS = 8_000_000
"""Of all plans together; a chunk takes about 100 bytes."""


V = TypeVar("V")


class PlanCache(Generic[V]):
    """The plans that were used last, by key: a coordinator's, or one rank's. Thread-safe.

    Args:
        num_chunks: Chunks of one of them; by default only their number is bounded.
    """

    def __init__(self, num_chunks: Callable[[V], int] = lambda _: 0) -> None:
        self._num_chunks = num_chunks
        self._lock = threading.Lock()
        self._plans: OrderedDict[bytes, V] = OrderedDict()

    def get(self, key: bytes) -> V | None:
        """Returns the plan of a key; None when it is not known."""
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)
            return self._plans.get(key)

    def put(self, key: bytes, plan: V) -> None:
        """Keeps a plan, and drops the oldest ones beyond the bounds."""
        with self._lock:
            self._plans[key] = plan
            self._plans.move_to_end(key)
            while len(self._plans) > MOST_PLANS or (
                len(self._plans) > 1
                and sum(map(self._num_chunks, self._plans.values())) > MOST_PLAN_CHUNKS
            ):
                self._plans.popitem(last=False)


def planned_chunks(planned: Planned) -> int:
    """Returns how many chunks a global plan has."""
    return planned.plan.table.num_chunks


MOST_NAMED = 20

MANY_UNKNOWN = 64
"""Where the rows of more different ranks are not known, a few are asked first, of each stage of a
pipeline some: with regular layouts the rows of all others follow."""


class Planning:
    """The plan of one save in the making.

    Args:
        world_size: Number of ranks.
        options: How it is saved.
        cache: Plans of earlier saves.
    """

    def __init__(self, world_size: int, options: SaveOptions, cache: PlanCache[Planned]) -> None:
        self._world_size = world_size
        self._options = options
        self._cache = cache
        self._joins: dict[int, SaveJoin] = {}
        self._key = b""
        self._nodes: tuple[int, ...] = ()
        self._pinned: Planned | None = None
        self._rows: dict[bytes, bytes] = {}
        self._needed: set[int] | None = None

    def take(self, join: SaveJoin) -> None:
        """Adds a rank's join; what it was asked for completes an earlier one."""
        known = self._joins.get(join.rank)
        if known is not None and join.asked < known.asked:
            return  # it came twice, the second time late
        self._joins[join.rank] = join

    def take_all(self, joins: Iterable[SaveJoin]) -> None:
        """Adds first joins of ranks."""
        self._joins.update({join.rank: join for join in joins})

    def last_of(self, rank: int) -> SaveJoin:
        """Returns a rank's last join: the call in which it waits."""
        return self._joins[rank]

    def ask(self) -> dict[int, SendItems]:
        """Returns which ranks have to send what; none when a plan is known or can be made.

        To be called when all ranks have joined, and when those that were asked have answered.
        """
        joins = [self._joins[rank] for rank in range(self._world_size)]
        if not self._key:
            # Why once: a later join does not name the node.
            self._nodes = node_numbers([join.node for join in joins])
            self._key = plan_key([join.fingerprint for join in joins], self._nodes)
        planned = self._cache.get(self._key)
        if planned is not None:
            digest = planned.plan.digest
            lacking = [j.rank for j in joins if j.known != digest and not _has_contents(j)]
            if lacking:
                return dict.fromkeys(lacking, SendItems(rows=False))
            self._pinned = _warm(planned, joins)
        return {} if self._pinned is not None else self._ask_all(joins)

    def _ask_all(self, joins: Sequence[SaveJoin]) -> dict[int, SendItems]:
        """Returns who has to send what so that a plan can be made."""
        self._rows.update({join.fingerprint: join.columns for join in joins if join.columns})
        asked: dict[int, SendItems] = {}
        wanted: set[bytes] = set()
        names = {join.fingerprint for join in joins}
        if self._needed is None and len(names) - len(self._rows) > MANY_UNKNOWN:
            parts = alike([join.fingerprint for join in joins])
            some = [ranks[[*probes(len(ranks))]].tolist() for ranks in parts]
            self._needed = set(probes(self._world_size)).union(*some)
        for join in joins:
            name = join.fingerprint
            needed = self._needed is None or join.rank in self._needed
            if needed and name not in self._rows and name not in wanted:
                wanted.add(name)
                asked[join.rank] = SendItems(rows=True)
            if not _has_contents(join):
                asked.setdefault(join.rank, SendItems(rows=False))
        return asked

    def plan(self) -> Planned | MakePlan:
        """Returns the plan, or the task of making it."""
        if self._pinned is not None:
            return self._pinned
        options = self._options
        joins = [self._joins[rank] for rank in range(self._world_size)]
        return MakePlan(
            tuple(self._rows.get(join.fingerprint, b"") for join in joins),
            options.part_bytes,
            options.dedup_save_to_lowest_rank,
            tuple(join.contents for join in joins),
            tuple(join.fingerprint for join in joins),
            self._nodes,
        )

    def lacks(self, ranks: Iterable[int]) -> None:
        """Notes that the rows of ranks do not follow from what is known: they have to send them."""
        self._needed = (self._needed or set()).union(ranks)

    def made(self, planned: Planned) -> None:
        """Caches the plan that was made."""
        # Why: the parts repeat all of the plan, and a rank that saves again has its own.
        parts = RankPlans(planned.plan)
        self._cache.put(self._key, replace(planned, parts=parts))
        self._rows.clear()

    def all_know(self, planned: Planned) -> bool:
        """Whether every rank has its part of a plan, so that `go` is the same for all."""
        digest = planned.plan.digest
        return all(join.known == digest for join in self._joins.values())

    def go(
        self, rank: int, planned: Planned, attempt: str, epoch: int, create_if_absent: bool
    ) -> SaveAgain:
        """Returns a rank's part: only that its plan is unchanged, if it has it.

        Args:
            rank: Who.
            planned: By what `plan` gave or led to.
            attempt: Under which attempt.
            epoch: Of the coordinator.
            create_if_absent: See `SaveAgain.create_if_absent`.
        """
        plan = planned.plan
        origin: PlanOrigin = "cold" if self._pinned is None else "warm"
        go = SaveAgain(attempt, epoch, plan.digest, planned.warnings, origin, create_if_absent)
        if self._joins[rank].known == plan.digest:
            return go
        return go.with_plan(planned.parts[rank], groups_of(plan.groups, rank))

    def clear(self) -> None:
        """Forgets what the ranks sent: the plan went out, or the save has failed."""
        self._joins.clear()
        self._rows.clear()
        self._pinned = None


def _has_contents(join: SaveJoin) -> bool:
    return not join.known or join.asked > 0


def _warm(planned: Planned, joins: Sequence[SaveJoin]) -> Planned | None:
    """Returns a plan of earlier with what differs now; None when it may not be used again."""
    plan = planned.plan
    digests = [
        digests_of(*groups_of(plan.groups, join.rank), join.contents)
        if _has_contents(join)
        else join.values
        for join in joins
    ]
    found = find_disagreements(plan.groups, digests)
    return None if found is None else replace(planned, disagreements=differences(found))


def differences(found: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    """Returns which contents differ, in words; empty when none do.

    Args:
        found: As in `GlobalPlan.disagreements`.
    """
    if not found:
        return ""
    named = ", ".join(f"{fqn!r} on {name_ranks(ranks)}" for fqn, ranks in found[:MOST_NAMED])
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return (
        f"Expected each item to be equal on all ranks that hold it, but these differ from the "
        f"lowest rank's: {named}{more}"
    )
