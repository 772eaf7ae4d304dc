"""The `.metadata` of stock DCP, written and read without torch and without running anything.

**Writing** (`encode_metadata`). From a chunk table a pickle of
`torch.distributed.checkpoint.metadata.Metadata`, equal field by field to what torch itself would
build, with texts where torch has platform-bound paths. `PickleWriter` writes it opcode by opcode,
in protocol 4, which every Python since 3.4 reads: so classes can be named without being imported.

**Reading** (`decode_metadata`). The pickle as a chunk table. `safe_pickle` reads it; here are the
names that a `.metadata` may refer to, and the plain values that stand for them. Nothing is imported
or called: allowing a name only means that the data around it is read. Where the raw bytes lie
inside an item is known only from the item's own header (`torch_items`).

Source: torch/distributed/checkpoint/metadata.py, filesystem.py `_StorageInfo`, planner.py,
default_planner.py `create_default_global_save_plan`; PEP 307, PEP 3154; Lib/pickletools.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_dcp.core.collector import collector_paused
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.grouping import group_rows
from ray_dcp.core.values import BoolArray, ChunkTable, Int64Array, Kind, NamePath
from ray_dcp.errors import CheckpointError, InternalError, InvalidRequestError
from ray_dcp.format.names import check_attempt, resolved_key
from ray_dcp.format.safe_pickle import Builder, Global, Instance, damaged, read_pickle
from ray_dcp.format.table_check import check_table, volumes

Opcodes = npt.NDArray[np.uint8]
"""uint8[n, w]: w bytes of opcodes for each of n rows."""

MEMOIZE_AND_POP = b"\x940"
"""After the opcodes of a value: the reader keeps it in its memo and forgets it on its stack."""
_INT4 = struct.Struct("<Bi")
_SMALL = 1 << 31


class PickleWriter:
    """Collects the opcodes of one pickle, and what its reader will have in its memo.

    Values that come often are *remembered* first: the reader makes them once and a row refers to
    them by five bytes. The reader then shares one object, so only for values that can't change.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_remembered = 0
        self._texts: dict[str, int] = {}
        self._names: dict[tuple[str, str], int] = {}
        self.add = self._parts.append
        """Appends opcodes."""

    def remember(self, opcodes: bytes, count: int = 1) -> int:
        """Returns the memo index of a value, or of the first of several, after writing it.

        Args:
            opcodes: Push one value; for several, with `MEMOIZE_AND_POP` between them.
            count: How many values.
        """
        index = self._num_remembered
        self._num_remembered += count
        self._parts.append(opcodes + MEMOIZE_AND_POP)
        return index

    def text_indices(self, values: Sequence[str]) -> list[int]:
        """Returns the memo index of each text; every distinct one is remembered once."""
        texts = self._texts
        new = [value for value in dict.fromkeys(values) if value not in texts]
        if new:
            first = self.remember(MEMOIZE_AND_POP.join(map(pickled_text, new)), count=len(new))
            texts.update(zip(new, range(first, first + len(new)), strict=True))
        return [texts[value] for value in values]

    def text(self, value: str) -> bytes:
        """Returns the opcodes that push a text, remembered once."""
        return _reference(self.text_indices((value,))[0])

    def name(self, module: str, qualname: str) -> bytes:
        """Returns the opcodes that push a class or function, remembered once."""
        index = self._names.get((module, qualname))
        if index is None:
            opcodes = self.text(module) + self.text(qualname) + b"\x93"
            index = self._names[module, qualname] = self.remember(opcodes)
        return _reference(index)

    def references(self, indices: Sequence[int] | Int64Array) -> Opcodes:
        """Returns the opcodes that push a remembered value each.

        Args:
            indices: int[n], memo indices.

        Returns:
            uint8[n, 5].
        """
        return _column(b"j", np.asarray(indices, dtype=np.int64).astype("<u4"))

    def finish(self) -> bytes:
        """Returns the pickle of the value on the stack."""
        num_bytes = sum(map(len, self._parts)) + 1
        return b"".join((b"\x80\x04\x95", struct.pack("<Q", num_bytes), *self._parts, b"."))


def rows(num_rows: int, *pieces: bytes | Opcodes) -> bytes:
    """Returns the opcodes of many rows that are made alike.

    Args:
        num_rows: n.
        pieces: What a row consists of: bytes for all rows, or uint8[n, w].

    Returns:
        n * sum(w) bytes.
    """
    return side_by_side(num_rows, *pieces).tobytes() if num_rows else b""


