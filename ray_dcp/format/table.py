"""The chunk table on storage: which bytes of which file hold which box of which tensor.

The file `chunks.<attempt>.table` has the rows, one per chunk, in groups, and at its end a record
(`core.columns`) with all tensors and the index of the groups. Data that differs between the saves
of a plan is in the manifest: the attempt in file names, and the places of deferred items, whose
length is known only once they are written. `with_places` adds them.

    | group 0 | group 1 | ... | record: tensors, index |
                              ^ `end_of`

**Groups.** A group has the chunks of several whole files, in file order: tensor, box, place. It is
one packed frame; the block checksums are at the ends of the data files. A reader reads the end of
the file, and then only the groups with chunks of the boxes that it needs. The manifest has the
digest of the end, the index has the digests of the groups.

**The index** (`TableIndex`) has, for each group and each tensor with chunks in it, the bounding box
of these chunks.

*Trust*: `core.columns` bounds memory by a fixed multiple of the file's length, and every other
claim of the file is checked against the data that it describes (`check_table`). Whether the chunks
cover their tensors is checked by `planning.coverage`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ray_dcp.core.checksums import DIGEST_BYTES, digest_bytes, num_blocks_many
from ray_dcp.core.columns import int_keys, pack, pack_record, record_bytes, unpack, unpack_record
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import (
    BoolArray,
    ChunkTable,
    Int32Array,
    Int64Array,
    IntKey,
    Kind,
    NamePath,
    offsets_of,
    widen,
)
from ray_dcp.errors import CheckpointError, DamagedCheckpointError
from ray_dcp.format import damaged as format_damaged
from ray_dcp.format.manifest import Manifest, PlaceRun
from ray_dcp.format.names import check_file_keys
from ray_dcp.planning.reads import TensorBoxes, Wanted, meetings

FORMAT_VERSION = 1
"""The version that is written and read."""
MAX_TABLE_BYTES = 8 << 30
GROUP_ROWS = 1 << 16
"""Approximate rows per group: one group begins at the first file in each range of this length."""

_MOST_WIDTH = 127
_MOST_INDEX = (1 << 63) - 1
damaged = partial(format_damaged, where=" in the chunk table")
"""Returns the error for an invalid chunk table."""

_PLACES = ("item_offset", "item_bytes", "payload_offset", "payload_bytes", "block_bytes")


@dataclass(frozen=True, eq=False)
class TableIndex:
    """The index of the groups: which chunks each group has, and where its bytes are.

    Attributes:
        first_row: int64[g + 1], the first row of each group, and the number of rows.
        first_deferred: int64[g + 1], number of deferred chunks before each group, and in total.
        start: int64[g + 1], the first byte of each group, and the end of the last one.
        digests: Digest of the bytes of each group.
        group: int32[b], the group of each bounding box, ascending within a tensor.
        boxes: Bounding boxes of the chunks of one tensor in one group.
    """

    first_row: Int64Array
    first_deferred: Int64Array
    start: Int64Array
    digests: tuple[bytes, ...]
    group: Int32Array
    boxes: TensorBoxes

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.digests)

    def around(self, wanted: Sequence[Wanted], tensors: Sequence[int]) -> Int64Array:
        """Returns the groups that have wanted chunks, ascending.

        Args:
            wanted: Boxes whose chunks are wanted.
            tensors: Tensors of which every chunk is wanted.
        """
        used = np.isin(self.boxes.tensor, np.array(tensors, dtype=np.int64))
        found = [self.group[used]]
        for boxes in wanted:
            width = max(self.boxes.offset.shape[1], boxes.offset.shape[1])
            offset, size = widen(self.boxes.offset, self.boxes.size, width)
            there = self.boxes._replace(offset=offset, size=size)
            box, *_ = meetings(there, boxes.tensor, widen(boxes.offset, boxes.size, width))
            found.append(self.group[box])
        return np.unique(np.concatenate(found)).astype(np.int64)


def encode_table(table: ChunkTable) -> bytes:
    """Encodes a chunk table without checksums; `decode_table` returns an equal one.

    Args:
        table: A chunk table whose chunks are in file order.

    Raises:
        DamagedCheckpointError: The table contradicts itself, and could not be read back.

    Complexity:
        O(chunks), about 0.5 us per chunk.
    """
    check_table(table)
    if (np.diff(table.file) < 0).any():
        raise damaged("chunks in the order of their files", "another order")
    runs = np.bincount(table.file, minlength=len(table.files))
    bounds = _bounds(runs)
    groups = [_encode_group(table, low, high) for low, high in pairwise(bounds.tolist())]
    group, boxes = _boxes_of_groups(table, bounds)
    width = table.shape.shape[1]
    fields = {
        "version": FORMAT_VERSION,
        "names": table.names,
        "paths": table.paths,
        "keys": int_keys(table.paths),
        "dtypes": table.dtypes,
        "files": table.files,
        "width": width,
        "boxes": len(group),
        "digests": b"".join(map(digest_bytes, groups)).hex(),
    }
    about = [table.kind, table.dtype, table.ndim, table.requires_grad, *table.shape.T]
    index = [
        bounds,
        offsets_of((table.payload_offset < 0).astype(np.int64))[bounds],
        np.zeros_like(bounds),  # number of checksums in the table before each group
        offsets_of(np.array(list(map(len, groups)), dtype=np.int64)),
    ]
    frames = [
        pack(about, _run(table.num_tensors)),
        pack([runs], _run(len(runs))),
        pack(index, _run(len(bounds))),
        pack([group, boxes.tensor, *boxes.offset.T, *boxes.size.T], _run(len(group))),
    ]
    return b"".join([*groups, pack_record(fields, frames)])


def decode_table(data: bytes) -> ChunkTable:
    """Decodes and checks a chunk table.

    The caller compares the digest of `data` with the manifest first. This function checks that the
    table can be used: counts before anything is allocated, boxes inside their tensors, indices in
    range, and the index.

    Raises:
        DamagedCheckpointError: The bytes are no chunk table, or one that contradicts itself.
        UnsafeCheckpointError: A file lies outside the checkpoint's directory.
        CheckpointError: The format has another version.

    Complexity:
        O(chunks), about 1 us per chunk.
    """
    start = _start_of_end(data)
    found = GroupedTable(data[start:], len(data))
    index = found.index
    table = found.chunks(
        {
            group: memoryview(data)[low:high]
            for group, (low, high) in enumerate(pairwise(index.start.tolist()))
        }
    )
    check_table(table)
    group, boxes = _boxes_of_groups(table, index.first_row)
    mine = index.boxes
    same = (
        np.array_equal(index.group, group)
        and np.array_equal(mine.tensor, boxes.tensor)
        and np.array_equal(mine.offset, boxes.offset)
        and np.array_equal(mine.size, boxes.size)
    )
    if not same:
        # Why: a reader that trusts a wrong index would miss chunks.
        raise damaged("an index with the boxes around the chunks of each group", "others")
    return table


def end_of(data: bytes) -> int | None:
    """Returns where the record at the end of a table begins; None if there is only one group.

    Args:
        data: The whole file, as `encode_table` returned it.
    """
    start = _start_of_end(data)
    return start if GroupedTable(data[start:], len(data)).index.num_groups > 1 else None


class GroupedTable:
    """A chunk table whose groups are read on demand.

    Args:
        end: The last bytes of its file, from `end_of` on; their digest is verified.
        num_bytes: Length of the whole file.

    Attributes:
        tensors: The table without chunks.
        index: Where the chunks are.

    Raises:
        DamagedCheckpointError: The bytes are not the end of a table.
        UnsafeCheckpointError: A file lies outside the checkpoint's directory.
        CheckpointError: The format has another version.
    """

    tensors: ChunkTable
    index: TableIndex

    def __init__(self, end: bytes, num_bytes: int) -> None:
        try:
            fields, frames = unpack_record(end)
            _check_version(fields)
            about, runs, bounds, boxes = frames
            self.tensors = _tensors(fields, about)
            check_table(self.tensors)
            (self._runs,) = unpack(runs, [np.int64], _run(len(self.tensors.files)))
            self.index = _index(fields, bounds, boxes, self.tensors)
        except (ValueError, TypeError, LookupError) as error:
            raise _no_table(error) from error
        self._first_row_of_file = offsets_of(self._runs)
        index = self.index
        fits = (
            (self._runs >= 0).all()
            and np.isin(index.first_row, self._first_row_of_file).all()
            and int(index.first_row[-1]) == int(self._first_row_of_file[-1])
            and int(index.start[-1]) + len(end) == num_bytes
        )
        if not fits:
            raise damaged("groups of whole files before the end of the file", "others")

    @property
    def num_chunks(self) -> int:
        """Number of chunks in all groups."""
        return int(self.index.first_row[-1])

    def chunks(self, groups: Mapping[int, bytes | memoryview]) -> ChunkTable:
        """Returns the table with the chunks of the given groups.

        Args:
            groups: Bytes of the groups, by number, ascending.

        Raises:
            DamagedCheckpointError: The bytes do not match the digests of the index, or contradict
                it.
        """
        found = [self._group(group, data) for group, data in groups.items()]
        if not found:
            return self.tensors
        rows: dict[str, Any] = {
            name: np.concatenate([one[name] for one in found]) for name in found[0]
        }
        check_start = np.zeros(len(rows["tensor"]) + 1, dtype=np.int64)
        return replace(self.tensors, **rows, check_start=check_start)

    def _group(self, group: int, data: bytes | memoryview) -> dict[str, npt.NDArray[Any]]:
        """Returns the columns of the chunks of a group."""
        index = self.index
        if digest_bytes(data) != index.digests[group]:
            raise damaged(f"the rows of group {group} that its index names", "other bytes")
        low, high = index.first_row[group : group + 2].tolist()
        files = np.searchsorted(self._first_row_of_file, [low, high])
        runs = self._runs[files[0] : files[1]]
        width = self.tensors.shape.shape[1]
        dtypes = [np.int32, *[np.int64] * (2 * width + len(_PLACES))]
        try:
            tensor, *columns = unpack(data, dtypes, runs)
        except ValueError as error:
            raise _no_table(error) from error
        places = dict(zip(_PLACES, columns[2 * width :], strict=True))
        late = int(index.first_deferred[group + 1] - index.first_deferred[group])
        if int((places["payload_offset"] < 0).sum()) != late:
            # Why for each group: the sum over several may be right while places would be mixed up.
            raise damaged(f"{late} deferred chunks in group {group}", "another number")
        return {
            "tensor": tensor,
            "offset": _stacked(columns[:width], len(tensor)),
            "size": _stacked(columns[width : 2 * width], len(tensor)),
            "file": np.repeat(np.arange(*files, dtype=np.int32), runs),
            **places,
        }


def _run(count: int) -> Int64Array:
    return np.array([count], dtype=np.int64)


def _bounds(runs: Int64Array) -> Int64Array:
    """Returns where to cut rows into groups of whole files: int64[g + 1]."""
    first = offsets_of(runs)
    starts = first[:-1][runs > 0]
    cuts = starts[np.unique(starts // GROUP_ROWS, return_index=True)[1]]
    return np.append(cuts, first[-1])


def _encode_group(table: ChunkTable, low: int, high: int) -> bytes:
    mine = slice(low, high)
    _, runs = np.unique(table.file[mine], return_counts=True)
    columns = [table.tensor, *table.offset.T, *table.size.T]
    columns += [getattr(table, name) for name in _PLACES]
    return pack([column[mine] for column in columns], runs)


def _boxes_of_groups(table: ChunkTable, bounds: Int64Array) -> tuple[Int32Array, TensorBoxes]:
    """Returns group and bounding box of each tensor's chunks in each group."""
    group = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    code = table.tensor.astype(np.int64) * len(bounds) + group
    order = np.argsort(code, kind="stable")
    first = np.flatnonzero(np.diff(code[order], prepend=-1))
    offset, end = table.offset[order], (table.offset + table.size)[order]
    if len(first):
        offset = np.minimum.reduceat(offset, first, axis=0)
        end = np.maximum.reduceat(end, first, axis=0)
    rows = order[first]
    boxes = TensorBoxes(table.tensor[rows], offset, end - offset, table.num_tensors)
    return group[rows].astype(np.int32), boxes


