"""`Writer`: what rank 0 of a manager does for all: decides, prepares, records commits, removes.

No torch and no session: takes facts of the other ranks, returns a decision as a value.
`collective_actions` makes the saves themselves.

`Remover` removes steps off the save path: in a thread, pass by pass, with retries. A failure ends
nothing: what could not be removed is tried again, at growing intervals, and the next writer finds
what is left when the process ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    InvalidRequestError,
    StorageError,
)
from ray_dcp.format.names import READING, check_tag
from ray_dcp.format.step_info import StepInfo, check_metadata
from ray_dcp.manager.catalogue import Catalogue, Root, StepFound, look_at_step, publish
from ray_dcp.manager.leases import LeaseHolder, Readers, WriterLease
from ray_dcp.manager.retention import check_metrics
from ray_dcp.manager.save_policy import SaveCosts, SaveFacts, asks_only_the_step
from ray_dcp.manager.settings import Settings
from ray_dcp.manager.steps import Deletions, Going, Steps, StepTarget

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 60.0
LEASED_RETRY_S = 5.0
"""How long to wait before a step that is read is tried again, in seconds."""
MOST_TRIES = 20
"""Passes in a row that may fail before the rest is left to the pass after the next save."""

Left = Mapping[str, CheckpointError | None]
logger = logging.getLogger(__name__)


class Remover:
    """Runs passes of removal, one at a time.

    Args:
        url: Of the root, for messages.
        remove: One pass; returns what could not be removed, see `Writer.remove_superfluous`.
        threaded: In a thread; else `drain` runs them.
    """

    def __init__(self, url: str, remove: Callable[[], Left], *, threaded: bool = True) -> None:
        self._url = url
        self._remove = remove
        self._threaded = threaded
        self._changed = threading.Condition()
        self._due_s: float | None = None
        self._tries = 0
        self._left: Left = {}
        self._thread: threading.Thread | None = None
        self._busy = False
        self._closed = False

    @property
    def failed(self) -> dict[str, CheckpointError]:
        """Folders that the last pass could not remove, by name, with why."""
        with self._changed:
            return {name: error for name, error in self._left.items() if error is not None}

    def wake(self) -> None:
        """Has a pass run soon."""
        with self._changed:
            self._due_s, self._tries = time.monotonic(), 0
            if self._threaded and self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._run, name="ray_dcp removal", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Waits until all that can be removed now is removed.

        What is read by somebody, and what has failed, is not waited for.

        Args:
            timeout_s: How long to wait, in seconds; for ever if None.

        Returns:
            Whether nothing is left that could be removed now.
        """
        if not self._threaded:
            while self._is_due():
                self._pass()
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy and not self._is_due(), timeout_s)

    def close(self) -> None:
        """Ends the thread after what it does now."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(LAST_RETRY_S)

    def _is_due(self) -> bool:
        return self._due_s is not None and self._due_s <= time.monotonic()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._is_due():
                    due_s = self._due_s
                    wait_s = None if due_s is None else max(0.0, due_s - time.monotonic())
                    self._changed.wait(wait_s)
                if self._closed:
                    return
            self._pass()

    def _pass(self) -> None:
        with self._changed:
            self._busy, self._due_s = True, None
        left: Left = {}
        try:
            left = self._remove()
        except (CheckpointExistsError, InvalidRequestError) as error:
            # Why no more: whoever lost the lease must not delete.
            logger.info("Nothing is removed from %s any more: %s", self._url, error)
        except CheckpointError as error:
            left = {"": error}
        finally:
            with self._changed:
                self._busy, self._left = False, left
                if left and self._due_s is None:
                    self._try_again(left)
                self._changed.notify_all()

    def _try_again(self, left: Left) -> None:
        failed = {name: error for name, error in left.items() if error is not None}
        if failed:
            self._tries += 1
        told = "; ".join(f"{name or 'all'}: {error}" for name, error in failed.items())
        if self._tries >= MOST_TRIES:
            logger.warning(
                "Steps of %s could not be deleted in %d tries and are left: %s. The next save "
                "tries again",
                self._url,
                self._tries,
                told,
            )
            return
        if self._tries == 1:
            logger.info("Deleting from %s is tried again: %s", self._url, told)
        wait_s = FIRST_RETRY_S * 2 ** (self._tries - 1) if failed else LEASED_RETRY_S
        self._due_s = time.monotonic() + min(LAST_RETRY_S, wait_s)


PUBLISH_EVERY = 8
"""Steps that the catalogue file may lack before it is written again: each costs whoever begins
after a crash two reads."""


class Writer:
    """The writer of a root, or who may become it.

    Args:
        root: Where.
        settings: Of the manager.
        clock: Seconds that only go forward, for policies.
        now: Seconds since 1970, for the info of steps.
        threaded: Remove in a thread, and let others see that this process lives.
        holder: Who writes; this process by default.

    Attributes:
        steps: What is committed.
        remover: Removes what may go.
        lock: Guards `steps`; nobody asks the storage anything while holding it.
    """

    def __init__(
        self,
        root: Root,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        threaded: bool = True,
        holder: LeaseHolder | None = None,
    ) -> None:
        self.root = root
        self.lock = threading.RLock()
        self.steps = Steps(root, settings.names, settings.order)
        self._settings = settings
        self._clock = clock
        self._now = now
        self._lease = WriterLease(root, lease_s=settings.lease_s, holder=holder, beats=threaded)
        readers = Readers(lease_s=settings.lease_s, holder=holder)
        self._deletions = Deletions(root, readers, self._lease.check, self._removed)
        self._begun: dict[int, tuple[StepInfo, frozenset[str]]] = {}
        """Infos of the steps that are being saved, and the tags that they got."""
        self.remover = Remover(root.url, self.remove_superfluous, threaded=threaded)
        self._made_s = self._last_begun_s = clock()
        self._costs = SaveCosts()
        self._durable_s = 0.0
        self._preemption_saved = False
        self._is_known = False
        self._unpublished = 0

    def look(self) -> Catalogue:
        """Returns what is committed, by a new look at the storage.

        Raises:
            StorageError: It can't be read.
        """
        before = self.steps.catalogue.steps
        return self._take_in(self.steps.look(), before)

    def _take_in(self, found: Catalogue, before: Mapping[int, StepFound]) -> Catalogue:
        """Makes a look the catalogue, with what this process saved since that began."""
        with self.lock:
            for step, one in self.steps.catalogue.steps.items():
                if before.get(step) != one:
                    found.add(one)
            self.steps.catalogue = found
            self._is_known = True
            return found

    def due(self, step: int, preempted: bool, *, force: bool = False) -> bool:
        """Tells whether a step is to be saved.

        Args:
            step: Which.
            preempted: Some rank was notified that its machine is taken away.
            force: Save whatever the policy decides.

        Raises:
            StorageError: The storage can't be read.
        """
        policy = self._settings.policy
        if force or policy is None:
            return force
        if not self._is_known and not asks_only_the_step(policy):
            self.look()
        with self.lock:
            self._costs.asked(step, self._clock(), saving=bool(self.steps.pending))
            return bool(policy.due(self.facts(step, preempted)))

    def facts(self, step: int, preempted: bool = False) -> SaveFacts:
        """Returns what a save policy may look at."""
        with self.lock:
            now_s = self._clock()
            return SaveFacts(
                step=step,
                last_step=self.steps.newest,
                since_save_s=now_s - self._last_begun_s,
                preempted=preempted and not self._preemption_saved,
                saving=bool(self.steps.pending) or self._costs.is_measuring,
                cost_s=self._costs.cost_s,
                durable_s=self._durable_s,
                failures=self._lease.failures,
                ran_s=self._lease.ran_s + now_s - self._made_s,
            )

    def begin(
        self,
        step: int,
        *,
        preempted: bool = False,
        replace: bool = False,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        tags: Collection[str] = (),
        wanted: Callable[[], bool] = lambda: True,
    ) -> StepTarget:
        """Returns where a step is to be saved, after writing its info.

        Args:
            step: Which.
            preempted: As for `due`.
            replace: It may take the place of one that is committed.
            metrics: Of the step, by name.
            metadata: The user's.
            tags: That it gets.
            wanted: Whether somebody still waits for the answer.

        Raises:
            InvalidRequestError: The step, a metric, the metadata or a tag can't be taken.
            CheckpointExistsError: Another process writes to this root.
            StorageError: The storage failed.
        """
        self._take_lease()
        metrics = check_metrics(metrics, self._settings.kept)
        metadata = check_metadata(metadata)
        tags = frozenset(check_tag(tag) for tag in tags)
        with self.lock:
            self.steps.check_step(step, replace=replace)
            if not wanted():
                raise StorageError(
                    f"the storage of {self.root.url} answered too late to save step {step}",
                    step=step,
                )
            self.steps.pending.add(step)
            is_leaving = self._settings.names.name_of(step) in self.steps.leaving
        try:
            if is_leaving:
                self.root.fence(f"step {step} is saved again", step)
            place = self.steps.place(step)
            info = StepInfo(
                step=step,
                created_s=float(self._now()),
                metrics=metrics,
                metadata=metadata,
                items={name: place.folder_of(name) for name in self._settings.named},
            )
            added = self.steps.prepare(place, info, tags)
        except BaseException:
            self.give_up(step)
            raise
        with self.lock:
            self._begun[step] = info, added
            self._last_begun_s = self._clock()
            self._costs.began()
            self._preemption_saved = self._preemption_saved or preempted
            return place

    def give_up(self, step: int) -> None:
        """Notes that no save of a step is under way."""
        with self.lock:
            self.steps.pending.discard(step)

    def finish(self, place: StepTarget, committed: bool | None) -> None:
        """Takes in how a save has ended, and lets go what is superfluous now.

        Args:
            place: Of the step.
            committed: None: not reported; the storage is asked.
        """
        self.give_up(place.step)
        with self.lock:
            info, added = self._begun.pop(place.step, (None, frozenset()))
            if committed:
                self._durable_s = self._clock() - self._last_begun_s
            # Why: if it was due for a preemption, the next step is.
            self._preemption_saved = self._preemption_saved and committed is not False
        try:
            if committed is False:
                if added:
                    # Why: whoever took the lease may have saved the step, and tagged it, since.
                    self._lease.check()
                for tag in sorted(added):
                    self.steps.untag(place.step, tag)
                return
            found = look_at_step(self.root, place.name, place.step)
            if found is None:
                return
            if found.slot and found.info is None and info is not None:
                # Why: who takes over a run removes the info of a step before its commit.
                found = self.steps.rewrite_info(found, info)
            with self.lock:
                self.steps.note(found)
                self._unpublished += 1
                policy = self._settings.kept
                is_full = bool(self.steps.superfluous(self.steps.catalogue, policy))
            if is_full:
                self.remover.wake()
            if place.last_slot and self._settings.named:
                self.steps.remove_replaced_items(place)
            if self._unpublished >= PUBLISH_EVERY:
                self._publish()
        except CheckpointError as error:
            # Why not raised: the step is saved. What was not done is done after the next one.
            self._is_known = False
            logger.warning("After the save of step %d: %s", place.step, error)

    def remove_superfluous(self) -> dict[str, CheckpointError | None]:
        """Removes the steps that retention gives up, and what crashes left.

        Returns:
            As `Deletions.remove_all`.

        Raises:
            CheckpointExistsError: Another process has the writer lease.
            InvalidRequestError: This one has given it back, or the policy gives no usable answer.
            StorageError: The storage failed.
        """
        left: dict[str, CheckpointError | None] = {}
        tried: set[Going] = set()
        try:
            while chosen := self._choose(tried):
                tried |= {*chosen}
                left |= self._deletions.remove_all(chosen, self._look_again)
        finally:
            with self.lock:
                self.steps.leaving = frozenset()
        return left

    def _choose(self, tried: Collection[Going]) -> list[Going]:
        """Returns what may go as far as is known."""
        with self.lock:
            found = self.steps.superfluous(self.steps.catalogue, self._settings.kept)
            chosen = [one for one in found if one not in tried]
            self.steps.leaving = frozenset(one.name for one in chosen)
            return chosen

    def _look_again(self) -> tuple[set[Going], Catalogue]:
        before = self.steps.catalogue.steps
        found = self.steps.look()
        with self.lock:
            still = {*self.steps.superfluous(found, self._settings.kept)}
        return still, self._take_in(found, before)

    def _removed(self, going: Going) -> None:
        with self.lock:
            self.steps.forget(going)

    def delete(self, step: int) -> None:
        """Deletes a step now; its folder keeps the delete record.

        Raises:
            CheckpointNotFoundError: It is not committed.
            InvalidRequestError: It can't be deleted.
            CheckpointExistsError: Another process writes to this root.
            CheckpointError: Somebody reads the step.
            StorageError: The storage failed.
        """
        self._take_lease()
        self.look()
        self._delete_now(self.steps.check_deletable(step))

    def rewind(self, step: int) -> tuple[int, ...]:
        """Deletes all steps after one, newest first; returns them.

        Raises:
            CheckpointError: As `delete` does; the steps that were not yet deleted stay.
        """
        self._take_lease()
        self.look()
        gone = []
        for later in self.steps.newer_than(step):
            self._delete_now(later)
            gone.append(later.step)
        return tuple(gone)

    def tag(self, step: int, tag: str, *, remove: bool = False) -> None:
        """Gives a tag to a step, or takes it away.

        Raises:
            CheckpointNotFoundError: The step is not committed.
            CheckpointExistsError: Another process writes to this root.
            StorageError: The storage failed.
        """
        check_tag(tag)
        self._take_lease()
        self.look()
        self.steps.check_deletable(step)
        if remove:
            self.steps.untag(step, tag)
            return
        self.steps.tag(step, tag)
        self.root.fence(f"step {step} was given the tag {tag!r}", step)
        self.look()
        try:
            self.steps.check_deletable(step)
        except CheckpointError:
            self.steps.untag(step, tag)  # it was deleted meanwhile
            raise

    def close(self) -> None:
        """Gives the lease back, so that others need not wait."""
        self.remover.close()
        try:
            if self._lease.is_taken:
                if self._unpublished:
                    self._publish()
                self._lease.give_back()
        except CheckpointError as error:
            logger.info("The writer lease of %s was not given back: %s", self.root.url, error)

    def _take_lease(self) -> None:
        had_it = self._lease.is_taken
        self._lease.take(
            even_if_held=self._settings.takeover,
            now_s=self._now(),
            last_s=max((one.created_s for one in self.steps.catalogue.steps.values()), default=0.0),
        )
        if not had_it:
            self.root.fence("another process writes to the run", None)
        if not had_it or not self._is_known:
            self._unpublished += self.look().num_read

    def _publish(self) -> None:
        self._unpublished = 0
        try:
            publish(self.root, self.steps.catalogue)
        except StorageError as error:
            logger.info("The catalogue of %s was not written: %s", self.root.url, error)

    def _delete_now(self, going: Going) -> None:
        mark = self._deletions.announce(going)
        leases = [entry.key for entry in self.root.shared.list(f"{READING}{going.step}.")]
        if self._deletions.is_read(leases):
            self._deletions.withdraw(mark)
            raise CheckpointError(
                f"step {going.step} of {self.root.url} is being read by another process; delete "
                f"it when that is over",
                step=going.step,
            )
        tags = self.steps.tags_of(going.step)
        self._deletions.remove(going, mark)
        self._lease.check()
        for tag in sorted(tags):
            self.steps.untag(going.step, tag)
        # Why: a removal may have been decided because this step was committed.
        self.root.fence(f"step {going.step} was deleted", None)