def side_by_side(num_rows: int, *pieces: bytes | Opcodes) -> Opcodes:
    """Returns the opcodes of `rows` as an array: uint8[n, sum(w)]."""
    parts = [
        np.broadcast_to(np.frombuffer(piece, dtype=np.uint8), (num_rows, len(piece)))
        if isinstance(piece, bytes)
        else piece
        for piece in pieces
    ]
    return np.concatenate(parts, axis=1)


def uneven_rows(
    counts: Int64Array, heads: Opcodes, parts: Opcodes, tails: Opcodes
) -> tuple[bytes, Int64Array]:
    """Returns the opcodes of rows of different length: a head, some parts and a tail each.

    Args:
        counts: int64[n], how many of the parts belong to each row.
        heads: uint8[n, h].
        parts: uint8[sum(counts), p], those of the first row first.
        tails: uint8[n, t].

    Returns:
        The opcodes, and where each row starts in them and the last one ends: int64[n + 1].
    """
    head, part, tail = heads.shape[1], parts.shape[1], tails.shape[1]
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(head + counts * part + tail, out=starts[1:])
    if len(counts) and int(counts.min()) == int(counts.max()):
        middle = parts.reshape(len(counts), -1)
        return np.concatenate([heads, middle, tails], axis=1).tobytes(), starts
    result = np.empty(int(starts[-1]), dtype=np.uint8)
    first = np.cumsum(counts) - counts
    place = starts[:-1] + head - first * part
    _put(result, starts[:-1], heads)
    _put(result, np.repeat(place, counts) + np.arange(len(parts)) * part, parts)
    _put(result, starts[1:] - tail, tails)
    return result.tobytes(), starts


def _put(into: npt.NDArray[np.uint8], starts: Int64Array, pieces: Opcodes) -> None:
    for column in range(pieces.shape[1]):
        into[starts + column] = pieces[:, column]


def pickled_ints(values: Int64Array) -> Opcodes:
    """Returns the opcodes that push a number each.

    Args:
        values: int64[n].

    Returns:
        uint8[n, 5], or uint8[n, 10] when one of them needs more than 32 bits.
    """
    if not len(values) or (int(values.min()) >= -_SMALL and int(values.max()) < _SMALL):
        return _column(b"J", values.astype("<i4"))
    return _column(b"\x8a\x08", values.astype("<i8"))


def pickled_int(value: int) -> bytes:
    """Returns the opcodes that push a number.

    Raises:
        InvalidRequestError: It does not fit into 64 bits.
    """
    if 0 <= value < 0x100:
        return b"K" + value.to_bytes(1, "little")
    if -_SMALL <= value < _SMALL:
        return _INT4.pack(0x4A, value)
    if not -(1 << 63) <= value < 1 << 63:
        raise InvalidRequestError("Expected a number of 64 bits, found a longer one")
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def pickled_tuple(values: Sequence[bytes]) -> bytes:
    """Returns the opcodes that push a tuple, from those of its values."""
    body = b"".join(values)
    if len(values) > 3:
        return b"(" + body + b"t"
    return body + (b")", b"\x85", b"\x86", b"\x87")[len(values)]


def _reference(index: int) -> bytes:
    return b"j" + index.to_bytes(4, "little")


def _column(opcode: bytes, values: npt.NDArray[np.generic]) -> Opcodes:
    numbers = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), values.itemsize)
    head = np.frombuffer(opcode, dtype=np.uint8)
    return np.concatenate([np.broadcast_to(head, (len(values), len(head))), numbers], axis=1)


_SHORT_TEXT = [b"\x8c" + bytes((length,)) for length in range(256)]


def pickled_text(value: str) -> bytes:
    """Returns the opcodes that push a text."""
    # Why surrogatepass: what Python's own pickle does with text that is no valid Unicode.
    data = value.encode("utf-8", "surrogatepass")
    if len(data) < 256:
        return _SHORT_TEXT[len(data)] + data
    return b"X" + struct.pack("<I", len(data)) + data