def _stacked(columns: Sequence[Int64Array], count: int) -> Int64Array:
    """Returns columns as rows: int64[count, columns]."""
    return np.ascontiguousarray(np.array(columns, dtype=np.int64).reshape(len(columns), count).T)


def _tensors(fields: Mapping[str, Any], about: memoryview) -> ChunkTable:
    """Returns the table without chunks."""
    names, dtypes, files = (_decode_texts(fields, name) for name in ("names", "dtypes", "files"))
    width = _count(fields, "width", _MOST_WIDTH)
    if len(dtypes) > np.iinfo(np.int8).max:
        raise damaged("at most 127 dtypes", str(len(dtypes)))
    columns = unpack(
        about, [np.int8, np.int8, np.int8, np.bool_, *[np.int64] * width], _run(len(names))
    )
    nothing = np.zeros(0, dtype=np.int64)
    return ChunkTable(
        names=names,
        paths=_paths(fields),
        dtypes=dtypes,
        files=files,
        kind=columns[0],
        dtype=columns[1],
        ndim=columns[2],
        requires_grad=columns[3],
        shape=_stacked(columns[4:], len(names)),
        tensor=nothing.astype(np.int32),
        offset=np.zeros((0, width), dtype=np.int64),
        size=np.zeros((0, width), dtype=np.int64),
        file=nothing.astype(np.int32),
        check_start=np.zeros(1, dtype=np.int64),
        checks=np.zeros(0, dtype=np.uint64),
        **dict.fromkeys(_PLACES, nothing),
    )


