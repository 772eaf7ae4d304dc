"""The handle of a session's coordinator, which is made when there is none."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from ray_dcp.runtime import hooks, ray_calls
from ray_dcp.runtime.coordinator import Coordinator
from ray_dcp.runtime.naming import MOST_CALLS, NAMESPACE, check_lease, coordinator_name

__all__ = ["await_ready", "coordinator_of"]


def await_ready(coordinator: Any, timeout_s: float) -> None:
    """Waits until a coordinator has loaded what its first save needs, at most so many seconds."""
    # Suppressed: a first save is slower then, and tells what is wrong.
    with suppress(RayError):
        ray_calls.get(coordinator.ready.remote(), timeout=timeout_s)


@ray_calls.unless_lost
@hooks.starting_no_ray()
def coordinator_of(session: str, *, namespace: str = NAMESPACE, lease_s: float) -> Any:
    """Returns the handle of a session's coordinator, after making it if there is none.

    Ranks may call it at once: one of them makes the actor, all get it. It runs where there is
    room, preferably on the caller's node, and survives its creator.

    Args:
        session: Name of the session.
        namespace: Ray namespace to look in.
        lease_s: See `Coordinator`; counts when the actor is made.
    """
    name = coordinator_name(session)
    # Why no max_task_retries: Ray would also repeat the call in which the actor leaves.
    actor = ray.remote(Coordinator).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=MOST_CALLS,
        num_cpus=0,
        # Why said: a trial of Ray Tune has all that its processes start go into its placement
        # group, and Ray kills what is in there together with the trial.
        scheduling_strategy="DEFAULT",
    )
    return actor.remote(name, check_lease(lease_s), namespace)
