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
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from ray_dcp.entrypoints import async_save, save
from ray_dcp.errors import (
    CheckpointError,
    CommitUnknownError,
    InvalidRequestError,
    StorageError,
)
from ray_dcp.format.names import check_tag
from ray_dcp.handle import SaveHandle
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.preemption import Preemption
from ray_dcp.manager.save_policy import SaveFacts, asks_only_the_step
from ray_dcp.manager.settings import Item, Settings, state_of
from ray_dcp.manager.steps import StepTarget
from ray_dcp.manager.writer import Writer
from ray_dcp.operations import RankSession, run_save, session_for
from ray_dcp.options import SaveOptions
from ray_dcp.protocol.messages import Exchange, Exchanged, OpKey, Reply, Request, Target
from ray_dcp.protocol.vote import Decision, Fenced, Lost, Open, Won
from ray_dcp.runtime.inline import InlineSession
from ray_dcp.runtime.rank_load import drive
from ray_dcp.runtime.rank_save import attempt, refusal
from ray_dcp.runtime.tasks import new_attempt, settle
from ray_dcp.store.opening import place_below
from ray_dcp.torch_adapter.dispatch import decide_save

T = TypeVar("T")

Facts = Any
Decide = Callable[[Sequence[Facts]], Any]


def within(timeout_s: float, what: str, work: Callable[[], T]) -> T:
    """Returns what work gives that may hang in the storage: it is left to itself then.

    Args:
        timeout_s: How long to wait for it, in seconds.
        what: It does, in words.
        work: Runs in a thread of its own.

    Raises:
        StorageError: It did not end in time.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            done.set_exception(error)

    threading.Thread(target=run, name="ray_dcp manager decides", daemon=True).start()
    if not wait([done], timeout_s).done:
        raise StorageError(
            f"expected the storage to answer within {timeout_s:g} s, but {what} still waits for "
            f"it, and is left to itself. Look after the storage, or raise plan_timeout_s"
        )
    return done.result()


def agree(
    session: RankSession,
    what: str,
    facts: Facts,
    decide: Decide,
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
        error: This rank can't take part, and why: all are told.
        key: Of this call, if the session named it before.

    Raises:
        CheckpointError: What a rank could not do, or what `decide` raised: on all ranks.
        RankDisagreementError: The ranks decide about different things.
    """
    if session.world_size == 1:
        if error is not None:
            raise error
        return within(timeout_s, what, lambda: decide([facts]))
    with session.activity(heartbeat_s, key) as activity:
        steps = _steps(
            activity.next_key,
            session.rank,
            session.world_size,
            what,
            facts,
            decide,
            timeout_s,
            error,
        )
        return drive(steps, activity.call)


def _steps(
    next_key: Callable[[], OpKey],
    rank: int,
    world_size: int,
    what: str,
    facts: Facts,
    decide: Decide,
    timeout_s: float,
    error: CheckpointError | None,
) -> Generator[Request, Reply, Any]:
    first, second = next_key(), next_key()
    outbox = {0: json.dumps(facts).encode()}
    reply = yield Exchange(first, rank, world_size, f"{what}: facts", outbox, timeout_s, error)
    if not isinstance(reply, Exchanged):
        raise refusal(reply, rank)
    outbox = {}
    if rank == 0:
        told = [json.loads(reply.inbox[sender]) for sender in range(world_size)]
        decided, error = attempt(
            lambda: json.dumps(within(timeout_s, what, lambda: decide(told))), what, rank
        )
        if decided is not None:
            outbox = dict.fromkeys(range(world_size), decided.encode())
    # Why twice: rank 0 may use up the first for its decision, and has to tell that.
    tag = f"{what}: decided"
    reply = yield Exchange(second, rank, world_size, tag, outbox, 2 * timeout_s, error)
    if not isinstance(reply, Exchanged):
        raise refusal(reply, rank)
    return json.loads(reply.inbox[0])


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnderWay:
    """A step whose bytes are staged."""

    step: int
    handles: Sequence[Future[Any]]
    """Of all its items."""
    commit: Callable[[], object]
    """Makes the step of its items, when all are committed."""
    ended: Callable[[CheckpointError | None], object]
    """Takes in how it has ended."""


