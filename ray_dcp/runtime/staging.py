"""The rank's side of staging: hands its bytes to the node's stager while training goes on.

The bytes go through shared memory that the stager created and this process has mapped. Where that
can't be mapped (another container, another machine) windows go as objects through Ray's store, at
twice the cost. Windows are handed over one by one, as fast as the stager has room for them.

`Link` is one process's connection to one stager: its handle, its shared memory if that can be
mapped, and its end.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

import numpy as np
import ray
from ray.exceptions import RayError

from ray_dcp.core.values import RankPlan
from ray_dcp.errors import CheckpointError, LimitError, ParticipantError
from ray_dcp.io.threads import Stop
from ray_dcp.options import SaveOptions
from ray_dcp.protocol.messages import Target
from ray_dcp.runtime import ray_calls, ray_private
from ray_dcp.runtime.actor_names import LEASE_S, NAMESPACE
from ray_dcp.runtime.coordinator_call import call_actor, check_ray
from ray_dcp.runtime.rank_save import Captured
from ray_dcp.runtime.stager import Reporter, StagingAddress, stager_of
from ray_dcp.stage.copying import Filler, Pin, drain, fill_window, filler_of
from ray_dcp.stage.memory import StagingMemory
from ray_dcp.stage.values import (
    Grant,
    Slot,
    StageKey,
    StageOrder,
    StageProgress,
    StagerOptions,
    Unknown,
)
from ray_dcp.stage.windows import StagingLayout, lay_out_windows, plan_digest
from ray_dcp.stage.write_queue import lost_memory, step_behind

ENTER_S = 60.0
"""How long a stager may take to start and to answer a first call, in seconds."""


class StagerGone(Exception):
    """The stager of a link is dead; what it held may be handed to another one."""


class Link:
    """The way to a stager. Calls may come from several threads.

    Args:
        handle: Of the actor.
        place: What it said of itself.
        arena: Its memory, mapped here; None where that can't be.
        pidfd: Of its process; -1 where it is not seen from here.
    """

    def __init__(
        self, handle: Any, place: StagingAddress, arena: StagingMemory | None, pidfd: int
    ) -> None:
        self.handle = handle
        self.stager = place.stager
        self.arena = arena
        self.channel: Literal["arena", "store"] = "store" if arena is None else "arena"
        self.window_bytes = place.store_window_bytes
        if arena is not None:
            self.window_bytes = arena.address.slot_bytes
        self.known_plans: set[bytes] = set()
        self.own_slots: tuple[int, ...] = ()
        self._pidfd = pidfd

    def call(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float,
        silence_s: float | None = None,
        stop: Stop | None = None,
    ) -> Any:
        """Returns what the stager answers.

        Args:
            method: Of the stager.
            *arguments: Of the method.
            timeout_s: For the answer, in seconds.
            silence_s: How long it may take to answer whether it lives, in seconds; None for ever.
            stop: Ends the wait early, with its error.

        Raises:
            StagerGone: It is dead, or as good as dead: it does not answer.
            CheckpointError: What it raised, or it did not answer in time.
        """
        return call_actor(
            "the node's stager",
            lambda fresh: _gone(self.stager) if fresh else self.handle,
            lambda actor: getattr(actor, method).remote(*arguments),
            timeout_s=timeout_s,
            given_up=(lambda _: None) if silence_s is None else _Pulse(self, silence_s, stop),
        )

    def post(self, method: str, *arguments: Any) -> None:
        """Tells the stager something; nobody waits for whether it came."""
        # Suppressed: that the stager is gone, or Ray, is found by the next call.
        with suppress(Exception), ray_private.starting_no_ray(), ray_calls.inside():
            check_ray(self.stager)
            getattr(self.handle, method).remote(*arguments)

    def end_stager(self, timeout_s: float) -> None:
        """Returns when the stager's process has ended; ends it if need be.

        Why it must be certain: one that was only frozen would go on and use its memory for
        something else, while another one writes from it.

        Raises:
            ParticipantError: It can't be ended.
        """
        with suppress(RayError, ValueError):
            ray_calls.kill(self.handle, no_restart=True)
        if self._pidfd < 0:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise ParticipantError(
                f"expected the stager {self.stager} to end within {timeout_s:g} s after SIGKILL, "
                f"but it did not; its node hangs"
            )

    def close(self) -> None:
        """Lets go of its process and its memory, which stays while somebody reads from it."""
        self.arena = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class _Pulse:
    """Feels whether a stager answers while a call to it waits."""

    def __init__(self, link: Link, silence_s: float, stop: Stop | None) -> None:
        self._link = link
        self._stop = stop
        self._silence_s = silence_s
        self._heard_s = time.monotonic()
        self._asked: Any = None

    def __call__(self, failed: bool) -> CheckpointError | None:
        if self._stop is not None and self._stop.asked:
            error = self._stop.error
            return error if isinstance(error, CheckpointError) else CheckpointError(str(error))
        now_s = time.monotonic()
        silent_s = now_s - self._heard_s
        if self._asked is not None:
            answered, _ = ray_calls.wait([self._asked], timeout=0)
            if answered:
                self._asked, self._heard_s = None, now_s
            elif silent_s > self._silence_s:
                raise StagerGone(f"{self._link.stager} has not answered for {silent_s:.0f} s")
        elif silent_s > self._silence_s / 4:
            # Suppressed: that the stager is gone is found by the call itself.
            with suppress(RayError), ray_calls.inside():
                self._asked = self._link.handle.ping.remote()
        return None


def link_to(
    stager: Callable[[], Any],
    name: str,
    process: str,
    *,
    owner: str,
    not_this: str | None = None,
    may_map: bool = True,
    timeout_s: float = ENTER_S,
) -> Link:
    """Returns the way to a stager, which knows from then on that this rank is there.

    Args:
        stager: Returns its handle, after making it if there is none.
        name: Of this rank on the node.
        process: Names this process.
        owner: Of the memory that this rank uses, and that one of an earlier process may have had.
        not_this: A stager that is dead; its name may still be found for a moment.
        may_map: Whether to map its memory.
        timeout_s: How long to try, in seconds.

    Raises:
        ParticipantError: It does not come or answer.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        handle = stager()
        left_s = max(end_s - time.monotonic(), 1.0)
        try:
            place: StagingAddress = call_actor(
                "the node's stager",
                lambda fresh: stager() if fresh else handle,  # noqa: B023 - called at once
                lambda actor: actor.place.remote(),
                timeout_s=left_s,
            )
            if place.stager != not_this:
                break
        except ParticipantError:
            if time.monotonic() >= end_s:
                raise
        if time.monotonic() >= end_s:
            raise ParticipantError(
                f"expected another stager than {not_this}, which is dead, within {timeout_s:g} s"
            )
        threading.Event().wait(0.1)
    arena, pidfd = _mapped(place) if may_map else (None, -1)
    link = Link(handle, place, arena, pidfd)
    caller = ray_private.this_caller(os.getpid())
    pid = None if arena is None else os.getpid()
    link.own_slots = link.call("enter", name, process, caller, pid, owner, timeout_s=timeout_s)
    return link


