"""Reads the numbers that a save left about its tensors; what they are is in `tensor_stats`."""

from __future__ import annotations

from ray_dcp.format.tensor_stats import MAX_STATS_BYTES, TensorStats, decode_stats, stats_key
from ray_dcp.store.storage import KeyMissingError, Storage

__all__ = ["read_stats"]


def read_stats(storage: Storage, attempt: str | None) -> dict[str, TensorStats]:
    """Returns the numbers of an attempt by FQN; none when its save left none.

    Args:
        storage: Of the checkpoint.
        attempt: That is committed there; None for a checkpoint that is not ours.

    Raises:
        DamagedCheckpointError: They can't be read; the checkpoint does not need them.
        StorageError: The storage refused.
    """
    if attempt is None:
        return {}
    key = stats_key(attempt)
    try:
        return decode_stats(storage.read(key, 0, MAX_STATS_BYTES + 1), key=key)
    except KeyMissingError:
        return {}
