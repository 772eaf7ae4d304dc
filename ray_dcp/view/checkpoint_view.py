"""`CheckpointView`: the content of one checkpoint; `CheckpointDiff`: how two differ.

Needs neither torch nor Ray.

The chunk table contains how tensors are cut into chunks (`grids`), and the files of the chunks. The
device mesh is not stored; a grid describes the chunks that it led to.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import numpy as np

from ray_dcp.core.dtypes import ITEMSIZE, READABLE
from ray_dcp.core.processes import run_tasks
from ray_dcp.core.quantities import count_text, size_text
from ray_dcp.core.values import ChunkTable, Int64Array, Kind
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidRequestError,
    MissingKeyError,
)
from ray_dcp.format import damaged
from ray_dcp.format.job_parts import KEY, PartRecord, decode_parts
from ray_dcp.format.manifest import slot_of, sources_in
from ray_dcp.format.safe_pickle import PickleMachine
from ray_dcp.format.safetensors import MAX_HEADER_BYTES
from ray_dcp.format.save_trace import SaveTrace
from ray_dcp.format.torch_items import stored_records
from ray_dcp.io.checkpoint import METADATA_KEY, Checkpoint, read_checkpoint
from ray_dcp.io.reader import read_item
from ray_dcp.options import LoadOptions
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import OneFile, Storage
from ray_dcp.view import drawing as draw
from ray_dcp.view.charts import Leaf, tensor_tree, timeline
from ray_dcp.view.difference import (
    ChangeName,
    TensorDiff,
    ValueDiff,
    diff_tables,
    same_values,
    value_diff,
)
from ray_dcp.view.drawing import GREY, RED, WIDTH, Bar, Picture
from ray_dcp.view.progress import ShowProgress, reporting
from ray_dcp.view.resharding import ReshardPreview, ShardGrid, preview_reshard
from ray_dcp.view.run_listing import num_ranks, rank_of_file, read_trace
from ray_dcp.view.step_part import StepPart
from ray_dcp.view.tensor_handle import TensorHandle, TensorInfo
from ray_dcp.view.verify import VerifyReport, has_names_alone, named_items, verify_opened
from ray_dcp.view.wording import nearest


class _PlainMachine(PickleMachine):
    """Unpickles numbers, texts, and flat lists and tuples; refuses pickles of other values."""

    def _refuse(self, *_: Any) -> Any:
        raise damaged("a plain value", "another one")

    _find: Any = _refuse
    _construct: Any = _refuse
    _with_state: Any = _refuse
    _set_items: Any = _refuse


def _plain_value(item: bytes) -> Any:
    """Returns the number, text, list or tuple that `torch.save` wrote."""
    records = {name.partition("/")[2]: data for name, data in stored_records(item)}
    return _PlainMachine(bytes(records.get("data.pkl", b""))).load()


def _plain_text(item: bytes) -> str | None:
    """Returns the `repr` of a number, text or flat list that `torch.save` wrote; else None."""
    value = _plain_value(item)
    parts = value if isinstance(value, list | tuple) else [value]
    # Why flat: the text of lists that contain each other can be exponentially long.
    is_flat = all(part is None or isinstance(part, bool | int | float | str) for part in parts)
    return (
        draw.shortened(repr(value), _MOST_LETTERS)
        if is_flat and len(parts) <= _MOST_PARTS
        else None
    )


_MOST_DIMS_LOOKED_AT = 8
_MOST_VALUE_BYTES, _MOST_VALUES, _MOST_LETTERS, _MOST_PARTS = 4096, 64, 40, 16
_VALUE_THREADS = 8


def grids(table: ChunkTable) -> Int64Array:
    """Returns the number of parts into which each tensor is cut in each dimension.

    Args:
        table: Chunk table of the checkpoint.

    Returns:
        int64[t, D]; 1 for dimensions that are not cut, and 0 in all dimensions of a tensor whose
        chunks are not a grid.

    Complexity:
        O(chunks log chunks) in numpy.
    """
    width = table.offset.shape[1]
    found = np.ones((table.num_tensors, width), np.int64)
    for dim in range(min(width, _MOST_DIMS_LOOKED_AT)):
        found[:, dim] = np.maximum(_count_offsets(table, dim), 1)
    chunks = np.bincount(table.tensor, minlength=table.num_tensors)
    found[(found.prod(axis=1) != np.maximum(chunks, 1))] = 0
    return found


def _count_offsets(table: ChunkTable, dim: int) -> Int64Array:
    """Returns the number of distinct chunk offsets of each tensor in a dimension."""
    offsets, place = np.unique(table.offset[:, dim], return_inverse=True)
    # Why a single number: sorting pairs takes 20 times as long.
    keys = np.unique(table.tensor.astype(np.int64) * len(offsets) + place)
    return np.bincount(keys // max(len(offsets), 1), minlength=table.num_tensors)


def layout_of(grid: tuple[int, ...]) -> str:
    """Returns a grid as text.

    Args:
        grid: Number of parts in each dimension.

    Examples:
        >>> layout_of((1, 1)), layout_of((8, 1)), layout_of((1, 2)), layout_of((4, 2))
        ('whole', 'rows/8', 'columns/2', '4x2')
        >>> layout_of((0, 0)), layout_of((1, 1, 3))
        ('irregular', '1x1x3')
    """
    if 0 in grid:
        return "irregular"
    cut = [dim for dim, parts in enumerate(grid) if parts > 1]
    if not cut:
        return "whole"
    if cut == [0]:
        return f"rows/{grid[0]}"
    if cut == [1] and len(grid) == 2:
        return f"columns/{grid[1]}"
    return "x".join(map(str, grid))


COLUMNS_OF_LAYOUT = ("kind", "dtypes", "dtype", "ndim", "shape", "tensor", "offset", "size")
"""Columns of a chunk table that decide its layout."""


def layout_of_most(table: ChunkTable) -> str:
    """Returns the layout of most bytes of a checkpoint; "" if there are no tensors."""
    weights: Counter[tuple[int, ...]] = Counter()
    columns = (one.tolist() for one in (table.kind, table.dtype, table.ndim, table.shape))
    for kind, dtype, ndim, shape, grid in zip(*columns, grids(table).tolist(), strict=True):
        if kind != Kind.OBJECT:
            num_bytes = prod(shape[:ndim]) * ITEMSIZE.get(table.dtypes[dtype], 0)
            weights[tuple(grid[:ndim])] += num_bytes
    return layout_of(weights.most_common(1)[0][0]) if weights else ""


@dataclass(frozen=True)
class FileInfo:
    """A data file of a checkpoint."""

    key: str
    """Key of the file, relative to the checkpoint."""
    num_bytes: int
    """Length of the file; 0 if it is missing."""
    num_chunks: int
    """Number of chunks in the file."""


@dataclass(frozen=True, eq=False, repr=False)
class CheckpointView:
    """The content of a checkpoint, as it was when it was opened. Thread-safe.

    Opening reads the chunk table, but no tensors.

    Attributes:
        storage: Storage of the checkpoint.
        checkpoint: The opened checkpoint.
        place: Location that was opened; None for a view of a storage.

    Examples:
        >>> import numpy as np, ray_dcp, torch
        >>> _ = ray_dcp.save({"w": torch.arange(6.0)}, checkpoint_id="memory://doc/view")
        >>> view = ray_dcp.open("memory://doc/view")
        >>> view.tensors["w"].shape, view["w"][1:3]
        ((6,), array([1., 2.], dtype=float32))
    """

    storage: Storage
    checkpoint: Checkpoint
    place: AnyPlace | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """Absolute path or URL."""
        return self.storage.url

    @property
    def kind(self) -> str:
        """`"native"` (written by ray_dcp), `"stock"` (by torch's DCP) or `"safetensors"`."""
        return self.checkpoint.kind

    @property
    def attempt(self) -> str | None:
        """Id of the committed attempt; None for a checkpoint of another program."""
        return self.checkpoint.attempt or None

    @property
    def slot(self) -> int:
        """Slot of the manifest; 0 for a checkpoint of another program."""
        return self.checkpoint.slot

    @cached_property
    def world_size(self) -> int | None:
        """Number of ranks that saved the checkpoint.

        For a checkpoint of another program, the number of ranks in the names of its files; None if
        the names contain no ranks.
        """
        if self.checkpoint.manifest is not None:
            return self.checkpoint.manifest.world_size
        return num_ranks(self.checkpoint.table.files)

    @property
    def created_s(self) -> float | None:
        """Time of the save by the coordinator's clock, in seconds since 1970; None if unknown."""
        manifest = self.checkpoint.manifest
        return None if manifest is None else manifest.created_s

    @property
    def sources(self) -> tuple[Mapping[str, Any], ...]:
        """`checkpoint`, `attempt` and `weight` of what `ray_dcp.average` made it of; else empty."""
        manifest = self.checkpoint.manifest
        return () if manifest is None else sources_in(manifest)

    @cached_property
    def trace(self) -> Trace | None:
        """Durations of the phases of the save on each rank; None if there is no trace.

        The trace is read on first access.

        Raises:
            DamagedCheckpointError: The trace is damaged. The checkpoint does not need it.
        """
        return trace_of(self.storage, self.attempt)

    @property
    def table(self) -> ChunkTable:
        """The chunk table with all checksums.

        The checksums of a large checkpoint are at the ends of its data files, and are read by one
        request per file.
        """
        self.checkpoint.know_checks()
        return self.checkpoint.table

    @property
    def names(self) -> tuple[str, ...]:
        """FQNs of all tensors and objects, in the order of the state dict."""
        return self.checkpoint.table.names

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors, by FQN."""
        return MappingProxyType(
            {name: info for name, info in self._infos.items() if info is not None}
        )

    @cached_property
    def objects(self) -> tuple[str, ...]:
        """FQNs of all objects."""
        return tuple(name for name, info in self._infos.items() if info is None)

    @cached_property
    def small_values(self) -> Mapping[str, str]:
        """The `repr` of objects that are numbers, texts or short lists, by FQN.

        The first 64 objects of at most 4 KiB are read. Nothing that a pickle refers to is imported.
        Damaged objects are left out.

        Raises:
            StorageError: An object can't be read.
        """
        table, found = self.checkpoint.table, dict[str, str]()
        chunks = np.flatnonzero(table.kind[table.tensor] == Kind.OBJECT)
        short = chunks[table.item_bytes[chunks] <= _MOST_VALUE_BYTES][:_MOST_VALUES].tolist()

        def look(chunk: int) -> None:
            # ValueError: Python does not convert integers of more than 4,300 digits.
            with suppress(DamagedCheckpointError, ValueError):
                self.checkpoint.know_checks([chunk])
                item = read_item(self.storage, table, chunk, transforms=self.checkpoint.transforms)
                if (told := _plain_text(item)) is not None:
                    found[table.names[table.tensor[chunk]]] = told

        run_tasks(short, look, min(_VALUE_THREADS, len(short)))
        return MappingProxyType(found)

    @cached_property
    def parts(self) -> Mapping[str, StepPart]:
        """Parts of a step of a job, or items of a step of a manager; empty for a single state.

        Raises:
            DamagedCheckpointError: What the step says of them is damaged.
            StorageError: It can't be read.
        """
        items = named_items(self.storage, self.checkpoint)
        is_of_job = bool(items) and KEY in self.objects and has_names_alone(self.checkpoint)
        told = decode_parts(_plain_value(self.read_object(KEY)[0])) if is_of_job else {}
        found = dict[str, StepPart]()
        for name, folder in items.items():
            own = told.get(name) or PartRecord(attempt="")
            found[name] = StepPart(folder=folder, version=own.version, kept_from=own.kept_from)
        return MappingProxyType(found)

    @cached_property
    def layouts(self) -> Mapping[str, str]:
        """Grid of the chunks of each tensor, by FQN: `whole`, `rows/8`, `columns/2`, `4x2`."""
        table = self.checkpoint.table
        grid, ndim = grids(table).tolist(), table.ndim.tolist()
        return MappingProxyType(
            {
                name: layout_of(tuple(grid[row][: ndim[row]]))
                for row, name in enumerate(table.names)
                if name in self.tensors
            }
        )

    @cached_property
    def layout(self) -> str:
        """The layout of most bytes of the checkpoint; "" if there are no tensors."""
        return layout_of_most(self.checkpoint.table)

    @cached_property
    def files(self) -> tuple[FileInfo, ...]:
        """All data files of the checkpoint, in the order of the chunk table."""
        manifest = self.checkpoint.manifest
        entries = self.storage.list() if manifest is None else manifest.files
        lengths = {entry.key: entry.num_bytes for entry in entries}
        table = self.checkpoint.table
        counts = np.bincount(table.file, minlength=len(table.files)).tolist()
        return tuple(
            FileInfo(key, lengths.get(key, 0), count)
            for key, count in zip(table.files, counts, strict=True)
        )

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all data files."""
        return sum(file.num_bytes for file in self.files)

    @cached_property
    def _infos(self) -> dict[str, TensorInfo | None]:
        table = self.checkpoint.table
        counts = np.bincount(table.tensor, minlength=table.num_tensors).tolist()
        columns = (one.tolist() for one in (table.kind, table.dtype, table.ndim, table.shape))
        rows = zip(table.names, table.paths, *columns, counts, strict=True)
        infos: dict[str, TensorInfo | None] = {}
        for name, path, kind, dtype, ndim, padded, num_chunks in rows:
            if kind == Kind.OBJECT:
                infos[name] = None
                continue
            shape, dtype_name = tuple(padded[:ndim]), table.dtypes[dtype]
            num_bytes = prod(shape) * ITEMSIZE.get(dtype_name, 0)
            infos[name] = TensorInfo(shape, dtype_name, num_bytes, num_chunks, path)
        return infos

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.names)}

    def __reduce__(self) -> tuple[Any, ...]:
        # Why: what was read already is in mappings that can't be changed, nor pickled.
        return CheckpointView, (self.storage, self.checkpoint, self.place)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> Any:
        """Returns the handle of a tensor, which reads what is indexed; or an object.

        Objects are loaded under the rules of `torch.load(weights_only=True)`, which imports torch.

        Args:
            name: FQN.

        Raises:
            MissingKeyError: The checkpoint has no such name; the message lists similar ones.
            UnsafeCheckpointError: The object refers to code that a safe load refuses.
            DamagedCheckpointError: The bytes of the object do not match their checksums.
        """
        row = self._row(name)
        info = self._infos[name]
        if info is not None:
            return TensorHandle(self.storage, self.checkpoint, row, info)
        from ray_dcp.torch_adapter.objects import load_object

        return load_object(self.read_object(name)[0], fqn=name)

    def read_object(self, name: str) -> tuple[bytes, ...]:
        """Returns the stored bytes of each chunk of an object or tensor, without loading them.

        Args:
            name: FQN.

        Returns:
            The output of `torch.save` for each chunk, verified.

        Raises:
            MissingKeyError: The checkpoint has no such name; the message lists similar ones.
            DamagedCheckpointError: The bytes do not match their checksums.
        """
        table, transforms = self.checkpoint.table, self.checkpoint.transforms
        chunks = np.flatnonzero(table.tensor == self._row(name)).tolist()
        self.checkpoint.know_checks(chunks)
        return tuple(
            read_item(self.storage, table, chunk, transforms=transforms) for chunk in chunks
        )

    def _row(self, name: str) -> int:
        if name not in self._rows:
            raise MissingKeyError(
                f"expected one of {len(self)} names of the checkpoint, but found {name!r}"
                + nearest(str(name), self.names),
                checkpoint_id=self.url,
                key=str(name),
            )
        return self._rows[name]

    def verify(self, *, progress: ShowProgress = False) -> VerifyReport:
        """Compares every data file, including those of a step's items, with its checksums.

        Args:
            progress: As for `ray_dcp.verify`.

        Returns:
            A report of all damage. Damage is not raised.
        """
        return verify_opened(self.storage, self.checkpoint, self.place, progress=progress)

    def diff(
        self, other: CheckpointView, *, read: bool = True, progress: ShowProgress = False
    ) -> CheckpointDiff:
        """Returns the differences to another checkpoint, by stored hashes.

        Tensors that both checkpoints cut into the same chunks are not read. Other tensors are read
        and compared; the result says which.

        Args:
            other: The later checkpoint.
            read: Read tensors if hashes can't decide; otherwise, such tensors are `undecided`.
            progress: As for `ray_dcp.verify`.

        Raises:
            InvalidRequestError: `other` is no view.
            DamagedCheckpointError: Bytes that were read do not match their checksums.
            StorageError: The storage failed.
        """
        if not isinstance(other, CheckpointView):
            raise InvalidRequestError(
                f"expected the view of another checkpoint, as ray_dcp.open('run@latest') returns "
                f"it, but got {other!r}",
                key="other",
            )
        return diff_checkpoints(self, other, read=read, progress=progress)

    def reshard(
        self,
        layout: str | int | ShardGrid,
        *,
        include: str | None = None,
        options: LoadOptions | None = None,
    ) -> ReshardPreview:
        """Returns what a load on other ranks would read, by the planner of loads.

        Only the chunk table is read.

        Args:
            layout: `8` or `8:row` for rows over 8 ranks, `8:column`, or `4x2` for rows over 4 ranks
                and columns over 2.
            include: Shell pattern of FQNs; all by default.
            options: Options of the load.

        Returns:
            Bytes, ranges and memory of every rank.

        Raises:
            InvalidRequestError: The layout is invalid, or no name matches.
        """
        return preview_reshard(
            self.storage, self.checkpoint.table, layout, include=include, options=options
        )

    def __repr__(self) -> str:
        return (
            f"CheckpointView({self.url!r}, {self.kind}, {len(self.tensors)} tensors, "
            f"{len(self.objects)} objects, {size_text(self.num_bytes)} in {len(self.files)} files)"
        )

    def _repr_html_(self) -> str:
        facts = {
            "kind": self.kind,
            "ranks": self.world_size,
            "size": f"{size_text(self.num_bytes)} in {count_text(len(self.files), 'file')}",
        }
        told = " · ".join(f"{k} <b>{draw.safe(v)}</b>" for k, v in facts.items() if v is not None)
        try:
            drawn = "" if self.trace is None else timeline(self.trace).html
        except CheckpointError as error:
            drawn = draw.aside(error.message)
        summary = "<summary style='cursor:pointer'><b>how it was saved</b></summary>"
        course = f"<details>{summary}{drawn}</details>" if drawn else ""
        return draw.div(draw.heading(self.url, told), tensor_tree(leaves_of(self)).html, course)


