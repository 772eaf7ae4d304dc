"""The transport of shared reads over Ray: bytes in its object store, messages by the coordinator.

Nothing here raises but `check`, or waits without a bound: a unit that another rank can't provide is
None, and is read from storage.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from ray_dcp.commit_protocol.load import Decline, Give, ReadMessage, Skip, Take
from ray_dcp.commit_protocol.messages import OpKey
from ray_dcp.core import bounds
from ray_dcp.errors import CheckpointError
from ray_dcp.planning.reads import UNIT_BYTES
from ray_dcp.session import ray_calls
from ray_dcp.stage.node_memory import NoRoomError

LOOK_S = 0.2
"""Interval at which a rank that waits checks whether the load has failed, in seconds."""

SHARE_BYTES = 256 << 20
"""Most bytes of a rank that are in the object store for other ranks at a time."""

STORE_SHARE = 3
"""The ranks of a node together offer at most this fraction (1 / n) of its object store."""

logger = logging.getLogger(__name__)


class RayPeers:
    """The other ranks of a session with a coordinator.

    Args:
        coordinator: Returns the coordinator's handle.
    """

    def __init__(self, coordinator: Callable[[], Any]) -> None:
        self._coordinator = coordinator
        self.node = ray.get_runtime_context().get_node_id()

    def exchange(
        self, key: OpKey, rank: int, ranks_here: int, check: Callable[[], None]
    ) -> RayUnitExchange:
        """Returns the transport of shared units.

        Args:
            key: The load.
            rank: This rank.
            ranks_here: Number of ranks of this node that read for others.
            check: Raises if continuing is useless.
        """
        return RayUnitExchange(self._coordinator, key, rank, check, self._most_units(ranks_here))

    def _most_units(self, ranks_here: int) -> int:
        """Returns how many units a rank may offer at a time, at least one.

        *Why* the store's size is read: a full store does not refuse bytes but spills them to disk.
        """
        most_bytes = SHARE_BYTES
        with suppress(CheckpointError):
            room = int(ray_calls.store_bytes(self.node))
            most_bytes = min(SHARE_BYTES, room // STORE_SHARE // max(ranks_here, 1))
        return max(most_bytes // UNIT_BYTES, 1)


class RayUnitExchange:
    """Implements `UnitExchange` for one rank in one load.

    Args:
        coordinator: Returns the coordinator's handle.
        key: The load.
        rank: This rank.
        check: Raises if continuing is useless.
        most_units: Most units that it offers at a time.
    """

    def __init__(
        self,
        coordinator: Callable[[], Any],
        key: OpKey,
        rank: int,
        check: Callable[[], None] = lambda: None,
        most_units: int = 1,
    ) -> None:
        self._coordinator = coordinator
        self._key = key
        self._rank = rank
        self._check = check
        self._most_units = most_units
        self._changed = threading.Condition()
        self._given: dict[int, Any] = {}
        """The object of each offered unit that is still needed."""
        self._replies: dict[int, Any] = {}
        """The reply that comes when other ranks need an offered unit no more."""
        self._used: set[int] = set()
        self._silent: set[int] = set()
        self._left = False

    def offer(self, unit: int, takers: int, data: memoryview) -> memoryview | None:
        """See `UnitExchange.offer`."""
        try:
            ref = ray_calls.put(np.frombuffer(data, np.uint8), len(data))
            found: memoryview = ray_calls.get(ref).data
        except (RayError, NoRoomError) as error:
            logger.warning("The object store took no bytes, each rank reads them: %s", error)
            return None
        reply = self._send(Give(self._key, unit, takers, [ref]))
        if reply is None:
            return None
        with self._changed:
            self._given[unit], self._replies[unit] = ref, reply
        return found

    def has_room(self) -> bool:
        """See `UnitExchange.has_room`."""
        end_s = time.monotonic() + bounds.SHARE_TIMEOUT_S
        while not self._left and time.monotonic() <= end_s:
            with self._changed:
                for unit in self._used & self._given.keys() - self._replies.keys():
                    del self._given[unit]
                if len(self._given) < self._most_units:
                    return True
                waiting = {reply: unit for unit, reply in self._replies.items()}
                if not waiting:
                    self._changed.wait(LOOK_S)  # for `use`
                    continue
            try:
                taken, _ = ray_calls.wait([*waiting], timeout=LOOK_S)
            except RayError as error:
                logger.warning("The coordinator does not answer about shared reads: %s", error)
                return False
            with self._changed:
                for reply in taken:
                    del self._replies[waiting[reply]]
        return False

    def use(self, unit: int) -> None:
        """See `UnitExchange.use`."""
        with self._changed:
            self._used.add(unit)
            self._changed.notify_all()

    def decline(self, units: Sequence[int]) -> None:
        """See `UnitExchange.decline`."""
        self._send(Decline(self._key, tuple(units)))

    def take(self, unit: int, reader: int) -> memoryview | None:
        """See `UnitExchange.take`."""
        if reader in self._silent:
            self.skip([unit])
            return None
        reply = self._send(Take(self._key, self._rank, unit, bounds.TAKE_TIMEOUT_S))
        handle = None if reply is None else self._wait(reply)
        try:
            if handle is not None:
                view: memoryview | None = None
                if handle:
                    view = ray_calls.get(handle[0], timeout=bounds.SHARE_TIMEOUT_S).data
                return view
            why = f"nothing came from it in {bounds.TAKE_TIMEOUT_S:g} s"
        except RayError as error:
            why = str(error)
        self.skip([unit])
        if self._left:
            return None
        self._silent.add(reader)
        logger.warning(
            "Rank %d reads the rest of what rank %d reads for others from storage itself: %s",
            self._rank,
            reader,
            why,
        )
        return None

    def skip(self, units: Sequence[int]) -> None:
        """See `UnitExchange.skip`."""
        if units:
            self._send(Skip(self._key, self._rank, tuple(units)))

    def leave(self) -> None:
        """See `UnitExchange.leave`."""
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def _send(self, message: ReadMessage) -> Any:
        """Sends a message; returns the reference of its reply, or None."""
        try:
            coordinator = self._coordinator()
            with ray_calls.starting_no_ray(), ray_calls.inside():
                return coordinator.share.remote(message)
        except (CheckpointError, RayError, ValueError) as error:
            logger.warning("The coordinator is out of reach for shared reads: %s", error)
            return None

    def _wait(self, reply: Any) -> Any:
        """Waits for a reply; returns None if it does not come.

        Raises:
            CheckpointError: `check` raised it.
        """
        end_s = time.monotonic() + bounds.TAKE_TIMEOUT_S + bounds.SHARE_TIMEOUT_S
        try:
            while not ray_calls.wait([reply], timeout=LOOK_S)[0]:
                self._check()
                if self._left or time.monotonic() > end_s:
                    return None
            return ray_calls.get(reply)
        except RayError as error:
            logger.warning("The coordinator does not answer about shared reads: %s", error)
            return None
