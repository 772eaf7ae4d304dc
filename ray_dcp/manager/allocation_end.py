"""`AllocationEnd`: when the allocation of this job ends, as its `BeforeEnd` policies know it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from ray_dcp.errors import InvalidRequestError
from ray_dcp.manager.save_policies import BeforeEnd, seconds_of

logger = logging.getLogger(__name__)

SLURM_END = "SLURM_JOB_END_TIME"
"""Variable in which Slurm gives the end of a job, in seconds since the epoch. A time limit that is
changed later does not change it."""


class AllocationEnd:
    """The end of the allocation, as rank 0 knows it.

    Args:
        policies: The policies that ask for it.
    """

    def __init__(self, policies: Sequence[BeforeEnd]) -> None:
        self._policies = policies
        self._slurm_s: float | None = None
        self._is_read = self._is_warned = False

    def seconds(self) -> float | None:
        """Returns the earliest end, in seconds since the epoch; None if none is known.

        A function of the user's that fails is logged once, and knows no end.
        """
        ends = [end for policy in self._policies if (end := self._end_of(policy)) is not None]
        return min(ends, default=None)

    def _end_of(self, policy: BeforeEnd) -> float | None:
        if policy.end is None:
            return self._slurm_end()
        if not callable(policy.end):
            return seconds_of(policy.end)
        try:
            found = policy.end()
            return None if found is None else seconds_of(found)
        except Exception as error:  # noqa: BLE001 - a function of the user's may raise anything
            # Why not raised: the training can go on, and saves by its other policies.
            self._warn(f"the function {policy.end!r} raised {type(error).__name__}: {error}")
            return None

    def _slurm_end(self) -> float | None:
        if not self._is_read:
            self._is_read = True
            text = os.environ.get(SLURM_END, "")
            try:
                self._slurm_s = seconds_of(float(text))
            except (ValueError, InvalidRequestError):
                found = f"is {text!r}" if text else "is not set"
                self._warn(f"{SLURM_END} {found} where rank 0 runs; give BeforeEnd(end=...)")
        return self._slurm_s

    def _warn(self, why: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            logger.warning("No save is due before the end of the allocation, as %s", why)
