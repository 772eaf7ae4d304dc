"""`CheckpointView`: what is in one checkpoint, without torch and without Ray, in notebooks too.

How tensors are cut into chunks (`grids`), and over which files, is read off the chunk table. A mesh
is not stored: a grid describes the boxes that the mesh led to.

`run_listing` lists many checkpoints, `verify` checks stored bytes.
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
from ray_dcp.core.values import ChunkTable, Int64Array, Kind
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    MissingKeyError,
)
from ray_dcp.format.safe_pickle import PickleMachine, damaged
from ray_dcp.format.safetensors import MAX_HEADER_BYTES
from ray_dcp.format.torch_items import stored_records
from ray_dcp.io.checkpoint import Checkpoint, read_checkpoint
from ray_dcp.io.reader import read_item
from ray_dcp.io.threads import run_tasks
from ray_dcp.options import LoadOptions
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import Told, open_storage
from ray_dcp.store.storage import OneFile, Storage
from ray_dcp.view.charts import timeline
from ray_dcp.view.difference import CheckpointDiff, diff_checkpoints
from ray_dcp.view.drawing import aside, div, heading, safe, shortened
from ray_dcp.view.resharding import ReshardPreview, ShardGrid, preview_reshard
from ray_dcp.view.run_listing import num_ranks
from ray_dcp.view.tables import leaves_of, tensor_tree
from ray_dcp.view.tensor_handle import TensorHandle, TensorInfo
from ray_dcp.view.trace import Trace, read_trace
from ray_dcp.view.verify import VerifyReport, verify_opened
from ray_dcp.view.wording import count_text, nearest, size_text


class _PlainMachine(PickleMachine):
    """Reads values of Python's own that need no name: a pickle with any other is refused."""

    def _find(self, module: Any, name: Any) -> Any:
        raise damaged("a plain value", f"{module}.{name}"[:80])

    def _made(self, target: Any, args: Any) -> Any:
        raise damaged("a plain value", "a call")

    def _with_state(self, target: Any, state: Any) -> Any:
        raise damaged("a plain value", "a state")

    def _set_items(self, target: Any, items: list[Any]) -> None:
        raise damaged("a plain value", "a mapping")


def _plain_text(item: bytes) -> str | None:
    """Returns a number, text or flat list that `torch.save` wrote, as `repr` does; else None."""
    records = {name.partition("/")[2]: data for name, data in stored_records(item)}
    value = _PlainMachine(bytes(records.get("data.pkl", b""))).load()
    parts = value if isinstance(value, list | tuple) else [value]
    # Why flat: lists that hold each other a few times over have no end when they are written out.
    is_flat = all(part is None or isinstance(part, bool | int | float | str) for part in parts)
    return shortened(repr(value), _MOST_LETTERS) if is_flat and len(parts) <= _MOST_PARTS else None


_MOST_DIMS_LOOKED_AT = 8
_MOST_VALUE_BYTES, _MOST_VALUES, _MOST_LETTERS, _MOST_PARTS = 4096, 64, 40, 16
_VALUE_THREADS = 8


def grids(table: ChunkTable) -> Int64Array:
    """Returns into how many parts each tensor is cut in each dimension.

    Args:
        table: What is stored.

    Returns:
        int64[t, D]; 1 where it is not cut, 0 in all dimensions where the chunks make no grid.

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
    """Returns at how many different offsets of a dimension the chunks of each tensor begin."""
    offsets, place = np.unique(table.offset[:, dim], return_inverse=True)
    # Why one number: to sort pairs takes 20 times as long.
    keys = np.unique(table.tensor.astype(np.int64) * len(offsets) + place)
    return np.bincount(keys // max(len(offsets), 1), minlength=table.num_tensors)


def layout_of(grid: tuple[int, ...]) -> str:
    """Returns a grid in words.

    Args:
        grid: Parts in each dimension.

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


def layout_text(table: ChunkTable) -> str:
    """Returns how most bytes of a checkpoint are cut, in words; empty where there are no tensors.

    Args:
        table: What is stored.
    """
    grid = grids(table)
    weights: Counter[str] = Counter()
    itemsize = np.array([ITEMSIZE.get(name, 1) for name in table.dtypes] or [1], np.int64)
    num_bytes = table.shape.prod(axis=1) * itemsize[np.maximum(table.dtype, 0)]
    for row in np.flatnonzero(table.kind != Kind.OBJECT).tolist():
        weights[layout_of(tuple(grid[row, : table.ndim[row]].tolist()))] += int(num_bytes[row])
    return weights.most_common(1)[0][0] if weights else ""


