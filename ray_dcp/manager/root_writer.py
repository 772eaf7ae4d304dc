"""`Writer`: what rank 0 of a manager does for all: decides, prepares, records commits, removes.

No torch and no session: takes facts of the other ranks, returns a decision as a value.
`collective_actions` makes the saves themselves.

`Remover` removes steps off the save path: in a thread, pass by pass, with retries. A failure ends
nothing: what could not be removed is tried again, at growing intervals, and the next writer finds
what is left when the process ends.
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
from ray_dcp.manager.retention import StepFacts, check_metrics, superfluous
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
                # Suppressed: there are no more threads; the next save, or `drain`, does it.
                with suppress(LimitError):
                    self._thread = start_thread(self._run, "ray_dcp removal")
            self._changed.notify_all()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Waits until all that can be removed now is removed.

        What is read by somebody, and what has failed, is not waited for.

        Args:
            timeout_s: How long to wait, in seconds; for ever if None.

        Returns:
            Whether nothing is left that could be removed now.
        """
        if self._thread is None:
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
        catalogue: What was committed when it was last looked: it answers, and decides nothing.
        pending: Steps of which a save is under way.
        damaged: Steps that could not be loaded: they don't count, don't go, and may be saved again.
        remover: Removes what may go.
        lock: Guards these; nobody asks the storage anything while holding it.
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
        self.catalogue = Catalogue()
        self.pending: set[int] = set()
        self.damaged: set[int] = set()
        self._leaving: frozenset[str] = frozenset()
        """Folders of which the removal is being decided."""
        self._saved_last: int | None = None
        """The step that this process committed last: it stays."""
        self._settings = settings
        self._clock = clock
        self._now = now
        self._lease = WriterLease(root, lease_s=settings.lease_s, holder=holder, beats=threaded)
        readers = Readers(lease_s=settings.lease_s, holder=holder)
        self._deletions = Deletions(root, readers, self._lease.check, self._removed)
        self._had_no_room: StepTarget | None = None
        """A save that failed as the disk was full."""
        self._next: StepFacts | None = None
        """A step for which there is no space yet."""
        self._begun: dict[int, tuple[StepInfo, frozenset[str]]] = {}
        """Infos of the steps that are being saved, and the tags that they got."""
        self.remover = Remover(root.url, self.remove_superfluous, threaded=threaded)
        self._made_s = self._last_begun_s = clock()
        self._costs = SaveCosts()
        self._durable_s = 0.0
        self._preemption_saved = False
        self._is_known = self._is_fenced = False
        self._unpublished = 0

    def look(self) -> Catalogue:
        """Returns what is committed, by a new look at the storage.

        Raises:
            StorageError: It can't be read.
        """
        before = self.catalogue.steps
        return self._take_in(self._looked(), before)

    def _looked(self) -> Catalogue:
        """Returns what is committed, by a look at the storage. Changes nothing here."""
        known = self.catalogue
        return look(self.root, self._settings.names, known if known.steps else None)

    def _take_in(self, found: Catalogue, before: Mapping[int, StepFound]) -> Catalogue:
        """Makes a look the catalogue, with what this process saved since that began."""
        with self.lock:
            for step, one in self.catalogue.steps.items():
                if before.get(step) != one:
                    found.add(one)
            self.catalogue = found
            self._is_known = True
            return found

    @property
    def newest(self) -> int | None:
        """The newest step that is good or under way; None for none."""
        return max({*(self.catalogue.steps.keys() - self.damaged), *self.pending}, default=None)

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
            self._costs.asked(step, self._clock(), saving=bool(self.pending))
            return bool(policy.due(self.facts(step, preempted)))

    def facts(self, step: int, preempted: bool = False) -> SaveFacts:
        """Returns what a save policy may look at."""
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
        if self._had_no_room is not None:
            with self.lock:
                self._check_step(step, replace=replace)  # a call that is refused makes no room
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
            # Why only these: tags that the step has stay, also when the commit replaces what had
            # them. Whoever gave them takes them away.
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
        """Notes that no save of a step is under way."""
        with self.lock:
            self.pending.discard(step)

    def finish(self, place: StepTarget, committed: bool | None, *, no_space: bool = False) -> None:
        """Takes in how a save has ended, and lets go what is superfluous now.

        Args:
            place: Of the step.
            committed: None: not reported; the storage is asked.
            no_space: It failed as there was no space: the next one makes room first.
        """
        self.give_up(place.step)
        with self.lock:
            if no_space:
                self._had_no_room = place
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
                self._untag(place.step, added)
                return
            found = look_at_step(self.root, place.name, place.step)
            if found is None:
                return
            if found.slot and found.info is None and info is not None:
                # Why: who takes over a run removes the info of a step before its commit.
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
            if is_full:
                self.remover.wake()
            if place.last_slot and found.info is not None and self._settings.named:
                remove_replaced_items(self.root, place, found.info)
            if self._unpublished >= PUBLISH_EVERY:
                self._publish()
        except Exception as error:  # noqa: BLE001 - a policy of the user's may raise anything
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
                self._leaving = frozenset()
        return left

    def make_room(self, step: int, metrics: Mapping[str, Any] | None) -> bool:
        """Removes, before a save, what retention would remove after it, and what failed for space.

        The newest good step stays until the new one is committed. So does one that the new one
        surpasses by a metric only: the save may fail again.

        Args:
            step: That is to be saved.
            metrics: Of it.

        Returns:
            Whether a step was removed.

        Raises:
            InvalidRequestError: A metric can't be taken.
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
        """Returns what may go as far as is known."""
        with self.lock:
            chosen = [one for one in self._superfluous(self.catalogue) if one not in tried]
            self._leaving = frozenset(one.name for one in chosen)
            return chosen

    def _look_again(self) -> tuple[Collection[Going], Catalogue]:
        before = self.catalogue.steps
        found = self._looked()
        with self.lock:
            # Careful: by what the look found alone, before anything remembered is added to it.
            still = self._superfluous(found)
        return still, self._take_in(found, before)

    def _superfluous(self, catalogue: Catalogue) -> tuple[Going, ...]:
        """Returns the folders that may go: steps by the policy, and what was left by crashes.

        Only folders of steps older than the newest good one are named. Steps that could not be
        loaded neither count nor go: a read that failed is no proof of damage.

        Raises:
            InvalidRequestError: The policy gives no usable answer.
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
            if step < newest and step not in self.pending and step not in catalogue.steps
        )
        return (*(going(catalogue.steps[step]) for step in sorted(goes)), *left)

    def _removed(self, going: Going) -> None:
        """Takes a step that was deleted out of the catalogue, unless it was saved again."""
        with self.lock:
            self.catalogue.leftovers.pop(going.name, None)
            known = self.catalogue.steps.get(going.step)
            if known is not None and (known.name, known.attempt) == (going.name, going.attempt):
                del self.catalogue.steps[going.step]
                self.damaged.discard(going.step)

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
        self._delete_now(self._check_deletable(step))

    def rewind(self, step: int) -> tuple[int, ...]:
        """Deletes all steps after one, newest first; returns them.

        Raises:
            CheckpointError: As `delete` does; the steps that were not yet deleted stay.
        """
        self._take_lease()
        self.look()
        later = [self._check_deletable(one) for one in self.catalogue.steps if one > step]
        for one in reversed(later):
            self._delete_now(one)
        return tuple(one.step for one in reversed(later))

    def tag(self, step: int, tag: str, *, remove: bool = False) -> None:
        """Gives a tag to a step, or takes it away.

        Raises:
            CheckpointNotFoundError: The step is not committed.
            CheckpointExistsError: Another process writes to this root.
            StorageError: The storage failed.
        """
        check_tag(tag, existing=remove)
        self._take_lease()
        self.look()
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
            self._untag(step, [tag])  # it was deleted meanwhile
            raise
        if unsure:
            warnings.warn(unsure, UserWarning, stacklevel=2)

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

    def _publish(self) -> None:
        self._unpublished = 0
        try:
            write_catalogue(self.root, self.catalogue)
        except StorageError as error:
            logger.info("The catalogue of %s was not written: %s", self.root.url, error)

    def _check_step(self, step: int, *, replace: bool) -> None:
        """Checks that a step may be saved now.

        Args:
            step: Which.
            replace: It may take the place of one that is committed.

        Raises:
            InvalidRequestError: It is committed or under way already, or older than the newest.
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
            CheckpointNotFoundError: It is not committed.
            InvalidRequestError: It is being saved, or was not written by ray_dcp.
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
        """Returns the tags of a step, by a look at the storage."""
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
        # Why: a removal may have been decided because this step was committed.
        self.root.fence(f"step {step} was deleted", None)
