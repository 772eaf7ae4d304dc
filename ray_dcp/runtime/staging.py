"""The rank's side of staging: its bytes go into the node's staging memory, and training goes on.

The way is shared memory that the stager made and this process has mapped. Where that can't be
(another container, another machine) windows go as objects through Ray's store, at twice the cost.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from ray_dcp.errors import CheckpointError, LimitError, ParticipantError
from ray_dcp.options import SaveOptions
from ray_dcp.plan.values import RankPlan
from ray_dcp.protocol.messages import Target
from ray_dcp.runtime import ray_calls
from ray_dcp.runtime.handing import Handed, ask, hand_in
from ray_dcp.runtime.naming import LEASE_S, NAMESPACE
from ray_dcp.runtime.rank_save import Captured
from ray_dcp.runtime.reporting import Reporter
from ray_dcp.runtime.stager import stager_of
from ray_dcp.runtime.staging_link import ENTER_S, Link, StagerGone, link_to, map_behind
from ray_dcp.stage.arena import Arena
from ray_dcp.stage.filling import Pin, fill_window, filler_of
from ray_dcp.stage.jobs import lost_memory
from ray_dcp.stage.layout import StagingLayout, plan_digest
from ray_dcp.stage.priority import step_behind
from ray_dcp.stage.values import StageKey, StageOrder, StageProgress, StagerOptions
from ray_dcp.transfer.threads import Stop

__all__ = ["RankStaging", "Reporter", "Staged"]

MOST_STAGERS = 3
"""How many stagers in a row may die while one state is handed over."""

WARM_S = 600.0


class RankStaging:
    """One rank's place at its node's stager. Calls may come from several threads.

    Args:
        name: Of this rank on the node, unique there.
        node_id: Ray's hex id of this node.
        namespace: Ray namespace of the stager.
        lease_s: How long an unused stager stays, in seconds.
        options: How the node stages; those of its first rank count.
        owner: Names its memory: who comes later under the same one gets what this one has warmed.
            By default `name`.
    """

    def __init__(
        self,
        name: str,
        node_id: str,
        *,
        owner: str | None = None,
        namespace: str = NAMESPACE,
        lease_s: float = LEASE_S,
        options: StagerOptions | None = None,
    ) -> None:
        self.name = name
        self._owner = owner or name
        self._process = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._stager: Callable[[], Any] = lambda: stager_of(
            node_id, namespace=namespace, lease_s=lease_s, options=options
        )
        self._lock = threading.Lock()
        self._link: Link | None = None

    @classmethod
    def open(
        cls,
        name: str,
        *,
        owner: str | None = None,
        node_id: str | None = None,
        namespace: str = NAMESPACE,
        lease_s: float = LEASE_S,
        options: StagerOptions | None = None,
    ) -> RankStaging:
        """Returns the place of this rank at its node's stager, which it makes if there is none.

        Raises:
            ParticipantError: The stager does not start or answer.
        """
        node_id = node_id or ray.get_runtime_context().get_node_id()
        staging = cls(
            name, node_id, owner=owner, namespace=namespace, lease_s=lease_s, options=options
        )
        staging.link()
        return staging

    def warm(
        self,
        num_bytes: int,
        ready: Callable[[], None] = lambda: None,
        *,
        pin: Pin | None = None,
    ) -> Future[None]:
        """Begins to touch the memory for a state of this size, so that its first save is not slow.

        In the background, behind everything else. Returns at once; the future ends with it, also
        where it could not be done.

        Args:
            num_bytes: Size of the state.
            ready: Called in the same thread, for whatever else is to be ready.
            pin: Of the device that the state is on.
        """
        done: Future[None] = Future()

        def touch() -> None:
            step_behind(19, "idle")
            try:
                # Suppressed: a first save is slower then, and tells what is wrong.
                with suppress(CheckpointError, StagerGone):
                    ready()
                    link = self.link()
                    arena = link.arena
                    for slot in link.call("warm", self._owner, num_bytes, timeout_s=WARM_S):
                        if arena is None:
                            break
                        if pin is not None:
                            arena.pin_with(pin)
                        arena.touch(slot)
            finally:
                done.set_result(None)

        threading.Thread(target=touch, name="warm", daemon=True).start()
        return done

    def stage(
        self,
        key: StageKey,
        plan: RankPlan,
        captured: Captured,
        *,
        target: Target,
        options: SaveOptions,
        reporter: Reporter | None = None,
        stop: Stop | None = None,
    ) -> Staged:
        """Returns when the stager holds every byte: from then on the state may change.

        Writing begins meanwhile. A state larger than the node's budget goes through in windows: the
        call returns later then. A stager that dies meanwhile is replaced.

        Args:
            key: Names this share of the attempt.
            plan: What to write.
            captured: Where the bytes are.
            target: Where to write.
            options: How; `write_timeout_s` bounds each wait for room.
            reporter: Who is told what became of each file.
            stop: Ends it early, with its error: where ranks share a file one waits for the others.

        Raises:
            LimitError: The node's budget is too small for one window.
            ParticipantError: No stager stays alive.
            CheckpointError: It was cancelled, or `captured` failed.
        """
        started_s = time.perf_counter()
        copier = filler_of(captured.source)
        deferred = {row: captured.deferred(row) for f in plan.files for row in f.deferred.tolist()}
        lengths = tuple(tuple(len(deferred[r]) for r in f.deferred.tolist()) for f in plan.files)

        def fill(layout: StagingLayout, window: int, into: np.ndarray) -> None:
            fill_window(layout, window, into, copier, deferred.__getitem__)

        plan_id = plan_digest(plan)
        for number in range(MOST_STAGERS):
            key = key if number == 0 else replace(key, incarnation=key.incarnation + 1)
            link = self.link()
            arena = link.arena
            if arena is not None and copier.pin is not None:
                arena.pin_with(copier.pin)
            order = StageOrder(
                key, self._owner, self._process, plan_id, None, lengths, target, options,
                link.channel, link.window_bytes,
            )  # fmt: skip
            try:
                handed = hand_in(
                    link, order, plan, reporter, fill, timeout_s=options.write_timeout_s, stop=stop
                )
            except StagerGone:
                self.replace(link)
                continue
            stall_s = time.perf_counter() - started_s
            return Staged(self, link, arena, order, plan, reporter, handed, stall_s)
        raise ParticipantError(
            f"expected a stager to stay alive on this node, but {MOST_STAGERS} died one after the "
            f"other while rank {key.rank} staged; look into their logs",
            rank=key.rank,
        )

    def info(self) -> dict[str, Any]:
        """Returns what the stager says of itself, and `channel`: how bytes get there from here."""
        link = self.link()
        try:
            found: dict[str, Any] = link.call("info", timeout_s=ENTER_S)
        except StagerGone:
            link = self.replace(link)
            found = link.call("info", timeout_s=ENTER_S)
        return {**found, "channel": link.channel}

    def close(self) -> None:
        """Says that this rank stages no more; what it has staged is written."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.post("leave", self.name, self._process)
            link.close()

    def link(self) -> Link:
        """Returns the way to the stager."""
        with self._lock:
            if self._link is None:
                self._link = link_to(self._stager, self.name, self._process, owner=self._owner)
                map_behind(self._link)
            return self._link

    def replace(self, dead: Link, timeout_s: float = ENTER_S) -> Link:
        """Returns the way to another stager than one that is dead, or is to be.

        Raises:
            ParticipantError: That one can't be ended, or no other one starts.
        """
        with self._lock:
            if self._link is dead or self._link is None:
                dead.end_stager(timeout_s)
                dead.close()
                self._link = link_to(
                    self._stager, self.name, self._process,
                    owner=self._owner, not_this=dead.stager, timeout_s=timeout_s,
                )  # fmt: skip
            return self._link

    def link_elsewhere(self, stager: Any, timeout_s: float) -> Link:
        """Returns the way to the stager of another node."""
        return link_to(
            lambda: stager, self.name, self._process,
            owner=self._owner, may_map=False, timeout_s=timeout_s,
        )  # fmt: skip


