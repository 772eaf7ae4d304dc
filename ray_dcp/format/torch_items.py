"""Items of `torch.save` without unpickling: their frames, and the place of a tensor's raw bytes.

**Writing** (`Frame`). An item is an uncompressed zip with the records `data.pkl`, `byteorder`,
`version` and, last, `data/0`, so that the footer is only the zip's directory:

    | header: data.pkl, byteorder, version, start of data/0 | payload | footer: directory |

The payload is the tensor's C-order bytes. Why not the records of `torch.save`: `.format_version`
would promise torch that the payload lies where torch's own layout puts it
(`calculate_storage_offsets`), and the record after the payload would make the footer longer. Both
are optional for every torch since 1.6.

**Reading** (`parse_torch_save`) walks the zip's local headers from the start of the item, so that
no second read for the zip's directory is needed. `_TensorMachine` finds the tensor that `data.pkl`
describes. Nothing is imported or called, and only tuples of numbers are built.

**Checking** (`check_directory`). `torch.load` trusts a zip's directory, so a few compressed bytes
could expand to any number of bytes. torch itself never compresses, so the end of an item must be
the directory of a zip that holds it uncompressed. `view.verify` checks the CRCs.

**Unpacking** (`unpacked_item`) undoes the stream transform that stock DCP can apply to an item:
zstd compression. `.metadata` names the transforms of each item. DCP's other transforms are plug-ins
of users, which only DCP's own reader calls.

Source: torch/serialization.py `_save`, `_load`; torch/_utils.py `_rebuild_tensor_v2`,
`_rebuild_tensor_v3`; caffe2/serialize/inline_container.cc; APPNOTE.TXT 4.3 (zip), 4.5.3 (zip64);
PEP 307 (pickle protocol 2);
torch/distributed/checkpoint/_extension.py `ZStandard`; RFC 8878 3.1 (zstd frames).
"""

from __future__ import annotations

import pickletools
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow

from ray_dcp.core.dtypes import DTYPE_OF_STORAGE, ITEMSIZE, STORAGE_OF_DTYPE, itemsize_of
from ray_dcp.core.values import Int64Array, group_rows
from ray_dcp.errors import (
    CheckpointError,
    DamagedCheckpointError,
    InvalidRequestError,
    UnsafeCheckpointError,
)
from ray_dcp.format import damaged
from ray_dcp.format.safe_pickle import Global, PickleMachine, pickled_int, pickled_tuple

pa: Any = pyarrow

_MAX_NDIM = 64


class NotPlainTensor(CheckpointError):
    """An item is no plain tensor in torch's layout; `torch.load(weights_only=True)` may read it.

    Such items are tensor subclasses, sparse, quantised, nested or conjugated tensors, and
    compressed zips. `key` is the pickle global that shows it, if there is one.
    """


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
    key: str = "0"
    """Name of the storage: its record is `data/<key>`."""

    @property
    def is_contiguous(self) -> bool:
        """Whether the raw bytes are exactly the tensor, in C order, without gaps."""
        if 0 in self.size:
            return True
        step = 1
        for length, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if length > 1 and stride != step:
                return False
            step *= length
        # A view that covers all raw bytes starts at the first of them.
        return step * ITEMSIZE[self.dtype] == self.payload_bytes


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str | None
    """None for an untyped storage."""
    key: str
    count: int
    """Number of elements; number of bytes for an untyped storage."""


class _NoHooks:
    """Stands for the empty OrderedDict of backward hooks."""


_ORDERED_DICT = "collections.OrderedDict"
_UNTYPED = "torch.storage.UntypedStorage"
_REBUILDS = frozenset(
    f"torch._utils._rebuild_{name}" for name in ("tensor", "tensor_v2", "tensor_v3", "parameter")
)
_OPCODES_OF_OBJECTS = frozenset(ord(opcode.code) for opcode in pickletools.opcodes) - frozenset(
    b"\x80KMJ)\x85\x86\x87N\x88\x89qrhj(tX\x8acQR."
)
"""Opcodes that torch never writes for a plain tensor."""


