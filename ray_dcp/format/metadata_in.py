"""Stock DCP's `.metadata` as a chunk table, read without torch and without running anything.

Which names a `.metadata` may refer to, and what they mean. The pickle itself is read by
`safe_pickle`; where the raw bytes lie inside each item only its header tells (`torch_items`).
Source: torch/distributed/checkpoint/metadata.py, filesystem.py, planner.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ray_dcp.collector import collector_paused
from ray_dcp.errors import CheckpointError
from ray_dcp.format.dtypes import ITEMSIZE
from ray_dcp.format.keys import check_attempt, resolved_key
from ray_dcp.format.metadata_out import ATTEMPT_ATTRIBUTE
from ray_dcp.format.safe_names import allowed_global
from ray_dcp.format.safe_pickle import Global, Instance, damaged, read_pickle
from ray_dcp.format.table_check import check_table, volumes
from ray_dcp.plan.values import ChunkTable, Int64Array, Kind, Path

__all__ = ["ForeignMetadata", "decode_metadata"]

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

    def _table(self, names: tuple[str, ...], paths: tuple[Path | None, ...]) -> ChunkTable:
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


def _paths(planner_data: Any, names: tuple[str, ...]) -> tuple[Path | None, ...]:
    """Returns where each FQN sits, None for all that the planner did not say so plainly."""
    found: dict[str, Path] = {}
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
