"""The first half of a save: from the ranks' joins to a plan. Nothing is at stake yet.

The phases are in `save`, which goes on from here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from ray_dcp.errors import CheckpointError
from ray_dcp.protocol.commands import (
    Answer,
    Planned,
    ReadRecords,
    RecordsRead,
    RowsMissing,
    step_of,
)
from ray_dcp.protocol.messages import Reply, SaveJoin
from ray_dcp.protocol.operation import Commands, Operation
from ray_dcp.protocol.planning import Planning
from ray_dcp.protocol.save_errors import no_overwrite, slow
from ray_dcp.protocol.shelf import Shelf
from ray_dcp.protocol.verdict import combine, identity, name_ranks

__all__ = ["MOST_TOLD_BYTES", "REASON_LENGTH", "JoinedSave"]

REASON_LENGTH = 500

MOST_TOLD_BYTES = 64 << 10
"""Longest manifest that every rank is sent. Why: it names all files, so that with 10,000 ranks that
each get one, 10 GB would leave the coordinator."""

MOST_ROUNDS = 3
"""A plan of earlier may turn out not to hold by what ranks are asked first; then they are asked for
all that a new one needs: few ranks first, where their rows may tell those of the others."""


class JoinedSave(Operation):
    """A save until it has a plan.

    Args:
        first: The first join; hand it to `receive` as well.
    """

    def __init__(self, first: SaveJoin) -> None:
        super().__init__(first)
        self._target = first.target
        self._options = first.options
        self._planning = Planning(first.world_size, first.options, Shelf(), first.target)
        self._seen = RecordsRead(0, None, None, ())
        self._error: CheckpointError | None = None
        self._warnings: list[str] = []
        self._rounds = 0
        self._stats: dict[int, bytes] = {}

    def use(self, shelf: Shelf) -> None:
        """Takes what the coordinator knows from earlier saves. To be called first."""
        self._planning = Planning(self.world_size, self._options, shelf, self._target)

    @abstractmethod
    def _on_plan(self, planned: Planned) -> Commands:
        """Takes the plan."""

    @abstractmethod
    def _fail(self, error: CheckpointError) -> Commands:
        """Fails the save."""

    def _on_join(self, join: SaveJoin) -> Commands:
        self._planning.take(join)
        if join.stats:
            self._stats[join.rank] = join.stats
        if self.phase == "joining":
            self._admit(join)
            return self._joined()
        self._note(join, join.error)
        return self._gathered()

    def join_together(self, first: SaveJoin, joins: Sequence[SaveJoin]) -> Commands | None:
        """Takes joins that are alike but for rank, fingerprint and values.

        Args:
            first: Any of them.
            joins: All of them.

        Returns:
            What to do now; None where they have to be taken one by one, and nothing has changed.
        """
        ranks = [join.rank for join in joins]
        plain = (
            self.phase == "joining"
            and self._outcome is None
            and not self._differing
            and identity(first) == identity(self._first)
            and self._openings.keys().isdisjoint(ranks)
            and self._are_new(ranks)
        )
        if not plain:
            return None
        self._planning.take_all(joins)
        self._openings.update(zip(ranks, joins, strict=True))
        self._note_all(step_of(first), ranks)
        return self._joined()

    def _joined(self) -> Commands:
        if not self._roll.is_complete:
            return self._wait(self._options.plan_timeout_s)
        if self._roll.errors:
            return self._fail(combine(self._roll.errors, self._target.url))
        return self._ask_ranks()

    def _ask_ranks(self) -> Commands:
        asked = self._planning.ask()
        if not asked:
            return self._step("reading", ReadRecords(self._target), self._options.plan_timeout_s)
        self._rounds += 1
        if self._rounds > MOST_ROUNDS:
            return self._fail(self._contradiction(f"answer of {name_ranks(asked)} without items"))
        self._call("gathering")
        for rank in range(self.world_size):
            if rank not in asked:
                self._roll.note(rank, None)
        answers = [self._ask(rank, reply) for rank, reply in asked.items()]
        return (*answers, *self._wait(self._options.plan_timeout_s))

    def _ask(self, rank: int, reply: Reply) -> Answer:
        step = step_of(self._planning.last_of(rank))
        del self._waiting[rank, step]
        self._given[rank, step] = reply
        return Answer(self.key, rank, step, reply)

    def _gathered(self) -> Commands:
        if not self._roll.is_complete:
            return self._wait(self._options.plan_timeout_s)
        if self._roll.errors:
            return self._fail(combine(self._roll.errors, self._target.url))
        return self._ask_ranks()

    def _read(self, seen: RecordsRead) -> Commands:
        if seen.committed is not None and not self._options.overwrite:
            return self._fail(no_overwrite(seen.committed, self._target.url))
        self._seen = seen
        self._warnings.extend(seen.warnings)
        plan = self._planning.plan()
        if isinstance(plan, Planned):
            return self._on_plan(plan)
        return self._step("planning", plan, self._options.plan_timeout_s)

    def _is_refused(self, planned: Planned) -> bool:
        """Whether the values of ranks differ, and may not; where they may, a warning says so."""
        if planned.disagreements and self._options.replicas != "check":
            self._warnings.append(f"{planned.disagreements}. The lowest rank's are saved")
            return False
        return bool(planned.disagreements)

    def _lacks(self, missing: RowsMissing) -> Commands:
        self._planning.lacks(missing.ranks)
        return self._ask_ranks()

    def _made(self, planned: Planned) -> Commands:
        self._planning.made(planned)
        return self._on_plan(planned)

    def _overdue_ranks(self, what: str, option: str) -> Commands:
        after_s: float = getattr(self._options, option)
        self._overdue(what, after_s, f"raise SaveOptions.{option}")
        return self._fail(combine(self._roll.errors, self._target.url))

    def _too_slow(self, option: str) -> Commands:
        after_s: float = getattr(self._options, option)
        return self._fail(slow(self.phase, option, after_s, self._target.url))