class _TensorMachine(PickleMachine):
    """Finds the tensor that a pickle describes; builds only tuples of numbers."""

    def _other_opcode(self, opcode: int) -> None:
        if opcode in _OPCODES_OF_OBJECTS:
            raise _not_plain()
        super()._other_opcode(opcode)

    def _item(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", Global(name=name), str(key), str(), int(count)) if count >= 0:
                dtype = DTYPE_OF_STORAGE.get(name.rpartition(".")[2])
                if dtype is None and name != _UNTYPED:
                    raise damaged("a storage class", name)
                return _Storage(dtype, key, count)
        raise NotPlainTensor("The item's pickle refers to something that is no storage")

    def _find(self, module: Any, name: Any) -> Global:
        dotted = f"{module}.{name}"
        _check_global(dotted)
        return Global(dotted)

    def _construct(self, target: Any, args: Any) -> Any:
        name = target.name if type(target) is Global else ""
        match name.removeprefix("torch._utils._rebuild_"), args:
            case "collections.OrderedDict", ():
                return _NoHooks()
            case "parameter", (TensorItem() as view, _, _NoHooks()):
                return view
            case "tensor", (_Storage() as storage, offset, size, stride):
                return _view(storage, storage.dtype, offset, size, stride)
            case "tensor_v2", (_Storage() as storage, offset, size, stride, _, _NoHooks()):
                return _view(storage, storage.dtype, offset, size, stride)
            case (
                "tensor_v3",
                (
                    _Storage() as storage,
                    offset,
                    size,
                    stride,
                    _,
                    _NoHooks(),
                    Global(name=dtype),
                ),
            ):
                return _view(storage, dtype.removeprefix("torch."), offset, size, stride)
        # For example, a seventh argument of _rebuild_tensor_v2 sets a conjugate or negative bit.
        raise NotPlainTensor("The item's pickle calls a rebuild in a way no plain tensor needs")

    def _with_state(self, target: Any, state: Any) -> Any:
        raise _not_plain()

    def _set_items(self, target: Any, items: list[Any]) -> None:
        raise _not_plain()


def _not_plain() -> NotPlainTensor:
    return NotPlainTensor("The item's pickle describes more than a tensor")


def _check_global(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    if name in _REBUILDS or name in (_ORDERED_DICT, _UNTYPED):
        return
    if module == "torch" and (attribute in DTYPE_OF_STORAGE or attribute in ITEMSIZE):
        return
    top = module.partition(".")[0]
    if top == "torch" and attribute.startswith("_rebuild"):
        raise NotPlainTensor("The item is a tensor of a kind that only torch.load knows", key=name)
    if top == "torch" or top == "__builtin__" or top in sys.stdlib_module_names or not top:
        raise UnsafeCheckpointError(
            "Expected an item that rebuilds a tensor, found a pickle that asks for something "
            "else; do not load this checkpoint unless you wrote it",
            key=name,
        )
    raise NotPlainTensor("The item is an object of a class that torch does not know", key=name)


def _view(storage: _Storage, dtype: str | None, offset: Any, size: Any, stride: Any) -> TensorItem:
    if dtype is None or dtype not in ITEMSIZE:
        raise NotPlainTensor(f"The item has the dtype {dtype}, which has no raw bytes of its own")
    storage_bytes = storage.count * (ITEMSIZE[storage.dtype] if storage.dtype else 1)
    if not (_is_length(offset) and _is_shape(size) and _is_shape(stride)):
        # Careful: these may be anything, including tuples too deep or too large to print.
        raise damaged("an offset, a size and a stride", "other values")
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=False))
    too_far = 0 not in size and (last + 1) * ITEMSIZE[dtype] > storage_bytes
    if len(size) != len(stride) or too_far or prod(size) >= 1 << 63:
        raise damaged(
            f"a tensor inside its storage of {storage_bytes} bytes",
            f"dtype {dtype}, offset {offset}, size {size}, stride {stride}",
        )
    return TensorItem(dtype, size, stride, offset, -1, storage_bytes, storage.key)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= _MAX_NDIM and all(map(_is_length, value))


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 63


_MAX_HEAD_BYTES = 1 << 20
_MAX_RECORDS = 64
_LOCAL = struct.Struct("<4s5H3I2H")
_DESCRIPTOR = b"PK\7\x08"
_FULL32 = 0xFFFFFFFF


