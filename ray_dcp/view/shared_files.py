"""What the folder `.manager` of a run has about its steps, most of it in the names of its files."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.manifest import MAX_RECORD_BYTES
from ray_dcp.format.names import (
    CATALOGUE,
    MAX_NOTE_BYTES,
    READING,
    marked_damaged,
    noted_step,
    tags_in,
)
from ray_dcp.format.recorded_metrics import latest_values, recorded_in
from ray_dcp.format.step_info import CatalogueRow, decode_catalogue
from ray_dcp.format.verdicts import trusted_by
from ray_dcp.store.storage import Storage, read_if_there

logger = logging.getLogger(__name__)

_LEASE = re.compile(rf"{READING}(\d{{1,18}})\..+")


@dataclass(frozen=True)
class SharedFiles:
    """What the names of the files in `.manager` say of the steps of a run."""

    tags: Mapping[int, frozenset[str]] = field(default_factory=dict)
    recorded: Mapping[tuple[int, str], Mapping[str, float]] = field(default_factory=dict)
    """Metrics that were recorded after the save, by step and attempt."""
    marks: frozenset[tuple[int, str]] = frozenset()
    """Step and attempt of each damage mark."""
    read_by: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Keys of the reader leases on each step."""
    trust: str = ""
    """Name by which steps are trusted."""

    @classmethod
    def of(cls, keys: Collection[str]) -> SharedFiles:
        """Returns what the keys of the files say, which are relative to the folder."""
        read_by: dict[int, tuple[str, ...]] = {}
        for lease in filter(None, map(_LEASE.fullmatch, keys)):
            step = int(lease[1])
            read_by[step] = (*read_by.get(step, ()), lease[0])
        return cls(
            tags_in(keys),
            latest_values(recorded_in(keys)),
            marked_damaged(keys),
            read_by,
            trusted_by(keys),
        )


def read_notes(storage: Storage, folder: str, keys: Collection[str]) -> dict[int, str]:
    """Returns the notes of steps.

    Args:
        storage: The storage of the run, or of a folder above it.
        folder: The folder `.manager`, with a slash at its end.
        keys: Keys of its files.

    Raises:
        StorageError: A note can't be read.
    """
    noted = {step: key for key in keys if (step := noted_step(key)) is not None}
    return {
        step: (read_if_there(storage, f"{folder}{key}", MAX_NOTE_BYTES) or b"").decode(
            "utf-8", "replace"
        )
        for step, key in noted.items()
    }


def read_catalogue_rows(
    storage: Storage, folder: str, keys: Collection[str]
) -> dict[str, CatalogueRow]:
    """Returns the rows of the catalogue file by folder; none if it is damaged or not there.

    They only save reads: a row is used only if the folder's records are those that it was made
    from.

    Args:
        storage: As for `read_notes`.
        folder: As for `read_notes`.
        keys: As for `read_notes`.

    Raises:
        StorageError: It can't be read.
    """
    data = None
    if CATALOGUE in keys:
        data = read_if_there(storage, f"{folder}{CATALOGUE}", MAX_RECORD_BYTES)
    try:
        return {} if data is None else {row.name: row for row in decode_catalogue(data)}
    except DamagedCheckpointError as error:
        logger.info("The catalogue of %s is not used: %s", storage.url, error)
        return {}
