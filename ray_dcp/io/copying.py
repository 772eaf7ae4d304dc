"""Copies a checkpoint to another place, file by file: what commits it comes last.

Bytes are copied as they are, so that checksums and digests hold there as well. No torch, no ray.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from ray_dcp.errors import CheckpointError, CheckpointExistsError, DamagedCheckpointError
from ray_dcp.format.manifest import record_key, slot_of
from ray_dcp.format.step_info import info_slot
from ray_dcp.io.checkpoint import METADATA_KEY, Checkpoint
from ray_dcp.io.threads import Stop, run_tasks
from ray_dcp.store.opening import Told
from ray_dcp.store.storage import KeyMissingError, PartWriter, Storage

_PIECE_BYTES = 8 << 20
_NUM_THREADS = 4
_LEAVING_S = 30.0
"""How long threads that were asked to stop are waited for, in seconds."""


@dataclass(frozen=True)
class CopyPlan:
    """What belongs to a checkpoint, in the order in which it is written elsewhere."""

    files: tuple[tuple[str, int], ...]
    """Keys and lengths of data files and chunk tables, and of what is told beside them."""
    last: tuple[tuple[str, bytes], ...]
    """What makes it a checkpoint, as it was read: the record, `.metadata`."""

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(n for _, n in self.files) + sum(len(data) for _, data in self.last)


def plan_copy(storage: Storage, checkpoint: Checkpoint) -> CopyPlan:
    """Returns what belongs to a checkpoint.

    Args:
        storage: Where it lies.
        checkpoint: As opened.

    Raises:
        DamagedCheckpointError: A file is missing or has another length.
        StorageError: The storage can't be read.
    """
    found = {entry.key: entry.num_bytes for entry in storage.list()}
    manifest, attempt = checkpoint.manifest, checkpoint.attempt
    if manifest is None:
        keys = list(dict.fromkeys(checkpoint.table.files))
        index = [key for key in found if key.endswith(".index.json") and "/" not in key]
        beside = index if checkpoint.kind == "safetensors" else []
        last = [(METADATA_KEY, checkpoint.record)] if checkpoint.kind == "stock" else []
        files = _checked(dict.fromkeys(keys), found)
        return CopyPlan((*files, *((key, found[key]) for key in beside)), tuple(last))
    entries = {entry.key: entry.num_bytes for entry in (*manifest.files, manifest.table)}
    files = _checked(entries, found)
    infos = sorted(n for key in found if (n := info_slot(key)) is not None and n < checkpoint.slot)
    told = [key for key in found if infos and info_slot(key) == infos[-1]]
    told += [key for key in found if attempt and f".{attempt}." in key and _is_beside(key)]
    last = [(record_key(checkpoint.slot), checkpoint.record)]
    if manifest.metadata is not None:
        with suppress(KeyMissingError):
            data = storage.read(METADATA_KEY)
            if not checkpoint.metadata_is_stale:
                last.append((METADATA_KEY, data))
    beside = [key for key in told if key not in entries]
    return CopyPlan((*files, *((key, found[key]) for key in beside)), tuple(last))


def copy_checkpoint(
    source: Storage, plan: CopyPlan, target: Storage, *, told: Told | None = None
) -> None:
    """Writes a checkpoint to another place; it appears there when all of it is durable.

    When it fails or is interrupted, what was written there is deleted again.

    Args:
        source: Where it lies.
        plan: Of `plan_copy`.
        target: Where it goes; no checkpoint may be there, nor what a save left of one.
        told: Called with bytes copied so far and in all, from any thread.

    Raises:
        CheckpointExistsError: Something of a checkpoint is there.
        DamagedCheckpointError: A file is shorter than it was when planned.
        StorageError: A storage failed.
    """
    check_free(target)
    copying = _Copying(source, target, plan.num_bytes, told)
    try:
        run_tasks(plan.files, copying.file, min(_NUM_THREADS, len(plan.files)), copying.stop)
        for key, data in plan.last:
            copying.begun.append(key)
            target.write(key, data, create=slot_of(key) is not None)
            copying.count(len(data))
    except BaseException as error:
        copying.undo(error)
        raise


def check_free(target: Storage) -> None:
    """Checks that nothing of a checkpoint is at a place.

    Raises:
        CheckpointExistsError: There is.
    """
    there = [
        entry.key
        for entry in target.list()
        if entry.key == METADATA_KEY
        or slot_of(entry.key) is not None
        or entry.key.endswith((".distcp", ".safetensors"))
    ]
    if there:
        raise CheckpointExistsError(
            f"expected nothing of a checkpoint in {target.url}, found {there[0]}"
            f"{f' and {len(there) - 1} more files' if len(there) > 1 else ''}; choose another "
            f"place, or delete it first",
            checkpoint_id=target.url,
        )


def _is_beside(key: str) -> bool:
    return key.endswith(".json") and slot_of(key) is None and "/" not in key


def _checked(
    expected: dict[str, int | None] | dict[str, int], found: dict[str, int]
) -> list[tuple[str, int]]:
    for key, num_bytes in expected.items():
        if found.get(key) is None or num_bytes not in (None, found[key]):
            what = "it is missing" if key not in found else f"it has {found[key]} bytes"
            raise DamagedCheckpointError(
                f"expected {key} with {num_bytes or 'its'} bytes, but {what}; copy another step",
                key=key,
            )
    return [(key, found[key]) for key in expected]


class _Copying:
    """One copy that is under way."""

    def __init__(self, source: Storage, target: Storage, total: int, told: Told | None) -> None:
        self.stop = Stop()
        self.begun: list[str] = []
        self._source, self._target = source, target
        self._total, self._told = total, told
        self._done = 0
        self._active = 0
        self._quiet = threading.Condition()

    def file(self, item: tuple[str, int]) -> None:
        """Copies one file."""
        key, num_bytes = item
        with self._quiet:
            self._active += 1
            self.begun.append(key)
        writer: PartWriter | None = None
        try:
            writer = self._target.open_writer(key)
            for start in range(0, num_bytes, _PIECE_BYTES):
                if self.stop.asked:
                    return
                length = min(_PIECE_BYTES, num_bytes - start)
                piece = self._source.read(key, start, length)
                if len(piece) != length:
                    raise DamagedCheckpointError(
                        f"expected {num_bytes} bytes, but the file became shorter", key=key
                    )
                writer.write(piece)
                self.count(length)
            writer.commit()
        finally:
            if writer is not None:
                writer.abort()
            with self._quiet:
                self._active -= 1
                self._quiet.notify_all()

    def count(self, num_bytes: int) -> None:
        """Tells how far it is."""
        with self._quiet:
            self._done += num_bytes
            if self._told is not None:
                self._told(self._done, self._total)

    def undo(self, error: BaseException) -> None:
        """Stops the other threads, and deletes what was written, what commits it first."""
        self.stop.because(error)
        with self._quiet:
            self._quiet.wait_for(lambda: not self._active, _LEAVING_S)
        with suppress(CheckpointError):
            _delete_in_order(self._target, reversed(self.begun))


def _delete_in_order(target: Storage, keys: Iterable[str]) -> None:
    ordered = list(keys)
    decisive = [key for key in ordered if slot_of(key) is not None or key == METADATA_KEY]
    target.delete(decisive)
    target.delete([key for key in ordered if key not in decisive])
