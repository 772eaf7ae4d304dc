"""The structure of a chunk table that has the rows of few ranks, in JSON's terms, and its rest."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from ray_dcp.errors import InternalError
from ray_dcp.format.table_columns import damaged
from ray_dcp.plan.own_names import is_own
from ray_dcp.plan.structure import (
    MOST_BYTES,
    MOST_RANKS,
    Mesh,
    Structure,
    expand,
    is_expandable,
)
from ray_dcp.plan.values import ChunkTable, Int64Array

__all__ = ["expanded", "structure_from", "structure_to"]

_MOST_DIMENSIONS = 32
_MOST = 1 << 62
_FIELDS = {"leaders", "kind", "file_kind", "meshes", "part", "own"}
_MESH_FIELDS = {"strides", "lengths", "tensors", "offset", "steps"}


def structure_to(structure: Structure) -> dict[str, Any]:
    """Returns a structure in JSON's terms: class by class for runs of ranks."""
    kind = structure.kind
    ends = [*(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(kind)]
    return {
        "leaders": structure.leaders.tolist(),
        "kind": [[int(kind[low]), high - low] for low, high in pairwise([0, *ends])],
        "file_kind": structure.file_kind.tolist(),
        "meshes": [_mesh_to(mesh) for mesh in structure.meshes],
        "part": structure.part.tolist(),
        "own": structure.own.tolist(),
    }


def _mesh_to(mesh: Mesh) -> dict[str, Any]:
    return {
        "strides": list(mesh.strides),
        "lengths": list(mesh.lengths),
        "tensors": mesh.tensors.tolist(),
        "offset": mesh.offset.tolist(),
        "steps": mesh.steps.tolist(),
    }


def expanded(
    table: ChunkTable, structure: Structure, ranks: Int64Array | None = None
) -> ChunkTable:  # fmt: skip
    """Returns the chunk table of all ranks, or the chunks of some.

    Args:
        table: The rows of the leaders, checked.
        structure: What tells those of the others.
        ranks: As for `expand`.

    Raises:
        DamagedCheckpointError: They do not belong together, or the table would be larger.
    """
    if not is_expandable(table, structure):
        raise damaged(f"a table of at most {MOST_BYTES} bytes in memory", "a larger one")
    try:
        return expand(table, structure, ranks).table
    except InternalError as error:
        what = "files named after their leaders, with tensors of their part"
        raise damaged(what, error.message) from error


def structure_from(value: Any, table: ChunkTable) -> Structure:
    """Returns the structure of a table.

    Args:
        value: What `structure_to` gave.
        table: The rows of the leaders, checked.

    Raises:
        DamagedCheckpointError: They do not belong together.
    """
    if len(table.checks):
        raise damaged("no checksums beside a structure", "some")
    if not isinstance(value, dict) or set(value) != _FIELDS:
        raise damaged("the fields of a structure", "others")
    runs = _numbers(value["kind"], 2, 0)
    if runs.shape[1:] != (2,) or sum(runs[:, 1].tolist()) > MOST_RANKS:
        raise damaged(f"runs of at most {MOST_RANKS} ranks", "others")
    kind = np.repeat(runs[:, 0], runs[:, 1])
    leaders, file_kind = _numbers(value["leaders"], 1, 0), _numbers(value["file_kind"], 1, 0)
    count, ranks = len(leaders), np.arange(len(kind))
    fits = (
        count > 0
        and len(kind) > 0
        and (np.diff(leaders) > 0).all()
        and int(leaders[-1]) < len(kind)
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
    meshes, part = _meshes_from(value, table, count)
    sizes = np.bincount(part[kind], minlength=len(meshes)).tolist()
    for mesh, size in zip(meshes, sizes, strict=True):
        if size != prod(mesh.lengths):
            raise damaged(f"a mesh of {size} ranks", f"one of {prod(mesh.lengths)}")
    return Structure(
        meshes, part.astype(np.int32), leaders, kind.astype(np.int32), file_kind.astype(np.int32),
        _own_from(value, table, len(kind)),
    )  # fmt: skip


def _own_from(value: dict[str, Any], table: ChunkTable, world_size: int) -> Int64Array:
    """Returns the tensors that stand for one of each rank."""
    own = _numbers(value["own"], 1, 0)
    known = (np.diff(own) > 0).all() and (own < table.num_tensors).all()
    if not known or not all(is_own(table.names[one], world_size) for one in own.tolist()):
        raise damaged("tensors that each rank has for itself, by their names", "others")
    return own


def _meshes_from(
    value: dict[str, Any], table: ChunkTable, count: int
) -> tuple[tuple[Mesh, ...], Int64Array]:
    """Returns the meshes, and of which of them each of `count` classes is."""
    if not isinstance(value["meshes"], list):
        raise damaged("meshes of a structure", "something else")
    meshes = tuple(_mesh_from(one, table) for one in value["meshes"])
    part = _numbers(value["part"], 1, 0)
    if not meshes or len(part) != count or int(part.max()) >= len(meshes):
        raise damaged("a mesh for each class", "others")
    return meshes, part


def _mesh_from(value: Any, table: ChunkTable) -> Mesh:
    if not isinstance(value, dict) or set(value) != _MESH_FIELDS:
        raise damaged("the fields of a mesh", "others")
    strides, lengths = (_numbers(value[name], 1, 1) for name in ("strides", "lengths"))
    dimensions = len(lengths)
    if not 1 <= dimensions == len(strides) <= _MOST_DIMENSIONS:
        raise damaged(f"1 to {_MOST_DIMENSIONS} dimensions", f"{dimensions} and {len(strides)}")
    tensors = _numbers(value["tensors"], 1, 0)
    shape = (len(tensors), table.shape.shape[1])
    if len(tensors):
        offset, steps = _numbers(value["offset"], 2, 0), _numbers(value["steps"], 3, 0)
    else:
        # Lists without numbers do not tell how wide they are: these ranks save nothing.
        offset = np.zeros(shape, dtype=np.int64)
        steps = np.zeros((dimensions, *shape), dtype=np.int64)
    reach = np.abs(steps).max(axis=(1, 2), initial=0).astype(float) @ lengths.astype(float)
    fits = (
        (not len(tensors) or int(tensors.max()) < table.num_tensors)
        and len(np.unique(tensors)) == len(tensors)
        and offset.shape == shape
        and steps.shape == (dimensions, *shape)
        and reach + float(np.abs(offset).max(initial=0)) < _MOST
    )
    if not fits:
        raise damaged("a mesh that fits its table", "another")
    return Mesh(tuple(strides.tolist()), tuple(lengths.tolist()), tensors, offset, steps)


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
