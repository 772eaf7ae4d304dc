"""Ray's calls for a process that is connected: none starts a Ray, or outlasts one.

*Why*: Ray's public calls start a new cluster in a process that has none. A thread that follows a
save would do so if another thread shut Ray down between its check and its call, and then wait for
ever for an answer that the new cluster can't have. These functions raise `RaySystemError` instead.

*Why* the threads inside are counted: Ray ends the whole process, by `_exit(1)`, if a thread is in
its core worker while `ray.shutdown` takes that down. Therefore `ray.shutdown` waits until no thread
of this package is inside (`ray_private.survive_shutdown`), and none waits inside for longer than
`SLICE_S`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

__all__ = ["get", "get_actor", "inside", "kill", "nodes", "put", "wait", "wait_until_left"]

SLICE_S = 0.1
"""Longest time that a waiting thread stays inside Ray, in seconds; `ray.shutdown` may take so much
longer."""

logger = logging.getLogger(__name__)

# Ray wraps each of them, by functools.wraps, in what starts a cluster.
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
                refs, num_returns=num_returns, timeout=min(left_s, SLICE_S), fetch_local=False
            )
        if len(done) >= num_returns or left_s <= SLICE_S:
            return done, others


def _end_s(timeout: float | None) -> float:
    return float("inf") if timeout is None else time.monotonic() + timeout


def put(value: Any) -> Any:
    """Does the same as `ray.put`."""
    with inside():
        return _put(value)


def get_actor(name: str, namespace: str | None = None) -> Any:
    """Does the same as `ray.get_actor`."""
    with inside():
        return _get_actor(name, namespace)


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