class Finisher:
    """Waits for what is under way.

    Args:
        on_failure: Called with step and error of each save that fails, in the thread.
    """

    def __init__(self, on_failure: Callable[[int, CheckpointError], object] | None = None) -> None:
        self._on_failure = on_failure
        self._waiting: deque[UnderWay] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failed: list[tuple[int, CheckpointError]] = []
        self._closed = False

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are under way, in order."""
        with self._changed:
            return tuple(one.step for one in self._waiting)

    def add(self, under_way: UnderWay) -> None:
        """Follows a save."""
        with self._changed:
            self._waiting.append(under_way)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="ray_dcp manager", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until nothing is under way; returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def failures(self) -> list[tuple[int, CheckpointError]]:
        """Returns the saves that failed since it was last called, with why."""
        with self._changed:
            failed, self._failed = self._failed, []
            return failed

    def close(self) -> None:
        """Ends the thread when nothing is under way any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                one = self._waiting[0]
            error = self._finish(one)
            with self._changed:
                if error is not None:
                    self._failed.append((one.step, error))
                self._waiting.popleft()
                self._changed.notify_all()

    def _finish(self, one: UnderWay) -> CheckpointError | None:
        error = _told([handle.exception() for handle in one.handles], one.step)
        try:
            if error is None:
                one.commit()
        except Exception as failed:  # noqa: BLE001 - told by join
            error = _told([failed], one.step)
        try:
            one.ended(error)
            if error is not None and self._on_failure is not None:
                self._on_failure(one.step, error)
        except Exception:
            logger.exception("After the end of the save of step %d", one.step)
        return error


def _told(errors: Sequence[BaseException | None], step: int) -> CheckpointError | None:
    """Returns the first error, as one of ours."""
    for error in errors:
        if isinstance(error, CheckpointError):
            error.step = step if error.step is None else error.step
            return error
        if error is not None:
            told = CheckpointError(
                f"the save of step {step} failed: {type(error).__name__}: {error}", step=step
            )
            told.__cause__ = error
            return told
    return None


@dataclass(frozen=True, kw_only=True)
class Telling:
    """What a caller says about a step that is saved; rank 0's counts."""

    metrics: Mapping[str, Any] | None = None
    metadata: Mapping[str, Any] | None = None
    tags: Collection[str] = ()
    replace: bool = False


@dataclass(frozen=True)
class _Begun:
    """A step that all ranks have agreed to save."""

    place: StepTarget
    target: Target
    """Its folder, reached as the root is."""
    attempt: str
    """That makes the step of its items."""