ATTEMPT_ATTRIBUTE = "ray_dcp_attempt"
"""Extra attribute of the pickled `Metadata`: which attempt it projects. Stock DCP ignores it."""
DCP_VERSION = "1.0.0"
"""What torch writes as `Metadata.version`; no reader looks at it."""

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_NEW = b")\x81"
"""No arguments, then `cls.__new__(cls)`."""
_STATE = b"}("
"""An empty dict and a mark, before its items."""
_TUPLES = np.frombuffer(b")\x85\x86\x87", dtype=np.uint8)[:, None]
"""What makes a tuple of 0 to 3 values, one row each."""
_BUILD = b"ub"
"""Sets the items, then makes the dict the object's state."""


def encode_metadata(table: ChunkTable, *, checkpoint_id: str, attempt: str) -> bytes:
    """Returns the bytes of `.metadata`.

    Equal arguments give equal bytes. A tensor's chunks come in the order of the table.

    Args:
        table: A finished table: every chunk has its place.
        checkpoint_id: Path or URL, as the user gave it.
        attempt: The attempt that is committed by these bytes' digest in the manifest.

    Raises:
        InternalError: A chunk has no place yet.

    Complexity:
        O(chunks), about 1 us each.
    """
    if table.num_chunks and int(table.item_offset.min()) < 0:
        raise InternalError("A .metadata can be made once all chunks have a place; one has none")
    writer = PickleWriter()
    # Careful: the calls below write what they remember, and must do so before the object is begun.
    shared = _Shared(writer, table)
    fields = {
        "state_dict_metadata": _tensors(writer, table, shared),
        "planner_data": _planner_data(writer, table, shared),
        "storage_data": _places(writer, table, shared),
        "storage_meta": _storage_meta(writer, checkpoint_id, attempt),
        "version": writer.text(DCP_VERSION),
        ATTEMPT_ATTRIBUTE: writer.text(attempt),
    }
    names = [writer.text(field) for field in fields]
    writer.add(writer.name(_METADATA, "Metadata") + _NEW + _STATE)
    for name, opcodes in zip(names, fields.values(), strict=True):
        writer.add(name)
        writer.add(opcodes)
    writer.add(_BUILD)
    return writer.finish()


class _Shared:
    """Opcodes of what several fields refer to: names and boxes."""

    def __init__(self, writer: PickleWriter, table: ChunkTable) -> None:
        ndim = table.ndim[table.tensor]
        boxes = _sizes(
            writer,
            np.concatenate([table.shape, table.offset, table.size]),
            np.concatenate([table.ndim, ndim, ndim]).astype(np.int64),
        )
        t, c = table.num_tensors, table.num_chunks
        self.shape = boxes[:t]
        """uint8[t, 5]"""
        self.offset = boxes[t : t + c]
        """uint8[c, 5]"""
        self.size = boxes[t + c :]
        """uint8[c, 5]"""
        self.name = writer.references(writer.text_indices(table.names))
        """uint8[t, 5]"""


def _sizes(writer: PickleWriter, boxes: Int64Array, ndim: Int64Array) -> Opcodes:
    """Returns opcodes that push a `torch.Size` for each row; equal ones are one object."""
    first, row_of = group_rows([ndim, *boxes.T])
    ndim, boxes = ndim[first], boxes[first]
    head = writer.name("torch", "Size")
    index = np.zeros(len(first), dtype=np.int64)
    for length in np.unique(ndim).tolist():
        mine = np.flatnonzero(ndim == length)
        numbers = [pickled_ints(boxes[mine, column]) for column in range(length)]
        tuple_of = (b"(", b"t") if length > 3 else (b"", (b")", b"\x85", b"\x86", b"\x87")[length])
        end = tuple_of[1] + b"\x85R" + MEMOIZE_AND_POP
        opcodes = rows(len(mine), head + tuple_of[0], *numbers, end)
        start = writer.remember(opcodes[: -len(MEMOIZE_AND_POP)], count=len(mine))
        index[mine] = start + np.arange(len(mine))
    return writer.references(index[row_of])


def _object(writer: PickleWriter, module: str, name: str, first: str) -> bytes:
    """Returns the opcodes that push a new object and the name of its first attribute."""
    return writer.name(module, name) + _NEW + _STATE + writer.text(first)


