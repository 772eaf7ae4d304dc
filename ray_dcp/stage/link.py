"""The rank's side of staging with Ray: this process's place at the stager of its node.

`transfer` hands a rank's bytes to a stager, window by window, as objects of Ray's store, which the
stager maps. What is not in host memory, or small, is copied to private memory first, from which the
objects are made behind it. `ActorLink` is one process's connection to one stager: its handle, and
its end.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pickle import PickleBuffer
from typing import Any, NoReturn

import numpy as np
import ray
from ray.exceptions import RayError

from ray_dcp.commit_protocol.messages import Phases, Target
from ray_dcp.core import bounds
from ray_dcp.core.processes import Stop, begin, pid_namespace, wait_all
from ray_dcp.core.quantities import size_text
from ray_dcp.core.values import RankPlan
from ray_dcp.errors import CheckpointError, DeadlineError, ParticipantError
from ray_dcp.io.writer import NOTHING_PUBLISHED, Published
from ray_dcp.options import SaveOptions
from ray_dcp.rank.captured import Captured
from ray_dcp.session import ray_calls
from ray_dcp.session.call_bound import CallBound
from ray_dcp.session.names import NAMESPACE
from ray_dcp.session.ray_calls import call_actor, check_ray
from ray_dcp.stage.copy_threads import copying_threads
from ray_dcp.stage.node_memory import NoRoomError
from ray_dcp.stage.orders import Grant, StageKey, StageOrder, StageProgress, Unknown
from ray_dcp.stage.private_memory import PIECE_BYTES, Lease, PrivateMemory
from ray_dcp.stage.stager import StagingAddress, stager_of
from ray_dcp.stage.stager_options import SHARE_OF_STORE, StagerOptions
from ray_dcp.stage.window_filler import Filler, Pin, deferred_items, drain, filler_of, window_parts
from ray_dcp.stage.windows import lay_out_windows
from ray_dcp.stage.write_queue import step_behind
from ray_dcp.store.environment import StorageVariables

logger = logging.getLogger(__name__)


class StagerGone(Exception):
    """Raised when the stager of a link is dead.

    A rank that still has its state stages it at another one.
    """


class ActorLink:
    """Calls the actor of a stager. Thread-safe.

    Args:
        handle: Ray's handle of the stager.
        place: The stager's description of its process, for messages.
        pidfd: Descriptor of the stager's process; -1 if this process can't see it.

    Attributes:
        stager: Its name, different for each process that ever was one.
        window_bytes: Longest window that it takes.
    """

    def __init__(self, handle: Any, place: StagingAddress, pidfd: int) -> None:
        self.handle = handle
        self.stager = place.stager
        self.window_bytes = place.window_bytes
        self._pidfd = pidfd

    def call(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float,
        silence_s: float | None = None,
        stop: Stop | None = None,
    ) -> Any:
        """Calls a method of the stager and returns its answer.

        Args:
            method: Name of the stager's method.
            *arguments: Arguments of the method.
            timeout_s: Time that the answer may take, in seconds.
            silence_s: Time that the stager may take to answer that it lives, in seconds; None for
                no limit.
            stop: Ends the wait early, with its error.

        Raises:
            StagerGone: It is dead, or as good as dead: it does not answer.
            CheckpointError: What it raised, or it did not answer in time.
        """
        return call_actor(
            "the node's stager",
            lambda fresh: _raise_gone(self.stager) if fresh else self.handle,
            lambda actor: getattr(actor, method).remote(*arguments),
            CallBound(timeout_s)
            if silence_s is None
            else CallBound(timeout_s, _Pulse(self, silence_s, stop)),
        )

    def post(self, method: str, *arguments: Any) -> None:
        """Calls a method of the stager without waiting for its answer."""
        # Suppressed: that the stager is gone, or Ray, is found by the next call.
        with suppress(Exception), ray_calls.starting_no_ray(), ray_calls.inside():
            check_ray(self.stager)
            getattr(self.handle, method).remote(*arguments)

    def put(self, parts: list[np.ndarray]) -> Any:
        """Returns a reference to an object that has a copy of these runs of bytes.

        Raises:
            NoRoomError: The node's memory has no room for it.
        """
        # Why no arrays: Ray takes three times as long to make arrays again in another process.
        buffers = [PickleBuffer(part) for part in parts]  # type: ignore[arg-type]
        return ray_calls.put(buffers, sum(map(len, parts)))

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
        """Closes the descriptor of the stager's process."""
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


