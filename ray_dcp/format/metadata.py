"""The `.metadata` of stock DCP, encoded or decoded without torch; its pickle is never run.

**Writing** (`encode_metadata`) turns a chunk table into a pickle of
`torch.distributed.checkpoint.metadata.Metadata` that equals, field by field, what torch itself
would build, with texts where torch has platform-bound paths.

**Reading** (`decode_metadata`) turns the pickle into a chunk table. A plain value stands for each
name that a `.metadata` may refer to; nothing is imported or called, so an allowed name only means
that the data around it is read. The place of the raw bytes inside an item is known only from the
item's own header (`torch_items`).

torch changes these classes between versions without a version number. So a pickle that is
well-formed, but has an unknown form, is taken to be written by a newer torch. It does not count as
damaged, and falling back to an earlier step would not help.

Source: torch/distributed/checkpoint/metadata.py, filesystem.py `_StorageInfo`, planner.py,
default_planner.py `create_default_global_save_plan`; PEP 307, PEP 3154; Lib/pickletools.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from ray_dcp.core import NEWEST_TORCH
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.processes import collector_paused
from ray_dcp.core.values import (
    BoolArray,
    ChunkTable,
    Int64Array,
    Kind,
    NamePath,
    group_rows,
    padded,
)
from ray_dcp.errors import (
    CheckpointError,
    DamagedCheckpointError,
    InternalError,
    UnsafeCheckpointError,
)
from ray_dcp.format import damaged
from ray_dcp.format.names import check_attempt, is_unicode, resolved_key
from ray_dcp.format.safe_pickle import (
    MAX_PICKLE_BYTES,
    MEMOIZE_AND_POP,
    Builder,
    Global,
    Opcodes,
    PickleMachine,
    PickleWriter,
    pickled_int,
    pickled_ints,
    pickled_tuple,
    rows,
    side_by_side,
    uneven_rows,
)
from ray_dcp.format.table import check_table, volumes

ATTEMPT_ATTRIBUTE = "ray_dcp_attempt"
"""Extra attribute of the pickled `Metadata`: the attempt that it describes. Stock DCP ignores
it."""
DCP_VERSION = "1.0.0"
"""The value that torch writes as `Metadata.version`; no reader uses it."""

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_NEW = b")\x81"
"""Pushes no arguments, then calls `cls.__new__(cls)`."""
_STATE = b"}("
"""Pushes an empty dict and a mark, before the dict's items."""
_TUPLES = np.frombuffer(b")\x85\x86\x87", dtype=np.uint8)[:, None]
"""Opcodes that make a tuple of 0 to 3 values, one row each."""
_BUILD = b"ub"
"""Sets the items, then makes the dict the object's state."""


def encode_metadata(
    table: ChunkTable, *, checkpoint_id: str, attempt: str, empty_mappings: bool = False
) -> bytes:
    """Returns the bytes of `.metadata`.

    Equal arguments give equal bytes. A tensor's chunks keep the order of the table.

    Args:
        table: A finished table: every chunk has its place.
        checkpoint_id: Path or URL that the user passed.
        attempt: The attempt whose manifest contains the digest of these bytes.
        empty_mappings: Include mappings without values. DCP never does, and reads a checkpoint
            that includes them by the naming rules from before torch 2.4.

    Raises:
        InternalError: A chunk has no place yet.

    Complexity:
        O(chunks), about 1 us per chunk.
    """
    if table.num_chunks and int(table.item_offset.min()) < 0:
        raise InternalError("A .metadata can be made once all chunks have a place; one has none")
    has_paths = not table.num_tensors or any(path is not None for path in table.paths)
    if not empty_mappings:
        table = _without_empty_mappings(table)
    writer = PickleWriter()
    # Careful: the calls below write remembered values, and must do so before the object is begun.
    shared = _SharedValues(writer, table)
    fields = {
        "state_dict_metadata": _tensors(writer, table, shared),
        "planner_data": _planner_data(writer, table, shared) if has_paths else b"N",
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


def _without_empty_mappings(table: ChunkTable) -> ChunkTable:
    """Returns the columns to encode, without the rows of mappings that have no values."""
    keep = ~table.is_empty_mapping
    if keep.all():
        return table
    tensors, chunks = np.flatnonzero(keep), keep[table.tensor]
    number = np.cumsum(keep, dtype=np.int32) - 1
    columns: dict[str, Any] = {
        name: getattr(table, name)[keep]
        for name in ("kind", "dtype", "ndim", "shape", "requires_grad")
    }
    columns |= {
        name: getattr(table, name)[chunks]
        for name in ("offset", "size", "file", "item_offset", "item_bytes")
    }
    return replace(
        table,
        names=tuple(map(table.names.__getitem__, tensors)),
        paths=tuple(map(table.paths.__getitem__, tensors)),
        tensor=number[table.tensor[chunks]],
        **columns,
    )


class _SharedValues:
    """Opcodes of values that several fields refer to: names and boxes."""

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
    """Returns opcodes that push a `torch.Size` for each row; equal sizes share one object."""
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


def _tensors(writer: PickleWriter, table: ChunkTable, shared: _SharedValues) -> bytes:
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
    """Returns the chunks by tensor, int64[c], and where each tensor's start, int64[t + 1]."""
    counts = np.bincount(table.tensor, minlength=table.num_tensors)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return np.argsort(table.tensor, kind="stable"), starts.astype(np.int64)


def _property_states(writer: PickleWriter, table: ChunkTable) -> list[int]:
    """Returns memo indices of the argument of `TensorProperties.__setstate__`, for each tensor."""
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


def _planner_data(writer: PickleWriter, table: ChunkTable, shared: _SharedValues) -> bytes:
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


def _places(writer: PickleWriter, table: ChunkTable, shared: _SharedValues) -> bytes:
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
    shared: _SharedValues,
    which: BoolArray,
    hints: tuple[bytes | Opcodes, ...],
) -> bytes:
    """Returns `MetadataIndex` and `_StorageInfo` of the selected chunks, as opcodes."""
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


