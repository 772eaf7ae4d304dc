"""When a run whose node is taken away is saved once more: as late as a save still fits. Pure."""

from __future__ import annotations

__all__ = ["is_last_round", "next_round_s"]

SPARE = 2.0
"""Times the duration of a save that must be left before the deadline."""
SPARE_S = 2.0
"""And this on top, in seconds."""


def next_round_s(now_s: float, deadline_s: float | None, took_s: float | None) -> float | None:
    """Returns how long to wait before saving again, in seconds; None when that is not worth it.

    Args:
        now_s: Seconds since 1970.
        deadline_s: When the node goes; None when nobody said.
        took_s: How long the save took that was just made, with asking for it; None without one.

    Example:
        >>> next_round_s(100.0, 130.0, 4.0), next_round_s(120.0, 130.0, 4.0)
        (20.0, None)
    """
    if deadline_s is None or took_s is None:
        return None
    wait_s = deadline_s - (SPARE * took_s + SPARE_S) - now_s
    return wait_s if wait_s > took_s else None


def is_last_round(left_s: float, took_s: float | None) -> bool:
    """Tells whether no further save would be worth it after one that is begun now.

    Args:
        left_s: Seconds until the node goes.
        took_s: How long a save takes, as far as is known.

    Example:
        >>> is_last_round(30.0, 4.0), is_last_round(10.0, 4.0), is_last_round(10.0, None)
        (False, True, False)
    """
    return took_s is not None and next_round_s(took_s, left_s, took_s) is None