def _mapped(place: StagingAddress) -> tuple[StagingMemory | None, int]:
    if place.arena is None:
        return None, -1
    try:
        arena = StagingMemory.open(place.arena)
    except LimitError:
        return None, -1
    try:
        return arena, os.pidfd_open(place.pid)
    except (AttributeError, OSError):
        return arena, -1


def _gone(stager: str) -> NoReturn:
    raise StagerGone(stager)


def map_behind(link: Link) -> None:
    """Makes the memory that a rank of this name had present in this process, in the background.

    A job that starts anew finds there what it staged last: to load it, or to save the next one.
    """
    arena, slots = link.arena, link.own_slots
    if arena is None or not slots:
        return

    def touch() -> None:
        step_behind(19, "idle")
        # Suppressed: the link was closed meanwhile.
        with suppress(ValueError):
            for slot in slots:
                arena.touch(slot)

    threading.Thread(target=touch, name="map", daemon=True).start()


TELL_S = 0.2
"""How often the stager is told what is full, in seconds. Told of each window it would begin to
write while the rank still copies, and both would wait for the same memory: a state that is copied
in less than this has its processors for itself."""

Fill = Callable[[StagingLayout, int, np.ndarray], None]
"""Puts the bytes of a window into uint8[used bytes of the window], or begins to."""


@dataclass
class Handed:
    """Where a stager has a rank's windows."""

    layout: StagingLayout
    slots: list[Slot] = field(default_factory=list)
    refs: dict[int, Any] = field(default_factory=dict)
    """References of those that went as objects; kept so that they outlive the stager."""


def hand_in(
    link: Link,
    order: StageOrder,
    plan: RankPlan,
    reporter: Reporter | None,
    fill: Fill,
    filler: Filler | None = None,
    *,
    timeout_s: float,
    stop: Stop | None = None,
) -> Handed:
    """Returns when the stager holds every byte.

    Args:
        link: To the stager.
        order: What is handed over.
        plan: Of the order; sent along when the stager does not know it.
        reporter: Who gets the reports.
        fill: Gives the bytes; called in this thread, once a window.
        filler: What `fill` begins copies with. It is waited for as seldom as windows are told, so
            that a device always has something to copy.
        timeout_s: How long to wait each time that the stager has no room, in seconds.
        stop: Ends it early, with its error.

    Raises:
        StagerGone: It died; everything is to be handed to another one.
        CheckpointError: It refused or gave up, or `fill` failed.
    """
    grant = ask(link, "begin", order, plan, reporter, timeout_s=timeout_s)
    handed = Handed(lay_out_windows(plan, order.deferred_bytes, order.window_bytes))
    try:
        _hand_windows(link, order, plan, handed, grant, fill, filler, timeout_s, stop)
        silence_s = order.options.heartbeat_timeout_s
        sealed = link.call("seal", order.key, timeout_s=timeout_s, silence_s=silence_s, stop=stop)
        _known(link, sealed)
    except BaseException:
        if filler is not None:
            drain(filler)
        # Why: until the rank says so, its memory is given to nobody else.
        link.post("cancel", order.key, True)
        raise
    return handed


