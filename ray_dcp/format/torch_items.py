"""Where the raw bytes lie inside one item that `torch.save` wrote, without unpickling it.

Walks the zip's local headers from the start of the item, so that no second read for the zip's
directory is needed. What `data.pkl` says is told by `tensor_pickle`.
Source: APPNOTE.TXT 4.3 (zip), 4.5.3 (zip64); caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from ray_dcp.errors import CheckpointError, DamagedCheckpointError
from ray_dcp.format.dtypes import ITEMSIZE
from ray_dcp.format.tensor_pickle import NotPlainTensor, StoredView, read_tensor_pickle

__all__ = ["NeedMoreBytes", "NotPlainTensor", "TensorItem", "parse_torch_save"]

_MAX_HEAD_BYTES = 1 << 20
_MAX_RECORDS = 64
_LOCAL = struct.Struct("<4s5H3I2H")
_DESCRIPTOR = b"PK\7\x08"
_FULL32 = 0xFFFFFFFF


class NeedMoreBytes(CheckpointError):
    """The head of an item is too short to tell where its tensor lies: read more of it.

    Args:
        message: As for `CheckpointError`.
        num_bytes: How many bytes from the start of the item to read before trying again.
        checkpoint_id: As for `CheckpointError`.
        step: As for `CheckpointError`.
        rank: As for `CheckpointError`.
        key: As for `CheckpointError`.
    """

    def __init__(
        self,
        message: str,
        *,
        num_bytes: int = 0,
        checkpoint_id: str | None = None,
        step: int | None = None,
        rank: int | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(message, checkpoint_id=checkpoint_id, step=step, rank=rank, key=key)
        self.num_bytes = num_bytes

    def _fields(self) -> dict[str, Any]:
        return {**super()._fields(), "num_bytes": self.num_bytes}


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A plain tensor in a stored item: a strided view of raw bytes."""

    dtype: str
    """Name of the torch dtype, without prefix."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    storage_offset: int
    """First element of the view in the raw bytes, in elements."""
    payload_offset: int
    """First raw byte, from the start of the item."""
    payload_bytes: int
    """Length of the raw bytes: of the whole storage, of which the tensor may be a part."""

    @property
    def is_contiguous(self) -> bool:
        """The tensor is its raw bytes, in C order, without gap."""
        if 0 in self.size:
            return True
        step = 1
        for length, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if length > 1 and stride != step:
                return False
            step *= length
        # A view that takes up all raw bytes starts at the first of them.
        return step * ITEMSIZE[self.dtype] == self.payload_bytes


def parse_torch_save(head: bytes | bytearray | memoryview, item_bytes: int) -> TensorItem:
    """Returns what and where the tensor of an item is.

    Reads items that ray_dcp wrote and those of stock torch since 1.6, whatever the sizes in the
    local headers say (torch defers them to data descriptors).

    Args:
        head: First bytes of the item; 1,024 are enough for nearly all.
        item_bytes: Length of the whole item.

    Raises:
        NeedMoreBytes: `head` ends too early; `num_bytes` tells how much to read.
        NotPlainTensor: It is something else that torch can store; let
            `torch.load(weights_only=True)` judge and read it.
        UnsafeCheckpointError: The pickle asks for something that no tensor needs; `key` names it.
        DamagedCheckpointError: These bytes are no item of `torch.save`, or contradict themselves.

    Complexity:
        About 30 us an item.
    """
    walk = _Walk(bytes(head[:_MAX_HEAD_BYTES]), item_bytes)
    view: StoredView | None = None
    for _ in range(_MAX_RECORDS):
        record = walk.next_record()
        name = record.name.partition("/")[2]
        if view is None:
            if name != "data.pkl":
                raise NotPlainTensor(
                    f"Expected the record data.pkl first in the item, found {record.name!r}"
                )
            view, end = read_tensor_pickle(walk.head, record.start, walk.need)
            if record.length is not None and end > record.start + record.length:
                raise _damaged(f"a pickle of {record.length} bytes", "a longer one")
            walk.finish_record(record, end)
        elif name == f"data/{view.key}":
            return _placed(view, record, item_bytes)
        else:
            end = walk.end_of(record)
            if name == "byteorder" and walk.head[record.start : end] != b"little":
                raise NotPlainTensor("The item holds big-endian data, which only torch.load swaps")
            walk.finish_record(record, end)
    raise DamagedCheckpointError(
        f"Expected the tensor's data in the first {_MAX_RECORDS} records of the item, found none; "
        "load an earlier step"
    )


@dataclass(frozen=True, slots=True)
class _Record:
    name: str
    start: int
    length: int | None
    """None when a data descriptor after the data tells."""


class _Walk:
    """Steps through the local headers of a zip's first bytes."""

    def __init__(self, head: bytes, item_bytes: int) -> None:
        self.head = head
        self.item_bytes = item_bytes
        self.pos = 0

    def need(self, end: int) -> None:
        if end <= len(self.head):
            return
        if end > self.item_bytes or end > _MAX_HEAD_BYTES:
            raise _damaged(f"an item of {self.item_bytes} bytes", f"records up to byte {end}")
        wanted = min(max(end, 2 * len(self.head), 1024), self.item_bytes, _MAX_HEAD_BYTES)
        raise NeedMoreBytes(
            f"The first {len(self.head)} bytes of the item do not reach its tensor; read {wanted}",
            num_bytes=wanted,
        )

    def next_record(self) -> _Record:
        start = self.pos + _LOCAL.size
        self.need(start)
        fields = _LOCAL.unpack_from(self.head, self.pos)
        magic, _, flags, method, _, _, _, stored, length, name_bytes, extra_bytes = fields
        if magic != b"PK\3\4":
            raise _damaged("a zip record of torch.save", repr(magic))
        self.need(start + name_bytes + extra_bytes)
        name = self.head[start : start + name_bytes].decode("utf-8", "replace")
        if method != 0 or flags & 0x2041:
            raise NotPlainTensor(f"The record {name!r} is compressed or encrypted")
        data = start + name_bytes + extra_bytes
        if flags & 8:
            return _Record(name, data, None)
        if _FULL32 in (stored, length):
            length = self._zip64_length(start + name_bytes, data)
        elif stored != length:
            raise _damaged(f"one length of the record {name!r}", f"{stored} and {length}")
        return _Record(name, data, length)

    def _zip64_length(self, pos: int, end: int) -> int:
        while pos + 4 <= end:
            field, size = struct.unpack_from("<2H", self.head, pos)
            if field == 1 and size >= 16 and pos + 20 <= end:
                length, stored = struct.unpack_from("<2Q", self.head, pos + 4)
                if length != stored:
                    break
                return int(length)
            pos += 4 + size
        raise _damaged("the length of a large record in its zip64 field", "none that fits")

    def end_of(self, record: _Record) -> int:
        """Returns the end of a small record's data."""
        if record.length is not None:
            end = record.start + record.length
            self.need(end)
            return end
        end = self.head.find(_DESCRIPTOR, record.start)
        while end >= 0:
            self.need(end + 24)
            lengths = self.head[end + 12 : end + 16], self.head[end + 16 : end + 24]
            if end - record.start in (int.from_bytes(length, "little") for length in lengths):
                return end
            end = self.head.find(_DESCRIPTOR, end + 1)
        self.need(len(self.head) + 1)
        raise _damaged("a data descriptor", "none")

    def finish_record(self, record: _Record, end: int) -> None:
        """Moves to the record after one whose data ends at `end`."""
        if record.length is not None:
            self.pos = record.start + record.length
            return
        self.need(end + 24)
        if self.head[end : end + 4] != _DESCRIPTOR:
            raise _damaged(f"a data descriptor after the record {record.name!r}", "none")
        # Why: the descriptor has two 4-byte lengths, or two of 8 bytes in a zip64 record.
        wide = self.head[end + 16 : end + 20] not in (b"PK\3\4", b"PK\1\2")
        self.pos = end + (24 if wide else 16)


def _damaged(expected: str, found: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"Expected {expected}, found {found}; the item is damaged, load an earlier step"
    )


def _placed(view: StoredView, record: _Record, item_bytes: int) -> TensorItem:
    if record.length is not None and record.length != view.storage_bytes:
        raise _damaged(
            f"{view.storage_bytes} bytes of tensor data, as its pickle says", f"{record.length}"
        )
    if record.start + view.storage_bytes > item_bytes:
        raise _damaged(
            f"{view.storage_bytes} bytes of tensor data at byte {record.start}",
            f"an item of {item_bytes} bytes",
        )
    return TensorItem(
        view.dtype, view.size, view.stride, view.offset, record.start, view.storage_bytes
    )
