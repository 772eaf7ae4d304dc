"""A second node keeps what one keeps in memory: each node's copies go to the next one."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
from ray.exceptions import RayError

from ray_dcp.errors import CheckpointError
from ray_dcp.runtime import ray_calls
from ray_dcp.stage.arena import Arena
from ray_dcp.stage.copies import CopyingSpool
from ray_dcp.stage.kept import Part
from ray_dcp.stage.values import StagedCopy

__all__ = ["alive_nodes", "next_node", "pull", "push"]

logger = logging.getLogger(__name__)


def next_node(own: str, alive: list[str]) -> str | None:
    """Returns the node that keeps the copies of one; None when there is no other.

    Args:
        own: Ray's hex id of the node.
        alive: Ids of all nodes that live.

    Example:
        >>> [next_node(own, ["b", "a", "c"]) for own in "abc"]
        ['b', 'c', 'a']
    """
    others = sorted(set(alive) - {own})
    return next((node for node in others if node > own), others[0] if others else None)


async def push(copied: StagedCopy, own: Any, peer: Any) -> bool:
    """Asks another node's stager to copy a share; returns whether it did.

    Args:
        copied: What.
        own: Handle of the stager that keeps it.
        peer: Handle of the other one; None when there is none.
    """
    if peer is None:
        logger.warning("No other node lives that could keep a copy of %s", copied.order.key)
        return False
    try:
        taken: bool = await peer.copy_from.remote(own, copied)
    except (RayError, CheckpointError) as error:
        logger.warning("No copy of %s was made: %r", copied.order.key, error)
        return False
    if not taken:
        logger.warning("Another node has no room for a copy of %s", copied.order.key)
    return taken


async def pull(copied: StagedCopy, origin: Any, spool: CopyingSpool, arena: Arena) -> bool:
    """Copies a share from the memory of another node; returns whether all of it is here.

    Args:
        copied: What.
        origin: Handle of the stager that keeps it.
        spool: Of this node.
        arena: Of this node.
    """
    slots = spool.begin_copy(copied)
    if slots is None:
        return False
    is_whole = False
    try:
        for slot, source, used in zip(slots, copied.slots, copied.used_bytes, strict=True):
            data = await origin.fetch.remote([Part(source, 0, used)])
            if data is None:
                return False
            await asyncio.to_thread(np.copyto, arena.slot_array(slot.index)[:used], data)
        is_whole = True
    finally:
        stays = spool.end_copy(copied.order.key, is_whole=is_whole)
    return stays


def alive_nodes() -> list[str]:
    """Returns Ray's hex ids of the nodes that live."""
    return [node["NodeID"] for node in ray_calls.nodes() if node["Alive"]]
