"""What rank 0 of a manager does for all: decides, prepares, notes commits, lets steps go.

No torch and no session: what the other ranks know comes in as facts, what is decided goes out as a
value. The saves themselves are in `manager`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ray_dcp.errors import CheckpointError, InvalidRequestError, StorageError
from ray_dcp.format.step_info import StepInfo, check_metadata
from ray_dcp.manager.catalogue import Catalogue, publish
from ray_dcp.manager.places import Root, check_tag
from ray_dcp.manager.processes import Holder
from ray_dcp.manager.reading import Deletions
from ray_dcp.manager.removal import Remover
from ray_dcp.manager.settings import Settings
from ray_dcp.manager.steps import Place, Steps
from ray_dcp.manager.writing import Right
from ray_dcp.protocol.messages import Target
from ray_dcp.protocol.retention import check_metrics
from ray_dcp.protocol.save_policy import SaveFacts
from ray_dcp.store.storage import Storage

__all__ = ["Writer"]

PUBLISH_EVERY = 64
"""Steps that the catalogue file may lack before it is written again."""

DRAIN_S = 60.0
"""How long a save waits for the removal of an older one of the same step, in seconds."""

Opener = Callable[[Target], Storage]
logger = logging.getLogger(__name__)


class Writer:
    """The writer of a root, or who may become it.

    Args:
        root: Where.
        settings: Of the manager.
        opener: What opens storages.
        clock: Seconds that only go forward, for policies.
        now: Seconds since 1970, for what is told about steps.
        threaded: Remove in a thread, and let others see that this process lives.
        holder: Who writes; this process by default.

    Attributes:
        steps: What is committed.
        remover: Removes what may go.
        lock: Guards `steps`.
    """

    def __init__(
        self,
        root: Root,
        settings: Settings,
        opener: Opener,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        threaded: bool = True,
        holder: Holder | None = None,
    ) -> None:
        self.root = root
        self.lock = threading.RLock()
        self.steps = Steps(root, settings.names, opener, settings.order)
        self._settings = settings
        self._opener = opener
        self._clock = clock
        self._now = now
        self._right = Right(
            root, opener, lease_s=settings.lease_s, holder=holder, beats=threaded
        )  # fmt: skip
        self._deletions = Deletions(root, opener, lease_s=settings.lease_s, holder=holder)
        self.remover = Remover(
            self.steps, self._right, self._deletions, self.lock, threaded=threaded
        )  # fmt: skip
        self._last_begun_s = clock()
        self._preemption_saved = False
        self._is_known = False
        self._unpublished = 0

    def look(self) -> Catalogue:
        """Returns what is committed, by a new look at the storage.

        Raises:
            StorageError: It can't be read.
        """
        with self.lock:
            found = self.steps.refresh()
            self._is_known = True
            return found

    def due(self, step: int, preempted: bool, *, force: bool = False) -> bool:
        """Tells whether a step is to be saved.

        Args:
            step: Which.
            preempted: Some rank was told that its machine is taken away.
            force: Save whatever the policy says.

        Raises:
            StorageError: The storage can't be read.
        """
        policy = self._settings.policy
        if force or policy is None:
            return force
        with self.lock:
            if not self._is_known:
                self.look()
            facts = SaveFacts(
                step=step,
                last_step=self.steps.newest,
                since_save_s=self._clock() - self._last_begun_s,
                preempted=preempted and not self._preemption_saved,
            )
            return bool(policy.due(facts))

    def begin(
        self,
        step: int,
        *,
        preempted: bool = False,
        replace: bool = False,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        tags: Collection[str] = (),
    ) -> Place:
        """Returns where a step is to be saved, after writing what is told about it.

        Args:
            step: Which.
            preempted: As for `due`.
            replace: It may take the place of one that is committed.
            metrics: Of the step, by name.
            metadata: The user's.
            tags: That it gets.

        Raises:
            InvalidRequestError: The step, a metric, the metadata or a tag can't be taken.
            CheckpointExistsError: Another process writes to this root.
            StorageError: The storage failed.
        """
        self._take_right()
        if self._settings.names.name_of(step) in self.steps.doomed:
            self.remover.drain(DRAIN_S)
        with self.lock:
            self.steps.check_step(step, replace=replace)
            info = StepInfo(
                step=step,
                created_s=float(self._now()),
                metrics=check_metrics(metrics, self._settings.retention),
                metadata=check_metadata(metadata),
            )
            tags = frozenset(check_tag(tag) for tag in tags)
            place = self.steps.place(step)
            if self._settings.items:
                folders = {name: place.folder_of(name) for name in self._settings.items}
                info = StepInfo(
                    step=step, created_s=info.created_s, metrics=info.metrics,
                    metadata=info.metadata, items=folders,
                )  # fmt: skip
            self.steps.prepare(place, info, tags)
            self.steps.pending.add(step)
            self._last_begun_s = self._clock()
            self._preemption_saved = self._preemption_saved or preempted
            return place

    def finish(self, place: Place, committed: bool | None) -> None:
        """Takes in how a save has ended, and lets go what is superfluous now.

        Args:
            place: Of the step.
            committed: None: nobody said; the storage is asked.
        """
        with self.lock:
            self.steps.pending.discard(place.step)
            if committed is False:
                # Why: if it was due for a preemption, the next step is.
                self._preemption_saved = False
                return
            try:
                if not self.steps.note(place):
                    return
                self._unpublished += 1
                if place.last_slot and self._settings.items:
                    self.steps.remove_replaced_items(place)
                self.retire(protected={place.step})
            except CheckpointError as error:
                # Why not raised: the step is saved. What was not done is done after the next one.
                self._is_known = False
                logger.warning("After the commit of step %d: %s", place.step, error)

    def retire(self, protected: Collection[int] = ()) -> None:
        """Decides which steps go, and has them removed.

        Args:
            protected: Steps that stay.

        Raises:
            StorageError: The storage failed.
        """
        with self.lock:
            for name in self.steps.superfluous(self._settings.retention, protected):
                self._let_go(name)
            if self._unpublished >= PUBLISH_EVERY:
                self._publish()

    def delete(self, step: int) -> None:
        """Deletes a step now; its folder keeps the record that says so.

        Raises:
            CheckpointNotFoundError: It is not committed.
            InvalidRequestError: It can't be deleted.
            CheckpointExistsError: Another process writes to this root.
            CheckpointError: Somebody reads the step.
            StorageError: The storage failed.
        """
        self._take_right()
        with self.lock:
            self.look()
            self._delete_now(step, self.steps.check_deletable(step))

    def rewind(self, step: int) -> tuple[int, ...]:
        """Deletes all steps after one, newest first; returns them.

        Raises:
            CheckpointError: As `delete` does; the steps that were not yet deleted stay.
        """
        self._take_right()
        gone = []
        with self.lock:
            self.look()
            for name in self.steps.newer_than(step):
                later = self.steps.names.step_of(name)
                if later is not None:
                    self._delete_now(later, name)
                    gone.append(later)
        return tuple(gone)

    def tag(self, step: int, tag: str, *, remove: bool = False) -> None:
        """Gives a tag to a step, or takes it away.

        Raises:
            CheckpointNotFoundError: The step is not committed.
            CheckpointExistsError: Another process writes to this root.
            StorageError: The storage failed.
        """
        check_tag(tag)
        self._take_right()
        with self.lock:
            self.steps.check_deletable(step)
            if remove:
                self.steps.untag(step, tag)
            else:
                self.steps.tag(step, tag)

    def close(self) -> None:
        """Gives the right back, so that others need not wait."""
        self.remover.close()
        try:
            if self._right.is_taken:
                with self.lock:
                    if self._unpublished:
                        self._publish()
                self._right.give_back()
        except CheckpointError as error:
            logger.info("The right to write to %s was not given back: %s", self.root.url, error)

    def _take_right(self) -> None:
        if self._settings.read_only:
            raise InvalidRequestError(
                f"this manager of {self.root.url} is read_only; make one without it to save, "
                f"delete or tag",
                key="read_only",
            )
        had_it = self._right.is_taken
        self._right.take(even_if_held=self._settings.takeover)
        with self.lock:
            if not had_it:
                self._deletions.forget_marks()
            if not had_it or not self._is_known:
                self._unpublished += self.look().num_read

    def _let_go(self, name: str) -> None:
        self.steps.doom(name)
        self.remover.remove(name)

    def _delete_now(self, step: int, name: str) -> None:
        if not self._deletions.begin(step):
            raise CheckpointError(
                f"step {step} of {self.root.url} is being read by another process; delete it "
                f"when that is over",
                step=step,
            )
        self.steps.remove(name, purge=False)
        self.steps.doom(name)
        self.steps.doomed.discard(name)
        self._deletions.end(step)

    def _publish(self) -> None:
        self._unpublished = 0
        try:
            publish(self.root, self.steps.catalogue, self._opener)
        except StorageError as error:
            logger.info("The catalogue of %s was not written: %s", self.root.url, error)
