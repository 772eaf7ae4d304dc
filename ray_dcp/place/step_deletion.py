"""Deletes steps of a run by a person's order.

One decision for the manager's `delete` and `rewind`, for `ray-dcp rm` and for `ray_dcp.delete`: a
step that has tags or readers is deleted only by force. The deletion is announced before its
protections are read (`io.records`), so that a tag or a reader that comes meanwhile ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import CheckpointError, CheckpointNotFoundError, InvalidRequestError
from ray_dcp.format.names import (
    READING,
    SHARED_FOLDER,
    TAGS,
    damage_key,
    note_key,
    tag_key,
    tags_in,
)
from ray_dcp.format.recorded_metrics import metrics_of
from ray_dcp.format.step_info import info_slot
from ray_dcp.io.announced_deletions import Announced, check_announced, fence
from ray_dcp.io.lease_holders import UNREADABLE, read_holder, this_process
from ray_dcp.io.reserve import freeing
from ray_dcp.place.attempt_id import new_attempt
from ray_dcp.place.delete import delete as delete_place
from ray_dcp.place.listing import CollectReport
from ray_dcp.place.step_items import items_in
from ray_dcp.place.voting import Opener
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import open_storage, place_below, target_of
from ray_dcp.store.storage import Storage, read_if_there
from ray_dcp.view.run_listing import step_of


@dataclass(frozen=True)
class Protection:
    """What protects a step from deletion."""

    tags: tuple[str, ...] = ()
    """Its tags, sorted."""
    readers: tuple[str, ...] = ()
    """The processes that read it, as text."""


def read_protection(
    shared: Storage, step: int, reader_of: Callable[[Storage, str], str] | None = None
) -> Protection:
    """Reads what protects a step.

    Args:
        shared: Shared storage of the run's managers.
        step: The step.
        reader_of: Returns the holder of a reader lease as text; "" if it has ended.

    Raises:
        StorageError: The storage failed.
    """
    look = reader_of or living_reader
    leases = [entry.key for entry in shared.list(f"{READING}{step}.")]
    readers = [*filter(None, (look(shared, key) for key in leases))]
    tags = tags_in(entry.key for entry in shared.list(f"{TAGS}{step}."))
    return Protection(tuple(sorted(tags.get(step, ()))), tuple(readers))


def living_reader(shared: Storage, lease: str) -> str:
    """Returns the holder of a reader lease as text; "" if its process has ended."""
    _, holder = read_holder(shared, lease)
    if holder is None:
        return ""
    if holder is UNREADABLE:
        return "an unknown process"
    return "" if holder.lives_here(this_process()) is False else str(holder)


def check_unprotected(
    found: Mapping[str, Protection], *, force: bool, untag: str, forced: str
) -> None:
    """Decides whether a person's order may delete steps: all of them, or none.

    Args:
        found: What protects each step, by the name of the step in messages.
        force: Whether tagged and read steps are deleted, too.
        untag: How to remove a tag, for the message.
        forced: How to force the deletion, for the message.

    Raises:
        InvalidRequestError: A step is protected. The message names all that are, by what, and the
            way out.

    Examples:
        >>> tagged = {"run/step-3": Protection(tags=("release",))}
        >>> ways = {"untag": "ray-dcp tag --remove", "forced": "--force"}
        >>> check_unprotected(tagged, force=True, **ways)
        >>> check_unprotected(tagged, force=False, **ways)
        Traceback (most recent call last):
            ...
        ray_dcp.errors.InvalidRequestError: run/step-3 has the tag release: remove it with ...
    """
    if force:
        return
    told = []
    for name, one in found.items():
        if one.tags:
            it = "it" if len(one.tags) == 1 else "them"
            plural = "" if len(one.tags) == 1 else "s"
            told.append(
                f"{name} has the tag{plural} {', '.join(one.tags)}: remove {it} with {untag}, or "
                f"give {forced}"
            )
        if one.readers:
            told.append(
                f"{name} is being read by {', '.join(one.readers)}: wait until that is done, or "
                f"give {forced} if it has ended"
            )
    if told:
        raise InvalidRequestError("; ".join(told))


class StepDeletion:
    """The deletion of a checkpoint that may be a step of a run.

    Args:
        place: Where the checkpoint lies.
        step: Its number; None if it is no step.
        opener: Opens storages.

    Attributes:
        protection: What protected it when that was read last.

    Raises:
        StorageError: The storage failed.
    """

    def __init__(self, place: Target, step: int | None, *, opener: Opener = open_storage) -> None:
        run, _, name = place.url.rstrip("/").rpartition("/")
        self._place, self._step, self._name = place, step, name
        self._opener = opener
        self._run = replace(place, url=run)
        self._shared: Storage | None = None
        self.protection = Protection()
        # Why the check: a bucket, or a folder at the root of a disk, is not in a run.
        if step is not None and run and not run.endswith("/"):
            self._shared = opener(place_below(self._run, SHARED_FOLDER))
            self.protection = read_protection(self._shared, step)

    @property
    def is_in_run(self) -> bool:
        """Whether managers of a run, or people's tags, have left anything beside the step."""
        return self._shared is not None and bool(self._shared.list())

    def check(self, *, force: bool, untag: str, forced: str) -> None:
        """Decides by `check_unprotected` with what was read last."""
        found = {self._place.url: self.protection}
        check_unprotected(found, force=force, untag=untag, forced=forced)

    def delete(
        self,
        expected: str | None,
        *,
        dry_run: bool = False,
        announced: bool = True,
        check: Callable[[], object],
    ) -> list[CollectReport]:
        """Deletes the checkpoint as it was read, unless it is protected or replaced since.

        Then its items, and last the infos that name them: who is interrupted leaves a step that is
        deleted, and whose items are told, and deleted by a deletion that is repeated.

        Args:
            expected: As for `place.delete.delete`.
            dry_run: Whether only to report the files to delete.
            announced: Whether to announce the deletion in the run.
            check: Raises if the step is protected by what `protection` has then.

        Returns:
            The report of the step, and one of each item.

        Raises:
            CheckpointError: As `place.delete.delete`, or as `check`.
        """
        # Careful: list before the delete. The step may be saved again, with an info of its own.
        storage = self._opener(self._place)
        keys = [entry.key for entry in storage.list()]
        infos = [key for key in keys if info_slot(key) is not None]
        items = sorted(items_in(storage, keys))
        if announced and not dry_run and self._shared is not None and self._step is not None:
            reports = [self._announced(self._shared, self._step, expected, check)]
        else:
            reports = [self._delete_place(expected, dry_run=dry_run)]
        reports += filter(None, (self._delete_item(item, dry_run) for item in items))
        if not dry_run and not any(report.warnings for report in reports):
            storage.delete(infos)
        return reports

    def _delete_place(self, expected: str | None, **how: Any) -> CollectReport:
        return delete_place(self._place, expected=expected, opener=self._opener, **how)

    def _delete_item(self, item: str, dry_run: bool) -> CollectReport | None:
        """Deletes an item of a deleted step; returns None if it is not there."""
        place = place_below(self._place, item)
        try:
            return delete_place(place, dry_run=dry_run, opener=self._opener)
        except CheckpointNotFoundError:
            return None
        except CheckpointError as error:
            told = f"The step is deleted, but its item {item} is not: {error}. Delete again"
            return CollectReport(place.url, (), 0, (), warnings=(told,))

    def _announced(
        self,
        shared: Storage,
        step: int,
        expected: str | None,
        check: Callable[[], object],
    ) -> CollectReport:
        """Announces the deletion in the run, and deletes the step if it is not protected then."""
        # Why: from now on, a new tag or reader lease aborts the deletion, or fails.
        mark = Announced(step, new_attempt(), self._name)
        freeing(shared, partial(shared.write, mark.key, b""))
        try:
            self.protection = read_protection(shared, step)
            check()
            with self._taken_away(shared, step):
                work = partial(
                    self._delete_place,
                    expected,
                    attempt=mark.attempt,
                    confirm=partial(check_announced, shared, mark),
                )
                report = freeing(shared, work)
            if expected:
                metrics = shared.list(metrics_of(step, expected))
                mark_of_damage = damage_key(step, expected)
                shared.delete([mark_of_damage, *(entry.key for entry in metrics)])
            return report
        finally:
            # Why all deletions: a manager may delete another step because this one existed.
            fence(
                shared,
                lambda name: self._opener(place_below(self._run, name)),
                f"step {step} was removed",
            )

    @contextmanager
    def _taken_away(self, shared: Storage, step: int) -> Iterator[None]:
        """Removes tags and note for the deletion in the block, and restores them if it fails.

        *Why before the deletion*: the step may be saved again right after it, with other tags.
        """
        marks = {tag_key(step, tag): b"" for tag in self.protection.tags}
        note = read_if_there(shared, note_key(step))
        marks |= {} if note is None else {note_key(step): note}
        shared.delete([*marks])
        try:
            yield
        except BaseException:
            for key, data in marks.items():
                shared.write(key, data)
            raise