class NeedMoreBytes(CheckpointError):
    """The head of an item is too short to find its tensor: more bytes must be read.

    Args:
        num_bytes: Length of the head to read for the next try, from the start of the item.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"the first {num_bytes} bytes are needed")
        self.num_bytes = num_bytes


def parse_torch_save(head: bytes | bytearray | memoryview, item_bytes: int) -> TensorItem:
    """Returns the tensor of an item: its dtype, shape, stride and place.

    The item may be written by ray_dcp or by stock torch since 1.6, whose local headers may lack
    sizes (torch defers them to data descriptors).

    Args:
        head: First bytes of the item; 1,024 are enough for nearly all.
        item_bytes: Length of the whole item.

    Raises:
        NeedMoreBytes: `head` ends too early; `num_bytes` is the length to read.
        NotPlainTensor: The item is something else that torch can store; let
            `torch.load(weights_only=True)` check and read it.
        UnsafeCheckpointError: The pickle names something that no tensor needs; `key` is that name.
        DamagedCheckpointError: The bytes are no item of `torch.save`, or contradict themselves.

    Complexity:
        About 30 us per item.
    """
    walk = _Walk(bytes(head[:_MAX_HEAD_BYTES]), item_bytes)
    view: TensorItem | None = None
    for _ in range(_MAX_RECORDS):
        record = walk.next_record()
        name = record.name.partition("/")[2]
        if view is not None and name == f"data/{view.key}":
            return _locate_item(view, record, item_bytes)
        end = walk.end_of(record)
        if view is None:
            if name != "data.pkl":
                raise NotPlainTensor(
                    f"Expected the record data.pkl first in the item, found {record.name!r}"
                )
            view = _described(walk.head[record.start : end])
        elif name == "byteorder" and walk.head[record.start : end] != b"little":
            raise NotPlainTensor("The item holds big-endian data, which only torch.load swaps")
        walk.finish_record(record, end)
    raise damaged(f"the tensor's data in the first {_MAX_RECORDS} records of the item", "none")


def _described(pickled: bytes) -> TensorItem:
    """Returns the tensor that a pickle describes, without the place of its bytes."""
    machine = _TensorMachine(pickled)
    view = machine.load()
    if machine.position != len(pickled):
        raise damaged(f"a pickle of {len(pickled)} bytes", "a shorter one")
    if not isinstance(view, TensorItem):
        raise NotPlainTensor("The item holds an object that is no tensor")
    return view


@dataclass(frozen=True, slots=True)
class _Record:
    name: str
    start: int
    length: int | None
    """Length of the data; None if only a data descriptor after the data contains it."""


class _Walk:
    """Steps through the local headers of a zip's first bytes."""

    def __init__(self, head: bytes, item_bytes: int) -> None:
        self.head = head
        self.item_bytes = item_bytes
        self.pos = 0

    def need(self, end: int) -> None:
        if end <= len(self.head):
            return
        if end > self.item_bytes:
            raise damaged(f"an item of {self.item_bytes} bytes", f"records up to byte {end}")
        if end > _MAX_HEAD_BYTES:
            raise NotPlainTensor("The item has more before its tensor than a plain one has")
        wanted = min(max(end, 2 * len(self.head), 1024), self.item_bytes, _MAX_HEAD_BYTES)
        raise NeedMoreBytes(wanted)

    def next_record(self) -> _Record:
        start = self.pos + _LOCAL.size
        self.need(start)
        fields = _LOCAL.unpack_from(self.head, self.pos)
        magic, _, flags, method, _, _, _, stored, length, name_bytes, extra_bytes = fields
        if magic != b"PK\3\4":
            raise damaged("a zip record of torch.save", repr(magic))
        self.need(start + name_bytes + extra_bytes)
        name = self.head[start : start + name_bytes].decode("utf-8", "replace")
        if method != 0 or flags & 0x2041:
            raise NotPlainTensor(f"The record {name!r} is compressed or encrypted")
        data = start + name_bytes + extra_bytes
        if flags & 8:
            return _Record(name, data, None)
        extra = self.head[start + name_bytes : data]
        length, stored, _ = _zip64_lengths(extra, (length, stored, 0))
        if stored != length:
            raise damaged(f"one length of the record {name!r}", f"{stored} and {length}")
        return _Record(name, data, length)

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
        raise damaged("a data descriptor", "none")

    def finish_record(self, record: _Record, end: int) -> None:
        """Moves to the record that follows one whose data ends at `end`."""
        if record.length is not None:
            self.pos = record.start + record.length
            return
        self.need(end + 24)
        if self.head[end : end + 4] != _DESCRIPTOR:
            raise damaged(f"a data descriptor after the record {record.name!r}", "none")
        # Why: the lengths in a descriptor have 4 bytes each, or 8 in a zip64 record.
        wide = self.head[end + 16 : end + 20] not in (b"PK\3\4", b"PK\1\2")
        self.pos = end + (24 if wide else 16)