@dataclass(frozen=True, kw_only=True)
class Trace(SaveTrace):
    """The trace of a save. Notebooks show it as a timeline."""

    def _repr_html_(self) -> str:
        return timeline(self).html


def trace_of(storage: Storage, attempt: str | None) -> Trace | None:
    """Returns the trace of an attempt, as notebooks show it; see `read_trace`."""
    found = read_trace(storage, attempt)
    return None if found is None else Trace(**vars(found))


def read_view(path: AnyPlace) -> CheckpointView:
    """Returns a view of the checkpoint at a path.

    Args:
        path: Path or URL of the checkpoint, or path of a local safetensors file.

    Raises:
        CheckpointNotFoundError: There is none; the message says what the path contains.
        UncommittedCheckpointError: There are files of a save that never committed.
        DamagedCheckpointError: The manifest or the chunk table is damaged.
        StorageError: The storage failed.
    """
    storage = _one_file(path) or open_storage(path)
    return CheckpointView(
        storage, read_checkpoint(storage, checkpoint_id=storage.url, checks_later=True), path
    )


def _one_file(path: AnyPlace) -> OneFile | None:
    """Returns the storage of a local safetensors file; None if the path is not a file.

    Raises:
        CheckpointNotFoundError: The path is a file of another kind.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.path.isfile(path):
        return None
    folder, name = os.path.split(os.path.abspath(path))
    if not is_safetensors(path):
        is_part = (
            rank_of_file(name) is not None or slot_of(name) is not None or name == METADATA_KEY
        )
        hint = (
            f"is a file of the checkpoint in {folder}: give that directory"
            if is_part
            else "is a file. If torch.save wrote it, convert it with ray-dcp import"
        )
        raise CheckpointNotFoundError(
            f"expected a checkpoint, but {os.fspath(path)} {hint}", checkpoint_id=os.fspath(path)
        )
    return OneFile(open_storage(folder), name, "" if name.endswith(SUFFIX) else SUFFIX)


SUFFIX = ".safetensors"


def is_safetensors(path: str | os.PathLike[str]) -> bool:
    """Returns whether a local file is a safetensors file, judged by its name or first bytes."""
    if os.fspath(path).endswith(SUFFIX):
        return True
    with Path(path).open("rb") as file:
        begin = file.read(9)
    length = int.from_bytes(begin[:8], "little")
    return begin[8:] == b"{" and length <= min(MAX_HEADER_BYTES, os.path.getsize(path) - 8)


@dataclass(frozen=True, eq=False, repr=False)
class CheckpointDiff:
    """Differences of two checkpoints.

    Attributes:
        first: The earlier checkpoint.
        second: The later checkpoint.
        tensors: All tensors and objects of both checkpoints, those of the first in its order.
        bytes_read: Number of payload bytes that were read because hashes did not decide.
        notes: Reasons why tensors were read, or are undecided.

    Examples:
        >>> import ray_dcp, torch
        >>> for name, value in (("a", 1.0), ("b", 1.5)):
        ...     state = {"w": torch.full((4,), value), "frozen": torch.ones(9)}
        ...     _ = ray_dcp.save(state, checkpoint_id=f"memory://doc-diff/{name}")
        >>> a, b = ray_dcp.open("memory://doc-diff/a"), ray_dcp.open("memory://doc-diff/b")
        >>> diff = a.diff(b)
        >>> diff.counts, diff.changed, diff.bytes_read
        ({'unchanged': 1, 'changed': 1}, ('w',), 0)
        >>> [(one.name, one.norm, one.relative) for one in diff.values()]
        [('w', 1.0, 0.5)]
    """

    first: CheckpointView
    second: CheckpointView
    tensors: tuple[TensorDiff, ...]
    bytes_read: int = 0
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Number of tensors and objects of each kind of change that occurs."""
        found = Counter(one.change for one in self.tensors)
        return {name: found[name] for name in get_args(ChangeName) if name in found}

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of tensors and objects that differ."""
        return tuple(one.name for one in self.tensors if one.change != "unchanged")

    @property
    def changed_bytes(self) -> int:
        """Bytes of the second checkpoint in blocks that differ or were added."""
        return sum(one.changed_bytes for one in self.tensors if one.change != "removed")

    @property
    def is_empty(self) -> bool:
        """Whether the checkpoints are equal."""
        return not self.changed

    def values(
        self, names: Sequence[str] | None = None, *, progress: ShowProgress = False
    ) -> Iterator[ValueDiff]:
        """Reads tensors that changed, and yields by how much.

        Args:
            names: Tensors to read; by default all that changed and have equal shapes.
            progress: As for `ray_dcp.verify`.

        Raises:
            MissingKeyError: Neither checkpoint has the name.
            InvalidRequestError: The name is not a tensor of both checkpoints, the shapes differ, or
                the dtype has no numbers.
            DamagedCheckpointError: Stored bytes do not match their checksums.

        Complexity:
            Reads both tensors once, with 64 MiB of memory, or one row of each.
        """
        chosen = self.comparable if names is None else [self._checked(name) for name in names]
        sizes = {name: 2 * self.second.tensors[name].num_bytes for name in chosen}
        with reporting(progress, "reading", self.second.url) as meter:
            meter.expect(sum(sizes.values()))
            for name, num_bytes in sizes.items():
                yield value_diff(self.first[name], self.second[name])
                meter.add(num_bytes)

    @property
    def comparable(self) -> tuple[str, ...]:
        """Names of the tensors that may have changed and have numbers and equal shapes."""
        return tuple(
            one.name
            for one in self.tensors
            if one.change in ("changed", "retyped", "undecided") and self._problem(one.name) is None
        )

    def _checked(self, name: str) -> str:
        known = [one.name for one in self.tensors]
        if name not in known:
            raise MissingKeyError(
                f"expected a tensor that both checkpoints have, but found {name!r} in neither"
                + nearest(name, known),
                key=name,
            )
        problem = self._problem(name)
        if problem is not None:
            raise InvalidRequestError(f"{name!r} {problem}", key=name)
        return name

    def _problem(self, name: str) -> str | None:
        first, second = self.first.tensors.get(name), self.second.tensors.get(name)
        if first is None or second is None:
            return "is not a tensor of both checkpoints"
        if first.shape != second.shape:
            return f"has shape {first.shape} in one and {second.shape} in the other"
        odd = {first.dtype, second.dtype} - READABLE
        return f"is of dtype {', '.join(odd)}, which has no numbers here" if odd else None

    def _repr_html_(self) -> str:
        return picture_diff(self).html

    def __repr__(self) -> str:
        told = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return f"CheckpointDiff({self.first.url!r} -> {self.second.url!r}: {told or 'nothing'})"


def diff_checkpoints(
    first: CheckpointView,
    second: CheckpointView,
    *,
    read: bool = True,
    progress: ShowProgress = False,
) -> CheckpointDiff:
    """Returns the differences of two checkpoints; see `CheckpointView.diff`."""
    tensors = diff_tables(first.table, second.table)
    undecided = [at for at, one in enumerate(tensors) if one.change == "undecided"]
    bytes_read = sum(2 * tensors[at].num_bytes for at in undecided) if read else 0
    with reporting(progress, "comparing", second.url) as meter:
        meter.expect(bytes_read)
        for at in undecided if read else ():
            one = tensors[at]
            same = _same_bytes(first, second, one.name)
            tensors[at] = replace(
                one,
                change="unchanged" if same else "changed",
                changed_bytes=0 if same else one.num_bytes,
                was_read=True,
            )
            meter.add(2 * one.num_bytes)
    notes: tuple[str, ...] = ()
    count = f"{len(undecided)} tensors or objects"
    if undecided and read:
        notes = (f"{count} were read and compared: {_why_undecided(first, second)}",)
    elif undecided:
        notes = (f"hashes can't decide {count}: {_why_undecided(first, second)}; nothing was read",)
    return CheckpointDiff(first, second, tuple(tensors), bytes_read, notes)


def _why_undecided(first: CheckpointView, second: CheckpointView) -> str:
    without = [view.url for view in (first, second) if view.kind != "native"]
    if without:
        return f"{' and '.join(without)} {'has' if len(without) == 1 else 'have'} no hashes"
    return "they were cut into other chunks"


def _same_bytes(first: CheckpointView, second: CheckpointView, name: str) -> bool:
    if name not in first.tensors:
        return first.read_object(name) == second.read_object(name)
    pair = first[name], second[name]
    if not any(handle.is_opaque for handle in pair):
        # Suppressed: in stock checkpoints, only reading shows that a tensor is a subclass.
        with suppress(InvalidRequestError):
            return same_values(*pair)
    return first.read_object(name) == second.read_object(name)


MOST_CHANGED = 24

CHANGES = {
    "unchanged": GREY, "changed": "#e08a3c", "added": "#4fa866", "removed": RED,
    "reshaped": "#9a6fd0", "retyped": "#d874b5", "undecided": "#b5a835",
}  # fmt: skip
"""Colour of each kind of change."""


def picture_diff(diff: CheckpointDiff, *, values: bool = False) -> Picture:
    """Returns a picture of the differences of two checkpoints.

    Args:
        diff: Result of `CheckpointView.diff`.
        values: Read the tensors that changed, and show by how much.

    Raises:
        DamagedCheckpointError: Bytes that were read do not match their checksums.
    """
    names = ("/".join(view.url.rstrip("/").split("/")[-2:]) for view in (diff.first, diff.second))
    known = {one.name: one.relative for one in diff.values()} if values else {}
    scale = WIDTH / (sum(one.num_bytes for one in diff.tensors) or 1)
    parts: list[str] = []
    meant, x = [], 0.0
    for kind, colour in CHANGES.items():
        found = [one.num_bytes for one in diff.tensors if one.change == kind]
        if found:
            told = f"{kind}: {size_text(sum(found))}"
            parts.append(draw.rect(x, 0, sum(found) * scale, 16, colour, told))
            x += sum(found) * scale
            meant.append((colour, f"{len(found)} {kind}, {size_text(sum(found))}"))
    parts.append(draw.legend(0, 24, meant))
    moved = [one for one in diff.tensors if one.change != "unchanged"]
    moved.sort(key=lambda one: (-known.get(one.name, 0.0), -_bytes(one)))
    rows = []
    for one in moved[:MOST_CHANGED]:
        length = known.get(one.name, 0.0) if known else float(_bytes(one))
        told = f"{one.name}: {one.change}, {size_text(_bytes(one))} of {size_text(one.num_bytes)}"
        rows.append(Bar(one.name, [(length, CHANGES[one.change], told)], _change_text(one, known)))
    if rows:
        told = "|new - old| / |old|" if known else "bytes in blocks that differ"
        parts.append(draw.note(300, 54, told))
    drawn, y = draw.bars(rows, 300, 58, len(moved) - len(rows))
    drawing = draw.svg(WIDTH, y + 6, *parts, drawn, label="Differences of two checkpoints")
    return draw.pictured(draw.heading(" → ".join(names)), drawing)


def _bytes(one: TensorDiff) -> int:
    return one.changed_bytes or one.num_bytes


def _change_text(one: TensorDiff, relative: Mapping[str, float]) -> str:
    if one.name in relative:
        share = relative[one.name]
        return f"{share:.3g}" if share < 0.01 else f"{share:.1%}"
    if one.change == "changed":
        return f"{size_text(_bytes(one))} of {size_text(one.num_bytes)}"
    return f"{one.change}, {size_text(one.num_bytes)}"


def leaves_of(view: CheckpointView, names: Iterable[str] | None = None) -> list[Leaf]:
    """Returns tensors and objects of a checkpoint.

    Args:
        view: The checkpoint.
        names: FQNs to include; all by default.
    """
    paths = dict(zip(view.names, view.checkpoint.table.paths, strict=True))
    chosen = view.names if names is None else names
    return [Leaf(n, view.tensors.get(n), paths[n], view.small_values.get(n, "")) for n in chosen]