class Staged:
    """Bytes that a stager holds; this process can hand them over once more.

    Attributes:
        num_bytes: How many.
        stall_s: How long `stage` took, in seconds.
    """

    def __init__(
        self,
        staging: RankStaging,
        link: Link,
        arena: Arena | None,
        order: StageOrder,
        plan: RankPlan,
        reporter: Reporter | None,
        handed: Handed,
        stall_s: float,
    ) -> None:
        self.num_bytes = handed.layout.total_bytes
        self.stall_s = stall_s
        self._staging = staging
        self._link = link
        self._order = order
        self._plan = plan
        self._reporter = reporter
        self._handed = handed
        self._arena = arena

    @property
    def key(self) -> StageKey:
        """What the stager knows them by; its incarnation rises when they are handed over."""
        return self._order.key

    @property
    def stager_name(self) -> str:
        """The stager that holds them, different for each process that ever was one."""
        return self._link.stager

    @property
    def stager(self) -> Any:
        """Handle of that stager."""
        return self._link.handle

    def hand_over(
        self,
        stager: Any = None,
        *,
        files: Collection[int] | None = None,
        incarnation: int | None = None,
        timeout_s: float = ENTER_S,
        stop: Stop | None = None,
    ) -> None:
        """Hands the bytes to another stager, without the state.

        Args:
            stager: Handle of the stager of another node. By default this node gets a new one, and
                it is made sure first that the old one is dead.
            files: `FilePlan.file` of those that nobody has a receipt for; all by default.
            incarnation: Of the new holder; one more than before by default.
            timeout_s: For ending the old one and starting the new one, in seconds.
            stop: Ends it early, with its error.

        Raises:
            ParticipantError: The bytes are gone, or no stager takes them.
        """
        dead = self._link
        number = self.key.incarnation + 1 if incarnation is None else incarnation
        wanted = tuple(
            index for index, f in enumerate(self._plan.files) if files is None or f.file in files
        )
        key = replace(self.key, incarnation=number)
        order = replace(self._order, key=key, files=wanted, helps=stager is not None)
        for _ in range(MOST_STAGERS):
            if stager is None:
                link = self._staging.replace(dead, timeout_s)
            else:
                link = self._staging.link_elsewhere(stager, timeout_s)
            try:
                self._hand_over(link, order, timeout_s, stop, here=stager is None)
            except StagerGone:
                dead = link
                continue
            self._link, self._order = link, order
            return
        raise ParticipantError(
            f"expected a stager to take the bytes of rank {self.key.rank}, but each died; look "
            f"into their logs",
            rank=self.key.rank,
        )

    def progress(self) -> StageProgress | None:
        """Returns how far the stager is; None when it is gone or knows of nothing."""
        try:
            found: StageProgress | None = self._link.call("progress", self.key, timeout_s=ENTER_S)
        except (StagerGone, CheckpointError):
            return None
        return found

    def cancel(self) -> None:
        """Asks the stager to give up."""
        self._link.post("cancel", self.key, True)
        self._handed.refs.clear()

    def release(self, *, committed: bool = False) -> None:
        """Says that the outcome is known: nobody will need the reports again, nor the bytes.

        Args:
            committed: The save was; what it is to keep in memory stays then.
        """
        self._link.post("release", self.key, committed)
        self._handed.refs.clear()
        # Why: whoever keeps the handle of a save must not keep a dead stager's memory mapped.
        self._arena = None

    def _hand_over(
        self, link: Link, order: StageOrder, timeout_s: float, stop: Stop | None, *, here: bool
    ) -> None:
        if here and self._arena is not None:
            slots = tuple(self._handed.slots)
            # Suppressed: it can't open our memory, so the bytes go through the store.
            with suppress(LimitError):
                address = self._arena.address
                ask(link, "adopt", order, self._plan, self._reporter, address, slots,
                    timeout_s=timeout_s)  # fmt: skip
                return
        handed = hand_in(
            link, replace(order, channel="store"), self._plan, self._reporter, self._fill,
            timeout_s=order.options.write_timeout_s, stop=stop,
        )  # fmt: skip
        self._handed.refs.update(handed.refs)

    def _fill(self, layout: StagingLayout, window: int, into: np.ndarray) -> None:
        """Copies a window as it was staged."""
        if self._arena is None:
            if window not in self._handed.refs:
                raise lost_memory(self.key.rank)
            np.copyto(into, ray_calls.get(self._handed.refs[window])[: len(into)])
            return
        slot = self._handed.slots[window]
        np.copyto(into, self._arena.slot_array(slot.index)[: len(into)])
        if not self._arena.holds(slot):
            raise lost_memory(self.key.rank)
