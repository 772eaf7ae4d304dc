"""What a location without a checkpoint has, with where one might be instead."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from ray_dcp.errors import (
    CheckpointNotFoundError,
    UncommittedCheckpointError,
)
from ray_dcp.format.manifest import (
    DeleteRecord,
    record_key,
    slot_of,
)
from ray_dcp.io.records import Deciding
from ray_dcp.store.storage import Storage

_SHOWN = 6
_RANK_METADATA = re.compile(r"__\d+\.metadata")
_DIGITS = re.compile(r"\d+")


def not_found(storage: Storage, decides: Deciding | None = None) -> CheckpointNotFoundError:
    """Returns the error for a location without manifest, `.metadata` and plain files.

    Args:
        storage: Storage of the location; everything below its root is listed.
        decides: The deciding record of the location.

    Returns:
        An `UncommittedCheckpointError` if there are files of a save.

    Raises:
        StorageError: The storage can't be listed.
    """
    keys = [entry.key for entry in storage.list()]
    here = [key for key in keys if "/" not in key]
    if not keys:
        is_address = "@" in storage.url.rpartition("/")[2]
        way_out = (
            f"RUN@STEP is read by ray_dcp.open, and ray_dcp.open({storage.url!r}).url is a path"
            if is_address
            else "check the path"
        )
        return CheckpointNotFoundError(
            f"expected a checkpoint in {storage.url}, but there is nothing; {way_out}"
        )
    if any(_RANK_METADATA.fullmatch(key) for key in here):
        return CheckpointNotFoundError(
            f"expected one .metadata in {storage.url}, found one for every rank: it was saved "
            f"with use_collectives=False, which only the same ranks can load; save it again with "
            f"collectives"
        )
    if decides is not None and isinstance(decides.record, DeleteRecord):
        return CheckpointNotFoundError(
            f"expected a checkpoint in {storage.url}, but it was deleted"
            f"{_format_time(decides.record.created_s)} ({record_key(decides.slot)} says so: "
            f"{decides.record.reason}); load another one" + _folders_hint(keys)
        )
    if any(slot_of(key) is not None or key.endswith(".distcp") for key in here):
        return UncommittedCheckpointError(
            f"the save in {storage.url} never committed: there are {len(here)} files, but neither "
            f"a committed manifest nor .metadata; load an earlier step" + _folders_hint(keys)
        )
    return CheckpointNotFoundError(
        f"expected a checkpoint in {storage.url}, found "
        + _list_names({key.partition("/")[0] + "/" * ("/" in key) for key in keys})
        + (_folders_hint(keys) or "; check the path")
    )


def _format_time(created_s: float) -> str:
    try:
        return time.strftime(" on %Y-%m-%d at %H:%M:%S UTC", time.gmtime(created_s))
    except (OverflowError, OSError, ValueError):
        return ""  # the stored value is not a time


def _folders_hint(keys: list[str]) -> str:
    """Returns a text that names the folders below a place that look like checkpoints."""
    parts = [key.rpartition("/") for key in keys]
    folders = {
        folder
        for folder, _, name in parts
        if name == ".metadata" or name.endswith(".safetensors") or slot_of(name) is not None
    }
    names = _list_names(folders - {""})
    return f"; sub-folders that look like checkpoints: {names}: load one of them" if names else ""


def _list_names(names: Iterable[str]) -> str:
    """Returns names as a list in which `step-9` comes before `step-10`."""
    found = sorted(names, key=lambda name: _DIGITS.sub(lambda one: one[0].zfill(20), name))
    if len(found) <= _SHOWN:
        return ", ".join(found)
    half = _SHOWN // 2
    return f"{', '.join(found[:half])}, … {', '.join(found[-half:])} ({len(found)} in all)"
