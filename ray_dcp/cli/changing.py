"""The commands `rm`, `gc`, `tag` and `metadata`, which delete files or write beside a checkpoint.

They import neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import click

from ray_dcp.cli.main import JSON
from ray_dcp.cli.output import agree, dry_run, says, told, yes
from ray_dcp.cli.places import PLACE, address_of, run_at, step_at, step_in_run
from ray_dcp.errors import CheckpointError, CheckpointExistsError, InvalidRequestError
from ray_dcp.format.names import (
    READING,
    SHARED_FOLDER,
    TAGS,
    check_note,
    check_tag,
    note_key,
    tag_key,
    tags_in,
)
from ray_dcp.format.step_info import info_slot, metrics_of
from ray_dcp.io.records import RESERVE, Announced, check_announced, fence, freeing, keep_reserve
from ray_dcp.store.opening import absolute_target, open_storage, place_below
from ray_dcp.store.storage import Storage, is_full, read_if_there
from ray_dcp.view.run_listing import FOREIGN, folders_above, step_of
from ray_dcp.view.run_view import StepView
from ray_dcp.view.wording import count_text, size_text

if TYPE_CHECKING:
    from ray_dcp.runtime.standing import CollectReport


_MOST_SHOWN = 20


@click.command()
@click.argument("steps", type=PLACE, nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Also steps that are tagged or being read.")
@click.option("--quiet", is_flag=True, help="Name no files.")
@yes
@dry_run
def rm(steps: tuple[str, ...], force: bool, quiet: bool, yes: bool, dry_run: bool) -> None:
    """Delete the checkpoints at STEPS, which are paths or RUN@STEP.

    Each deletion is atomic: a load finds the checkpoint complete or deleted. Files of other
    programs are kept.
    """
    from ray_dcp.runtime.garbage_collection import delete

    found = [step_at(step) for step in steps]
    marks = [_Marks(step) for step in found]
    for step, mark in zip(found, marks, strict=True):
        _check_deletable(step, mark, force=force)
    total = sum(step.num_bytes for step in found)
    names = ", ".join(step.path.url for step in found)
    if not dry_run:
        agree(f"delete {names} ({size_text(total)})", yes=yes)
    reports: list[tuple[str, CollectReport]] = []
    try:
        for step, mark in zip(found, marks, strict=True):
            report = mark.delete(force=force, dry_run=dry_run)
            reports.append((report.path, report))
            for folder in step.items.values():
                report = delete(place_below(step.path, folder), dry_run=dry_run)
                reports.append((report.path, report))
    except CheckpointError:
        if not says(JSON):
            _tell(reports, dry_run=dry_run, quiet=quiet)
        raise
    _tell(reports, dry_run=dry_run, quiet=quiet)


def _check_deletable(step: StepView, marks: _Marks, *, force: bool) -> None:
    if step.state in FOREIGN:
        raise InvalidRequestError(
            f"{step.path.url} was written by another program, and ray-dcp deletes only its own "
            f"files; remove the directory yourself to delete it"
        )
    if marks.tags and not force:
        plural = "" if len(marks.tags) == 1 else "s"
        raise InvalidRequestError(
            f"{step.path.url} has the tag{plural} {', '.join(marks.tags)}: remove it with "
            f"ray-dcp tag --remove, or give --force"
        )
    if marks.readers and not force:
        raise InvalidRequestError(
            f"{step.path.url} is being read by {', '.join(marks.readers)}: wait until that is "
            f"done, or give --force if it has ended"
        )


class _Marks:
    """A step, with its tags, note and readers in its run."""

    def __init__(self, step: StepView) -> None:
        run, _, name = step.path.url.rstrip("/").rpartition("/")
        self._view = step
        self._name = name
        self._step = step_of(name)
        self._run = replace(step.path, url=run)
        self._shared = None
        self.tags: tuple[str, ...] = ()
        self.readers: tuple[str, ...] = ()
        if self._step is not None and run and not run.endswith("/"):
            self._shared = open_storage(place_below(self._run, SHARED_FOLDER))
            self._look()

    def delete(self, *, force: bool, dry_run: bool) -> CollectReport:
        """Deletes the step as it was read, unless it has been protected or replaced since."""
        from ray_dcp.runtime.garbage_collection import delete
        from ray_dcp.runtime.tasks import new_attempt

        # Careful: list before the delete. The step may be saved again, with an info of its own.
        storage = open_storage(self._view.path)
        infos = [e.key for e in storage.list("step-info-") if info_slot(e.key) is not None]
        if dry_run or self._shared is None or self._step is None:
            report = delete(self._view.path, expected=self._expected, dry_run=dry_run)
            storage.delete([] if dry_run or report.warnings else infos)
            return report
        # Why: from now on, a new tag or reader lease aborts the deletion, or fails.
        mark = Announced(self._step, new_attempt(), self._name)
        freeing(self._shared, partial(self._shared.write, mark.key, b""))
        try:
            self._look()
            _check_deletable(self._view, self, force=force)
            with self._taken_away(self._shared, self._step):
                work = partial(
                    delete,
                    self._view.path,
                    expected=self._expected,
                    attempt=mark.attempt,
                    confirm=partial(check_announced, self._shared, mark),
                )
                report = freeing(self._shared, work)
            storage.delete([] if report.warnings else infos)
            if self._expected:
                metrics = self._shared.list(metrics_of(self._step, self._expected))
                self._shared.delete([entry.key for entry in metrics])
            return report
        finally:
            # Why all deletions: a manager may delete another step because this one existed.
            fence(
                self._shared,
                lambda name: open_storage(place_below(self._run, name)),
                f"step {self._step} was removed",
            )

    @property
    def _expected(self) -> str | None:
        """Attempt id of the step as it was read; "" if nothing is committed, None if unknown."""
        if self._view.manifest is not None:
            return self._view.manifest.attempt
        return None if self._view.state == "damaged" else ""

    @contextmanager
    def _taken_away(self, shared: Storage, step: int) -> Iterator[None]:
        """Removes tags and note for the deletion in the block, and restores them if it fails.

        *Why before the deletion*: the step may be saved again right after it, with other tags.
        """
        marks = {tag_key(step, tag): b"" for tag in self.tags}
        note = read_if_there(shared, note_key(step))
        marks |= {} if note is None else {note_key(step): note}
        shared.delete([*marks])
        try:
            yield
        except CheckpointError:
            for key, data in marks.items():
                shared.write(key, data)
            raise

    def _look(self) -> None:
        if self._shared is None:
            return
        found = tags_in(entry.key for entry in self._shared.list(f"{TAGS}{self._step}."))
        self.tags = tuple(sorted(found.get(self._step or 0, ())))
        leases = [entry.key for entry in self._shared.list(f"{READING}{self._step}.")]
        self.readers = tuple(filter(None, (_reader(self._shared, key) for key in leases)))


def _reader(shared: Storage, lease: str) -> str:
    """Returns the holder of a reader lease as text; "" if its process has ended."""
    from ray_dcp.manager.leases import LeaseHolder, this_process

    data = read_if_there(shared, lease)
    if data is None:
        return ""
    holder = LeaseHolder.decode(data)
    if holder is None:
        return "an unknown process"
    return "" if holder.lives_here(this_process()) is False else str(holder)


@click.command()
@click.argument("root", type=PLACE)
@click.option(
    "--abort-unfinished",
    is_flag=True,
    help="End saves that may still be committed, too: right when their jobs have ended.",
)
@click.option("--quiet", is_flag=True, help="Name no files.")
@yes
@dry_run
def gc(root: str, abort_unfinished: bool, quiet: bool, yes: bool, dry_run: bool) -> None:
    """Delete files that crashed and aborted saves left at and below ROOT; checkpoints are kept."""
    run = run_at(root)
    ours = [step for step in run if step.state not in (*FOREIGN, "unreadable")]
    planned = _collect(ours, abort_unfinished=abort_unfinished, dry_run=True)
    count = sum(len(report.deleted) for _, report in planned)
    size = size_text(sum(report.num_bytes for _, report in planned))
    if not dry_run and (count or abort_unfinished):
        agree(f"delete {count_text(count, 'file')} ({size}) at and below {root}", yes=yes)
        planned = _collect(ours, abort_unfinished=abort_unfinished, dry_run=False)
        if any(is_full(warning) for _, report in planned for warning in report.warnings):
            shared = open_storage(place_below(run.place, SHARED_FOLDER))
            shared.delete([RESERVE])  # for the records that end saves
            planned += _collect(ours, abort_unfinished=abort_unfinished, dry_run=False)
            keep_reserve(shared)
    folders = {step.name for step in run}
    planned = [(name, _without_known(name, report, folders)) for name, report in planned]
    open_saves = any(report.kept for _, report in planned)
    shown = [pair for pair in planned if pair[1].deleted or pair[1].warnings or pair[1].kept]
    freed = size_text(sum(report.num_bytes for _, report in planned))
    lines = [f"{'would free' if dry_run else 'freed'} {freed}"]
    lines += [f"{one.name}: left alone: {one.detail}" for one in run if one.state == "unreadable"]
    if open_saves and not abort_unfinished:
        lines.append(
            "if no job saves there any more: --abort-unfinished ends and deletes those, too"
        )
    _tell(shown, *lines, dry_run=dry_run, quiet=quiet)


def _without_known(name: str, report: CollectReport, folders: Collection[str]) -> CollectReport:
    """Leaves out kept files that a manager removes itself: step infos, and items of a step."""

    def is_known(key: str) -> bool:
        path = key if name == "." else f"{name}/{key}"
        above = (one for one in folders_above(path) if one in folders)
        return info_slot(key) is not None or any(one != name for one in above)

    return replace(report, kept=tuple(one for one in report.kept if not is_known(one.key)))


def _collect(
    steps: Sequence[StepView], *, abort_unfinished: bool, dry_run: bool
) -> list[tuple[str, CollectReport]]:
    from ray_dcp.runtime.garbage_collection import collect

    reports = []
    for step in steps:
        try:
            found = collect(step.path, abort_unfinished=abort_unfinished, dry_run=dry_run)
            reports.append((step.name, found))
        except CheckpointError as error:
            # Why continue: a damaged folder must not prevent the cleanup of the others.
            click.echo(f"{step.name}: left alone: {error.message}", err=True)
    return reports


def _tell(
    reports: Sequence[tuple[str, CollectReport]], *more: str, dry_run: bool, quiet: bool
) -> None:
    verb, lines = "would delete" if dry_run else "deleted", list[str]()
    reports = [(name, _without_known(name, report, ())) for name, report in reports]
    for name, report in reports:
        count, size = count_text(len(report.deleted), "file"), size_text(report.num_bytes)
        lines.append(
            f"{name}: {f'{verb} {count}, {size}' if report.deleted else 'nothing to delete'}"
        )
        if not quiet:
            lines += [f"  {key}" for key in report.deleted[:_MOST_SHOWN]]
            if len(report.deleted) > _MOST_SHOWN:
                lines.append(f"  ... and {len(report.deleted) - _MOST_SHOWN} more")
            for one in report.kept[:_MOST_SHOWN]:
                lines.append(f"  kept {one.key}: {one.reason.replace('attempt', 'the save')}")
        for warning in report.warnings:
            click.echo(f"warning: {warning}", err=True)
    value = [
        {
            "name": name,
            "deleted": list(report.deleted),
            "kept": {one.key: one.reason for one in report.kept},
            "num_bytes": report.num_bytes,
            "warnings": list(report.warnings),
        }
        for name, report in reports
    ]
    told({"dry_run": dry_run, "places": value}, *lines, *more)


@click.command()
@click.argument("step", type=PLACE)
@click.argument("tags", nargs=-1)
@click.option("--remove", is_flag=True, help="Remove these tags.")
@click.option("--note", metavar="TEXT", help="Put a note on the step; '' removes it.")
@dry_run
def tag(step: str, tags: tuple[str, ...], remove: bool, note: str | None, dry_run: bool) -> None:
    """Add tags or a note to STEP, such as RUN@500; without any, print those it has.

    A CheckpointManager never deletes a step that has a tag.
    """
    run, found = step_in_run(step)
    for one in tags:
        check_tag(one, existing=remove)
    if note is not None:
        check_note(note)
    if remove and not tags:
        raise InvalidRequestError("which tags are to be removed? Name them after the step")
    lines, verb = list[str](), "would have" if dry_run else "has"
    if not tags and note is None:
        lines = [*found.tags, *([f"note: {found.note}"] if found.note else [])]
    else:
        run.check_step(found.name)
    if not dry_run:
        run = run.tag(found.name, *tags, remove=remove) if tags else run
        run = run if note is None else run.annotate(found.name, note)
    if tags:
        lines.append(f"{found.name} {verb} {'no longer ' if remove else ''}{' '.join(tags)}")
    if note is not None:
        lines.append(f"{found.name} {verb} the note {note!r}")
    now = run.step(found.name)
    told({"name": now.name, "tags": list(now.tags), "note": now.note, "dry_run": dry_run}, *lines)


@click.command()
@click.argument("path", type=PLACE)
@dry_run
def metadata(path: str, dry_run: bool) -> None:
    """Write the .metadata of the checkpoint at PATH, so that stock DCP can read it.

    Use it for a checkpoint that was saved with SaveOptions(stock_metadata=False), or copied without
    its dot file.
    """
    from ray_dcp.runtime.standing import write_metadata
    from ray_dcp.view.checkpoint_view import read_view

    path, place, _ = address_of(path)
    value = {"path": path, "dry_run": dry_run}
    if dry_run:
        view = read_view(place)
        told(value, f"would write {view.url}/.metadata of {len(view)} tensors and objects")
    elif write_metadata(absolute_target(place)):
        told(value, f"stock DCP can read {path}")
    else:
        raise CheckpointExistsError(f"{path} was replaced meanwhile by a save without .metadata")
