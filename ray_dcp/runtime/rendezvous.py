"""How ranks that only know a name agree on a session.

How ranks that only know a name agree on a session, without any group: pure.

Each rank enters with a word of its own that it never used before. When all have come, the session
gets a generation, told to all. A rank that comes with another word is a new process: the ranks
that met before are a session of the past, and a new meeting begins. So a job that is restarted
under its old name never gets an answer that was meant for the job before.

The calls in which ranks wait for each other before a session begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ray_dcp.errors import InvalidRequestError, RankDisagreementError


class Rendezvous:
    """Ranks that come to one name.

    Args:
        new_generation: Makes up a word that no meeting had before.

    Example:
        >>> meeting = Rendezvous(lambda: "g1")
        >>> meeting.enter(0, 2, "a")
        >>> meeting.missing
        [1]
        >>> meeting.enter(1, 2, "b"), meeting.enter(0, 2, "a")
        ('g1', 'g1')
    """

    def __init__(self, new_generation: Callable[[], str]) -> None:
        self._new_generation = new_generation
        self._world_size = 0
        self._words: dict[int, str] = {}
        self._generation: str | None = None
        self._dispute: RankDisagreementError | None = None
        self._told: set[int] = set()

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come to the meeting that is going on."""
        return [rank for rank in range(self._world_size) if rank not in self._words]

    def enter(self, rank: int, world_size: int, word: str) -> str | None:
        """Lets a rank in; returns the generation once all have come, None before.

        Args:
            rank: Who.
            world_size: How many it expects.
            word: What tells this process from an earlier one of the same rank.

        Raises:
            InvalidRequestError: The rank is not one of the world.
            RankDisagreementError: Another rank of this meeting expects another number of ranks.
                Every rank that was in the meeting or comes to it is told the same, once.
        """
        if world_size < 1 or not 0 <= rank < world_size:
            raise InvalidRequestError(
                f"Expected a rank from 0 to world_size - 1, but found rank {rank} of "
                f"{world_size}. Give each process its own number",
                rank=rank,
            )
        if self._dispute is not None and rank not in self._told:
            self._told.add(rank)
            raise self._dispute
        if self.generation_for(rank, word) is not None:
            return self._generation
        self.forget_dispute()
        if self._generation is not None:
            self._words, self._generation = {}, None
        if self._words and world_size != self._world_size:
            self._dispute = RankDisagreementError(
                f"Expected every rank to give one world_size, but rank {rank} gives "
                f"{world_size} and ranks {sorted(self._words)} gave {self._world_size}",
                rank=rank,
            )
            self._told = {*self._words, rank}
            self._words = {}
            raise self._dispute
        self._world_size = world_size
        self._words[rank] = word
        if not self.missing:
            self._generation = self._new_generation()
        return self._generation

    def forget_dispute(self) -> None:
        """Lets ranks that were not told of a disagreement begin anew."""
        self._dispute, self._told = None, set()

    def generation_for(self, rank: int, word: str) -> str | None:
        """Returns the generation of the meeting that this process is part of, if it is over."""
        return self._generation if self._words.get(rank) == word else None


class RendezvousCalls:
    """Who waits in a `Rendezvous`. Used in one event loop's thread.

    Args:
        meeting: What decides.

    Attributes:
        num_waiting: How many ranks wait.
    """

    def __init__(self, meeting: Rendezvous) -> None:
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