def allowed_global(name: str) -> Global | None:
    """Returns the stand-in for a dotted name; None if no `.metadata` needs the name.

    Args:
        name: Module and qualified name.

    Examples:
        >>> allowed_global("torch.bfloat16").name
        'torch.bfloat16'
        >>> allowed_global("os.system") is None
        True
    """
    is_known = name in _BUILDERS or name in _OPAQUE or _DTYPE.fullmatch(name)
    return Global(name, _BUILDERS.get(name)) if is_known else None


def _only_argument(args: tuple[Any, ...]) -> Any:
    if len(args) != 1:
        raise damaged("one argument", str(len(args)))
    return args[0]


def _torch_size(args: tuple[Any, ...]) -> Any:
    value = _only_argument(args) if args else ()
    if not isinstance(value, (list, tuple)):
        raise damaged("a size", "something else")
    return value


def _empty_dict(args: tuple[Any, ...]) -> dict[Any, Any]:
    if len(args) > 1 or (args and not (args[0] is None or isinstance(args[0], Global))):
        raise damaged("an empty dict", "something else")
    return {}


def _member(args: tuple[Any, ...]) -> Any:
    """Returns the stand-in of an enumeration member; Python 3.11.0 to 3.11.3 pickles its name."""
    is_of_dcp = len(args) == 2 and type(args[0]) is Global and args[0].name in _ENUMERATIONS
    if not is_of_dcp or type(args[1]) is not str or not args[1].isupper():
        raise _unsafe_error("builtins.getattr")
    return Instance(args[0].name, args[1:])


def _unknown_name_error(dotted: str) -> CheckpointError:
    """Returns the error for a name that no known `.metadata` contains."""
    name = ascii(dotted[:200])[1:-1]
    spoiled = any(_is_misread(dotted, known) for known in _OPAQUE)
    return _newer_error(name) if _CLASS.fullmatch(dotted) and not spoiled else _unsafe_error(name)


def _newer_error(found: str, key: str | None = None) -> CheckpointError:
    return CheckpointError(
        f"Expected a .metadata as torch 2.0 to {NEWEST_TORCH} write it, found {found}: a newer "
        "torch wrote this checkpoint; upgrade ray_dcp to load it, or use the DCP of that torch",
        key=key,
    )


def _is_misread(found: str, known: str) -> bool:
    """Returns whether a text differs from a known one in one character: damage, not a new name."""
    return len(found) == len(known) and sum(map(str.__ne__, found, known)) == 1


def _unsafe_error(name: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        "Expected a .metadata of plain data and of DCP's own classes, found one that asks for "
        "something else; do not load this checkpoint unless you wrote it",
        key=name,
    )


