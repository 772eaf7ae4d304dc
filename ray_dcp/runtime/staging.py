"""The rank's side of staging with Ray: this process's place at the stager of its node.

Bytes go as objects of Ray's store, which the stager maps; `stage.transfer` hands them over.
`ActorLink` is one process's connection to one stager: its handle, and its end.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pickle import PickleBuffer
from typing import Any, NoReturn

import numpy as np
import ray
from ray.exceptions import RayError

from ray_dcp.commit_protocol.liveness import LONG_WAIT_S
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core.processes import pid_namespace
from ray_dcp.core.values import RankPlan
from ray_dcp.errors import CheckpointError, ParticipantError
from ray_dcp.io.threads import Stop, begin
from ray_dcp.io.writer import NOTHING_PUBLISHED, Published
from ray_dcp.options import SaveOptions
from ray_dcp.runtime import ray_calls, ray_private
from ray_dcp.runtime.actor_names import LEASE_S, NAMESPACE
from ray_dcp.runtime.coordinator_call import call_actor, check_ray
from ray_dcp.runtime.rank_save import Captured
from ray_dcp.runtime.stager import StagingAddress, stager_of
from ray_dcp.stage.orders import StageKey, StageOrder, StageProgress, StagerOptions
from ray_dcp.stage.transfer import StagerGone, transfer
from ray_dcp.stage.window_filling import filler_of
from ray_dcp.stage.windows import plan_digest
from ray_dcp.stage.write_queue import LINGER_S, step_behind

logger = logging.getLogger(__name__)

START_S = 300.0
"""How long a stager may take to start and to answer a first call, in seconds: its process imports
torch, on a node that is busy training."""

ENTER_S = 60.0
"""How long one that has started may take to answer, in seconds."""


class ActorLink:
    """Implements `Link`: the way to a stager that is an actor.

    Args:
        handle: Of the actor.
        place: What it said of itself.
        pidfd: Of its process; -1 where it is not seen from here.
    """

    def __init__(self, handle: Any, place: StagingAddress, pidfd: int) -> None:
        self.handle = handle
        self.stager = place.stager
        self.window_bytes = place.window_bytes
        self.known_plans: set[bytes] = set()
        self._pidfd = pidfd

    def call(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float,
        silence_s: float | None = None,
        stop: Stop | None = None,
    ) -> Any:
        """See `Link.call`."""
        return call_actor(
            "the node's stager",
            lambda fresh: _gone(self.stager) if fresh else self.handle,
            lambda actor: getattr(actor, method).remote(*arguments),
            timeout_s=timeout_s,
            given_up=(lambda _: None) if silence_s is None else _Pulse(self, silence_s, stop),
        )

    def post(self, method: str, *arguments: Any) -> None:
        """See `Link.post`."""
        # Suppressed: that the stager is gone, or Ray, is found by the next call.
        with suppress(Exception), ray_private.starting_no_ray(), ray_calls.inside():
            check_ray(self.stager)
            getattr(self.handle, method).remote(*arguments)

    def put(self, parts: list[np.ndarray]) -> Any:
        """See `Link.put`."""
        # Why no arrays: Ray takes three times as long to make arrays again in another process.
        return ray_calls.put([PickleBuffer(part) for part in parts])  # type: ignore[arg-type]

    def end_stager(self) -> None:
        """Asks for the end of the stager's process, and does not wait for it.

        *Why*: one that hangs in a storage may never end.
        """
        with suppress(RayError, ValueError):
            ray_calls.kill(self.handle, no_restart=True)
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Lets go of its process."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


LONGEST_DEVICE_WINDOW = 64 << 20
"""Longest window of bytes from a device: each thread that copies keeps one in pinned memory."""


class _Pulse:
    """Checks whether a stager answers while a call to it waits."""

    def __init__(self, link: ActorLink, silence_s: float, stop: Stop | None) -> None:
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
        if self._asked is not None and ray_calls.wait([self._asked], timeout=0)[0]:
            asked, self._asked = self._asked, None
            # Suppressed: a connection broke, which is silence and no death.
            with suppress(RayError):
                ray_calls.get(asked)
                self._heard_s, silent_s = now_s, 0.0
        if silent_s > self._silence_s:
            raise StagerGone(f"{self._link.stager} has not answered for {silent_s:.0f} s")
        if self._asked is None and silent_s > self._silence_s / 4:
            # Suppressed: that the stager is gone is found by the call itself.
            with suppress(RayError), ray_calls.inside():
                self._asked = self._link.handle.place.remote()
        return None


def _gone(stager: str) -> NoReturn:
    raise StagerGone(stager)


MOST_STAGERS = 3
"""How many stagers in a row may die while one state is handed over."""

WARM_S = 600.0


class RankStaging:
    """One rank's place at its node's stager, which is made if there is none.

    Calls may come from several threads.

    Args:
        name: Of this rank on the node, unique there.
        namespace: Ray namespace of the stager.
        lease_s: How long an unused stager stays, in seconds.
        options: How the node stages; those of its first rank count.

    Raises:
        ParticipantError: The stager does not start or answer.
    """

    def __init__(
        self,
        name: str,
        *,
        namespace: str = NAMESPACE,
        lease_s: float = LEASE_S,
        options: StagerOptions | None = None,
    ) -> None:
        self.name = name
        self._process = f"{os.getpid()}-{secrets.token_hex(6)}"
        node_id = ray.get_runtime_context().get_node_id()
        self._stager: Callable[[], Any] = lambda: stager_of(
            node_id, namespace=namespace, lease_s=lease_s, options=options
        )
        self._lock = threading.Lock()
        self._link: ActorLink | None = None
        self.link()

    def warm(
        self, num_bytes: int, touched: Callable[[int], object] = lambda _: None
    ) -> Future[None]:
        """Begins to touch memory of the store for a state, which makes its first save faster.

        In the background, behind everything else. Returns at once; the future ends with it, also
        where it could not be done.

        Args:
            num_bytes: Size of the state.
            touched: Called with the bytes of each window that was touched.
        """

        def touch() -> None:
            step_behind(19, "idle")
            # Suppressed: a first save is slower then, and raises what is wrong.
            with suppress(CheckpointError, StagerGone, RayError):
                link = self.link()
                own_bytes = link.call("warm", self.name, num_bytes, timeout_s=WARM_S)
                # Why all at once: each is to get a place of its own in the store, as the windows
                # of a save do. To touch one costs ten times the copy.
                window = np.zeros(link.window_bytes, dtype=np.uint8)
                held = []
                for start in range(0, own_bytes, link.window_bytes):
                    held.append(link.put([window[: own_bytes - start]]))
                    touched(min(own_bytes - start, link.window_bytes))
                if held:
                    held.clear()
                    # Why: until Ray has it back, a save would get memory that was never touched.
                    threading.Event().wait(LINGER_S)

        return begin(touch, "warm")

    def stage(
        self,
        key: StageKey,
        plan: RankPlan,
        captured: Captured,
        *,
        target: Target,
        options: SaveOptions,
        published: Published = NOTHING_PUBLISHED,
        reporter: Any = None,
        stop: Stop | None = None,
    ) -> Staged:
        """Hands all bytes to the stager; when it returns, the state may change.

        Writing begins meanwhile. A state larger than the node's budget goes through in windows: the
        call returns later then. A stager that dies meanwhile is replaced.

        Args:
            key: Names this share of the attempt.
            plan: What to write.
            captured: Where the bytes are.
            target: Where to write.
            options: How; `write_timeout_s` bounds each wait for room.
            published: See `ray_dcp.io.writer.write_pieces`.
            reporter: Handle of the actor that gets the report of each file; see `Stager.begin`.
            stop: Ends it early, with its error: where ranks share a file one waits for the others.

        Raises:
            LimitError: The node's budget is too small for one window.
            ParticipantError: No stager stays alive.
            CheckpointError: It was cancelled, or `captured` failed.
        """
        started_s = time.perf_counter()
        filler = filler_of(captured.source)
        deferred = {row: captured.deferred(row) for f in plan.files for row in f.deferred.tolist()}
        lengths = tuple(tuple(len(deferred[r]) for r in f.deferred.tolist()) for f in plan.files)
        plan_id = plan_digest(plan)
        longest = LONGEST_DEVICE_WINDOW if filler.pin is not None else sys.maxsize
        for _ in range(MOST_STAGERS):
            link = self.link()
            window_bytes = min(link.window_bytes, longest)
            order = StageOrder(
                key,
                self._process,
                plan_id,
                None,
                lengths,
                target,
                options,
                window_bytes,
                dict(published),
            )
            try:
                num_bytes = transfer(
                    link,
                    order,
                    plan,
                    reporter,
                    filler,
                    deferred.__getitem__,
                    timeout_s=options.write_timeout_s,
                    stop=stop,
                )
            except StagerGone:
                # This rank has the state still. What that one has written has the same bytes.
                self.replace(link)
                continue
            return Staged(link, order, num_bytes, time.perf_counter() - started_s)
        raise ParticipantError(
            f"expected a stager to stay alive on this node, but {MOST_STAGERS} died one after the "
            f"other while rank {key.rank} staged; look into their logs",
            rank=key.rank,
        )

    def info(self) -> dict[str, Any]:
        """Returns what the stager says of itself."""
        link = self.link()
        try:
            found: dict[str, Any] = link.call("info", timeout_s=ENTER_S)
        except StagerGone:
            link = self.replace(link)
            found = link.call("info", timeout_s=ENTER_S)
        return found

    def close(self) -> None:
        """Deregisters this rank at the stager, which still writes what the rank has staged."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.post("leave", self.name, self._process)
            link.close()

    def link(self) -> ActorLink:
        """Returns the link to the stager."""
        with self._lock:
            if self._link is None:
                self._link = self._connect(self._stager)
            return self._link

    def replace(self, dead: ActorLink) -> ActorLink:
        """Returns a link to a new stager, and kills the old one if it still runs.

        Raises:
            ParticipantError: No other one starts.
        """
        with self._lock:
            if self._link is dead or self._link is None:
                dead.end_stager()
                dead.close()
                self._link = self._connect(self._stager, dead.stager)
            return self._link

    def _connect(
        self,
        stager: Callable[[], Any],
        not_this: str | None = None,
        timeout_s: float = START_S,
    ) -> ActorLink:
        """Registers this rank at a stager and returns the link to it.

        Args:
            stager: Returns its handle, after making it if there is none.
            not_this: A stager that is dead; its name may still be found for a moment.
            timeout_s: How long to try, in seconds.

        Raises:
            ParticipantError: It does not come or answer.
        """
        begin_s, is_logged = time.monotonic(), False
        end_s = begin_s + timeout_s

        def log_slow_start(_: bool) -> None:
            nonlocal is_logged
            waited_s = time.monotonic() - begin_s
            if waited_s > LONG_WAIT_S and not is_logged:
                is_logged = True
                logger.warning(
                    "Rank %s has waited %.0f s for a stager to start and answer; it fails after %g "
                    "s. Look whether that node has CPU and memory for one more process",
                    self.name,
                    waited_s,
                    timeout_s,
                )

        while True:
            handle = stager()
            try:
                place: StagingAddress = call_actor(
                    "the node's stager",
                    lambda fresh: stager() if fresh else handle,  # noqa: B023 - called at once
                    lambda actor: actor.place.remote(),
                    timeout_s=max(end_s - time.monotonic(), 1.0),
                    given_up=log_slow_start,
                )
                if place.stager != not_this:
                    break
            except ParticipantError:
                if time.monotonic() >= end_s:
                    raise
            if time.monotonic() >= end_s:
                raise ParticipantError(
                    f"expected another stager than {not_this}, which is dead, within {timeout_s:g} "
                    f"s; look whether its node is overloaded, and save again"
                )
            threading.Event().wait(0.1)
        pid, pidfd = None, -1
        if place.pid_namespace and place.pid_namespace == pid_namespace():
            pid = os.getpid()
            # Suppressed: it has ended, or this system can't; calls find that out.
            with suppress(AttributeError, OSError):
                pidfd = os.pidfd_open(place.pid)
        link = ActorLink(handle, place, pidfd)
        caller = ray_private.this_caller(os.getpid())
        link.call("enter", self.name, self._process, caller, pid, timeout_s=timeout_s)
        return link


class Staged:
    """Bytes that a stager holds.

    Attributes:
        key: What the stager knows them by.
        num_bytes: How many.
        stager: Name of that stager, different for each process that ever was one.
        stall_s: How long `stage` took, in seconds.
    """

    def __init__(self, link: ActorLink, order: StageOrder, num_bytes: int, stall_s: float) -> None:
        self.key = order.key
        self.num_bytes = num_bytes
        self.stager = link.stager
        self.stall_s = stall_s
        self._link = link

    def progress(self) -> StageProgress | None:
        """Returns the progress of the stager; None if it is dead or does not know the key."""
        try:
            found: StageProgress | None = self._link.call("progress", self.key, timeout_s=ENTER_S)
        except (StagerGone, CheckpointError):
            return None
        return found

    def release(self, *, committed: bool = False) -> None:
        """Reports that the outcome is known: nobody needs the reports again, nor the bytes.

        Args:
            committed: The save was; what it is to keep in memory stays then.
        """
        self._link.post("release", self.key, committed)
