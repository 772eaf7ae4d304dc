"""Finds targets that share memory, and checks that a checkpoint has one value for each place.

Two names of one tensor (tied weights), or views of one memory, are valid targets if their stored
values agree. If these differ, the bytes of one target would be verified where those of the other
were just written, and an intact checkpoint would be reported as damaged. So the values are compared
before the first target changes: by the checksums of the chunk table if these are conclusive, else
by reading the values into separate memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ray_dcp.core.values import ChunkTable, Int64Array
from ray_dcp.planning.reads import Wanted
from ray_dcp.torch_adapter.replica_digests import bytes_digest
from ray_dcp.torch_adapter.tensors import extent, host_bytes, is_plain, parts_with_memory

_MOST_WORK = 1 << 20
"""Effort to decide whether two views share memory; beyond it (many odd strides) they count as
sharing."""


class Part(NamedTuple):
    """A strided tensor that holds memory of a target."""

    row: int
    """Row of the target."""
    tensor: torch.Tensor
    number: int = 0
    """Index of the tensor in `parts_with_memory` of the target."""


def sharing(
    tensors: Sequence[Any], direct: Sequence[bool], num_bytes: Int64Array
) -> list[list[Part]]:
    """Returns groups of targets that share memory with each other; usually none.

    Args:
        tensors: The target of each row; targets that are no tensors yet will get their own memory.
        direct: Whether each is plain and contiguous, and has the stored dtype.
        num_bytes: int64[n], stored bytes of each target.

    Returns:
        The members of each group of at least two rows, in the order of rows. Interleaved views,
        such as columns of one matrix, share nothing.

    Complexity:
        0.1 us for each direct target, a sort, and O(n^2) for n targets whose extents overlap.
    """
    others: list[Part] = []
    if all(direct):
        rows, targets = np.arange(len(tensors)), tensors
    else:
        rows = np.flatnonzero(direct)
        targets = [tensors[row] for row in rows.tolist()]
        for row in np.flatnonzero(~np.array(direct)).tolist():
            target = tensors[row]
            if isinstance(target, torch.Tensor):
                parts = [target] if is_plain(target) else parts_with_memory(target)
                others += [Part(row, one, n) for n, one in enumerate(parts) if _has_place(one)]
    address = np.array(
        [*map(torch.Tensor.data_ptr, targets), *(one.tensor.data_ptr() for one in others)],
        np.uint64,
    )
    if len(address) < 2:
        return []
    length = np.array([extent(one.tensor) for one in others], np.int64)
    end = address + np.concatenate([num_bytes[rows], length]).astype(np.uint64)
    order = np.argsort(address, kind="stable")
    reach = np.maximum.accumulate(end[order])
    begins = np.r_[True, address[order][1:] >= reach[:-1]]
    if begins.all():
        return []

    def part_of(index: int) -> Part:
        if index < len(rows):
            row = int(rows[index])
            return Part(row, tensors[row])
        return others[index - len(rows)]

    first = np.flatnonzero(begins)
    stop = [*first[1:].tolist(), len(order)]
    return [
        sorted(group, key=lambda one: one.row)
        for low, high in zip(first.tolist(), stop, strict=True)
        if high - low > 1
        for group in _groups([part_of(index) for index in order[low:high].tolist()])
    ]


def _has_place(tensor: torch.Tensor) -> bool:
    """Returns whether the place of a tensor in memory is known."""
    try:
        return tensor.data_ptr() != 0
    except (NotImplementedError, RuntimeError):
        return False


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for tensors of the same places in the same order."""
    flags = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), *flags)


def are_same(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether tensors of any class are the same places of memory, in all their parts."""
    return len({tuple(map(_geometry, parts_with_memory(tensor))) for tensor in tensors}) == 1


def _groups(parts: list[Part]) -> Iterator[list[Part]]:
    """Yields groups of parts that share memory; parts are in the order of their addresses."""
    same: dict[tuple[Any, ...], list[Part]] = {}
    for part in parts:
        same.setdefault(_geometry(part.tensor), []).append(part)
    alike = list(same.values())
    views = [np.asarray(_Memory(some[0].tensor)) for some in alike]
    ends = [some[0].tensor.data_ptr() + extent(some[0].tensor) for some in alike]
    group = list(range(len(alike)))
    for first, some in enumerate(alike):
        for second in range(first + 1, len(alike)):
            other = alike[second][0].tensor
            if other.data_ptr() >= ends[first]:
                break
            if group[first] == group[second] or some[0].tensor.device != other.device:
                continue
            if _is_shared(views[first], views[second]):
                old, new = group[second], group[first]
                group = [new if number == old else number for number in group]
    for number in dict.fromkeys(group):
        members = [
            part for some, own in zip(alike, group, strict=True) if own == number for part in some
        ]
        if len({one.row for one in members}) > 1:
            yield members


class _Memory:
    """The memory of a tensor as numpy's array interface; numpy reads none of its bytes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        shape: tuple[int, ...] = (tensor.nbytes,)
        strides = None
        if not tensor.is_contiguous():
            shape = (*tensor.shape, tensor.itemsize)
            strides = (*(step * tensor.itemsize for step in tensor.stride()), 1)
        place = (tensor.data_ptr(), True)
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "data": place, "shape": shape, "strides": strides
        }  # fmt: skip


