"""Checks what holds no chunks: `.metadata`, records, headers and indices of safetensors files.

None of them changes what a load gives: it goes by the newest record and the chunk table, or by
what the data files themselves say. But somebody else reads them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ray_dcp.errors import CheckpointError
from ray_dcp.format.checksums import digest_bytes
from ray_dcp.format.manifest import MAX_RECORD_BYTES, Manifest, decode_record, slot_of
from ray_dcp.format.metadata_in import decode_metadata
from ray_dcp.format.safe_pickle import MAX_PICKLE_BYTES
from ray_dcp.format.safetensors_frame import (
    Entry,
    header,
    parse_header,
    saved_offsets,
    sharding_metadata,
)
from ray_dcp.plan.values import ChunkTable
from ray_dcp.store.storage import KeyMissingError, Storage
from ray_dcp.transfer.metadata_beside import projects

__all__ = ["INDEX_SUFFIX", "index_problem", "is_header_of", "metadata_problem", "record_notes"]

INDEX_SUFFIX = ".safetensors.index.json"
_MAX_INDEX_BYTES = 256 << 20

Findings = tuple[tuple[str, int] | None, str | None]
"""`((what is wrong, length of the file) or None, a note or None)`."""


def metadata_problem(storage: Storage, manifest: Manifest, table: ChunkTable) -> Findings:
    """Returns what is wrong with the `.metadata` that stock DCP reads beside a manifest of ours.

    Why a missing or older one is no damage: a crash between commit and publication leaves it, and
    the checkpoint is whole.
    """
    if manifest.metadata is None:
        return None, None
    key, expected = manifest.metadata.key, manifest.metadata.digest
    try:
        data = storage.read(key, 0, MAX_PICKLE_BYTES + 1)
    except KeyMissingError:
        return None, f"{key} is missing: stock DCP can't read this checkpoint"
    digest = digest_bytes(data).hex()
    if digest == expected or projects(data, manifest.attempt, table):
        return None, None
    # Careful: the bit that flipped may be one of the attempt. The files' names have it, too.
    is_earlier = _attempt_of(data) is not None and manifest.attempt.encode() not in data
    if digest == manifest.replaced_metadata or is_earlier:
        return None, f"{key} is of an earlier save: stock DCP reads that one"
    return ("expected the bytes that the manifest names, found others", len(data)), None


def record_notes(storage: Storage, decides: int) -> list[str]:
    """Returns a note for each record that can't be read and that nobody needs any more.

    Args:
        storage: Where they lie.
        decides: Slot of the manifest that stands.
    """
    notes = []
    for entry in storage.list("manifest-"):
        slot = slot_of(entry.key)
        if slot is None or slot == decides:
            continue
        try:
            data = storage.read(entry.key, 0, MAX_RECORD_BYTES + 1)
            decode_record(data, key=entry.key)
        except KeyMissingError:
            continue
        except CheckpointError:
            notes.append(f"{entry.key} is damaged, but nothing is decided by it")
    return notes


def index_problem(storage: Storage, key: str, table: ChunkTable) -> tuple[str, int] | None:
    """Returns what is wrong with the index of a Hugging Face folder, and its length.

    Only other readers go by it: ours takes what the files themselves say.
    """
    data = storage.read(key, 0, _MAX_INDEX_BYTES + 1)
    try:
        fields = json.loads(data)
        found: Any = fields["weight_map"]
        named = {str(name): str(file) for name, file in found.items()}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        return f"expected JSON with a weight_map, found {type(error).__name__}", len(data)
    held: dict[str, set[str]] = {name: set() for name in table.names}
    for tensor, file in zip(table.tensor.tolist(), table.file.tolist(), strict=True):
        held[table.names[tensor]].add(table.files[file])
    wrong = sorted(name for name, file in named.items() if file not in held.get(name, ()))
    wrong += sorted(held.keys() - named.keys())
    if not wrong:
        return None
    told = "; ".join(_told(name, named.get(name), held.get(name)) for name in wrong[:4])
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    return f"expected the files that hold each tensor, found {told}{more}", len(data)


def is_header_of(data: bytes, table: ChunkTable, rows: Sequence[int]) -> bool:
    """Whether these are the bytes that we write before the chunks of a safetensors file.

    Args:
        data: The file up to its first raw byte.
        table: What is stored.
        rows: All chunks in the file.
    """
    expected: dict[str, tuple[Entry, tuple[int, ...]]] = {}
    for row in rows:
        tensor = int(table.tensor[row])
        name, ndim = table.names[tensor], int(table.ndim[tensor])
        size = tuple(table.size[row, :ndim].tolist())
        begin = int(table.payload_offset[row]) - len(data)
        end = begin + int(table.payload_bytes[row])
        entry = Entry(name, table.dtypes[table.dtype[tensor]], size, begin, end)
        expected[name] = entry, tuple(table.offset[row, :ndim].tolist())
    try:
        found = parse_header(data)
        offsets = saved_offsets(found.metadata) or {}
        if {entry.name: (entry, offsets.get(entry.name)) for entry in found.entries} != expected:
            return False
        # Why: the order of empty tensors, which all begin at one byte, only the header knows.
        return header(found.entries, sharding_metadata(offsets)) == data
    except CheckpointError:
        return False


def _told(name: str, named: str | None, held: set[str] | None) -> str:
    where = "no file" if named is None else repr(named[:100])
    there = "none does" if not held else f"it is in {', '.join(sorted(held))}"
    return f"{where} named for {name[:100]!r}, but {there}"


def _attempt_of(metadata: bytes) -> str | None:
    """Returns the attempt that a `.metadata` of ours belongs to; None for any other bytes."""
    try:
        return decode_metadata(metadata).attempt
    except CheckpointError:
        return None