def _paths(fields: Mapping[str, Any]) -> tuple[NamePath | None, ...]:
    paths, keys = fields["paths"], fields["keys"]
    lists = [path for path in paths if path is not None]
    parts = list(chain.from_iterable(lists))
    kinds = {*map(type, parts)}
    if not ({*map(type, lists)} <= {list} and kinds <= {str, int}):
        raise damaged("texts and list indices in paths", "something else")
    if int in kinds and any(type(part) is int and abs(part) > _MOST_INDEX for part in parts):
        raise damaged(f"list indices up to {_MOST_INDEX} in paths", "a longer one")
    for row, place in keys:
        text = paths[row][place]
        if str(int(text)) != text:
            raise damaged("a number as a key in path", repr(text[:50]))
        paths[row][place] = IntKey(text)
    return tuple(None if path is None else tuple(path) for path in paths)


def _decode_texts(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    words = fields[name]
    if type(words) is not list or not {*map(type, words)} <= {str}:
        raise damaged(f"a list of texts as {name}", "something else")
    return tuple(words)


def _count(fields: Mapping[str, Any], name: str, most: int) -> int:
    value = fields[name]
    if type(value) is not int or not 0 <= value <= most:
        raise damaged(f"0 to {most} as {name}", repr(value)[:100])
    return value


def _index(
    fields: Mapping[str, Any], bounds: memoryview, boxes: memoryview, table: ChunkTable
) -> TableIndex:
    digests, width = bytes.fromhex(fields["digests"]), table.shape.shape[1]
    count = len(digests) // DIGEST_BYTES
    rows = unpack(bounds, [np.int64] * 4, _run(count + 1))
    dtypes = [np.int32, np.int32, *[np.int64] * (2 * width)]
    num_boxes = _count(fields, "boxes", 1 << 40)
    group, tensor, *corners = unpack(boxes, dtypes, _run(num_boxes))
    offset, size = _stacked(corners[:width], num_boxes), _stacked(corners[width:], num_boxes)
    fits = (
        len(digests) == count * DIGEST_BYTES
        # Why not by differences: they may overflow.
        and all(int(row[0]) == 0 and (row[1:] >= row[:-1]).all() for row in rows)
        and not rows[2].any()
        and ((group >= 0) & (group < count)).all()
        and ((tensor >= 0) & (tensor < table.num_tensors)).all()
        and (offset >= 0).all()
        and (size >= 0).all()
    )
    if not fits:
        raise damaged("an index that fits its table", "another")
    return TableIndex(
        first_row=rows[0],
        first_deferred=rows[1],
        start=rows[3],
        digests=tuple(
            digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)
        ),
        group=group,
        boxes=TensorBoxes(tensor, offset, size, table.num_tensors),
    )


