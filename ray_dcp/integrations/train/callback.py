"""`SaveBeforeResize`: has the run saved before its workers are ended, from Ray Train's controller.

Ray Train ends workers within milliseconds once it has decided to resize, and does not notify the
training function. It calls the controller's callbacks before, and they may take their time. They
are a developers' interface of Ray (`ray_private.TESTED`): all use of it is here.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

from ray_dcp.core.checks import check_above_0
from ray_dcp.integrations.train import save_requests
from ray_dcp.integrations.train.save_requests import Call, next_round_s
from ray_dcp.runtime import ray_calls

ANSWER_S = 20.0
"""How long a worker may take to answer, in seconds: it may be starting to load a large module."""
END_S = 30.0
"""How long workers wait for their end after the save, in seconds."""

logger = logging.getLogger(__name__)


class SaveBeforeResize(ControllerCallback, WorkerGroupCallback):
    """Has a `ray_dcp.train.checkpointer` save before a resize, and when a node is taken away.

    Given as `RunConfig(callbacks=[ray_dcp.train.SaveBeforeResize()])`, or to all runs by
    `RAY_TRAIN_CALLBACKS=ray_dcp.train.SaveBeforeResize`.

    Before a resize all ranks save the next step that none of them has begun to decide about, and
    wait there: nothing is trained that would be lost. The resize goes on once that is committed,
    or after `limit_s`. When nodes are drained, all ranks save at once, and again as late as a save
    still fits before the deadline, as earlier ones tell. Training goes on in between; after the
    last one the ranks wait for their end, as what they would train is lost.

    Args:
        limit_s: How long a resize waits for the save, in seconds. A step must fit into it, and a
            save.

    Raises:
        InvalidRequestError: `limit_s` is no number above 0.
    """

    def __init__(self, limit_s: float = 120.0) -> None:
        self._limit_s = check_above_0(limit_s, "limit_s")
        self._group: Any = None
        self._known: Any = None
        self._has_failed = False
        # Why one for a group: callbacks travel to the controller, which a lock can't.
        self._asking: Any = None

    # Ray Train calls

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Notes whom to ask."""
        self._asking = threading.Lock()
        self._group = worker_group
        self._known = None

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Forgets them."""
        self._group = None

    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        """Notes that what comes next is no resize but a restart."""
        self._has_failed = True

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        """Has a save made before the workers end."""
        group, has_failed = self._group, self._has_failed
        self._has_failed = False
        if group is None or has_failed:
            return  # The first start, or one after a failure: there is nobody to ask.
        self._guarded(
            f"the resize to {getattr(resize_decision, 'num_workers', '?')} workers",
            lambda: self._save_before_the_end(_caller(group)),
        )

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Has saves made when nodes are taken away."""
        info = getattr(current_state, "preemption_info", None)
        group = self._group
        if info is None or group is None or info == self._known:
            return
        self._known = info
        # Why a thread: the controller must go on looking at its workers.
        threading.Thread(
            target=self._guarded,
            args=("a preemption", lambda: self._save_in_time(group, info)),
            name="ray_dcp preemption",
            daemon=True,
        ).start()

    # What it does then

    def _save_before_the_end(self, call: Call) -> None:
        how, took_s = self._save(call, "resize", linger_s=self._limit_s + END_S)
        if how == "committed":
            logger.info("Saved before the resize, in %.1f s", took_s)
        elif took_s is not None:
            logger.warning(
                "The save before the resize is %s after %.1f s; what was trained since the last "
                "one may be redone. Raise SaveBeforeResize(limit_s=%g) if steps or saves take that "
                "long",
                "not committed" if how != "failed" else "failed",
                took_s,
                self._limit_s,
            )

    def _save(
        self, call: Call, reason: str, *, left_s: float | None = None, **more: Any
    ) -> tuple[str, float | None]:
        """Asks for a save and waits for it; returns how it ended and after how many seconds."""
        seq, begun_s = secrets.token_hex(8), time.monotonic()
        why_not = save_requests.ask_all(call, seq, reason, left_s=left_s, **more)
        if why_not is not None:
            logger.warning("No save before a %s: %s", reason, why_not)
            return why_not, None
        how = save_requests.follow(call, seq, self._limit_s if left_s is None else left_s)
        return how, time.monotonic() - begun_s

    def _save_in_time(self, group: Any, info: Any) -> None:
        """Saves at once, and as late as possible once more."""
        call = _caller(group)
        deadline_s = None if info.deadline_ms is None else info.deadline_ms / 1000
        took_s: float | None = None
        while True:
            # Why one at a time: of two nodes that are drained, the second comes with a new notice.
            with self._asking:
                if self._group is not group or self._known != info:
                    return
                took_s = self._save_once(call, info, deadline_s, took_s)
            wait_s = next_round_s(time.time(), deadline_s, took_s)
            if wait_s is None:
                return
            threading.Event().wait(wait_s)

    def _save_once(
        self, call: Call, info: Any, deadline_s: float | None, took_s: float | None
    ) -> float | None:
        """Returns how long the save took that was asked for; None when none was."""
        left_s = None if deadline_s is None else deadline_s - time.time()
        linger_s = 0.0 if left_s is None else max(0.0, left_s) + END_S
        how, took_s = self._save(
            call, "preemption", left_s=left_s, took_s=took_s, linger_s=linger_s
        )
        if took_s is not None:
            logger.warning(
                "Preemption of %s: a save was asked for, and is %s after %.1f s",
                sorted(info.preempted_node_to_ranks),
                how,
                took_s,
            )
        return took_s

    def _guarded(self, what: str, do: Callable[[], object]) -> None:
        """Does something; what fails is told and does not end the run."""
        try:
            do()
        except Exception as error:  # noqa: BLE001 - a raising hook fails the run
            logger.warning(
                "No save before %s, as workers could not be asked: %s: %s",
                what,
                type(error).__name__,
                error,
            )


def _caller(group: Any) -> Call:
    """Returns what calls the workers of a group of Ray Train's, on their actors' main threads."""

    def call(method: str, *arguments: Any) -> list[Any]:
        refs = group.execute_async(save_requests.of_this_worker, method, *arguments)
        found: list[Any] = ray_calls.get(refs, timeout=ANSWER_S)
        return found

    return call
