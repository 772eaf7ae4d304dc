"""Save requests: saves that the controller requests, in addition to those of `save_interval`.

Ranks are at different steps when a request arrives, but must save the same step. A request
therefore has two phases:

    controller                     each rank
    hold(seq)  ------------------> blocks its next decision
               <------------------ last decided step, durations of recent saves
    ask(first step after the
        maximum of all)  --------> continues, and saves at that step
    state(seq) ------------------> waiting, saving, committed or failed

Without a request, ranks exchange nothing.

`SaveRequests` is a rank's side. The training thread calls it at every `save`. The actor's main
thread, on which Ray Train calls into a worker, delivers requests. `ask_all` and `follow` are the
controller's side; they access the ranks through a `Call`, without Ray. `next_round_s` and related
functions determine when a run on a preempted node is saved once more: as late as a save still fits.
They are pure.

`SaveBeforeResize` requests saves before the controller ends its workers. After a decision to
resize, Ray Train ends them within milliseconds, without notifying the training function. Before
that, it calls the controller's callbacks, which may block. They are a developer API of Ray
(`ray_calls.TESTED`) that only this module uses.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

from ray_dcp.core import bounds
from ray_dcp.core.processes import start_thread
from ray_dcp.core.quantities import seconds_text
from ray_dcp.options import check_above_0
from ray_dcp.session import ray_calls

logger = logging.getLogger(__name__)

State = Literal["unknown", "waiting", "saving", "committed", "failed"]


@dataclass(frozen=True)
class RequestedSave:
    """A requested save."""

    seq: str
    """Id of the request."""
    reason: str
    after_step: int
    """The save is made at the first step after this one."""
    linger_s: float = 0.0
    """How long to wait for the end of the worker group after the commit, in seconds, as further
    steps would be lost; 0 if the group does not end."""


@dataclass(frozen=True)
class HeldRank:
    """Answer of a held rank."""

    last_step: int
    """Last step for which the rank has decided whether to save; -1 if there is none."""
    stage_s: float | None
    """Maximum time that training waited for a recent save, in seconds."""
    commit_s: float | None
    """Maximum time from the start of a recent save to its commit, in seconds."""


class SaveRequests:
    """State shared by the two threads of a worker, for the newest checkpointer. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = False
        self._owner = 0
        self._last_step = -1
        self._seconds: tuple[float | None, float | None] = (None, None)
        self._held: tuple[str, float] | None = None
        self._asked: RequestedSave | None = None
        self._taken: str = ""
        self._ended: dict[str, bool] = {}

    # Called by the training thread

    def open(self) -> int:
        """Accepts requests for a new checkpointer; returns its owner number."""
        with self._changed:
            self._is_open = True
            self._owner += 1
            self._last_step = -1
            self._held = self._asked = None
            self._taken = ""
            self._ended = {}
            return self._owner

    def close(self, owner: int) -> None:
        """Stops accepting requests, unless there is a newer owner."""
        with self._changed:
            if owner != self._owner:
                return
            self._is_open = False
            self._held = self._asked = None
            self._changed.notify_all()

    def at(self, step: int, owner: int) -> RequestedSave | None:
        """Returns the request for a step, or None; waits while this rank is held.

        Args:
            step: The step to decide.
            owner: Owner number of the checkpointer.
        """
        with self._changed:
            if owner != self._owner:
                return None
            while self._held is not None:
                left_s = self._held[1] - time.monotonic()
                if left_s <= 0:
                    self._held = None
                    break
                self._changed.wait(left_s)
            self._last_step = max(step, self._last_step)
            asked = self._asked
            if asked is None or step <= asked.after_step:
                return None
            self._asked = None
            self._taken = asked.seq
            return asked

    def went_back(self, step: int, owner: int) -> None:
        """Resets the last decided step after a restore.

        Args:
            step: The restored step.
            owner: Owner number of the checkpointer.
        """
        with self._changed:
            if owner == self._owner:
                self._last_step = step

    def took(self, stage_s: float, commit_s: float) -> None:
        """Records the durations of a save, as a maximum that decays towards recent values.

        Args:
            stage_s: Time that training waited, in seconds.
            commit_s: Time until the commit, in seconds.
        """
        with self._changed:
            self._seconds = (_blend(self._seconds[0], stage_s), _blend(self._seconds[1], commit_s))

    def seconds(self) -> tuple[float | None, float | None]:
        """Returns the durations of recent saves: `stage_s` and `commit_s` of `took`."""
        with self._changed:
            return self._seconds

    def ended(self, asked: RequestedSave, committed: bool) -> None:
        """Records the outcome of a requested save; waits up to `linger_s` after a commit."""
        with self._changed:
            self._ended[asked.seq] = committed
            if not committed:
                return
            end_s = time.monotonic() + asked.linger_s
            while self._taken == asked.seq and (left_s := end_s - time.monotonic()) > 0:
                self._changed.wait(left_s)

    # Called by the controller

    def hold(self, seq: str) -> HeldRank | None:
        """Holds this rank before its next decision; returns None if it can't accept a request.

        Args:
            seq: Id of the request.
        """
        with self._changed:
            if not self._is_open or self._held is not None or self._asked is not None:
                return None
            self._held = (seq, time.monotonic() + bounds.HOLD_S)
            return HeldRank(self._last_step, *self._seconds)

    def ask(self, asked: RequestedSave) -> bool:
        """Delivers a request and releases this rank; returns False if it was no longer held."""
        with self._changed:
            if self._held is None or self._held[0] != asked.seq:
                return False
            self._held = None
            self._asked = asked
            self._changed.notify_all()
            return True

    def drop(self, seq: str) -> None:
        """Withdraws a request, and releases this rank if it is held or lingers for it."""
        with self._changed:
            if self._held is not None and self._held[0] == seq:
                self._held = None
            if self._asked is not None and self._asked.seq == seq:
                self._asked = None
            if self._taken == seq:
                self._taken = ""
            self._changed.notify_all()

    def state(self, seq: str) -> State:
        """Returns the state of a requested save."""
        with self._changed:
            if seq in self._ended:
                return "committed" if self._ended[seq] else "failed"
            if self._taken == seq:
                return "saving"
            waits = self._asked is not None and self._asked.seq == seq
            return "waiting" if waits else "unknown"