def _check_version(fields: Mapping[str, Any]) -> None:
    version = _count(fields, "version", 1 << 30)
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"Expected a chunk table of format version {FORMAT_VERSION}, found version "
            f"{version}: another ray_dcp wrote this checkpoint; upgrade ray_dcp to load it"
        )


def _start_of_end(data: bytes) -> int:
    if len(data) > MAX_TABLE_BYTES:
        raise damaged(f"a table of at most {MAX_TABLE_BYTES >> 30} GiB", f"{len(data)} bytes")
    try:
        return len(data) - record_bytes(data)
    except ValueError as error:
        raise _no_table(error) from error


def _no_table(error: Exception) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"Expected a chunk table: {str(error)[:500]}; it is damaged, load an earlier step"
    )


MOST_CHECKS = 1 << 29
"""Most checksums that are outside the table: those of 512 TiB in blocks of 1 MiB."""


class DeferredRows(NamedTuple):
    """Which of all deferred chunks a part of a table contains."""

    rows: Int64Array
    """int64[k], numbers of the deferred chunks, in the order of the part."""
    total: int
    """Number of deferred chunks in the whole table."""


def place_runs(places: Int64Array) -> tuple[PlaceRun, ...]:
    """Returns the places of deferred items in the form of a manifest.

    Args:
        places: int64[k, 3], item offset, item bytes and block bytes of each item.

    Examples:
        >>> place_runs(np.array([[64, 9, 1024], [64, 9, 1024], [128, 9, 1024]]))
        (PlaceRun(item_offset=64, item_bytes=9, block_bytes=1024, num_items=2), \
PlaceRun(item_offset=128, item_bytes=9, block_bytes=1024, num_items=1))
    """
    changes = np.flatnonzero((places[1:] != places[:-1]).any(axis=1)) + 1
    starts = np.concatenate([np.zeros(min(len(places), 1), np.int64), changes])
    counts = np.diff(np.append(starts, len(places)))
    rows = np.column_stack([places[starts], counts]).tolist()
    return tuple(PlaceRun(*row) for row in rows)


