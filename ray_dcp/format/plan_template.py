"""A plan as a file: what it needs to be used again by another process, named by what it is of.

A template has no attempt, epoch or target in it, and nothing of the content of any item. It is not
trusted: it counts only if its bytes have the digest that it tells, all numbers are within the plan,
and the plan that comes out has the digest that it had. Nothing in it is unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow

from ray_dcp.errors import CheckpointError, DamagedCheckpointError
from ray_dcp.format.checksums import block_bytes_for_many
from ray_dcp.format.table_check import check_table
from ray_dcp.format.table_structure import structure_from, structure_to
from ray_dcp.plan.columns import int_keys
from ray_dcp.plan.global_plan import digest_of
from ray_dcp.plan.joint import have_their_places
from ray_dcp.plan.structural_plan import StructuralPlan
from ray_dcp.plan.structure import is_expandable
from ray_dcp.plan.values import NO_GROUPS, ChunkTable, GlobalPlan, IntKey, Path, ValueGroups
from ray_dcp.version import __version__

__all__ = [
    "INDEX_KEY",
    "MOST_BYTES",
    "decode_index",
    "decode_plan",
    "encode_index",
    "encode_plan",
    "is_template",
    "template_key",
]

pa: Any = pyarrow

FORMAT_VERSION = 1
"""Of the file; a template of another one is not used."""
MOST_BYTES = 64 << 20
"""Longest template. Of rows that hardly compress it holds two million."""
MOST_RAW_BYTES = 1 << 30
"""Most that one becomes in memory."""
MOST_HEAD_BYTES = 256 << 20
"""Of these its words, which take ten times as much when they are read."""
MOST_ROWS = 4_000_000
"""Plans of more rows have no template: to encode them would take the coordinator a gigabyte."""
INDEX_KEY = "used.json"
"""Which templates were used last, newest first."""
MOST_INDEX_BYTES = 64 << 10

_MAGIC = b"ray_dcp plan template\n"
_DIGEST_BYTES = 32
_HEAD_BYTES = len(_MAGIC) + 8 + _DIGEST_BYTES
_KEY = re.compile(r"([0-9a-f]{64})\.plan")
_FILE = re.compile(
    r"__(\d{1,10})_\d{1,10}\.\{attempt\}\.distcp"
    r"|\{attempt\}/rank-(\d{5,10})-part-\d{5,10}\.safetensors"
)
_OF_TENSORS = {"kind": "|i1", "dtype": "|i1", "ndim": "|i1", "shape": "<i8", "requires_grad": "|b1"}
_OF_CHUNKS = {
    "tensor": "<i4", "offset": "<i8", "size": "<i8", "file": "<i4", "item_offset": "<i8",
    "item_bytes": "<i8", "payload_offset": "<i8", "payload_bytes": "<i8", "block_bytes": "<i8",
}  # fmt: skip
_OF_SOURCES = {"source_rank": "<i4", "source_row": "<i4", "source_start": "<i8"}
_OF_FILES = {"file_rank": "<i4", "file_bytes": "<i8"}
_OF_GROUPS = {"rank": "<i4", "place": "<i4", "group": "<i4"}
_NUMPY_SAYS_WRONG = (
    ValueError, TypeError, LookupError, OverflowError, RecursionError, AttributeError, OSError,
    pa.ArrowException,
)  # fmt: skip


def template_key(key: bytes) -> str:
    """Returns the file name of the template of ranks with these fingerprints.

    Args:
        key: `ray_dcp.plan.fingerprint.plan_key` of them.

    Example:
        >>> is_template(template_key(bytes(32))), is_template("notes.plan")
        (True, False)
    """
    return f"{key.hex()}.plan"


def is_template(name: str) -> bool:
    """Tells whether a file's name is that of a template."""
    return _KEY.fullmatch(name) is not None


