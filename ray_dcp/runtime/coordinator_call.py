"""A call of an actor: waits, retries, and turns Ray's errors into errors of ray_dcp."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
)

from ray_dcp.commit_protocol.liveness import LONG_WAIT_S, OUT_OF_REACH_S
from ray_dcp.errors import CheckpointError, DeadlineError, InternalError, ParticipantError
from ray_dcp.runtime import ray_calls, ray_private

logger = logging.getLogger(__name__)

MOST_MADE = 20
"""Most times that an actor which died for good is created again for one call."""

REACHED_S = 10.0
"""A call that lasted longer than this, in seconds, had reached the actor."""

LOOK_S = 0.5
"""Interval at which a waiting call checks whether it is still useful, in seconds."""

_PAUSE_S = (0.05, 2.0)
"""The first and the longest pause before a call is repeated, in seconds."""

T = TypeVar("T")


@ray_private.starting_no_ray()
def call_actor(
    who: str,
    handle: Callable[[bool], Any],
    send: Callable[[Any], Any],
    *,
    timeout_s: float,
    rank: int | None = None,
    given_up: Callable[[bool], CheckpointError | None] = lambda _: None,
    uncounted_s: Callable[[], float] = lambda: 0.0,
) -> Any:
    """Returns an actor's answer; repeats the call if the actor died or was out of reach.

    The actor's methods must be idempotent, as a call whose answer was lost is repeated.

    Args:
        who: Description of the actor, for errors.
        handle: Returns the actor's handle; its argument requests a fresh one.
        send: Starts the call on a handle, and returns the reference of the answer.
        timeout_s: For everything, including repetitions, in seconds.
        rank: The calling rank, for errors.
        given_up: Called about every half second, and after the actor was out of reach; returns why
            waiting any longer is useless, or None. Its argument says whether the actor was ever out
            of reach.
        uncounted_s: Returns how much of the elapsed time does not count, in seconds.

    Raises:
        DeadlineError: No answer in time.
        ParticipantError: The actor died and can't be created again, or the cluster is gone.
        CheckpointError: The actor raised it, or `given_up` returned it.
    """
    begun_s = time.monotonic()

    def left_s() -> float:
        return begun_s + timeout_s + uncounted_s() - time.monotonic()

    failed = fresh = is_logged = False
    num_made, pause_s = 0, _PAUSE_S[0]
    lost_s: float | None = None
    while True:
        begin_s = time.monotonic()
        try:
            actor = handle(fresh)
            check_ray(who, rank)
            answer = _sent(send, actor, who, rank)
            _await(answer, left_s, lambda: given_up(failed), who, rank)  # noqa: B023
            return ray_calls.get(answer, timeout=max(0.0, left_s()))
        except GetTimeoutError:
            raise DeadlineError(
                f"Expected {who} to answer within {timeout_s:g} s, but it did not. Look whether "
                f"its process is frozen or its node is gone, or raise the timeout",
                rank=rank,
            ) from None
        except RayTaskError as error:
            raise _raised_by(error, who, rank) from None
        except (ActorUnavailableError, ActorDiedError) as error:
            # A dead actor is made again; one that restarts keeps its handle.
            fresh = isinstance(error, ActorDiedError)
            failed, num_made = True, num_made + fresh
            now_s = time.monotonic()
            if lost_s is None or now_s - begin_s > REACHED_S:
                lost_s, pause_s = now_s, _PAUSE_S[0]
            is_over = now_s >= lost_s + OUT_OF_REACH_S or left_s() <= 0
            if num_made >= MOST_MADE or is_over:
                raise _out_of_reach(error, who, rank) from error
            if now_s - lost_s > LONG_WAIT_S and not is_logged:
                is_logged = True
                logger.warning(
                    "No call has reached %s for %.0f s (Ray reports: %s); it fails after %g s",
                    who,
                    now_s - lost_s,
                    error,
                    OUT_OF_REACH_S,
                )
        except (RaySystemError, RayActorError, RayError, ConnectionError) as error:
            raise _out_of_reach(error, who, rank) from error
        _pause(min(pause_s, left_s()))
        pause_s = min(2 * pause_s, _PAUSE_S[1])


def check_ray(who: str, rank: int | None = None) -> None:
    """Raises `ParticipantError` if this process has shut its Ray down.

    *Why*: a call of Ray in a process without Ray starts a new cluster.

    Args:
        who: Description of the actor to call.
        rank: The calling rank, for errors.
    """
    if not ray.is_initialized():
        raise ParticipantError(
            f"Expected Ray to be up in this process to reach {who}, but it was shut down. Call "
            f"ray.shutdown() after the last save or load has ended; to go on, connect again",
            rank=rank,
        )


def _pause(seconds: float) -> None:
    threading.Event().wait(max(0.0, seconds))


def _sent(send: Callable[[Any], Any], actor: Any, who: str, rank: int | None) -> Any:
    try:
        with ray_calls.inside():
            return send(actor)
    except Exception as error:
        # So does Ray call a handle that is of another cluster than the one it is connected to.
        if type(error) is Exception:
            raise _out_of_reach(error, who, rank) from error
        raise


def _await(
    answer: Any,
    left_s: Callable[[], float],
    given_up: Callable[[], CheckpointError | None],
    who: str,
    rank: int | None,
) -> None:
    """Waits until there is an answer or the time has passed.

    Raises:
        ParticipantError: Ray was shut down meanwhile.
        CheckpointError: `given_up` returned it.
    """
    while True:
        check_ray(who, rank)
        reason = given_up()
        if reason is not None:
            raise reason
        wait_s = left_s()
        done, _ = ray_calls.wait([answer], timeout=max(0.0, min(wait_s, LOOK_S)))
        if done or wait_s <= 0:
            return


def _raised_by(error: RayTaskError, who: str, rank: int | None) -> CheckpointError:
    cause = getattr(error, "cause", None)
    if isinstance(cause, CheckpointError):
        return cause
    return InternalError(f"{who} failed: {error}", rank=rank)


def _out_of_reach(error: Exception, who: str, rank: int | None) -> ParticipantError:
    return ParticipantError(
        f"Expected {who} to be reachable, but Ray says {type(error).__name__}: {error}. Look "
        f"whether the Ray cluster still runs, then restart the ranks",
        rank=rank,
    )
