"""Ray's calls for a process that is connected: none starts a Ray, or outlasts one.

*Why*: Ray's public calls start a new cluster in a process that has none. A thread that follows a
save would do so if another thread shut Ray down between its check and its call, and then wait for
ever for an answer that the new cluster can't have. These functions raise `RaySystemError` instead.

*Why* the threads inside are counted: Ray ends the whole process, by `_exit(1)`, if a thread is in
its core worker while `ray.shutdown` takes that down. Therefore `ray.shutdown` waits until no thread
of this package is inside (`survive_shutdown`), and none waits inside for longer than `SLICE_S`.

`call_actor` calls an actor: it waits, retries, and turns Ray's errors into errors of ray_dcp.

This is the only module that uses private parts of Ray: its key-value store, tables and settings.
Checked with the Ray versions of `TESTED`. If a private name is missing, the error names it and the
Ray to install; no other module depends on Ray's internals.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import json
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
)

from ray_dcp.core import bounds
from ray_dcp.core.wire_error import from_wire
from ray_dcp.errors import CheckpointError, DeadlineError, InternalError, ParticipantError
from ray_dcp.session.call_bound import LOOK_S, CallBound
from ray_dcp.stage.node_memory import ObjectStoreFile
from ray_dcp.store.environment import StorageVariables, is_of_storages

logger = logging.getLogger(__name__)

# Ray wraps each of them, by functools.wraps, in what starts a cluster.
_cancel = inspect.unwrap(ray.cancel)
_get = inspect.unwrap(ray.get)
_get_actor = inspect.unwrap(ray.get_actor)
_kill = inspect.unwrap(ray.kill)
_nodes = inspect.unwrap(ray.nodes)
_put = inspect.unwrap(ray.put)
_wait = inspect.unwrap(ray.wait)

_changed = threading.Condition()
_threads: Counter[threading.Thread] = Counter()
"""The threads that are inside, and how often. Changed under `_changed`."""


def _begin_anew() -> None:
    """Resets a forked child, in which the threads do not exist."""
    global _changed
    _changed = threading.Condition()
    _threads.clear()


os.register_at_fork(after_in_child=_begin_anew)


@contextmanager
def inside() -> Iterator[None]:
    """Makes `ray.shutdown` wait until this thread leaves the context.

    *Careful*: not around `wait` or `get`, which would not leave it between their slices.
    """
    me = threading.current_thread()
    with _changed:
        _threads[me] += 1
    try:
        yield
    finally:
        with _changed:
            _threads[me] -= 1
            if not _threads[me]:
                del _threads[me]
                _changed.notify_all()


def wait_until_left(timeout_s: float) -> bool:
    """Waits until no other thread is inside; returns False if the time passes before.

    *Why* no other: a signal handler may shut Ray down while its own thread waits for an answer.
    """
    me = threading.current_thread()
    with _changed:
        return _changed.wait_for(lambda: not _threads.keys() - {me}, timeout_s)


def get(refs: Any, timeout: float | None = None) -> Any:
    """Does the same as `ray.get`."""
    end_s = _end_s(timeout)
    several = [refs] if isinstance(refs, ray.ObjectRef) else list(dict.fromkeys(refs))
    if several:
        wait(several, num_returns=len(several), timeout=timeout)
    # *Careful*: not in slices. Each one that is over would have Ray throw away what has come of a
    # large value from another node.
    left_s = None if timeout is None else max(0.0, end_s - time.monotonic())
    with inside():
        return _get(refs, timeout=left_s)


def wait(
    refs: Sequence[Any], *, num_returns: int = 1, timeout: float | None = None
) -> tuple[list[Any], list[Any]]:
    """Does the same as `ray.wait`; a value counts as soon as it is on any node."""
    end_s = _end_s(timeout)
    while True:
        left_s = max(0.0, end_s - time.monotonic())
        with inside():
            done, others = _wait(
                refs,
                num_returns=num_returns,
                timeout=min(left_s, bounds.SLICE_S),
                fetch_local=False,
            )
        if len(done) >= num_returns or left_s <= bounds.SLICE_S:
            return done, others


def _end_s(timeout: float | None) -> float:
    return float("inf") if timeout is None else time.monotonic() + timeout


def put(value: Any, num_bytes: int) -> Any:
    """Does the same as `ray.put`, once the node's memory has room for the object.

    Args:
        value: The object.
        num_bytes: How many it takes of the object store.

    Raises:
        NoRoomError: There is no room; to put it all the same might end this process.
    """
    with _store_file(this_connection()).room(num_bytes), inside():
        return _put(value)


@functools.lru_cache(maxsize=1)
def _store_file(connection: tuple[str, str] | None) -> ObjectStoreFile:
    """Returns the file of the object store that a connection of this process uses."""
    for node in nodes() if connection is not None else ():
        if connection is not None and node["NodeID"] == connection[0]:
            return ObjectStoreFile.of_store(node["ObjectStoreSocketName"])
    return ObjectStoreFile(None)


def get_actor(name: str, namespace: str | None = None) -> Any:
    """Does the same as `ray.get_actor`; an actor that is ending is none.

    *Why*: Ray deletes the classes of a job that has ended with the last of its detached actors, and
    fails by an assertion, for want of the class, until the name of that actor is free.

    Raises:
        ValueError: There is no actor of that name.
    """
    try:
        with inside():
            return _get_actor(name, namespace)
    except AssertionError as error:
        raise ValueError(f"the actor {name!r} is ending, as its class is gone: {error}") from error


def named_actor(actor_class: Any, *arguments: Any) -> Any:
    """Returns the handle of a detached actor, and creates the actor if there is none.

    One that is ending is waited for; see `get_actor`.

    Args:
        actor_class: The remote class, with options that have `name` and `get_if_exists`.
        *arguments: Of the class.
    """
    end_s = time.monotonic() + bounds.NAME_FREE_S
    while True:
        try:
            return actor_class.remote(*arguments)
        except AssertionError:
            if time.monotonic() > end_s:
                raise
        time.sleep(_PAUSE_S[0])


def cancel(task: Any) -> None:
    """Ends a task, and the process that runs it. Does nothing to one that is done.

    Args:
        task: The reference of its result.
    """
    with inside():
        _cancel(task, force=True)


def kill(actor: Any, *, no_restart: bool = True) -> None:
    """Does the same as `ray.kill`."""
    with inside():
        _kill(actor, no_restart=no_restart)


def run_for_ever(
    work: Coroutine[Any, Any, None], actor: Any, *, no_restart: bool
) -> asyncio.Task[None]:
    """Runs an endless task of an actor; the actor ends if the task does.

    *Why*: an actor that continues without its watch looks healthy, and misses what the watch would
    have detected. Its users notice its death at once.

    Args:
        work: A coroutine that does not return.
        actor: Handle of the actor itself.
        no_restart: Whether the actor stays dead.

    Returns:
        The task; the caller keeps it, as the event loop does not.
    """

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            logger.critical(
                "A watch of this actor ended early, and so the actor ends. Please report this",
                exc_info=task.exception(),
            )
            kill(actor, no_restart=no_restart)

    task = asyncio.ensure_future(work)
    task.add_done_callback(ended)
    return task


def nodes() -> list[dict[str, Any]]:
    """Does the same as `ray.nodes`."""
    with inside():
        found: list[dict[str, Any]] = _nodes()
        return found


def is_ref(value: object) -> bool:
    """Returns whether a value is the reference of an object of Ray's store."""
    return isinstance(value, ray.ObjectRef)


