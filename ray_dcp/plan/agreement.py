"""Do ranks still hold the same content where they should? Told by a few digests, not by rows.

Plain tensors and objects that several ranks hold carry a digest of their content each. Those that
the same ranks hold make a group, and each rank tells one digest for all of a group. Items that
differed when the plan was made are a group each: the plan takes them whole from the lowest rank, so
that it stays right whether they differ or not, and it can be told which do.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from ray_dcp.plan.grouping import offsets_of, run_of
from ray_dcp.plan.merging import Boxes, Held
from ray_dcp.plan.values import BoolArray, Int32Array, Int64Array, ValueGroups

__all__ = ["digests_of", "find_disagreements", "group_values", "groups_of"]

DIGEST_BYTES = 8


def group_values(held: Held, boxes: Boxes, differing: BoolArray) -> ValueGroups:
    """Returns which contents have to be equal on which ranks.

    Args:
        held: Items of all ranks.
        boxes: Their distinct boxes.
        differing: Which boxes' contents differ now.
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
            told[code] = held.names[held.tensor[boxes.row[own]]]
    rank = held.rank[holder]
    order = np.lexsort((box, group, rank))
    before = offsets_of((held.value > 0).astype(np.int64))
    place = before[holder] - before[np.searchsorted(held.rank, rank)]
    return ValueGroups(
        rank=rank[order],
        place=place[order].astype(np.int32),
        group=group[order],
        told=tuple(sorted(told.items())),
    )


def groups_of(groups: ValueGroups, rank: int) -> tuple[Int32Array, Int32Array]:
    """Returns `(place, group)` of one rank, as `digests_of` takes them."""
    start, stop = run_of(groups.rank, rank)
    return groups.place[start:stop], groups.group[start:stop]


def digests_of(place: Int32Array, group: Int32Array, contents: bytes) -> bytes:
    """Returns what a rank tells of its content: 8 bytes for each of its groups, in their order.

    Args:
        place: int32[k], which of the rank's digests.
        group: int32[k], ascending.
        contents: `ray_dcp.plan.contents.contents_of` the rank.

    Returns:
        Nothing, which agrees with nobody, when there are fewer digests than that.
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
    """Returns which items differ between ranks, as `GlobalPlan.disagreements` tells them.

    Args:
        groups: Of the plan.
        told: What each rank told (`digests_of`).

    Returns:
        None when that is not to be told from the digests: the plan has to be made again, from the
        ranks' values.
    """
    rank, group = _members(groups)
    data = b"".join(told)
    if len(data) != len(rank) * DIGEST_BYTES or not _fits(rank, told):
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
    """Returns `(rank, group)` of each digest that is told, by rank and then by group."""
    fresh = np.ones(len(groups.rank), dtype=np.bool_)
    fresh[1:] = (np.diff(groups.rank) != 0) | (np.diff(groups.group) != 0)
    return groups.rank[fresh], groups.group[fresh]


def _fits(rank: Int32Array, told: Sequence[bytes]) -> bool:
    """Whether each rank told as many digests as it has groups."""
    expected: Int64Array = np.bincount(rank, minlength=len(told)) * DIGEST_BYTES
    lengths = np.fromiter(map(len, told), np.int64, len(told))
    return np.array_equal(expected, lengths)
