"""`CollectiveActions`: what the ranks of a manager do together. They decide, save and commit.

All ranks call every method in the same order. `restoring` has restores.

`agree` makes one decision for all ranks: each rank sends its facts to rank 0, which sends its
decision to all. This takes two exchanges through the session, and none if there is one rank. No
rank decides by its own clock, signals or scan of the storage.

`Finisher` waits for asynchronous saves in a thread, in the order of their calls, and returns their
outcomes in that order.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from ray_dcp.asynchronous import SaveHandle, run_async_save
from ray_dcp.commit_protocol.attempts import Decision, Fenced, Lost, Open, Won
from ray_dcp.commit_protocol.commands import Failed, ReadRecords, RecordsRead, Result, Task
from ray_dcp.commit_protocol.error_aggregation import exchanged
from ray_dcp.commit_protocol.messages import Exchange, OpKey, Reply, Request
from ray_dcp.core.processes import start_thread
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitUnknownError,
    LimitError,
    SaveSkippedError,
    StorageError,
)
from ray_dcp.events import contained
from ray_dcp.format.manifest import Manifest
from ray_dcp.io.records import read_slots
from ray_dcp.io.threads import begin
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.preemption import Preemption
from ray_dcp.manager.root_writer import Writer
from ray_dcp.manager.save_policy import SaveFacts, asks_only_the_step
from ray_dcp.manager.settings import Settings, states_of
from ray_dcp.manager.steps import StepTarget
from ray_dcp.options import SaveOptions
from ray_dcp.runtime.inline import InlineSession
from ray_dcp.runtime.rank_load import drive
from ray_dcp.runtime.rank_save import decided_on_rank_0, result_or_error
from ray_dcp.runtime.tasks import outcome, perform, settle
from ray_dcp.saving import RankSession, run_save
from ray_dcp.store.opening import open_storage, place_below
from ray_dcp.store.storage import is_full
from ray_dcp.torch_adapter.dispatch import decide_save
from ray_dcp.torch_adapter.results import OperationLog
from ray_dcp.view.progress import ShowProgress

T = TypeVar("T")

ASK_AGAIN_S = (0.0, 0.5, 2.0)
"""Pauses before the storage is queried for an unknown outcome, in seconds."""


def in_time(timeout_s: float, what: str, work: Callable[[], T]) -> T:
    """Returns the result of work that may hang in the storage; abandons it after a timeout.

    Args:
        timeout_s: Timeout, in seconds.
        what: Description of the work, for the error.
        work: Runs in a thread.

    Raises:
        StorageError: The timeout expired.
    """
    done = begin(work, "ray_dcp manager decides")
    if not wait([done], timeout_s).done:
        raise StorageError(
            f"expected the storage to answer within {timeout_s:g} s, but {what} still waits for "
            f"it, and is left to itself. Look after the storage, or raise plan_timeout_s"
        )
    return done.result()


def agree(
    session: RankSession,
    what: str,
    facts: Any,
    decide: Callable[[Sequence[Any]], Any],
    *,
    timeout_s: float,
    heartbeat_s: float,
    error: CheckpointError | None = None,
    key: OpKey | None = None,
) -> Any:
    """Returns the decision that rank 0 makes from the facts of all ranks; equal on all ranks.

    Args:
        session: Session of this rank.
        what: Description of the decision, the same on all ranks.
        facts: Facts of this rank, serializable as JSON.
        decide: Called on rank 0 alone, with the facts by rank; its result must be serializable as
            JSON.
        timeout_s: Deadline for all ranks to join, in seconds.
        heartbeat_s: Silence after which a rank counts as frozen, in seconds.
        error: Why this rank can't take part; reported to all ranks.
        key: Key of this operation, if the session has issued it already.

    Raises:
        CheckpointError: A rank reported an error, or `decide` raised one; the same on all ranks.
        RankDisagreementError: The ranks make different decisions.
    """
    rank, world_size = session.rank, session.world_size
    if world_size == 1:
        if error is not None:
            raise error
        return in_time(timeout_s, what, lambda: decide([facts]))

    def exchanges(first: OpKey, second: OpKey) -> Generator[Request, Reply, Any]:
        own, tag = {0: json.dumps(facts).encode()}, f"{what}: facts"
        request = Exchange(first, rank, world_size, tag, own, timeout_s, error)
        inbox = yield from exchanged(request)

        def decided() -> Any:
            received = [json.loads(inbox[sender]) for sender in range(world_size)]
            return in_time(timeout_s, what, lambda: decide(received))

        # Why twice: rank 0 may need the whole first timeout for its decision, and then reports it.
        request = Exchange(second, rank, world_size, f"{what}: decided", {}, 2 * timeout_s)
        return (yield from decided_on_rank_0(request, decided, what))

    with session.activity(heartbeat_s, key) as activity:
        return drive(exchanges(activity.next_key(), activity.next_key()), activity.call)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ended:
    """The outcome of an asynchronous save."""

    step: int
    error: CheckpointError | None = None
    """Why the step is not committed, the same on all ranks; None if it is committed."""
    created_s: float | None = None
    """Time of the plan by the coordinator's clock, the same on all ranks; None if the step consists
    of named items."""


class Finisher:
    """Waits for asynchronous saves, one after the other, in a thread that runs while there are any.

    Args:
        on_end: Called in the thread with the outcome of each save.
    """

    def __init__(self, on_end: Callable[[Ended], object] | None = None) -> None:
        self._on_end = on_end
        self._waiting: deque[tuple[int, Callable[[], float | None]]] = deque()
        self._ended: deque[Ended] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, step: int, finish: Callable[[], float | None]) -> None:
        """Adds a save whose bytes are staged.

        Args:
            step: The step.
            finish: Waits for the end of the save; returns `Ended.created_s`, or raises the reason
                why the step is not committed.
        """
        with self._changed:
            self._waiting.append((step, finish))
            if self._thread is not None:
                return
            # Suppressed: if no thread can be started, this one waits.
            with suppress(LimitError):
                self._thread = start_thread(self._run, "ray_dcp manager")
                return
        self._run()

    def wait_for(self, step: int) -> None:
        """Waits until no save of a step is in progress."""
        with self._changed:
            self._changed.wait_for(lambda: all(one != step for one, _ in self._waiting))

    def ended(self, leave: int = 0) -> list[Ended]:
        """Waits for the oldest saves, and returns their outcomes in the order of the calls.

        The result depends only on the calls, so that it is the same on all ranks:

            saves, oldest first   1  2  3  4  5        (1 was returned before)
            ended(leave=2)           2  3

        Args:
            leave: Number of the newest saves that are not waited for, and left to a later call.
        """
        with self._changed:
            count = max(0, len(self._ended) + len(self._waiting) - leave)
            self._changed.wait_for(lambda: len(self._ended) >= count)
            return [self._ended.popleft() for _ in range(count)]

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    return
                step, finish = self._waiting[0]
            ended = self._finish(step, finish)
            with self._changed:
                self._ended.append(ended)
                self._waiting.popleft()
                self._changed.notify_all()

    def _finish(self, step: int, finish: Callable[[], float | None]) -> Ended:
        try:
            ended = Ended(step, created_s=finish())
        except CheckpointError as error:
            error.step = step if error.step is None else error.step
            ended = Ended(step, error)
        except Exception as error:  # noqa: BLE001 - `ended` returns it
            failed = CheckpointError(
                f"the save of step {step} failed: {type(error).__name__}: {error}", step=step
            )
            failed.__cause__ = error
            ended = Ended(step, failed)
        try:
            if self._on_end is not None:
                self._on_end(ended)
        except Exception:
            logger.exception("After the end of the save of step %d", step)
        return ended


class CollectiveActions:
    """One rank's part in what the ranks of a manager do together.

    Args:
        root: The root.
        settings: Settings of the manager.
        writer: Decides on rank 0; other ranks only scan the storage with it.
        preemption: Preemption notices of this process.
        session: Returns the session of this rank; all ranks create it in the first call.
        on_end: Called with the outcome of each asynchronous save, in a thread.

    Attributes:
        finisher: Waits for asynchronous saves.
    """

    def __init__(
        self,
        root: Root,
        settings: Settings,
        writer: Writer,
        preemption: Preemption,
        session: Callable[[], RankSession],
        on_end: Callable[[Ended], object] | None = None,
    ) -> None:
        self.root = root
        self.settings = settings
        self.writer = writer
        self.session = session
        self.finisher = Finisher(on_end)
        self._preemption = preemption
        self._wait: Callable[[float], object] = time.sleep

    def agree(
        self,
        what: str,
        decide: Callable[[Sequence[Any]], Any],
        *,
        facts: Any = None,
        error: CheckpointError | None = None,
        key: OpKey | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Returns the decision of rank 0; see the function `agree`."""
        options = self.settings.options
        return agree(
            self.session(),
            f"{what} in {self.root.url}",
            facts,
            decide,
            timeout_s=options.plan_timeout_s if timeout_s is None else timeout_s,
            heartbeat_s=options.heartbeat_timeout_s,
            error=error,
            key=key,
        )

    def should_save(self, step: int) -> bool:
        """Returns whether a step is due, the same on all ranks.

        Raises:
            InvalidRequestError: The step is invalid.
            CheckpointError: The ranks could not agree.
        """
        due = self._due_alone(step)
        if due is not None:
            return due
        return bool(
            self.agree(
                f"whether step {step} is due",
                lambda preempted: self.writer.due(step, any(preempted)),
                facts=self._preemption.is_told,
            )
        )

    def _due_alone(self, step: int) -> bool | None:
        """Returns whether a step is due; None if only the ranks together can decide that."""
        self.settings.names.name_of(step)
        policy = self.settings.policy
        if policy is None:
            return False
        alone = bool(policy.due(SaveFacts(step=step)))
        if asks_only_the_step(policy) or (step % self.settings.sync_every and not alone):
            return alone
        return None

    def is_preempted(self, step: int) -> bool:
        """Returns whether a rank was notified that its machine is being taken away.

        Raises:
            CheckpointError: The ranks could not agree.
        """
        told = self.agree(f"preemption at step {step}", any, facts=self._preemption.is_told)
        if told:
            self._preemption.tell()
        return bool(told)

    def save(
        self,
        step: int,
        state_dict: Any,
        force: bool,
        details: Mapping[str, Any],
        progress: ShowProgress = False,
    ) -> bool:
        """Saves a step if it is due; returns whether it was.

        Raises:
            CheckpointError: As `CheckpointManager.save`.
        """
        try:
            return self._save(step, state_dict, force, details, progress)
        except StorageError as error:
            # Why not CommitUnknownError: that step may still be committed.
            if not is_full(error):
                raise
            options = self.settings.options
            has_room = self.agree(
                f"room for step {step}",
                lambda _: self.writer.make_room(step, details["metrics"]),
                timeout_s=options.plan_timeout_s + options.commit_timeout_s,
            )
            if not has_room:
                raise
            told = "Step %d is saved once more, after older steps were deleted: %s"
            logger.warning(told, step, error)
        return self._save(step, state_dict, True, details, progress)

    def _save(
        self,
        step: int,
        state_dict: Any,
        force: bool,
        details: Mapping[str, Any],
        progress: ShowProgress,
    ) -> bool:
        place, states = self._begin(step, state_dict, force, details)
        if place is None:
            return False
        with self._recorded(place):
            for name, state in states.items():
                run = partial(run_save, progress=progress)
                self._run_item(run, "save", place, name, state, {})
            self._commit(place, None)
        return True

    def save_async(
        self,
        step: int,
        state_dict: Any,
        force: bool,
        details: Mapping[str, Any],
        **options: Any,
    ) -> bool:
        """Saves a step in the background if it is due; returns once its bytes are copied.

        Args:
            step: The step.
            state_dict: As given to `CheckpointManager.save_async`.
            force: Whether to save the step even if it is not due.
            details: Metrics, metadata, tags and whether to replace; see `Writer.begin`.
            **options: Fields of `SaveOptions` that replace those of the items.

        Returns:
            Whether the step is being saved. False if it is not due, or if
            `SaveOptions(when_full="skip")` skipped it.

        Raises:
            CheckpointError: As `CheckpointManager.save_async`.
        """
        place, states = self._begin(step, state_dict, force, details)
        if place is None:
            return False
        try:
            # Why staged in the call: the caller gets no handle to wait for.
            handles = self._staged(place, states, {**options, "staging": "call"})
        except SaveSkippedError as error:
            logger.info("Step %d is skipped: %s", step, error)
            return False
        # Why now: operations must be numbered in the order of the calls, which threads don't keep.
        key = self.session().next_key() if self.settings.named else None

        def finish() -> float | None:
            with self._recorded(place):
                for error in [handle.exception() for handle in handles]:
                    if error is not None and not isinstance(error, CommitUnknownError):
                        raise error
                created_s = [self._created_s(handle) for handle in handles]
                self._commit(place, key)
            return None if self.settings.named else created_s[0]

        self.finisher.add(step, finish)
        return True

    def _staged(
        self, place: StepTarget, states: Mapping[str, Any], options: Mapping[str, Any]
    ) -> list[SaveHandle]:
        """Starts the saves of all items, and returns their handles once their bytes are copied."""
        handles: list[SaveHandle] = []
        try:
            for name, state in states.items():
                handles.append(
                    self._run_item(run_async_save, "async_save", place, name, state, options)
                )
                error = handles[-1].exception() if handles[-1].done() else None
                if isinstance(error, SaveSkippedError):
                    raise error
        except BaseException:
            for handle in handles:
                handle.cancel()
            with self._recorded(place):
                raise
        return handles

    def _created_s(self, handle: SaveHandle) -> float | None:
        """Returns the time of a save's plan; queries the storage if its outcome is unknown.

        Raises:
            CheckpointError: The checkpoint is not committed.
            CommitUnknownError: The storage does not know the outcome either.
        """
        try:
            return getattr(handle.result(), "created_s", None)
        except CommitUnknownError as unknown:
            error, url = unknown, handle.checkpoint_id
        target = replace(self.root.target, url=url)
        for pause_s in ASK_AGAIN_S:
            self._wait(pause_s)
            found = ""
            with suppress(CheckpointError):
                found = outcome(target, error.attempt)
                if found == "committed":
                    records = read_slots(self.root.opener(target)).records.values()
                    manifests = [one for one in records if isinstance(one, Manifest)]
                    return next(
                        (one.created_s for one in manifests if one.attempt == error.attempt), None
                    )
            if found == "aborted":
                raise CheckpointError(f"It was aborted: {error.message}", checkpoint_id=url)
        raise error

    def _begin(
        self, step: int, state_dict: Any, force: bool, details: Mapping[str, Any]
    ) -> tuple[StepTarget | None, dict[str, Any]]:
        """Returns the place of a step, and its states by item; None if the step is not due."""
        self.settings.names.name_of(step)
        if not force and self._due_alone(step) is False:
            return None, {}
        if self.settings.order == "any":
            self.finisher.wait_for(step)
        states, error = result_or_error(
            lambda: states_of(self.settings.items, state_dict),
            "looking at the state",
            self.session().rank,
        )
        left = threading.Event()

        def decide(preempted: Sequence[bool]) -> tuple[str, int, int, str] | None:
            told = any(preempted)
            if not self.writer.due(step, told, force=force):
                return None
            place = self.writer.begin(
                step, preempted=told, wanted=lambda: not left.is_set(), **details
            )
            return place.name, place.last_slot, place.number, place.attempt

        try:
            decided = self.agree(
                f"saving step {step}", decide, facts=self._preemption.is_told, error=error
            )
        except BaseException:
            left.set()
            self.writer.give_up(step)
            raise
        if decided is None:
            return None, {}
        return StepTarget(step, *decided), states or {}

    def _run_item(
        self,
        run: Callable[..., T],
        operation: str,
        place: StepTarget,
        name: str,
        state: Any,
        options: Mapping[str, Any],
    ) -> T:
        """Runs the save of one item by `run_save` or `run_async_save`, and returns its result."""
        item = self.settings.items[name]
        target = self.root.below(place.name)
        path = place_below(target, place.folder_of(name)) if name else target
        planner = item.planner_for_save()
        with OperationLog(operation, checkpoint_id=path, planner=planner) as log:
            result = run(
                decide_save(planner, None, path),
                self.session(),
                state,
                replace(item.save_options, **options),
                path,
                log=log,
            )
            if isinstance(result, SaveHandle):
                log.uploading(result)
            return result

    def _commit(self, place: StepTarget, key: OpKey | None) -> None:
        """Commits a step of named items: rank 0 saves a checkpoint that refers to them.

        Raises:
            CommitUnknownError: It is unknown whether the step is committed.
            CheckpointError: The step is not committed, and never will be.
        """
        if not self.settings.named:
            return
        target = self.root.below(place.name)

        def decide(_: Sequence[Any]) -> None:
            folders = {name: place.folder_of(name) for name in self.settings.named}
            run_save(
                decide_save(None, None, target),
                InlineSession(
                    "step",
                    performer=partial(_perform_after, place),
                    new_attempt=lambda: place.attempt,
                ),
                {"step": place.step, "items": folders},
                SaveOptions(),
                target,
            )

        # Why so long: one rank after the other learns that the items are committed.
        timeout_s = self.settings.options.plan_timeout_s + self.settings.options.commit_timeout_s
        what = f"the commit of step {place.step}"
        try:
            self.agree(what, decide, key=key, timeout_s=timeout_s)
        except CheckpointError as error:
            self._settle(place, error, what, timeout_s)

    def _settle(
        self, place: StepTarget, error: CheckpointError, what: str, timeout_s: float
    ) -> None:
        """Returns if a step's records show that it is committed; otherwise prevents the commit.

        Why: the commit may have happened before the ranks lost each other, or may still happen.
        """
        ended: Decision
        target, rank = self.root.below(place.name), self.session().rank
        try:
            ended = in_time(
                timeout_s,
                what,
                lambda: settle(target, place.attempt, reason=error.message, rank=rank),
            )
        except StorageError as silent:
            ended = Open(silent)
        match ended:
            case Won() | Lost():
                logger.warning("%s happened, though the ranks lost each other: %s", what, error)
            case Fenced():
                raise error
            case Open(why):
                raise CommitUnknownError(
                    f"{what} failed, and the storage did not report whether it happened: {error}; "
                    f"{why}. Ask ray_dcp.outcome({target.url!r}, {place.attempt!r}) later",
                    attempt=place.attempt,
                    step=place.step,
                ) from error

    @contextmanager
    def _recorded(self, place: StepTarget) -> Iterator[None]:
        """Reports the outcome of a save to the writer."""
        committed: bool | None = False
        no_space = False
        try:
            yield
            committed = True
        except BaseException as error:
            # Why: an interrupt may come after the commit.
            if isinstance(error, CommitUnknownError) or not isinstance(error, Exception):
                committed = None
            no_space = isinstance(error, StorageError) and is_full(error)
            raise
        finally:
            what = f"the end of step {place.step}"
            with contained(f"Recording {what}"):
                if self.session().rank == 0:
                    finish = partial(self.writer.finish, place, committed, no_space=no_space)
                    in_time(self.settings.options.commit_timeout_s, what, finish)


def _perform_after(place: StepTarget, task: Task) -> Result:
    """Performs a task of the save that commits a step, unless another writer removed its items.

    Why by records: a writer that took over the lease deletes items without a committed step, as
    leftovers of a crash. It commits a delete record first. Either that record is read here, or it
    occupies the slot that this save needs.
    """
    found = perform(task)
    is_as_before = isinstance(found, RecordsRead) and found.last_slot == place.last_slot
    if is_as_before or not isinstance(task, ReadRecords) or isinstance(found, Failed):
        return found
    try:
        decides = read_slots(open_storage(task.target)).decides
    except CheckpointError as error:
        return Failed(error)
    if decides is None or decides.slot <= place.last_slot:
        return found  # Only abort records, of aborted deletions.
    return Failed(
        CheckpointExistsError(
            f"Expected nothing to be committed or deleted in the folder of step {place.step} while "
            f"it was being saved, but another process took over the run and removed what this one "
            f"had saved of it. The step is not committed; only one job at a time may write here",
            step=place.step,
        )
    )
