"""What a `.metadata` says that lies beside our records: whether it is ours, stale or foreign."""

from __future__ import annotations

from ray_dcp.errors import CheckpointError, DamagedCheckpointError, UncommittedCheckpointError
from ray_dcp.format.checksums import digest_bytes
from ray_dcp.format.manifest import Manifest, record_key
from ray_dcp.format.metadata_in import ForeignMetadata, decode_metadata
from ray_dcp.format.metadata_out import ATTEMPT_ATTRIBUTE, encode_metadata
from ray_dcp.plan.values import ChunkTable

__all__ = ["METADATA_KEY", "decode_foreign", "is_ours", "is_stale", "projects"]

METADATA_KEY = ".metadata"


def is_ours(metadata: bytes) -> bool:
    """Tells whether ray_dcp wrote a `.metadata`; false for what can't be read.

    Args:
        metadata: Its bytes.
    """
    # Why first by a search: decoding costs 20 us a tensor.
    if ATTEMPT_ATTRIBUTE.encode() not in metadata:
        return False
    try:
        return decode_metadata(metadata).attempt is not None
    except CheckpointError:
        return False


def decode_foreign(metadata: bytes) -> ForeignMetadata:
    """Returns what a `.metadata` says where no commit of ours stands.

    Args:
        metadata: Its bytes.

    Raises:
        UncommittedCheckpointError: It is of a save of ours.
        DamagedCheckpointError: It can't be read.
    """
    foreign = decode_metadata(metadata)
    if foreign.attempt is not None:
        raise UncommittedCheckpointError(
            f"expected a manifest beside .metadata, found none: the save {foreign.attempt} never "
            f"committed, or its manifest was deleted; load an earlier step",
            key=METADATA_KEY,
        )
    return foreign


def is_stale(slot: int, manifest: Manifest, metadata: bytes | None) -> bool:
    """Tells whether `.metadata` does not project the manifest although it should.

    Args:
        slot: Of the manifest, for messages.
        manifest: That stands.
        metadata: Its bytes; None when there is none.

    Raises:
        DamagedCheckpointError: It is a foreign one, which the manifest does not replace.
    """
    expected = None if manifest.metadata is None else manifest.metadata.digest
    if metadata is None:
        return expected is not None
    found = digest_bytes(metadata).hex()
    if found == expected:
        return False
    if found != manifest.replaced_metadata:
        _refuse_foreign(slot, manifest, metadata)
    return expected is not None


def projects(metadata: bytes, attempt: str, table: ChunkTable) -> bool:
    """Tells whether a `.metadata` is that of a checkpoint, wherever that lay when it was made.

    A `.metadata` names its place, so that one that is made of a copy has another digest than the
    manifest says.

    Args:
        metadata: Its bytes.
        attempt: That was committed.
        table: Of the checkpoint.

    Complexity:
        That of `decode_metadata` and `encode_metadata`.
    """
    # Why first by a search: decoding costs 20 us a tensor.
    if attempt.encode() not in metadata:
        return False
    try:
        told = decode_metadata(metadata)
    except CheckpointError:
        return False
    if told.attempt != attempt or told.checkpoint_id is None:
        return False
    return encode_metadata(table, checkpoint_id=told.checkpoint_id, attempt=attempt) == metadata


def _refuse_foreign(slot: int, manifest: Manifest, metadata: bytes) -> None:
    try:
        if decode_metadata(metadata).attempt is not None:
            return  # an earlier save of ours
        what = "one of another program"
    except DamagedCheckpointError as exc:
        what = f"one that can't be read ({exc.message})"
    key = record_key(slot)
    raise DamagedCheckpointError(
        f"two checkpoints claim this place: {key} of the save {manifest.attempt}, and "
        f"a .metadata that does not belong to it, but is {what}. If stock DCP saved here last, "
        f"move the manifest-*.json files away to load what it saved; if not, move .metadata away "
        f"to load the save {manifest.attempt}",
        key=METADATA_KEY,
    )
