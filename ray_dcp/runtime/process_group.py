"""What the ranks of a job tell each other in the store of torch's default process group.

The ranks of a job find their session in one way: all by their process group, or all by `connect`. A
rank that uses `connect` never takes part in the group's broadcast, and the others would wait there
until the group's own timeout. The job's store, which torch has anyway, shows which way each rank
uses: see `await_group`. It also shows by which interface other machines are reached.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from ray_dcp.commit_protocol.error_aggregation import name_ranks
from ray_dcp.commit_protocol.liveness import LONG_WAIT_S
from ray_dcp.errors import RankDisagreementError

logger = logging.getLogger(__name__)

LOOK_S = 10.0
"""How long to wait for the others before it is asked whether they will ever come, in seconds."""

LONGEST_S = 1800.0
"""After this the group's own collective names who is missing, in seconds: torch's default."""

_KEY = "ray_dcp/discovery"


def job_place() -> tuple[Any, int | None]:
    """Returns the store of torch's default process group and this rank in it, if there is one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None, None
    return job_store(), distributed.get_rank()


def job_store() -> Any:
    """Returns the store of torch's default process group; None when it can't be had."""
    try:
        from torch.distributed import distributed_c10d
    except ImportError:
        return None
    get = getattr(distributed_c10d, "_get_default_store", None)
    return None if get is None else get()


def announce_connect(connected: bool = True) -> None:
    """Notes in the job's store that this rank uses `connect`, if there is a process group already.

    Args:
        connected: False takes that back: the rank closed its session, or could not connect.
    """
    store, rank = job_place()
    if store is not None and connected:
        store.set(f"{_KEY}/connect/{rank}", "connect")
    elif store is not None:
        store.delete_key(f"{_KEY}/connect/{rank}")


@contextmanager
def connect_announced() -> Iterator[None]:
    """Announces that this rank uses `connect`; takes it back when that fails."""
    announce_connect()
    try:
        yield
    except BaseException:
        announce_connect(False)
        raise


def await_group(store: Any, ranks: Sequence[int], rank: int, look_s: float = LOOK_S) -> None:
    """Returns when all ranks of a group have come to make their session, or could still.

    Args:
        store: The job's store; None: nobody can be asked.
        ranks: Of the group, in the default group.
        rank: This one, in the default group.
        look_s: How often to look, in seconds.

    Raises:
        RankDisagreementError: A rank that is awaited uses `connect`.
    """
    if store is None:
        return
    group = f"{_KEY}/{len(ranks)}-{min(ranks)}-{max(ranks)}"
    store.set(f"{group}/{rank}", "group")
    missing = [other for other in ranks if other != rank]
    begin_s, is_logged = time.monotonic(), False
    while missing and (waited_s := time.monotonic() - begin_s) < LONGEST_S:
        if waited_s >= LONG_WAIT_S and not is_logged:
            logger.warning(
                "Rank %d has waited %.0f s to make a session: %s of the process group called "
                "neither save nor load. All ranks of a group have to",
                rank,
                waited_s,
                name_ranks(missing),
            )
            is_logged = True
        if _all_set(store, [f"{group}/{other}" for other in missing], look_s):
            return
        missing = [other for other in missing if not store.check([f"{group}/{other}"])]
        connected = [other for other in missing if store.check([f"{_KEY}/connect/{other}"])]
        if connected:
            store.delete_key(f"{group}/{rank}")
            raise RankDisagreementError(
                f"Expected all ranks to come to one session, but {name_ranks(connected)} called "
                f"ray_dcp.connect, and rank {rank} relies on the torch process group. Call "
                f"connect on every rank, or on none",
                rank=rank,
            )


def _all_set(store: Any, keys: list[str], look_s: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=look_s))
    except RuntimeError:  # torch's own timeout error is one, in every version
        return False
    return True


def host_of(store: Any) -> str | None:
    """Returns the host of a store; None for one that is no server."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host: str | None = getattr(store, "host", None)
    return host


def address_towards(host: str | None) -> str:
    """Returns the address of the interface by which this machine reaches a host."""
    # Suppressed: no such host, or no way there.
    with suppress(OSError):
        found = socket.getaddrinfo(host or "127.0.0.1", 9, type=socket.SOCK_DGRAM)
        for family, kind, _, _, address in sorted(found, key=lambda one: one[0]):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def interface_of(places: Sequence[tuple[str, str]]) -> str:
    """Returns the address on which rank 0 listens.

    Args:
        places: Of each rank the name of its machine, and its address towards the store.

    Examples:
        >>> interface_of([("a", "10.0.0.1"), ("b", "10.0.0.2")])
        '10.0.0.1'
        >>> interface_of([("a", "127.0.0.1"), ("a", "127.0.0.1")])
        '127.0.0.1'
    """
    (machine, own), *others = places
    away = [other for other in others if other[0] != machine]
    if not away or not ipaddress.ip_address(own).is_loopback:
        return own
    # Why possible: on its own machine a name often stands for the loopback interface.
    name, address = away[0]
    return address_towards(name if ipaddress.ip_address(address).is_loopback else address)