def encode_plan(plan: GlobalPlan, key: bytes) -> bytes | None:
    """Returns the template of a plan; None where it would be too large.

    Args:
        plan: What to keep. The same plan gives the same bytes.
        key: `plan_key` of the ranks that it is of.

    Complexity:
        O(rows), about 0.3 us a row; a plan of a regular layout has those of few ranks.
    """
    few = plan.few if isinstance(plan, StructuralPlan) else plan
    if few.num_chunks > MOST_ROWS:
        return None
    table, groups = few.table, plan.groups
    parts = [
        *_arrays(table, _OF_TENSORS), *_arrays(table, _OF_CHUNKS), *_arrays(few, _OF_SOURCES),
        *_arrays(few, _OF_FILES), *_arrays(groups, _OF_GROUPS),
    ]  # fmt: skip
    head = {
        "format": FORMAT_VERSION,
        "ray_dcp": __version__,
        "key": key.hex(),
        "digest": plan.digest.hex(),
        "world_size": plan.world_size,
        "container": plan.container,
        "checks_at_end": plan.checks_at_end,
        "width": int(table.shape.shape[1]),
        "counts": [table.num_tensors, table.num_chunks, len(few.file_rank), len(groups.rank)],
        "names": table.names,
        "paths": table.paths,
        "int_keys": int_keys(table.paths),
        "dtypes": table.dtypes,
        "files": few.table.files,
        "headers": [header.hex() for header in few.file_headers] if any(few.file_headers) else [],
        "disagreements": plan.disagreements,
        "told": groups.told,
        "structure": structure_to(plan.structure) if isinstance(plan, StructuralPlan) else None,
    }
    words = json.dumps(head).encode()
    raw = b"".join([len(words).to_bytes(8, "little"), words, *parts])
    if len(raw) > MOST_RAW_BYTES or len(words) > MOST_HEAD_BYTES:
        return None
    packed = bytes(pa.compress(raw, codec="zstd", asbytes=True))
    digest = blake2b(packed, digest_size=_DIGEST_BYTES).digest()
    data = b"".join([_MAGIC, len(raw).to_bytes(8, "little"), digest, packed])
    return data if len(data) <= MOST_BYTES else None


def decode_plan(data: bytes, key: bytes) -> GlobalPlan:
    """Returns the plan of a template, after checking all that can be checked of it.

    Args:
        data: The file.
        key: `plan_key` of the ranks that it is to be of.

    Raises:
        DamagedCheckpointError: The bytes are not what was written, or make no plan of these ranks.
        CheckpointError: Another version of ray_dcp wrote it.

    Complexity:
        O(rows), about 0.5 us a row.
    """
    try:
        head, arrays = _unpacked(data)
        _check_head(head, key)
        plan = _plan_of(head, arrays)
    except CheckpointError:
        raise
    except _NUMPY_SAYS_WRONG as error:
        raise _damaged("a plan", f"{type(error).__name__}: {str(error)[:200]}") from error
    if plan.digest.hex() != head["digest"]:
        raise _damaged("the plan that was written", "another one")
    return plan


def encode_index(keys: list[str]) -> bytes:
    """Returns the file that tells which templates were used last.

    Args:
        keys: Names of templates, the last used first.
    """
    return json.dumps({"format": FORMAT_VERSION, "used": keys}).encode()


