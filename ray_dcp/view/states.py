"""What there is to say about a folder, from the names of its files and its records: pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ray_dcp.format.manifest import DeleteRecord, Manifest
from ray_dcp.protocol.sweep import attempts_of
from ray_dcp.transfer.slots import Slots
from ray_dcp.view.file_names import METADATA, OUR_FILE, STOCK_FILE

__all__ = ["FOREIGN", "State", "StateFound", "state_of"]

State = Literal["committed", "in flight", "aborted", "damaged", "stock", "safetensors", "deleted"]

FOREIGN: tuple[State, ...] = ("stock", "safetensors")
"""Checkpoints of other programs: read like ours, and never deleted."""


@dataclass(frozen=True)
class StateFound:
    """State of a folder; see `ListedCheckpoint`."""

    state: State
    detail: str = ""
    manifest: Manifest | None = None
    in_flight: tuple[str, ...] = ()


def state_of(
    files: Mapping[str, int], slots: Slots | None = None, *, standing: Manifest | None = None
) -> StateFound:
    """Returns the state of a folder.

    Args:
        files: Lengths of what lies in it, by key.
        slots: Its records, as far as they decide; or
        standing: the manifest that decides, where that is known.
    """
    slots = slots or Slots()
    decides = None if slots.decides is None else slots.decides.record
    if standing is None and isinstance(decides, Manifest):
        standing = decides
    named = {record.attempt for record in slots.records.values()}
    told = decides if standing is None else standing
    decided = named | ({v.attempt for v in told.decided} if told is not None else set())
    known = decided | ({standing.attempt} if standing is not None else set())
    pending = tuple(sorted(attempts_of(files) - known))
    if standing is not None:
        return _committed(files, standing, pending)
    if isinstance(decides, DeleteRecord):
        return _deleted(files, pending)
    return _nothing(files, pending, aborted=bool(slots.used))


def _committed(
    files: Mapping[str, int], standing: Manifest, pending: tuple[str, ...]
) -> StateFound:
    wrong = [
        f"{entry.key} is missing" if entry.key not in files
        else f"{entry.key} has {files[entry.key]} bytes instead of {entry.num_bytes}"
        for entry in (*standing.files, standing.table)
        if files.get(entry.key) != entry.num_bytes
    ]  # fmt: skip
    return StateFound(
        "damaged" if wrong else "committed", "; ".join(wrong), standing, in_flight=pending
    )


def _deleted(files: Mapping[str, int], pending: tuple[str, ...]) -> StateFound:
    found = _nothing(files, pending, aborted=True)
    if found.state in FOREIGN:
        return found  # saved since
    if pending:
        return StateFound("in flight", "it was deleted, and is being saved again", None, pending)
    left = any(OUR_FILE.fullmatch(key) for key in files)
    return StateFound("deleted", "files are left: ray_dcp.collect removes them" if left else "")


def _nothing(files: Mapping[str, int], pending: tuple[str, ...], *, aborted: bool) -> StateFound:
    # Why by name: `.metadata` of a large checkpoint takes seconds to read.
    ours = any(OUR_FILE.fullmatch(key) for key in files)
    theirs = any(STOCK_FILE.fullmatch(key) for key in files)
    if METADATA in files and (theirs or not ours):
        return StateFound("stock", "", in_flight=pending)
    if pending or theirs or (ours and not aborted):
        missing = "no .metadata" if theirs and not ours else "no manifest"
        return StateFound("in flight", f"it has {missing}", None, pending)
    if any(key.endswith(".safetensors") for key in files) and not ours:
        return StateFound("safetensors")
    return StateFound("aborted", "it has records of saves, but none of a commit that stands")