def _locate_item(view: TensorItem, record: _Record, item_bytes: int) -> TensorItem:
    if record.length is not None and record.length != view.payload_bytes:
        raise damaged(
            f"{view.payload_bytes} bytes of tensor data, as its pickle says", f"{record.length}"
        )
    if record.start + view.payload_bytes > item_bytes:
        raise damaged(
            f"{view.payload_bytes} bytes of tensor data at byte {record.start}",
            f"an item of {item_bytes} bytes",
        )
    return replace(view, payload_offset=record.start)


FRAME_ALIGNMENT = 64
"""A header's length is a multiple of this, so that the payload of an item that is cut out of its
file is aligned too. `torch.save` uses the same alignment."""

_MAX_BYTES = 1 << 62
_FULL16 = 0xFFFF
_PADDING_ID = b"FB"  # the extra field by which torch pads
_SMALL_RECORDS = (("archive/byteorder", b"little"), ("archive/version", b"3\n"))
_DATA_NAME = b"archive/data/0"
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")


@dataclass(frozen=True, slots=True)
class Frame:
    """The bytes before and after the raw bytes of one tensor."""

    header: bytes
    """The bytes before the payload; their length is a multiple of 64."""
    footer: bytes


@lru_cache(maxsize=8192)
def torch_save_frame(dtype: str, size: tuple[int, ...]) -> Frame:
    """Returns the frame of one C-contiguous tensor.

    `torch.load` reads `header + payload + footer`, with `weights_only=True` and with `mmap=True`.
    The CRC of the payload is 0: torch never checks it, and block checksums protect the payload.

    Args:
        dtype: Name of a torch dtype, without prefix.
        size: Shape of the tensor.

    Raises:
        UnsupportedValueError: The dtype can't be stored as raw bytes.
        InvalidRequestError: A length is negative, or the tensor is beyond 2**62 bytes.

    Complexity:
        About 15 us, or 0.2 us from the cache of the last 8,192 shapes.

    Examples:
        >>> frame = torch_save_frame("float32", (2, 3))
        >>> len(frame.header), len(frame.footer)
        (384, 268)
    """
    numel, payload_bytes = _checked_volume(dtype, size)
    pickled = _pickle_of(dtype, size, numel)
    records = [(b"archive/data.pkl", pickled), *((n.encode(), d) for n, d in _SMALL_RECORDS)]
    header = bytearray()
    directory = bytearray()
    for name, data in records:
        crc = zlib.crc32(data)
        directory += _central_entry(name, crc, len(data), len(header), b"")
        header += _LOCAL.pack(b"PK\3\4", 0, 0, 0, 0, 0, crc, len(data), len(data), len(name), 0)
        header += name + data
    sizes = struct.pack("<2H2Q", 1, 16, payload_bytes, payload_bytes)
    zip64 = sizes if payload_bytes >= _FULL32 else b""
    directory += _central_entry(_DATA_NAME, 0, payload_bytes, len(header), zip64)
    header += _data_header(payload_bytes, len(header), zip64)
    footer = _end_of_directory(bytes(directory), len(records) + 1, len(header) + payload_bytes)
    return Frame(bytes(header), footer)