_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
_BUILDERS: dict[str, Builder] = {
    "collections.OrderedDict": _empty_dict,
    "collections.defaultdict": _empty_dict,
    "torch.Size": _torch_size,
    "torch.serialization._get_layout": _only_argument,
    # Protocol 2 calls these for sets and lists: the argument stands for the result.
    "__builtin__.frozenset": _only_argument,
    "__builtin__.getattr": _member,
    "__builtin__.set": _only_argument,
    "builtins.frozenset": _only_argument,
    "builtins.getattr": _member,
    "builtins.set": _only_argument,
}

_DCP = "torch.distributed.checkpoint"
_ENUMERATIONS = frozenset(
    (
        f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
        f"{_DCP}.planner.LoadItemType",
        f"{_DCP}.planner.WriteItemType",
    )
)
_DTYPE = re.compile(r"torch\.[a-z]{0,4}(bits|complex|float|int)[0-9]\w*", re.ASCII)
"""Dtypes without known raw bytes, also those of a newer torch; they are read as texts."""
_CLASS = re.compile(r"torch\.distributed\.(checkpoint|tensor)\.([a-z_]+\.)*_?[A-Z]\w*", re.ASCII)
"""Classes in a `.metadata` that a newer torch may add."""
_OPAQUE = frozenset(
    [
        *_ENUMERATIONS,
        *(f"torch.{dtype}" for dtype in ITEMSIZE),
        *(
            f"{_DCP}.metadata.{name}"
            for name in (
                "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
                "StorageMeta", "TensorProperties", "TensorStorageMetadata",
            )
        ),
        *(
            # Planners that cache their plans leave these in planner_data or in extra attributes.
            f"{_DCP}.planner.{name}"
            for name in (
                "BytesIOWriteData", "LoadPlan", "ReadItem", "SavePlan", "TensorWriteData",
                "WriteItem",
            )
        ),
        # Why two modules: Python 3.13 pickles paths under the second name.
        *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
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


_MAX_KEY_PARTS = 64
_LARGE_INT = 1 << 61
"""From here on Python's hash of an integer repeats, and equal hashes make a dict slow."""


class Instance:
    """Stands for an object of an allowed class, which is not created."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.state: Any = None


def read_pickle(data: bytes) -> Any:
    """Returns the value of a pickle: numbers, texts, bytes, lists, tuples, dicts and stand-ins.

    Sets become lists, and tuples that are dict keys become their `repr`. Shared and cyclic
    references are kept: do not walk the value without a bound, and do not print, hash or compare
    parts that are not checked.

    Args:
        data: The pickle.

    Raises:
        UnsafeCheckpointError: The pickle names something that is not allowed; `key` is that name.
        DamagedCheckpointError: The data is no pickle, or has opcodes that plain data does not need.

    Complexity:
        O(length), about 0.15 us per opcode.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise damaged(f"at most {MAX_PICKLE_BYTES >> 20} MiB", f"{len(data)} bytes")
    return _MetadataMachine(data).load()


class _MetadataMachine(PickleMachine):
    """Makes plain values, and stand-ins for objects of allowed classes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._globals: dict[str, Global] = {}

    def _set_items(self, target: Any, items: list[Any]) -> None:
        if type(target) is not dict or len(items) % 2:
            raise damaged("a dict and its items", "something else")
        for index in range(0, len(items), 2):
            key = items[index]
            if type(key) is not str:
                key = self._key(key)
            elif key in target:
                # Why: no pickler writes a key twice, and readers may disagree on which one counts.
                raise damaged("each name once", "one twice")
            target[key] = items[index + 1]

    def _key(self, key: Any) -> Any:
        if isinstance(key, Instance) and key.name == f"{_METADATA}.MetadataIndex":
            return _index_key(key)
        if key is None or isinstance(key, (float, bytes)) or _is_small(key):
            return key
        # Careful: hashing a deeply nested tuple would overflow the stack, hashing a long one takes
        # time at every use, and many tuples of numbers have equal hashes.
        if (
            isinstance(key, tuple)
            and len(key) <= _MAX_KEY_PARTS
            and all(isinstance(part, str) or _is_small(part) for part in key)
        ):
            return repr(key)
        raise damaged("texts and numbers as keys", "other keys")

    def _construct(self, target: Any, args: Any) -> Any:
        if type(target) is not Global or type(args) is not tuple:
            raise damaged("a class and its arguments", "something else")
        if target.build is None:
            return Instance(target.name, args)
        return target.build(args)

    def _with_state(self, target: Any, state: Any) -> Any:
        if type(target) is Instance:
            target.state = state
        elif type(target) is not dict:
            # A dict stands for an OrderedDict or defaultdict, whose attributes are not needed.
            raise damaged("an object to give a state to", "something else")
        return target

    def _find(self, module: Any, name: Any) -> Global:
        if not isinstance(module, str) or not isinstance(name, str):
            raise damaged("the name of a class", "something else")
        dotted = f"{module}.{name}"
        found = self._globals.get(dotted) or allowed_global(dotted)
        if found is None:
            raise _unknown_name_error(dotted)
        self._globals[dotted] = found
        return found


def _is_small(value: Any) -> bool:
    return isinstance(value, int) and -_LARGE_INT < value < _LARGE_INT


_MAX_NDIM = 64
_MAX_TRANSFORMS = 16
_MAX_CHUNKS_PER_PLACE = 16
"""Most chunks at one place. Stock DCP writes one; empty shards of other planners may share one."""


@dataclass(frozen=True, eq=False)
class ForeignMetadata:
    """The content of a `.metadata`."""

    table: ChunkTable
    """The chunks, sorted by tensor and in the order of each tensor's list of chunks.
    `payload_offset` is -1 and `block_bytes` 0 everywhere; `payload_bytes` is the size of the
    chunk's box, and for objects and `OPAQUE` chunks that of the item."""
    attempt: str | None
    """The attempt that it describes, if ray_dcp wrote it."""
    checkpoint_id: str | None
    """`StorageMeta.checkpoint_id`, where the checkpoint was written; None if that is no text."""
    transforms: tuple[tuple[str, ...] | None, ...] | None
    """For each chunk the names of the stream transforms of its item, in the order in which stock
    DCP passes them to its registry; None if no chunk has any."""


def decode_metadata(data: bytes) -> ForeignMetadata:
    """Returns the content of a `.metadata`, written by stock DCP since torch 2.0 or by ray_dcp.

    Args:
        data: Content of the file.

    Raises:
        UnsafeCheckpointError: The file names a class or function that no `.metadata` needs, or a
            file outside the checkpoint; `key` is that name.
        DamagedCheckpointError: The file is no `.metadata`, or contradicts itself.
        CheckpointError: The file has an unknown form: a newer torch wrote it.

    Complexity:
        O(length), about 20 us per chunk.
    """
    fields: dict[Any, Any] = {}
    with collector_paused():
        try:
            fields = _state(read_pickle(data), "Metadata")
            return _Decoder(fields).decode()
        except CheckpointError as exc:
            if _is_later(fields.get("version")) and isinstance(exc, DamagedCheckpointError):
                raise _newer_error(f"one of version {fields['version']}", "version") from exc
            if ".metadata" not in exc.message:
                exc.message = f".metadata: {exc.message}"
            raise
        except (ValueError, TypeError, OverflowError, KeyError, AttributeError) as exc:
            raise damaged("DCP's Metadata", f"something else ({type(exc).__name__})") from exc


class _Decoder:
    """Collects the columns of the table, row by row."""

    def __init__(self, fields: dict[Any, Any]) -> None:
        self._fields = fields
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
        paths = _paths(self._fields.get("planner_data"), tuple(entries))
        table = self._table(tuple(entries), paths)
        check_table(table, files=False)
        meta = self._fields.get("storage_meta")
        place = None if meta is None else _state(meta, "StorageMeta").get("checkpoint_id")
        attempt = self._fields.get(ATTEMPT_ATTRIBUTE)
        return ForeignMetadata(
            table=table,
            attempt=None if attempt is None else check_attempt(_text(attempt, "attempt")),
            checkpoint_id=place if isinstance(place, str) else None,
            transforms=tuple(self._transforms) if any(self._transforms) else None,
        )

    def _add(self, name: Any, entry: Any) -> None:
        _text(name, "FQN")
        if isinstance(entry, Instance) and entry.name == f"{_METADATA}.BytesStorageMetadata":
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
            # Why: a list of chunks that the memo repeats takes only a few bytes of the file.
            raise damaged("a place for every chunk", "far more chunks than places")
        info = self._places.get(key)
        if info is None:
            raise damaged(f"a place for every chunk of {name[:200]!r}", "none for one")
        fields = _state(info, "_StorageInfo", "torch.distributed.checkpoint.filesystem")
        path = _text(fields.get("relative_path"), "relative_path")
        file = self._keys.get(path)
        if file is None:
            file = self._keys[path] = resolved_key(path)
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
        size = padded(sizes, width, 1)
        kind = np.array([tensor[0] for tensor in self._tensors], dtype=np.int8)
        dtype = np.array([tensor[1] for tensor in self._tensors], dtype=np.int8)
        # A stream transform makes a tensor opaque.
        changed = tensor[np.array([found is not None for found in self._transforms], dtype=bool)]
        kind[changed[kind[changed] == Kind.TENSOR]] = Kind.OPAQUE
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
            shape=padded(shapes, width, 1),
            requires_grad=np.array([tensor[3] for tensor in self._tensors], dtype=bool),
            tensor=tensor,
            offset=padded(offsets, width, 0),
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


def _index_key(index: Instance) -> tuple[str, str | None]:
    # Why a text for the offset: it is easy to find tuples of numbers with equal hashes, but not
    # texts.
    fields = _state(index, "MetadataIndex")
    offset = fields.get("offset")
    return _text(fields.get("fqn"), "FQN"), None if offset is None else repr(_size(offset))


def _is_later(version: Any) -> bool:
    """Returns whether `Metadata.version` is later than the known ones."""
    if type(version) is not str or not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4}){1,3}", version):
        return False
    return [*map(int, version.split("."))] > [*map(int, DCP_VERSION.split("."))]


