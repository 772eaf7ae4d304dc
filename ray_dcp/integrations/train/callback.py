"""`SaveBeforeResize`: saves a Ray Train run before the controller ends its workers.

After a decision to resize, Ray Train ends the workers within milliseconds, without notifying the
training function. Before that, it calls the controller's callbacks, which may block. They are a
developer API of Ray (`ray_private.TESTED`) that only this module uses.
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
from ray_dcp.core.processes import start_thread
from ray_dcp.integrations.train import save_requests
from ray_dcp.integrations.train.save_requests import Call, next_round_s
from ray_dcp.runtime import ray_calls

ANSWER_S = 20.0
"""How long a worker may take to answer, in seconds. *Why*: it may be importing a large module."""
END_S = 30.0
"""How long workers wait after the save to be ended, in seconds."""

logger = logging.getLogger(__name__)


class SaveBeforeResize(ControllerCallback, WorkerGroupCallback):
    """Makes a `ray_dcp.train.checkpointer` save before a resize, and when a node is preempted.

    Pass it as `RunConfig(callbacks=[ray_dcp.train.SaveBeforeResize()])`, or enable it for all runs
    by `RAY_TRAIN_CALLBACKS=ray_dcp.train.SaveBeforeResize`.

    Before a resize, all ranks save at the first step that no rank has started to decide, and wait
    there, so that no trained step is lost. The resize continues when the save is committed, or
    after `limit_s`.

    When nodes are drained, all ranks save at once, and once more as late as a save still fits
    before the deadline, judging by the duration of earlier saves. Training continues in between.
    After the last save the ranks wait to be ended, as further steps would be lost.

    Args:
        limit_s: How long a resize waits for the save, in seconds. It must be long enough for one
            step and one save.

    Raises:
        InvalidRequestError: `limit_s` is not a positive number.
    """

    def __init__(self, limit_s: float = 120.0) -> None:
        self._limit_s = check_above_0(limit_s, "limit_s")
        self._group: Any = None
        self._known: Any = None
        self._has_failed = False
        # Why created per group: callbacks are pickled for the controller, and a lock can't be.
        self._asking: Any = None

    # Callbacks of Ray Train

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Registers the worker group."""
        self._asking = threading.Lock()
        self._group = worker_group
        self._known = None

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Unregisters the worker group."""
        self._group = None

    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        """Records that the next decision is a restart, not a resize."""
        self._has_failed = True

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        """Requests a save and waits for it before the workers are ended."""
        group, has_failed = self._group, self._has_failed
        self._has_failed = False
        if group is None or has_failed:
            return  # The first start, or a start after a failure: there are no workers.
        self._guarded(
            f"the resize to {getattr(resize_decision, 'num_workers', '?')} workers",
            lambda: self._save_before_the_end(_caller(group)),
        )

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Requests saves when nodes are preempted."""
        info = getattr(current_state, "preemption_info", None)
        group = self._group
        if info is None or group is None or info == self._known:
            return
        self._known = info

        def save() -> None:
            self._guarded("a preemption", lambda: self._save_in_time(group, info))

        # Why a thread: the controller must continue to monitor its workers.
        self._guarded("a preemption", lambda: start_thread(save, "ray_dcp preemption"))

    # Reactions

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
        """Requests a save and waits for it; returns its outcome and its duration in seconds."""
        seq, begun_s = secrets.token_hex(8), time.monotonic()
        why_not = save_requests.ask_all(call, seq, reason, left_s=left_s, **more)
        if why_not is not None:
            logger.warning("No save before a %s: %s", reason, why_not)
            return why_not, None
        how = save_requests.follow(call, seq, self._limit_s if left_s is None else left_s)
        return how, time.monotonic() - begun_s

    def _save_in_time(self, group: Any, info: Any) -> None:
        """Saves at once, and again as late as possible."""
        call = _caller(group)
        deadline_s = None if info.deadline_ms is None else info.deadline_ms / 1000
        took_s: float | None = None
        while True:
            # Why one at a time: if two nodes are drained, the second causes a new notice.
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
        """Requests a save; returns its duration in seconds, or None if none was made."""
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
        """Calls `do`; an error is logged and does not end the run."""
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
    """Returns a `Call` to the workers of a Ray Train group, executed in their main threads."""

    def call(method: str, *arguments: Any) -> list[Any]:
        refs = group.execute_async(save_requests.of_this_worker, method, *arguments)
        found: list[Any] = ray_calls.get(refs, timeout=ANSWER_S)
        return found

    return call