def nodes_with(ref: Any) -> list[str]:
    """Returns the hex ids of the nodes that have an object; none if it is small, and has no place.

    Args:
        ref: Reference of a value that is there.
    """
    with inside():
        found: list[str] = ray.experimental.get_object_locations([ref])[ref]["node_ids"]
        return found


TESTED = ("2.56", "2.60")
"""Ray versions with which this module was tested."""

_KV_NAMESPACE = "ray_dcp"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Caller:
    """A rank's process for Ray, by which Ray later reports whether it lives."""

    kind: Literal["actor", "job"]
    id: str
    """Hex id of the rank's actor, or of the job whose driver it is."""
    pid: int
    node: str = ""
    """Name of its machine, for messages."""

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.node}" if self.node else f"pid {self.pid}"


def _needs(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a function raise an error that names the Ray to install, if a name is missing."""

    def checked(use: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(use)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return use(*args, **kwargs)
            except (ImportError, AttributeError, TypeError, AssertionError) as error:
                raise InternalError(
                    f"Expected a Ray in which {what} works ({', '.join(TESTED)}.x was tested), but "
                    f"Ray {ray.__version__} says {type(error).__name__}: {error}. Install a tested "
                    f"Ray, or report this"
                ) from error

        return call

    return checked


class _Asked(threading.local):
    """Whether calls of Ray in this thread must not start a cluster."""

    now = False


_asked = _Asked()


@contextmanager
def starting_no_ray() -> Iterator[None]:
    """Makes `remote` raise `RaySystemError` in this thread while the process has no Ray.

    *Why*: Ray's own function would join the newest cluster of the machine, or start one. A thread
    that follows a save would do so if another thread shut Ray down between its check and its call,
    and then wait for an answer that no other cluster can give.
    """
    _ask_before_init()
    before, _asked.now = _asked.now, True
    try:
        yield
    finally:
        _asked.now = before


@functools.cache
@_needs("calls that start no cluster")
def _ask_before_init() -> None:
    from ray._private import auto_init_hook

    init = auto_init_hook.auto_init_ray

    def init_unless_asked_not_to() -> None:
        if not _asked.now:
            init()

    auto_init_hook.auto_init_ray = init_unless_asked_not_to


before_shutdown: dict[str, Callable[[], object]] = {}
"""What a driver calls before it disconnects from Ray, by name. *Why*: the cluster that it started
ends with it, and with that what the stagers hold."""


@functools.cache
@_needs("a shutdown that waits for calls")
def survive_shutdown() -> None:
    """Prevents `ray.shutdown`, and Ray's own at exit, from ending a process whose threads use Ray.

    Problem: (1) a thread waits for an answer, for example while it follows a save; (2) another one
    calls `ray.shutdown`, which wakes it; (3) it drops its references, or calls again; (4) Ray finds
    its core worker gone and ends the process, by `_exit(1)`.

    Design: between Ray's mark that it is disconnected and the end of its core worker, that one is
    replaced by one that refuses calls, which Ray's references accept silently, and the threads
    inside are waited for. This holds for threads of the user as well, unless they wait inside.

    Rejected: to replace `ray.shutdown`, which Ray has registered at exit, and others may have
    imported before.
    """
    from ray._private import worker

    disconnect, driver = worker.disconnect, worker.SCRIPT_MODE

    def disconnect_and_refuse(*arguments: Any, **options: Any) -> None:
        if worker.global_worker.mode == driver:
            while before_shutdown:
                _, wait_until_ended = before_shutdown.popitem()
                wait_until_ended()
        disconnect(*arguments, **options)
        mine = worker.global_worker
        if mine.mode == driver and hasattr(mine, "core_worker"):
            mine.core_worker = _EndedCoreWorker(mine.core_worker)
            wait_until_left(bounds.CALLS_END_S)

    worker.disconnect = disconnect_and_refuse


class _EndedCoreWorker:
    """Replaces Ray's core worker while that one ends.

    Args:
        core_worker: Ray's core worker.
    """

    def __init__(self, core_worker: Any) -> None:
        self._core_worker = core_worker

    def shutdown_driver(self) -> None:
        """Ends the core worker; `ray.shutdown` calls it next."""
        self._core_worker.shutdown_driver()

    def __getattr__(self, name: str) -> NoReturn:
        raise RaySystemError(f"Ray is being shut down in this process, and can't {name} any more")


@_needs("the internal key-value store")
def _control_store(what: str, *arguments: Any) -> Any:
    """Returns the result of a call of Ray's internal key-value store, in ray_dcp's namespace."""
    from ray.experimental import internal_kv

    call = getattr(internal_kv, f"_internal_kv_{what}")
    return call(*arguments, namespace=_KV_NAMESPACE)


def next_epoch(key: str) -> int:
    """Returns 1 more than the last call for this key in this cluster returned.

    The number lives in Ray's control store, and survives the calling process. Only one process may
    call it for a key at a time.
    """
    epoch = int(recall(key) or 0) + 1
    remember(key, str(epoch))
    return epoch


def remember(name: str, text: str) -> None:
    """Stores a text under a name, in this cluster; an empty text removes it."""
    if text:
        _control_store("put", name, text.encode(), True)
    else:
        _control_store("del", name)


def recall(name: str) -> str:
    """Returns the last text that `remember` stored under a name; empty if there is none."""
    return (_control_store("get", name) or b"").decode()


def names_from(prefix: str) -> list[str]:
    """Returns the stored names with a prefix."""
    found = _control_store("list", prefix)
    return [name.decode() if isinstance(name, bytes) else name for name in found]


def this_caller(pid: int) -> Caller:
    """Returns this process, as Ray identifies it."""
    context = ray.get_runtime_context()
    actor = context.get_actor_id()
    if actor is not None:
        return Caller("actor", actor, pid, platform.node())
    return Caller("job", context.get_job_id(), pid, platform.node())


def storage_variables() -> StorageVariables:
    """Returns what storages of this job read in the environment of this process.

    What the job's runtime environment has and this process has not, as a driver, counts too.
    """
    given = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    of_storages = {name: text for name, text in given.items() if is_of_storages(name)}
    return StorageVariables({**of_storages, **StorageVariables.of_this_process().values})


@_needs("the mode of a worker")
def _is_driver() -> bool:
    """Returns whether this process is a driver, and neither an actor nor runs tasks."""
    from ray._private import worker

    return bool(worker.global_worker.mode == worker.SCRIPT_MODE)


def job_of(session: str) -> str:
    """Returns a name of the job that this process works for, and of the environment that it has.

    Processes with the same name may write for each other: they are of one driver of Ray, or, where
    each rank is a driver of its own, of one session; and what storages depend on is the same. Keys
    are in it as a digest only.

    Args:
        session: Name of the session.
    """
    context = ray.get_runtime_context()
    whose = f"session {session}" if _is_driver() else f"job {context.get_job_id()}"
    # Why not all variables: frameworks give each rank some of its own, such as its number.
    others = {name: value for name, value in context.runtime_env.items() if name != "env_vars"}
    text = json.dumps([others, storage_variables().values], sort_keys=True, default=str)
    return f"{whose} {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def this_connection() -> tuple[str, str] | None:
    """Returns the identity of this process's connection to a Ray; None without one."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    # Suppressed: another thread shuts it down meanwhile.
    with suppress(RuntimeError, AttributeError, RaySystemError), inside():
        return context.get_node_id(), context.get_job_id()
    return None


@_needs("the mode of a worker")
def is_on_a_node() -> bool:
    """Returns whether this process is a driver or worker on a node, and has its object store.

    A client of `ray://` is elsewhere, and in local mode there is no store.
    """
    from ray._private import worker

    return worker.global_worker.mode in (worker.SCRIPT_MODE, worker.WORKER_MODE)


@dataclass(frozen=True)
class Life:
    """An actor in Ray's tables."""

    num_restarts: int = -1
    """Number of restarts; -1 if the actor is dead for good, or unknown. Increases within
    milliseconds after its process has ended, long before the next one answers."""
    is_running: bool = False
    """Whether its process runs, and is not just being started."""


@_needs("the table of actors")
def life_of(actor_id: str) -> Life:
    """Returns an actor's entry in Ray's tables. Blocks for about a millisecond.

    Args:
        actor_id: Hex id.
    """
    from ray._private import state

    entry = state.actors(actor_id=actor_id)
    if not entry or entry["State"] == "DEAD":
        return Life()
    return Life(entry["NumRestarts"], entry["State"] == "ALIVE")


@_needs("the id of an actor")
def id_of(actor: Any) -> str:
    """Returns the hex id of an actor, by its handle."""
    return str(actor._actor_id.hex())


@_needs("the tables of jobs and actors")
def gone(callers: Iterable[Caller]) -> set[Caller]:
    """Returns the callers whose process has ended.

    Blocks for about a millisecond for each. A caller that Ray does not know has not ended.
    """
    from ray._private import state

    asked = set(callers)
    dead_jobs: set[str] = set()
    if any(caller.kind == "job" for caller in asked):
        dead_jobs = {job["JobID"] for job in state.jobs() if job["IsDead"]}
    return {
        caller
        for caller in asked
        if (caller.id in dead_jobs if caller.kind == "job" else _actor_ended(state, caller))
    }


def _actor_ended(state: Any, caller: Caller) -> bool:
    entry = state.actors(actor_id=caller.id)
    if not entry:
        return False
    restarted = entry.get("Pid") not in (0, caller.pid)
    return entry["State"] in ("DEAD", "RESTARTING") or restarted


@contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Restores the handler of SIGTERM, which `ray.init` replaces, for the training script."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def train_ranks() -> tuple[int, int, str] | None:
    """Returns (rank, world size, experiment) in a Ray Train worker, and None elsewhere."""
    # Careful: asked in a process without Ray, `get_runtime_context` starts one.
    if "ray.train" not in sys.modules or not ray.is_initialized():
        return None
    if ray.get_runtime_context().get_actor_id() is None:
        return None
    from ray.train import get_context

    try:
        context = get_context()
        return context.get_world_rank(), context.get_world_size(), context.get_experiment_name()
    except (RuntimeError, AttributeError, NotImplementedError):
        return None


@_needs("the table of nodes that are drained")
def draining_nodes() -> dict[str, float]:
    """Returns when the nodes end that Ray drains with a deadline, in seconds since the epoch.

    By hex id; empty for a process without Ray. Blocks for about a millisecond.
    """
    from ray._private import state

    if this_connection() is None:
        return {}
    with inside():
        found: dict[str, int] = state.state.get_draining_nodes()
    # Why above 0: that stands for a node that is drained until it is idle.
    return {node: deadline_ms / 1000.0 for node, deadline_ms in found.items() if deadline_ms > 0}


def store_bytes(node_id: str) -> float:
    """Returns the size of a node's object store, in bytes.

    Args:
        node_id: Ray's hex id of the node.
    """
    for node in nodes():
        if node["NodeID"] == node_id:
            return float(node["Resources"].get("object_store_memory", 0))
    raise InternalError(f"Expected node {node_id} among Ray's nodes, but it is not there")


MOST_MADE = 20
"""Most times that an actor which died for good is created again for one call."""

_PAUSE_S = (0.05, 2.0)
"""The first and the longest pause before a call is repeated, in seconds."""


@starting_no_ray()
def call_actor(
    who: str,
    handle: Callable[[bool], Any],
    send: Callable[[Any], Any],
    bound: CallBound,
    *,
    rank: int | None = None,
) -> Any:
    """Returns an actor's answer; repeats the call if the actor died or was out of reach.

    The actor's methods must be idempotent, as a call whose answer was lost is repeated.

    Args:
        who: Description of the actor, for errors.
        handle: Returns the actor's handle; its argument requests a fresh one.
        send: Starts the call on a handle, and returns the reference of the answer.
        bound: When the call is given up; also checked after the actor was out of reach.
        rank: The calling rank, for errors.

    Raises:
        DeadlineError: No answer in time.
        ParticipantError: The actor died and can't be created again, or the cluster is gone.
        CheckpointError: The actor raised it, or `bound.given_up` returned it.
    """
    left_s = bound.begin()
    failed = fresh = is_logged = False
    num_made, pause_s = 0, _PAUSE_S[0]
    lost_s: float | None = None
    while True:
        begin_s = time.monotonic()
        try:
            actor = handle(fresh)
            check_ray(who, rank)
            answer = _send(send, actor, who, rank)
            _wait_for(answer, left_s, lambda: bound.given_up(failed), who, rank)  # noqa: B023
            return get(answer, timeout=max(0.0, left_s()))
        except GetTimeoutError:
            raise DeadlineError(
                f"Expected {who} to answer within {bound.timeout_s:g} s, but it did not. Look "
                f"whether its process is frozen or its node is gone, or raise the timeout",
                rank=rank,
            ) from None
        except RayTaskError as error:
            raise from_wire(error, who, rank) from None
        except (ActorUnavailableError, ActorDiedError) as error:
            # A dead actor is made again; one that restarts keeps its handle.
            fresh = isinstance(error, ActorDiedError)
            failed, num_made = True, num_made + fresh
            now_s = time.monotonic()
            if lost_s is None or now_s - begin_s > bounds.REACHED_S:
                lost_s, pause_s = now_s, _PAUSE_S[0]
            is_over = now_s >= lost_s + bounds.OUT_OF_REACH_S or left_s() <= 0
            if num_made >= MOST_MADE or is_over:
                raise _out_of_reach(error, who, rank) from error
            if now_s - lost_s > bounds.LONG_WAIT_S and not is_logged:
                is_logged = True
                logger.warning(
                    "No call has reached %s for %.0f s (Ray reports: %s); it fails after %g s",
                    who,
                    now_s - lost_s,
                    error,
                    bounds.OUT_OF_REACH_S,
                )
        except (RaySystemError, RayActorError, RayError, ConnectionError) as error:
            raise _out_of_reach(error, who, rank) from error
        _pause(min(pause_s, left_s()))
        pause_s = min(2 * pause_s, _PAUSE_S[1])


def check_ray(who: str, rank: int | None = None) -> None:
    """Raises `ParticipantError` if this process has shut its Ray down.

    *Why*: a call of Ray in a process without Ray starts a new cluster.

    Args:
        who: Description of the actor to call.
        rank: The calling rank, for errors.
    """
    if not ray.is_initialized():
        raise ParticipantError(
            f"Expected Ray to be up in this process to reach {who}, but it was shut down. Call "
            f"ray.shutdown() after the last save or load has ended; to go on, connect again",
            rank=rank,
        )


def _pause(seconds: float) -> None:
    threading.Event().wait(max(0.0, seconds))


def _send(send: Callable[[Any], Any], actor: Any, who: str, rank: int | None) -> Any:
    try:
        with inside():
            return send(actor)
    except Exception as error:
        # So does Ray call a handle that is of another cluster than the one it is connected to.
        if type(error) is Exception:
            raise _out_of_reach(error, who, rank) from error
        raise


def _wait_for(
    answer: Any,
    left_s: Callable[[], float],
    given_up: Callable[[], CheckpointError | None],
    who: str,
    rank: int | None,
) -> None:
    """Waits until there is an answer or the time has passed.

    Raises:
        ParticipantError: Ray was shut down meanwhile.
        CheckpointError: `given_up` returned it.
    """
    while True:
        check_ray(who, rank)
        reason = given_up()
        if reason is not None:
            raise reason
        wait_s = left_s()
        done, _ = wait([answer], timeout=max(0.0, min(wait_s, LOOK_S)))
        if done or wait_s <= 0:
            return


def _out_of_reach(error: Exception, who: str, rank: int | None) -> ParticipantError:
    return ParticipantError(
        f"Expected {who} to be reachable, but Ray says {type(error).__name__}: {error}. Look "
        f"whether the Ray cluster still runs, then restart the ranks",
        rank=rank,
    )