def with_places(
    table: ChunkTable, manifest: Manifest, deferred: DeferredRows | None = None
) -> ChunkTable:
    """Returns the chunk table of one attempt, or of a part of it.

    Args:
        table: The table that all saves of the plan share, with all chunks of a file or none.
        manifest: Manifest of the attempt.
        deferred: Which deferred chunks `table` contains; None means all, as of `decode_table`.

    Returns:
        The table. Checksums at the end of data files are 0 in it, and are filled in later
        (`io.checkpoint.CheckFile`).

    Raises:
        DamagedCheckpointError: Table and manifest don't belong together, or the result contradicts
            itself.
    """
    if (np.diff(table.file) < 0).any():
        raise damaged("chunks in the order of their files", "another order")
    late = np.flatnonzero(table.payload_offset < 0)
    rows, total = (np.arange(len(late)), len(late)) if deferred is None else deferred
    # Why Python's sum: it does not overflow.
    told = sum(run.num_items for run in manifest.deferred)
    if told != total or len(rows) != len(late):
        raise damaged(f"{told} deferred items, as its manifest says,", f"{total}")
    runs = np.array(manifest.deferred, dtype=np.int64).reshape(-1, 4)
    found = runs[np.searchsorted(np.cumsum(runs[:, 3]), rows, side="right"), :3]
    whole = placed(table, manifest.attempt, found)
    lengths = (whole.item_offset, whole.payload_bytes, whole.block_bytes)
    if any((column < 0).any() for column in lengths):
        raise damaged("a place for each chunk", "none")
    counts = num_blocks_many(whole.payload_bytes, whole.block_bytes)
    if int(counts.max(initial=0)) > MOST_CHECKS or int(counts.sum()) > MOST_CHECKS:
        raise damaged(f"at most {MOST_CHECKS} checksums", "more")
    check_start = offsets_of(counts)
    # Why zeros: the system allocates memory only once it is written to.
    checks = np.zeros(int(check_start[-1]), np.uint64)
    whole = replace(whole, check_start=check_start, checks=checks)
    if deferred is not None:
        check_table(whole)
        return whole
    # Why not all again: the rest is as `decode_table` has checked it.
    check_file_keys(whole.files)
    if len(set(whole.files)) != len(whole.files):
        raise damaged("each file once", "one twice")
    _check_places(whole)
    return whole


