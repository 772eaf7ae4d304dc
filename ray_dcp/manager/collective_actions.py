"""`CollectiveActions`: what the ranks of a manager do together: agree on saves, save, commit.

Every method is called by all ranks, in the same order. `restoring` has restores.

`agree` makes one decision for all ranks: each sends its facts to rank 0, and rank 0 sends its
decision to all. That takes two exchanges through the session; none where a process is alone. No
rank decides by its own clock, its own signals or its own look at the storage.

`Finisher` follows asynchronous saves to their end, in the order in which they began, in one thread.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from ray_dcp.asynchronous import SaveHandle, async_save
from ray_dcp.commit_protocol.commands import Failed, ReadRecords, RecordsRead, Result, Task
from ray_dcp.commit_protocol.error_aggregation import exchanged
from ray_dcp.commit_protocol.messages import Exchange, OpKey, Reply, Request
from ray_dcp.commit_protocol.vote import Decision, Fenced, Lost, Open, Won
from ray_dcp.core.processes import start_thread
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitUnknownError,
    LimitError,
    StorageError,
)
from ray_dcp.events import contained
from ray_dcp.io.records import read_slots
from ray_dcp.io.threads import begin
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.preemption import Preemption
from ray_dcp.manager.root_writer import Writer
from ray_dcp.manager.save_policy import SaveFacts, asks_only_the_step
from ray_dcp.manager.settings import Item, Settings, states_of
from ray_dcp.manager.steps import StepTarget
from ray_dcp.options import SaveOptions
from ray_dcp.runtime.inline import InlineSession
from ray_dcp.runtime.rank_load import drive
from ray_dcp.runtime.rank_save import decided_on_rank_0, result_or_error
from ray_dcp.runtime.tasks import perform, settle
from ray_dcp.saving import RankSession, run_save, save, session_for
from ray_dcp.store.opening import open_storage, place_below
from ray_dcp.store.storage import is_full
from ray_dcp.torch_adapter.dispatch import decide_save

T = TypeVar("T")


def in_time(timeout_s: float, what: str, work: Callable[[], T]) -> T:
    """Returns what work gives that may hang in the storage: it is left to itself then.

    Args:
        timeout_s: How long to wait for it, in seconds.
        what: It does, in words.
        work: Runs in a thread of its own.

    Raises:
        StorageError: It did not end in time.
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
    """Returns what rank 0 decides from the facts of all ranks; the same on all.

    Args:
        session: Of this rank.
        what: Is decided, in words that all ranks share.
        facts: Of this rank, as JSON takes them.
        decide: Called on rank 0 alone, with the facts by rank; gives what JSON takes.
        timeout_s: Deadline for all ranks to come, in seconds.
        heartbeat_s: Silence after which a rank counts as frozen, in seconds.
        error: Why this rank can't take part; reported to all.
        key: Of this call, if the session named it before.

    Raises:
        CheckpointError: What a rank could not do, or what `decide` raised: on all ranks.
        RankDisagreementError: The ranks decide about different things.
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
            told = [json.loads(inbox[sender]) for sender in range(world_size)]
            return in_time(timeout_s, what, lambda: decide(told))

        # Why twice: rank 0 may use up the first for its decision, and has to report that.
        request = Exchange(second, rank, world_size, f"{what}: decided", {}, 2 * timeout_s)
        return (yield from decided_on_rank_0(request, decided, what))

    with session.activity(heartbeat_s, key) as activity:
        return drive(exchanges(activity.next_key(), activity.next_key()), activity.call)


logger = logging.getLogger(__name__)


class Finisher:
    """Waits for asynchronous saves, one after the other, in a thread while there are any.

    Args:
        on_failure: Called with step and error of each save that fails, in the thread.
    """

    def __init__(self, on_failure: Callable[[int, CheckpointError], object] | None = None) -> None:
        self._on_failure = on_failure
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failed: list[tuple[int, CheckpointError]] = []

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are under way, in order."""
        with self._changed:
            return tuple(step for step, _ in self._waiting)

    def add(self, step: int, finish: Callable[[], object]) -> None:
        """Follows a save.

        Args:
            step: Whose bytes are staged.
            finish: Waits for its end, and raises why it is not committed.
        """
        with self._changed:
            self._waiting.append((step, finish))
            if self._thread is not None:
                return
            # Suppressed: there are no more threads, and this one does it.
            with suppress(LimitError):
                self._thread = start_thread(self._run, "ray_dcp manager")
                return
        self._run()

    def wait(self) -> None:
        """Waits until nothing is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    def failures(self) -> list[tuple[int, CheckpointError]]:
        """Returns the saves that failed since it was last called, with why."""
        with self._changed:
            failed, self._failed = self._failed, []
            return failed

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    return
                step, finish = self._waiting[0]
            error = self._finish(step, finish)
            with self._changed:
                if error is not None:
                    self._failed.append((step, error))
                self._waiting.popleft()
                self._changed.notify_all()

    def _finish(self, step: int, finish: Callable[[], object]) -> CheckpointError | None:
        try:
            finish()
            return None
        except CheckpointError as failed:
            error = failed
            error.step = step if error.step is None else error.step
        except Exception as failed:  # noqa: BLE001 - raised by join
            error = CheckpointError(
                f"the save of step {step} failed: {type(failed).__name__}: {failed}", step=step
            )
            error.__cause__ = failed
        try:
            if self._on_failure is not None:
                self._on_failure(step, error)
        except Exception:
            logger.exception("After the end of the save of step %d", step)
        return error


class CollectiveActions:
    """One rank's part in what the ranks of a manager do together.

    Args:
        root: Where.
        settings: Of the manager.
        writer: What rank 0 decides with; other ranks only look with it.
        preemption: Of this process.
        group: The ranks; the default group if None.
        no_dist: This process is alone.

    Attributes:
        finisher: Follows asynchronous saves.
    """

    def __init__(
        self,
        root: Root,
        settings: Settings,
        writer: Writer,
        preemption: Preemption,
        group: dist.ProcessGroup | None,
        no_dist: bool,
    ) -> None:
        self.root = root
        self.settings = settings
        self.writer = writer
        self.group = group
        self.no_dist = no_dist
        self._preemption = preemption
        self.finisher = Finisher(settings.on_failure)

    def session(self) -> RankSession:
        """Returns the session of this rank; the first time all ranks make it.

        Raises:
            CheckpointError: It can't be made.
        """
        return session_for(self.group, self.no_dist)

    def agree(
        self,
        what: str,
        decide: Callable[[Sequence[Any]], Any],
        *,
        facts: Any = None,
        error: CheckpointError | None = None,
        key: OpKey | None = None,
        session: RankSession | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Returns what rank 0 decides; see `agree`."""
        options = self.settings.unnamed.save_options
        return agree(
            session or self.session(),
            f"{what} in {self.root.url}",
            facts,
            decide,
            timeout_s=options.plan_timeout_s if timeout_s is None else timeout_s,
            heartbeat_s=options.heartbeat_timeout_s,
            error=error,
            key=key,
        )

    def should_save(self, step: int) -> bool:
        """Tells whether a step is due, on all ranks the same.

        Raises:
            InvalidRequestError: It is no step.
            CheckpointError: The ranks could not agree.
        """
        self.settings.names.name_of(step)
        policy = self.settings.policy
        if policy is None:
            return False
        alone = bool(policy.due(SaveFacts(step=step)))
        if asks_only_the_step(policy) or (step % self.settings.sync_every and not alone):
            return alone
        return bool(
            self.agree(
                f"whether step {step} is due",
                lambda preempted: self.writer.due(step, any(preempted)),
                facts=self._preemption.is_told,
            )
        )

    def is_preempted(self, step: int) -> bool:
        """Returns whether some rank was notified that its machine is taken away.

        Raises:
            CheckpointError: The ranks could not agree.
        """
        told = self.agree(f"preemption at step {step}", any, facts=self._preemption.is_told)
        if told:
            self._preemption.tell()
        return bool(told)

    def save(self, step: int, state_dict: Any, force: bool, details: Mapping[str, Any]) -> bool:
        """Saves a step; returns whether it was due.

        Raises:
            CheckpointError: As `CheckpointManager.save` does.
        """
        try:
            return self._save(step, state_dict, force, details)
        except StorageError as error:
            # Why no CommitUnknownError: that step may still be committed.
            if not is_full(error):
                raise
            options = self.settings.unnamed.save_options
            has_room = self.agree(
                f"room for step {step}",
                lambda _: self.writer.make_room(step, details["metrics"]),
                timeout_s=options.plan_timeout_s + options.commit_timeout_s,
            )
            if not has_room:
                raise
            told = "Step %d is saved once more, after older steps were deleted: %s"
            logger.warning(told, step, error)
        return self._save(step, state_dict, True, details)

    def _save(self, step: int, state_dict: Any, force: bool, details: Mapping[str, Any]) -> bool:
        place, states = self._begin(step, state_dict, force, details)
        if place is None:
            return False
        with self._recorded(place):
            for name, item in self._parts():
                save(states[name], **self._how(place, name, item))
            self._commit(place, None)
        return True

    def save_async(
        self, step: int, state_dict: Any, force: bool, details: Mapping[str, Any]
    ) -> bool:
        """Saves a step in the background; returns whether it was due, once its bytes are copied.

        Raises:
            CheckpointError: As `CheckpointManager.save_async` does.
        """
        place, states = self._begin(step, state_dict, force, details)
        if place is None:
            return False
        handles: list[SaveHandle] = []
        try:
            for name, item in self._parts():
                handles.append(async_save(states[name], **self._how(place, name, item)))
        except BaseException:
            for handle in handles:
                handle.cancel()
            with self._recorded(place):
                raise
        # Why now: calls are numbered in the order of the calls, which threads don't keep.
        key = self.session().next_key() if self.settings.named else None

        def finish() -> None:
            with self._recorded(place):
                for error in [handle.exception() for handle in handles]:
                    if error is not None:
                        raise error
                self._commit(place, key)

        self.finisher.add(step, finish)
        return True

    def _begin(
        self, step: int, state_dict: Any, force: bool, details: Mapping[str, Any]
    ) -> tuple[StepTarget | None, dict[str, Any]]:
        """Returns the step that is to be saved; None when it is not due."""
        self.settings.names.name_of(step)
        policy = self.settings.policy
        alone = force or (policy is not None and bool(policy.due(SaveFacts(step=step))))
        quick = policy is None or asks_only_the_step(policy) or step % self.settings.sync_every
        if quick and not alone:
            return None, {}
        if self.settings.order == "any" and step in self.finisher.steps:
            self.finisher.wait()
        session = self.session()
        states, error = result_or_error(
            lambda: states_of(self.settings.named, state_dict), "looking at the state", session.rank
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
                f"saving step {step}",
                decide,
                facts=self._preemption.is_told,
                error=error,
                session=session,
            )
        except BaseException:
            left.set()
            self.writer.give_up(step)
            raise
        if decided is None:
            return None, {}
        return StepTarget(step, *decided), states or {}

    def _parts(self) -> list[tuple[str, Item]]:
        return list(self.settings.named.items()) or [("", self.settings.unnamed)]

    def _how(self, place: StepTarget, name: str, item: Item) -> dict[str, Any]:
        target = self.root.below(place.name)
        return {
            "checkpoint_id": place_below(target, place.folder_of(name)) if name else target,
            "planner": item.planner_for_save(),
            "process_group": self.group,
            "no_dist": self.no_dist,
            # Careful: the records were read when the step was begun.
            # Why in the call: it returns to a user who has no handle to wait for.
            "options": replace(item.save_options, staging="call"),
        }

    def _commit(self, place: StepTarget, key: OpKey | None) -> None:
        """Makes the step of its items: by a checkpoint of its own, that rank 0 saves.

        Raises:
            CommitUnknownError: It is not known whether the step is committed.
            CheckpointError: It is not, and never will be.
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

        options = self.settings.unnamed.save_options
        # Why so long: where the items are committed is learned by one rank after the other.
        timeout_s = options.plan_timeout_s + options.commit_timeout_s
        what = f"the commit of step {place.step}"
        try:
            self.agree(what, decide, key=key, timeout_s=timeout_s)
        except CheckpointError as error:
            self._settle(place, error, what, timeout_s)

    def _settle(
        self, place: StepTarget, error: CheckpointError, what: str, timeout_s: float
    ) -> None:
        """Returns if the step is committed by its records; else it never will be.

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
        """Tells the writer how a save ends."""
        committed: bool | None = False
        no_space = False
        try:
            yield
            committed = True
        except BaseException as error:
            # Why: an interrupt may have come after the commit.
            if isinstance(error, CommitUnknownError) or not isinstance(error, Exception):
                committed = None
            no_space = isinstance(error, StorageError) and is_full(error)
            raise
        finally:
            what = f"the end of step {place.step}"
            timeout_s = self.settings.unnamed.save_options.commit_timeout_s
            with contained(f"Recording {what}"):
                if self.session().rank == 0:
                    finish = partial(self.writer.finish, place, committed, no_space=no_space)
                    in_time(timeout_s, what, finish)


def _perform_after(place: StepTarget, task: Task) -> Result:
    """Performs a task of the save that commits a step, unless another writer removed its items.

    Why by the records: a writer that took over the lease removes items without a step, as a crash
    leaves them. It commits a delete record before it deletes them: either that record is read
    here, or it takes the slot that this save was to take.
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
        return found  # abort records alone: of deletions that were fenced off
    return Failed(
        CheckpointExistsError(
            f"Expected nothing to be committed or deleted in the folder of step {place.step} while "
            f"it was being saved, but another process took over the run and removed what this one "
            f"had saved of it. The step is not committed; only one job at a time may write here",
            step=place.step,
        )
    )