def _raise_gone(stager: str) -> NoReturn:
    raise StagerGone(stager)


REPORT_S = 0.2
"""How often a rank reports full windows, in seconds. With a report of each window the stager would
begin to write while the rank still copies, and both would wait for the same memory: a state that is
copied in less than this has its processors for itself."""


_scratch = PrivateMemory()
"""Reused from save to save, as pages that are touched and registered with a device."""
os.register_at_fork(after_in_child=_scratch.begin_anew)


def transfer(
    link: ActorLink,
    order: StageOrder,
    reporter: Any,
    filler: Filler,
    deferred: Callable[[int], bytes],
    *,
    variables: StorageVariables | None = None,
    waits_for: Callable[[str], object] = lambda _: None,
    timeout_s: float,
    stop: Stop | None = None,
) -> int:
    """Transfers all bytes of a share to the stager, and returns their number.

    Args:
        link: Link to the stager.
        order: The rank's share of the save, as it was sent to the stager.
        reporter: Handle of the actor that receives the report of each file.
        filler: Copies the fixed items, in this thread. It is waited for only when a window is
            reported, so that a device always has something to copy.
        deferred: Returns the bytes of a deferred item.
        variables: Variables that the storage reads in the environment; by default those of this
            process.
        waits_for: See `wait_for_room`.
        timeout_s: Longest wait for room at the stager, each time, in seconds.
        stop: Ends the transfer early, with its error.

    Raises:
        StagerGone: It died; everything is to be handed to another one.
        NoRoomError: The node's memory has no room for a window.
        CheckpointError: It refused or gave up, or `filler` or `deferred` failed.
    """
    silence_s = order.options.heartbeat_timeout_s
    variables = variables or StorageVariables.of_this_process()

    def call(method: str, *arguments: Any) -> Any:
        answer = link.call(method, *arguments, timeout_s=timeout_s, silence_s=silence_s, stop=stop)
        if isinstance(answer, Unknown):
            raise StagerGone(f"{link.stager} does not know the {answer.what}")
        return answer

    layout = lay_out_windows(order.plan, order.deferred_bytes, order.window_bytes)
    last, reported, reported_s = layout.num_windows - 1, -1, time.monotonic()

    def report(method: str, window: int) -> None:
        """Reports that all windows up to this one are full.

        *Why* each report waits for its answer: one that was lost would hold up what writes.
        """
        nonlocal reported, reported_s
        call(method, order.key, objects.take(range(reported + 1, window + 1)))
        reported, reported_s = window, time.monotonic()

    try:
        num_granted = call("begin", link.stager, order, reporter, variables).num_windows
        with _WindowObjects(link, order.window_bytes, filler.pin) as objects:
            for window, used_bytes in enumerate(layout.used_bytes.tolist()):
                while window >= num_granted:
                    # Nothing is written, and so no room made, before the stager knows of it.
                    if reported < window - 1:
                        report("deliver", window - 1)
                    grant = wait_for_room(order, num_granted, call, timeout_s, waits_for)
                    num_granted = grant.num_windows
                    if grant.missing_bytes:
                        _warn_of_full_store(grant.missing_bytes, order)
                scratch = objects.scratch()
                into = np.frombuffer(scratch.view, np.uint8)[:used_bytes]
                objects.put(window, window_parts(layout, window, into, filler, deferred), scratch)
                if time.monotonic() - reported_s > REPORT_S and window < last:
                    report("deliver", window)
            report("seal", last)
    except BaseException:
        drain(filler)
        # Why: until the rank says so, the room of its windows is given to nobody else.
        link.post("cancel", order.key, True)
        raise
    return layout.total_bytes


