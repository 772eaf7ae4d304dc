"""`agree`: one decision for all ranks, by rank 0.

Each rank sends its facts to rank 0, which sends its decision to all. This takes two exchanges
through the session, and none if there is one rank. No rank decides by its own clock, signals or
scan of the storage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from ray_dcp.commit_protocol.error_aggregation import exchanged
from ray_dcp.commit_protocol.messages import Exchange, OpKey, Reply, Request
from ray_dcp.errors import (
    CheckpointError,
)
from ray_dcp.manager.background import in_time
from ray_dcp.options import SaveOptions
from ray_dcp.rank.rank_load import drive
from ray_dcp.rank.rank_save import decided_on_rank_0
from ray_dcp.session.call import Call
from ray_dcp.session.session import Session

T = TypeVar("T")


def agree(
    session: Session,
    what: str,
    decide: Callable[[Sequence[Any]], Any],
    options: SaveOptions,
    *,
    facts: Any = None,
    timeout_s: float | None = None,
    error: CheckpointError | None = None,
    key: OpKey | None = None,
) -> Any:
    """Returns the decision that rank 0 makes from the facts of all ranks; equal on all ranks.

    Args:
        session: Session of this rank.
        what: Description of the decision, the same on all ranks.
        decide: Called on rank 0 alone, with the facts by rank; its result must be serializable as
            JSON.
        options: Have the heartbeat timeout.
        facts: Facts of this rank, serializable as JSON.
        timeout_s: Deadline for all ranks to join, in seconds; `plan_timeout_s` of the options if
            None.
        error: Why this rank can't take part; reported to all ranks.
        key: Key of this operation, if the session has issued it already.

    Raises:
        CheckpointError: A rank reported an error, or `decide` raised one; the same on all ranks.
        RankDisagreementError: The ranks make different decisions.
    """
    rank, world_size = session.rank, session.world_size
    timeout_s = options.plan_timeout_s if timeout_s is None else timeout_s
    if world_size == 1:
        if error is not None:
            raise error
        return in_time(timeout_s, what, lambda: decide([facts]))

    def exchanges(first: OpKey, second: OpKey) -> Generator[Request, Reply, Any]:
        own, tag = {0: json.dumps(facts).encode()}, f"{what}: facts"
        request = Exchange(first, rank, world_size, tag, own, timeout_s, error)
        inbox = yield from exchanged(request)

        def decided() -> Any:
            received = [json.loads(inbox[sender]) for sender in range(world_size)]
            return in_time(timeout_s, what, lambda: decide(received))

        # Why twice: rank 0 may need the whole first timeout for its decision, and then reports it.
        request = Exchange(second, rank, world_size, f"{what}: decided", {}, 2 * timeout_s)
        return (yield from decided_on_rank_0(request, decided, what))

    with Call(session, options.heartbeat_timeout_s, key) as call:
        return drive(exchanges(call.next_key(), call.next_key()), call.ask)
