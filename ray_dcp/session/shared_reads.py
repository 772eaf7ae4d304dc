"""The transport of shared reads over Ray: bytes in its object store, messages by the coordinator.

Nothing here raises, or waits without a bound: a unit that another rank can't provide is None, and
is read from storage.
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

from ray_dcp.commit_protocol.load import (
    Decline,
    Enter,
    Leave,
    Listen,
    Offer,
    ReadMessage,
    UnitUpdate,
    Use,
)
from ray_dcp.commit_protocol.messages import OpKey
from ray_dcp.core.processes import start_thread
from ray_dcp.errors import CheckpointError
from ray_dcp.io.shared_read import SHARE_TIMEOUT_S
from ray_dcp.planning.reads import RankShare
from ray_dcp.session import ray_calls
from ray_dcp.stage.node_memory import NoRoomError

LISTEN_S = 5.0
"""How long the coordinator delays the answer to a request for updates, in seconds."""

SHARE_BYTES = 256 << 20
"""Most bytes of a rank that are in the object store for other ranks at a time."""

STORE_SHARE = 3
"""The ranks of a node together offer at most this fraction (1 / n) of its object store."""

_USES = 8
"""Number of used units that are reported in one message."""

logger = logging.getLogger(__name__)


class RayPeers:
    """The other ranks of a session with a coordinator.

    Args:
        coordinator: Returns the coordinator's handle.
    """

    def __init__(self, coordinator: Callable[[], Any]) -> None:
        self._coordinator = coordinator
        self.node = ray.get_runtime_context().get_node_id()

    def exchange(self, key: OpKey, rank: int, check: Callable[[], None]) -> RayTransport:
        """Returns the transport of shared units."""
        return RayTransport(self._coordinator, key, rank, check)

    def budget_bytes(self, ranks_here: int) -> int:
        """Returns how many bytes a rank may offer at a time.

        *Why* the store's size is read: a full store does not refuse bytes but spills them to disk.
        """
        with suppress(CheckpointError):
            room = int(ray_calls.store_bytes(self.node))
            return min(SHARE_BYTES, room // STORE_SHARE // max(ranks_here, 1))
        return SHARE_BYTES


class RayTransport:
    """Implements `Transport` for one rank in one load.

    Args:
        coordinator: Returns the coordinator's handle.
        key: The load.
        rank: This rank.
        check: Raises if continuing is useless.
    """

    def __init__(
        self,
        coordinator: Callable[[], Any],
        key: OpKey,
        rank: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._coordinator = coordinator
        self._key = key
        self._rank = rank
        self._check = check
        self._changed = threading.Condition()
        self._refs: dict[int, Any] = {}
        self._mine: dict[int, Any] = {}
        self._gone: set[int] = set()
        self._silent: set[int] = set()
        self._heard_s: dict[int, float] = {}
        self._reader: dict[int, int] = {}
        self._unsent: list[int] = []
        self._freed: Callable[[int], None] = lambda _: None
        self._offered: list[int] = []
        self._left = False

    def enter(self, share: RankShare, freed: Callable[[int], None]) -> None:
        """See `Transport.enter`."""
        self._freed = freed
        units, readers = tuple(share.unit.tolist()), tuple(share.reader.tolist())
        now_s = time.monotonic()
        self._reader = dict(zip(units, readers, strict=True))
        self._heard_s = dict.fromkeys(readers, now_s)
        self._send(Enter(self._key, self._rank, units, readers))
        start_thread(self._listen, "ray_dcp shared reads")

    def offer(self, unit: int, ranks: int, data: memoryview) -> memoryview | None:
        """See `Transport.offer`."""
        try:
            ref = ray_calls.put(np.frombuffer(data, np.uint8), len(data))
            found = ray_calls.get(ref).data
        except (RayError, NoRoomError) as error:
            logger.warning("The object store took no bytes, each rank reads them: %s", error)
            return None
        with self._changed:
            self._mine[unit] = ref
            self._offered.append(unit)
        sent = self._send(Offer(self._key, self._rank, unit, ranks, [ref]))
        return found if sent else None

    def decline(self, units: Sequence[int]) -> None:
        """See `Transport.decline`."""
        with self._changed:
            for unit in units:
                self._mine.pop(unit, None)
        self._send(Decline(self._key, self._rank, tuple(units)))

    def take(self, unit: int, reader: int) -> memoryview | None:
        """See `Transport.take`."""
        self._send_uses(1)
        with self._changed:
            while unit not in self._refs:
                if unit in self._gone or self._left or reader in self._silent:
                    return None
                if time.monotonic() > self._heard_s[reader] + SHARE_TIMEOUT_S:
                    logger.warning(
                        "Rank %d has handed on nothing for %.0f s; rank %d reads the rest of its "
                        "share from storage itself",
                        reader,
                        SHARE_TIMEOUT_S,
                        self._rank,
                    )
                    self._silent.add(reader)
                    return None
                self._check()
                self._changed.wait(0.2)
            ref = self._refs[unit]
        return self._fetched(ref, reader)

    def use(self, unit: int) -> None:
        """See `Transport.use`."""
        with self._changed:
            self._refs.pop(unit, None)
            self._unsent.append(unit)
        self._send_uses(_USES)

    def leave(self) -> None:
        """See `Transport.leave`."""
        with self._changed:
            self._left = True
            self._refs.clear()
            self._changed.notify_all()
        self._send(Leave(self._key, self._rank, tuple(self._offered)))

    def _fetched(self, ref: Any, reader: int) -> memoryview | None:
        try:
            view: memoryview = ray_calls.get(ref, timeout=SHARE_TIMEOUT_S).data
            return view
        except RayError as error:
            logger.warning("What rank %d has read is gone, storage is read: %s", reader, error)
            with self._changed:
                self._silent.add(reader)
            return None

    def _send_uses(self, at_least: int) -> None:
        with self._changed:
            if len(self._unsent) < at_least:
                return
            units, self._unsent = tuple(self._unsent), []
        self._send(Use(self._key, self._rank, units))

    def _send(self, message: ReadMessage) -> bool:
        try:
            coordinator = self._coordinator()
            with ray_calls.starting_no_ray(), ray_calls.inside():
                coordinator.share.remote(message)
        except (CheckpointError, RayError, ValueError) as error:
            logger.warning("The coordinator is out of reach for shared reads: %s", error)
            return False
        return True

    def _listen(self) -> None:
        """Receives updates until this rank leaves, or the coordinator does not answer."""
        seen = 0
        try:
            while not self._left:
                message = Listen(self._key, self._rank, seen, LISTEN_S)
                coordinator = self._coordinator()
                with ray_calls.starting_no_ray(), ray_calls.inside():
                    answer = coordinator.share.remote(message)
                updates = ray_calls.get(answer, timeout=LISTEN_S + SHARE_TIMEOUT_S)
                if updates is None:
                    break
                seen += len(updates)
                for new in updates:
                    self._take_update(new)
        except (CheckpointError, RayError, ValueError, SystemExit) as error:
            logger.warning("The coordinator sends no updates of shared reads: %s", error)
        with self._changed:
            # Why: nothing will come any more.
            self._silent.update(self._heard_s)
            freed = [*self._mine]
            self._mine.clear()
            self._changed.notify_all()
        for unit in freed:
            self._freed(unit)

    def _take_update(self, new: UnitUpdate) -> None:
        with self._changed:
            reader = self._reader.get(new.unit, -1)
            if reader == self._rank:
                self._mine.pop(new.unit, None)
            else:
                self._heard_s[reader] = time.monotonic()
                if new.what == "there":
                    self._refs[new.unit] = new.handle[0]
                else:
                    self._gone.add(new.unit)
            self._changed.notify_all()
        if reader == self._rank:
            self._freed(new.unit)