def frames_of(
    dtypes: Sequence[str],
    dtype: npt.NDArray[np.integer],
    ndim: npt.NDArray[np.integer],
    size: Int64Array,
) -> tuple[list[Frame], Int64Array]:
    """Returns the distinct frames of many tensors, and the index of each tensor's frame: int64[n].

    Args:
        dtypes: Vocabulary of dtype names.
        dtype: int[n], index into `dtypes`.
        ndim: int[n].
        size: int64[n, D], shapes padded with 1.

    Raises:
        UnsupportedValueError: A dtype can't be stored as raw bytes.
        InvalidRequestError: A length is negative, or a tensor is beyond 2**62 bytes.

    Complexity:
        O(n * D) in numpy, and one `torch_save_frame` for each distinct tensor.
    """
    first, frame = group_rows([dtype, ndim, *size.T])
    columns = (dtype[first].tolist(), ndim[first].tolist(), size[first].tolist())
    distinct = [
        torch_save_frame(dtypes[code], tuple(lengths[:count]))
        for code, count, lengths in zip(*columns, strict=True)
    ]
    return distinct, frame


def _checked_volume(dtype: str, size: tuple[int, ...]) -> tuple[int, int]:
    itemsize = itemsize_of(dtype)
    # Why not prod(size): a 0 among the sizes would hide that the strides overflow.
    span = prod(max(length, 1) for length in size) * itemsize
    if min(size, default=0) < 0 or span > _MAX_BYTES:
        raise InvalidRequestError(
            f"Expected lengths of 0 or more and at most 2**62 bytes in one tensor, found size "
            f"{size}"
        )
    numel = prod(size)
    return numel, numel * itemsize


def _central_entry(name: bytes, crc: int, length: int, offset: int, extra: bytes) -> bytes:
    length = _FULL32 if extra else length
    version = 45 if extra else 20
    about = (crc, length, length, len(name), len(extra))
    head = _CENTRAL.pack(b"PK\1\2", version, version, 0, 0, 0, 0, *about, 0, 0, 0, 0, offset)
    return head + name + extra


def _data_header(payload_bytes: int, start: int, zip64: bytes) -> bytes:
    unpadded = start + _LOCAL.size + len(_DATA_NAME) + len(zip64) + 4
    padding = -unpadded % FRAME_ALIGNMENT
    extra = zip64 + _PADDING_ID + struct.pack("<H", padding) + bytes(padding)
    length = _FULL32 if zip64 else payload_bytes
    version = 45 if zip64 else 20
    return (
        _LOCAL.pack(b"PK\3\4", version, 0, 0, 0, 0, 0, length, length, len(_DATA_NAME), len(extra))
        + _DATA_NAME
        + extra
    )


def _end_of_directory(directory: bytes, count: int, offset: int) -> bytes:
    if offset < _FULL32:
        end = _END.pack(b"PK\5\6", 0, 0, count, count, len(directory), offset, 0)
        return directory + end
    end64 = _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), offset)
    locator = _LOCATOR64.pack(b"PK\6\7", 0, offset + len(directory), 1)
    end = _END.pack(b"PK\5\6", 0, 0, count, count, len(directory), _FULL32, 0)
    return directory + end64 + locator + end


def _pickle_of(dtype: str, size: tuple[int, ...], numel: int) -> bytes:
    """Returns the `data.pkl` of a C-contiguous tensor."""
    storage = STORAGE_OF_DTYPE.get(dtype)
    version = "2" if storage else "3"
    storage_global = f"torch\n{storage}" if storage else "torch.storage\nUntypedStorage"
    head = (
        f"\x80\x02ctorch._utils\n_rebuild_tensor_v{version}\n(("
        f"X\x07\0\0\0storagec{storage_global}\nX\x01\0\0\x000X\x03\0\0\0cpu"
    )
    tail = "\x89ccollections\nOrderedDict\n)R" + ("" if storage else f"ctorch\n{dtype}\n") + "tR."
    # Careful: an untyped storage counts bytes, a typed one elements.
    counted = numel if storage else numel * ITEMSIZE[dtype]
    stride: list[int] = []
    step = 1
    for length in reversed(size):
        stride.insert(0, step)
        step *= max(length, 1)
    shape, strides = (pickled_tuple([*map(pickled_int, row)]) for row in (size, stride))
    opcodes = (pickled_int(counted), b"tQK\0", shape, strides)
    return b"".join((head.encode("latin-1"), *opcodes, tail.encode("latin-1")))