def placed(table: ChunkTable, attempt: str, places: Int64Array) -> ChunkTable:
    """Returns a planned chunk table with the file names of one attempt and all places.

    Args:
        table: The table that all saves of the plan share.
        attempt: Id that replaces `{attempt}` in file names.
        places: int64[k, 3], item offset, item bytes and block bytes of each deferred chunk.
    """
    late = np.flatnonzero(table.payload_offset < 0)
    columns = {name: getattr(table, name).copy() for name in _COLUMNS_OF_PLACES}
    for name, which in _COLUMNS_OF_PLACES.items():
        columns[name][late] = places[:, which]
    files = tuple(key.replace("{attempt}", attempt) for key in table.files)
    return replace(table, files=files, **columns)


_COLUMNS_OF_PLACES = {
    "item_offset": 0,
    "item_bytes": 1,
    "block_bytes": 2,
    "payload_offset": 0,
    "payload_bytes": 1,
}
"""Columns of a chunk table, with the column of `places` that fills them for deferred chunks."""


_MAX_VOLUME = float(1 << 62)


def check_table(table: ChunkTable, *, files: bool = True) -> None:
    """Checks a table's lengths, indices, boxes and places.

    A planned table passes too: it may lack the places of deferred chunks.

    Args:
        table: The table; not changed.
        files: Also check that file names stay in the checkpoint's directory.

    Raises:
        DamagedCheckpointError: The table contradicts itself; the message names the first chunk or
            tensor at fault.
        UnsafeCheckpointError: A file lies outside the checkpoint's directory.
    """
    _check_lengths(table)
    if files:
        check_file_keys(table.files)
    _check_tensors(table)
    _check_chunks(table)
    _check_places(table)


def volumes(size: Int64Array) -> Int64Array:
    """Returns the volume of each box; -1 if a length is negative or the volume is beyond 2**62.

    Args:
        size: int64[n, D], lengths of each box.
    """
    rough, found = np.ones(len(size)), np.ones(len(size), np.int64)
    bad = np.zeros(len(size), np.bool_)
    # Why column by column: numpy takes five times as long along rows of two or three numbers.
    with np.errstate(over="ignore"):
        for dim in range(size.shape[1]):
            rough *= size[:, dim]
            found *= size[:, dim]
            bad |= size[:, dim] < 0
    return np.where(bad | (rough > _MAX_VOLUME), -1, found)


def _check_lengths(table: ChunkTable) -> None:
    per_tensor = (table.paths, table.kind, table.dtype, table.ndim, table.requires_grad)
    per_chunk = (
        table.file, table.item_offset, table.item_bytes, table.payload_offset,
        table.payload_bytes, table.block_bytes,
    )  # fmt: skip
    width = table.shape.shape[1:]
    boxes = (table.offset.shape, table.size.shape)
    if (
        any(len(column) != table.num_tensors for column in per_tensor)
        or any(len(column) != table.num_chunks for column in per_chunk)
        or table.shape.shape != (table.num_tensors, *width)
        or boxes != ((table.num_chunks, *width),) * 2
        or len(width) != 1
    ):
        raise damaged("columns of equal length", "different lengths")
    if len(set(table.names)) != table.num_tensors:
        raise damaged("each FQN once", "one twice")
    if len(set(table.files)) != len(table.files):
        raise damaged("each file once", "one twice")


