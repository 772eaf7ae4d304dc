"""`RunView`: the checkpoints of a run.

`open` returns a view of what a path contains: one checkpoint (`checkpoint_view`) or a run. Needs
neither torch nor Ray.
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core.quantities import age_text, count_text, number_text, seconds_text, size_text
from ray_dcp.core.values import ChunkTable
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidRequestError,
)
from ray_dcp.format.names import SHARED_FOLDER, TAGS, check_note, check_tag, note_key, tag_key
from ray_dcp.format.save_trace import SaveTrace
from ray_dcp.io.announced_deletions import fence
from ray_dcp.io.checkpoint import table_of
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import absolute_target, as_target, open_storage, place_below
from ray_dcp.view import drawing as draw
from ray_dcp.view.checkpoint_view import (
    COLUMNS_OF_LAYOUT,
    CheckpointView,
    layout_of_most,
    read_view,
    trace_of,
)
from ray_dcp.view.difference import new_bytes
from ray_dcp.view.drawing import AMBER, GREY, RED, Picture
from ray_dcp.view.run_listing import (
    ListedCheckpoint,
    list_checkpoints,
    look_into,
    step_of,
)
from ray_dcp.view.step_choice import (
    best_of_run,
    choose,
    is_number,
    passed_over,
    passed_over_text,
    steps_text,
)
from ray_dcp.view.step_part import StepPart
from ray_dcp.view.wording import nearest

if TYPE_CHECKING:
    import pandas
    import pyarrow


@dataclass(frozen=True, eq=False, repr=False)
class StepView(ListedCheckpoint):
    """A step of a run as it was listed. Its content is read on first access."""

    _run: RunView = field(kw_only=True)
    # Why: the fields contain mappings, which have no hash.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def path(self) -> Target:
        """Location of the step, accepted by `ray_dcp.load`, `verify`, `delete` and others."""
        return place_below(self._run.place, self.name) if self.name != "." else self._run.place

    @property
    def run_place(self) -> Target:
        """Where its run lies."""
        return self._run.place

    @cached_property
    def view(self) -> CheckpointView:
        """The checkpoint.

        Raises:
            CheckpointError: As for `ray_dcp.open`.
        """
        return read_view(self.path)

    @property
    def whole_bytes(self) -> int:
        """Number of bytes of all its files, and of those of its items."""
        return self.num_bytes + sum(one.num_bytes for one in self._run.items_of(self))

    @cached_property
    def parts(self) -> Mapping[str, StepPart]:
        """Its parts or items, by name; empty for a step with a single state.

        Of a step that can't be read, their folders alone are known.
        """
        if self.items and self.is_readable:
            # Suppressed: it is loaded without what the step says of its parts.
            with suppress(CheckpointError):
                return self.view.parts
        return {name: StepPart(folder=folder) for name, folder in self.items.items()}

    @cached_property
    def layout(self) -> str | None:
        """How most of its tensors are cut, such as `rows/8`; None if that can't be read."""
        before = self._run.before(self)
        try:
            # Why: of two saves of a plan the columns are the same objects, and so is the layout.
            if before is not None and {"layout", "_table"} <= vars(before).keys():
                one, other = before._table, self._table
                if all(getattr(one, name) is getattr(other, name) for name in COLUMNS_OF_LAYOUT):
                    return before.layout
            return layout_of_most(self._table)
        except CheckpointError:
            return None

    @cached_property
    def new_bytes(self) -> int | None:
        """Number of bytes of tensors and objects that differ from the previous step.

        The stored hashes are compared; only the two chunk tables are read. All bytes of the first
        step are new. None if hashes can't decide: for checkpoints of stock DCP, or if the chunks
        were cut differently.
        """
        before = self._run.before(self)
        try:
            if before is None:
                return int(self._table.payload_bytes.sum())
            return new_bytes(before._table, self._table)
        except CheckpointError:
            return None

    @cached_property
    def _table(self) -> ChunkTable:
        """The chunk table with all checksums.

        Raises:
            CheckpointError: It can't be read.
        """
        # Why by the listed record: it need not be looked for again. Why suppressed: another save to
        # the same place may have replaced it since.
        if self.manifest is not None:
            with suppress(DamagedCheckpointError):
                found = table_of(open_storage(self.path), self.manifest)
                found.read(range(len(found.table.files)))
                return found.table
        return self.view.table

    @cached_property
    def trace(self) -> SaveTrace | None:
        """Trace of its save; None if there is none, or if it can't be read."""
        manifest = self.manifest
        try:
            storage = open_storage(self.path)
            return trace_of(storage, None if manifest is None else manifest.attempt)
        except CheckpointError:
            return None

    @property
    def stall_s(self) -> float | None:
        """How long training waited for the save, in seconds; None if unknown."""
        return None if self.trace is None else self.trace.stall_s

    @property
    def durable_s(self) -> float | None:
        """Time from the start of the save to its commit, in seconds; None if unknown."""
        return None if self.trace is None else self.trace.committed_s

    @property
    def reused_bytes(self) -> Mapping[str, int]:
        """Number of bytes that its save `linked` or `copied`, not written; empty if unknown."""
        if self.trace is None:
            return {}
        found = {"linked": self.trace.linked_bytes, "copied": self.trace.copied_bytes}
        return {how: num_bytes for how, num_bytes in found.items() if num_bytes}

    def __repr__(self) -> str:
        return f"StepView({self.name!r}, {self.state}, {size_text(self.num_bytes)})"


