"""How this process attaches to a Ray: one that the user named, or one that this job started.

It never attaches to one that happens to run on this machine. What `ray.init` changes in the process
(signal handlers, logging) is restored.
"""

from __future__ import annotations

import socket
import threading
from contextlib import nullcontext
from pathlib import Path

import ray
from ray.exceptions import RayError

from ray_dcp.errors import InvalidRequestError, ParticipantError
from ray_dcp.runtime import private_ray, ray_private
from ray_dcp.runtime.actor_names import NAMESPACE
from ray_dcp.runtime.private_ray import PrivateRay

LEAVE_S = 120.0
"""How long Ray may take to let go of a private Ray that was lost (5 to 15 s), in seconds."""

PROBE_S = 10.0
"""How long a cluster's control store may take to accept a connection, in seconds."""


def attached_address() -> str | None:
    """Returns the cluster that this process is connected to, if any."""
    if not ray.is_initialized():
        return None
    address: str = ray.get_runtime_context().gcs_address
    return address


def attach_named(address: str | None) -> str | None:
    """Connects to the cluster that was named, and returns its address.

    Args:
        address: As the caller named it; `RAY_ADDRESS` counts when it is None.

    Returns:
        None when no cluster was named and this process is connected to none.

    Raises:
        InvalidRequestError: The process is connected to another cluster already.
        ParticipantError: The cluster can't be reached.
    """
    leave_lost()
    connected = attached_address()
    if connected is not None:
        if address not in (None, "auto", connected):
            raise InvalidRequestError(
                f"Expected this process to use the Ray at {address}, but it is connected to the "
                f"one at {connected}. Leave the address out, or call ray.shutdown() first",
                key="address",
            )
        return connected
    named = address or private_ray.named_address()
    if named is None:
        return None
    _init(named, None)
    return attached_address()


def leave_lost() -> None:
    """Disconnects this process from a private Ray that was lost, if it is still in one.

    Raises:
        ParticipantError: Ray does not let go of it.
    """
    own = private_ray.joined()
    if own is None or not own.is_lost:
        return
    leaving = threading.Thread(target=ray.shutdown, name="ray_dcp leaves Ray", daemon=True)
    leaving.start()
    leaving.join(LEAVE_S)
    if leaving.is_alive():
        raise ParticipantError(
            f"Expected Ray to let go of the one at {own.address}, which was lost, within "
            f"{LEAVE_S:g} s, but it did not. Training may go on, but nothing can be saved by this "
            f"process: restart the ranks"
        )
    own.remove()


def attach(address: str, token_path: str | None) -> None:
    """Connects to the Ray that the job's first rank invites to.

    Args:
        address: `host:port` of the cluster's control store.
        token_path: File with the token of a private Ray; None for a cluster that was named.

    Raises:
        ParticipantError: This process is connected to another Ray, or can't reach this one.
    """
    leave_lost()
    connected = attached_address()
    if connected == address:
        return
    if connected is not None:
        raise ParticipantError(
            f"Expected all ranks in one Ray, but the group's first rank is in the one at "
            f"{address} and this process in the one at {connected}. Connect every "
            f"rank to the same cluster (ray.init(address=...)), or none"
        )
    _init(address, token_path)


def _init(address: str, token_path: str | None) -> None:
    if token_path is not None:
        _check_own(address, token_path)
    try:
        own = None if token_path is None else PrivateRay.of_token(token_path)
        with nullcontext() if own is None else own.held(), ray_private.signal_handlers_kept():
            _probe(address)
            if own is None:
                _connect(address)
            else:
                _connect_own(address, own.token_path)
                private_ray.set_joined(own)
                ray_private.uncaught_errors_untold()
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ParticipantError(
            f"Expected a Ray cluster at {address}, but connecting gave {type(error).__name__}: "
            f"{error}. Start it, or correct the address (argument or RAY_ADDRESS)"
        ) from error


def _probe(address: str) -> None:
    """Raises `OSError` when nobody listens at `host:port`; Ray itself tries for many minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdigit():  # else a word that only Ray knows, such as "auto"
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()


def _connect(address: str) -> None:
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)


def _check_own(address: str, token_path: str) -> None:
    if not Path(token_path).is_file():
        raise ParticipantError(
            f"Expected all ranks on the machine where the first rank started a Ray ({address}), "
            f"but this rank is on another one. On several machines start Ray yourself (`ray "
            f"start --head` on one, `ray start --address=<that machine>:6379` on the others) and "
            f"set RAY_ADDRESS on all"
        )


def _connect_own(address: str, token_path: str) -> None:
    with private_ray.pinned_to_loopback(token_path) as token, ray_private.loopback_addresses():
        if token:
            ray_private.local_token()
        _connect(address)
