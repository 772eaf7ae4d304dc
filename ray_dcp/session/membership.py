"""`Membership`: one rank in a session, until its process leaves it."""

from __future__ import annotations

from ray_dcp.core.processes import OwnProcess
from ray_dcp.errors import InvalidRequestError


class Membership:
    """One rank in a session, until its process leaves it.

    Args:
        session: Name of the session.
        rank: The rank.
        world_size: Number of ranks.
        after_fork: What a forked child must not use, if not the session, and what it does instead.
    """

    def __init__(
        self, session: str, rank: int, world_size: int, after_fork: tuple[str, str]
    ) -> None:
        self.closed = False
        self.process = OwnProcess()
        self._text = f"Session({session!r}, rank={rank}, world_size={world_size})"
        self._rank, self._after_fork = rank, after_fork

    def __repr__(self) -> str:
        return self._text

    def check(self) -> None:
        """Raises `InvalidRequestError` in a forked child, and after the process has left."""
        what, instead = self._after_fork
        self.process.check(what or self._text, instead)
        if self.closed:
            raise InvalidRequestError(
                f"Expected an open session, but {self._text} was closed. Make another one, or "
                f"drop the one that ray_dcp.connect returned before",
                rank=self._rank,
            )
