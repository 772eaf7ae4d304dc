"""`AllocationEnd`: when the allocation of this job ends, as its `BeforeEnd` policies know it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future

from ray_dcp.core import bounds
from ray_dcp.core.processes import begin, wait_any
from ray_dcp.errors import InvalidRequestError
from ray_dcp.manager.save_policies import BeforeEnd, seconds_of

logger = logging.getLogger(__name__)

SLURM_END = "SLURM_JOB_END_TIME"
"""Variable in which Slurm gives the end of a job, in seconds since the epoch. A time limit that is
changed later does not change it."""


def node_of_ray() -> str:
    """Returns the hex id of the node on which this process runs in a Ray; "" if it has none."""
    # Why so: a process that never imported Ray need not do so now.
    if "ray" not in sys.modules:
        return ""
    from ray_dcp.session import ray_calls

    connection = ray_calls.this_connection()
    return "" if connection is None else connection[0]


class AllocationEnd:
    """The end of the allocation, as rank 0 knows it.

    Args:
        policies: The policies that ask for it.
    """

    def __init__(self, policies: Sequence[BeforeEnd]) -> None:
        self._policies = policies
        self._slurm_s: float | None = None
        self._is_read = self._is_warned = False
        self._nodes: frozenset[str] = frozenset()
        self._asked: Future[dict[str, float]] | None = None
        self._drained: Mapping[str, float] = {}
        """What Ray said last."""

    @property
    def needs_nodes(self) -> bool:
        """Whether it matters on which nodes of a Ray the ranks run."""
        return any(policy.end is None for policy in self._policies)

    def seconds(self, nodes: Collection[str] | None = None) -> float | None:
        """Returns the earliest end, in seconds since the epoch; None if none is known.

        A function of the user's that fails is logged once, and knows no end.

        Args:
            nodes: Hex ids of the nodes of Ray on which the ranks run; those of the last call if
                None.
        """
        if nodes is not None:
            self._nodes = frozenset(filter(None, nodes))
        ends = [end for policy in self._policies if (end := self._end_of(policy)) is not None]
        return min(ends, default=None)

    def _end_of(self, policy: BeforeEnd) -> float | None:
        if policy.end is None:
            ends = (self._slurm_end(), self._drain_end())
            return min((end for end in ends if end is not None), default=None)
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
                if self._nodes and not text:
                    return None  # Ray tells when it drains one of them.
                found = f"is {text!r}" if text else "is not set"
                self._warn(f"{SLURM_END} {found} where rank 0 runs; give BeforeEnd(end=...)")
        return self._slurm_s

    def _drain_end(self) -> float | None:
        """Returns when the first node of a rank ends that Ray drains; None if it drains none."""
        if not self._nodes:
            return None
        from ray_dcp.session import ray_calls

        if self._asked is None:
            self._asked = begin(ray_calls.draining_nodes, "ray_dcp drained nodes")
            # Why only now: each step asks, and would wait again while the answer does not come.
            wait_any([self._asked], bounds.NODES_ANSWER_S)
        if self._asked.done():
            asked, self._asked = self._asked, None
            if (error := asked.exception()) is None:
                self._drained = asked.result()
            else:
                self._warn(f"Ray could not be asked which nodes it drains: {error}")
        return min((self._drained[one] for one in self._nodes & {*self._drained}), default=None)

    def _warn(self, why: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            logger.warning("No save is due before the end of the allocation, as %s", why)
