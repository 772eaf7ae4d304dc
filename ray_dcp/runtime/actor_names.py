"""Names in Ray: of the cluster to use, and of the detached actors.

An actor's name has its role, the protocol version, and session or node.

The protocol version is part of every name, so that a job with a newer ray_dcp never talks to an
actor that an older one left.
"""

from __future__ import annotations

import os
import secrets

NAMESPACE = "ray_dcp"
"""The Ray namespace of all our actors, unless the caller names another."""

PROTOCOL_VERSION = 4
"""Rises with every change of the messages between ranks, coordinators and stagers."""

LEASE_S = 120.0
"""How long a detached actor stays when nobody uses it, in seconds.

Longer than any pause between two ranks that start; short enough that nobody finds it in the way.
An actor that left is made again by the next call.
"""


MOST_CALLS = 1_000_000
"""Calls that may wait at once: each rank waits in two or three. Ray lets 1000 in by default, and
with more ranks than that the last one to join would never be admitted."""


def named_address() -> str | None:
    """Returns the cluster that the user named with `RAY_ADDRESS`, if any."""
    return os.environ.get("RAY_ADDRESS") or None


def coordinator_name(session: str) -> str:
    """Returns the actor name of a session's coordinator."""
    return f"ray_dcp:{PROTOCOL_VERSION}:coordinator:{session}"


def pulse_name(coordinator: str) -> str:
    """Returns under which name a coordinator writes to Ray's control store that it lives."""
    return f"pulse:{coordinator}"


def gatherer_name(coordinator: str, ranks: range) -> str:
    """Returns the actor name of the gatherer of some ranks."""
    return f"ray_dcp:{PROTOCOL_VERSION}:gatherer:{ranks.start}-{ranks.stop}:{coordinator}"


def stager_name(node_id: str) -> str:
    """Returns the actor name of a node's stager."""
    return f"ray_dcp:{PROTOCOL_VERSION}:stager:{node_id}"


def group_name(first_rank: int, world_size: int) -> str:
    """Returns a new name for the session of a torch process group."""
    return f"group-{first_rank}-{world_size}-{secrets.token_hex(8)}"
