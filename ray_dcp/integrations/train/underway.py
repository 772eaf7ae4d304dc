"""The saves of a checkpointer that are under way on this rank, and how they ended.

All ranks make the same saves in the same order, and a save has one outcome on all of them. So
each rank finds by itself which ones have ended, at the same call as the others: one that was begun
has waited until no more than `max_pending` others were left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_dcp.errors import (
    CheckpointError,
    CommitUnknownError,
    RankDisagreementError,
    SaveSkippedError,
)
from ray_dcp.handle import SaveHandle
from ray_dcp.integrations.train.names import StepFolder
from ray_dcp.protocol.messages import Target
from ray_dcp.runtime.outcome import outcome

__all__ = ["Ended", "Save", "UnderWay", "is_misuse"]

ASK_AGAIN_S = (0.0, 0.5, 2.0)
"""When a storage is asked for an outcome that nobody told, in seconds after one another."""

logger = logging.getLogger(__name__)


@dataclass
class Save:
    """One that was begun."""

    folder: StepFolder
    target: Target
    metrics: Mapping[str, Any]
    handle: SaveHandle
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def was_skipped(self) -> bool:
        """Whether it ended at once, as enough others were under way."""
        return self.handle.done() and isinstance(self.handle.exception(), SaveSkippedError)


@dataclass(frozen=True)
class Ended:
    """How one ended."""

    save: Save
    error: CheckpointError | None = None
    """Why it is not committed; the same on all ranks."""
    created_s: float | None = None
    """When it was planned, by the coordinator's clock."""


class UnderWay:
    """The saves that have not been looked at since they were begun.

    Args:
        max_pending: How many may be under way at a time.
        ask: Returns the outcome of an attempt, by its place.
        wait: Lets seconds pass.
    """

    def __init__(
        self,
        max_pending: int,
        *,
        ask: Callable[[Target, str], str] | None = None,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._max_pending = max_pending
        self._ask = ask or outcome
        self._wait = wait
        self._saves: list[Save] = []

    def __len__(self) -> int:
        return len(self._saves)

    @property
    def newest(self) -> Save | None:
        """The one that was begun last; None when it has ended."""
        return self._saves[-1] if self._saves else None

    def add(self, save: Save) -> None:
        """Notes a save that was begun."""
        self._saves.append(save)

    def ended(self, *, all_of_them: bool = False) -> list[Ended]:
        """Returns those that have ended, on all ranks the same, in the order of their calls.

        Args:
            all_of_them: Wait for the others as well.

        Raises:
            CommitUnknownError: Nobody can say how one ended: what other ranks know of it may be
                something else.
        """
        newest = self._saves[-1:]
        if newest and newest[0].was_skipped:
            self._saves.pop()
            skipped = [self._end_of(newest[0])]
            return [*(self.ended(all_of_them=True) if all_of_them else []), *skipped]
        count = len(self._saves) if all_of_them else max(0, len(self._saves) - self._max_pending)
        found = []
        for _ in range(count):
            found.append(self._end_of(self._saves[0]))
            self._saves.pop(0)
        return found

    def _end_of(self, save: Save) -> Ended:
        error = save.handle.exception()
        if isinstance(error, CommitUnknownError):
            error = self._settle(save, error)
        if error is None:
            return Ended(save, created_s=_created_s(save.handle))
        if isinstance(error, CheckpointError):
            return Ended(save, error)
        raise error

    def _settle(self, save: Save, error: CommitUnknownError) -> CheckpointError | None:
        """Returns why a save is not committed whose outcome this rank was not told."""
        for pause_s in ASK_AGAIN_S:
            self._wait(pause_s)
            try:
                found = self._ask(save.target, error.attempt)
            except CheckpointError:
                continue
            if found == "committed":
                return None
            if found == "aborted":
                return CheckpointError(f"It was aborted: {error.message}",
                                       checkpoint_id=save.target.url)  # fmt: skip
        # Why raised whatever on_error says: ranks that know more would wait for this one.
        raise error


def is_misuse(error: CheckpointError) -> bool:
    """Tells whether an error says that the ranks do not make the same calls."""
    causes = [error, *(cause for cause, _ in error.failures.values())]
    return any(isinstance(cause, RankDisagreementError) for cause in causes)


def _created_s(handle: SaveHandle) -> float | None:
    return getattr(handle.result(), "created_s", None)
