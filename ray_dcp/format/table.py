"""The chunk table on storage: which bytes of which file hold which box of which tensor.

The file `chunks.<attempt>.table` has the rows, one per chunk, in groups, and at its end a record
(`core.packing`) with all tensors and the index of the groups. Data that differs between the saves
of a plan is in the manifest (`table_places`).

    | group 0 | checksums | group 1 | checksums | ... | record: tensors, index |
                                                      ^ `end_of`

**Groups.** A group has the chunks of several whole files, in file order: tensor, box, place. It is
one packed frame, followed by the block checksums if the data files have no room for them. A reader
reads the end of the file, and then only the groups with chunks of the boxes that it needs. The
manifest has the digest of the end, the index has the digests of the groups.

**The index** (`TableIndex`) has, for each group and each tensor with chunks in it, the bounding box
of these chunks.

*Trust*: `core.packing` bounds memory by a fixed multiple of the file's length, and every other
claim of the file is checked against the data that it describes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np

from ray_dcp.core.checksums import CHECK_BYTES, DIGEST_BYTES, digest_bytes, num_blocks_many
from ray_dcp.core.columns import int_keys
from ray_dcp.core.grouping import offsets_of
from ray_dcp.core.packing import pack, pack_record, record_bytes, unpack, unpack_record
from ray_dcp.core.values import ChunkTable, Int32Array, Int64Array, IntKey, NamePath, widen
from ray_dcp.errors import CheckpointError, DamagedCheckpointError
from ray_dcp.format.table_check import check_table, damaged
from ray_dcp.planning.reads import Boxes, Wanted, meetings

FORMAT_VERSION = 1
"""The version that is written and read."""
MAX_TABLE_BYTES = 8 << 30
GROUP_ROWS = 1 << 16
"""Approximate rows per group: one group begins at the first file in each range of this length."""

_MOST_WIDTH = 127
_MOST_INDEX = (1 << 63) - 1
_PLACES = ("item_offset", "item_bytes", "payload_offset", "payload_bytes", "block_bytes")


@dataclass(frozen=True, eq=False)
class TableIndex:
    """The index of the groups: which chunks each group has, and where its bytes are.

    Attributes:
        first_row: int64[g + 1], the first row of each group, and the number of rows.
        first_deferred: int64[g + 1], number of deferred chunks before each group, and in total.
        first_check: int64[g + 1], the same for the checksums that the table contains.
        start: int64[g + 1], the first byte of each group, and the end of the last one.
        digests: Digest of the bytes of each group.
        group: int32[b], the group of each bounding box, ascending within a tensor.
        boxes: Bounding boxes of the chunks of one tensor in one group.
    """

    first_row: Int64Array
    first_deferred: Int64Array
    first_check: Int64Array
    start: Int64Array
    digests: tuple[bytes, ...]
    group: Int32Array
    boxes: Boxes

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
    """Encodes a chunk table; `decode_table` returns an equal one.

    Args:
        table: A chunk table whose chunks are in file order.

    Raises:
        DamagedCheckpointError: The table contradicts itself, and could not be read back.

    Complexity:
        O(chunks + checksums), about 0.5 us per chunk.
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
        table.check_start[bounds],
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
    range, checksums for every block, and the index.

    Raises:
        DamagedCheckpointError: The bytes are no chunk table, or one that contradicts itself.
        UnsafeCheckpointError: A file lies outside the checkpoint's directory.
        CheckpointError: The format has another version.

    Complexity:
        O(chunks + checksums), about 1 us per chunk.
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

    def span(self, group: int) -> tuple[int, int]:
        """Returns the first byte of a group, and the end of its last byte, exclusive."""
        low, high = self.index.start[group : group + 2].tolist()
        return low, high

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
        starts = [one.check_start[1:] - one.check_start[:-1] for one in found]
        rows: dict[str, Any] = {
            name: np.concatenate([getattr(one, name) for one in found])
            for name in ("tensor", "offset", "size", "file", *_PLACES, "checks")
        }
        return replace(self.tensors, **rows, check_start=offsets_of(np.concatenate(starts)))

    def _group(self, group: int, data: bytes | memoryview) -> ChunkTable:
        index = self.index
        if digest_bytes(data) != index.digests[group]:
            raise damaged(f"the rows of group {group} that its index names", "other bytes")
        low, high = index.first_row[group : group + 2].tolist()
        files = np.searchsorted(self._first_row_of_file, [low, high])
        runs = self._runs[files[0] : files[1]]
        width = self.tensors.shape.shape[1]
        num_checks = int(index.first_check[group + 1] - index.first_check[group])
        end = len(data) - CHECK_BYTES * num_checks
        dtypes = [np.int32, *[np.int64] * (2 * width + len(_PLACES))]
        try:
            tensor, *columns = unpack(data[: max(end, 0)], dtypes, runs)
            checks = np.frombuffer(data[max(end, 0) :], "<u8").astype(np.uint64)
        except ValueError as error:
            raise _no_table(error) from error
        places: dict[str, Any] = dict(zip(_PLACES, columns[2 * width :], strict=True))
        late = int(index.first_deferred[group + 1] - index.first_deferred[group])
        if int((places["payload_offset"] < 0).sum()) != late:
            # Why for each group: the sum over several may be right while places would be mixed up.
            raise damaged(f"{late} deferred chunks in group {group}", "another number")
        blocks = np.zeros(len(tensor), dtype=np.int64)
        if num_checks:
            blocks = num_blocks_many(places["payload_bytes"], places["block_bytes"])
        if int(blocks.sum()) != len(checks) or (blocks < 0).any():
            raise damaged(f"{num_checks} checksums in group {group}, one a block", "others")
        return replace(
            self.tensors,
            tensor=tensor,
            offset=_stacked(columns[:width], len(tensor)),
            size=_stacked(columns[width : 2 * width], len(tensor)),
            file=np.repeat(np.arange(*files, dtype=np.int32), runs),
            check_start=offsets_of(blocks),
            checks=checks,
            **places,
        )


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
    first, last = table.check_start[[low, high]].tolist()
    checks = np.ascontiguousarray(table.checks[first:last], "<u8")
    return pack([column[mine] for column in columns], runs) + checks.tobytes()


def _boxes_of_groups(table: ChunkTable, bounds: Int64Array) -> tuple[Int32Array, Boxes]:
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
    boxes = Boxes(table.tensor[rows], offset, end - offset, table.num_tensors)
    return group[rows].astype(np.int32), boxes


def _stacked(columns: Sequence[Int64Array], count: int) -> Int64Array:
    """Returns columns as rows: int64[count, columns]."""
    return np.ascontiguousarray(np.array(columns, dtype=np.int64).reshape(len(columns), count).T)


def _tensors(fields: Mapping[str, Any], about: memoryview) -> ChunkTable:
    """Returns the table without chunks."""
    names, dtypes, files = (_words(fields, name) for name in ("names", "dtypes", "files"))
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


def _words(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
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
        and ((group >= 0) & (group < count)).all()
        and ((tensor >= 0) & (tensor < table.num_tensors)).all()
        and (offset >= 0).all()
        and (size >= 0).all()
    )
    if not fits:
        raise damaged("an index that fits its table", "another")
    first_row, first_deferred, first_check, start = rows
    return TableIndex(
        first_row=first_row,
        first_deferred=first_deferred,
        first_check=first_check,
        start=start,
        digests=tuple(
            digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)
        ),
        group=group,
        boxes=Boxes(tensor, offset, size, table.num_tensors),
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