@dataclass(frozen=True)
class FileInfo:
    """One data file of a checkpoint."""

    key: str
    """Relative to the checkpoint."""
    num_bytes: int
    """Length; 0 if the file is missing (`verify` reports it)."""
    num_chunks: int
    """Number of chunks in it."""


@dataclass(frozen=True, eq=False, repr=False)
class CheckpointView:
    """One checkpoint as it was when it was opened. Reads the chunk table, not the tensors.

    Safe to use from several threads.

    Attributes:
        storage: Where the checkpoint lies.
        checkpoint: What was read when it was opened.
        place: What was opened; None for a view that was made of a storage.

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
        """`"native"`, `"stock"` (written by torch's DCP) or `"safetensors"` (plain files)."""
        return self.checkpoint.kind

    @property
    def attempt(self) -> str | None:
        """The attempt that was committed; None for a checkpoint that is not ours."""
        return self.checkpoint.attempt or None

    @property
    def slot(self) -> int:
        """Slot of the manifest; 0 for a checkpoint that is not ours."""
        return self.checkpoint.slot

    @cached_property
    def world_size(self) -> int | None:
        """Number of ranks that saved it.

        For a checkpoint that is not ours, the number of ranks by its file names; None if
        they have none.
        """
        if self.checkpoint.manifest is not None:
            return self.checkpoint.manifest.world_size
        return num_ranks(self.checkpoint.table.files)

    @property
    def created_s(self) -> float | None:
        """When it was saved, in seconds since 1970 by the coordinator's clock; None if unknown."""
        manifest = self.checkpoint.manifest
        return None if manifest is None else manifest.created_s

    @cached_property
    def trace(self) -> Trace | None:
        """What took how long on which rank when it was saved; None if the save left no trace.

        Read when first looked at.

        Raises:
            DamagedCheckpointError: The trace can't be read; the checkpoint does not need it.
        """
        return read_trace(self.storage, self.attempt)

    @property
    def table(self) -> ChunkTable:
        """The chunk table, for analyses of your own.

        Checksums of a large checkpoint are at the ends of its data files, and are read then: a
        request for each file.
        """
        self.checkpoint.know_checks()
        return self.checkpoint.table

    @property
    def names(self) -> tuple[str, ...]:
        """FQN of every tensor and object, in the order of the state dict."""
        return self.checkpoint.table.names

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by FQN."""
        return MappingProxyType(
            {name: info for name, info in self._infos.items() if info is not None}
        )

    @cached_property
    def objects(self) -> tuple[str, ...]:
        """FQN of everything that is no tensor."""
        return tuple(name for name, info in self._infos.items() if info is None)

    @cached_property
    def small_values(self) -> Mapping[str, str]:
        """Numbers, texts and short lists among the objects by FQN, as `repr` writes them.

        Only objects that are stored in at most 4 KiB are read, the first 64 of them, and only what
        is made of plain values is told: nothing that a pickle names is looked up.

        What is damaged is left out: `verify` reports it.

        Raises:
            StorageError: The storage refused.
        """
        table, found = self.checkpoint.table, dict[str, str]()
        chunks = np.flatnonzero(table.kind[table.tensor] == Kind.OBJECT)
        short = chunks[table.item_bytes[chunks] <= _MOST_VALUE_BYTES][:_MOST_VALUES].tolist()

        def look(chunk: int) -> None:
            # ValueError: Python writes out no number of more than 4,300 digits.
            with suppress(DamagedCheckpointError, ValueError):
                self.checkpoint.know_checks([chunk])
                item = read_item(self.storage, table, chunk, transforms=self.checkpoint.transforms)
                if (told := _plain_text(item)) is not None:
                    found[table.names[table.tensor[chunk]]] = told

        run_tasks(short, look, min(_VALUE_THREADS, len(short)))
        return MappingProxyType(found)

    @cached_property
    def layouts(self) -> Mapping[str, str]:
        """How each tensor is cut into chunks, by FQN: `whole`, `rows/8`, `columns/2`, `4x2`."""
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
    def files(self) -> tuple[FileInfo, ...]:
        """Every data file that the checkpoint refers to, in the order of the chunk table."""
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
        """Bytes of all data files."""
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
        return {name: row for row, name in enumerate(self.checkpoint.table.names)}

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> Any:
        """Returns a handle on a tensor, of which only what is indexed is read; or an object.

        Objects are loaded under the rules of `torch.load(weights_only=True)`, which imports
        torch.

        Args:
            name: FQN.

        Raises:
            MissingKeyError: The checkpoint has no such name; the message lists similar ones.
            UnsafeCheckpointError: The object asks for code that a safe load refuses.
            DamagedCheckpointError: The object's bytes do not match their checksums.
        """
        row = self._row(name)
        info = self._infos[name]
        if info is not None:
            return TensorHandle(self.storage, self.checkpoint, row, info)
        from ray_dcp.torch_adapter.objects import load_object

        return load_object(self.read_object(name)[0], fqn=name)

    def read_object(self, name: str) -> tuple[bytes, ...]:
        """Returns the stored bytes of an object or tensor, chunk by chunk, without loading them.

        Args:
            name: FQN.

        Returns:
            What `torch.save` wrote for each chunk, after its checksums were verified.

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
        row = self._rows.get(name)
        if row is None:
            raise MissingKeyError(
                f"expected one of {len(self)} names of the checkpoint, but found {name!r}"
                + nearest(str(name), self.names),
                checkpoint_id=self.url,
                key=str(name),
            )
        return row

    def verify(self) -> VerifyReport:
        """Reads every data file, also of a step's items, and compares it with its checksums.

        Returns:
            What was checked and every problem; damage is reported, not raised.
        """
        return verify_opened(self.storage, self.checkpoint, self.place)

    def diff(
        self, other: CheckpointView, *, read: bool = True, told: Told | None = None
    ) -> CheckpointDiff:
        """Returns what is different in another checkpoint, by stored hashes.

        Where both were cut into the same chunks no payload is read. Other tensors are read and
        compared, which the result reports.

        Args:
            other: The later one.
            read: Read where hashes can't decide; else such tensors are `undecided`.
            told: Called with bytes read so far and in all, where bytes are read.

        Raises:
            DamagedCheckpointError: What was read does not match its checksums.
            StorageError: The storage refused.
        """
        return diff_checkpoints(self, other, read=read, told=told)

    def reshard(
        self,
        layout: str | int | ShardGrid,
        *,
        include: str | None = None,
        options: LoadOptions | None = None,
    ) -> ReshardPreview:
        """Returns what a load on other ranks would read, by the planner that loads use.

        Nothing but the chunk table is looked at.

        Args:
            layout: `8` or `8:row` for rows over 8 ranks, `8:column`, or `4x2` for rows over 4 and
                columns over 2.
            include: Shell pattern of FQNs; everything if None.
            options: Of the load.

        Returns:
            Bytes, ranges and memory of every rank.

        Raises:
            InvalidRequestError: The layout is none, or nothing matches.
        """
        return preview_reshard(self, layout, include=include, options=options)

    def __repr__(self) -> str:
        return (
            f"CheckpointView({self.url!r}, {self.kind}, {len(self.tensors)} tensors, "
            f"{len(self.objects)} objects, {self.num_bytes} bytes in {len(self.files)} files)"
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


def open_checkpoint(path: AnyPlace) -> CheckpointView:
    """Returns a view of the newest committed checkpoint at a path.

    Args:
        path: Path or URL of the checkpoint; or path of one safetensors file.

    Raises:
        CheckpointNotFoundError: There is none; the message lists what is there.
        UncommittedCheckpointError: Files of a save are there, but it was never committed.
        DamagedCheckpointError: Its manifest or chunk table can't be trusted.
        StorageError: The storage refused.
    """
    storage = _one_file(path) or open_storage(path)
    return CheckpointView(
        storage, read_checkpoint(storage, checkpoint_id=storage.url, checks_later=True), path
    )


def _one_file(path: AnyPlace) -> OneFile | None:
    """Returns a storage for a safetensors file of this machine; None for anything else.

    Raises:
        CheckpointNotFoundError: It is a file of another kind.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.path.isfile(path):
        return None
    folder, name = os.path.split(os.path.abspath(path))
    if not is_safetensors(path):
        raise CheckpointNotFoundError(
            f"expected a checkpoint, but {os.fspath(path)} is a file. If torch.save wrote it, "
            f"ray-dcp import makes a checkpoint of it",
            checkpoint_id=os.fspath(path),
        )
    return OneFile(open_storage(folder), name, "" if name.endswith(SUFFIX) else SUFFIX)


SUFFIX = ".safetensors"


def is_safetensors(path: str | os.PathLike[str]) -> bool:
    """Returns whether a local file is a safetensors file, by its name or its first bytes."""
    if os.fspath(path).endswith(SUFFIX):
        return True
    with Path(path).open("rb") as file:
        begin = file.read(9)
    length = int.from_bytes(begin[:8], "little")
    return begin[8:] == b"{" and length <= min(MAX_HEADER_BYTES, os.path.getsize(path) - 8)