def delete(
    path: AnyPlace,
    *,
    storage_options: Mapping[str, object] | None = None,
    dry_run: bool = False,
    opener: Opener = open_storage,
    force: bool = False,
    expected: str | None = None,
) -> CollectReport:
    """Deletes the checkpoint at a path, with all files of other attempts.

    Atomic: a reader finds the whole checkpoint, or that it was deleted. A save that began before
    fails, or its checkpoint is deleted as well. One small record remains, and files that ray_dcp
    did not write. Deleting twice is allowed, also to finish an interrupted delete.

    A step of a run that has a tag, or that is being read under a lease, is deleted only by force;
    its tags, its note, and its items or parts are deleted with it.

    Args:
        path: Path or URL of one checkpoint.
        storage_options: Options for the storage.
        dry_run: Whether only to report the files to delete.
        opener: Opens the storage.
        force: Whether to delete a step of a run that is tagged or being read.
        expected: Attempt of the checkpoint to delete, "" if there should be none: any other one is
            kept. None for any checkpoint.

    Returns:
        The deleted files. Those that could not be deleted are in `kept` and `warnings`: the
        checkpoint is deleted nevertheless, and `collect` or another `delete` removes them.

    Raises:
        CheckpointNotFoundError: There are no files.
        InvalidRequestError: ray_dcp did not write the checkpoint; or it is a step that has tags or
            readers, which the message names, and `force` is not given.
        CheckpointExistsError: There is another checkpoint than the expected one, or the deletion
            was ended by a tag or reader that came meanwhile; nothing is deleted.
        DamagedCheckpointError: A record can't be read, so that it is unknown whether the expected
            checkpoint exists; nothing is deleted.
        StorageError: The storage failed before the decision; or it did not say whether the deletion
            happened, which the message says.

    Examples:
        >>> from ray_dcp.store.memory import MemoryStorage
        >>> MemoryStorage("doc-delete").write("__0_0.0123456789abcdef.distcp", b"1234")
        >>> report = delete("memory://doc-delete")
        >>> report.deleted, report.num_bytes
        (('__0_0.0123456789abcdef.distcp',), 4)
    """
    target = target_of(path, storage_options)
    deletion = StepDeletion(
        target, step_of(target.url.rstrip("/").rpartition("/")[2]), opener=opener
    )
    check = partial(
        deletion.check,
        force=force,
        untag="CheckpointManager.tag(..., remove=True) or ray-dcp tag --remove",
        forced="force=True",
    )
    check()
    report, *items = deletion.delete(
        expected, dry_run=dry_run, announced=deletion.is_in_run, check=check
    )
    for one in items:
        folder = one.path.rpartition("/")[2]
        kept = [replace(file, key=f"{folder}/{file.key}") for file in one.kept]
        # Why: the files below the step are told by their own reports.
        others = [file for file in report.kept if not file.key.startswith(f"{folder}/")]
        report = replace(
            report,
            deleted=(*report.deleted, *(f"{folder}/{key}" for key in one.deleted)),
            num_bytes=report.num_bytes + one.num_bytes,
            kept=(*others, *kept),
            fenced=(*report.fenced, *one.fenced),
            warnings=(*report.warnings, *one.warnings),
        )
    return report