def wait_for_room(
    order: StageOrder,
    num_granted: int,
    call: Callable[..., Any],
    timeout_s: float,
    waits_for: Callable[[str], object] = lambda _: None,
) -> Grant:
    """Waits until a share has room for more windows.

    Args:
        order: The rank's share of the save.
        num_granted: Number of windows that have been granted.
        call: Calls a method of the stager.
        timeout_s: Longest wait, in seconds.
        waits_for: Receives a description of what the rank waits for, and an empty string at the
            end.

    Raises:
        NoRoomError: Saves of other sessions have had the room for `ROOM_OTHERS_S`.
        DeadlineError: There was none within `timeout_s`.
    """
    begun_s, is_logged = time.monotonic(), False
    try:
        while True:
            grant: Grant = call("more", order.key, num_granted, min(bounds.ROOM_LOOK_S, timeout_s))
            waited_s = time.monotonic() - begun_s
            if grant.num_windows > num_granted:
                return grant
            text = "; ".join(map(str, grant.holders)) or "another stager that does not answer"
            waits_for(f"room for staged bytes: {text}")
            own = order.key.save.session
            # Why not of its own session: it may as well wait for the storage as go on filling it.
            if waited_s >= bounds.ROOM_OTHERS_S and all(
                one.session != own for one in grant.holders
            ):
                raise NoRoomError(f"the room for staged bytes on this node is taken by {text}")
            if waited_s >= timeout_s:
                raise DeadlineError(
                    f"Expected room for staged bytes within {timeout_s:g} s, but it is taken by "
                    f"{text}. Look whether that storage answers, or raise write_timeout_s",
                    rank=order.key.rank,
                )
            if waited_s >= bounds.LONG_WAIT_S and not is_logged:
                is_logged = True
                logger.warning(
                    "Rank %d has waited %.0f s to stage its save to %s, for room that is taken by "
                    "%s; it fails after %g s",
                    order.key.rank,
                    waited_s,
                    order.target.url,
                    text,
                    timeout_s,
                )
    finally:
        waits_for("")


def _warn_of_full_store(missing_bytes: int, order: StageOrder) -> None:
    logger.warning(
        "What the ranks of this node save to %s is %s larger than what staged bytes may take "
        "of its object store: windows follow each other, and training waits for the storage. "
        "Start Ray with an --object-store-memory that is %s larger, on a /dev/shm that has as "
        "much, and raise StagerOptions(limit_bytes=...) where that is set",
        order.target.url,
        size_text(missing_bytes),
        size_text(int(missing_bytes / SHARE_OF_STORE)),
    )


