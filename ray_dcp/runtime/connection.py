"""`Connection`: whether this process is still connected to the Ray that its handles are of.

Users shut Ray down, and start it again. A handle of before is of no use then, and worse: a call
of Ray's in a process without Ray starts a new cluster, without being asked.
"""

from __future__ import annotations

from collections.abc import Callable

from ray_dcp.errors import CommitUnknownError, ParticipantError
from ray_dcp.protocol.messages import Reply, Request

__all__ = ["Connection", "Disconnected", "shut_down_meanwhile", "until_disconnected"]


class Connection:
    """This process's connection to Ray, as it is when this is made.

    Args:
        who: Needs it, in words.
        rank: This rank, for errors.
    """

    def __init__(self, who: str, rank: int) -> None:
        # Why here: a process that is alone has no need of Ray.
        from ray_dcp.runtime import hooks, own_ray

        hooks.survive_shutdown()
        self._who, self._rank = who, rank
        self._own = own_ray.joined()
        self._now = hooks.this_connection
        self._made_with = self._now()

    @property
    def is_up(self) -> bool:
        """Whether it is the same still."""
        return self._made_with is not None and self._now() == self._made_with

    @property
    def is_lost(self) -> bool:
        """Whether it is to a Ray of our own that has died; see `OwnRay.is_lost`."""
        return self._own is not None and self._own.is_lost

    def check_own(self) -> None:
        """Raises `ParticipantError` when it is lost."""
        if self._own is not None:
            self._own.check(self._rank)

    def check(self) -> None:
        """Raises `ParticipantError` when it is lost, or not up."""
        self.check_own()
        if not self.is_up:
            raise ParticipantError(
                f"Expected the Ray that {self._who} was made with, but this process has shut it "
                f"down since. Call ray.shutdown() after the last save or load has ended; to go "
                f"on, close the session and connect again",
                rank=self._rank,
            )


class Disconnected(Exception):
    """Ray was shut down in this process while something of it was under way."""


def until_disconnected(
    call: Callable[[Request], Reply], connection: Connection | None
) -> Callable[[Request], Reply]:
    """Returns what calls the coordinator, or raises `Disconnected`.

    *Why* not as for any other rank that gets no answer, which votes against its own save: the
    stager and the coordinator may live, in a cluster that this process only left. Where a Ray of
    our own was lost they do not, and its error is raised.

    Args:
        call: Returns the coordinator's reply.
        connection: Of the session; None for one without Ray.
    """

    def connected(request: Request) -> Reply:
        try:
            return call(request)
        except (ParticipantError, SystemExit) as error:
            if connection is not None:
                connection.check_own()
            # Ray ends the threads that wait for it by SystemExit when it is shut down.
            if isinstance(error, ParticipantError) and (connection is None or connection.is_up):
                raise
            raise Disconnected from error

    return connected


def shut_down_meanwhile(url: str, attempt: str, rank: int) -> CommitUnknownError:
    """Returns the error of a save whose process shut Ray down before its outcome.

    Args:
        url: Where it saves to.
        attempt: Its attempt.
        rank: This rank.
    """
    return CommitUnknownError(
        f"Expected Ray to be up until the save had ended, but it was shut down in this process "
        f"meanwhile. A cluster that goes on may still commit it: ask ray_dcp.outcome({url!r}, "
        f"{attempt!r}). Wait for the handle before ray.shutdown()",
        attempt=attempt,
        checkpoint_id=url,
        rank=rank,
    )
