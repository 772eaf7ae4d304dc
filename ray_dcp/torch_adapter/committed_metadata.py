"""`CommittedMetadata`: what a save returns, torch's `Metadata` of a committed checkpoint.

It is filled from the chunk table on first access: ranks receive only the manifest of a commit, and
most never use the chunks.
"""

from __future__ import annotations

import pickle
import threading
from dataclasses import fields
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from ray_dcp.commit_protocol.messages import SaveOutcome, Target
from ray_dcp.core.quantities import count_text, size_text
from ray_dcp.core.values import ChunkTable
from ray_dcp.errors import CheckpointNotFoundError
from ray_dcp.format.manifest import Manifest, decode_record, record_key
from ray_dcp.format.metadata import ATTEMPT_ATTRIBUTE, encode_metadata
from ray_dcp.io.checkpoint import checkpoint_from
from ray_dcp.store.opening import open_storage
from ray_dcp.torch_adapter.tensors import dtype_of


class CommittedMetadata(Metadata):
    """The `Metadata` of a committed checkpoint, read on first access.

    It equals torch's `Metadata` with the same fields, and is pickled as one. `of` creates it; the
    constructor is that of `Metadata`. An access that fails is tried again by the next one.

    Attributes:
        attempt: The attempt that was committed; "" if unknown.
        slot: The slot of its manifest; 0 if unknown.
        differing: Names whose values differ between the ranks; see `SaveReport.differing`.
    """

    attempt: str = ""
    slot: int = 0
    differing: tuple[str, ...] = ()

    @property
    def created_s(self) -> float | None:
        """When the checkpoint was committed, in seconds since 1970 by the coordinator's clock.

        The same on all ranks; None if it is not known without reading.
        """
        data = self.__dict__.get("_manifest", b"")
        record = decode_record(data) if data else None
        return record.created_s if isinstance(record, Manifest) else None

    def __repr__(self) -> str:
        """Returns one line, without reading; that of torch's class has all tensors and chunks."""
        known, parts = self.__dict__, []
        data = known.get("_manifest", b"")
        record = decode_record(data) if data else None
        if isinstance(record, Manifest):
            size, files = size_text(record.payload_bytes), count_text(len(record.files), "file")
            parts += [count_text(record.num_tensors, "tensor"), f"{size} in {files}"]
        elif "state_dict_metadata" in known:
            parts.append(count_text(len(self.state_dict_metadata), "value"))
        parts += [f"attempt {self.attempt}"] if self.attempt else []
        return f"{type(self).__name__}({', '.join(parts)})"

    @classmethod
    def of(cls, target: Target, outcome: SaveOutcome) -> CommittedMetadata:
        """Returns the metadata of what a save committed, read from its storage on access."""

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
            return metadata_of(
                checkpoint.table, checkpoint_id=target.url, attempt=checkpoint.attempt
            )

        self = cls.__new__(cls)
        self.attempt, self.slot = outcome.attempt, outcome.slot
        self.differing = outcome.differing
        self.__dict__.update(_manifest=outcome.manifest, _load=load, _lock=threading.Lock())
        return self

    def __getattribute__(self, name: str) -> Any:
        # Why not __getattr__: the class has the defaults of torch's dataclass fields as attributes.
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


def metadata_of(
    table: ChunkTable,
    *,
    checkpoint_id: str | None = None,
    attempt: str | None = None,
    empty_mappings: bool = False,
) -> Metadata:
    """Returns torch's `Metadata` of a committed chunk table, which stock DCP reads as `.metadata`.

    Args:
        table: The chunk table.
        checkpoint_id: Value for `storage_meta`.
        attempt: The attempt that committed the table; also in `storage_meta`.
        empty_mappings: Include mappings without values, which DCP never does.

    Raises:
        UnsupportedValueError: The table has a dtype that this torch lacks.

    Complexity: linear; a few us per chunk.
    """
    # Why first: it refuses names that are no torch dtype; everything else in this pickle is ours.
    for dtype in table.dtypes:
        dtype_of(dtype)
    data = encode_metadata(
        table,
        checkpoint_id=checkpoint_id or "",
        attempt=attempt or "",
        empty_mappings=empty_mappings,
    )
    metadata: Metadata = pickle.loads(data)
    del metadata.__dict__[ATTEMPT_ATTRIBUTE]
    metadata.storage_meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=attempt)
    return metadata
