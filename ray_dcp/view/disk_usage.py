"""The disk usage of a run, by owner of the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ray_dcp.commit_protocol.garbage import owner_of
from ray_dcp.format.names import SHARED_FOLDER
from ray_dcp.format.step_info import info_slot
from ray_dcp.store.opening import open_storage
from ray_dcp.view.run_listing import (
    FOREIGN,
    folders_above,
    readable_entries,
)
from ray_dcp.view.run_view import RunView, StepView

Kind = Literal["data", "left", "records", "other"]
KINDS: tuple[Kind, ...] = ("data", "left", "records", "other")


@dataclass(frozen=True)
class Usage:
    """Disk usage of one folder."""

    name: str
    """Name of a checkpoint, or of another file or folder."""
    num_bytes: Mapping[str, int]
    """Number of bytes by kind. `data`: data of committed checkpoints. `left`: files of attempts
    that did not commit. `records`: manifests, chunk tables, `.metadata` and infos of steps.
    `other`: files of other programs."""
    shared_bytes: int = 0
    """Number of these bytes that take no disk space, as a file that was counted before has the same
    bytes on the disk (hard links)."""

    @property
    def total_bytes(self) -> int:
        """Disk space of all kinds, in bytes."""
        return sum(self.num_bytes.values()) - self.shared_bytes


def usage_of(run: RunView) -> list[Usage]:
    """Returns the disk usage of each checkpoint of a run, then of its other files and folders.

    Args:
        run: The run as it was listed.

    Raises:
        StorageError: The storage can't be listed.

    Complexity:
        One listing.
    """
    by_name = {step.name: step for step in run}
    found: dict[str, Counter[str]] = {name: Counter() for name in by_name}
    seen: set[object] = set()
    for entry in readable_entries(open_storage(run.place))[0]:
        # The deepest checkpoint that contains the file.
        above = (folder for folder in folders_above(entry.key) if folder in by_name)
        name = next(above, "." if "." in by_name else None)
        if name is None:
            above_it, shared, _ = f"/{entry.key}".partition(f"/{SHARED_FOLDER}/")
            name = entry.key.partition("/")[0] + ("/" if "/" in entry.key else "")
            name = f"{above_it}{shared}"[1:] if shared else name
            kind: Kind = "records" if shared else "other"
        else:
            key = entry.key if name == "." else entry.key[len(name) + 1 :]
            kind = _kind(key, by_name[name])
        found.setdefault(name, Counter())[kind] += entry.num_bytes
        if entry.shares is not None:
            found[name]["shared"] += entry.num_bytes if entry.shares in seen else 0
            seen.add(entry.shares)
    return [
        Usage(name, {kind: counts[kind] for kind in KINDS}, counts["shared"])
        for name, counts in found.items()
    ]


def _kind(key: str, step: StepView) -> Kind:
    manifest = step.manifest
    if step.state in FOREIGN:
        return "records" if key == ".metadata" or key.endswith(".json") else "data"
    if manifest is not None and any(entry.key == key for entry in manifest.files):
        return "data"
    if info_slot(key) is not None:
        return "records"
    owned = owner_of(key)
    if owned is None:
        return "other"
    is_current = manifest is not None and owned.attempt == manifest.attempt
    is_small = owned.kind in ("record", "metadata")
    return "records" if is_small or (is_current and owned.kind != "data") else "left"
