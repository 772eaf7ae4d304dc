"""Obtains the plan of one save: from the plan cache, or from rows that ranks are asked for.

Ranks whose items are the same as in an earlier save join with a fingerprint. If the coordinator has
the plan for all fingerprints, and no content differs that did not differ before, it reuses that
plan, and no rows are sent. Otherwise it asks for what it lacks: the rows of one rank of each
fingerprint, and the content digests of all ranks.

`PlanCache` is soft state: a missing entry delays a plan and never makes it wrong. It is bounded by
the number of plans and of chunks; the least recently used plans are dropped first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ray_dcp.commit_protocol.commands import MakePlan, Planned
from ray_dcp.commit_protocol.error_aggregation import name_ranks
from ray_dcp.commit_protocol.messages import PlanOrigin, SaveGo, SaveJoin, SendItems
from ray_dcp.core.values import Int32Array, RankPlan
from ray_dcp.options import SaveOptions
from ray_dcp.planning.fingerprint import alike, plan_key, probes
from ray_dcp.planning.global_plan import RankPlans
from ray_dcp.planning.merge import digests_of, find_disagreements, groups_of
from ray_dcp.planning.share_out import node_numbers

MOST_PLANS = 8
"""Most plans in a cache. *Why* several: a job that saves two layouts in turn (weights and their
averages) needs two."""

MOST_PLAN_CHUNKS = 8_000_000
"""Most chunks of all plans in a cache together; a chunk takes about 100 bytes."""


V = TypeVar("V")


class PlanCache(Generic[V]):
    """The most recently used plans of a coordinator or a rank, by key. Thread-safe.

    Args:
        num_chunks: Returns the number of chunks of a plan; by default, only the number of plans is
            bounded.
    """

    def __init__(self, num_chunks: Callable[[V], int] = lambda _: 0) -> None:
        self._num_chunks = num_chunks
        self._lock = threading.Lock()
        self._plans: OrderedDict[bytes, V] = OrderedDict()

    def get(self, key: bytes) -> V | None:
        """Returns the plan of a key, or None if it is not cached."""
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)
            return self._plans.get(key)

    def put(self, key: bytes, plan: V) -> None:
        """Caches a plan, and drops the least recently used ones beyond the bounds."""
        with self._lock:
            self._plans[key] = plan
            self._plans.move_to_end(key)
            while len(self._plans) > MOST_PLANS or (
                len(self._plans) > 1
                and sum(map(self._num_chunks, self._plans.values())) > MOST_PLAN_CHUNKS
            ):
                self._plans.popitem(last=False)


def planned_chunks(planned: Planned) -> int:
    """Returns the number of chunks of a global plan."""
    return planned.plan.table.num_chunks


MOST_NAMED = 20
MOST_LISTED = 1000

MANY_UNKNOWN = 64
"""If more fingerprints than this are unknown, only a few ranks are asked at first, some of each
pipeline stage. *Why*: with regular layouts, the rows of all other ranks follow from theirs."""


class Planning:
    """The planning of one save.

    Args:
        world_size: Number of ranks.
        options: Options of the save.
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
        """Adds a rank's join; one that answers `SendItems` replaces the rank's earlier join."""
        known = self._joins.get(join.rank)
        if known is not None and join.asked < known.asked:
            return  # a late duplicate
        self._joins[join.rank] = join

    def last_of(self, rank: int) -> SaveJoin:
        """Returns a rank's last join, whose reply it awaits."""
        return self._joins[rank]

    def ask(self) -> dict[int, SendItems]:
        """Returns what each rank has to send; empty if the plan is cached or can be made.

        Call it when all ranks have joined, and again when those that were asked have answered.
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
        """Returns what each rank has to send so that a new plan can be made."""
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
        """Returns the cached plan, or the task that makes a new one."""
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
        """Records that ranks must send their rows, as these do not follow from the known ones."""
        self._needed = (self._needed or set()).union(ranks)

    def made(self, planned: Planned) -> None:
        """Caches the plan that was made."""
        # Why without parts: they duplicate the plan, and ranks that save again have their own.
        parts = RankPlans(planned.plan)
        self._cache.put(self._key, replace(planned, parts=parts))
        self._rows.clear()

    def all_know(self, planned: Planned) -> bool:
        """Returns whether every rank has its part of a plan, so that `go` is the same for all."""
        digest = planned.plan.digest
        return all(join.known == digest for join in self._joins.values())

    def go(
        self, rank: int, planned: Planned, attempt: str, epoch: int, create_if_absent: bool
    ) -> SaveGo:
        """Returns the reply to a rank's join, without its part if the rank has that already.

        Args:
            rank: The rank.
            planned: The plan, cached or new.
            attempt: Id of the attempt.
            epoch: Epoch of the coordinator.
            create_if_absent: See `SaveGo.create_if_absent`.
        """
        plan = planned.plan
        origin: PlanOrigin = "cold" if self._pinned is None else "warm"
        go = SaveGo(
            attempt,
            epoch,
            plan.digest,
            planned.warnings,
            origin,
            create_if_absent,
            differing=tuple(fqn for fqn, _ in planned.disagreements[:MOST_LISTED]),
        )
        if self._joins[rank].known == plan.digest:
            return go
        return replace(go, part=planned.parts[rank], groups=groups_of(plan.groups, rank))

    def clear(self) -> None:
        """Drops the joins and rows, once the plan has been sent or the save has failed."""
        self._joins.clear()
        self._rows.clear()
        self._pinned = None


def _has_contents(join: SaveJoin) -> bool:
    return not join.known or join.asked > 0


def _warm(planned: Planned, joins: Sequence[SaveJoin]) -> Planned | None:
    """Returns a cached plan with the current disagreements; None if it can't be reused."""
    plan = planned.plan
    digests = [
        digests_of(*groups_of(plan.groups, join.rank), join.contents)
        if _has_contents(join)
        else join.values
        for join in joins
    ]
    found = find_disagreements(plan.groups, digests)
    return None if found is None else replace(planned, disagreements=found)


WAYS_OUT = (
    "Wrap what each rank has of its own, as the place in the data or a random state, in "
    "ray_dcp.PerRank; give modules that differ, as experts, names by their global number; or make "
    "the ranks agree"
)
"""What to do about values that differ."""


def differences(found: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    """Returns a description of the contents that differ; empty if none do.

    Args:
        found: As `GlobalPlan.disagreements`.
    """
    if not found:
        return ""
    named = ", ".join(f"{fqn!r} on {name_ranks(ranks)}" for fqn, ranks in found[:MOST_NAMED])
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return (
        f"Expected each item to be equal on all ranks that hold it, but these differ from the "
        f"lowest rank's: {named}{more}"
    )


@dataclass(frozen=True, eq=False)
class Remembered:
    """This rank's part of a plan.

    Attributes:
        digest: Digest of the global plan.
        plan: The files that this rank writes.
        place: int32[k], positions of the content digests of items that other ranks hold as well.
        group: int32[k], ascending; see `ray_dcp.planning.merge`.
    """

    digest: bytes
    plan: RankPlan
    place: Int32Array
    group: Int32Array

    def values(self, contents: bytes) -> bytes:
        """Returns the digests of this rank's content, from `contents_of` its items."""
        return digests_of(self.place, self.group, contents)


PlanMemory = PlanCache[Remembered]
"""Plans of the last fingerprints of one rank of one session."""