_FIELDS = {
    "ChunkStorageMetadata": ("offsets", "sizes"),
    "Metadata": ("state_dict_metadata", "storage_data"),
    "MetadataIndex": ("fqn",),
    "TensorStorageMetadata": ("properties", "size", "chunks"),
    "_StorageInfo": ("relative_path", "offset", "length"),
}
"""The fields that are read of each class; every known torch writes them."""
_OTHER_FIELDS = ("index", "planner_data", "storage_meta", "transform_descriptors", "version")


def _state(value: Any, name: str, module: str = _METADATA) -> dict[Any, Any]:
    if type(value) is not Instance or value.name != f"{module}.{name}":
        raise damaged(f"a {name}", "something else")
    fields = value.state
    if type(fields) is not dict:
        raise _newer_error(f"a {name} whose state is no dict", name)
    for field in _FIELDS.get(name, ()):
        if field not in fields:
            raise _missing_field_error(name, field, fields)
    return fields


def _missing_field_error(name: str, field: str, fields: dict[Any, Any]) -> CheckpointError:
    """Returns the error for an object without a field; new if another field is in its place."""
    known = {*chain(*_FIELDS.values()), *_OTHER_FIELDS}
    new = [key for key in fields if type(key) is str and key.isidentifier() and key not in known]
    if not new or any(_is_misread(key, field) for key in new):
        return damaged(f"{field} in a {name}", "none")
    return _newer_error(f"a {name} without {field}", name)


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
    if type(value) is not str or not is_unicode(value):
        raise damaged(f"a text as {name}", "something else")
    return value


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