def _blend(known_s: float | None, seconds: float) -> float:
    return seconds if known_s is None else max(seconds, (known_s + seconds) / 2)


REQUESTS = SaveRequests()
"""The save requests of this worker process."""


SPARE = 2.0
"""A save is started this many of its durations (plus `SPARE_S`) before the deadline."""
SPARE_S = 2.0
"""Fixed part of that reserve, in seconds."""


def next_round_s(now_s: float, deadline_s: float | None, took_s: float | None) -> float | None:
    """Returns how long to wait before saving again, in seconds; None if that does not pay.

        now_s                                           deadline_s
          |---- wait_s ----|---- SPARE * took_s ----|-SPARE_S-|

    It pays if the wait is longer than a save takes.

    Args:
        now_s: Current time, in seconds since the epoch.
        deadline_s: End of the node; None if unknown.
        took_s: Duration of the last save with its request, in seconds; None if there was none.

    Examples:
        >>> next_round_s(100.0, 130.0, 4.0), next_round_s(120.0, 130.0, 4.0)
        (20.0, None)
    """
    if deadline_s is None or took_s is None:
        return None
    wait_s = deadline_s - (SPARE * took_s + SPARE_S) - now_s
    return wait_s if wait_s > took_s else None


def is_last_round(left_s: float, took_s: float | None) -> bool:
    """Returns whether a save that starts now is the last one that pays.

    Args:
        left_s: Time until the end of the node, in seconds.
        took_s: Expected duration of a save, in seconds; None if unknown.

    Examples:
        >>> is_last_round(30.0, 4.0), is_last_round(10.0, 4.0), is_last_round(10.0, None)
        (False, True, False)
    """
    return took_s is not None and next_round_s(took_s, left_s, took_s) is None


MARGIN = 1.25
"""A save is expected to take at most this many times as long as earlier ones (plus `MARGIN_S`)."""
MARGIN_S = 0.5
"""Fixed part of that margin, in seconds."""
LOOK_S = 0.05
"""Interval of state queries to the ranks, in seconds."""


Call = Callable[..., list[Any]]
"""Calls a method of the `SaveRequests` of each worker of a group. It receives the name and the
arguments, returns the results by rank, and raises if a worker does not answer."""


def save_fits(left_s: float | None, stage_s: float | None) -> bool:
    """Returns whether a save fits into the time left, judging by earlier saves.

    It fits if its bytes can be staged in time: the node agents write staged bytes as long as the
    machines live.

    Args:
        left_s: Time left, in seconds; None if there is no limit.
        stage_s: Time that training waited for earlier saves, in seconds; None if there were none.

    Examples:
        >>> save_fits(5, 0.2), save_fits(0.3, 0.2), save_fits(5, None), save_fits(None, 0.2)
        (True, False, True, True)
    """
    return left_s is None or (stage_s or 0.0) * MARGIN + MARGIN_S <= left_s


