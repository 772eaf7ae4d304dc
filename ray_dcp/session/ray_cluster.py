"""The Ray cluster of this process: attaches to one that the user named, and to no other one.

It restores what `ray.init` changes in the process (signal handlers, logging).
"""

from __future__ import annotations

import socket

import ray
from ray.exceptions import RayError

from ray_dcp.core import bounds
from ray_dcp.errors import InvalidRequestError, ParticipantError
from ray_dcp.session import ray_calls
from ray_dcp.session.connection import named_address
from ray_dcp.session.names import NAMESPACE


def attached_address() -> str | None:
    """Returns the address of the cluster that this process is connected to, or None."""
    if not ray.is_initialized():
        return None
    address: str = ray.get_runtime_context().gcs_address
    return address


def attach_named(address: str | None) -> str | None:
    """Connects to the cluster that was named, and returns its address.

    Args:
        address: The caller's argument; if None, `RAY_ADDRESS` applies.

    Returns:
        None if no cluster was named and this process is not connected to one.

    Raises:
        InvalidRequestError: The process is already connected to another cluster.
        ParticipantError: The cluster can't be reached.
    """
    connected = attached_address()
    if connected is not None:
        if address not in (None, "auto", connected):
            raise InvalidRequestError(
                f"Expected this process to use the Ray at {address}, but it is connected to the "
                f"one at {connected}. Leave the address out, or call ray.shutdown() first",
                key="address",
            )
        return connected
    named = address or named_address()
    if named is None:
        return None
    _init(named)
    return attached_address()


def num_free_cpus() -> int:
    """Returns the number of CPUs that nobody uses now in the cluster of this process."""
    return int(ray.available_resources().get("CPU", 0))


def attach(address: str) -> None:
    """Connects to the Ray that the job's first rank named.

    Args:
        address: `host:port` of the cluster's control store.

    Raises:
        ParticipantError: This process is connected to another Ray, or can't reach this one.
    """
    connected = attached_address()
    if connected == address:
        return
    if connected is not None:
        raise ParticipantError(
            f"Expected all ranks in one Ray, but the group's first rank is in the one at "
            f"{address} and this process in the one at {connected}. Connect every "
            f"rank to the same cluster (ray.init(address=...)), or none"
        )
    _init(address)


def _init(address: str) -> None:
    try:
        with ray_calls.signal_handlers_kept():
            _probe(address)
            ray.init(
                address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False
            )
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ParticipantError(
            f"Expected a Ray cluster at {address}, but connecting gave {type(error).__name__}: "
            f"{error}. Start it, or correct the address (argument or RAY_ADDRESS)"
        ) from error


def _probe(address: str) -> None:
    """Raises `OSError` if nothing listens at `host:port`; Ray itself retries for many minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdigit():  # else a word that only Ray knows, such as "auto"
        socket.create_connection((host.strip("[]"), int(port)), bounds.PROBE_S).close()
