"""The header of a safetensors file, including DCP's metadata about the places of shards.

    | length, 8 bytes | JSON header | raw bytes of the tensors, packed without gaps |

The raw bytes are located by the chunk table.
Source: https://huggingface.co/docs/safetensors/index#format and
torch/distributed/checkpoint/_hf_utils.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.json_text import to_json
from ray_dcp.errors import DamagedCheckpointError, UnsupportedValueError
from ray_dcp.format import damaged
from ray_dcp.format.names import is_unicode
from ray_dcp.format.torch_items import NeedMoreBytes

DATA_ALIGNMENT = 4096
"""The file offset of the first raw byte is a multiple of this."""
MAX_HEADER_BYTES = 100_000_000
"""Longest header that the safetensors library accepts."""

_READABLE = {
    "BF16": "bfloat16",
    "BOOL": "bool",
    "C64": "complex64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "I8": "int8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "U8": "uint8",
}
ALL_CODES = MappingProxyType({dtype: code for code, dtype in _READABLE.items()})
"""Every torch dtype that the safetensors library supports, with its code."""
_UNSUPPORTED = {
    "F4": "4-bit floats, two a byte",
    "F6_E2M3": "6-bit floats",
    "F6_E3M2": "6-bit floats",
}
"""Codes of the safetensors library for elements that are not a whole number of bytes."""
_MAX_NDIM = 64

_damaged = partial(damaged, where=" in the safetensors header")


class TensorEntry(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: str
    """Name of the torch dtype, without prefix."""
    size: tuple[int, ...]
    begin: int
    """First raw byte, from the start of the data."""
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """The content of the header of a safetensors file."""

    entries: tuple[TensorEntry, ...]
    """The tensors, in the order of their bytes."""
    metadata: Mapping[str, str]
    data_offset: int
    """File offset of the first raw byte."""


def packed(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> list[TensorEntry]:
    """Returns the entries of tensors stored one after the other.

    Args:
        tensors: `(name, torch dtype name, shape)` of each tensor.

    Examples:
        >>> packed([("a", "int8", (3,)), ("b", "float32", (2, 3))])[1].end
        27
    """
    entries, end = [], 0
    for name, dtype, shape in tensors:
        begin, end = end, end + prod(shape) * ITEMSIZE[dtype]
        entries.append(TensorEntry(name, dtype, tuple(shape), begin, end))
    return entries


def header(
    entries: Sequence[tuple[str, str, tuple[int, ...], int, int]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Returns the bytes before the data; their length is a multiple of 4,096.

    Args:
        entries: `(name, dtype, size, begin, end)`, as `packed` returns them.
        metadata: The `__metadata__` of the file.

    Raises:
        UnsupportedValueError: A dtype is not in `ALL_CODES`, a name is reserved, or the header
            would be longer than other readers accept.

    Examples:
        >>> data = header([("w", "float32", (2, 3), 0, 24)])
        >>> len(data), parse_header(data).entries[0].size
        (4096, (2, 3))
    """
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, dtype, size, begin, end in entries:
        if name == "__metadata__":
            raise UnsupportedValueError(
                "safetensors files hold no tensor named '__metadata__': the format uses that name "
                "for itself; rename it, or leave it out",
                key=name,
            )
        code = ALL_CODES.get(dtype)
        if code is None:
            raise UnsupportedValueError(
                f"Expected one of the dtypes {', '.join(ALL_CODES)} in a safetensors file, found "
                f"{dtype}; leave it out",
                key=name,
            )
        fields[name] = {"dtype": code, "shape": list(size), "data_offsets": [begin, end]}
    text = to_json(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % DATA_ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsupportedValueError(
            f"Expected a safetensors header of at most {MAX_HEADER_BYTES} bytes, found {len(text)}"
            "; put fewer tensors into a file"
        )
    return struct.pack("<Q", len(text)) + text


def parse_header(data: bytes, file_bytes: int | None = None) -> SafetensorsHeader:
    """Returns the header in the first bytes of a safetensors file.

    Args:
        data: First bytes of the file.
        file_bytes: Length of the whole file, to check that the data is complete.

    Raises:
        NeedMoreBytes: `data` ends within the header; `num_bytes` is the length to read.
        UnsupportedValueError: A tensor has a safetensors dtype that ray_dcp can't read; `key` is
            the tensor's name.
        DamagedCheckpointError: The data is no safetensors header, or contradicts itself.
    """
    if len(data) < 8:
        raise NeedMoreBytes(8)
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= MAX_HEADER_BYTES or (file_bytes is not None and length + 8 > file_bytes):
        raise _damaged("the length of the header", f"{length} bytes")
    if len(data) < 8 + length:
        raise NeedMoreBytes(8 + length)
    fields = _object(bytes(data[8 : 8 + length]), "a JSON object")
    metadata = _texts(fields.pop("__metadata__", {}))
    entries = sorted((_entry(*item) for item in fields.items()), key=lambda e: (e.begin, e.end))
    position = 0
    for entry in entries:
        if entry.begin != position:
            raise _damaged(f"{entry.name!r} at byte {position}", f"byte {entry.begin}")
        position = entry.end
    if file_bytes is not None and 8 + length + position != file_bytes:
        raise _damaged(f"a file of {8 + length + position} bytes", f"{file_bytes}")
    return SafetensorsHeader(tuple(entries), metadata, 8 + length)


def saved_offsets(metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]] | None:
    """Returns where each chunk starts in its tensor; None for a file whose tensors are whole.

    Args:
        metadata: The `__metadata__` of a file, as DCP's `HuggingFaceStorageWriter` writes it.

    Raises:
        DamagedCheckpointError: The metadata is no valid sharding info.
    """
    text = metadata.get("DCP_SHARDING_INFO")
    if text is None:
        return None
    return {
        name: _lengths(name, value.get("saved_offsets") if isinstance(value, dict) else None)
        for name, value in _object(text, "an object in DCP_SHARDING_INFO").items()
    }