def ask_all(
    call: Call,
    seq: str,
    reason: str,
    *,
    linger_s: float = 0.0,
    left_s: float | None = None,
    took_s: float | None = None,
) -> str | None:
    """Requests that all ranks save at the same step, the first that none of them has decided.

    Args:
        call: Calls the ranks.
        seq: Unique id of the request.
        reason: Reason, for the log.
        linger_s: See `RequestedSave.linger_s`; if `left_s` is given, used only if no further save
            pays.
        left_s: Time in which the save must be committed, in seconds; None if there is no limit.
        took_s: Duration of the last requested save with its request, in seconds; None if there was
            none.

    Returns:
        None if the save was requested; otherwise the reason why not.

    Raises:
        Exception: A worker did not answer.
    """
    try:
        held: Sequence[HeldRank | None] = call("hold", seq)
        answers = [one for one in held if one is not None]
        if not held or len(answers) < len(held):
            call("drop", seq)
            missing = [rank for rank, one in enumerate(held) if one is None]
            return f"rank(s) {missing} have no open checkpointer, or are asked"
        if not save_fits(left_s, _max_known(one.stage_s for one in answers)):
            call("drop", seq)
            return f"no save fits in {left_s or 0:.1f} s: earlier ones took longer"
        commit_s = _max_known(one.commit_s for one in answers)
        after = max(one.last_step for one in answers)
        ends = left_s is None or is_last_round(left_s, _max_known((commit_s, took_s)))
        told = call("ask", RequestedSave(seq, reason, after, linger_s if ends else 0.0))
    except Exception:
        call("drop", seq)
        raise
    if not all(told):
        call("drop", seq)
        return "a rank had waited for the word for too long"
    return None


def follow(call: Call, seq: str, limit_s: float) -> State:
    """Waits for a requested save, and returns its outcome, or its state at the timeout.

    Args:
        call: Calls the ranks.
        seq: Id of the request.
        limit_s: Timeout, in seconds.

    Raises:
        Exception: A worker did not answer.
    """
    end_s = time.monotonic() + limit_s
    while True:
        states: list[State] = call("state", seq)
        if "failed" in states or "unknown" in states:
            return "failed"
        if all(one == "committed" for one in states):
            return "committed"
        if time.monotonic() >= end_s:
            return "saving" if "waiting" not in states else "waiting"
        time.sleep(LOOK_S)


def _max_known(seconds: Iterable[float | None]) -> float | None:
    return max((one for one in seconds if one is not None), default=None)


def of_this_worker(method: str, *arguments: Any) -> Any:
    """Calls a method of the `SaveRequests` of this process. The controller runs it on workers."""
    return getattr(REQUESTS, method)(*arguments)


# --- the callback -------------------------------------------------------------------------------


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
            lambda: self._save_before_the_end(_make_caller(group)),
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
        how, took_s = self._save(call, "resize", linger_s=self._limit_s + bounds.RESIZE_END_S)
        if took_s is None:
            return
        if how == "committed":
            logger.info("Saved before the resize, in %s", seconds_text(took_s))
        else:
            logger.warning(
                "The save before the resize is %s after %s; what was trained since the last "
                "one may be redone. Raise SaveBeforeResize(limit_s=%g) if steps or saves take that "
                "long",
                "not committed" if how != "failed" else "failed",
                seconds_text(took_s),
                self._limit_s,
            )

    def _save(
        self, call: Call, reason: str, *, left_s: float | None = None, **more: Any
    ) -> tuple[str, float | None]:
        """Requests a save and waits for it; returns its outcome and its duration in seconds."""
        seq, begun_s = secrets.token_hex(8), time.monotonic()
        why_not = ask_all(call, seq, reason, left_s=left_s, **more)
        if why_not is not None:
            logger.warning("No save before a %s: %s", reason, why_not)
            return why_not, None
        how = follow(call, seq, self._limit_s if left_s is None else left_s)
        return how, time.monotonic() - begun_s

    def _save_in_time(self, group: Any, info: Any) -> None:
        """Saves at once, and again as late as possible."""
        call = _make_caller(group)
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
        linger_s = 0.0 if left_s is None else max(0.0, left_s) + bounds.RESIZE_END_S
        how, took_s = self._save(
            call, "preemption", left_s=left_s, took_s=took_s, linger_s=linger_s
        )
        if took_s is not None:
            logger.warning(
                "Preemption of %s: a save was asked for, and is %s after %s",
                sorted(info.preempted_node_to_ranks),
                how,
                seconds_text(took_s),
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


def _make_caller(group: Any) -> Call:
    """Returns a `Call` to the workers of a Ray Train group, executed in their main threads."""

    def call(method: str, *arguments: Any) -> list[Any]:
        refs = group.execute_async(of_this_worker, method, *arguments)
        found: list[Any] = ray_calls.get(refs, timeout=bounds.WORKER_ANSWER_S)
        return found

    return call
