"""`RunView`: the checkpoints of a run, step by step, and what space they take.

`open` finds out what is at a path: one checkpoint, whose content `checkpoint_view` shows, or a run.
`usage_of` returns what takes how much space, by whose the files are. Needs neither torch nor ray.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from ray_dcp.commit_protocol.garbage import owner_of
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import CheckpointError, CheckpointNotFoundError, InvalidRequestError
from ray_dcp.format.names import SHARED_FOLDER, TAGS, check_note, check_tag, note_key, tag_key
from ray_dcp.format.save_trace import SaveTrace
from ray_dcp.format.step_info import info_slot
from ray_dcp.io.records import fence
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import absolute_target, as_target, open_storage, place_below
from ray_dcp.view.checkpoint_view import CheckpointView, layout_text, open_checkpoint
from ray_dcp.view.difference import diff_tables
from ray_dcp.view.naming import (
    best_of_run,
    choose,
    nearest,
    passed_over,
    passed_over_text,
    split_address,
)
from ray_dcp.view.run_listing import (
    FOREIGN,
    ListedCheckpoint,
    folders_above,
    list_checkpoints,
    readable_entries,
)
from ray_dcp.view.trace import read_trace
from ray_dcp.view.wording import size_text


@dataclass(frozen=True, eq=False, repr=False)
class StepView(ListedCheckpoint):
    """One step of a run as it was listed; what is in it is read when it is asked for."""

    _run: RunView = field(kw_only=True)
    # Why: what is listed holds mappings, which have no hash.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def path(self) -> Target:
        """Where it lies: for `ray_dcp.load`, `verify`, `delete` and others."""
        return place_below(self._run.place, self.name) if self.name != "." else self._run.place

    @cached_property
    def view(self) -> CheckpointView:
        """The checkpoint.

        Raises:
            CheckpointError: As `ray_dcp.open` does.
        """
        return open_checkpoint(self.path)

    @cached_property
    def layout(self) -> str | None:
        """How its tensors are cut, in words, as `rows/8`; None where that can't be read."""
        try:
            return layout_text(self.view.checkpoint.table)
        except CheckpointError:
            return None

    @cached_property
    def new_bytes(self) -> int | None:
        """Bytes of tensors and objects that are not the same in the step before.

        By the stored hashes: nothing but the two chunk tables is read. All bytes for the first
        step; None where hashes can't decide: stock checkpoints, or chunks that were cut otherwise.
        """
        before = self._run.before(self)
        try:
            if before is None:
                return int(self.view.checkpoint.table.payload_bytes.sum())
            return diff_tables(before.view.table, self.view.table).new_bytes
        except CheckpointError:
            return None

    @cached_property
    def trace(self) -> SaveTrace | None:
        """The course of its save; None when that left none, or one that can't be read."""
        manifest = self.manifest
        try:
            storage = open_storage(self.path)
            return read_trace(storage, None if manifest is None else manifest.attempt)
        except CheckpointError:
            return None

    @property
    def stall_s(self) -> float | None:
        """How long training waited for the save, in seconds; None if that was not recorded."""
        return None if self.trace is None else self.trace.stall_s

    @property
    def durable_s(self) -> float | None:
        """From the begin of the save to its commit, in seconds; None if that was not recorded."""
        return None if self.trace is None else self.trace.committed_s

    @property
    def reused_bytes(self) -> Mapping[str, int]:
        """Bytes that its save did not write, `linked` or `copied`; empty if that is not known."""
        if self.trace is None:
            return {}
        found = {"linked": self.trace.linked_bytes, "copied": self.trace.copied_bytes}
        return {how: num_bytes for how, num_bytes in found.items() if num_bytes}

    def __repr__(self) -> str:
        return f"StepView({self.name!r}, {self.state}, {size_text(self.num_bytes)})"


