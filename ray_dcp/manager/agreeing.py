"""How the ranks of a manager come to one decision: all tell rank 0, and rank 0 tells all.

Two exchanges through the session; none where a process is alone. No rank decides by its own clock,
its own signals or its own look at the storage.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from ray_dcp.errors import CheckpointError, StorageError
from ray_dcp.operations import RankSession
from ray_dcp.protocol.messages import Exchange, Exchanged, OpKey, Reply, Request
from ray_dcp.runtime.rank import drive
from ray_dcp.runtime.telling import attempt, refusal

__all__ = ["agree", "within"]

T = TypeVar("T")

Facts = Any
Decide = Callable[[Sequence[Facts]], Any]


def within(timeout_s: float, what: str, work: Callable[[], T]) -> T:
    """Returns what work gives that may hang in the storage: it is left to itself then.

    Args:
        timeout_s: How long to wait for it, in seconds.
        what: It does, in words.
        work: Runs in a thread of its own.

    Raises:
        StorageError: It did not end in time.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            done.set_exception(error)

    threading.Thread(target=run, name="ray_dcp manager decides", daemon=True).start()
    if not wait([done], timeout_s).done:
        raise StorageError(
            f"expected the storage to answer within {timeout_s:g} s, but {what} still waits for "
            f"it, and is left to itself. Look after the storage, or raise plan_timeout_s"
        )
    return done.result()


def agree(
    session: RankSession,
    what: str,
    facts: Facts,
    decide: Decide,
    *,
    timeout_s: float,
    heartbeat_s: float,
    error: CheckpointError | None = None,
    key: OpKey | None = None,
) -> Any:
    """Returns what rank 0 decides from the facts of all ranks; the same on all.

    Args:
        session: Of this rank.
        what: Is decided, in words that all ranks share.
        facts: Of this rank, as JSON takes them.
        decide: Called on rank 0 alone, with the facts by rank; gives what JSON takes.
        timeout_s: Deadline for all ranks to come, in seconds.
        heartbeat_s: Silence after which a rank counts as frozen, in seconds.
        error: This rank can't take part, and why: all are told.
        key: Of this call, if the session named it before.

    Raises:
        CheckpointError: What a rank could not do, or what `decide` raised: on all ranks.
        RankDisagreementError: The ranks decide about different things.
    """
    if session.world_size == 1:
        if error is not None:
            raise error
        return within(timeout_s, what, lambda: decide([facts]))
    with session.activity(heartbeat_s, key) as activity:
        steps = _steps(
            activity.next_key, session.rank, session.world_size, what, facts, decide, timeout_s,
            error,
        )  # fmt: skip
        return drive(steps, activity.call)


def _steps(
    next_key: Callable[[], OpKey],
    rank: int,
    world_size: int,
    what: str,
    facts: Facts,
    decide: Decide,
    timeout_s: float,
    error: CheckpointError | None,
) -> Generator[Request, Reply, Any]:
    first, second = next_key(), next_key()
    outbox = {0: json.dumps(facts).encode()}
    reply = yield Exchange(first, rank, world_size, f"{what}: facts", outbox, timeout_s, error)
    if not isinstance(reply, Exchanged):
        raise refusal(reply, rank)
    outbox = {}
    if rank == 0:
        told = [json.loads(reply.inbox[sender]) for sender in range(world_size)]
        decided, error = attempt(
            lambda: json.dumps(within(timeout_s, what, lambda: decide(told))), what, rank
        )
        if decided is not None:
            outbox = dict.fromkeys(range(world_size), decided.encode())
    # Why twice: rank 0 may use up the first for its decision, and has to tell that.
    tag = f"{what}: decided"
    reply = yield Exchange(second, rank, world_size, tag, outbox, 2 * timeout_s, error)
    if not isinstance(reply, Exchanged):
        raise refusal(reply, rank)
    return json.loads(reply.inbox[0])
