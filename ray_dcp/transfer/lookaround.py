"""Says what is at a place where no checkpoint stands, and where one might be instead."""

from __future__ import annotations

import re
import time

from ray_dcp.errors import CheckpointNotFoundError, UncommittedCheckpointError
from ray_dcp.format.manifest import DeleteRecord, record_key, slot_of
from ray_dcp.store.storage import Storage
from ray_dcp.transfer.slots import Deciding

__all__ = ["not_found"]

_SHOWN = 6
_RANK_METADATA = re.compile(r"__\d+\.metadata")
_DIGITS = re.compile(r"(\d+)")


def not_found(storage: Storage, decides: Deciding | None = None) -> CheckpointNotFoundError:
    """Returns the error for a place without manifest, `.metadata` and plain files.

    Args:
        storage: Where to look; everything below its root is listed.
        decides: The record that decides what stands there.

    Returns:
        An `UncommittedCheckpointError` when there are files of a save.

    Raises:
        StorageError: It can't be listed.
    """
    keys = [entry.key for entry in storage.list()]
    here = [key for key in keys if "/" not in key]
    if not keys:
        return CheckpointNotFoundError(
            f"expected a checkpoint in {storage.url}, but there is nothing; check the path"
        )
    if any(_RANK_METADATA.fullmatch(key) for key in here):
        return CheckpointNotFoundError(
            f"expected one .metadata in {storage.url}, found one for every rank: it was saved "
            f"with use_collectives=False, which only the same ranks can load; save it again with "
            f"collectives"
        )
    folders = _checkpoint_folders(keys)
    if decides is not None and isinstance(decides.record, DeleteRecord):
        return CheckpointNotFoundError(
            f"expected a checkpoint in {storage.url}, but it was deleted"
            f"{_moment(decides.record.created_s)} ({record_key(decides.slot)} says so: "
            f"{decides.record.reason}); load another one" + _hint(folders)
        )
    if any(slot_of(key) is not None or key.endswith(".distcp") for key in here):
        return UncommittedCheckpointError(
            f"the save in {storage.url} never committed: there are {len(here)} files, but neither "
            f"a committed manifest nor .metadata; load an earlier step" + _hint(folders)
        )
    return CheckpointNotFoundError(
        f"expected a checkpoint in {storage.url}, found {_content(keys)}"
        + (_hint(folders) or "; check the path")
    )


def _moment(created_s: float) -> str:
    try:
        return time.strftime(" on %Y-%m-%d at %H:%M:%S UTC", time.gmtime(created_s))
    except (OverflowError, OSError, ValueError):
        return ""  # what was stored is no time at all


def _checkpoint_folders(keys: list[str]) -> list[str]:
    folders = set()
    for key in keys:
        folder, _, name = key.rpartition("/")
        if folder and (
            name == ".metadata" or name.endswith(".safetensors") or slot_of(name) is not None
        ):
            folders.add(folder)
    return sorted(folders, key=_natural)


def _hint(folders: list[str]) -> str:
    if not folders:
        return ""
    return f"; sub-folders that look like checkpoints: {_shortened(folders)}: load one of them"


def _content(keys: list[str]) -> str:
    entries = {key.partition("/")[0] + ("/" if "/" in key else "") for key in keys}
    return _shortened(sorted(entries, key=_natural))


def _shortened(names: list[str]) -> str:
    if len(names) <= _SHOWN:
        return ", ".join(names)
    half = _SHOWN // 2
    return f"{', '.join(names[:half])}, … {', '.join(names[-half:])} ({len(names)} in all)"


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts `step-9` before `step-10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name)]
