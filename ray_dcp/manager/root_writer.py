"""`Writer`: decides for all ranks of a manager, on rank 0.

Runs without torch and without a session: it receives the facts of other ranks, and returns
decisions as values. `collective_actions` makes the saves.

A save writes the info of the step, then commits its checkpoint. A deletion revokes the commit, then
deletes the items, then the infos (`deletions`). A crash therefore leaves a step whole or not at
all, and the next writer finds the remaining files. The writer lease (`writer_lease`) keeps other
processes from deleting at the same time.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ray_dcp.core import bounds
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidRequestError,
    StorageError,
)
from ray_dcp.format.names import TAGS, check_tag, tag_key, tags_in
from ray_dcp.format.step_info import StepInfo, check_metadata, encode_info, info_key
from ray_dcp.format.verdicts import TRUST, trust_key
from ray_dcp.io.lease_holders import LeaseHolder
from ray_dcp.io.records import used_slots
from ray_dcp.manager.allocation_end import AllocationEnd
from ray_dcp.manager.catalogue import (
    Catalogue,
    Root,
    StepFound,
    look,
    look_at_step,
    write_catalogue,
)
from ray_dcp.manager.deletions import (
    Deletions,
    Going,
    Remover,
    going,
    is_not_read,
    remove_failed,
    remove_replaced_items,
)
from ray_dcp.manager.metrics import check_metrics
from ray_dcp.manager.reader_leases import Readers
from ray_dcp.manager.retention import (
    StepFacts,
    age_in,
    anchors,
    newest_whole,
    rankings,
    superfluous,
)
from ray_dcp.manager.save_policies import SaveCosts, SaveFacts, asks_only_the_step, ends_of
from ray_dcp.manager.settings import Settings
from ray_dcp.manager.step_target import StepTarget, free_number
from ray_dcp.manager.writer_lease import WriterLease
from ray_dcp.place.step_deletion import (
    Protection,
    check_unprotected,
    read_protection,
)
from ray_dcp.view.damage_marks import committed_steps_with, mark_damaged, remove_marks

logger = logging.getLogger(__name__)
PUBLISH_EVERY = 8
"""Number of new steps after which the catalogue file is written again. *Why*: each step that it
lacks costs the process that starts after a crash two reads."""


class Writer:
    """The writer of a root, or a process that may become it.

    Args:
        root: The root.
        settings: Settings of the manager.
        holder: Identity of the writer; this process by default.
        before_removal: Called before each deletion pass, without the lock.
        after_commit: Called with each step that is committed, before others are deleted.

    Attributes:
        catalogue: Result of the last scan. It answers queries, and decides no deletion.
        pending: Steps that are being saved.
        damaged: Steps that this process could not load. They don't count for retention, are not
            deleted, and may be saved again, as those that have a damage mark.
        whole: Attempts of the steps that this process loaded or saved, and has not found damaged.
            Retention keeps the newest of them.
        remover: Deletes superfluous steps.
        lock: Guards these attributes. Not held during storage operations.
    """

    def __init__(
        self,
        root: Root,
        settings: Settings,
        *,
        holder: LeaseHolder | None = None,
        before_removal: Callable[[], object] = dict,
        after_commit: Callable[[int], object] = lambda step: None,
    ) -> None:
        self.root = root
        self.lock = threading.RLock()
        self.catalogue = Catalogue()
        self.pending: set[int] = set()
        self.damaged: set[int] = set()
        self.whole: dict[int, str] = {}
        self._leaving: frozenset[str] = frozenset()
        """Folders about whose deletion a pass is deciding."""
        self._saved_last: int | None = None
        """The step that this process committed last, which is kept."""
        self._settings = settings
        self._lease = WriterLease(
            root, lease_s=settings.lease_s, holder=holder, maker=settings.ways_out.maker
        )
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
        self.remover = Remover(root.url, self.remove_superfluous)
        self._made_s = self._last_begun_s = time.monotonic()
        self._costs = SaveCosts()
        self._durable_s = 0.0
        self._end = AllocationEnd(ends_of(settings.policy))
        self._kept_s = self._made_s
        """When the newest save was started that has not failed, without those in progress."""
        self._begun_s: dict[int, float] = {}
        """When the saves in progress were started, by step."""
        self._preemption_saved = False
        self._is_known = self._is_fenced = False
        self._unpublished = 0

    def look(self) -> Catalogue:
        """Scans the storage, and returns what is committed.

        Raises:
            StorageError: The storage can't be read.
        """
        before = self.catalogue.steps
        return self._take_in(self._scan(), before)

    def _scan(self) -> Catalogue:
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
        lost = self.damaged | self.catalogue.damaged
        loadable = [one for one in self._oldest_first(self.catalogue) if one not in lost]
        if self._settings.order == "any":
            return next(iter([*reversed(self._begun), *reversed(loadable)]), None)
        return max({*loadable, *self.pending}, default=None)

    @property
    def needs_nodes(self) -> bool:
        """See `AllocationEnd`."""
        return self._end.needs_nodes

    def due(
        self,
        step: int,
        preempted: bool,
        *,
        force: bool = False,
        nodes: Collection[str] | None = None,
    ) -> bool:
        """Returns whether a step is due.

        Args:
            step: The step.
            preempted: Whether a rank was notified that its machine is being taken away.
            force: Whether the step is due whatever the policy decides.
            nodes: See `AllocationEnd.seconds`.

        Raises:
            StorageError: The storage can't be read.
        """
        policy = self._settings.policy
        if force or policy is None:
            return force
        if not self._is_known and not asks_only_the_step(policy):
            self.look()
        end_s = self._end.seconds(nodes)
        with self.lock:
            self._costs.asked(step, time.monotonic(), saving=bool(self.pending))
            return bool(policy.due(self._facts(step, preempted, end_s)))

    def facts(self, step: int, preempted: bool = False) -> SaveFacts:
        """Returns the facts by which a save policy decides."""
        # Why not under the lock: it may be a function of the user's.
        return self._facts(step, preempted, self._end.seconds())

    def _facts(self, step: int, preempted: bool, end_s: float | None) -> SaveFacts:
        with self.lock:
            now_s = time.monotonic()
            return SaveFacts(
                step=step,
                last_step=self.newest,
                since_save_s=now_s - self._last_begun_s,
                preempted=preempted and not self._preemption_saved,
                saving=bool(self.pending) or self._costs.is_measuring,
                cost_s=self._costs.cost_s,
                durable_s=self._durable_s,
                left_s=None if end_s is None else end_s - time.time(),
                unsaved_s=now_s - max([self._kept_s, *self._begun_s.values()]),
                step_s=self._costs.step_s,
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
        parts: Collection[str] = (),
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
            parts: Names of parts that are saved beside the state of the step.
            wanted: Whether the caller still waits for the result.

        Raises:
            InvalidRequestError: The step, a metric, the metadata or a tag is invalid.
            CheckpointExistsError: Another process writes to this root.
            StorageError: The storage failed.
        """
        self.take_lease()
        metrics = check_metrics(metrics, self._settings.kept)
        metadata = check_metadata(metadata)
        # Why: a text would be taken for a tag per letter.
        if isinstance(tags, str) or not isinstance(tags, Collection):
            raise InvalidRequestError(
                f"tags must be a list of texts, as ['release'], but is {tags!r}", key="tags"
            )
        tags = frozenset(check_tag(tag) for tag in tags)
        try:
            with self.lock:
                self._check_step(step, replace=replace)  # A refused call must not delete.
        except InvalidRequestError:
            # Why again: what is remembered decides nothing, and a person may have deleted steps.
            self.look()
        if self._had_no_room is not None:
            with self.lock:
                self._check_step(step, replace=replace)
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
            place = StepTarget(step, name, last, free_number(storage, last), time.time())
            latest_s = self._latest_s()
            info = StepInfo(
                step=step,
                created_s=place.created_s,
                metrics=metrics,
                metadata=metadata,
                items={name: place.folder_of(name) for name in (*self._settings.named, *parts)},
                # Why: the clock may have been set back, or have been another machine's.
                order_s=None if place.created_s > latest_s else math.nextafter(latest_s, math.inf),
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
            self._last_begun_s = self._begun_s[step] = time.monotonic()
            self._costs.began()
            self._preemption_saved = self._preemption_saved or preempted
            return place

    def _latest_s(self) -> float:
        """Returns the place of the last save among those of the run; see `StepInfo.order_s`."""
        with self.lock:
            begun = (info for info, _ in self._begun.values())
            places = [info.created_s if info.order_s is None else info.order_s for info in begun]
            places += [one.order_s for one in self.catalogue.steps.values()]
            return max(places, default=0.0)

    def _oldest_first(self, catalogue: Catalogue) -> list[int]:
        return [one.step for one in catalogue.oldest_first(self._settings.order)]

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
            begun_s = self._begun_s.pop(place.step, self._kept_s)
            if committed is not False:
                self._kept_s = max(self._kept_s, begun_s)
            if committed:
                self._durable_s = time.monotonic() - self._last_begun_s
            # Why: if the step was due because of a preemption, the next step is due now.
            self._preemption_saved = self._preemption_saved and committed is not False
            if committed is False and info is not None and info.items:
                # Its items, if there are any, go when a later step is committed.
                self.catalogue.leftovers[place.name] = place.step
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
                self.whole[found.step] = found.attempt
                self._saved_last = found.step
                self._unpublished += 1
                is_full = bool(self._find_superfluous(self.catalogue))
            if any(step == found.step for step, _ in self.catalogue.marks):
                remove_marks(self.root.target, [found.step], self.root.opener, found.attempt)
            self._after_commit(found.step)
            if is_full or self._waits_for_metrics:
                self.remover.wake()
            if place.last_slot and found.info is not None and found.info.items:
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
        self._before_removal()
        left: dict[str, CheckpointError | None] = {}
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

    def remove_leftovers(self) -> dict[str, CheckpointError | None]:
        """Deletes what earlier writers saved of steps that they did not commit.

        From then on such a writer, if it was only paused, can't commit them.

        Returns:
            What was not deleted.

        Raises:
            CheckpointExistsError: Another process writes to this root.
            StorageError: The storage failed.
        """
        self._look_as_writer()

        def left_in(catalogue: Catalogue) -> list[Going]:
            found = catalogue.leftovers.items()
            return [Going(step, name, "") for name, step in found if step not in self.pending]

        def look_again() -> tuple[Collection[Going], Catalogue]:
            found = self._scan()
            return left_in(found), found

        chosen = left_in(self.catalogue)
        return self._deletions.remove_all(chosen, look_again) if chosen else {}

    @property
    def _waits_for_metrics(self) -> bool:
        """Whether other processes record metrics or tags by which steps are kept."""
        return self._settings.trust is not None or any(
            ranking.later for ranking in rankings(self._settings.kept)
        )

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
            self._next = StepFacts(
                step=step, created_s=time.time(), metrics=metrics, order_s=math.inf
            )
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
            chosen = [one for one in self._find_superfluous(self.catalogue) if one not in tried]
            self._leaving = frozenset(one.name for one in chosen)
            return chosen

    def _look_again(self) -> tuple[Collection[Going], Catalogue]:
        before = self.catalogue.steps
        found = self._scan()
        with self.lock:
            # Careful: decided by the scan alone, before anything remembered is added to it.
            still = self._find_superfluous(found)
        return still, self._take_in(found, before)

    def _find_superfluous(self, catalogue: Catalogue) -> tuple[Going, ...]:
        """Returns the folders that may be deleted: steps by the policy, and leftovers of crashes.

        Only folders of steps older than the newest loadable one are included; of what crashes left,
        those of lower steps. Steps that could not be loaded are neither counted nor included,
        because a failed read does not prove damage.

        Raises:
            InvalidRequestError: The policy returned an invalid answer.
        """
        policy = self._settings.kept
        if policy is None and not catalogue.leftovers:
            return ()
        damaged = self.damaged | catalogue.damaged
        facts = [one for one in catalogue.facts() if one.step not in damaged]
        unknown = [one for one in catalogue.facts(known=False) if one.step not in damaged]
        if not facts:
            return ()
        order = self._settings.order
        newest, highest = max(facts, key=age_in(order)).step, max(one.step for one in facts)
        protected = {*self.pending, newest if self._saved_last is None else self._saved_last}
        in_order = [one.step for one in sorted(facts, key=age_in(order))]
        attempts = [(step, catalogue.steps[step].attempt) for step in in_order]
        whole = newest_whole(attempts, self.whole)
        protected |= set() if whole is None else {whole}
        trust = self._settings.trust
        chosen = partial(
            superfluous,
            policy=policy,
            unknown=unknown,
            order=order,
            trust=trust,
            now_s=time.time(),
        )
        goes = {*chosen(facts, protected=protected)}
        if self._next is not None and self._next.step not in catalogue.steps:
            # Why the anchors: those of what is committed; the next step is not yet.
            committed = sorted(facts, key=age_in(order))
            protected |= {newest, self._next.step, *anchors(committed, trust)}
            both = (self._next, dataclasses.replace(self._next, metrics={}))
            goes |= set.intersection(
                *({*chosen([*facts, one], protected=protected)} for one in both)
            )
        left = (
            Going(step, name, "")
            for name, step in catalogue.leftovers.items()
            if step < highest and step not in self.pending
        )
        oldest_first = [step for step in self._oldest_first(catalogue) if step in goes]
        return (*(going(catalogue.steps[step]) for step in oldest_first), *left)

    def _removed(self, going: Going) -> None:
        """Removes a deleted step from the catalogue, unless it was saved again."""
        with self.lock:
            self.catalogue.leftovers.pop(going.name, None)
            known = self.catalogue.steps.get(going.step)
            if known is not None and (known.name, known.attempt) == (going.name, going.attempt):
                del self.catalogue.steps[going.step]
                self.damaged.discard(going.step)
                self.whole.pop(going.step, None)

    def delete(self, step: int, *, force: bool = False) -> None:
        """Deletes a step; its folder keeps the delete record.

        Args:
            step: The step.
            force: Whether to delete it if it has tags or is being read.

        Raises:
            CheckpointNotFoundError: The step is not committed.
            InvalidRequestError: The step is being saved, another program wrote it, or it has tags
                or readers and `force` is not given.
            CheckpointExistsError: Another process writes to this root, or has protected the step
                meanwhile.
            StorageError: The storage failed.
        """
        self._look_as_writer()
        self._delete_now([self._check_deletable(step)], force=force)

    def rewind(self, step: int, *, force: bool = False) -> tuple[int, ...]:
        """Deletes all later steps, newest first, and returns them.

        Args:
            step: The newest step that is kept.
            force: Whether to delete steps that have tags or are being read.

        Raises:
            InvalidRequestError: As `delete`, for any of the steps; or the order is "any" and the
                step is not committed. Nothing is deleted.
            CheckpointError: As `delete`; steps that were not yet deleted remain.
        """
        self._look_as_writer()
        in_order = self._oldest_first(self.catalogue)
        if self._settings.order == "increasing":
            later = [one for one in in_order if one > step]
        elif step in in_order:
            later = in_order[in_order.index(step) + 1 :]
        else:
            raise InvalidRequestError(
                f'order="any" has steps by the time of their save, so that rewind needs a '
                f"committed step, but {self.root.url} has no step {step}; there are, oldest first: "
                f"{', '.join(map(str, in_order)) or 'none'}",
                step=step,
            )
        goes = [self._check_deletable(one) for one in reversed(later)]
        self._delete_now(goes, force=force)
        return tuple(one.step for one in goes)

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
            # Why: another deletion may have been decided because this step was trusted.
            self.root.fence(f"the tag {tag!r} of step {step} was removed", None)
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

    def loaded(
        self, step: int | None, attempt: str, skipped: Mapping[int, CheckpointError]
    ) -> None:
        """Records which step was loaded, and marks those that were found damaged before.

        Args:
            step: The step; its bytes were verified. None if all steps are damaged.
            attempt: The attempt that committed it; "" if it is not known, or not all was verified.
            skipped: Newer steps that could not be loaded, with their errors.
        """
        with self.lock:
            self.damaged.update(skipped)
            if attempt and step is not None:
                self.whole[step] = attempt
            for one in skipped:
                self.whole.pop(one, None)
            steps = dict(self.catalogue.steps)
        damaged: dict[int, str] = {}
        for one, error in skipped.items():
            found = steps.get(one)
            if found is not None and found.is_ours and isinstance(error, DamagedCheckpointError):
                damaged[one] = found.attempt
                # Why so: the place may be spelled in another way, and of an item it has a folder.
                item = (error.checkpoint_id or "").rpartition(f"/{found.name}")[2]
                key = f"{found.name}{item}/{error.key}"
                # Suppressed: the others are tried by their own loads.
                with suppress(CheckpointError):
                    damaged |= committed_steps_with(
                        self.root.target, key, self.root.opener, is_not_read
                    )
        if step is not None:
            damaged.pop(step, None)
        if not damaged:
            return
        try:
            mark_damaged(self.root.target, damaged, "steps were found damaged", self.root.opener)
            self.look()
        except StorageError as error:
            logger.info("Steps of %s are not marked as damaged: %s", self.root.url, error)

    def close(self, timeout_s: float = bounds.DELETION_END_S) -> None:
        """Releases the lease, after waiting up to a timeout for the current deletion pass."""
        self.remover.close(timeout_s)
        try:
            if self._lease.is_taken:
                if self._unpublished:
                    self._publish()
                self._lease.give_back()
        except CheckpointError as error:
            logger.info("The writer lease of %s was not given back: %s", self.root.url, error)

    def check_lease_free(self) -> None:
        """Checks that no other process writes here; see `WriterLease.check_free`."""
        self._lease.check_free()

    def take_lease(self) -> None:
        """Acquires the writer lease, or checks it, and aborts deletions of an earlier writer.

        Raises:
            CheckpointExistsError: Another process writes to this root.
            StorageError: The storage failed.
        """
        had_it = self._lease.is_taken
        self._lease.take(
            even_if_held=self._settings.takeover,
            now_s=time.time(),
            last_s=max((one.created_s for one in self.catalogue.steps.values()), default=0.0),
        )
        self._is_fenced &= had_it
        if not self._is_fenced:
            unsure = self.root.fence("another process writes to the run", None)
            self._is_fenced = True
            if unsure:
                logger.warning("%s", unsure)
        if not had_it:
            self._publish_trust()
        if not had_it or not self._is_known:
            self._unpublished += self.look().num_read
        if not had_it:
            self._report_damaged()

    def _publish_trust(self) -> None:
        """Records the name by which steps are trusted, for readers such as `ray-dcp ls`."""
        name = "" if self._settings.trust is None else self._settings.trust.name
        if not name:
            return
        key = trust_key(name)
        keys = {entry.key for entry in self.root.shared.list(TRUST)}
        if key not in keys:
            self.root.shared.write(key, b"")
        self.root.shared.delete(sorted(keys - {key}))

    def _report_damaged(self) -> None:
        """Logs which steps are marked as damaged, as no retention deletes them."""
        marked = sorted(self.catalogue.damaged)
        if marked and self._settings.kept is not None:
            logger.warning(
                "%d steps of %s are marked as damaged, so that retention neither counts nor "
                "deletes them: %s. `ray-dcp verify --mark RUN` removes the marks of those that are "
                "whole; `ray-dcp rm RUN@STEP` deletes one",
                len(marked),
                self.root.url,
                ", ".join(map(str, marked)),
            )

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
        ways = self._settings.ways_out
        places = {"run": self.root.url, "step": step, "before": max(step - 1, 0)}
        if step in self.pending:
            raise InvalidRequestError(
                f"step {step} is being saved already; wait for it with {ways.await_save} before it "
                f"is saved again",
                step=step,
            )
        order = self._settings.order
        if step in self.damaged or step in self.catalogue.damaged:
            return
        if step in self.catalogue.steps:
            if replace or order == "any":
                return
            name = self._settings.names.name_of(step)
            raise InvalidRequestError(
                f"step {step} is committed already in {self.root.url}/{name}. Save the next step; "
                f"or {ways.save_over.format(**places)}",
                step=step,
            )
        newest = self.newest
        if order == "increasing" and newest is not None and step < newest:
            raise InvalidRequestError(
                f"step {step} is older than the newest one in {self.root.url}, {newest}; steps go "
                f"up. To go on from an earlier step, {ways.go_back.format(**places)}; another run "
                f"takes another root",
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
                f"step {step} is being saved; wait for it with join() first", step=step
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

    def _delete_now(self, chosen: Sequence[Going], *, force: bool) -> None:
        """Deletes steps by a person's order, in this order: all of them, or none if one is kept."""
        found: dict[int, Protection] = {}

        def look_at_marks() -> tuple[Collection[Going], Catalogue]:
            for one in chosen:
                found[one.step] = read_protection(
                    self.root.shared, one.step, self._deletions.reader_of
                )
            check_unprotected(
                {f"step {step} of {self.root.url}": one for step, one in found.items()},
                force=force,
                untag="tag(step, tag, remove=True)",
                forced="force=True",
            )
            # Why no readers: it is decided by now.
            return chosen, Catalogue()

        left = self._deletions.remove_all(chosen, look_at_marks, stops=True)
        if not left:
            self._lease.check()
        for one in chosen:
            if (error := left.get(one.name)) is not None:
                raise error
            self._untag(one.step, found[one.step].tags)
            # Why: another deletion may have been decided because this step was committed.
            self.root.fence(f"step {one.step} was deleted", None)
