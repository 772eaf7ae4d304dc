"""How long a rank waits for its coordinator: longer than all of the coordinator's own deadlines.

These are the outermost bounds, for a coordinator that beats and yet never answers. One that is
dead or frozen is given up long before, see `heart`.
"""

from __future__ import annotations

from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.protocol.messages import (
    Exchange,
    LoadDone,
    LoadJoin,
    LoadReady,
    OpKey,
    PartsHeld,
    PartsWritten,
    Request,
    SaveJoin,
    SaveReceipt,
    SaveStaged,
)

__all__ = ["MARGIN_S", "Patience"]

MARGIN_S = 120.0
"""How much longer than the coordinator's own deadlines a rank waits for it, in seconds: the
coordinator knows who is missing, so its error is the better one."""

_PLAN_PHASES = 5
"""Phases between a join and its answer, each with the deadline `plan_timeout_s`: all ranks come,
some are asked for what they hold, twice at most, the storage is looked at, the plan is made."""
_OPEN_PHASES = 3
"""The same of a load: all ranks come, the storage is looked at, with one to spare."""
_COMMIT_PHASES = 5
"""Phases between the last receipt and the outcome, each with the deadline `commit_timeout_s`."""
_REMEMBERED = 16
"""Operations whose options are remembered."""


class Patience:
    """Knows the options of the operations that one rank has begun.

    Example:
        >>> from ray_dcp.protocol.messages import Target
        >>> key = OpKey("run", 0)
        >>> Patience().of(LoadJoin(key, 0, 1, Target("memory://x"), LoadOptions()))
        1920.0
    """

    def __init__(self) -> None:
        self._options: dict[OpKey, SaveOptions | LoadOptions] = {}

    def of(self, request: Request) -> float:
        """Returns how long the coordinator may take before it is the one that is missing.

        Args:
            request: Any request of this rank; its opening came before the others.

        Returns:
            Seconds.
        """
        match request:
            case SaveJoin(options=options) | LoadJoin(options=options):
                kept = [*self._options.items()][-_REMEMBERED:]
                self._options = dict([*kept, (request.key, options)])
                phases = _PLAN_PHASES if isinstance(request, SaveJoin) else _OPEN_PHASES
                return phases * options.plan_timeout_s + MARGIN_S
            case SaveReceipt() | SaveStaged() | PartsHeld() | PartsWritten():
                save = self._options.get(request.key)
                save = save if isinstance(save, SaveOptions) else SaveOptions()
                commit_s = _COMMIT_PHASES * save.commit_timeout_s
                return save.write_timeout_s + commit_s + MARGIN_S
            case LoadReady() | LoadDone():
                load = self._options.get(request.key)
                load = load if isinstance(load, LoadOptions) else LoadOptions()
                return load.plan_timeout_s + load.read_timeout_s + MARGIN_S
            case Exchange():
                return request.timeout_s + MARGIN_S