class _WindowObjects:
    """Puts windows into the object store, as many at a time as threads copy.

    None is being put any more when the context ends.

    Nothing is under way any more when the context ends.

    Args:
        link: Link to the stager, through which objects are put.
        window_bytes: Length of the longest window, in bytes.
        pin: Registers memory with the device that some of the bytes come from.
    """

    def __init__(self, link: ActorLink, window_bytes: int, pin: Pin | None) -> None:
        self._link = link
        self._window_bytes = window_bytes
        self._pin = pin
        self._refs: dict[int, Any] = {}
        self._leases: list[Lease] = []
        self._free: list[Lease] = []
        self._begun: deque[tuple[int, Future[Any], Lease]] = deque()

    def scratch(self) -> Lease:
        """Returns memory for the next window; waits until it is free."""
        if len(self._begun) >= copying_threads():
            self._finish_first()
        if self._free:
            return self._free.pop()
        # Its pages take memory only where bytes are copied to.
        try:
            lease = _scratch.lease(self._window_bytes)
        except MemoryError as error:
            raise NoRoomError(str(error)) from error
        self._leases.append(lease)
        for piece in range(-(-self._window_bytes // PIECE_BYTES)):
            lease.pin(self._pin, piece)
        return lease

    def put(self, window: int, parts: list[np.ndarray], scratch: Lease) -> None:
        """Starts to put a window.

        Args:
            window: Number of the window.
            parts: Bytes of the window, in order.
            scratch: Memory that contains some of the parts; it is free for the next window as soon
                as they are copied.
        """
        self._begun.append((window, begin(partial(self._link.put, parts), "put window"), scratch))

    def take(self, windows: Sequence[int]) -> dict[int, Any]:
        """Returns the references of windows, once they are there; nobody else keeps any.

        *Why*: a window counts in the node's budget until its last reference is gone.
        """
        while self._begun:
            self._finish_first()
        return {window: self._refs.pop(window) for window in windows}

    def _finish_first(self) -> None:
        window, future, scratch = self._begun[0]
        self._refs[window] = future.result()
        self._begun.popleft()
        self._free.append(scratch)

    def __enter__(self) -> _WindowObjects:
        return self

    def __exit__(self, *_: object) -> None:
        wait_all([future for _, future, _ in self._begun])
        for lease in self._leases:
            lease.release()


MOST_STAGERS = 3
"""How many stagers in a row may die while one state is handed over."""


class RankStaging:
    """One rank's registration at the stager of its node, which is started if there is none.

    Thread-safe.

    Calls may come from several threads.

    Args:
        name: Name of this rank, unique on its node.
        job: The job whose stager is used; see `ray_calls.job_of`.
        namespace: Ray namespace of the stager.
        lease_s: How long an unused stager stays, in seconds.
        options: How the node stages; the options of its first rank apply.

    Raises:
        ParticipantError: The stager does not start or answer.
    """

    def __init__(
        self,
        name: str,
        *,
        job: str = "",
        namespace: str = NAMESPACE,
        lease_s: float = bounds.ACTOR_LEASE_S,
        options: StagerOptions | None = None,
    ) -> None:
        self.name = name
        self._process = f"{os.getpid()}-{secrets.token_hex(6)}"
        node_id = ray.get_runtime_context().get_node_id()
        self._stager: Callable[[], Any] = lambda: stager_of(
            node_id, job=job, namespace=namespace, lease_s=lease_s, options=options
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
            num_bytes: Size of the state, in bytes.
            touched: Called with the number of bytes of each window that was touched.
        """

        def touch() -> None:
            step_behind(19)
            # Suppressed: a first save is slower then, and raises what is wrong.
            with suppress(CheckpointError, StagerGone, NoRoomError, RayError):
                link = self.link()
                own_bytes = link.call("warm", self.name, num_bytes, timeout_s=bounds.WARM_S)
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
                    threading.Event().wait(bounds.LINGER_S)

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
        spent: Callable[[], Phases] = tuple,
        waits_for: Callable[[str], object] = lambda _: None,
        stop: Stop | None = None,
    ) -> Staged:
        """Hands all bytes to the stager; when it returns, the state may change.

        Writing begins meanwhile. A state larger than the node's budget goes through in windows: the
        call returns later then. A stager that dies meanwhile is replaced.

        Args:
            key: Key of this rank's share of the attempt.
            plan: The files and items to write.
            captured: The captured items, with the sources of their bytes.
            target: Location of the checkpoint.
            options: Options of the save; `write_timeout_s` bounds each wait for room.
            published: See `ray_dcp.io.writer.write_pieces`.
            reporter: Handle of the actor that receives the report of each file; see `Stager.begin`.
            spent: Returns the phases of the rank until now.
            waits_for: See `wait_for_room`.
            stop: Ends the staging early, with its error. Ranks that share a file wait for each
                other.

        Raises:
            NoRoomError: The node's memory has no room; nothing stays at the stager.
            LimitError: The node's budget is too small for one window.
            ParticipantError: No stager stays alive.
            CheckpointError: It was cancelled, or `captured` failed.
        """
        filler = filler_of(captured.source)
        deferred, lengths = deferred_items(plan, captured.deferred)
        longest = LONGEST_DEVICE_WINDOW if filler.pin is not None else sys.maxsize
        for _ in range(MOST_STAGERS):
            link = self.link()
            window_bytes = min(link.window_bytes, longest)
            order = StageOrder(
                key,
                self._process,
                plan,
                lengths,
                target,
                options,
                window_bytes,
                dict(published),
                spent(),
            )
            try:
                num_bytes = transfer(
                    link,
                    order,
                    reporter,
                    filler,
                    deferred.__getitem__,
                    variables=ray_calls.storage_variables(),
                    waits_for=waits_for,
                    timeout_s=options.write_timeout_s,
                    stop=stop,
                )
            except StagerGone:
                # This rank has the state still. What that one has written has the same bytes.
                self.replace(link)
                continue
            return Staged(link, order, num_bytes)
        raise ParticipantError(
            f"expected a stager to stay alive on this node, but {MOST_STAGERS} died one after the "
            f"other while rank {key.rank} staged; look into their logs",
            rank=key.rank,
        )

    def info(self) -> dict[str, Any]:
        """Returns the stager's description of itself."""
        link = self.link()
        try:
            found: dict[str, Any] = link.call("info", timeout_s=bounds.STAGER_ANSWER_S)
        except StagerGone:
            link = self.replace(link)
            found = link.call("info", timeout_s=bounds.STAGER_ANSWER_S)
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
                self._link = self._connect()
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
                self._link = self._connect(dead.stager)
            return self._link

    def _connect(self, not_this: str | None = None) -> ActorLink:
        """Registers this rank at a stager and returns the link to it.

        Args:
            not_this: Handle of a stager that is dead; its name may still be found for a moment.

        Raises:
            ParticipantError: It does not come or answer.
        """
        begin_s, is_logged = time.monotonic(), False
        end_s = begin_s + bounds.STAGER_START_S

        def log_slow_start(_: bool) -> None:
            nonlocal is_logged
            waited_s = time.monotonic() - begin_s
            if waited_s > bounds.LONG_WAIT_S and not is_logged:
                is_logged = True
                logger.warning(
                    "Rank %s has waited %.0f s for a stager to start and answer; it fails after %g "
                    "s. Look whether that node has CPU and memory for one more process",
                    self.name,
                    waited_s,
                    bounds.STAGER_START_S,
                )

        while True:
            handle = self._stager()
            try:
                place: StagingAddress = call_actor(
                    "the node's stager",
                    lambda fresh: self._stager() if fresh else handle,  # noqa: B023 - called at once
                    lambda actor: actor.place.remote(),
                    CallBound(max(end_s - time.monotonic(), 1.0), log_slow_start),
                )
                if place.stager != not_this:
                    break
            except ParticipantError:
                if time.monotonic() >= end_s:
                    raise
            if time.monotonic() >= end_s:
                raise ParticipantError(
                    f"expected another stager than {not_this}, which is dead, within "
                    f"{bounds.STAGER_START_S:g} s; look whether its node is overloaded, and save "
                    f"again"
                )
            threading.Event().wait(0.1)
        pid, pidfd = None, -1
        if place.pid_namespace and place.pid_namespace == pid_namespace():
            pid = os.getpid()
            # Suppressed: it has ended, or this system can't; calls find that out.
            with suppress(AttributeError, OSError):
                pidfd = os.pidfd_open(place.pid)
        link = ActorLink(handle, place, pidfd)
        caller = ray_calls.this_caller(os.getpid())
        variables = ray_calls.storage_variables()
        who = (self.name, self._process, caller, pid)
        link.call("enter", *who, variables, timeout_s=bounds.STAGER_START_S)
        return link


class Staged:
    """Bytes that a stager has received.

    Attributes:
        key: What the stager knows them by.
        num_bytes: How many.
        stager: Name of that stager, different for each process that ever was one.
    """

    def __init__(self, link: ActorLink, order: StageOrder, num_bytes: int) -> None:
        self.key = order.key
        self.num_bytes = num_bytes
        self.stager = link.stager
        self._link = link

    def progress(self) -> StageProgress | None:
        """Returns the progress of the stager; None if it is dead or does not know the key."""
        try:
            found: StageProgress | None = self._link.call(
                "progress", self.key, timeout_s=bounds.STAGER_ANSWER_S
            )
        except (StagerGone, CheckpointError):
            return None
        return found

    def release(self, *, committed: bool = False) -> None:
        """Reports that the outcome is known: neither the reports nor the bytes are needed any more.

        Args:
            committed: Whether the save was committed; the bytes that are to be kept in memory then
                stay.
        """
        self._link.post("release", self.key, committed)
