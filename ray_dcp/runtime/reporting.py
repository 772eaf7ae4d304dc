"""Tells whoever collects receipts what became of each file that a stager wrote."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError, RayTaskError

from ray_dcp.stage.values import StageKey, StageReport

__all__ = ["Reporter", "Reports"]

REPORT_TRIES = 8
"""How often a report is told that nobody answers: over about half a minute."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reporter:
    """Whom a stager tells what became of each file."""

    actor: Any
    """Handle of a Ray actor."""
    method: str
    """Its method that takes a `StageReport` and returns False when nobody needs the share that it
    is of. May be called twice with the same."""


class Reports:
    """Tells reports, from any thread.

    Args:
        loop: Carries the calls.
        give_up: Told of shares that nobody needs any more.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, give_up: Callable[[StageKey], None]
    ) -> None:  # fmt: skip
        self._loop = loop
        self._give_up = give_up

    def tell(self, reporter: Reporter | None, report: StageReport) -> None:
        """Tells a report; returns when it was answered, or given up. Not in the loop's thread."""
        if reporter is not None:
            asyncio.run_coroutine_threadsafe(self._tell(reporter, report), self._loop).result()

    async def _tell(self, reporter: Reporter, report: StageReport) -> None:
        error: Exception | None = None
        for attempt in range(REPORT_TRIES):
            try:
                is_needed = await getattr(reporter.actor, reporter.method).remote(report)
            except RayTaskError as exc:
                error = exc
                if attempt >= 1:
                    break
            except (RayError, OSError) as exc:
                error = exc
            else:
                if is_needed is False:
                    self._give_up(report.key)
                return
            await asyncio.sleep(min(0.1 * 2**attempt, 10.0))
        logger.warning(
            "Nobody took what became of file %d of %s (%s: %s). It is kept until it is released",
            report.file, report.key, type(error).__name__, error,
        )  # fmt: skip
