"""`CallBound`: when a rank gives up a call of an actor or coordinator.

`longest_s` is the outermost bound of a rank's call, longer than all deadlines of the coordinator:
for a coordinator that sends heartbeats but never answers. One that is dead or frozen is detected
long before (`heartbeat`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ray_dcp.commit_protocol.error_aggregation import Opening
from ray_dcp.commit_protocol.messages import Exchange, Request
from ray_dcp.core import bounds
from ray_dcp.errors import CheckpointError
from ray_dcp.options import LoadOptions, SaveOptions

LOOK_S = 0.5
"""Interval at which a waiting call checks whether it is still useful, in seconds."""

_PLAN_PHASES = 5
"""Phases between a join and its reply, each with the deadline `plan_timeout_s`: all ranks join,
some send their rows, twice at most, the storage is read, the plan is made."""

_OPEN_PHASES = 3
"""The same for a load: all ranks join, the storage is read, and one to spare."""

_COMMIT_PHASES = 5
"""Phases between the last receipt and the outcome, each with the deadline `commit_timeout_s`."""


@dataclass(frozen=True)
class CallBound:
    """When a call of a coordinator is given up, repetitions included."""

    timeout_s: float
    """Longest time until the answer, in seconds."""
    given_up: Callable[[bool], CheckpointError | None] = lambda _: None
    """Called about every half second; returns why waiting any longer is useless, or None. Its
    argument says whether the coordinator was out of reach meanwhile."""
    uncounted_s: Callable[[], float] = lambda: 0.0
    """Returns how much of the elapsed time does not count, in seconds."""

    def begin(self) -> Callable[[], float]:
        """Begins to count; the result returns how many seconds are left."""
        begun_s = time.monotonic()
        return lambda: begun_s + self.timeout_s + self.uncounted_s() - time.monotonic()


def longest_s(request: Request, options: SaveOptions | LoadOptions) -> float:
    """Returns how long the coordinator may take to answer before it counts as lost, in seconds.

    Args:
        request: A request of a rank.
        options: Options of its operation.
    """
    if isinstance(request, Exchange):
        return request.timeout_s + bounds.MARGIN_S
    if isinstance(request, Opening):
        phases = _OPEN_PHASES if isinstance(options, LoadOptions) else _PLAN_PHASES
        return phases * options.plan_timeout_s + bounds.MARGIN_S
    if isinstance(options, LoadOptions):
        return options.plan_timeout_s + options.read_timeout_s + bounds.MARGIN_S
    return options.write_timeout_s + _COMMIT_PHASES * options.commit_timeout_s + bounds.MARGIN_S