def decode_index(data: bytes) -> list[str]:
    """Returns what `encode_index` was given; nothing where the file is damaged.

    Example:
        >>> name = template_key(bytes(32))
        >>> decode_index(encode_index([name])) == [name], decode_index(b"?")
        (True, [])
    """
    try:
        used = json.loads(data)["used"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return []
    if not isinstance(used, list):
        return []
    return [name for name in used if isinstance(name, str) and is_template(name)]


def _arrays(holder: object, dtypes: Mapping[str, str]) -> list[bytes]:
    return [
        np.ascontiguousarray(getattr(holder, name), dtype=dtype).tobytes()
        for name, dtype in dtypes.items()
    ]


def _unpacked(data: bytes) -> tuple[dict[str, Any], memoryview]:
    if len(data) > MOST_BYTES or data[: len(_MAGIC)] != _MAGIC or len(data) <= _HEAD_BYTES:
        raise _damaged(f"a template of at most {MOST_BYTES >> 20} MiB", f"{len(data)} bytes")
    packed = memoryview(data)[_HEAD_BYTES:]
    if blake2b(packed, digest_size=_DIGEST_BYTES).digest() != data[len(_MAGIC) + 8 : _HEAD_BYTES]:
        raise _damaged("the bytes that were written", "others")
    num_bytes = int.from_bytes(data[len(_MAGIC) : len(_MAGIC) + 8], "little")
    if not 8 <= num_bytes <= MOST_RAW_BYTES:
        raise _damaged(f"at most {MOST_RAW_BYTES >> 20} MiB in it", f"{num_bytes} bytes")
    raw = memoryview(pa.decompress(packed, decompressed_size=num_bytes, codec="zstd", asbytes=True))
    length = int.from_bytes(raw[:8], "little")
    if length > len(raw) - 8:
        raise _damaged("a head", "a longer one than there are bytes")
    if length > MOST_HEAD_BYTES:
        raise _damaged(f"a head of at most {MOST_HEAD_BYTES} bytes", f"one of {length}")
    head = json.loads(bytes(raw[8 : 8 + length]))
    if not isinstance(head, dict):
        raise _damaged("a head", type(head).__name__)
    return head, raw[8 + length :]


def _check_head(head: Mapping[str, Any], key: bytes) -> None:
    written_by = head.get("format"), head.get("ray_dcp")
    if written_by != (FORMAT_VERSION, __version__):
        raise CheckpointError(
            f"expected a template of ray_dcp {__version__}, form {FORMAT_VERSION}, but ray_dcp "
            f"{written_by[1]!s:.40}, form {written_by[0]!s:.10} wrote it"
        )
    if head.get("key") != key.hex():
        raise _damaged("the plan of these ranks", "that of others")


def _plan_of(head: Mapping[str, Any], data: memoryview) -> GlobalPlan:
    world_size, counts = head["world_size"], head["counts"]
    numbers = (world_size, head["width"], *counts)
    if len(counts) != 4 or not all(type(one) is int and 0 <= one < 1 << 40 for one in numbers):
        raise _damaged("counts", str(numbers)[:200])
    cut = _Cut(data, head["width"])
    tensors, chunks, files, members = counts
    of_tensors, of_chunks = cut.take(_OF_TENSORS, tensors), cut.take(_OF_CHUNKS, chunks)
    sources, of_files = cut.take(_OF_SOURCES, chunks), cut.take(_OF_FILES, files)
    of_groups = cut.take(_OF_GROUPS, members)
    cut.check_end()
    told = tuple((int(group), str(name)) for group, name in head["told"])
    groups = ValueGroups(**of_groups, told=told)
    table = ChunkTable(
        names=_words(head["names"]),
        paths=_paths(head),
        dtypes=_words(head["dtypes"]),
        files=_words(head["files"]),
        **of_tensors,
        **of_chunks,
        check_start=np.zeros(chunks + 1, dtype=np.int64),
        checks=np.zeros(0, dtype=np.uint64),
    )
    check_table(table)
    is_structural = head["structure"] is not None
    headers = [bytes.fromhex(header) for header in head["headers"]] or [b""] * files
    few = GlobalPlan(
        world_size=world_size,
        container=str(head["container"]),
        table=table,
        **sources,
        **of_files,
        file_headers=tuple(headers),
        disagreements=tuple(
            (str(name), tuple(int(rank) for rank in ranks)) for name, ranks in head["disagreements"]
        ),
        digest=b"",
        # Why: those of all ranks are beside the plan of few.
        groups=NO_GROUPS if is_structural else groups,
        checks_at_end=bool(head["checks_at_end"]),
    )
    _check_sources(few)
    _check_groups(groups, world_size)
    few = replace(few, digest=digest_of(few))
    if not is_structural:
        return few
    structure = structure_from(head["structure"], table)
    fits = structure.world_size == world_size and is_expandable(table, structure)
    if not fits or not np.array_equal(structure.leaders[structure.file_kind], few.file_rank):
        raise _damaged("a structure of these ranks", "another one")
    return StructuralPlan(few, structure, groups)


class _Cut:
    """Takes arrays off the front of bytes."""

    def __init__(self, data: memoryview, width: int) -> None:
        self._data = data
        self._width = width
        self._at = 0

    def take(self, dtypes: Mapping[str, str], count: int) -> dict[str, npt.NDArray[Any]]:
        """Returns arrays of `count` rows; boxes have a column a dimension."""
        found = {}
        for name, dtype in dtypes.items():
            is_box = name in ("shape", "offset", "size")
            shape = (count, self._width) if is_box else (count,)
            numbers = count * self._width if is_box else count
            end = self._at + numbers * np.dtype(dtype).itemsize
            if end > len(self._data):
                raise _damaged("all numbers of the plan", "fewer")
            # Why a copy: what is used for the life of a job must not keep all of the file.
            array = np.frombuffer(self._data[self._at : end], dtype=dtype).reshape(shape).copy()
            found[name] = array.view(np.bool_) if dtype == "|b1" else array
            self._at = end
        return found

    def check_end(self) -> None:
        """Checks that nothing is left."""
        if self._at != len(self._data):
            raise _damaged("the numbers of the plan", f"{len(self._data) - self._at} bytes more")


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise _damaged("words", "something else")
    return tuple(value)


def _paths(head: Mapping[str, Any]) -> tuple[Path | None, ...]:
    paths = [None if path is None else list(path) for path in head["paths"]]
    for row, place in head["int_keys"]:
        path = paths[row]
        if path is None:
            raise _damaged("a path with a number as a key", "none")
        path[place] = IntKey(path[place])
    good = (str, int)
    if not all(type(one) in (*good, IntKey) for path in paths if path for one in path):
        raise _damaged("paths of texts and numbers", "others")
    return tuple(None if path is None else tuple(path) for path in paths)


def _check_sources(plan: GlobalPlan) -> None:
    """Checks who writes what: whether it is what he holds only he can tell."""
    table, ranks = plan.table, plan.file_rank
    ends = [_FILE.fullmatch(name) for name in table.files]
    named = [int(found[1] or found[2]) if found else -1 for found in ends]
    fixed = table.payload_offset >= 0
    blocks = block_bytes_for_many(np.maximum(table.payload_bytes, 0))
    fits = (
        plan.container in ("torch_save", "safetensors")
        and len(ranks) == len(table.files) == len(plan.file_headers)
        and named == ranks.tolist()
        and bool((np.diff(ranks) >= 0).all())
        and (not len(ranks) or 0 <= int(ranks[0]) <= int(ranks[-1]) < plan.world_size)
        and bool((np.diff(table.file) >= 0).all())
        and have_their_places(plan)
        and bool((plan.source_row >= 0).all() and (plan.source_start >= 0).all())
        and bool((plan.file_bytes >= 0).all())
        and np.array_equal(table.block_bytes, np.where(fixed, blocks, 0))
    )
    if not fits:
        raise _damaged("items that their ranks write", "others")


def _check_groups(groups: ValueGroups, world_size: int) -> None:
    rank, place, group = groups.rank, groups.place, groups.group
    if not len(rank):
        return
    within = np.diff(rank) == 0
    fits = (
        bool((np.diff(rank) >= 0).all())
        and 0 <= int(rank[0]) <= int(rank[-1]) < world_size
        and bool((np.diff(group)[within] >= 0).all())
        and 0 <= int(group.min()) <= int(group.max()) < len(group)
        and int(place.min()) >= 0
    )
    if not fits:
        raise _damaged("groups of ranks", "others")


def _damaged(expected: str, found: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"expected {expected}, but found {found}")
