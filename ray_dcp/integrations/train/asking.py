"""Asks all ranks of a worker group for one save, and waits for it: what a controller does.

Ranks are reached through `Ranks`; here is no Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ray_dcp.integrations.train.board import BOARD, Asked, Held, State
from ray_dcp.integrations.train.rounds import is_last_round

__all__ = ["Fit", "Ranks", "Result", "ask_all", "follow", "tier_that_fits"]

Fit = Literal["storage", "memory", "none"]

MARGIN = 1.25
"""How much longer than the ones before a save may take."""
MARGIN_S = 0.5
"""And this on top, in seconds."""
LOOK_S = 0.05
"""How often ranks are asked how far they are, in seconds."""


class Ranks(Protocol):
    """The workers of a group."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Returns what a function of this module gives in each worker, by rank.

        Raises:
            Exception: A worker does not answer.
        """
        ...


@dataclass(frozen=True)
class Result:
    """What became of asking."""

    asked: bool
    fit: Fit = "storage"
    why: str = ""
    """Why not, in words."""


def tier_that_fits(
    left_s: float | None, stage_s: float | None, commit_s: float | None
) -> Fit:  # fmt: skip
    """Returns how far a save would come in the time that is left, as far as earlier ones tell.

    "memory": its bytes would be with the stagers, from where they go on to storage for as long as
    the machines live.

    Args:
        left_s: Seconds that are left; None for no end.
        stage_s: How long training waited for earlier saves; None when there was none.
        commit_s: How long they took until they were committed.

    Example:
        >>> tier_that_fits(30, 0.2, 12), tier_that_fits(5, 0.2, 12), tier_that_fits(0.3, 0.2, 12)
        ('storage', 'memory', 'none')
        >>> tier_that_fits(5, None, None)
        'storage'
    """
    for fit, taken_s in (("storage", commit_s), ("memory", stage_s)):
        if left_s is None or (taken_s or 0.0) * MARGIN + MARGIN_S <= left_s:
            return "storage" if fit == "storage" else "memory"
    return "none"


def ask_all(
    ranks: Ranks,
    seq: str,
    reason: str,
    *,
    linger_s: float = 0.0,
    left_s: float | None = None,
    took_s: float | None = None,
) -> Result:
    """Asks all ranks to save at the same step, the next that none of them has decided.

    Args:
        ranks: Who.
        seq: Of the request; never used before.
        reason: For the log.
        linger_s: See `Asked.linger_s`; where `left_s` is given, only if no further save would fit.
        left_s: Seconds in which it must be committed; None for no end.
        took_s: How long the last such save took, with asking for it; None when there was none.

    Raises:
        Exception: A worker does not answer.
    """
    try:
        held: Sequence[Held | None] = ranks.call(hold, seq)
        answers = [one for one in held if one is not None]
        if not held or len(answers) < len(held):
            ranks.call(drop, seq)
            missing = [rank for rank, one in enumerate(held) if one is None]
            return Result(False, why=f"rank(s) {missing} have no open checkpointer, or are asked")
        commit_s = _longest(one.commit_s for one in answers)
        fit = tier_that_fits(left_s, _longest(one.stage_s for one in answers), commit_s)
        if fit == "none":
            ranks.call(drop, seq)
            return Result(False, fit, f"no save fits in {left_s or 0:.1f} s: earlier ones took "
                          f"longer")  # fmt: skip
        after = max(one.last_step for one in answers)
        ends = left_s is None or is_last_round(left_s, _longest((commit_s, took_s)))
        told = ranks.call(tell, Asked(seq, reason, after, linger_s if ends else 0.0))
    except Exception:
        ranks.call(drop, seq)
        raise
    if not all(told):
        ranks.call(drop, seq)
        return Result(False, fit, "a rank had waited for the word for too long")
    return Result(True, fit)


def follow(
    ranks: Ranks,
    seq: str,
    limit_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], object] = time.sleep,
) -> State:
    """Returns how the save of a request ended; how far it is when the limit has passed.

    Args:
        ranks: Who were asked.
        seq: As there.
        limit_s: How long to wait, in seconds.
        clock: Seconds that only go forward.
        wait: Lets seconds pass.

    Raises:
        Exception: A worker does not answer.
    """
    end_s = clock() + limit_s
    while True:
        states: list[State] = ranks.call(state, seq)
        for worst in ("failed", "unknown"):
            if worst in states:
                return "failed"
        if all(one == "committed" for one in states):
            return "committed"
        if clock() >= end_s:
            return "saving" if "waiting" not in states else "waiting"
        wait(LOOK_S)


def _longest(seconds: Iterable[float | None]) -> float | None:
    return max((one for one in seconds if one is not None), default=None)


# What workers are told to call, by name: on the board of their process.


def hold(seq: str) -> Held | None:
    """See `Board.hold`."""
    return BOARD.hold(seq)


def tell(asked: Asked) -> bool:
    """See `Board.ask`."""
    return BOARD.ask(asked)


def drop(seq: str) -> None:
    """See `Board.drop`."""
    BOARD.drop(seq)


def state(seq: str) -> State:
    """See `Board.state`."""
    return BOARD.state(seq)
