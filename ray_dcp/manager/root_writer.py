"""`Writer`: decides, prepares, records and deletes on rank 0 of a manager, for all ranks.

Runs without torch and without a session: it receives the facts of other ranks, and returns
decisions as values. `collective_actions` makes the saves.

`Remover` deletes steps in a thread beside the saves, in passes. After a failure it tries again, at
increasing intervals. If the process ends first, the next writer finds the remaining files.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from ray_dcp.core.processes import start_thread
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidRequestError,
    LimitError,
    StorageError,
)
from ray_dcp.format.names import READING, TAGS, check_tag, tag_key, tags_in
from ray_dcp.format.step_info import StepInfo, check_metadata, encode_info, info_key
from ray_dcp.io.records import used_slots
from ray_dcp.manager.catalogue import (
    Catalogue,
    Root,
    StepFound,
    look,
    look_at_step,
    write_catalogue,
)
from ray_dcp.manager.leases import LeaseHolder, Readers, WriterLease
from ray_dcp.manager.retention import StepFacts, check_metrics, rankings, superfluous
from ray_dcp.manager.save_policy import SaveCosts, SaveFacts, asks_only_the_step
from ray_dcp.manager.settings import Settings
from ray_dcp.manager.steps import (
    Deletions,
    Going,
    StepTarget,
    free_number,
    going,
    remove_failed,
    remove_replaced_items,
)

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 60.0
LEASED_RETRY_S = 5.0
"""Pause before a step that was being read is tried again, in seconds."""
MOST_TRIES = 20
"""Consecutive failed passes after which the rest is left to the pass after the next save."""

NotDeleted = Mapping[str, CheckpointError | None]
"""Folders that were not deleted, by name, with the error; None if the step is being read."""
logger = logging.getLogger(__name__)


class Remover:
    """Runs deletion passes, one at a time.

    Args:
        url: Path or URL of the root, for messages.
        remove: Runs one pass; returns what was not deleted.
        threaded: Whether a thread runs the passes; otherwise `drain` does.
    """

    def __init__(
        self, url: str, remove: Callable[[], NotDeleted], *, threaded: bool = True
    ) -> None:
        self._url = url
        self._remove = remove
        self._threaded = threaded
        self._changed = threading.Condition()
        self._due_s: float | None = None
        self._tries = 0
        self._thread: threading.Thread | None = None
        self._busy = False
        self._closed = False

    def wake(self) -> None:
        """Requests a pass."""
        with self._changed:
            self._due_s, self._tries = time.monotonic(), 0
            if self._threaded and self._thread is None and not self._closed:
                # Suppressed: without a thread, `drain` or the request of the next save runs it.
                with suppress(LimitError):
                    self._thread = start_thread(self._run, "ray_dcp removal")
            self._changed.notify_all()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Waits until everything that can be deleted now is deleted.

        Does not wait for steps that are being read, nor for further tries of failed deletions.

        Args:
            timeout_s: Timeout, in seconds; None waits forever.

        Returns:
            False if the timeout expired.
        """
        if self._thread is None:
            while self._is_due():
                self._pass()
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy and not self._is_due(), timeout_s)

    def close(self, timeout_s: float = LAST_RETRY_S) -> None:
        """Stops the thread after the current pass, for which it waits up to a timeout."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

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
        left: NotDeleted = {}
        try:
            left = self._remove()
        except (CheckpointExistsError, InvalidRequestError) as error:
            # Why no retry: a process that lost the lease must not delete.
            logger.info("Nothing is removed from %s any more: %s", self._url, error)
        except CheckpointError as error:
            left = {"": error}
        finally:
            with self._changed:
                self._busy = False
                if left and self._due_s is None:
                    self._try_again(left)
                self._changed.notify_all()

    def _try_again(self, left: NotDeleted) -> None:
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
"""Number of new steps after which the catalogue file is written again. *Why*: each step that it
lacks costs the process that starts after a crash two reads."""


class Writer:
    """The writer of a root, or a process that may become it.

    Args:
        root: The root.
        settings: Settings of the manager.
        clock: Monotonic clock for policies, in seconds.
        now: Time of infos, in seconds since the epoch.
        threaded: Whether a thread deletes steps, and another one renews the lease.
        holder: Identity of the writer; this process by default.
        before_removal: Called before each deletion pass, without the lock; returns folders that
            must be looked at again soon, as `NotDeleted` does.
        after_commit: Called with each step that is committed, before others are deleted.

    Attributes:
        catalogue: Result of the last scan. It answers queries, and decides no deletion.
        pending: Steps that are being saved.
        damaged: Steps that could not be loaded. They don't count for retention, are not deleted,
            and may be saved again.
        remover: Deletes superfluous steps.
        lock: Guards these attributes. Not held during storage operations.
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
        before_removal: Callable[[], NotDeleted] = dict,
        after_commit: Callable[[int], object] = lambda step: None,
    ) -> None:
        self.root = root
        self.lock = threading.RLock()
        self.catalogue = Catalogue()
        self.pending: set[int] = set()
        self.damaged: set[int] = set()
        self._leaving: frozenset[str] = frozenset()
        """Folders about whose deletion a pass is deciding."""
        self._saved_last: int | None = None
        """The step that this process committed last, which is kept."""
        self._settings = settings
        self._clock = clock
        self._now = now
        self._lease = WriterLease(root, lease_s=settings.lease_s, holder=holder, beats=threaded)
        readers = Readers(lease_s=settings.lease_s, holder=holder)
        self._deletions = Deletions(root, readers, self._lease.check, self._removed)
        self._had_no_room: StepTarget | None = None
        """A save that failed because the disk was full."""
        self._next: StepFacts | None = None
        """The step for which `make_room` makes room."""
        self._begun: dict[int, tuple[StepInfo, frozenset[str]]] = {}
        """Infos of the steps that are being saved, and the tags that were added."""
        self._before_removal = before_removal
        self._after_commit = after_commit
        self.remover = Remover(root.url, self.remove_superfluous, threaded=threaded)
        self._made_s = self._last_begun_s = clock()
        self._costs = SaveCosts()
        self._durable_s = 0.0
        self._preemption_saved = False
        self._is_known = self._is_fenced = False
        self._unpublished = 0

    def look(self) -> Catalogue:
        """Scans the storage, and returns what is committed.

        Raises:
            StorageError: The storage can't be read.
        """
        before = self.catalogue.steps
        return self._take_in(self._looked(), before)

    def _looked(self) -> Catalogue:
        """Scans the storage without changing the state of this writer."""
        known = self.catalogue
        return look(self.root, self._settings.names, known if known.steps else None)

    def _take_in(self, found: Catalogue, before: Mapping[int, StepFound]) -> Catalogue:
        """Makes a scan the catalogue, after adding what this process saved since its start."""
        with self.lock:
            for step, one in self.catalogue.steps.items():
                if before.get(step) != one:
                    found.add(one)
            self.catalogue = found
            self._is_known = True
            return found

    @property
    def newest(self) -> int | None:
        """The newest step that can be loaded or is being saved; None if there is none."""
        return max({*(self.catalogue.steps.keys() - self.damaged), *self.pending}, default=None)

    def due(self, step: int, preempted: bool, *, force: bool = False) -> bool:
        """Returns whether a step is due.

        Args:
            step: The step.
            preempted: Whether a rank was notified that its machine is being taken away.
            force: Whether the step is due whatever the policy decides.

        Raises:
            StorageError: The storage can't be read.
        """
        policy = self._settings.policy
        if force or policy is None:
            return force
        if not self._is_known and not asks_only_the_step(policy):
            self.look()
        with self.lock:
            self._costs.asked(step, self._clock(), saving=bool(self.pending))
            return bool(policy.due(self.facts(step, preempted)))

    def facts(self, step: int, preempted: bool = False) -> SaveFacts:
        """Returns the facts by which a save policy decides."""
        with self.lock:
            now_s = self._clock()
            return SaveFacts(
                step=step,
                last_step=self.newest,
                since_save_s=now_s - self._last_begun_s,
                preempted=preempted and not self._preemption_saved,
                saving=bool(self.pending) or self._costs.is_measuring,
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
        """Starts the save of a step: writes its info and tags, and returns its place.

        Args:
            step: The step.
            preempted: As for `due`.
            replace: Whether the step may replace a committed one.
            metrics: Metrics of the step, by name.
            metadata: The user's metadata.
            tags: Tags to add.
            wanted: Whether the caller still waits for the result.

        Raises:
            InvalidRequestError: The step, a metric, the metadata or a tag is invalid.
            CheckpointExistsError: Another process writes to this root.
            StorageError: The storage failed.
        """
        self.take_lease()
        metrics = check_metrics(metrics, self._settings.kept)
        metadata = check_metadata(metadata)
        tags = frozenset(check_tag(tag) for tag in tags)
        if self._had_no_room is not None:
            with self.lock:
                self._check_step(step, replace=replace)  # A refused call must not delete.
            self.make_room(step, metrics)
        with self.lock:
            self._check_step(step, replace=replace)
            if not wanted():
                raise StorageError(
                    f"the storage of {self.root.url} answered too late to save step {step}",
                    step=step,
                )
            self.pending.add(step)
            is_leaving = self._settings.names.name_of(step) in self._leaving
        try:
            if is_leaving:
                self.root.fence(f"step {step} is saved again", step)
            name = self._settings.names.name_of(step)
            storage = self.root.open(name)
            last = max(used_slots(storage), default=0)
            place = StepTarget(step, name, last, free_number(storage, last))
            info = StepInfo(
                step=step,
                created_s=float(self._now()),
                metrics=metrics,
                metadata=metadata,
                items={name: place.folder_of(name) for name in self._settings.named},
            )
            storage.write(info_key(last), encode_info(info))
            # Why only these: a failed save removes the tags that it added, and no others.
            added = tags - self._tags_of(step) if last else tags
            for tag in sorted(added):
                self.root.shared.write(tag_key(step, tag), b"")
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
        """Records that a step is not being saved any more."""
        with self.lock:
            self.pending.discard(step)

    def finish(self, place: StepTarget, committed: bool | None, *, no_space: bool = False) -> None:
        """Records the outcome of a save, and requests the deletion of superfluous steps.

        Args:
            place: Place of the step.
            committed: Whether the step is committed; None if the storage has to be read.
            no_space: Whether the save failed for lack of space, so that the next one makes room.
        """
        self.give_up(place.step)
        with self.lock:
            if no_space:
                self._had_no_room = place
            info, added = self._begun.pop(place.step, (None, frozenset()))
            if committed:
                self._durable_s = self._clock() - self._last_begun_s
            # Why: if the step was due because of a preemption, the next step is due now.
            self._preemption_saved = self._preemption_saved and committed is not False
        try:
            if committed is False:
                if added:
                    # Why: a process that took the lease may have saved and tagged the step since.
                    self._lease.check()
                self._untag(place.step, added)
                return
            found = look_at_step(self.root, place.name, place.step)
            if found is None:
                return
            if found.slot and found.info is None and info is not None:
                # Why: a process that takes over a run removes infos of uncommitted steps.
                key = info_key(found.slot - 1)
                self.root.open(found.name).write(key, encode_info(info))
                found = dataclasses.replace(
                    found, created_s=info.created_s, info=info, is_known=True
                )
            with self.lock:
                self.catalogue.add(found)
                self.damaged.discard(found.step)
                self._saved_last = found.step
                self._unpublished += 1
                is_full = bool(self._superfluous(self.catalogue))
            self._after_commit(found.step)
            if is_full or self._waits_for_metrics:
                self.remover.wake()
            if place.last_slot and found.info is not None and self._settings.named:
                remove_replaced_items(self.root, place, found.info)
            if self._unpublished >= PUBLISH_EVERY:
                self._publish()
        except Exception as error:  # noqa: BLE001 - a policy of the user's may raise anything
            # Why not raised: the step is committed. The rest is done after the next save.
            self._is_known = False
            logger.warning("After the save of step %d: %s", place.step, error)

    def remove_superfluous(self) -> dict[str, CheckpointError | None]:
        """Deletes superfluous steps, and the leftovers of crashes.

        Returns:
            What was not deleted.

        Raises:
            CheckpointExistsError: Another process has taken the writer lease.
            InvalidRequestError: This process has released it, or the policy returned an invalid
                answer.
            StorageError: The storage failed.
        """
        left = {**self._before_removal()}
        tried: set[Going] = set()
        if self._waits_for_metrics:
            self.look()
        try:
            while chosen := self._choose(tried):
                tried |= {*chosen}
                left |= self._deletions.remove_all(chosen, self._look_again)
        finally:
            with self.lock:
                self._leaving = frozenset()
        return left

    @property
    def _waits_for_metrics(self) -> bool:
        """Whether other processes record metrics by which steps are kept."""
        return any(ranking.later for ranking in rankings(self._settings.kept))

    def make_room(self, step: int, metrics: Mapping[str, Any] | None) -> bool:
        """Deletes, before a save, what retention would delete after it, and a save without space.

        The newest loadable step is kept until the new one is committed. So is a step that the new
        one would displace only by a metric, because the save may fail again.

        Args:
            step: The step to save.
            metrics: Its metrics.

        Returns:
            Whether a step was deleted.

        Raises:
            InvalidRequestError: A metric is invalid.
        """
        metrics = check_metrics(metrics, self._settings.kept)
        failed, self._had_no_room = self._had_no_room, None
        before = {*self.catalogue.steps}
        with self.lock:
            self._next = StepFacts(step=step, created_s=float(self._now()), metrics=metrics)
        try:
            self._lease.check()
            if failed is not None and failed.step not in self.pending:
                remove_failed(self.root, failed, self._settings.named)
            self.remove_superfluous()
        except CheckpointError as error:
            logger.warning("No room is made for step %d: %s", step, error)
        finally:
            with self.lock:
                self._next = None
        return not before <= {*self.catalogue.steps}

    def _choose(self, tried: Collection[Going]) -> list[Going]:
        """Returns the folders that may be deleted, as far as known."""
        with self.lock:
            chosen = [one for one in self._superfluous(self.catalogue) if one not in tried]
            self._leaving = frozenset(one.name for one in chosen)
            return chosen

    def _look_again(self) -> tuple[Collection[Going], Catalogue]:
        before = self.catalogue.steps
        found = self._looked()
        with self.lock:
            # Careful: decided by the scan alone, before anything remembered is added to it.
            still = self._superfluous(found)
        return still, self._take_in(found, before)

    def _superfluous(self, catalogue: Catalogue) -> tuple[Going, ...]:
        """Returns the folders that may be deleted: steps by the policy, and leftovers of crashes.

        Only folders of steps older than the newest loadable one are included. Steps that could not
        be loaded are neither counted nor included, because a failed read does not prove damage.

        Raises:
            InvalidRequestError: The policy returned an invalid answer.
        """
        policy = self._settings.kept
        if policy is None and not catalogue.leftovers:
            return ()
        facts = [one for one in catalogue.facts() if one.step not in self.damaged]
        unknown = [one for one in catalogue.facts(known=False) if one.step not in self.damaged]
        if not facts:
            return ()
        newest = max(one.step for one in facts)
        protected = {*self.pending, newest if self._saved_last is None else self._saved_last}
        goes = {*superfluous(facts, policy, protected=protected, unknown=unknown)}
        if self._next is not None and self._next.step not in catalogue.steps:
            protected |= {newest, self._next.step}
            both = (self._next, dataclasses.replace(self._next, metrics={}))
            goes |= set.intersection(
                *(
                    {*superfluous([*facts, one], policy, protected=protected, unknown=unknown)}
                    for one in both
                )
            )
        left = (
            Going(step, name, "")
            for name, step in catalogue.leftovers.items()
            if step < newest and step not in self.pending
        )
        return (*(going(catalogue.steps[step]) for step in sorted(goes)), *left)

    def _removed(self, going: Going) -> None:
        """Removes a deleted step from the catalogue, unless it was saved again."""
        with self.lock:
            self.catalogue.leftovers.pop(going.name, None)
            known = self.catalogue.steps.get(going.step)
            if known is not None and (known.name, known.attempt) == (going.name, going.attempt):
                del self.catalogue.steps[going.step]
                self.damaged.discard(going.step)

    def delete(self, step: int) -> None:
        """Deletes a step; its folder keeps the delete record.

        Raises:
            CheckpointNotFoundError: The step is not committed.
            InvalidRequestError: The step is being saved, or another program wrote it.
            CheckpointExistsError: Another process writes to this root.
            CheckpointError: The step is being read.
            StorageError: The storage failed.
        """
        self._look_as_writer()
        self._delete_now(self._check_deletable(step))

    def rewind(self, step: int) -> tuple[int, ...]:
        """Deletes all later steps, newest first, and returns them.

        Raises:
            CheckpointError: As `delete`; steps that were not yet deleted remain.
        """
        self._look_as_writer()
        later = [self._check_deletable(one) for one in self.catalogue.steps if one > step]
        for one in reversed(later):
            self._delete_now(one)
        return tuple(one.step for one in reversed(later))

    def tag(self, step: int, tag: str, *, remove: bool = False) -> None:
        """Adds a tag to a step, or removes it.

        Raises:
            CheckpointNotFoundError: The step is not committed.
            CheckpointExistsError: Another process writes to this root.
            StorageError: The storage failed.
        """
        check_tag(tag, existing=remove)
        self._look_as_writer()
        self._check_deletable(step)
        if remove:
            self._untag(step, [tag])
            return
        self.root.shared.write(tag_key(step, tag), b"")
        unsure = self.root.fence(f"step {step} was given the tag {tag!r}", step)
        self.look()
        try:
            self._check_deletable(step)
        except CheckpointError:
            self._untag(step, [tag])  # The step was deleted meanwhile.
            raise
        if unsure:
            warnings.warn(unsure, UserWarning, stacklevel=2)

    def close(self, timeout_s: float = LAST_RETRY_S) -> None:
        """Releases the lease, after waiting up to a timeout for the current deletion pass."""
        self.remover.close(timeout_s)
        try:
            if self._lease.is_taken:
                if self._unpublished:
                    self._publish()
                self._lease.give_back()
        except CheckpointError as error:
            logger.info("The writer lease of %s was not given back: %s", self.root.url, error)

    def take_lease(self) -> None:
        """Acquires the writer lease, or checks it, and aborts deletions of an earlier writer.

        Raises:
            CheckpointExistsError: Another process writes to this root.
            StorageError: The storage failed.
        """
        had_it = self._lease.is_taken
        self._lease.take(
            even_if_held=self._settings.takeover,
            now_s=self._now(),
            last_s=max((one.created_s for one in self.catalogue.steps.values()), default=0.0),
        )
        self._is_fenced &= had_it
        if not self._is_fenced:
            unsure = self.root.fence("another process writes to the run", None)
            self._is_fenced = True
            if unsure:
                logger.warning("%s", unsure)
        if not had_it or not self._is_known:
            self._unpublished += self.look().num_read

    def _look_as_writer(self) -> None:
        self.take_lease()
        self.look()

    def _publish(self) -> None:
        self._unpublished = 0
        try:
            write_catalogue(self.root, self.catalogue)
        except StorageError as error:
            logger.info("The catalogue of %s was not written: %s", self.root.url, error)

    def _check_step(self, step: int, *, replace: bool) -> None:
        """Checks that a step may be saved now.

        Args:
            step: The step.
            replace: Whether it may replace a committed one.

        Raises:
            InvalidRequestError: The step is being saved or committed already, or is older than the
                newest one.
        """
        if step in self.pending:
            raise InvalidRequestError(
                f"step {step} is being saved already; wait for it with join() before it is saved "
                f"again",
                step=step,
            )
        order = self._settings.order
        if step in self.damaged:
            return
        if step in self.catalogue.steps:
            if replace or order == "any":
                return
            name = self._settings.names.name_of(step)
            raise InvalidRequestError(
                f"step {step} is committed already in {self.root.url}/{name}. Save the next step; "
                f"or give replace=True to save over it, atomically; or delete({step}) first",
                step=step,
            )
        newest = self.newest
        if order == "increasing" and newest is not None and step < newest:
            raise InvalidRequestError(
                f"step {step} is older than the newest one in {self.root.url}, {newest}; steps go "
                f"up. To go on from an earlier step, rewind({max(step - 1, 0)}) deletes those "
                f"after it; another run takes another root",
                step=step,
            )

    def _check_deletable(self, step: int) -> Going:
        """Returns a step after checking that it can be deleted.

        Raises:
            CheckpointNotFoundError: The step is not committed.
            InvalidRequestError: The step is being saved, or another program wrote it.
        """
        if step in self.pending:
            raise InvalidRequestError(
                f"step {step} is being saved; join() first, then delete it", step=step
            )
        found = self.catalogue.steps.get(step)
        if found is None:
            raise CheckpointNotFoundError(
                f"expected step {step} in {self.root.url}, found "
                f"{', '.join(map(str, list(self.catalogue.steps)[-8:])) or 'no step'}",
                step=step,
            )
        if not found.is_ours:
            raise InvalidRequestError(
                f"step {step} was written by another program into {found.name}; ray_dcp does not "
                f"delete it. Remove the directory yourself to delete it",
                step=step,
            )
        return going(found)

    def _tags_of(self, step: int) -> frozenset[str]:
        """Reads the tags of a step from storage."""
        keys = (entry.key for entry in self.root.shared.list(f"{TAGS}{step}."))
        return tags_in(keys).get(step, frozenset())

    def _untag(self, step: int, tags: Iterable[str]) -> None:
        self.root.shared.delete([tag_key(step, tag) for tag in sorted(tags)])

    def _delete_now(self, going: Going) -> None:
        step, tags = going.step, frozenset[str]()

        def look_at_marks() -> tuple[Collection[Going], Catalogue]:
            nonlocal tags
            leases = self.root.shared.list(f"{READING}{step}.")
            tags = self._tags_of(step)
            return [going], Catalogue(read_by={step: tuple(entry.key for entry in leases)})

        left = self._deletions.remove_all([going], look_at_marks)
        if going.name in left:
            raise left[going.name] or CheckpointError(
                f"step {step} of {self.root.url} is being read by another process; delete it when "
                f"that is over",
                step=step,
            )
        self._lease.check()
        self._untag(step, tags)
        # Why: another deletion may have been decided because this step was committed.
        self.root.fence(f"step {step} was deleted", None)
