"""Waits for one call on every rank: a rank that dies is named, those that wait for it released."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from ray_dcp.errors import CheckpointError, DeadlineError, ParticipantError
from ray_dcp.runtime import ray_calls

__all__ = ["gather"]

_LOOK_S = 1.0


def gather(
    answers: Sequence[Any],
    actors: Sequence[Any],
    *,
    doing: str,
    timeout_s: float | None,
    release_s: float,
) -> list[Any]:
    """Returns the values of one call on every rank, in their order.

    Args:
        answers: A reference for each rank that was called.
        actors: The ranks' actors, from rank 0.
        doing: What was called, for errors.
        timeout_s: For everything, in seconds; None: no limit.
        release_s: How long the others may take after one died, in seconds. Those that still wait
            then are killed: a process that is stuck in a collective can't be freed otherwise.

    Raises:
        ParticipantError: A rank died.
        DeadlineError: Time is up; the message names the ranks that have not answered.
        Exception: What was raised on the lowest rank that raised, when none died.
    """
    values: dict[int, Any] = {}
    failed: dict[int, Exception] = {}
    dead: dict[int, Exception] = {}
    waiting = {answer: rank for rank, answer in enumerate(answers)}
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    release_end_s = None
    while waiting:
        now_s = time.monotonic()
        limits = [limit - now_s for limit in (end_s, release_end_s) if limit is not None]
        if limits and min(limits) <= 0:
            break
        done, _ = ray_calls.wait(list(waiting), num_returns=1, timeout=min([_LOOK_S, *limits]))
        for answer in done:
            _take(answer, waiting.pop(answer), values, failed, dead)
        if dead and release_end_s is None:
            release_end_s = time.monotonic() + release_s
    stuck = sorted(waiting.values())
    if dead:
        for rank in stuck:
            ray_calls.kill(actors[rank])
        raise _died(dead, failed, stuck, doing)
    if stuck:
        raise DeadlineError(
            f"Expected {doing} to end on all {len(answers)} ranks within {timeout_s:g} s, but "
            f"{_ranks(stuck)} did not. Look what they do, or raise the timeout",
            rank=stuck[0],
        )
    if failed:
        raise _raised(failed, len(answers))
    return [values[rank] for rank in range(len(answers))]


def _take(
    answer: Any,
    rank: int,
    values: dict[int, Any],
    failed: dict[int, Exception],
    dead: dict[int, Exception],
) -> None:
    try:
        values[rank] = ray_calls.get(answer)
    except RayActorError as error:
        dead[rank] = error
    except RayTaskError as error:
        failed[rank] = _cause(error, rank)
    except RayError as error:
        failed[rank] = error


def _cause(error: RayTaskError, rank: int) -> Exception:
    """Returns what the function raised, as it was, with a note of where."""
    cause = getattr(error, "cause", None)
    if not isinstance(cause, Exception):
        return error
    notes = [*getattr(cause, "__notes__", ()), f"Raised on rank {rank}:\n{error}"]
    cause.__notes__ = notes
    return cause


def _raised(failed: Mapping[int, Exception], num_ranks: int) -> Exception:
    first = min(failed)
    error = failed[first]
    if isinstance(error, CheckpointError) and error._failures is None:
        error.with_failures(_failures(failed))
    if len(failed) < num_ranks and not isinstance(error, CheckpointError):
        note = f"Raised on {_ranks(sorted(failed))} of {num_ranks}"
        error.__notes__ = [*getattr(error, "__notes__", ()), note]
    return error


def _died(
    dead: Mapping[int, Exception],
    failed: Mapping[int, Exception],
    stuck: Sequence[int],
    doing: str,
) -> ParticipantError:
    reasons = [f"rank {rank}: {_first_line(error)}" for rank, error in sorted(dead.items())]
    released = f" {_ranks(stuck)} still waited and was ended." if stuck else ""
    error = ParticipantError(
        f"Expected all ranks to live through {doing}, but {_ranks(sorted(dead))} died."
        f"{released} Call resize to replace what is gone. " + "; ".join(reasons),
        rank=min(dead),
    )
    error.with_failures(_failures({**failed, **dead}))
    return error


def _failures(
    errors: Mapping[int, Exception],
) -> dict[int, tuple[BaseException, traceback.StackSummary]]:
    return {
        rank: (error, traceback.extract_tb(error.__traceback__))
        for rank, error in sorted(errors.items())
    }


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:1] + lines[-1:]) if lines else type(error).__name__


def _ranks(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
