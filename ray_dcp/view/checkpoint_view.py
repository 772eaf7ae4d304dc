"""`CheckpointView`: the content of one checkpoint. Needs neither torch nor Ray.

The chunk table contains how tensors are cut into chunks (`grids`), and the files of the chunks. The
device mesh is not stored; a grid describes the chunks that it led to.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.processes import run_tasks
from ray_dcp.core.values import ChunkTable, Int64Array, Kind
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    MissingKeyError,
)
from ray_dcp.format import damaged
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
from ray_dcp.view.difference import CheckpointDiff, diff_checkpoints
from ray_dcp.view.drawing import aside, div, heading, safe, shortened
from ray_dcp.view.pictures import leaves_of, tensor_tree, timeline
from ray_dcp.view.progress import ShowProgress
from ray_dcp.view.resharding import ReshardPreview, ShardGrid, preview_reshard
from ray_dcp.view.run_listing import num_ranks, rank_of_file, read_trace
from ray_dcp.view.tensor_handle import TensorHandle, TensorInfo
from ray_dcp.view.verify import VerifyReport, verify_opened
from ray_dcp.view.wording import count_text, nearest, size_text


class _PlainMachine(PickleMachine):
    """Unpickles numbers, texts, and flat lists and tuples; refuses pickles of other values."""

    def _refuse(self, *_: Any) -> Any:
        raise damaged("a plain value", "another one")

    _find: Any = _refuse
    _made: Any = _refuse
    _with_state: Any = _refuse
    _set_items: Any = _refuse


def _plain_text(item: bytes) -> str | None:
    """Returns the `repr` of a number, text or flat list that `torch.save` wrote; else None."""
    records = {name.partition("/")[2]: data for name, data in stored_records(item)}
    value = _PlainMachine(bytes(records.get("data.pkl", b""))).load()
    parts = value if isinstance(value, list | tuple) else [value]
    # Why flat: the text of lists that contain each other can be exponentially long.
    is_flat = all(part is None or isinstance(part, bool | int | float | str) for part in parts)
    return shortened(repr(value), _MOST_LETTERS) if is_flat and len(parts) <= _MOST_PARTS else None


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
        found[:, dim] = np.maximum(_starts(table, dim), 1)
    chunks = np.bincount(table.tensor, minlength=table.num_tensors)
    found[(found.prod(axis=1) != np.maximum(chunks, 1))] = 0
    return found


def _starts(table: ChunkTable, dim: int) -> Int64Array:
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
        weights: Counter[str] = Counter()
        for name, info in self.tensors.items():
            weights[self.layouts[name]] += info.num_bytes
        return weights.most_common(1)[0][0] if weights else ""

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
            DamagedCheckpointError: Bytes that were read do not match their checksums.
            StorageError: The storage failed.
        """
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
        return preview_reshard(self, layout, include=include, options=options)

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
        told = " · ".join(f"{k} <b>{safe(v)}</b>" for k, v in facts.items() if v is not None)
        try:
            drawn = "" if self.trace is None else timeline(self.trace).html
        except CheckpointError as error:
            drawn = aside(error.message)
        summary = "<summary style='cursor:pointer'><b>how it was saved</b></summary>"
        course = f"<details>{summary}{drawn}</details>" if drawn else ""
        return div(heading(self.url, told), tensor_tree(leaves_of(self)).html, course)


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
