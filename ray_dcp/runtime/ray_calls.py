"""Ray's calls as they are for a process that is connected: none of them starts a Ray.

*Why*: Ray's public ones start a new cluster in a process that has none. A thread that follows a
save would do so when another thread shuts Ray down between its look and its call, and then wait
for ever for an answer that the new cluster can't have. These raise `RaySystemError` instead.

What asks the control store would wait for ever, too, where that has died. Where it is that of a Ray
of our own, `unless_lost` ends the wait.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import ParamSpec, TypeVar

import ray

from ray_dcp.errors import ParticipantError
from ray_dcp.runtime import own_ray

__all__ = ["get", "get_actor", "kill", "nodes", "put", "wait"]

LOOK_S = 0.5
"""How often a call that waits looks whether its Ray is lost, in seconds."""

MOST_S = 60.0
"""How long the control store of a Ray of our own may take to answer, in seconds."""

P = ParamSpec("P")
T = TypeVar("T")


def unless_lost(call: Callable[P, T]) -> Callable[P, T]:
    """Makes a call raise `ParticipantError` once the Ray of our own that it waits for is lost.

    Nothing changes for a process that is in another Ray, or in none.

    Args:
        call: May wait for ever. Runs in a thread of its own, which is left then.
    """

    @functools.wraps(call)
    def watched(*args: P.args, **kwargs: P.kwargs) -> T:
        own = own_ray.joined()
        if own is None:
            return call(*args, **kwargs)
        own.check()
        answer: futures.Future[T] = futures.Future()

        def run() -> None:
            try:
                answer.set_result(call(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - raised where the answer is awaited
                answer.set_exception(error)

        threading.Thread(target=run, name="ray_dcp asks Ray", daemon=True).start()
        end_s = time.monotonic() + MOST_S
        while time.monotonic() < end_s:
            futures.wait([answer], LOOK_S)
            if answer.done():
                return answer.result()
            own.check()
        raise ParticipantError(
            f"Expected the Ray that this job started for itself at {own.address} to answer within "
            f"{MOST_S:g} s, but it did not. Look whether its processes are frozen, then call again"
        )

    return watched


# Ray wraps each of them, by functools.wraps, in what starts a cluster.
get = inspect.unwrap(ray.get)
get_actor = unless_lost(inspect.unwrap(ray.get_actor))
kill = unless_lost(inspect.unwrap(ray.kill))
nodes = unless_lost(inspect.unwrap(ray.nodes))
put = unless_lost(inspect.unwrap(ray.put))
wait = inspect.unwrap(ray.wait)
