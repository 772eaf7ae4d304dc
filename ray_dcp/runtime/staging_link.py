"""One process's way to one stager: its handle, its shared memory if that can be mapped, its end."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NoReturn

from ray.exceptions import RayError

from ray_dcp.errors import CheckpointError, LimitError, ParticipantError
from ray_dcp.runtime import hooks, ray_calls
from ray_dcp.runtime.call import call_actor, check_ray
from ray_dcp.runtime.place import Place
from ray_dcp.stage.arena import Arena
from ray_dcp.stage.priority import step_behind
from ray_dcp.transfer.threads import Stop

__all__ = ["Link", "StagerGone", "link_to", "map_behind"]

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

    def __init__(self, handle: Any, place: Place, arena: Arena | None, pidfd: int) -> None:
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
        with suppress(Exception), hooks.starting_no_ray(), ray_calls.inside():
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
            place: Place = call_actor(
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
    caller = hooks.this_caller(os.getpid())
    pid = None if arena is None else os.getpid()
    link.own_slots = link.call("enter", name, process, caller, pid, owner, timeout_s=timeout_s)
    return link


def _mapped(place: Place) -> tuple[Arena | None, int]:
    if place.arena is None:
        return None, -1
    try:
        arena = Arena.open(place.arena)
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
