"""Ray's calls for a process that is connected: none starts a Ray, or outlasts one.

*Why*: Ray's public calls start a new cluster in a process that has none. A thread that follows a
save would do so when another thread shuts Ray down between its check and its call, and then wait
for ever for an answer that the new cluster can't have. These raise `RaySystemError` instead.

*Why* a count of the threads inside: Ray ends the whole process, by `_exit(1)`, when a thread is
in its core worker while `ray.shutdown` takes it down. So `ray.shutdown` waits until no thread of
this package is (`ray_private.survive_shutdown`), and none stays longer than `SLICE_S` to wait.
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
"""Seconds that a thread which waits for an answer stays inside Ray at most; so much longer may
`ray.shutdown` take."""

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
"""Which threads are inside, and how often. Changed under `_changed`."""


def _begin_anew() -> None:
    """Begins anew in a child that was forked: the threads are not here."""
    global _changed
    _changed = threading.Condition()
    _threads.clear()


os.register_at_fork(after_in_child=_begin_anew)


@contextmanager
def inside() -> Iterator[None]:
    """Makes `ray.shutdown` wait for what this thread does here.

    *Careful*: not around `wait` or `get`, which would come out no more between their slices.
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
    """Returns whether no thread but this one is inside, once that is so or time is over.

    *Why* not this one: a signal handler may shut Ray down while its thread waits for an answer.
    """
    me = threading.current_thread()
    with _changed:
        return _changed.wait_for(lambda: not _threads.keys() - {me}, timeout_s)


def get(refs: Any, timeout: float | None = None) -> Any:
    """Returns what `ray.get` does."""
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
    """Returns what `ray.wait` does; a value counts as soon as it is on any node."""
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
    """Returns what `ray.put` does."""
    with inside():
        return _put(value)


def get_actor(name: str, namespace: str | None = None) -> Any:
    """Returns what `ray.get_actor` does."""
    with inside():
        return _get_actor(name, namespace)


def kill(actor: Any, *, no_restart: bool = True) -> None:
    """Does what `ray.kill` does."""
    with inside():
        _kill(actor, no_restart=no_restart)


def run_for_ever(
    work: Coroutine[Any, Any, None], actor: Any, *, no_restart: bool
) -> asyncio.Task[None]:
    """Runs an endless task of an actor, which ends with it.

    *Why*: an actor that goes on without its watch looks healthy, and misses whatever that would
    have seen. Its users notice its death at once.

    Args:
        work: Does not return. Its event loop is the one that runs.
        actor: Handle of the actor itself.
        no_restart: Whether it stays dead.

    Returns:
        The task; whoever starts it keeps it, as the event loop does not.
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
    """Returns what `ray.nodes` does."""
    with inside():
        found: list[dict[str, Any]] = _nodes()
        return found