def stored_records(data: bytes | memoryview) -> list[tuple[str, memoryview]]:
    """Returns the name and the bytes of each record of a whole item.

    Args:
        data: The item.

    Raises:
        DamagedCheckpointError: The item does not end with the directory of a zip, or a record is
            compressed, encrypted or outside the item, or the records together are longer than it.
    """
    view, total, found = memoryview(data), 0, []
    for name, start, length in _entries(data, len(data)):
        total += length
        if start + _LOCAL.size > len(data) or total > len(data):
            raise damaged(f"records in {len(data)} bytes", "others")
        magic, *_, name_bytes, extra_bytes = _LOCAL.unpack_from(data, start)
        begin = start + _LOCAL.size + name_bytes + extra_bytes
        if magic != b"PK\3\4" or begin + length > len(data):
            raise damaged("a record where the directory says", "other bytes")
        found.append((name, view[begin : begin + length]))
    return found


def check_directory(data: bytes | memoryview, item_bytes: int) -> None:
    """Checks the directory at the end of an item.

    Args:
        data: The end of the item, at least from the directory on.
        item_bytes: Length of the whole item.

    Raises:
        DamagedCheckpointError: There is no directory, or it contradicts itself, or a record is
            compressed or encrypted.
    """
    for _ in _entries(data, item_bytes):
        pass


def _entries(data: bytes | memoryview, item_bytes: int) -> Iterator[tuple[str, int, int]]:
    """Yields name, offset of the local header, and length of each record."""
    start, stop, count = _directory(data, item_bytes - len(data))
    for _ in range(count):
        if start + _CENTRAL.size > stop:
            raise damaged(f"a directory of {count} records", "a shorter one")
        fields = _CENTRAL.unpack_from(data, start)
        magic, flags, method, stored, length = (fields[i] for i in (0, 3, 4, 8, 9))
        name_bytes, extra_bytes, comment_bytes, disk = fields[10:14]
        place = fields[16]
        if magic != b"PK\1\2" or disk != 0:
            raise damaged("an entry of the directory", "other bytes")
        if method != 0 or flags & 0x2041:
            raise damaged("records as torch.save writes them", "a compressed or encrypted one")
        extra = start + _CENTRAL.size + name_bytes
        name = bytes(data[extra - name_bytes : extra]).decode("utf-8", "replace")
        start = extra + extra_bytes + comment_bytes
        if start > stop:
            raise damaged(f"a directory of {count} records", "a shorter one")
        inside = bytes(data[extra : extra + extra_bytes])
        length, stored, place = _zip64_lengths(inside, (length, stored, place))
        if length != stored:
            raise damaged("one length of a record", f"{length} and {stored}")
        yield name, place, length
    if start != stop:
        raise damaged(f"a directory of {count} records", "a longer one")


def _directory(data: bytes | memoryview, before: int) -> tuple[int, int, int]:
    """Returns first byte, end and number of entries of a directory; `before` bytes precede `data`.

    Careful: readers look for the last end-of-directory mark, so it must be at the very end.
    """
    at = len(data) - _END.size
    if at < 0 or bytes(data[at : at + 4]) != b"PK\5\6":
        raise damaged("a zip that ends with its directory", "other bytes at its end")
    _, disk, first_disk, here, count, length, offset, comment = _END.unpack_from(data, at)
    if (disk, first_disk, comment) != (0, 0, 0) or here != count:
        raise damaged("a zip on one disk, without comment", "another one")
    stop, locator = at, at - _LOCATOR64.size
    has_end64 = locator >= 0 and bytes(data[locator : locator + 4]) == b"PK\6\7"
    if has_end64:
        stop = locator - _END64.size
        _, first_disk, place, disks = _LOCATOR64.unpack_from(data, locator)
        is_there = stop >= 0 and bytes(data[stop : stop + 4]) == b"PK\6\6"
        if not is_there or (first_disk, place, disks) != (0, before + stop, 1):
            raise damaged("the end of a large zip's directory", "other bytes")
        fields = _END64.unpack_from(data, stop)
        here, count, length, offset = fields[6:10]
        if fields[4:6] != (0, 0) or here != count or fields[1] != _END64.size - 12:
            raise damaged("a zip on one disk", "another one")
    elif _FULL32 in (length, offset) or count == _FULL16:
        raise damaged("the end of a large zip's directory", "none")
    start = stop - length
    if start < 0 or before + start != offset or count * _CENTRAL.size > length:
        raise damaged(f"a directory of {count} records in {length} bytes", "another item")
    return start, stop, count


