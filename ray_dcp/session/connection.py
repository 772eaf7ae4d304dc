"""`Connection`: whether this process is still connected to the Ray of its handles.

Why: users shut Ray down, and start it again. A handle from before is useless then, and a call to
Ray in a process without Ray would start a new cluster.

*Careful*: importing this module does not import ray; a process that is alone never needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ray_dcp.commit_protocol.messages import Reply, Request
from ray_dcp.errors import CommitUnknownError, ParticipantError


def named_address() -> str | None:
    """Returns the cluster that the user named with `RAY_ADDRESS`, or None."""
    return os.environ.get("RAY_ADDRESS") or None


class Connection:
    """The connection of this process to Ray, as it is when this object is created.

    Args:
        who: Description of its user.
        rank: This rank, for errors.
    """

    def __init__(self, who: str, rank: int) -> None:
        # Why here: a process that is alone has no need of Ray.
        from ray_dcp.session import ray_calls

        ray_calls.survive_shutdown()
        self._who, self._rank = who, rank
        self._now = ray_calls.this_connection
        self._made_with = self._now()

    @property
    def is_up(self) -> bool:
        """Whether the process is still connected to the same Ray."""
        return self._made_with is not None and self._now() == self._made_with

    @property
    def is_replaced(self) -> bool:
        """Whether the process is connected to another Ray, or anew to the same one."""
        return self._now() not in (None, self._made_with)

    def check(self) -> None:
        """Raises `ParticipantError` if the connection is not up."""
        if not self.is_up:
            raise ParticipantError(
                f"Expected the Ray that {self._who} was made with, but this process has shut it "
                f"down since. Call ray.shutdown() after the last save or load has ended; to go "
                f"on, call ray.init() again on all ranks, or, after ray_dcp.connect, close the "
                f"session and connect again",
                rank=self._rank,
            )


class Disconnected(Exception):
    """Ray was shut down in this process during a call."""


def until_disconnected(
    call: Callable[[Request], Reply], connection: Connection | None
) -> Callable[[Request], Reply]:
    """Returns a function that calls the coordinator, and raises `Disconnected` after a shutdown.

    *Why* not as for any other rank without an answer, which votes against its own save: the stager
    and the coordinator may live, in a cluster that only this process left.

    Args:
        call: Returns the coordinator's reply.
        connection: Connection of the session; None for a session without Ray.
    """

    def connected(request: Request) -> Reply:
        try:
            return call(request)
        except (ParticipantError, SystemExit) as error:
            # Ray ends the threads that wait for it by SystemExit when it is shut down.
            if isinstance(error, ParticipantError) and (connection is None or connection.is_up):
                raise
            raise Disconnected from error

    return connected


def shut_down_meanwhile(url: str, attempt: str, rank: int) -> CommitUnknownError:
    """Returns the error of a save whose process shut Ray down before its outcome.

    Args:
        url: URL of the checkpoint.
        attempt: The attempt.
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