def _object(text: str | bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_without_duplicates)
    except DamagedCheckpointError:
        raise
    except (ValueError, RecursionError) as exc:
        raise _damaged(what, str(exc)[:200]) from exc
    if not isinstance(found, dict):
        raise _damaged(what, type(found).__name__)
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object without repeated names. Why: readers differ on which of them counts."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _damaged("each name once", "one twice")
    return fields


def _texts(fields: Any) -> dict[str, str]:
    if not isinstance(fields, dict) or not all(isinstance(v, str) for v in fields.values()):
        raise _damaged("texts in __metadata__", "something else")
    return fields


def _entry(name: str, fields: Any) -> TensorEntry:
    if not is_unicode(name):
        raise _damaged("names in Unicode", ascii(name[:200]))
    if not isinstance(fields, dict):
        raise _damaged(f"an object for {name[:200]!r}", type(fields).__name__)
    code = fields.get("dtype")
    dtype = _READABLE.get(code) if isinstance(code, str) else None
    if isinstance(code, str) and code in _UNSUPPORTED:
        raise UnsupportedValueError(
            f"{name[:200]!r} has the safetensors dtype {code} ({_UNSUPPORTED[code]}), which "
            f"ray_dcp does not read; the file is not damaged: read it with the safetensors library",
            key=name[:200],
        )
    if dtype is None:
        raise _damaged(f"a dtype for {name[:200]!r}", repr(code)[:100])
    size = _lengths(name, fields.get("shape"))
    place = _lengths(name, fields.get("data_offsets"))
    if len(place) != 2 or place[1] - place[0] != prod(size) * ITEMSIZE[dtype]:
        raise _damaged(f"{prod(size)} elements of {dtype} for {name[:200]!r}", f"bytes {place}")
    return TensorEntry(name, dtype, size, place[0], place[1])


def _lengths(name: str, values: Any) -> tuple[int, ...]:
    if (
        not isinstance(values, list)
        or len(values) > _MAX_NDIM
        or not all(type(n) is int and 0 <= n < 1 << 62 for n in values)
    ):
        raise _damaged(f"a list of lengths for {name[:200]!r}", "something else")
    return tuple(values)
