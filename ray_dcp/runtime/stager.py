"""The stager: one actor a node, which holds what ranks put into the object store and writes it.

It never pickles or unpickles a value: it gets bytes, and the plan says where they go. It keeps
the node's byte budget, for Ray's object store neither refuses nor pushes back when it is full.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_dcp.errors import InternalError
from ray_dcp.options import SaveOptions
from ray_dcp.plan.values import RankPlan
from ray_dcp.protocol.messages import FileReceipt, Target
from ray_dcp.runtime import hooks
from ray_dcp.runtime.hooks import Caller
from ray_dcp.runtime.naming import NAMESPACE, check_lease, stager_name
from ray_dcp.stage.budget import ByteBudget
from ray_dcp.store.opening import open_storage
from ray_dcp.transfer.writer import write_part

__all__ = ["SHARE_OF_STORE", "Place", "Stager", "stager_of"]

SHARE_OF_STORE = 0.7
"""Part of a node's object store that staged bytes may take. Ray begins to spill at 80 %."""

CONCURRENCY = {"ctl": 4, "io": 2}
"""Calls at a time: control calls must not wait behind writes."""


@dataclass(frozen=True)
class Place:
    """Where an item's bytes are among the staged buffers."""

    buffer: int
    start: int
    num_bytes: int


class Stager:
    """Holds and writes staged buffers.

    Args:
        lease_s: It leaves after so many seconds without calls and reservations.
        limit_bytes: Of the budget; by default `SHARE_OF_STORE` of the node's object store.
    """

    def __init__(self, lease_s: float, limit_bytes: int | None = None) -> None:
        self._node_id = ray.get_runtime_context().get_node_id()
        self._budget = ByteBudget(limit_bytes or int(SHARE_OF_STORE * _store_bytes(self._node_id)))
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._running = 0
        self._holders: dict[str, Caller] = {}
        self._last_call_s = time.monotonic()
        self._self = ray.get_runtime_context().current_actor
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    @ray.method(concurrency_group="ctl")
    def ping(self) -> bool:
        """Returns True: the stager lives."""
        self._touch(0)
        return True

    @ray.method(concurrency_group="ctl")
    def info(self) -> dict[str, Any]:
        """Returns `node_id`, `pid`, `limit_bytes` and `reserved_bytes`."""
        self._touch(0)
        return {
            "node_id": self._node_id,
            "pid": os.getpid(),
            "limit_bytes": self._budget.limit_bytes,
            "reserved_bytes": self._budget.reserved_bytes,
        }

    @ray.method(concurrency_group="ctl")
    def reserve(self, reservation: str, num_bytes: int, caller: Caller | None = None) -> bool:
        """Returns whether so many bytes may be put into the node's object store now.

        Args:
            reservation: Made up by the caller; the same one again is the same reservation.
            num_bytes: How many.
            caller: Who asks; what it holds comes back when it dies.

        Raises:
            LimitError: They will never fit.
        """
        self._touch(0)
        granted = self._budget.reserve(reservation, num_bytes)
        if granted and caller is not None:
            self._holders[reservation] = caller
        return granted

    @ray.method(concurrency_group="ctl")
    def release(self, reservation: str) -> None:
        """Gives a reservation back; one that is not known is fine."""
        self._touch(0)
        self._holders.pop(reservation, None)
        self._budget.release(reservation)

    @ray.method(concurrency_group="io")
    def write_part(
        self,
        rank_plan: RankPlan,
        attempt: str,
        target: Target,
        buffers: Sequence[Any],
        places: Mapping[int, Place],
        options: SaveOptions,
    ) -> tuple[FileReceipt, ...]:
        """Writes one rank's part from staged buffers, without copying them.

        Args:
            rank_plan: What to write.
            attempt: Id of the attempt.
            target: Where to.
            buffers: References to uint8 arrays of one dimension in the object store.
            places: For each row of the rank's `Columns` where its bytes are.
            options: Of the save.

        Returns:
            A receipt for each file.

        Raises:
            CheckpointError: As `ray_dcp.transfer.writer.write_part`.
        """
        self._touch(1)
        try:
            views = [_adopted(index, array) for index, array in enumerate(ray.get(list(buffers)))]

            def source(row: int) -> memoryview:
                place = places[row]
                return views[place.buffer][place.start : place.start + place.num_bytes]

            return write_part(
                open_storage(target),
                rank_plan,
                attempt,
                source=source,
                deferred=source,
                options=options,
            )
        finally:
            self._touch(-1)

    def _touch(self, running: int) -> None:
        with self._lock:
            self._running += running
            self._last_call_s = time.monotonic()

    def _idle_s(self) -> float:
        with self._lock:
            busy = self._running or self._budget.reserved_bytes
            return 0.0 if busy else time.monotonic() - self._last_call_s

    def _watch(self) -> None:
        while True:
            threading.Event().wait(min(1.0, self._lease_s / 4))
            self._release_for_the_dead()
            if self._idle_s() >= self._lease_s:
                ray.kill(self._self, no_restart=True)

    def _release_for_the_dead(self) -> None:
        holders = dict(self._holders)
        # Why not while one writes: what the dead rank staged may be what is written.
        if not holders or self._running:
            return
        dead = hooks.gone(set(holders.values()))
        for reservation, caller in holders.items():
            if caller in dead:
                self._holders.pop(reservation, None)
                self._budget.release(reservation)


def stager_of(
    node_id: str, *, namespace: str = NAMESPACE, lease_s: float, limit_bytes: int | None = None
) -> Any:
    """Returns the handle of a node's stager, after making it if there is none.

    Args:
        node_id: Ray's hex id of the node.
        namespace: Ray namespace to look in.
        lease_s: See `Stager`; counts when the actor is made.
        limit_bytes: See `Stager`; counts when the actor is made.
    """
    with_groups: Any = ray.remote(concurrency_groups=CONCURRENCY)  # type: ignore[call-overload]
    actor = with_groups(Stager).options(
        name=stager_name(node_id),
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=0,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    return actor.remote(check_lease(lease_s), limit_bytes)


def _adopted(index: int, array: Any) -> memoryview:
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1:
        raise InternalError(
            f"Expected staged buffer {index} to be a uint8 array of one dimension, but found "
            f"{type(array).__name__}. Please report this"
        )
    return memoryview(array)  # type: ignore[arg-type]


def _store_bytes(node_id: str) -> float:
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            return float(node["Resources"].get("object_store_memory", 0))
    raise InternalError(f"Expected node {node_id} among Ray's nodes, but it is not there")