def _tensors(writer: PickleWriter, table: ChunkTable, shared: _Shared) -> bytes:
    tensor = _object(writer, _METADATA, "TensorStorageMetadata", "properties")
    tensor += writer.name(_METADATA, "TensorProperties") + _NEW
    is_object = table.kind == Kind.OBJECT
    plain = np.flatnonzero(~is_object)
    heads = side_by_side(
        len(plain),
        shared.name[plain],
        tensor,
        writer.references(_property_states(writer, table))[plain],
        b"b" + writer.text("size"),
        shared.shape[plain],
        writer.text("chunks") + b"](",
    )
    order, starts = _by_tensor(table)
    order = order[~is_object[table.tensor[order]]]
    chunks = side_by_side(
        len(order),
        _object(writer, _METADATA, "ChunkStorageMetadata", "offsets"),
        shared.offset[order],
        writer.text("sizes"),
        shared.size[order],
        _BUILD,
    )
    tails = side_by_side(len(plain), b"e" + _BUILD)
    opcodes, ends = uneven_rows(np.diff(starts)[plain], heads, chunks, tails)
    no_tensor = writer.name(_METADATA, "BytesStorageMetadata") + _NEW
    pieces = [_STATE]
    done = 0
    for row_before, row in enumerate(np.flatnonzero(is_object).tolist()):
        end = int(ends[row - row_before])
        pieces += (opcodes[done:end], shared.name[row].tobytes(), no_tensor)
        done = end
    return b"".join((*pieces, opcodes[done:], b"u"))


def _by_tensor(table: ChunkTable) -> tuple[Int64Array, Int64Array]:
    """Returns int64[c], the chunks sorted by tensor, and int64[t + 1], where each one's start."""
    counts = np.bincount(table.tensor, minlength=table.num_tensors)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return np.argsort(table.tensor, kind="stable"), starts.astype(np.int64)


def _property_states(writer: PickleWriter, table: ChunkTable) -> list[int]:
    """Returns memo indices of what `TensorProperties.__setstate__` takes, for each tensor."""
    layout = writer.name("torch.serialization", "_get_layout") + writer.text("torch.strided")
    contiguous = writer.name(_METADATA, "_MEM_FORMAT_ENCODING") + b"K\0\x85R"
    pairs = list(zip(table.dtype.tolist(), table.requires_grad.tolist(), strict=True))
    known = {}
    # Why not a set: equal tables must give equal bytes.
    for dtype, requires_grad in dict.fromkeys(pairs):
        parts = [
            writer.name("torch", table.dtypes[dtype]) if dtype >= 0 else b"N",
            layout + b"\x85R",
            b"\x88" if requires_grad else b"\x89",
            contiguous,
            b"\x89",
        ]
        known[dtype, requires_grad] = writer.remember(pickled_tuple(parts))
    return [known[pair] for pair in pairs]


def _planner_data(writer: PickleWriter, table: ChunkTable, shared: _Shared) -> bytes:
    if table.num_tensors and all(path is None for path in table.paths):
        return b"N"
    paths = [
        (name,) if path is None else path
        for name, path in zip(table.names, table.paths, strict=True)
    ]
    counts = np.fromiter(map(len, paths), dtype=np.int64, count=len(paths))
    parts = _part_indices(writer, list(chain.from_iterable(paths)))
    heads, tails = shared.name, _TUPLES[np.minimum(counts, 3)]
    if int(counts.max(initial=0)) > 3:
        heads = side_by_side(len(paths), heads, b"(")
        tails = side_by_side(len(paths), b"t")
    opcodes, _ = uneven_rows(counts, heads, writer.references(parts), tails)
    return _STATE + opcodes + b"u"


