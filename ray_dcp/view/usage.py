"""What takes how much space in a run, by whose the files are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ray_dcp.format.run_files import SHARED_FOLDER
from ray_dcp.format.step_info import info_slot
from ray_dcp.protocol.sweep import owner_of
from ray_dcp.store.opening import open_storage
from ray_dcp.view.run_view import RunView, StepView
from ray_dcp.view.states import FOREIGN

__all__ = ["KINDS", "Usage", "usage_of"]

Kind = Literal["data", "left", "records", "other"]
KINDS: tuple[Kind, ...] = ("data", "left", "records", "other")


@dataclass(frozen=True)
class Usage:
    """Bytes of one folder."""

    name: str
    """Of the checkpoint, or of another folder."""
    num_bytes: Mapping[str, int]
    """By kind: `data` of what stands; `left`: of attempts that do not stand; `records`: manifests,
    chunk tables, `.metadata` and what is told about a step; `other`: what other programs wrote."""

    @property
    def total_bytes(self) -> int:
        """Of all kinds."""
        return sum(self.num_bytes.values())


def usage_of(run: RunView) -> list[Usage]:
    """Returns what takes how much space, checkpoint by checkpoint, then what else is in the run.

    Args:
        run: As it was listed.

    Raises:
        StorageError: The storage refused to list.

    Complexity:
        One listing.
    """
    by_name = {step.name: step for step in run}
    found: dict[str, Counter[str]] = {name: Counter() for name in by_name}
    for entry in open_storage(run.place).list():
        name = _owner(entry.key, by_name)
        if name is None:
            top = entry.key.partition("/")[0] + ("/" if "/" in entry.key else "")
            kind = "records" if top == f"{SHARED_FOLDER}/" else "other"
            found.setdefault(top, Counter())[kind] += entry.num_bytes
        else:
            key = entry.key if name == "." else entry.key[len(name) + 1 :]
            found[name][_kind(key, by_name[name])] += entry.num_bytes
    return [Usage(name, {kind: counts[kind] for kind in KINDS}) for name, counts in found.items()]


def _owner(key: str, by_name: Mapping[str, StepView]) -> str | None:
    """Returns the deepest checkpoint that a file lies in."""
    folder = key
    while "/" in folder:
        folder = folder.rpartition("/")[0]
        if folder in by_name:
            return folder
    return "." if "." in by_name else None


def _kind(key: str, step: StepView) -> Kind:
    manifest = step.listed.manifest
    if step.state in FOREIGN:
        return "records" if key == ".metadata" or key.endswith(".json") else "data"
    if manifest is not None and any(entry.key == key for entry in manifest.files):
        return "data"
    if info_slot(key) is not None:
        return "records"
    owned = owner_of(key)
    if owned is None:
        return "other"
    standing = manifest is not None and owned.attempt == manifest.attempt
    is_small = owned.kind in ("record", "metadata")
    return "records" if is_small or (standing and owned.kind != "data") else "left"
