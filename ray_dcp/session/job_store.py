"""The store of torch's job, in which ranks find each other, as one client for each use.

The ranks of a job find their session in the same way: all by their process group, or all by
`connect`. The store shows which way each rank uses (`announce_connect`, `meeting.await_group`).
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from typing import Any

from ray_dcp.core import bounds
from ray_dcp.core.processes import begin
from ray_dcp.errors import (
    CheckpointError,
    ParticipantError,
)

JOB_KEY = "ray_dcp/discovery"
"""Prefix of the keys in the job's store that show how ranks find their session."""


def job_place() -> tuple[Any, int | None]:
    """Returns the store of torch's default process group and this rank in it, or None for both."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None, None
    return job_store(), distributed.get_rank()


def job_store(timeout_s: float = bounds.STORE_S) -> Any:
    """Returns a client of the store of torch's default process group; None if there is none.

    Each call returns a client of its own. *Why*: a client that waits holds a lock, without which
    another thread can't write what this one waits for.

    Args:
        timeout_s: How long it may take to accept the client, in seconds; `STORE_S` at most.

    Raises:
        ConnectionError: Nobody serves it any more.
    """
    try:
        from torch.distributed import distributed_c10d
    except ImportError:
        return None
    get = getattr(distributed_c10d, "_get_default_store", None)
    store: Any = None if get is None else get()
    if not hasattr(store, "clone"):
        return store
    # Why a thread: torch tries for as long as the store's timeout, half an hour, also to reach a
    # process that has ended. The thread ends with that.
    timeout_s = min(timeout_s, bounds.STORE_S)
    try:
        return begin(store.clone, "torch's store").result(timeout_s)
    except futures.TimeoutError:
        raise ConnectionError(
            f"torch's store (MASTER_ADDR) accepts no connection within {timeout_s:g} s"
        ) from None


@contextmanager
def naming_lost_ranks(rank: int) -> Iterator[None]:
    """Raises `ParticipantError` if torch's store or process group fails in the block.

    *Why*: whoever serves the store, which is rank 0 or the agent of torchrun, may have ended; and
    torch's collectives fail on all ranks if one has. Which one, torch does not say.

    Args:
        rank: This rank.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (RuntimeError, ConnectionError) as error:  # torch's errors are RuntimeErrors
        told = str(error).partition("\n")[0]
        raise ParticipantError(
            f"Expected all ranks to live while the ranks make their session, but rank {rank} on "
            f"{platform.node()} got {type(error).__name__} from torch: {told}. Another rank has "
            f"ended; most likely rank 0, or the process that serves torch's store (MASTER_ADDR). "
            f"Its log says why"
        ) from error


def await_keys(store: Any, keys: Sequence[str], timeout_s: float) -> list[str]:
    """Waits for keys of a store; returns those that are not there in time.

    *Why not the store's own `wait`*: without a client of its own a thread would block the others,
    and torch logs a traceback of each wait that ends without the keys.

    Args:
        store: A client of the store.
        keys: The keys.
        timeout_s: How long to wait, in seconds.
    """
    missing, begin_s = [*keys], time.monotonic()
    while missing:
        if store.check(missing[:_CHECKED]):
            del missing[:_CHECKED]
            continue
        waited_s = time.monotonic() - begin_s
        if waited_s >= timeout_s:
            return [key for key in missing if not store.check([key])]
        # Why longer and longer: thousands of ranks may wait for one.
        time.sleep(min(0.01 + waited_s / 10, _LONGEST_PAUSE_S, timeout_s - waited_s))
    return []


_CHECKED = 64
"""Number of keys that are looked for at once."""


_LONGEST_PAUSE_S = 1.0


def announce_connect(connected: bool = True) -> None:
    """Records in the job's store that this rank uses `connect`, if there is a process group.

    Args:
        connected: False removes the record: the rank closed its session, or could not connect.

    Raises:
        ParticipantError: The store has ended.
    """
    if connected:
        store, rank = job_place()
        if store is not None:
            with naming_lost_ranks(rank or 0):
                store.set(f"{JOB_KEY}/connect/{rank}", "connect")
        return
    # Suppressed: where the store has ended, nobody looks for it.
    with suppress(RuntimeError, ConnectionError):
        store, rank = job_place()
        if store is not None:
            store.delete_key(f"{JOB_KEY}/connect/{rank}")