def _part_indices(writer: PickleWriter, parts: list[str | int]) -> list[int]:
    """Returns memo indices of the components of paths."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return writer.text_indices(texts)
    numbers = {
        part: writer.remember(pickled_int(int(part)))
        for part in dict.fromkeys(part for part in parts if not isinstance(part, str))
    }
    text = iter(writer.text_indices(texts))
    return [next(text) if isinstance(part, str) else numbers[part] for part in parts]


def _places(writer: PickleWriter, table: ChunkTable, shared: _Shared) -> bytes:
    order, starts = _by_tensor(table)
    index = np.empty(table.num_chunks, dtype=np.int64)
    index[order] = np.arange(table.num_chunks) - starts[table.tensor[order]]
    is_object = table.kind[table.tensor] == Kind.OBJECT
    offset = writer.text("offset")
    hints = (pickled_ints(index), offset, shared.offset)
    return b"".join(
        (
            _STATE,
            _place_rows(writer, table, shared, ~is_object, hints),
            _place_rows(writer, table, shared, is_object, (b"N",)),
            b"u",
        )
    )


def _place_rows(
    writer: PickleWriter,
    table: ChunkTable,
    shared: _Shared,
    which: BoolArray,
    hints: tuple[bytes | Opcodes, ...],
) -> bytes:
    """Returns `MetadataIndex` and `_StorageInfo` of some chunks."""
    index = _object(writer, _METADATA, "MetadataIndex", "fqn")
    info = _BUILD + _object(writer, _FILESYSTEM, "_StorageInfo", "relative_path")
    files = writer.references(writer.text_indices(table.files))
    offset, length = writer.text("offset"), writer.text("length")
    return rows(
        int(which.sum()),
        index,
        shared.name[table.tensor[which]],
        writer.text("index"),
        *(hint if isinstance(hint, bytes) else hint[which] for hint in hints),
        info,
        files[table.file[which]],
        offset,
        pickled_ints(table.item_offset[which]),
        length,
        pickled_ints(table.item_bytes[which]),
        _BUILD,
    )


def _storage_meta(writer: PickleWriter, checkpoint_id: str, attempt: str) -> bytes:
    return b"".join(
        (
            _object(writer, _METADATA, "StorageMeta", "checkpoint_id"),
            writer.text(checkpoint_id),
            writer.text("save_id"),
            writer.text(attempt),
            writer.text("load_id"),
            b"N",
            writer.text("modules"),
            b"]" + _BUILD,
        )
    )


_MAX_PATH_PARTS = 1024
_MAX_PATH_CHARS = 1 << 16


def allowed_global(name: str) -> Global | None:
    """Returns what a dotted name stands for, None when no `.metadata` needs it.

    Args:
        name: Module and qualified name.

    Example:
        >>> allowed_global("torch.bfloat16").name
        'torch.bfloat16'
        >>> allowed_global("os.system") is None
        True
    """
    if name in _BUILDERS:
        return Global(name, _BUILDERS[name])
    return Global(name, None) if name in _OPAQUE else None


def _one(args: tuple[Any, ...]) -> Any:
    if len(args) != 1:
        raise damaged("one argument", str(len(args)))
    return args[0]


def _torch_size(args: tuple[Any, ...]) -> Any:
    value = _one(args) if args else ()
    if not isinstance(value, (list, tuple)):
        raise damaged("a size", "something else")
    return value


def _path(args: tuple[Any, ...]) -> str:
    if len(args) > _MAX_PATH_PARTS or not all(isinstance(part, str) for part in args):
        raise damaged("a path of texts", "something else")
    if sum(map(len, args)) > _MAX_PATH_CHARS:
        raise damaged(f"a path of at most {_MAX_PATH_CHARS} characters", "a longer one")
    head = args[0] if args and args[0].endswith(("/", "\\")) else ""
    return head + "/".join(args[1:] if head else args)


def _empty_dict(args: tuple[Any, ...]) -> dict[Any, Any]:
    if len(args) > 1 or (args and not (args[0] is None or isinstance(args[0], Global))):
        raise damaged("an empty dict", "something else")
    return {}


_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
_BUILDERS: dict[str, Builder] = {
    "collections.OrderedDict": _empty_dict,
    "collections.defaultdict": _empty_dict,
    "torch.Size": _torch_size,
    "torch.serialization._get_layout": _one,
    # What sets and lists are called with in protocol 2: what they hold stands for them.
    "__builtin__.frozenset": _one,
    "__builtin__.set": _one,
    "builtins.frozenset": _one,
    "builtins.set": _one,
    # Why two modules: Python 3.13 pickles paths by the second name.
    **{f"pathlib.{name}": _path for name in _PATHS},
    **{f"pathlib._local.{name}": _path for name in _PATHS},
}

_DCP = "torch.distributed.checkpoint"
_DTYPES = {
    *ITEMSIZE,
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    *("qint8", "qint32", "quint8", "quint2x4", "quint4x2"),
}
_OPAQUE = frozenset(
    [
        *(f"torch.{dtype}" for dtype in _DTYPES),
        *(
            f"{_DCP}.metadata.{name}"
            for name in (
                "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
                "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
            )
        ),
        *(
            # What planners that cache their plans leave in planner_data or in extra attributes.
            f"{_DCP}.planner.{name}"
            for name in (
                "BytesIOWriteData", "LoadItemType", "LoadPlan", "ReadItem", "SavePlan",
                "TensorWriteData", "WriteItem", "WriteItemType",
            )
        ),
        f"{_DCP}.filesystem._StorageInfo",
        f"{_DCP}.filesystem._StoragePrefix",
        "builtins.dict",
        "builtins.int",
        "builtins.list",
        "builtins.str",
        "builtins.tuple",
        "collections.ChainMap",
        "torch.device",
    ]
)  # fmt: skip


_MODULE = "torch.distributed.checkpoint.metadata"
_MAX_NDIM = 64
_MAX_TRANSFORMS = 16
_MAX_CHUNKS_PER_PLACE = 16
"""Stock DCP writes one chunk a place; empty shards of other planners may share theirs."""


@dataclass(frozen=True, eq=False)
class ForeignMetadata:
    """What a `.metadata` says."""

    table: ChunkTable
    """Chunks in the order of the tensors and of each tensor's list of chunks. `payload_offset` is
    -1 and `block_bytes` 0 everywhere; `payload_bytes` is the box's own size, and for objects and
    `OPAQUE` chunks that of the item."""
    attempt: str | None
    """The attempt that it projects, when ray_dcp wrote it."""
    checkpoint_id: str | None
    """`StorageMeta.checkpoint_id`: where it was written to, at that time."""
    save_id: str | None
    """`StorageMeta.save_id`."""
    version: str | None
    planner_data: Any
    """As read: plain values and stand-ins. Not bounded, see `safe_pickle.read_pickle`."""
    transforms: tuple[tuple[str, ...] | None, ...] | None
    """Per chunk, names of the stream transforms that its item went through, in the order in which
    stock DCP hands them to its registry; None when no chunk has any."""


def decode_metadata(data: bytes, *, allowed_parents: int = 0) -> ForeignMetadata:
    """Returns what a `.metadata` says: of stock DCP from torch 2.0 on, or our own projection.

    Args:
        data: The file.
        allowed_parents: How many directories above the checkpoint its files may lie: checkpoints
            that share data with their predecessors refer to `../step-1/…`.

    Raises:
        UnsafeCheckpointError: It names a class or function that no `.metadata` needs, or a file
            outside the checkpoint; `key` is that name.
        DamagedCheckpointError: It is no `.metadata`, or contradicts itself.

    Complexity:
        O(length), about 20 us a chunk.
    """
    with collector_paused():
        try:
            root = read_pickle(data, allowed_global, {f"{_MODULE}.MetadataIndex": _index_key})
            return _Decoder(_state(root, "Metadata"), allowed_parents).decode()
        except CheckpointError as exc:
            if ".metadata" not in exc.message:
                exc.message = f".metadata: {exc.message}"
            raise
        except (ValueError, TypeError, OverflowError, KeyError, AttributeError) as exc:
            raise damaged("DCP's Metadata", f"something else ({type(exc).__name__})") from exc


class _Decoder:
    """Collects the columns of the table, row by row."""

    def __init__(self, fields: dict[Any, Any], allowed_parents: int) -> None:
        self._fields = fields
        self._allowed_parents = allowed_parents
        self._places = _dict(fields.get("storage_data"), "storage_data")
        self._max_chunks = _MAX_CHUNKS_PER_PLACE * len(self._places)
        self._dtypes: dict[str, int] = {}
        self._files: dict[str, int] = {}
        self._keys: dict[str, str] = {}
        self._tensors: list[tuple[int, int, tuple[int, ...], bool]] = []
        self._boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self._items: list[tuple[int, int, int]] = []
        self._transforms: list[tuple[str, ...] | None] = []

    def decode(self) -> ForeignMetadata:
        entries = _dict(self._fields.get("state_dict_metadata"), "state_dict_metadata")
        for name, entry in entries.items():
            self._add(name, entry)
        planner_data = self._fields.get("planner_data")
        table = self._table(tuple(entries), _paths(planner_data, tuple(entries)))
        check_table(table, files=False)
        meta = self._fields.get("storage_meta")
        about = {} if meta is None else _state(meta, "StorageMeta")
        attempt = self._fields.get(ATTEMPT_ATTRIBUTE)
        return ForeignMetadata(
            table=table,
            attempt=None if attempt is None else check_attempt(_text(attempt, "attempt")),
            checkpoint_id=_text_or_none(about.get("checkpoint_id")),
            save_id=_text_or_none(about.get("save_id")),
            version=_text_or_none(self._fields.get("version")),
            planner_data=planner_data,
            transforms=tuple(self._transforms) if any(self._transforms) else None,
        )

    def _add(self, name: Any, entry: Any) -> None:
        _text(name, "FQN")
        if isinstance(entry, Instance) and entry.name == f"{_MODULE}.BytesStorageMetadata":
            row = len(self._tensors)
            self._tensors.append((Kind.OBJECT, -1, (), False))
            self._boxes.append((row, (), ()))
            self._place((name, None), name)
            return
        fields = _state(entry, "TensorStorageMetadata")
        dtype, requires_grad = _properties(fields.get("properties"))
        kind = Kind.TENSOR if dtype in ITEMSIZE else Kind.OPAQUE
        code = self._dtypes.setdefault(dtype, len(self._dtypes))
        row = len(self._tensors)
        self._tensors.append((kind, code, _size(fields.get("size")), requires_grad))
        for chunk in _list(fields.get("chunks"), "chunks"):
            box = _state(chunk, "ChunkStorageMetadata")
            offset, size = _size(box.get("offsets")), _size(box.get("sizes"))
            self._boxes.append((row, offset, size))
            self._place((name, repr(offset)), name)

    def _place(self, key: tuple[str, str | None], name: str) -> None:
        if len(self._items) >= self._max_chunks:
            # Why: a list of chunks that the memo repeats takes a few bytes in the file.
            raise damaged("a place for every chunk", "far more chunks than places")
        info = self._places.get(key)
        if info is None:
            raise damaged(f"a place for every chunk of {name[:200]!r}", "none for one")
        fields = _state(info, "_StorageInfo", "torch.distributed.checkpoint.filesystem")
        path = _text(fields.get("relative_path"), "relative_path")
        file = self._keys.get(path)
        if file is None:
            file = self._keys[path] = resolved_key(path, allowed_parents=self._allowed_parents)
        item = _number(fields.get("offset")), _number(fields.get("length"))
        self._items.append((self._files.setdefault(file, len(self._files)), *item))
        transforms = fields.get("transform_descriptors")
        if transforms:
            texts = _list(transforms, "transform_descriptors")
            if len(texts) > _MAX_TRANSFORMS:
                raise damaged(f"at most {_MAX_TRANSFORMS} transforms", str(len(texts)))
            self._transforms.append(tuple(_text(text, "transform") for text in texts))
        else:
            self._transforms.append(None)

    def _table(self, names: tuple[str, ...], paths: tuple[NamePath | None, ...]) -> ChunkTable:
        if len(self._dtypes) > 127:
            raise damaged("at most 127 dtypes", str(len(self._dtypes)))
        shapes = [tensor[2] for tensor in self._tensors]
        ndim = np.array([len(shape) for shape in shapes], dtype=np.int64)
        width = int(ndim.max(initial=0))
        tensor = np.array([row for row, _, _ in self._boxes], dtype=np.int32)
        offsets = [offset for _, offset, _ in self._boxes]
        sizes = [size for _, _, size in self._boxes]
        for boxes in (offsets, sizes):
            lengths = np.array([len(box) for box in boxes], dtype=np.int64)
            if not np.array_equal(lengths, ndim[tensor]):
                raise damaged("chunks of their tensor's dimensions", "others")
        size = _padded(sizes, width, 1)
        kind, dtype = self._kinds(tensor)
        items = np.array(self._items, dtype=np.int64).reshape(-1, 3)
        itemsize = np.array([ITEMSIZE.get(name, 0) for name in self._dtypes] + [0], dtype=np.int64)
        box_bytes = volumes(size) * itemsize[dtype[tensor]]
        return ChunkTable(
            names=names,
            paths=paths,
            dtypes=tuple(self._dtypes),
            files=tuple(self._files),
            kind=kind,
            dtype=dtype,
            ndim=ndim.astype(np.int8),
            shape=_padded(shapes, width, 1),
            requires_grad=np.array([tensor[3] for tensor in self._tensors], dtype=bool),
            tensor=tensor,
            offset=_padded(offsets, width, 0),
            size=size,
            file=items[:, 0].astype(np.int32),
            item_offset=items[:, 1].copy(),
            item_bytes=items[:, 2].copy(),
            payload_offset=np.full(len(tensor), -1, dtype=np.int64),
            payload_bytes=np.where(kind[tensor] == Kind.TENSOR, box_bytes, items[:, 2]),
            block_bytes=np.zeros(len(tensor), dtype=np.int64),
            check_start=np.zeros(len(tensor) + 1, dtype=np.int64),
            checks=np.zeros(0, dtype=np.uint64),
        )

    def _kinds(self, tensor: np.ndarray[Any, np.dtype[np.int32]]) -> Any:
        """Returns each tensor's kind and dtype; a stream transform makes a tensor `OPAQUE`."""
        kind = np.array([row[0] for row in self._tensors], dtype=np.int8)
        dtype = np.array([row[1] for row in self._tensors], dtype=np.int8)
        changed = np.array([found is not None for found in self._transforms], dtype=bool)
        rows = tensor[changed]
        kind[rows] = np.where(kind[rows] == Kind.TENSOR, int(Kind.OPAQUE), kind[rows])
        return kind, dtype


