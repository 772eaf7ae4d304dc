"""What the ranks of a manager do together: agree whether to save, save, commit.

Every method is called by all ranks, in the same order. Restores are in `loading_steps`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from ray_dcp.entrypoints import async_save, save
from ray_dcp.errors import (
    CheckpointError,
    CommitUnknownError,
    InvalidRequestError,
    StorageError,
)
from ray_dcp.handle import SaveHandle
from ray_dcp.manager.agreeing import agree, within
from ray_dcp.manager.finishing import Finisher, UnderWay
from ray_dcp.manager.places import Root, check_tag
from ray_dcp.manager.preemption import Preemption
from ray_dcp.manager.settings import Item, Settings, state_of
from ray_dcp.manager.steps import Place
from ray_dcp.manager.writer import Writer
from ray_dcp.operations import RankSession, run_save, session_for
from ray_dcp.options import SaveOptions
from ray_dcp.protocol.messages import OpKey, Target
from ray_dcp.protocol.save_policy import SaveFacts, asks_only_the_step
from ray_dcp.protocol.vote import Decision, Fenced, Lost, Open, Won
from ray_dcp.runtime.inline import InlineSession
from ray_dcp.runtime.outcome import settle
from ray_dcp.runtime.perform import new_attempt
from ray_dcp.runtime.telling import attempt
from ray_dcp.seam.paths import decide_save
from ray_dcp.store.opening import place_below

__all__ = ["Telling", "Together"]

logger = logging.getLogger(__name__)


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

    place: Place
    target: Target
    """Its folder, reached as the root is."""
    attempt: str
    """That makes the step of its items."""


class Together:
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
        """Returns what rank 0 decides; see `agreeing.agree`."""
        options = self._settings.unnamed.save_options
        return agree(
            session or self.session(), f"{what} in {self._root.url}", facts, decide,
            timeout_s=options.plan_timeout_s if timeout_s is None else timeout_s,
            heartbeat_s=options.heartbeat_timeout_s, error=error, key=key,
        )  # fmt: skip

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
        return bool(self.agree(
            f"whether step {step} is due", partial(self._decide_due, step),
            facts=self._preemption.is_told,
        ))  # fmt: skip

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
                f"saving step {step}", partial(self._decide_save, step, force, telling, left),
                facts=self._preemption.is_told, error=error, session=session,
            )  # fmt: skip
        except BaseException:
            left.set()
            self._writer.give_up(step)
            raise
        if decided is None:
            return None, {}
        name, last_slot, attempt_id = decided
        place = Place(step, name, last_slot)
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
            step, preempted=any(preempted), replace=telling.replace, metrics=telling.metrics,
            metadata=telling.metadata, tags=[check_tag(tag) for tag in telling.tags],
            wanted=lambda: not left.is_set(),
        )  # fmt: skip
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
                decide_save(None, None, begun.target), alone,
                {"step": place.step, "items": folders}, SaveOptions(), begun.target,
            )  # fmt: skip

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
                timeout_s, what,
                lambda: settle(begun.target, begun.attempt, reason=error.message, rank=rank),
            )  # fmt: skip
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
                self._settings.unnamed.save_options.commit_timeout_s, what,
                lambda: self._writer.finish(begun.place, committed),
            )  # fmt: skip
        except StorageError as error:
            logger.warning("%s: %s", what, error)

    def _refuse_read_only(self) -> None:
        if self._settings.read_only:
            raise InvalidRequestError(
                f"this manager of {self._root.url} is read_only; make one without it to save",
                key="read_only",
            )