@dataclass(frozen=True, eq=False, repr=False)
class RunView:
    """The checkpoints at and below a directory, as they were when it was opened.

    Iterating gives a `StepView` for each, oldest first; `run["latest"]`, `run["best"]`, `run[500]`,
    `run["a-tag"]` and `run["step-500"]` open one. Reads names and small records only.

    Examples:
        >>> import ray_dcp, torch
        >>> for step in (1, 2):
        ...     _ = ray_dcp.save({"w": torch.ones(2)}, checkpoint_id=f"memory://doc-run/step-{step}")
        >>> run = ray_dcp.open("memory://doc-run")
        >>> [(step.step, step.state) for step in run], run["latest"]["w"][0:1]
        ([(1, 'committed'), (2, 'committed')], array([1.], dtype=float32))
        >>> run.tag(1, "before-lr-drop")["before-lr-drop"].url
        'memory://doc-run/step-1'
    """

    place: Target
    """Where the run lies."""
    steps: tuple[StepView, ...] = field(init=False)
    """By step, then by name."""
    _listed: InitVar[tuple[ListedCheckpoint, ...]] = ()

    def __post_init__(self, _listed: tuple[ListedCheckpoint, ...]) -> None:
        steps = tuple(StepView(**vars(one), _run=self) for one in _listed)
        object.__setattr__(self, "steps", steps)

    @property
    def url(self) -> str:
        """Absolute path or URL."""
        return open_storage(self.place).url

    @property
    def present(self) -> tuple[StepView, ...]:
        """The steps of which more is left than the record that they were deleted."""
        return tuple(one for one in self.steps if one.state != "deleted" or one.detail)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[StepView]:
        return iter(self.steps)

    def __getitem__(self, key: int | str) -> CheckpointView:
        """Opens one checkpoint.

        Args:
            key: A step number; `latest`; `best`, `best:METRIC` or `best:METRIC:min`; a tag; or the
                name of a folder.

        Raises:
            CheckpointNotFoundError: There is none; the message offers the nearest.
            InvalidRequestError: It is not clear which is meant.
            CheckpointError: It can't be opened; see `ray_dcp.open`.

        Warns:
            UserWarning: `latest` or `best` would be another step, which is damaged.
        """
        found = self.step(key)
        over = passed_over(self.steps, key, found)
        if over is not None:
            told = passed_over_text(over, found, key)
            warnings.warn(f"{told} in {self.url}", UserWarning, stacklevel=2)
        return found.view

    def step(self, key: int | str) -> StepView:
        """Returns a step without opening its checkpoint; see `__getitem__`."""
        return choose(self.steps, key, url=self.url)

    def best(self, metric: str | None = None, mode: str | None = None) -> StepView:
        """Returns the step with the best value of a metric.

        Args:
            metric: Name; the only one that there is if None.
            mode: `"min"` or `"max"`; by the name of the metric if None.

        Raises:
            CheckpointNotFoundError: No step has the metric.
            InvalidRequestError: It is not clear which metric is meant, or which values are best.
        """
        return best_of_run(self.steps, metric, mode, url=self.url)

    def before(self, step: StepView) -> StepView | None:
        """Returns the last readable step before one; None for the first."""
        at = self.steps.index(step)
        return next((one for one in reversed(self.steps[:at]) if one.is_readable), None)

    def refresh(self) -> RunView:
        """Returns the run as it is now."""
        return open_run(self.place)

    def tag(self, key: int | str, *tags: str, remove: bool = False) -> RunView:
        """Gives tags to a step, or takes them away; retention keeps the steps that have one.

        Args:
            key: Of the step; see `__getitem__`.
            *tags: 1 to 64 letters, digits, `.`, `_` or `-`; not `latest`, `best` or a number.
            remove: Take them away.

        Returns:
            The run as it is now. Warns where a deletion that was announced before may still happen:
            on a storage that can't create a file only if there is none.

        Raises:
            InvalidRequestError: A tag can't be one, as `latest`, `best` or a number, or is the
                name of a folder; or the step has no number.
            CheckpointNotFoundError: There is no such step, or it was deleted.
            StorageError: It could not be written.
        """
        number = self.check_step(key)
        keys = [tag_key(number, check_tag(tag, existing=remove)) for tag in tags]
        folders = {} if remove else {one.name for one in self}.intersection(tags)
        if folders:
            raise InvalidRequestError(
                f"the tag {min(folders)!r} is the name of a folder of {self.url}, which is meant "
                f"by it; choose another one",
                key="tags",
            )
        shared = open_storage(place_below(self.place, SHARED_FOLDER))
        if remove:
            shared.delete(keys)
            return self.refresh()
        for one in keys:
            shared.write(one, b"")
        # Why after that: who deletes the step announces it, and looks for tags then.
        unsure = fence(
            shared,
            lambda name: open_storage(place_below(self.place, name)),
            f"step {number} was given a tag",
            number,
        )
        run, name = self.refresh(), self.step(key).name
        found = next((one for one in run if one.name == name), None)
        # Why listed: the step may have been deleted, with its tags, and saved again meanwhile.
        there = {entry.key for entry in shared.list(f"{TAGS}{number}.")}
        if found is None or found.state == "deleted" or not there.issuperset(keys):
            shared.delete(keys)
            raise CheckpointNotFoundError(
                f"expected step {number} in {self.url}, but it was deleted before it had the tag"
            )
        if unsure:
            warnings.warn(unsure, UserWarning, stacklevel=2)
        return run

    def annotate(self, key: int | str, note: str) -> RunView:
        """Puts a text on a step, in place of the one that is there; an empty one removes it.

        Args:
            key: Of the step; see `__getitem__`.
            note: At most 64 KiB.

        Returns:
            The run as it is now.

        Raises:
            InvalidRequestError: The note is too long, or the step has no number.
            CheckpointNotFoundError: There is no such step.
            StorageError: It could not be written.
        """
        number, data = self.check_step(key), check_note(note)
        shared = open_storage(place_below(self.place, SHARED_FOLDER))
        if data:
            shared.write(note_key(number), data)
        else:
            shared.delete([note_key(number)])
        return self.refresh()

    def check_step(self, key: int | str) -> int:
        """Returns the number of a step after checking that it can have tags and notes.

        Args:
            key: Of the step; see `__getitem__`.

        Raises:
            InvalidRequestError: The step has no number, or lies deeper in the run.
            CheckpointNotFoundError: There is no such step.
        """
        found = self.step(key)
        if found.step is None or "/" in found.name or found.name == ".":
            raise InvalidRequestError(
                f"tags and notes are for steps with a number directly in the run, but "
                f"{found.name!r} in {self.url} is none"
            )
        return found.step

    def _repr_html_(self) -> str:
        from ray_dcp.view.pictures.tables import picture_steps

        return picture_steps(self).html

    def __repr__(self) -> str:
        return f"RunView({self.url!r}, {len(self)} checkpoints)"