@dataclass(frozen=True, eq=False, repr=False)
class RunView:
    """The checkpoints at and below a directory, as they were when it was opened.

    Iteration yields a `StepView` for each, oldest first. `run["latest"]`, `run["best"]`,
    `run[500]`, `run["a-tag"]` and `run["step-500"]` open a checkpoint. Only names and small records
    are read.

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
    """Location of the run."""
    steps: tuple[StepView, ...] = field(init=False)
    """All steps, sorted by run, step and name."""
    _listed: InitVar[tuple[ListedCheckpoint, ...]] = ()

    def __post_init__(self, _listed: tuple[ListedCheckpoint, ...]) -> None:
        steps = tuple(StepView(**_values(one), _run=self) for one in _listed)
        object.__setattr__(self, "steps", steps)

    @property
    def url(self) -> str:
        """Absolute path or URL."""
        return open_storage(self.place).url

    @property
    def present(self) -> tuple[StepView, ...]:
        """The steps, without those of which only the delete record is left."""
        return tuple(one for one in self.steps if one.state != "deleted" or one.detail)

    @cached_property
    def runs(self) -> tuple[RunView, ...]:
        """Each run at and below the directory, with names and steps of its own; this run first.

        A run is the folder that contains the folders of steps directly.
        """
        folders = dict.fromkeys(one.run for one in self.steps)
        if set(folders) <= {""}:
            return (self,)
        return tuple(
            RunView(
                place_below(self.place, folder) if folder else self.place,
                tuple(_in_its_run(one) for one in self.steps if one.run == folder),
            )
            for folder in folders
        )

    def items_of(self, step: StepView) -> tuple[StepView, ...]:
        """Returns the items of a step as they were listed, each a checkpoint of its own."""
        return self._items.get(step.name, ())

    # Why all at once: a table of 10,000 steps asks for each.
    @cached_property
    def _items(self) -> Mapping[str, tuple[StepView, ...]]:
        found: dict[str, list[StepView]] = {}
        for one in self.steps:
            if one.is_item:
                found.setdefault(one.name.rpartition("/")[0] or ".", []).append(one)
        return {name: tuple(some) for name, some in found.items()}

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[StepView]:
        return iter(self.steps)

    def __getitem__(self, key: int | str) -> CheckpointView:
        """Opens a checkpoint of the run.

        Args:
            key: A step number; `latest`; `trusted` or `trusted:NAME`; `best`, `best:METRIC` or
                `best:METRIC:min`; a tag; or the name of a folder.

        Raises:
            CheckpointNotFoundError: The run has no such step; the message suggests similar ones.
            InvalidRequestError: The key is ambiguous.
            CheckpointError: The checkpoint can't be opened; see `ray_dcp.open`.

        Warns:
            UserWarning: `latest`, `trusted` or `best` skips a damaged step.
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
            metric: Name of the metric; by default the only one.
            mode: `"min"` or `"max"`; by default derived from the name of the metric.

        Raises:
            CheckpointNotFoundError: No step has the metric.
            InvalidRequestError: There are several metrics, or the mode can't be derived.
        """
        return best_of_run(self.steps, metric, mode, url=self.url)

    def before(self, step: StepView) -> StepView | None:
        """Returns the last readable step before a step in its run; None if there is none.

        Before an item of a step, that is the item of the same name in an earlier step.
        """
        return self._predecessors.get(step.name)

    # Why all at once: a table of 10,000 steps asks for each.
    @cached_property
    def _predecessors(self) -> Mapping[str, StepView | None]:
        newest: dict[tuple[str, str], StepView] = {}
        found: dict[str, StepView | None] = {}
        for (item, *_), step in ((_order(one), one) for one in sorted(self.steps, key=_order)):
            found[step.name] = newest.get(item)
            if step.is_readable:
                newest[item] = step
        return found

    def refresh(self) -> RunView:
        """Returns a view of the current state of the run."""
        return read_run(self.place)

    def to_arrow(self, *, details: bool = True) -> pyarrow.Table:
        """Returns the steps as a `pyarrow.Table`, a row for each, oldest first.

        The columns are `name`, `step`, `state`, `created` (UTC), `num_bytes`, `num_ranks`, `tags`,
        `note`, `url`; the details `new_bytes`, `linked_bytes`, `copied_bytes`, `stall_s` and
        `durable_s`, with the meaning that they have in `StepView`; and `metrics.<name>` for each
        metric of the run. What is unknown is null. Deleted steps are left out.

        Args:
            details: Include the details, which takes some small reads for each step.

        Raises:
            StorageError: The storage failed.
        """
        import pyarrow

        # Why Any: pyarrow has no type information.
        pa: Any = pyarrow
        steps = self.present
        types = {
            "name": pa.string(), "step": pa.int64(), "state": pa.string(),
            "created": pa.timestamp("us", tz="UTC"), "num_bytes": pa.int64(),
            "num_ranks": pa.int64(), "tags": pa.list_(pa.string()), "note": pa.string(),
            "url": pa.string(),
        }  # fmt: skip
        if details:
            look_into(open_storage(self.place), steps, _details)
            sizes = dict.fromkeys(("new_bytes", "linked_bytes", "copied_bytes"), pa.int64())
            types |= {**sizes, "stall_s": pa.float64(), "durable_s": pa.float64()}
        rows = []
        for step in steps:
            created_us = None if step.created_s is None else round(step.created_s * 1e6)
            own = {"created": created_us, "url": open_storage(step.path).url}
            rows.append(vars(step) | own | (_details(step) if details else {}))
        columns = {
            name: pa.array([row[name] for row in rows], type_) for name, type_ in types.items()
        }
        for name in sorted({name for step in steps for name in step.metrics}):
            values = [step.metrics.get(name) for step in steps]
            columns[f"metrics.{name}"] = pa.array(values, pa.float64())
        return pa.table(columns)

    def to_pandas(self, *, details: bool = True) -> pandas.DataFrame:
        """Returns the steps as a `pandas.DataFrame` with the columns of `to_arrow`.

        Args:
            details: As for `to_arrow`.

        Raises:
            InvalidRequestError: pandas is not installed.
            StorageError: The storage failed.

        Examples:
            >>> import ray_dcp, torch
            >>> with ray_dcp.CheckpointManager("memory://doc-frame", 1) as manager:
            ...     for step, loss in ((1, 0.5), (2, 0.25)):
            ...         _ = manager.save(step, {"w": torch.ones(2)}, metrics={"loss": loss})
            >>> frame = ray_dcp.open("memory://doc-frame").to_pandas()
            >>> frame[["step", "metrics.loss", "new_bytes"]].to_dict("list")
            {'step': [1, 2], 'metrics.loss': [0.5, 0.25], 'new_bytes': [8, 0]}
        """
        try:
            import pandas
        except ImportError as error:
            raise InvalidRequestError(
                "to_pandas needs pandas, which is not installed: pip install pandas, or use "
                "to_arrow"
            ) from error
        table = self.to_arrow(details=details)
        # Why: numbers with gaps would become floating-point.
        integers = {"int64": pandas.Int64Dtype()}
        return table.to_pandas(types_mapper=lambda kind: integers.get(str(kind)))

    def tag(self, key: int | str, *tags: str, remove: bool = False) -> RunView:
        """Adds tags to a step, or removes them. Retention keeps steps that have tags.

        Args:
            key: Key of the step; see `__getitem__`.
            *tags: 1 to 64 letters, digits, `.`, `_` or `-`; not `latest`, `best` or a number.
            remove: Remove the tags.

        Returns:
            A view of the current state of the run.

        Raises:
            InvalidRequestError: A tag is not allowed, or is the name of a folder; or the step has
                no number.
            CheckpointNotFoundError: There is no such step, or it was deleted.
            StorageError: The storage failed.

        Warns:
            UserWarning: The storage has no conditional creation, and a deletion of the step that
                was announced before may still be committed.
        """
        number = self.check_step(key)
        keys = [tag_key(number, check_tag(tag, existing=remove)) for tag in tags]
        folders = {} if remove else {one.name for one in self}.intersection(tags)
        if folders:
            raise InvalidRequestError(
                f"the tag {min(folders)!r} is the name of a folder of {self.url}; choose another "
                f"tag",
                key="tags",
            )
        shared = open_storage(place_below(self.place, SHARED_FOLDER))
        fenced = partial(fence, shared, lambda name: open_storage(place_below(self.place, name)))
        if remove:
            shared.delete(keys)
            # Why: another deletion may have been decided because this step was trusted.
            fenced(f"a tag of step {number} was removed", None)
            return self.refresh()
        for one in keys:
            shared.write(one, b"")
        # Why after the write: a process that deletes the step announces that first, and then reads
        # the tags.
        unsure = fenced(f"step {number} was given a tag", number)
        run, name = self.refresh(), self.step(key).name
        found = next((one for one in run if one.name == name), None)
        # Why listed: the step and its tags may have been deleted, and the step saved again.
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
        """Sets the note of a step; an empty text removes it.

        Args:
            key: Key of the step; see `__getitem__`.
            note: Text of at most 64 KiB.

        Returns:
            A view of the current state of the run.

        Raises:
            InvalidRequestError: The note is too long, or the step has no number.
            CheckpointNotFoundError: There is no such step.
            StorageError: The storage failed.
        """
        number, data = self.check_step(key), check_note(note)
        shared = open_storage(place_below(self.place, SHARED_FOLDER))
        if data:
            shared.write(note_key(number), data)
        else:
            shared.delete([note_key(number)])
        return self.refresh()

    def check_step(self, key: int | str) -> int:
        """Returns the number of a step after checking that the step can have tags and notes.

        Args:
            key: Key of the step; see `__getitem__`.

        Raises:
            InvalidRequestError: The step has no number, or is not directly in the run.
            CheckpointNotFoundError: There is no such step.
        """
        found = self.step(key)
        if found.step is None or "/" in found.name or found.name == ".":
            raise InvalidRequestError(
                f"only steps with a number directly in the run have tags and notes, but "
                f"{found.name!r} in {self.url} is none"
            )
        return found.step

    def _repr_html_(self) -> str:
        return picture_steps(self).html

    def __repr__(self) -> str:
        return f"RunView({self.url!r}, {len(self)} checkpoints)"


def _details(step: StepView) -> dict[str, object]:
    """Returns the details of `RunView.to_arrow`; the step keeps what is read for them."""
    reused = None if step.trace is None else step.reused_bytes
    return {
        "new_bytes": step.new_bytes if step.is_readable else None,
        "linked_bytes": None if reused is None else reused.get("linked", 0),
        "copied_bytes": None if reused is None else reused.get("copied", 0),
        "stall_s": step.stall_s,
        "durable_s": step.durable_s,
    }


def read_run(place: AnyPlace) -> RunView:
    """Returns the checkpoints at and below a directory; an empty run if there are none.

    Args:
        place: Path, URL, `Location` or filesystem.

    Raises:
        StorageError: The storage can't be listed.
    """
    target = absolute_target(place)
    return RunView(target, list_checkpoints(target))


def _values(one: ListedCheckpoint) -> dict[str, Any]:
    """Returns the fields of a listed checkpoint, without those that a view adds."""
    return {each.name: getattr(one, each.name) for each in fields(ListedCheckpoint)}


def _in_its_run(one: ListedCheckpoint) -> ListedCheckpoint:
    """Returns a listed checkpoint as a listing of its run has it."""
    name = one.name.removeprefix(f"{one.run}/")
    return ListedCheckpoint(**_values(one) | {"name": name, "run": ""})


def _order(one: ListedCheckpoint) -> tuple[tuple[str, str], bool, int, str]:
    """Returns run and item of a checkpoint, and its place among the steps with these."""
    folder, _, item = one.name.removeprefix(f"{one.run}/").partition("/")
    number = step_of(folder) if item else one.step
    return (one.run, item), number is None, number or 0, folder


def open(path: AnyPlace) -> CheckpointView | RunView:  # noqa: A001 - the public name
    """Returns a `CheckpointView` of a checkpoint, or a `RunView` of a directory of checkpoints.

    Args:
        path: Path or URL of a checkpoint or of a run; or `RUN@STEP`, where STEP is a number,
            `latest`, `best`, `best:METRIC`, a tag or a folder.

    Raises:
        CheckpointNotFoundError: There is neither; the message says what the path contains, or
            suggests similar paths.
        UncommittedCheckpointError: There are files of a save that never committed.
        DamagedCheckpointError: The manifest or the chunk table is damaged.
        StorageError: The storage failed.
    """
    try:
        return read_view(path)
    except CheckpointNotFoundError as error:
        if isinstance(path, (str, os.PathLike)) and os.path.isfile(path):
            raise
        run = read_run(path)
        if any(one.name != "." for one in run):
            return run
        root, step = split_address(path) if isinstance(path, str) else ("", None)
        if step is None:
            error.message += nearest_paths(path)
            raise
    run = read_run(root)
    if not len(run):
        raise CheckpointNotFoundError(
            f"expected a run with steps in {run.url}, found no checkpoint" + nearest_paths(root)
        )
    return run[step]


def open_checkpoint(path: AnyPlace) -> CheckpointView:
    """Returns a view of one checkpoint.

    As `open`, except that a run is an error, so that type checkers know the result.

    Args:
        path: Path or URL of a checkpoint, or `RUN@STEP`.

    Raises:
        CheckpointNotFoundError: There is none, or a run; the message names the steps of a run.
        CheckpointError: As for `open`.

    Examples:
        >>> import ray_dcp, torch
        >>> _ = ray_dcp.save({"w": torch.ones(2)}, checkpoint_id="memory://doc-open/step-1")
        >>> ray_dcp.open_checkpoint("memory://doc-open@latest").tensors["w"].shape
        (2,)
    """
    found = open(path)
    if isinstance(found, CheckpointView):
        return found
    raise CheckpointNotFoundError(
        f"expected one checkpoint in {found.url}, found {steps_text(found.steps)}; open one of "
        f"them, as open_checkpoint('{found.url}@latest'), or the run with open_run"
    )


def open_run(path: AnyPlace) -> RunView:
    """Returns a view of a directory of checkpoints.

    As `open`, except that a single checkpoint is an error, so that type checkers know the result.

    Args:
        path: Path or URL of the directory.

    Raises:
        CheckpointNotFoundError: There are no checkpoints below the directory.
        StorageError: The storage can't be listed.

    Examples:
        >>> import ray_dcp, torch
        >>> _ = ray_dcp.save({"w": torch.ones(2)}, checkpoint_id="memory://doc-runs/step-1")
        >>> [step.name for step in ray_dcp.open_run("memory://doc-runs")]
        ['step-1']
    """
    if isinstance(path, (str, os.PathLike)) and os.path.isfile(path):
        raise CheckpointNotFoundError(f"expected a directory of checkpoints, but {path} is a file")
    run = read_run(path)
    if any(one.name != "." for one in run):
        return run
    hint = nearest_paths(path)
    if len(run):
        hint = ", but a single one in itself; use open_checkpoint"
    elif isinstance(path, str) and split_address(path)[1] is not None:
        hint = "; open_checkpoint takes RUN@STEP"
    raise CheckpointNotFoundError(f"expected checkpoints below {run.url}, found none{hint}")


def nearest_paths(place: AnyPlace) -> str:
    """Returns a suggestion of local folders with similar names, for the end of a message.

    Args:
        place: Location without a checkpoint.
    """
    path = Path(as_target(place).url)
    try:
        if path.exists() or not path.parent.is_dir():
            return ""
        return nearest(path.name, [one.name for one in path.parent.iterdir() if one.is_dir()])
    except OSError:
        return ""


def split_address(text: str) -> tuple[str, str | None]:
    """Returns run and step of `RUN@STEP`; the step is None if there is no `@`.

    Args:
        text: Text that a user typed. An `@` before the last `/` is part of the path.

    Examples:
        >>> split_address("s3://user@host/run@best:loss"), split_address("run/step-5")
        (('s3://user@host/run', 'best:loss'), ('run/step-5', None))
    """
    run, at, step = text.rpartition("@")
    if not at or not run or not step or "/" in step:
        return text, None
    return run, step


def check_no_step(place: AnyPlace, name: str) -> None:
    """Checks that a place to write to does not name a step, as `RUN@STEP` does.

    *Why*: a folder that is called RUN@STEP would be taken for that step from then on.

    Args:
        place: The argument that the user passed.
        name: Name of the argument.

    Raises:
        InvalidRequestError: The place names a step of a run.
        StorageError: The run can't be listed.
    """
    target = as_target(place)
    root, step = split_address(target.url)
    # Why check for a folder: "@" may be part of its name.
    if step is None or os.path.exists(target.url):
        return
    run = read_run(replace(target, url=root))
    listed = [one for one in run.steps if one.name != "."]
    named = {key for one in listed for key in (one.name, *one.tags)}
    computed = re.fullmatch("latest|(best|trusted)(:.*)?", step)
    if listed and (step in named or is_number(step) or computed):
        raise InvalidRequestError(
            f"expected a path to write to, but {target.url} names a step of the run {root}: "
            f"give the path of its folder",
            key=name,
        )


MOST_DETAILED = 50
"""Maximum number of steps whose details are read by default, which is fast."""


MOST_STEPS, MOST_METRICS = 100, 6


_STEP_BAR = 120
"""Width of the longest bar in a table of steps, in pixels."""


_STATES = {
    "committed": "#4fa866", "stock": "#4c8fd6", "safetensors": "#4c8fd6", "damaged": RED,
    "aborted": "#a9795a", "in flight": AMBER, "unreadable": RED, "deleted": GREY,
}  # fmt: skip


_CELL = "padding:2px 10px 2px 0;white-space:nowrap;background:none;border:none"


LEFT = ("name", "step", "state", "parts", "mark", "layout", "tags", "note")
"""Left-aligned columns of a table of steps."""


def step_cells(
    run: RunView, steps: Sequence[StepView], *, details: bool, now_s: float
) -> list[dict[str, str]]:
    """Returns the cells of each step in a table, as text by column; "" if unknown.

    The best step is one of the marks; by each of several metrics, a `*` before its value.

    Args:
        run: Run of the steps.
        steps: Steps to show.
        details: Include new bytes, layout, stall and time to the commit, which takes two small
            reads per step.
        now_s: Current time, for ages.
    """
    metrics = metric_names(run)
    marks: dict[str, list[str]] = {}
    for key in ("latest", *(("best",) if len(metrics) < 2 else (f"best:{n}" for n in metrics))):
        # Suppressed: there is none, or it is not known whether small or large values are better.
        with suppress(CheckpointError):
            marks.setdefault(run.step(key).name, []).append(key)

    def value(step: StepView, metric: str) -> str:
        if metric not in step.metrics:
            return ""
        star = "*" if f"best:{metric}" in marks.get(step.name, ()) else ""
        return f"{star}{number_text(step.metrics[metric])}"

    return [
        {
            "name": step.name,
            "step": "" if step.step is None else str(step.step),
            "state": step.state,
            "parts": _parts_text(step, details=details),
            "mark": " ".join(key for key in marks.get(step.name, ()) if ":" not in key),
            "age": "" if step.created_s is None else age_text(now_s - step.created_s),
            **{metric: value(step, metric) for metric in metrics},
            "trust": {True: "yes", False: "no", None: ""}[step.is_trusted],
            "size": size_text(step.whole_bytes),
            "ranks": "" if step.num_ranks is None else str(step.num_ranks),
            **(_detail_cells(step) if details else {}),
            "tags": " ".join(step.tags),
            "note": step.note,
        }
        for step in steps
    ]


def _parts_text(step: StepView, *, details: bool) -> str:
    if not details:
        return ", ".join(step.items)
    return ", ".join(one.in_words(name) for name, one in step.parts.items())


def _detail_cells(step: StepView) -> dict[str, str]:
    whole = (step, *step._run.items_of(step))
    known = [one.new_bytes if one.is_readable else None for one in whole]
    new = None if None in known else sum(one for one in known if one is not None)
    reused = sum(sum(one.reused_bytes.values()) for one in whole)
    return {
        "new": "" if new is None else size_text(new),
        "reused": size_text(reused) if reused else "",
        "layout": (step.layout if step.is_readable else None) or "",
        "stall": "" if step.stall_s is None else seconds_text(step.stall_s),
        "durable": "" if step.durable_s is None else seconds_text(step.durable_s),
    }


def metric_names(run: RunView) -> list[str]:
    """Returns the metrics that get a column: all but one that repeats the number of the step."""
    told = [(name, value, step.step) for step in run for name, value in step.metrics.items()]
    other = {name for name, value, step in told if name != "step" or value != step}
    names = dict.fromkeys(name for name, _, _ in told)
    return [name for name in names if name in other][:MOST_METRICS]


def picture_steps(run: RunView, *, details: bool | None = None) -> Picture:
    """Returns the steps of a run as a table with bars for their sizes; of several runs, one each.

    Deleted steps are only counted. Of more than 100 other steps of a run, the newest are shown.

    Args:
        run: Result of `ray_dcp.open`.
        details: Include new bytes, layout, stall and time to the commit, which takes two small
            reads per step. By default, only for up to 50 steps on a local disk.

    Examples:
        >>> import ray_dcp, torch
        >>> for step in (1, 2):
        ...     _ = ray_dcp.save({"w": torch.ones(2)}, checkpoint_id=f"memory://doc-pic/step-{step}")
        >>> picture_steps(ray_dcp.open("memory://doc-pic")).html.count("<tr>")
        3
    """
    if details is None:
        is_near = "://" not in run.url or run.url.startswith("memory://")
        details = is_near and len(run.present) <= MOST_DETAILED
    tables = []
    for part in run.runs:
        if part is not run:
            tables.append(draw.heading(folder_of(part, run), run_text(part)))
        tables += _steps_table(part, details=details)
    return draw.pictured(draw.heading(run.url, run_text(run)), *tables)


def folder_of(part: RunView, run: RunView) -> str:
    """Returns the folder of one of `run.runs`, relative to the run; `.` for the run itself."""
    return part.url[len(run.url.rstrip("/")) + 1 :] or "."


def _steps_table(run: RunView, *, details: bool) -> list[str]:
    """Returns the newest steps of a single run as a table; the number of others before it."""
    whole = whole_steps(run.present)
    steps = whole[-MOST_STEPS:]
    rows = step_cells(run, steps, details=details, now_s=time.time())
    if not rows:
        return []
    columns = [name for name in rows[0] if name != "name" and any(row[name] for row in rows)]
    top = max(step.whole_bytes for step in steps) or 1
    lines = [_row("th", columns, {name: name for name in columns})]
    for step, row in zip(steps, rows, strict=True):
        cells = {name: draw.safe(draw.clip(told, 400)) for name, told in row.items()}
        label = draw.safe(draw.clip(row["step"] or step.name, 260))
        cells["step"] = f"<b title='{draw.safe(step.name)}'>{label}</b>"
        star = f"<span style='color:{AMBER}'>★</span>"
        cells["mark"] = cells["mark"].replace("best", star)
        for metric in metric_names(run):
            cells[metric] = cells[metric].replace("*", star)
        dot = f"<span style='color:{_STATES.get(step.state, GREY)}'>● </span>"
        cells["state"] = f"{dot}{step.state}"
        new = step.new_bytes if details and step.is_readable else None
        cells["size"] = f"{_size_bar(step.whole_bytes, new, top)} {cells['size']}"
        lines.append(_row("td", columns, cells))
    hidden = len(whole) - len(rows)
    told = draw.aside(f"… and {hidden} earlier steps" if hidden else "")
    table = f"<table style='border-collapse:collapse;font-size:13px'>{''.join(lines)}</table>"
    return [told, table]


def whole_steps(steps: Sequence[StepView]) -> list[StepView]:
    """Returns the steps of a listing without items, each of which is in the line of its step."""
    return [one for one in steps if not one.is_item]


def run_text(run: RunView) -> str:
    """Returns the number of checkpoints of a run, and of those that were deleted, as text."""
    num_gone = len(whole_steps(run.steps)) - len(whole_steps(run.present))
    told = count_text(len(whole_steps(run.present)), "checkpoint")
    return f"{told}, {num_gone} deleted" if num_gone else told


def _row(cell: str, columns: Sequence[str], told: Mapping[str, str]) -> str:
    sides = {name: "left" if name in LEFT else "right" for name in columns}
    cells = (f"<{cell} style='{_CELL};text-align:{sides[n]}'>{told[n]}</{cell}>" for n in columns)
    return f"<tr>{''.join(cells)}</tr>"


def _size_bar(num_bytes: int, new_bytes: int | None, top: int) -> str:
    """Returns a bar whose new bytes have full colour; the step before has the other bytes, too."""
    width = round(_STEP_BAR * num_bytes / top)
    new = width if new_bytes is None else min(round(_STEP_BAR * new_bytes / top), width)
    colour = f"display:inline-block;height:10px;background:{draw.rank_colour(0)}"
    return (
        f"<span style='display:inline-block;width:{_STEP_BAR}px;text-align:left'>"
        f"<span style='{colour};width:{new}px'></span>"
        f"<span style='{colour};opacity:.35;width:{width - new}px'></span></span>"
    )