def ask(
    link: Link, method: str, order: StageOrder, plan: RankPlan, *arguments: Any, timeout_s: float
) -> Any:
    """Returns the answer to an order, which is sent without its plan if that should be known."""
    known = order.plan_id in link.known_plans
    for given in (None, plan) if known else (plan,):
        sent = replace(order, plan=given)
        answer = link.call(
            method,
            link.stager,
            sent,
            *arguments,
            timeout_s=timeout_s,
            silence_s=order.options.heartbeat_timeout_s,
        )
        if answer != Unknown("plan"):
            break
    link.known_plans.add(order.plan_id)
    return _known(link, answer)


def _hand_windows(
    link: Link,
    order: StageOrder,
    plan: RankPlan,
    handed: Handed,
    grant: Grant,
    fill: Fill,
    filler: Filler | None,
    timeout_s: float,
    stop: Stop | None,
) -> None:
    finish = (lambda: None) if filler is None else filler.finish
    layout, slots = handed.layout, handed.slots
    wanted = set(range(len(plan.files)) if order.files is None else order.files)
    scratch = np.zeros(0, dtype=np.uint8)
    slots.extend(grant.slots)
    arena = link.arena if order.channel == "arena" else None
    told_s = time.monotonic()
    for window in range(layout.num_windows):
        while window >= len(slots):
            if arena is not None and window:
                # Nothing is written, and so no room made, before the stager knows of it.
                finish()
                link.post("deliver", order.key, window - 1)
            more = link.call(
                "more",
                order.key,
                len(slots),
                timeout_s=timeout_s,
                silence_s=order.options.heartbeat_timeout_s,
                stop=stop,
            )
            grant = _known(link, more)
            slots.extend(grant.slots)
            for freed in grant.freed:
                handed.refs.pop(freed, None)
        used = int(layout.used_bytes[window]) if layout.files_of(window) & wanted else 0
        if arena is not None:
            fill(layout, window, arena.slot_array(slots[window].index)[:used])
            # The last one is told by `seal`.
            if window < layout.num_windows - 1 and time.monotonic() - told_s > TELL_S:
                finish()
                link.post("deliver", order.key, window)
                told_s = time.monotonic()
            continue
        if len(scratch) < used:
            scratch = np.empty(order.window_bytes, dtype=np.uint8)
        if used:
            fill(layout, window, scratch[:used])
            finish()
        handed.refs[window] = ray_calls.put(scratch[:used])
        link.post("deliver", order.key, window, [handed.refs[window]])
    finish()


def _known(link: Link, answer: Any) -> Any:
    if isinstance(answer, Unknown):
        raise StagerGone(f"{link.stager} does not know the {answer.what}")
    return answer


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
            fill_window(layout, window, into, copier, deferred.__getitem__, wait=False)

        plan_id = plan_digest(plan)
        for number in range(MOST_STAGERS):
            key = key if number == 0 else replace(key, incarnation=key.incarnation + 1)
            link = self.link()
            arena = link.arena
            if arena is not None and copier.pin is not None:
                arena.pin_with(copier.pin)
            order = StageOrder(
                key,
                self._owner,
                self._process,
                plan_id,
                None,
                lengths,
                target,
                options,
                link.channel,
                link.window_bytes,
            )
            try:
                wait_s = options.write_timeout_s
                handed = hand_in(
                    link, order, plan, reporter, fill, copier, timeout_s=wait_s, stop=stop
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
                    self._stager,
                    self.name,
                    self._process,
                    owner=self._owner,
                    not_this=dead.stager,
                    timeout_s=timeout_s,
                )
            return self._link

    def link_elsewhere(self, stager: Any, timeout_s: float) -> Link:
        """Returns the way to the stager of another node."""
        return link_to(
            lambda: stager,
            self.name,
            self._process,
            owner=self._owner,
            may_map=False,
            timeout_s=timeout_s,
        )


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
        arena: StagingMemory | None,
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
        order = replace(self._order, key=key, files=wanted)
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
                ask(
                    link,
                    "adopt",
                    order,
                    self._plan,
                    self._reporter,
                    address,
                    slots,
                    timeout_s=timeout_s,
                )
                return
        handed = hand_in(
            link,
            replace(order, channel="store"),
            self._plan,
            self._reporter,
            self._fill,
            timeout_s=order.options.write_timeout_s,
            stop=stop,
        )
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
