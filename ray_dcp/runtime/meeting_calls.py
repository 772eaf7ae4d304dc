"""The calls in which ranks wait for each other before a session begins."""

from __future__ import annotations

import asyncio

from ray_dcp.errors import RankDisagreementError
from ray_dcp.runtime.meeting import Meeting

__all__ = ["MeetingCalls"]


class MeetingCalls:
    """Who waits in a `Meeting`. Used in one event loop's thread.

    Args:
        meeting: What decides.

    Attributes:
        num_waiting: How many ranks wait.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._loop = asyncio.get_running_loop()
        self._all_met: asyncio.Future[RankDisagreementError | None] = self._loop.create_future()
        self.num_waiting = 0

    async def enter(
        self, rank: int, world_size: int, word: str, timeout_s: float
    ) -> str | list[int]:
        """Returns the generation on which all ranks agree; see `Coordinator.enter`.

        Raises:
            RankDisagreementError: The ranks differ about their number; all are told.
        """
        self.num_waiting += 1
        try:
            met = self._all_met
            try:
                generation = self._meeting.enter(rank, world_size, word)
            except RankDisagreementError as error:
                self._end(error)
                self._loop.call_later(timeout_s, self._meeting.forget_dispute)
                raise
            if generation is not None:
                self._end(None)
                return generation
            try:
                dispute = await asyncio.wait_for(asyncio.shield(met), timeout_s)
            except asyncio.TimeoutError:
                return self._meeting.missing
            if dispute is not None:
                raise dispute
            return self._meeting.generation_for(rank, word) or self._meeting.missing
        finally:
            self.num_waiting -= 1

    def _end(self, dispute: RankDisagreementError | None) -> None:
        """Tells all that wait, and begins the next meeting."""
        self._all_met.set_result(dispute)
        self._all_met = self._loop.create_future()