def open_run(place: AnyPlace) -> RunView:
    """Returns the checkpoints at and below a directory; none where there is none.

    Args:
        place: Path, URL, `Location` or filesystem.

    Raises:
        StorageError: The storage refused to list.
    """
    target = absolute_target(place)
    return RunView(target, list_checkpoints(target))


def open(path: AnyPlace) -> CheckpointView | RunView:  # noqa: A001 - the public name
    """Returns a view of what is at a path: a `CheckpointView`, or a `RunView` of a directory.

    Args:
        path: Path or URL of a checkpoint or of a run; or `RUN@STEP`, where STEP is a number,
            `latest`, `best`, `best:METRIC`, a tag or a folder.

    Raises:
        CheckpointNotFoundError: There is neither; the message lists what is there, or near.
        UncommittedCheckpointError: Files of a save are there, but it was never committed.
        DamagedCheckpointError: The manifest or chunk table can't be trusted.
        StorageError: The storage refused.
    """
    try:
        return open_checkpoint(path)
    except CheckpointNotFoundError as error:
        if isinstance(path, (str, os.PathLike)) and os.path.isfile(path):
            raise
        run = open_run(path)
        if any(one.name != "." for one in run):
            return run
        root, step = split_address(path) if isinstance(path, str) else ("", None)
        if step is None:
            error.message += nearest_paths(path)
            raise
    run = open_run(root)
    if not len(run):
        raise CheckpointNotFoundError(
            f"expected a run with steps in {run.url}, found no checkpoint" + nearest_paths(root)
        )
    return run[step]


