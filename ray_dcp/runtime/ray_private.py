"""The only module that uses private parts of Ray: its key-value store, tables and settings.

Checked with the Ray versions of `TESTED`. If a private name is missing, the error names it and the
Ray to install; the rest of the runtime does not depend on Ray's internals.
"""

from __future__ import annotations

import functools
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar

import ray
from ray.exceptions import RaySystemError

from ray_dcp.errors import InternalError
from ray_dcp.runtime import ray_calls

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


def _private(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
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
@_private("calls that start no cluster")
def _ask_before_init() -> None:
    from ray._private import auto_init_hook

    init = auto_init_hook.auto_init_ray

    def init_unless_asked_not_to() -> None:
        if not _asked.now:
            init()

    auto_init_hook.auto_init_ray = init_unless_asked_not_to


CALLS_END_S = 10.0
"""Longest time that `ray.shutdown` waits until no thread is in `ray_calls`, in seconds. Only a call
that Ray itself delays needs so long, for a large value or a control store that hangs."""


@functools.cache
@_private("a shutdown that waits for calls")
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
        disconnect(*arguments, **options)
        mine = worker.global_worker
        if mine.mode == driver and hasattr(mine, "core_worker"):
            mine.core_worker = _EndedCoreWorker(mine.core_worker)
            ray_calls.wait_until_left(CALLS_END_S)

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


@_private("the internal key-value store")
def _control_store(what: str, *arguments: Any) -> Any:
    """Returns the result of a call of Ray's internal key-value store, in ray_dcp's namespace."""
    from ray.experimental import internal_kv

    call = getattr(internal_kv, f"_internal_kv_{what}")
    return call(*arguments, namespace=_KV_NAMESPACE)


def next_epoch(name: str) -> int:
    """Returns 1 more than the last call for this name in this cluster returned.

    The number lives in Ray's control store, and survives the calling process. Only one process may
    call it for a name at a time (the actor of that name).
    """
    epoch = int(recall(f"epoch:{name}") or 0) + 1
    remember(f"epoch:{name}", str(epoch))
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


def this_connection() -> tuple[str, str] | None:
    """Returns the identity of this process's connection to a Ray; None without one."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    # Suppressed: another thread shuts it down meanwhile.
    with suppress(RuntimeError, AttributeError, RaySystemError), ray_calls.inside():
        return context.get_node_id(), context.get_job_id()
    return None


@dataclass(frozen=True)
class Life:
    """An actor in Ray's tables."""

    num_restarts: int = -1
    """Number of restarts; -1 if the actor is dead for good, or unknown. Increases within
    milliseconds after its process has ended, long before the next one answers."""
    is_running: bool = False
    """Whether its process runs, and is not just being started."""


@_private("the table of actors")
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


@_private("the id of an actor")
def id_of(actor: Any) -> str:
    """Returns the hex id of an actor, by its handle."""
    return str(actor._actor_id.hex())


@_private("the tables of jobs and actors")
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
    if "ray.train" not in sys.modules or ray.get_runtime_context().get_actor_id() is None:
        return None
    from ray.train import get_context

    try:
        context = get_context()
        return context.get_world_rank(), context.get_world_size(), context.get_experiment_name()
    except (RuntimeError, AttributeError, NotImplementedError):
        return None


def store_bytes(node_id: str) -> float:
    """Returns the size of a node's object store, in bytes.

    Args:
        node_id: Ray's hex id of the node.
    """
    for node in ray_calls.nodes():
        if node["NodeID"] == node_id:
            return float(node["Resources"].get("object_store_memory", 0))
    raise InternalError(f"Expected node {node_id} among Ray's nodes, but it is not there")