def _index_key(args: tuple[Any, ...]) -> tuple[str, str | None]:
    # Why a text for the offset: tuples of numbers with one hash are easily found, texts are not.
    (state,) = args
    fields = _dict(state, "MetadataIndex")
    offset = fields.get("offset")
    return _text(fields.get("fqn"), "FQN"), None if offset is None else repr(_size(offset))


def _state(value: Any, name: str, module: str = _MODULE) -> dict[Any, Any]:
    if type(value) is not Instance or value.name != f"{module}.{name}":
        raise damaged(f"a {name}", "something else")
    return _dict(value.state, name)


def _dict(value: Any, name: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise damaged(f"a dict as {name}", "something else")
    return value


def _list(value: Any, name: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise damaged(f"a list as {name}", "something else")
    return value


def _text(value: Any, name: str) -> str:
    # Careful: a lone surrogate is legal in a pickle, but neither in Arrow nor in a file name.
    if type(value) is not str or (not value.isascii() and not _is_unicode(value)):
        raise damaged(f"a text as {name}", "something else")
    return value


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise damaged("a number of 0 or more", "something else")
    return value


def _size(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > _MAX_NDIM:
        raise damaged(f"a size of at most {_MAX_NDIM} dimensions", "something else")
    for number in value:
        if type(number) is not int or not 0 <= number < 1 << 62:
            raise damaged("a size of numbers of 0 or more", "something else")
    return value if type(value) is tuple else tuple(value)


def _properties(value: Any) -> tuple[str, bool]:
    name = f"{_MODULE}.TensorProperties"
    if not isinstance(value, Instance) or value.name != name:
        raise damaged("TensorProperties", "something else")
    state = value.state
    if isinstance(state, tuple) and len(state) == 5:
        dtype, requires_grad = state[0], state[2]
    else:
        fields = _dict(state, "TensorProperties")
        dtype, requires_grad = fields.get("dtype"), fields.get("requires_grad", False)
    if type(dtype) is not Global or not dtype.name.startswith("torch."):
        raise damaged("a torch dtype", "something else")
    return dtype.name.removeprefix("torch."), requires_grad is True


def _padded(rows: list[tuple[int, ...]], width: int, blank: int) -> Int64Array:
    padding = [(blank,) * (width - length) for length in range(width + 1)]
    full = [row + padding[len(row)] for row in rows]
    return np.array(full, dtype=np.int64).reshape(len(rows), width)


def _paths(planner_data: Any, names: tuple[str, ...]) -> tuple[NamePath | None, ...]:
    """Returns where each FQN sits, None for all that the planner did not say so plainly."""
    found: dict[str, NamePath] = {}
    for mapping in _mappings(planner_data):
        for name, path in mapping.items():
            if (
                isinstance(name, str)
                and isinstance(path, tuple)
                and all(type(part) is str or type(part) is int for part in path)
            ):
                found.setdefault(name, path)
    return tuple(found.get(name) for name in names)


def _mappings(planner_data: Any) -> list[dict[Any, Any]]:
    """Returns the dicts of planner data: itself, or those of a ChainMap, the first ones first."""
    if type(planner_data) is dict:
        return [planner_data]
    if isinstance(planner_data, Instance) and planner_data.name == "collections.ChainMap":
        state = planner_data.state
        maps = state.get("maps") if type(state) is dict else None
        # Why by id: a list may name one long dict a million times.
        found = (
            {id(part): part for part in maps if type(part) is dict} if type(maps) is list else {}
        )
        return list(found.values())
    return []