def nearest_paths(place: AnyPlace) -> str:
    """Returns a hint at folders with a similar name; only a local directory is looked at.

    Args:
        place: Where nothing was found.
    """
    path = Path(as_target(place).url)
    try:
        if path.exists() or not path.parent.is_dir():
            return ""
        return nearest(path.name, [one.name for one in path.parent.iterdir() if one.is_dir()])
    except OSError:
        return ""


Kind = Literal["data", "left", "records", "other"]
KINDS: tuple[Kind, ...] = ("data", "left", "records", "other")


@dataclass(frozen=True)
class Usage:
    """Bytes of one folder."""

    name: str
    """Of the checkpoint, or of another folder."""
    num_bytes: Mapping[str, int]
    """By kind: `data` of what is committed; `left`: of attempts that are not; `records`: manifests,
    chunk tables, `.metadata` and infos of steps; `other`: what other programs wrote."""
    shared_bytes: int = 0
    """The part of them that takes no space, as a file that was counted before has the same bytes on
    the disk (hard links)."""

    @property
    def total_bytes(self) -> int:
        """Space that all kinds take."""
        return sum(self.num_bytes.values()) - self.shared_bytes


def usage_of(run: RunView) -> list[Usage]:
    """Returns what takes how much space, checkpoint by checkpoint, then what else is in the run.

    Args:
        run: As it was listed.

    Raises:
        StorageError: The storage refused to list.

    Complexity:
        One listing.
    """
    by_name = {step.name: step for step in run}
    found: dict[str, Counter[str]] = {name: Counter() for name in by_name}
    seen: set[object] = set()
    for entry in readable_entries(open_storage(run.place))[0]:
        name = _owner(entry.key, by_name)
        if name is None:
            top = entry.key.partition("/")[0] + ("/" if "/" in entry.key else "")
            kind = "records" if top == f"{SHARED_FOLDER}/" else "other"
            found.setdefault(name := top, Counter())[kind] += entry.num_bytes
        else:
            key = entry.key if name == "." else entry.key[len(name) + 1 :]
            found[name][_kind(key, by_name[name])] += entry.num_bytes
        if entry.shares is not None:
            found[name]["shared"] += entry.num_bytes if entry.shares in seen else 0
            seen.add(entry.shares)
    return [
        Usage(name, {kind: counts[kind] for kind in KINDS}, counts["shared"])
        for name, counts in found.items()
    ]


def _owner(key: str, by_name: Mapping[str, StepView]) -> str | None:
    """Returns the deepest checkpoint that a file lies in."""
    above = (folder for folder in folders_above(key) if folder in by_name)
    return next(above, "." if "." in by_name else None)


def _kind(key: str, step: StepView) -> Kind:
    manifest = step.manifest
    if step.state in FOREIGN:
        return "records" if key == ".metadata" or key.endswith(".json") else "data"
    if manifest is not None and any(entry.key == key for entry in manifest.files):
        return "data"
    if info_slot(key) is not None:
        return "records"
    owned = owner_of(key)
    if owned is None:
        return "other"
    standing = manifest is not None and owned.attempt == manifest.attempt
    is_small = owned.kind in ("record", "metadata")
    return "records" if is_small or (standing and owned.kind != "data") else "left"
