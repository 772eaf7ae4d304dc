"""Names in Ray: of the cluster to use, and of the detached actors.

The name of an actor consists of its role, the protocol version, and its session or node. The
protocol version is part of every name, so that a job with a newer ray_dcp never calls an actor that
an older one left.
"""

from __future__ import annotations

import os
import secrets

from ray_dcp.commit_protocol.messages import OpKey

NAMESPACE = "ray_dcp"
"""The Ray namespace of all actors, unless the caller names another."""

PROTOCOL_VERSION = 5
"""Increased with each change of the messages between ranks, coordinators and stagers."""

LEASE_S = 120.0
"""How long an unused detached actor stays, in seconds: longer than any pause between the start of
two ranks, and short enough to be in nobody's way. The next call creates it again."""


MOST_CALLS = 1_000_000
"""Most calls of an actor that wait at once; each rank waits in two or three. *Why*: Ray admits 1000
by default, so that with more ranks the last one to join would never be admitted."""


def named_address() -> str | None:
    """Returns the cluster that the user named with `RAY_ADDRESS`, or None."""
    return os.environ.get("RAY_ADDRESS") or None


def coordinator_name(session: str) -> str:
    """Returns the actor name of a session's coordinator."""
    return f"ray_dcp:{PROTOCOL_VERSION}:coordinator:{session}"


def pulse_name(coordinator: str) -> str:
    """Returns the name under which a coordinator writes to the control store that it lives."""
    return f"pulse:{coordinator}"


def staged_plan_name(coordinator: str, key: OpKey | None = None) -> str:
    """Returns the name under which the control store keeps the plan of a staged save.

    Args:
        coordinator: Actor name of the coordinator.
        key: The save; None for the prefix of all saves of the coordinator.
    """
    return f"staged:{coordinator}:" + (f"{key.seq}:{key.session}" if key else "")


def gatherer_name(coordinator: str, ranks: range) -> str:
    """Returns the actor name of the gatherer of some ranks."""
    return f"ray_dcp:{PROTOCOL_VERSION}:gatherer:{ranks.start}-{ranks.stop}:{coordinator}"


def stager_name(node_id: str) -> str:
    """Returns the actor name of a node's stager."""
    return f"ray_dcp:{PROTOCOL_VERSION}:stager:{node_id}"


def group_name(first_rank: int, world_size: int) -> str:
    """Returns a new name for the session of a torch process group."""
    return f"group-{first_rank}-{world_size}-{secrets.token_hex(8)}"