class CollectiveActions:
    """One rank's part in what the ranks of a manager do together.

    Args:
        root: Where.
        settings: Of the manager.
        writer: What rank 0 decides with; other ranks only look with it.
        preemption: Of this process.
        process_group: The ranks; the default group if None.
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
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
    ) -> None:
        self._root = root
        self._settings = settings
        self._writer = writer
        self._preemption = preemption
        self._group = process_group
        self._no_dist = no_dist
        self.finisher = Finisher(settings.on_failure)

    def session(self) -> RankSession:
        """Returns the session of this rank; the first time all ranks make it.

        Raises:
            CheckpointError: It can't be made.
        """
        return session_for(self._group, self._no_dist)

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
        options = self._settings.unnamed.save_options
        return agree(
            session or self.session(),
            f"{what} in {self._root.url}",
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
            InvalidRequestError: It is no step, or the manager only reads.
            CheckpointError: The ranks could not agree.
        """
        self._settings.names.name_of(step)
        policy = self._settings.policy
        if policy is None:
            return False
        alone = bool(policy.due(SaveFacts(step=step)))
        if asks_only_the_step(policy) or (step % self._settings.sync_every and not alone):
            return alone
        return bool(
            self.agree(
                f"whether step {step} is due",
                partial(self._decide_due, step),
                facts=self._preemption.is_told,
            )
        )

    def is_preempted(self, step: int) -> bool:
        """Tells whether some rank was told that its machine is taken away.

        Raises:
            CheckpointError: The ranks could not agree.
        """
        told = self.agree(f"preemption at step {step}", any, facts=self._preemption.is_told)
        if told:
            self._preemption.tell()
        return bool(told)

    def save(self, step: int, state_dict: Any, force: bool, telling: Telling) -> bool:
        """Saves a step; returns whether it was due.

        Raises:
            CheckpointError: As `CheckpointManager.save` does.
        """
        begun, states = self._begin(step, state_dict, force, telling)
        if begun is None:
            return False
        committed: bool | None = False
        try:
            for name, item in self._parts():
                save(states[name], **self._how(begun, name, item))
            self._commit(begun, None)
            committed = True
        except CommitUnknownError:
            committed = None
            raise
        finally:
            self._ended(begun, committed)
        return True

    def save_async(self, step: int, state_dict: Any, force: bool, telling: Telling) -> bool:
        """Saves a step in the background; returns whether it was due, once its bytes are copied.

        Raises:
            CheckpointError: As `CheckpointManager.save_async` does.
        """
        begun, states = self._begin(step, state_dict, force, telling)
        if begun is None:
            return False
        handles: list[SaveHandle] = []
        try:
            for name, item in self._parts():
                handles.append(async_save(states[name], **self._how(begun, name, item)))
        except BaseException:
            for handle in handles:
                handle.cancel()
            self._ended(begun, False)
            raise
        # Why now: calls are numbered in the order of the calls, which threads don't keep.
        key = self.session().next_key() if self._settings.items else None

        def ended(error: CheckpointError | None) -> None:
            unknown = isinstance(error, CommitUnknownError)
            self._ended(begun, None if unknown else error is None)

        self.finisher.add(
            UnderWay(step, handles, commit=partial(self._commit, begun, key), ended=ended)
        )
        return True

    def _begin(
        self, step: int, state_dict: Any, force: bool, telling: Telling
    ) -> tuple[_Begun | None, dict[str, Any]]:
        """Returns the step that is to be saved; None when it is not due."""
        self._settings.names.name_of(step)
        self._refuse_read_only()
        policy = self._settings.policy
        alone = force or (policy is not None and bool(policy.due(SaveFacts(step=step))))
        quick = policy is None or asks_only_the_step(policy) or step % self._settings.sync_every
        if quick and not alone:
            return None, {}
        if self._settings.order == "any" and step in self.finisher.steps:
            self.finisher.wait()
        session = self.session()
        states, error = attempt(
            lambda: state_of(self._settings.items, state_dict), "looking at the state", session.rank
        )
        left = threading.Event()
        try:
            decided = self.agree(
                f"saving step {step}",
                partial(self._decide_save, step, force, telling, left),
                facts=self._preemption.is_told,
                error=error,
                session=session,
            )
        except BaseException:
            left.set()
            self._writer.give_up(step)
            raise
        if decided is None:
            return None, {}
        name, last_slot, attempt_id = decided
        place = StepTarget(step, name, last_slot)
        return _Begun(place, self._root.below(name), attempt_id), states or {}

    def _decide_due(self, step: int, preempted: Sequence[bool]) -> bool:
        return self._writer.due(step, any(preempted))

    def _decide_save(
        self,
        step: int,
        force: bool,
        telling: Telling,
        left: threading.Event,
        preempted: Sequence[bool],
    ) -> tuple[str, int, str] | None:
        if not self._writer.due(step, any(preempted), force=force):
            return None
        place = self._writer.begin(
            step,
            preempted=any(preempted),
            replace=telling.replace,
            metrics=telling.metrics,
            metadata=telling.metadata,
            tags=[check_tag(tag) for tag in telling.tags],
            wanted=lambda: not left.is_set(),
        )
        return place.name, place.last_slot, new_attempt()

    def _parts(self) -> list[tuple[str, Item]]:
        return list(self._settings.items.items()) or [("", self._settings.unnamed)]

    def _how(self, begun: _Begun, name: str, item: Item) -> dict[str, Any]:
        target = begun.target
        return {
            "checkpoint_id": place_below(target, begun.place.folder_of(name)) if name else target,
            "planner": item.planner_for_save(),
            "process_group": self._group,
            "no_dist": self._no_dist,
            # Careful: what stands was looked at when the step was begun.
            "options": item.save_options,
        }

    def _commit(self, begun: _Begun, key: OpKey | None) -> None:
        """Makes the step of its items: by a checkpoint of its own, that rank 0 saves.

        Raises:
            CommitUnknownError: Nobody could say whether the step is committed.
            CheckpointError: It is not, and never will be.
        """
        if not self._settings.items:
            return

        def decide(_: Sequence[Any]) -> None:
            place = begun.place
            folders = {name: place.folder_of(name) for name in self._settings.items}
            alone = InlineSession("step", new_attempt=lambda: begun.attempt)
            run_save(
                decide_save(None, None, begun.target),
                alone,
                {"step": place.step, "items": folders},
                SaveOptions(),
                begun.target,
            )

        options = self._settings.unnamed.save_options
        # Why so long: where the items are committed is learned by one rank after the other.
        timeout_s = options.plan_timeout_s + options.commit_timeout_s
        what = f"the commit of step {begun.place.step}"
        try:
            self.agree(what, decide, key=key, timeout_s=timeout_s)
        except CheckpointError as error:
            self._settle(begun, error, what, timeout_s)

    def _settle(self, begun: _Begun, error: CheckpointError, what: str, timeout_s: float) -> None:
        """Returns if the storage says that the step is committed; else it never will be.

        Why: the commit may have happened before the ranks lost each other, or may still happen.
        """
        ended: Decision
        rank = self.session().rank
        try:
            ended = within(
                timeout_s,
                what,
                lambda: settle(begun.target, begun.attempt, reason=error.message, rank=rank),
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
                    f"{what} failed, and the storage did not say whether it happened: {error}; "
                    f"{why}. Ask ray_dcp.outcome({begun.target.url!r}, {begun.attempt!r}) later",
                    attempt=begun.attempt,
                    step=begun.place.step,
                ) from error

    def _ended(self, begun: _Begun, committed: bool | None) -> None:
        if self.session().rank != 0:
            return
        what = f"the end of step {begun.place.step}"
        try:
            within(
                self._settings.unnamed.save_options.commit_timeout_s,
                what,
                lambda: self._writer.finish(begun.place, committed),
            )
        except StorageError as error:
            logger.warning("%s: %s", what, error)

    def _refuse_read_only(self) -> None:
        if self._settings.read_only:
            raise InvalidRequestError(
                f"this manager of {self._root.url} is read_only; make one without it to save",
                key="read_only",
            )
