"""`write_metadata`: makes the `.metadata` that a save left out. No torch, no ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from ray_dcp.collector import collector_paused
from ray_dcp.errors import CheckpointError, InvalidRequestError
from ray_dcp.format.metadata_out import encode_metadata
from ray_dcp.protocol.messages import Target
from ray_dcp.runtime.leftovers import target_of
from ray_dcp.runtime.publishing import publish, republish
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage
from ray_dcp.transfer.opening import find_checkpoint

__all__ = ["write_metadata"]


def write_metadata(
    path: str | os.PathLike[str] | Target,
    *,
    storage_options: Mapping[str, object] | None = None,
    opener: Callable[[Target], Storage] = open_storage,
) -> bool:
    """Writes DCP's `.metadata` for a checkpoint that was saved with `stock_metadata=False`.

    Where it is there already, or only missing or older than it should be, that is put right; so is
    a copy that was made without it. A save
    that commits meanwhile decides what is there in the end.

    Args:
        path: Path or URL of one checkpoint.
        storage_options: For the storage.
        opener: What opens the storage.

    Returns:
        Whether stock DCP can read the checkpoint now. False: a later save replaced it meanwhile and
        leaves `.metadata` out.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        InvalidRequestError: It is not ours, or in a container that stock DCP reads without.
        DamagedCheckpointError: Its chunk table is damaged.
        StorageError: The storage fails.

    Example:
        >>> from ray_dcp.options import SaveOptions
        >>> from ray_dcp.entrypoints import save
        >>> from ray_dcp.store.memory import MemoryStorage
        >>> storage = MemoryStorage("doc-metadata")
        >>> options = SaveOptions(stock_metadata=False)
        >>> _ = save({"step": 7}, checkpoint_id="memory://doc-metadata", options=options)
        >>> ".metadata" in {entry.key for entry in storage.list()}
        False
        >>> write_metadata("memory://doc-metadata")
        True
        >>> ".metadata" in {entry.key for entry in storage.list()}
        True
    """
    target = target_of(path, storage_options)
    storage = opener(target)
    try:
        found = find_checkpoint(storage, checkpoint_id=target.url)
        manifest = found.manifest
        if manifest is None or manifest.container != "torch_save":
            what = "stock DCP" if manifest is None else f"the container {manifest.container!r}"
            raise InvalidRequestError(
                f"expected a checkpoint of ray_dcp in the container 'torch_save', found one of "
                f"{what}, which has no use for another .metadata",
                key="path",
            )
        if manifest.metadata is not None:
            return republish(storage, target.url)
        with collector_paused():
            metadata = encode_metadata(
                found.decoded(), checkpoint_id=target.url, attempt=manifest.attempt
            )
        return not publish(storage, found.slot, metadata, target.url).superseded
    except CheckpointError as error:
        error.checkpoint_id = error.checkpoint_id or target.url
        raise