def _zip64_lengths(extra: bytes, values: tuple[int, int, int]) -> tuple[int, int, int]:
    """Returns the lengths and the offset of a record, some of which may be in its zip64 field."""
    if _FULL32 not in values:
        return values
    at = 0
    while at + 4 <= len(extra):
        field, size = struct.unpack_from("<2H", extra, at)
        inside = extra[at + 4 : at + 4 + size]
        at += 4 + size
        if field == 1 and len(inside) >= 8 * values.count(_FULL32):
            wide = iter(struct.unpack_from(f"<{len(inside) // 8}Q", inside))
            length, stored, place = (next(wide) if v == _FULL32 else v for v in values)
            return length, stored, place
    raise damaged("the length of a large record in its zip64 field", "none")


MAX_OBJECT_BYTES = 4 << 30
"""Longest object that is decompressed. Why: a few bytes can expand to any number of bytes."""
ZSTD = "stream.zstd/1"
"""The one transform that is supported, by its name in `.metadata`."""
_ITEM_STARTS = (b"PK", b"\x80")
"""First bytes of a zip of `torch.save`, and of the bare pickles that it wrote before torch 1.6."""
_MAX_LAYERS = 4
_PIECE_BYTES = 1 << 20
_WAY_OUT = (
    "if it was saved with _extensions, load with "
    "storage_reader=FileSystemReader(path, _extension_registry=...)"
)


def unpacked_item(
    data: bytes | memoryview, transforms: Sequence[str], *, max_bytes: int = MAX_OBJECT_BYTES
) -> bytes | memoryview:
    """Returns an item with its transforms undone.

    Args:
        data: One whole item, as stored.
        transforms: Names of its transforms, from `ForeignMetadata.transforms`; empty for none.
        max_bytes: Longest item accepted.

    Raises:
        DamagedCheckpointError: A transform is unknown, or the item is damaged or longer than
            `max_bytes`.
    """
    unknown = [name for name in transforms if name != ZSTD]
    if unknown:
        raise DamagedCheckpointError(
            f"expected the stream transform {ZSTD}, found {unknown[0][:100]!r}, which only its "
            f"own plug-in undoes; {_WAY_OUT}, else load an earlier step"
        )
    if len(transforms) > _MAX_LAYERS:
        raise damaged(f"an item in at most {_MAX_LAYERS} layers of zstd", f"{len(transforms)}")
    for _ in transforms:
        data = _unpacked(data, max_bytes)
    return data


def check_plain(data: bytes | memoryview) -> None:
    """Checks that an item begins like the items that `torch.save` writes.

    Raises:
        DamagedCheckpointError: The item begins differently.
    """
    if not bytes(data[:2]).startswith(_ITEM_STARTS):
        raise DamagedCheckpointError(
            f"expected an item of torch.save, found one that begins with "
            f"{bytes(data[:4]).hex() or 'nothing'}; {_WAY_OUT}, else load an earlier step"
        )


def _unpacked(data: bytes | memoryview, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    room = memoryview(bytearray(_PIECE_BYTES))
    try:
        with pa.CompressedInputStream(pa.py_buffer(data), "zstd") as stream:
            # Why not `read`: pyarrow 26 leaks the memory of a piece that fails to decompress.
            while count := stream.readinto(room):
                pieces.append(bytes(room[:count]))
                num_bytes += count
                if num_bytes > max_bytes:
                    break
    except OSError as error:
        raise damaged("an item compressed with zstd", str(error)) from error
    if num_bytes > max_bytes:
        raise damaged(f"an item of at most {max_bytes} bytes", "one that unpacks to more")
    return b"".join(pieces)
