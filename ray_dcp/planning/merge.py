"""Merges all ranks' columns into one table; finds conflicts, replicas that differ.

The plan proper starts from this table: `share_out` decides which rank writes what, `layout` where.

**Replica digests.** Plain tensors and objects that several ranks hold carry a digest of their
content each. Items that the same ranks hold form a group, and each rank sends one digest for a
whole group: a few digests, and no row, show whether replicas still have equal content. An item
that differed when the plan was made is a group of its own. The plan takes it whole from the lowest
rank, so the plan stays valid whether the item differs or not, and the digest shows which items do.

`without_contents` returns a rank's items without these digests, `contents_of` the digests alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from ray_dcp.commit_protocol.error_aggregation import name_ranks
from ray_dcp.core.columns import ListNumbers, has_identity
from ray_dcp.core.values import (
    BoolArray,
    Columns,
    Int32Array,
    Int64Array,
    Kind,
    NamePath,
    ValueGroups,
    box_text,
    first_rows,
    group_rows,
    offsets_of,
    pad,
    run_of,
)
from ray_dcp.errors import CoverageError, InternalError, PlanConflictError
from ray_dcp.planning.coverage import check_coverage

_TOLD = 1000
"""Most conflicts that one message lists; the message gives the number of the others."""


@dataclass(frozen=True, eq=False)
class Held(Columns):
    """What all ranks hold, one row per item, ranks ascending; names in order of first appearance.

    Boxes have at least one dimension.

    Attributes:
        first: int64[t], the first row of each tensor or object.
        rank: int32[n], the rank that holds the item.
        row: int32[n], row of that rank's `Columns`.
        place: int32[n], index of the item's digest among those of its rank, if it has one.
    """

    first: Int64Array
    rank: Int32Array
    row: Int32Array
    place: Int32Array


@dataclass(frozen=True, eq=False)
class DistinctBoxes:
    """The distinct (FQN, box) of all ranks, in order of first appearance, and their holders.

    Attributes:
        row: int64[g], the first row of `Held` that holds it.
        start: int64[g + 1], where its holders start in `holder`.
        holder: int64[m], rows of `Held`, ranks ascending within a box, each rank once.
        again: int64[k], rows of `Held` that repeat a box with elements, or an object, of the same
            rank: a conflict, which `check_held` reports.
    """

    row: Int64Array
    start: Int64Array
    holder: Int64Array
    again: Int64Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


def merge(columns: Sequence[Columns]) -> Held:
    """Returns all ranks' items as one table.

    An empty mapping is omitted if another rank has values in it: of a state that one rank gathers,
    as with torch's `StateDictOptions(full_state_dict=True, cpu_offload=True)`, the others have
    empty mappings.

    Entries of lists that ranks have in part, by `columns.identified`, become entries of one list:
    those of rank 0 keep their indices, and what each next rank adds follows. So the parameter
    groups of pipeline stages are stored as one process with all stages would store them.

    Args:
        columns: Columns of each rank; at least one.

    Examples:
        Each of two ranks holds two rows of a 4 x 2 matrix `w`, and all of a bias `b`; rank 0 also
        has a counter. That are five items, of three names:

        >>> from ray_dcp.core.columns import ColumnsBuilder
        >>> def columns_of(rank):
        ...     builder = ColumnsBuilder()
        ...     builder.tensor("w", "float32", (4, 2), offset=(2 * rank, 0), size=(2, 2))
        ...     builder.tensor("b", "float32", (2,))
        ...     if rank == 0:
        ...         builder.object("step")
        ...     return builder.build()
        >>> held = merge([columns_of(rank) for rank in (0, 1)])
        >>> [(held.names[name], rank) for name, rank in zip(held.name.tolist(), held.rank.tolist())]
        [('w', 0), ('b', 0), ('step', 0), ('w', 1), ('b', 1)]

        They hold four distinct boxes. `holder` lists the rows that hold each, one box after the
        other; `start` says where a box begins there. The second box, `b`, is held by rows 1 and 4:
        rank 0 or rank 1 may write it, or both a part.

        >>> boxes = distinct_boxes(held)
        >>> boxes.row.tolist(), boxes.start.tolist(), boxes.holder.tolist()
        ([0, 1, 2, 3], [0, 1, 3, 4, 5], [0, 1, 4, 2, 3])
    """
    names: dict[str, int] = {}
    paths: list[NamePath | None] = []
    dtypes: dict[str, int] = {}
    tensor, dtype = [], []
    last: tuple[str, ...] | None = None
    lists = ListNumbers()
    for own in columns:
        if own.names != last:
            # Why not always: in most jobs all ranks have the same names in the same order.
            last = own.names
            own_names, own_paths = _numbered(own, lists)
            if not names:
                names, paths = (
                    dict(zip(own_names, range(len(own_names)), strict=True)),
                    [*own_paths],
                )
            for name, path in zip(own_names, own_paths, strict=True):
                if name not in names:
                    names[name] = len(names)
                    paths.append(path)
            code = np.fromiter(map(names.__getitem__, own_names), np.int64, len(own_names))
        tensor.append(code[own.name])
        vocabulary = [dtypes.setdefault(name, len(dtypes)) for name in own.dtypes]
        dtype.append(np.array([*vocabulary, -1], dtype=np.int8)[own.dtype])
    tensors, order = _by_appearance(np.concatenate(tensor), len(names))
    known = list(names)
    width = max(1, *(own.shape.shape[1] for own in columns))
    counts = [len(own) for own in columns]
    same = {
        key: np.concatenate([getattr(own, key) for own in columns])
        for key in ("kind", "ndim", "requires_grad", "splittable", "value", "settled")
    }
    held = Held(
        names=tuple(map(known.__getitem__, order)),
        paths=tuple(map(paths.__getitem__, order)),
        dtypes=tuple(dtypes),
        first=first_rows(tensors, len(order)),
        rank=np.repeat(np.arange(len(columns), dtype=np.int32), counts),
        row=np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
        place=np.concatenate([_digest_numbers(own) for own in columns]),
        name=tensors.astype(np.int32),
        dtype=np.concatenate(dtype),
        shape=np.concatenate([pad(own.shape, width, 1) for own in columns]),
        offset=np.concatenate([pad(own.offset, width, 0) for own in columns]),
        size=np.concatenate([pad(own.size, width, 1) for own in columns]),
        **same,
    )
    return _without_filled(held)


def _numbered(
    columns: Columns, lists: ListNumbers
) -> tuple[Sequence[str], Sequence[NamePath | None]]:
    """Returns names and paths with the places that entries of lists have on storage."""
    # Why this check first: a check of each name takes longer than most ranks' whole merge.
    if not any(map(has_identity, columns.names)):
        return columns.names, columns.paths
    pairs = [*map(lists.resolve, columns.names, columns.paths)]
    return [name for name, _ in pairs], [path for _, path in pairs]


def _digest_numbers(columns: Columns) -> Int32Array:
    """Returns the number of digests before each row."""
    return offsets_of((columns.value > 0).astype(np.int64))[:-1].astype(np.int32)


def _without_filled(held: Held) -> Held:
    """Returns the items without empty mappings that have values on another rank."""
    empty = (held.kind == Kind.OBJECT) & held.requires_grad
    if not empty.any():
        return held
    parents = {path[:stop] for path in held.paths if path for stop in range(1, len(path))}
    filled = np.fromiter((path in parents for path in held.paths), np.bool_, len(held.paths))
    filled[held.name[~empty]] = False  # a value of another kind, which is a conflict
    if not filled.any():
        return held
    rows = ~filled[held.name]
    number = (np.cumsum(~filled) - 1).astype(np.int32)[held.name[rows]]
    kept = np.flatnonzero(~filled).tolist()
    by_row = {
        one.name: getattr(held, one.name)[rows]
        for one in fields(held)
        if one.name not in ("names", "paths", "dtypes", "first", "name")
    }
    return replace(
        held,
        names=tuple(map(held.names.__getitem__, kept)),
        paths=tuple(map(held.paths.__getitem__, kept)),
        first=first_rows(number, len(kept)),
        name=number,
        **by_row,
    )


def _by_appearance(tensor: Int64Array, count: int) -> tuple[Int64Array, list[int]]:
    """Renumbers in order of first appearance; also returns the old numbers in the new order."""
    first = first_rows(tensor, count)
    used = np.flatnonzero(first >= 0)
    order = used[np.argsort(first[used])]
    new = np.full(count, -1, dtype=np.int64)
    new[order] = np.arange(len(order))
    return new[tensor], order.tolist()


def distinct_boxes(held: Held) -> DistinctBoxes:
    """Returns each distinct (FQN, box) with all rows that hold it.

    One box without elements is kept for each (FQN, offset), and none where a box with elements
    starts at the same offset: DCP's index of stored items identifies an item by FQN and offset.
    """
    rows = np.arange(len(held.rank))
    keys = [held.name, *held.offset.T, *held.size.T]
    empty = (held.size == 0).any(axis=1)
    if empty.any():
        rows = _without_shadowed(held, empty)
        keys = [key[rows] for key in keys]
    first, group = group_rows(keys)
    order = np.argsort(group, kind="stable")
    # A rank may hold several boxes without elements at one offset: count it once.
    fresh = np.ones(len(order), dtype=bool)
    ranks, groups = held.rank[rows[order]], group[order]
    fresh[1:] = (ranks[1:] != ranks[:-1]) | (groups[1:] != groups[:-1])
    counts = np.bincount(groups[fresh], minlength=len(first))
    again = rows[order[~fresh]]
    return DistinctBoxes(
        rows[first], offsets_of(counts), rows[order[fresh]], np.sort(again[~empty[again]])
    )


def _without_shadowed(held: Held, empty: BoolArray) -> Int64Array:
    """Returns the rows without the boxes of volume 0 that start where another box starts."""
    _, place = group_rows([held.name, *held.offset.T])
    taken = np.zeros(int(place.max()) + 1, dtype=bool)
    taken[place[~empty]] = True
    keep = ~empty
    rows = np.flatnonzero(empty & ~taken[place])
    leader = rows[first_rows(place[rows], len(taken))[place[rows]]]
    keep[rows[(held.size[rows] == held.size[leader]).all(axis=1)]] = True
    return np.flatnonzero(keep)


def check_held(held: Held, boxes: DistinctBoxes) -> None:
    """Checks that the ranks' items form one checkpoint.

    Raises:
        PlanConflictError: Ranks give different shapes, dtypes or kinds under one FQN, or boxes are
            out of bounds, overlap, or are listed twice by a rank. The message lists all faults.
        CoverageError: The only fault is that no rank holds some elements.
    """
    differs = differing(held)
    wrong = [_definitions_text(held, index) for index in np.flatnonzero(differs)]
    usable = ~differs[held.name[boxes.row]] & (held.kind[boxes.row] != Kind.OBJECT)
    rows = boxes.row[usable]
    places = np.flatnonzero(usable)
    shape = np.where((differs | (held.kind[held.first] == Kind.OBJECT))[:, None], 0, 1)
    shape = held.shape[held.first] * shape
    region = held.name[rows].astype(np.int64)
    found = check_coverage(region, held.offset[rows], held.size[rows], shape)

    def text(box: int) -> str:
        row = rows[box]
        return box_text(held.offset[row], held.size[row], int(held.ndim[row]))

    def ranks(box: int) -> str:
        place = places[box]
        holders = boxes.holder[boxes.start[place] : boxes.start[place + 1]]
        return name_ranks(held.rank[holders].tolist())

    def name(box: int) -> str:
        return repr(held.names[held.name[rows[box]]])

    wrong += [
        f"{name(box)}: {text(box)} on {ranks(box)} reaches out of the shape "
        f"{_shape_text(held, int(rows[box]))}"
        for box in found.outside
    ]
    wrong += [
        f"{name(a)}: {text(a)} on {ranks(a)} overlaps {text(b)} on {ranks(b)}"
        for a, b in found.overlaps
    ]
    wrong += _repeated_texts(held, boxes)
    gaps = [
        f"{held.names[index]!r}: no rank holds {missing} of {int(np.prod(shape[index]))} elements, "
        f"first {box_text(offset, size, int(held.ndim[held.first[index]]))}; the rest is on "
        + name_ranks(held.rank[held.name == index].tolist())
        for index, missing, offset, size in found.gaps
    ]
    if wrong or gaps:
        raise (PlanConflictError if wrong else CoverageError)(
            "the ranks' items do not make one checkpoint; expected one shape, dtype and kind for "
            "each FQN, every element held by one box, and each item listed once by a rank:\n"
            + _describe_wrong(wrong + gaps)
        )


def differing(held: Held) -> BoolArray:
    """Returns which FQNs do not have the same kind, dtype and shape in all their rows: bool[t]."""
    reference = held.first[held.name]
    same = held.kind == held.kind[reference]
    for column in (held.dtype, held.ndim, *held.shape.T):
        same &= column == column[reference]
    result = np.zeros(len(held.names), dtype=bool)
    result[held.name[~same]] = True
    return result


def _definitions_text(held: Held, index: np.int64) -> str:
    rows = np.flatnonzero(held.name == index)
    seen: dict[str, list[int]] = {}
    for row in rows.tolist():
        kind = Kind(held.kind[row])
        what = "an object" if kind == Kind.OBJECT else f"{_shape_text(held, row)} of "
        if kind != Kind.OBJECT:
            what += held.dtypes[held.dtype[row]]
        if kind == Kind.OPAQUE:
            what += ", of a tensor subclass or transformed"
        seen.setdefault(what, []).append(int(held.rank[row]))
    told = "; ".join(f"{what} on {name_ranks(ranks)}" for what, ranks in seen.items())
    return f"{held.names[index]!r}: {told}"


def _repeated_texts(held: Held, boxes: DistinctBoxes) -> list[str]:
    """Returns a sentence for each item that a rank lists a second time."""
    found: dict[tuple[int, str], list[int]] = {}
    for row in boxes.again.tolist():
        box = box_text(held.offset[row], held.size[row], int(held.ndim[row]))
        bare = "the object" if held.kind[row] == Kind.OBJECT else "the scalar"
        what = box if held.ndim[row] else bare
        found.setdefault((int(held.name[row]), what), []).append(int(held.rank[row]))
    return [
        f"{held.names[name]!r}: {what} is listed more than once by {name_ranks(ranks)}"
        for (name, what), ranks in found.items()
    ]


def _shape_text(held: Held, row: int) -> str:
    return str(tuple(held.shape[row, : held.ndim[row]].tolist()))


def _describe_wrong(wrong: list[str]) -> str:
    more = len(wrong) - _TOLD
    return "\n".join(f"  {line}" for line in wrong[:_TOLD]) + (
        f"\n  … and {more} more" if more > 0 else ""
    )


DIGEST_BYTES = 8


def group_values(held: Held, boxes: DistinctBoxes, differing: BoolArray) -> ValueGroups:
    """Returns which contents must be equal on which ranks.

    Args:
        held: Items of all ranks.
        boxes: Their distinct boxes.
        differing: bool[g], the boxes whose contents differ now.
    """
    valued = held.value[boxes.holder] > 0
    box = np.repeat(np.arange(len(boxes.row)), np.diff(boxes.start))[valued]
    holder = boxes.holder[valued]
    shared = np.bincount(box, minlength=len(boxes.row)) > 1
    keep = shared[box]
    box, holder = box[keep], holder[keep]
    starts = np.append(np.flatnonzero(np.diff(box, prepend=-1)), len(box)).tolist()
    classes: dict[tuple[int, bytes], int] = {}
    told: dict[int, str] = {}
    group = np.empty(len(box), dtype=np.int32)
    for start, stop in pairwise(starts):
        own = int(box[start])
        alone = own if differing[own] else -1
        code = classes.setdefault((alone, held.rank[holder[start:stop]].tobytes()), len(classes))
        group[start:stop] = code
        if alone >= 0:
            told[code] = held.names[held.name[boxes.row[own]]]
    rank = held.rank[holder]
    order = np.lexsort((box, group, rank))
    return ValueGroups(
        rank=rank[order],
        place=held.place[holder][order],
        group=group[order],
        told=tuple(sorted(told.items())),
    )


def groups_of(groups: ValueGroups, rank: int) -> tuple[Int32Array, Int32Array]:
    """Returns `(place, group)` of one rank, the arguments of `digests_of`."""
    start, stop = run_of(groups.rank, rank)
    return groups.place[start:stop], groups.group[start:stop]


def digests_of(place: Int32Array, group: Int32Array, contents: bytes) -> bytes:
    """Returns the digests that a rank reports: 8 bytes for each of its groups, in their order.

    Args:
        place: int32[k], index into the rank's digests.
        group: int32[k], the group of each digest, ascending.
        contents: `contents_of` the rank's columns.

    Returns:
        The digests. Empty, which matches no rank, if `contents` has fewer digests than `place`
        requires.
    """
    found = np.frombuffer(contents, dtype="<u8")
    if len(place) == 0 or int(place.max()) >= len(found):
        return b""
    values = found[place]
    starts = np.append(np.flatnonzero(np.diff(group, prepend=-1)), len(group)).tolist()
    return b"".join(
        blake2b(values[start:stop].tobytes(), digest_size=DIGEST_BYTES).digest()
        for start, stop in pairwise(starts)
    )


def find_disagreements(
    groups: ValueGroups, told: Sequence[bytes]
) -> tuple[tuple[str, tuple[int, ...]], ...] | None:
    """Returns which items differ between ranks, in the form of `GlobalPlan.disagreements`.

    Args:
        groups: The groups of the plan.
        told: What each rank reported (`digests_of`).

    Returns:
        None if the digests do not determine it: the plan must be made again, from the ranks'
        values.
    """
    rank, group = _members(groups)
    data = b"".join(told)
    if len(data) != len(rank) * DIGEST_BYTES or not _has_digests_of_groups(rank, told):
        return None
    if len(rank) == 0:
        return ()
    found = np.frombuffer(data, dtype=np.uint64)
    # Careful: of repeated indices, numpy keeps the last assignment, so go backwards.
    lead = np.zeros(int(group.max()) + 1, dtype=np.uint64)
    lead[group[::-1]] = found[::-1]
    differs = found != lead[group]
    names = dict(groups.told)
    wrong: dict[int, list[int]] = {}
    for member in np.flatnonzero(differs).tolist():
        wrong.setdefault(int(group[member]), []).append(int(rank[member]))
    if not wrong.keys() <= names.keys():
        return None
    return tuple((names[code], tuple(ranks)) for code, ranks in sorted(wrong.items()))


def _members(groups: ValueGroups) -> tuple[Int32Array, Int32Array]:
    """Returns `(rank, group)` of each digest that is sent, sorted by rank and then by group."""
    fresh = np.ones(len(groups.rank), dtype=np.bool_)
    fresh[1:] = (np.diff(groups.rank) != 0) | (np.diff(groups.group) != 0)
    return groups.rank[fresh], groups.group[fresh]


def _has_digests_of_groups(rank: Int32Array, told: Sequence[bytes]) -> bool:
    """Returns whether each rank reported as many digests as it has groups."""
    expected: Int64Array = np.bincount(rank, minlength=len(told)) * DIGEST_BYTES
    lengths = np.fromiter(map(len, told), np.int64, len(told))
    return np.array_equal(expected, lengths)


def contents_of(columns: Columns) -> bytes:
    """Returns the content digests that are not 0, 8 bytes each, in row order."""
    contents: bytes = columns.value[columns.value != 0].astype("<u8").tobytes()
    return contents


def without_contents(columns: Columns) -> Columns:
    """Returns columns whose `value` says only which items have a content digest."""
    return replace(columns, value=(columns.value != 0).astype(np.uint64))


def with_contents(columns: Columns, contents: bytes, rank: int) -> Columns:
    """Returns the columns that `without_contents` was called on.

    Args:
        columns: The result of `without_contents`.
        contents: The result of `contents_of` for the same columns.
        rank: The rank that holds them, for the message.

    Raises:
        InternalError: Columns and contents do not belong together.
    """
    rows = np.flatnonzero(columns.value)
    if len(contents) != 8 * len(rows):
        raise InternalError(
            f"expected {len(rows)} digests of content, but found {len(contents)} bytes. Please "
            f"report this",
            rank=rank,
        )
    value = np.zeros(len(columns), dtype=np.uint64)
    value[rows] = np.frombuffer(contents, dtype="<u8")
    return replace(columns, value=value)