def _is_shared(one: np.ndarray, other: np.ndarray) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def stored_alike(table: ChunkTable, wanted: Wanted, one: int, other: int) -> bool | None:
    """Returns whether two wanted boxes have the same stored values.

    Args:
        table: The stored chunks, with their checksums.
        wanted: The wanted boxes.
        one: Row of one box.
        other: Row of the other box.

    Returns:
        None if the table is inconclusive: there are no checksums, or the chunks are cut
            differently.
    """
    first, second = (_stored(table, wanted, row) for row in (one, other))
    if first.keys() != second.keys() or not all(key.block_bytes for key in first):
        return None
    if first == second:
        return True
    return False if all(key.is_inside for key in first) else None


class _Chunk(NamedTuple):
    """The key by which chunks are paired to compare their checksums."""

    place: tuple[int, ...]
    """Place of the chunk in the box."""
    size: tuple[int, ...]
    dtype: int
    num_bytes: int
    block_bytes: int
    is_inside: bool
    """Whether the chunk lies wholly in the box."""


def _stored(table: ChunkTable, wanted: Wanted, row: int) -> dict[_Chunk, bytes]:
    """Returns the checksums of each chunk that meets a box."""
    number = wanted.tensor[row]
    chunks = np.flatnonzero(table.tensor == number)
    width = table.offset.shape[1]
    start, size = np.zeros(width, np.int64), np.ones(width, np.int64)
    used = min(width, wanted.offset.shape[1])
    start[:used], size[:used] = wanted.offset[row, :used], wanted.size[row, :used]
    low, length = table.offset[chunks] - start, table.size[chunks]
    meets = ((low < size) & (low + length > 0)).all(axis=1)
    found = {}
    for chunk, place, shape in zip(
        chunks[meets].tolist(), low[meets].tolist(), length[meets].tolist(), strict=True
    ):
        block, count = int(table.block_bytes[chunk]), int(table.payload_bytes[chunk])
        inside = all(p >= 0 and p + n <= s for p, n, s in zip(place, shape, size, strict=True))
        dtype = int(table.dtype[number])
        key = _Chunk(tuple(place), tuple(shape), dtype, count, block, inside)
        found[key] = table.checks[slice(*table.check_start[chunk : chunk + 2])].tobytes()
    return found


class Trial:
    """A copy of the memory that targets of one group share, filled as a load would fill it.

    Args:
        parts: Members of the group.

    Attributes:
        is_same: Whether all members are the same places.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        tensors = [one.tensor for one in parts]
        self.is_same = len(set(map(_geometry, tensors))) == 1
        self._digest: Any = None
        if self.is_same:
            return
        self._low = min(tensor.data_ptr() for tensor in tensors)
        num_bytes = max(tensor.data_ptr() + extent(tensor) for tensor in tensors) - self._low
        self._memory = np.zeros(num_bytes, np.uint8)
        self._owner = np.zeros(num_bytes, np.min_scalar_type(len(parts)))

    def put(self, member: int, value: torch.Tensor) -> int | None:
        """Writes the value of a member of the group.

        Args:
            member: Index of the member.
            value: The stored value, in the member's shape.

        Returns:
            A member with a different value at a common place; None if there is none.
        """
        target = self._parts[member].tensor
        value = value.to(target.dtype)
        if target.is_conj():
            value = value.conj()
        if target.is_neg():
            value = -value
        data = host_bytes(value)
        if self.is_same:
            return self._compared(bytes_digest(data))
        mine, owner = self._view(self._memory, target), self._view(self._owner, target)
        new = np.frombuffer(data, np.uint8).reshape(mine.shape)
        bad = owner[(owner != 0) & (mine != new)]
        mine[...], owner[...] = new, member + 1
        return int(bad[0]) - 1 if len(bad) else None

    def put_whole(self, chunks: Sequence[torch.Tensor]) -> int | None:
        """Does as `put` for the next member, whose value is given as chunks of any class."""
        parts = [part for chunk in chunks for part in parts_with_memory(chunk)]
        digests = [
            (part.dtype, tuple(part.shape), bytes_digest(host_bytes(part))) for part in parts
        ]
        return self._compared(digests)

    def _compared(self, digest: Any) -> int | None:
        differs = self._digest not in (None, digest)
        self._digest = digest
        return 0 if differs else None

    def _view(self, memory: np.ndarray, target: torch.Tensor) -> np.ndarray:
        width = memory.itemsize
        return np.ndarray(
            (*target.shape, target.itemsize),
            memory.dtype,
            buffer=memory,
            offset=(target.data_ptr() - self._low) * width,
            strides=(*(step * target.itemsize * width for step in target.stride()), width),
        )
