"""The structure of a chunk table that has the rows of few ranks, in JSON's terms, and its rest."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from ray_dcp.errors import InternalError
from ray_dcp.format.table_columns import damaged
from ray_dcp.plan.structure import MOST_NUMBERS, MOST_RANKS, Structure, expand, is_expandable
from ray_dcp.plan.values import ChunkTable, Int64Array

__all__ = ["expanded", "structure_from", "structure_to"]

_MOST_DIMENSIONS = 32
_MOST = 1 << 62
_FIELDS = {"strides", "lengths", "offset", "steps", "leaders", "kind", "file_kind"}


def structure_to(structure: Structure) -> dict[str, Any]:
    """Returns a structure in JSON's terms: class by class for runs of ranks."""
    kind = structure.kind
    ends = [*(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(kind)]
    return {
        "strides": list(structure.strides),
        "lengths": list(structure.lengths),
        "offset": structure.offset.tolist(),
        "steps": structure.steps.tolist(),
        "leaders": structure.leaders.tolist(),
        "kind": [[int(kind[low]), high - low] for low, high in pairwise([0, *ends])],
        "file_kind": structure.file_kind.tolist(),
    }


def expanded(table: ChunkTable, value: Any) -> ChunkTable:
    """Returns the chunk table of all ranks.

    Args:
        table: The rows of the leaders, checked.
        value: What `structure_to` gave.

    Raises:
        DamagedCheckpointError: They do not belong together, or the table would be larger.
    """
    if len(table.checks):
        raise damaged("no checksums beside a structure", "some")
    structure = structure_from(value, table)
    if not is_expandable(table, structure):
        raise damaged(f"a table of at most {MOST_NUMBERS} numbers", "a larger one")
    try:
        return expand(table, structure).table
    except InternalError as error:
        raise damaged("files named after their leaders", str(error.key)) from error


def structure_from(value: Any, table: ChunkTable) -> Structure:
    """Returns the structure of a table.

    Args:
        value: What `structure_to` gave.
        table: The rows of the leaders, checked.

    Raises:
        DamagedCheckpointError: They do not belong together.
    """
    if not isinstance(value, dict) or set(value) != _FIELDS:
        raise damaged("the fields of a structure", "others")
    strides, lengths = (_numbers(value[name], 1, 1) for name in ("strides", "lengths"))
    dimensions = len(lengths)
    if not 1 <= dimensions == len(strides) <= _MOST_DIMENSIONS:
        raise damaged(f"1 to {_MOST_DIMENSIONS} dimensions", f"{dimensions} and {len(strides)}")
    offset, steps = _numbers(value["offset"], 2, 0), _numbers(value["steps"], 3, 0)
    runs = _numbers(value["kind"], 2, 0)
    if runs.shape[1:] != (2,) or sum(runs[:, 1].tolist()) > MOST_RANKS:
        raise damaged(f"runs of at most {MOST_RANKS} ranks", "others")
    world_size = 1
    for length in lengths.tolist():
        world_size *= length
    kind = np.repeat(runs[:, 0], runs[:, 1])
    leaders, file_kind = _numbers(value["leaders"], 1, 0), _numbers(value["file_kind"], 1, 0)
    count = len(leaders)
    ranks = np.arange(len(kind))
    reach = np.abs(steps).max(axis=(1, 2), initial=0).astype(float) @ lengths.astype(float)
    fits = (
        world_size == len(kind)
        and offset.shape == table.shape.shape
        and steps.shape == (dimensions, *table.shape.shape)
        and reach + float(np.abs(offset).max(initial=0)) < _MOST
        and count > 0
        and (np.diff(leaders) > 0).all()
        and int(leaders[-1]) < world_size
        and len(kind) > 0
        and int(kind.max()) < count
        and np.array_equal(kind[leaders], np.arange(count))
        and (leaders[kind] <= ranks).all()
        and len(file_kind) == len(table.files)
        and (np.diff(file_kind) >= 0).all()
        and (not len(file_kind) or int(file_kind[-1]) < count)
        and (np.diff(table.file) >= 0).all()
    )
    if not fits:
        raise damaged("a structure that fits its table", "another")
    return Structure(
        tuple(strides.tolist()), tuple(lengths.tolist()), offset, steps, leaders,
        kind.astype(np.int32), file_kind.astype(np.int32),
    )  # fmt: skip


def _numbers(value: Any, ndim: int, least: int) -> Int64Array:
    """Returns nested lists of whole numbers as an array."""
    flat: list[Any] = [value]
    for _ in range(ndim):
        if not all(isinstance(one, list) for one in flat):
            raise damaged("lists of numbers in a structure", "something else")
        flat = [one for inner in flat for one in inner]
    if not all(type(one) is int and least <= one < _MOST for one in flat):
        raise damaged(f"numbers from {least} on in a structure", "others")
    try:
        found = np.array(value, dtype=np.int64)
    except ValueError as error:
        raise damaged("lists of one length in a structure", "others") from error
    if found.ndim != ndim:
        raise damaged(f"{ndim} dimensions in a structure", str(found.ndim))
    return found