_FEWEST_PROPERTIES, _MOST_PROPERTIES = 5, 6
"""Properties: dtype, layout, requires_grad, memory format, pin_memory, and from torch 2.15 on
strides, which no load needs. Further properties of a newer torch are ignored."""


def _properties(value: Any) -> tuple[str, bool]:
    name = f"{_METADATA}.TensorProperties"
    if not isinstance(value, Instance) or value.name != name:
        raise damaged("TensorProperties", "something else")
    state = value.state
    if isinstance(state, tuple) and len(state) >= _FEWEST_PROPERTIES:
        dtype, requires_grad = state[0], state[2]
    elif type(state) is dict and "dtype" in state:
        dtype, requires_grad = state["dtype"], state.get("requires_grad", False)
    else:
        raise _newer_error("TensorProperties in another form", "TensorProperties")
    if type(dtype) is not Global or not dtype.name.startswith("torch."):
        if isinstance(state, tuple) and len(state) > _MOST_PROPERTIES:
            raise _newer_error("TensorProperties in another order", "TensorProperties")
        raise damaged("a torch dtype", "something else")
    return dtype.name.removeprefix("torch."), requires_grad is True


def _paths(planner_data: Any, names: tuple[str, ...]) -> tuple[NamePath | None, ...]:
    """Returns the path of each FQN; None for FQNs whose path the planner does not state plainly."""
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
    """Returns the dicts of planner data: the data itself, or those of a ChainMap in their order."""
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