def _check_tensors(table: ChunkTable) -> None:
    is_object = table.kind == Kind.OBJECT
    known = np.array([dtype in ITEMSIZE for dtype in table.dtypes] + [False], dtype=bool)
    in_range = (table.dtype >= -1) & (table.dtype < len(table.dtypes))
    dtype_fits = in_range & ((table.dtype >= 0) | is_object)
    # Careful: index -1 selects the False that was appended.
    plain = known[np.where(in_range, table.dtype, -1)] | (table.kind != Kind.TENSOR)
    width = table.shape.shape[1]
    padding = np.arange(width) >= table.ndim[:, None]
    _require(table, "a known kind", np.isin(table.kind, [int(kind) for kind in Kind]))
    _require(table, "a dtype of the vocabulary", dtype_fits)
    _require(table, "a dtype that has raw bytes", plain)
    _require(table, f"0 to {width} dimensions", (table.ndim >= 0) & (table.ndim <= width))
    _require(table, "a global shape", ((table.shape >= 0) & ((table.shape == 1) | ~padding)).all(1))
    _require(table, "less than 2**62 elements", volumes(table.shape) >= 0)


def _check_chunks(table: ChunkTable) -> None:
    _require_chunk(table, "a tensor", (table.tensor >= 0) & (table.tensor < table.num_tensors))
    _require_chunk(table, "a file", (table.file >= 0) & (table.file < len(table.files)))
    ndim = table.ndim[table.tensor]
    fits = np.ones(table.num_chunks, np.bool_)
    for dim in range(table.shape.shape[1]):
        shape = table.shape[:, dim][table.tensor]
        offset, size = table.offset[:, dim], table.size[:, dim]
        # Why not offset + size <= shape: the sum may overflow.
        fits &= (offset >= 0) & (size >= 0) & (offset <= shape - size)
        fits &= (dim < ndim) | ((offset == 0) & (size == 1))
    _require_chunk(table, "a box inside its tensor", fits)


def _check_places(table: ChunkTable) -> None:
    placed = table.item_offset >= 0
    numbers = (table.item_offset, table.item_bytes, table.payload_offset, table.payload_bytes)
    _require_chunk(table, "a place in its file", np.minimum.reduce(numbers) >= -1)
    whole = ~placed | ((table.item_bytes >= 0) & (table.payload_bytes >= 0))
    ends = table.item_offset <= np.iinfo(np.int64).max - np.maximum(table.item_bytes, 0)
    _require_chunk(table, "a length", whole & ends)
    told = placed & (table.payload_offset >= 0)
    skipped = table.payload_offset - table.item_offset
    inside = (skipped >= 0) & (table.payload_bytes <= table.item_bytes - skipped)
    _require_chunk(table, "its raw bytes inside its item", ~told | inside)
    plain = table.kind[table.tensor] == Kind.TENSOR
    itemsizes = np.array([ITEMSIZE.get(dtype, 0) for dtype in table.dtypes] + [0], dtype=np.int64)
    expected = volumes(table.size) * itemsizes[table.dtype[table.tensor]]
    fits = ~plain | (table.payload_bytes == expected)
    _require_chunk(table, "as many raw bytes as its box", fits)
    _require_chunk(table, "blocks of 0 or more bytes", table.block_bytes >= 0)


def _require(table: ChunkTable, expected: str, fits: BoolArray) -> None:
    if not fits.all():
        raise damaged(f"{expected} for {table.names[int(np.argmin(fits))]!r}", "none that fits")


def _require_chunk(table: ChunkTable, expected: str, fits: BoolArray) -> None:
    if fits.all():
        return
    row = int(np.argmin(fits))
    tensor = int(table.tensor[row])
    name = table.names[tensor] if 0 <= tensor < table.num_tensors else "?"
    raise damaged(f"{expected} for chunk {row} of {name!r}", "none that fits")
