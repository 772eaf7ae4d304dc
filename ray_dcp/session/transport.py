"""`Transport`: carries the messages of one rank to its coordinator; what a kind of session adds.

    member       inline_transport     socket_transport        ray_transport
    who, node    this process, ""     rank 0, host            the actor, Ray's id of the node
    ask          future of the loop   future of the link      reference; repeated over restarts
    call         without a deadline   as `ask`                through a gatherer, else as `ask`
    presence     registers calls      heartbeats              heartbeats
    ray          None                 None                    the actors of the session
    is_replaced  False                False                   the process is in another Ray
    close        ends the loop        leaves; ends the link   leaves; releases the actors

A transport to another process is a `heartbeat.HeartbeatTransport`: it carries heartbeats as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent import futures
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ray_dcp.commit_protocol.messages import Left, OpKey, Reply, Request
from ray_dcp.core.processes import wait_any
from ray_dcp.errors import CheckpointError, DeadlineError, ParticipantError
from ray_dcp.session.call_bound import LOOK_S, CallBound
from ray_dcp.session.membership import Membership
from ray_dcp.session.rank_progress import RankProgress

if TYPE_CHECKING:
    from ray_dcp.session.ray_actors import RayActors


class Presence(ABC):
    """Lets the coordinator know the calls of the user in which this rank is. Thread-safe."""

    @abstractmethod
    def add(self, progress: RankProgress, timeout_s: float) -> None:
        """Registers a call of the user that begins.

        Args:
            progress: Progress of the call.
            timeout_s: Silence, in seconds, that means a frozen process, for either side.
        """

    @abstractmethod
    def remove(self, progress: RankProgress) -> None:
        """Removes a call of the user that has ended."""

    @abstractmethod
    def leave(self, left: Left, wait_s: float) -> None:
        """Reports that this rank leaves an operation before its end. Never raises.

        Args:
            left: The operation and the reason. One that has ended does no harm.
            wait_s: How long to wait until the coordinator has acted on it, in seconds.
        """

    def cancelled(self, key: OpKey) -> None:
        """Handles that a save of this rank was cancelled."""
        return

    def queued_s(self, key: OpKey) -> float:
        """Returns how long the save of a call has waited in the queue, in seconds."""
        return 0.0

    def failure(
        self, out_of_reach: bool, outlives_restart: bool, staged: OpKey | None = None
    ) -> CheckpointError | None:
        """Returns why the coordinator will not answer any more; None while it may.

        Args:
            out_of_reach: Whether a call failed.
            outlives_restart: Whether the next incarnation of the coordinator can answer as well.
            staged: The operation, if the call reports staged bytes: the next incarnation may
                continue it, and a frozen coordinator is no failure as long as that may happen.
        """
        return None


class Transport(ABC):
    """Carries the messages of one rank to its coordinator. Thread-safe.

    Args:
        session: Name of the session.
        rank: This rank, from 0.
        world_size: Number of ranks.
        who: Description of the coordinator, for errors.
        node: Name of this rank's node; empty for a process that is alone.
    """

    ray: RayActors | None = None
    """The actors of a session in a Ray, beside its coordinator; None without Ray."""
    after_fork = ("", "Give no_dist=True to save or load alone there, or start it by spawn")
    """See `Membership`."""

    def __init__(self, session: str, rank: int, world_size: int, *, who: str, node: str) -> None:
        self.session, self.rank, self.world_size = session, rank, world_size
        self.who, self.node = who, node
        self.member = Membership(session, rank, world_size, self.after_fork)

    def call(self, request: Request, silence_s: float | None, bound: CallBound) -> Reply:
        """Returns the coordinator's reply to a request of this rank.

        Args:
            request: The request.
            silence_s: See `Session.call`.
            bound: When the call is given up.
        """
        reply: Reply = self.ask("call", request, self.caller, silence_s, bound=bound)
        return reply

    @abstractmethod
    def ask(self, method: str, *arguments: Any, bound: CallBound) -> Any:
        """Returns the result of a method of the coordinator; repeats the call if that may help.

        Args:
            method: Name of a method of `CoordinatorLoop`.
            arguments: Arguments of the method.
            bound: When the call is given up.

        Raises:
            DeadlineError: No answer in time.
            ParticipantError: The coordinator is gone, or out of reach.
            CheckpointError: The method raised it, or `bound.given_up` returned it.
        """

    @abstractmethod
    def presence(self) -> Presence:
        """Returns what lets the coordinator know the calls in which this rank is."""

    @property
    def caller(self) -> Any:
        """This process, for the coordinator; messages contain its string."""
        return None

    @property
    def is_replaced(self) -> bool:
        """Whether this process has left what the transport stands on, and can make another one."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Leaves the coordinator and releases all resources. Never raises because it is gone."""


def closed_meanwhile(session: str, rank: int) -> ParticipantError:
    """Returns the error of a call during which its own process closed the session."""
    return ParticipantError(
        f"Expected session {session!r} to be open until the end of the call, but this process "
        f"closed it meanwhile",
        rank=rank,
    )


class FutureTransport(Transport):
    """A transport whose calls are futures of a coordinator that is never restarted."""

    @abstractmethod
    def send(self, method: str, *arguments: Any) -> Future[Any]:
        """Returns the future result of a method of the coordinator."""

    def ask(self, method: str, *arguments: Any, bound: CallBound) -> Any:
        """See `Transport.ask`."""
        left_s, answer = bound.begin(), self.send(method, *arguments)
        try:
            while True:
                wait_s = left_s()
                wait_any([answer], min(wait_s, LOOK_S))
                if answer.done():
                    return answer.result()
                reason = bound.given_up(False)
                if reason is not None:
                    raise reason
                if wait_s <= 0:
                    raise DeadlineError(
                        f"Expected {self.who} to answer within {bound.timeout_s:g} s, but it did "
                        f"not. Look whether that process is frozen, or raise the timeout",
                        rank=self.rank,
                    )
        except futures.CancelledError:
            raise closed_meanwhile(self.session, self.rank) from None
        finally:
            answer.cancel()
