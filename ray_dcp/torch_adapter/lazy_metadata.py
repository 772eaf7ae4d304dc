"""The `Metadata` that `save` returns: torch's, filled from the chunk table when first looked at.

Ranks receive only the manifest of a commit; most never look at the chunks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ray_dcp.core.values import ChunkTable, Kind
from ray_dcp.errors import CheckpointNotFoundError
from ray_dcp.format.manifest import Manifest, decode_record, record_key
from ray_dcp.io.checkpoint import Checkpoint, checkpoint_from
from ray_dcp.protocol.messages import SaveOutcome, Target
from ray_dcp.store.opening import open_storage
from ray_dcp.torch_adapter.tensors import dtype_of

DCP_VERSION = "1.0.0"
"""What torch's `FileSystemWriter.finish` writes."""


class CommittedMetadata(Metadata):
    """A `Metadata` of a committed checkpoint, read on first access.

    Equal to torch's `Metadata` with the same fields, and pickled as one. Made by `lazy`; the
    constructor is that of `Metadata`.

    Attributes:
        attempt: The attempt that was committed; "" when it is not known.
        slot: The slot of its manifest; 0 when it is not known.
    """

    attempt: str = ""
    slot: int = 0

    @property
    def created_s(self) -> float | None:
        """When it was committed, by the coordinator's clock, in seconds since 1970.

        The same on all ranks; None when that is not known without reading.
        """
        data = self.__dict__.get("_manifest", b"")
        record = decode_record(data) if data else None
        return record.created_s if isinstance(record, Manifest) else None

    @classmethod
    def lazy(
        cls, load: Callable[[], Metadata], *, attempt: str = "", slot: int = 0
    ) -> CommittedMetadata:
        """Returns a metadata that calls `load` once, when a field is first needed.

        Args:
            load: Reads the chunk table and makes it `metadata_of`. What it raises comes out of
                the access; the next access tries again.
            attempt: See the class.
            slot: See the class.
        """
        self = cls.__new__(cls)
        self.attempt = attempt
        self.slot = slot
        self.__dict__["_load"] = load
        self.__dict__["_lock"] = threading.Lock()
        return self

    @classmethod
    def of(cls, target: Target, outcome: SaveOutcome) -> CommittedMetadata:
        """Returns the metadata of what a save committed, read from its storage when looked at."""

        def load() -> Metadata:
            storage = open_storage(target)
            record = outcome.manifest or storage.read(record_key(outcome.slot))
            checkpoint = checkpoint_from(storage, "native", outcome.slot, record)
            if checkpoint.attempt != outcome.attempt:
                raise CheckpointNotFoundError(
                    f"expected the checkpoint that attempt {outcome.attempt} committed, but "
                    f"{checkpoint.attempt} has replaced it; load what stands there",
                    checkpoint_id=target.url,
                )
            return metadata_of(checkpoint, checkpoint_id=target.url)

        self = cls.lazy(load, attempt=outcome.attempt, slot=outcome.slot)
        self.__dict__["_manifest"] = outcome.manifest
        return self

    def __getattribute__(self, name: str) -> Any:
        # Why not __getattr__: the class itself has the defaults of torch's dataclass fields.
        if name in _FIELDS and name not in object.__getattribute__(self, "__dict__"):
            self._fill()
        return object.__getattribute__(self, name)

    def _fill(self) -> None:
        lock = self.__dict__.get("_lock")
        if lock is None:
            return
        with lock:
            load = self.__dict__.get("_load")
            if load is None:
                return
            loaded = load()
            for field in _FIELDS:
                self.__dict__.setdefault(field, getattr(loaded, field))
            del self.__dict__["_load"]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Metadata):
            return NotImplemented
        return all(getattr(self, field) == getattr(other, field) for field in _FIELDS)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Metadata, tuple(getattr(self, field) for field in _FIELDS))


_FIELDS = tuple(field.name for field in fields(Metadata))


def metadata_of(checkpoint: Checkpoint, *, checkpoint_id: str | None = None) -> Metadata:
    """Returns torch's `Metadata` of an opened checkpoint; see `metadata_of_table`."""
    return metadata_of_table(
        checkpoint.table, checkpoint_id=checkpoint_id, save_id=checkpoint.attempt
    )


def metadata_of_table(
    table: ChunkTable, *, checkpoint_id: str | None = None, save_id: str | None = None
) -> Metadata:
    """Returns torch's `Metadata` of a chunk table.

    Args:
        table: A committed chunk table.
        checkpoint_id: Goes to `storage_meta`.
        save_id: Goes there too: the attempt that committed it.

    Complexity: linear; about 6 us a chunk.
    """
    dtypes = [dtype_of(name) for name in table.dtypes]
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    shapes, ndims = table.shape.tolist(), table.ndim.tolist()
    kinds, codes = table.kind.tolist(), table.dtype.tolist()
    for number, name in enumerate(table.names):
        if kinds[number] == Kind.OBJECT:
            stored[name] = BytesStorageMetadata()
            continue
        properties = TensorProperties(
            dtype=dtypes[codes[number]], requires_grad=bool(table.requires_grad[number])
        )
        size = torch.Size(shapes[number][: ndims[number]])
        stored[name] = TensorStorageMetadata(properties, size, [])
    return Metadata(
        state_dict_metadata=stored,
        planner_data=_planner_data(table),
        storage_data=_storage_data(table, stored),
        storage_meta=StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id),
        version=DCP_VERSION,
    )


def _planner_data(table: ChunkTable) -> dict[str, Any] | None:
    paths = {
        name: tuple(str(part) if isinstance(part, str) else part for part in path)
        for name, path in zip(table.names, table.paths, strict=True)
        if path is not None
    }
    return paths or None


def _storage_data(
    table: ChunkTable, stored: dict[str, TensorStorageMetadata | BytesStorageMetadata]
) -> dict[MetadataIndex, _StorageInfo]:
    """Adds every chunk to its tensor; returns where each lies."""
    places: dict[MetadataIndex, _StorageInfo] = {}
    ndims = table.ndim.tolist()
    rows = zip(
        table.tensor.tolist(),
        table.offset.tolist(),
        table.size.tolist(),
        table.file.tolist(),
        table.item_offset.tolist(),
        table.item_bytes.tolist(),
        strict=True,
    )
    for number, offset, size, file, item_offset, item_bytes in rows:
        name, ndim = table.names[number], ndims[number]
        metadata = stored[name]
        if isinstance(metadata, TensorStorageMetadata):
            start = torch.Size(offset[:ndim])
            index = MetadataIndex(name, start, len(metadata.chunks))
            metadata.chunks.append(ChunkStorageMetadata(start, torch.Size(size[:ndim])))
        else:
            index = MetadataIndex(name)
        places[index] = _StorageInfo(table.files[file], item_offset, item_bytes)
    return places
