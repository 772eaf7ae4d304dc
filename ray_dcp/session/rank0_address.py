"""The address on which rank 0 listens for the other ranks, where no Ray was named."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


def host_of(store: Any) -> str | None:
    """Returns the host of a store; None if it is not served by one."""
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


ANYWHERE = "192.0.2.1"
"""An address of no machine (RFC 5737), behind the default route of all."""


def interface_of(places: Sequence[tuple[str, str, str]]) -> str:
    """Returns the address on which rank 0 listens.

    Args:
        places: For each rank, its network namespace, the name of its host, and its address
            towards the store.

    Examples:
        >>> interface_of([("1", "a", "10.0.0.1"), ("2", "b", "10.0.0.2")])
        '10.0.0.1'
        >>> interface_of([("1", "a", "127.0.0.1"), ("1", "a", "127.0.0.1")])
        '127.0.0.1'
    """
    (network, own_host, own), *others = places
    away = [(host, address) for other, host, address in others if other != network]
    if not away or not _is_loopback(own):
        return own
    # Why possible: on its own machine a name often stands for the loopback interface.
    host, address = away[0]
    if not _is_loopback(address):
        return address_towards(address)
    return address_towards(host if host != own_host else ANYWHERE)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
