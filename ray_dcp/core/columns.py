"""A rank's `Columns`: built row by row, checked, encoded for the coordinator.

`planning.merge` combines the columns of all ranks.

**Entries of lists** that several ranks have in part, such as the parameter groups of an optimizer
of which each pipeline stage has its own, have an identity beside their index on the rank:
`optim.param_groups.0~3f2a.lr`. `merge` puts all of them into one list, in which equal identities
are one entry, so that neither index nor identity reaches storage.

**Per-rank names** are alike on all ranks but for the rank: `loader.rank-7-of-64`. Ranks that differ
only in their own number in such names hold the same items: the first halves of their fingerprints
are equal, and the rows of one rank determine those of the others (`planning.fingerprint`). Columns
that describe all of these ranks have a `*` in place of the number.

**Packing** compresses columns of integers whose rows repeat from file to file. Rows come in runs,
each the chunks of one file. They are packed by their place in the run: the first row of each run,
then the second of each, as differences from one to the next:

    runs     a0 a1 a2 | b0 b1 | c0 c1 c2
    packed   a0 b0 c0   a1 b1 c1   a2 c2      as a0, b0 - a0, c0 - b0, ...

If every rank of a mesh has a slab of each tensor, these differences repeat, and zstd needs less
than a byte per row. *Trust*: packed bytes may be forged. Unpacking takes at most a fixed multiple
of their length in memory, and its caller states the number of columns and their dtypes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow

from ray_dcp.core.values import Columns, Int64Array, IntKey, Kind, NamePath, Settled, padded, within
from ray_dcp.errors import InternalError, InvalidRequestError, RankDisagreementError

pa: Any = pyarrow

Runs = npt.NDArray[np.integer[Any]]
Column = Runs | npt.NDArray[np.bool_]

MOST_RATIO = 160
"""Most bytes that one packed byte may unpack to. Better compressed data is padded to this ratio: so
a short file can't take much memory, and everything that was packed can be unpacked."""

MOST_TEXT_RATIO = 8
"""The same limit for JSON text. Why lower: the objects made of it take more memory than the
text."""

_SKIPPED = 0x184D2A50
"""Magic number of a frame without content. Source: RFC 8878, 3.1.2."""
_FRAME_BYTES = 8
_LEVEL = 1
_TAIL = Struct("<QQQ")
"""Lengths of the packed text, of the text, and of the whole record."""


def pack(columns: Sequence[Column], runs: Runs) -> bytes:
    """Compresses columns of equal length.

    Args:
        columns: At least one; elements have at most 64 bits.
        runs: Lengths of the runs of rows; their sum is the length of the columns.

    Examples:
        >>> data = pack([np.array([7, 8, 9]), np.array([True, False, True])], np.array([2, 1]))
        >>> [column.tolist() for column in unpack(data, [np.int8, np.bool_], np.array([2, 1]))]
        [[7, 8, 9], [True, False, True]]
    """
    order = _by_place(runs)
    steps = [np.diff(column[order].astype(np.int64), prepend=0) for column in columns]
    return pack_bytes(b"".join(np.ascontiguousarray(step, "<i8").data for step in steps))


def unpack(
    data: bytes | memoryview, dtypes: Sequence[npt.DTypeLike], runs: Runs
) -> list[npt.NDArray[Any]]:
    """Returns the columns that `pack` was given.

    Args:
        data: The result of `pack`.
        dtypes: The dtype of each column.
        runs: See `pack`.

    Raises:
        ValueError: The bytes are not such columns.
    """
    num_bytes = 8 * len(dtypes) * float(runs.sum(dtype=np.float64))
    if (runs < 0).any() or num_bytes > MOST_RATIO * len(data):
        raise ValueError(f"{len(data)} bytes can't hold {len(dtypes)} columns of such runs")
    order = _by_place(runs)
    raw = unpack_bytes(data, 8 * len(dtypes) * len(order))
    found = []
    rows = np.frombuffer(raw, "<i8").reshape(len(dtypes), len(order))
    for dtype, steps in zip(dtypes, rows, strict=True):
        numbers = steps.cumsum()
        there = numbers.astype(dtype)
        if (there.astype(np.int64) != numbers).any():
            raise ValueError(f"numbers that {there.dtype} does not have")
        column = np.empty_like(there)
        column[order] = there
        found.append(column)
    return found


def pack_record(fields: Mapping[str, Any], frames: Sequence[bytes]) -> bytes:
    """Returns a record of a JSON object and packed columns, for `unpack_record`.

    Args:
        fields: The JSON object: names and counts.
        frames: Results of `pack`.
    """
    text = json.dumps([fields, list(map(len, frames))]).encode()
    packed = pack_bytes(text, MOST_TEXT_RATIO)
    tail = _TAIL.pack(len(packed), len(text), sum(map(len, frames)) + len(packed) + _TAIL.size)
    return b"".join([*frames, packed, tail])


def record_bytes(data: bytes | memoryview) -> int:
    """Returns the length of the record at the end of the given bytes.

    Raises:
        ValueError: The bytes don't end with a record.
    """
    num_bytes = int.from_bytes(data[-8:], "little")
    if not _TAIL.size <= num_bytes <= len(data):
        raise ValueError(f"expected a record at the end of {len(data)} bytes")
    return num_bytes


def unpack_record(data: bytes | memoryview) -> tuple[dict[str, Any], list[memoryview]]:
    """Returns the arguments of `pack_record`: the JSON object and the packed columns.

    Raises:
        ValueError: The bytes are not a record.
    """
    if record_bytes(data) != len(data):
        raise ValueError(f"expected a record of {len(data)} bytes, found another length")
    view = memoryview(data)
    packed, num_chars, _ = _TAIL.unpack(view[-_TAIL.size :])
    end = len(view) - _TAIL.size
    if packed > end:
        raise ValueError(f"expected at most {end} bytes of text, found {packed}")
    text = unpack_bytes(view[end - packed : end], num_chars, MOST_TEXT_RATIO)
    try:
        fields, lengths = json.loads(bytes(text))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"expected fields and lengths: {error}") from error
    whole = isinstance(lengths, list) and all(type(one) is int and one >= 0 for one in lengths)
    if not isinstance(fields, dict) or not whole or sum(lengths) != end - packed:
        raise ValueError("expected fields, and the lengths of all columns")
    starts = [0, *accumulate(lengths)]
    return fields, [view[low:high] for low, high in pairwise(starts)]


def pack_bytes(data: bytes, most_ratio: int = MOST_RATIO) -> bytes:
    """Compresses bytes, at most by the factor `most_ratio`."""
    packed: bytes = pa.Codec("zstd", compression_level=_LEVEL).compress(data, asbytes=True)
    lack = -(-len(data) // most_ratio) - len(packed)
    if lack <= 0:
        return packed
    rest = max(0, lack - _FRAME_BYTES)
    return packed + _SKIPPED.to_bytes(4, "little") + rest.to_bytes(4, "little") + bytes(rest)


def unpack_bytes(
    data: bytes | memoryview, num_bytes: int, most_ratio: int = MOST_RATIO
) -> memoryview:
    """Returns the bytes that `pack_bytes` was called on.

    Args:
        data: The result of `pack_bytes`.
        num_bytes: Number of bytes expected.
        most_ratio: See `pack_bytes`.

    Raises:
        ValueError: The data is damaged, or unpacks to another number of bytes.
    """
    if not 0 <= num_bytes <= most_ratio * len(data):
        raise ValueError(f"{len(data)} bytes can't hold {num_bytes}")
    try:
        return memoryview(pa.Codec("zstd").decompress(data, decompressed_size=num_bytes))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{len(data)} bytes do not hold {num_bytes}: {error}") from error


def _by_place(runs: Runs) -> Int64Array:
    """Returns the rows sorted by place in their run; rows of equal place stay in order."""
    place = within(runs)
    small = len(runs) == 0 or int(runs.max()) <= np.iinfo(np.uint16).max
    # Why uint16: numpy sorts numbers of two bytes ten times as fast.
    return np.argsort(place.astype(np.uint16) if small else place, kind="stable")


_FORM = 4
_FLAT = {
    "name": np.int32,
    "kind": np.int8,
    "dtype": np.int8,
    "ndim": np.int8,
    "requires_grad": np.bool_,
    "splittable": np.bool_,
    "value": np.uint64,
    "settled": np.int8,
}
_BOXES = ("shape", "offset", "size")
_MAX_BYTES = float(1 << 62)
_MAX_NDIM = 64
"""numpy's own limit."""


class ColumnsBuilder:
    """Builds `Columns` item by item.

    Examples:
        >>> builder = ColumnsBuilder()
        >>> builder.tensor("w", "float32", (4, 2), offset=(2, 0), size=(2, 2))
        0
        >>> builder.object("step")
        1
        >>> columns = builder.build()
        >>> len(columns), columns.names, columns.offset.tolist()
        (2, ('w', 'step'), [[2, 0], [0, 0]])
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._paths: list[NamePath | None] = []
        self._dtypes: dict[str, int] = {}
        self._flat: list[tuple[int, int, int, bool, bool, int, int]] = []
        self._boxes: list[tuple[Sequence[int], Sequence[int], Sequence[int]]] = []

    def tensor(
        self,
        fqn: str,
        dtype: str,
        shape: Sequence[int],
        *,
        offset: Sequence[int] | None = None,
        size: Sequence[int] | None = None,
        path: NamePath | None = None,
        opaque: bool = False,
        requires_grad: bool = False,
        splittable: bool = False,
        value: int = 0,
        settled: int = Settled.UNKNOWN,
    ) -> int:
        """Adds a box of a tensor.

        Args:
            fqn: Name of the tensor.
            dtype: Name of its torch dtype, without prefix.
            shape: Its global shape.
            offset: Where the box starts; zeros by default.
            size: Lengths of the box; `shape` by default.
            path: Its place in the nested state dict. The first path given for an FQN counts.
            opaque: Whether only `torch.load` understands its bytes (`Kind.OPAQUE`).
            requires_grad: The tensor's `requires_grad`.
            splittable: Whether the box may be split among its holders.
            value: Digest of its content, 0 for none.
            settled: A `Settled`.

        Returns:
            The row of the box.
        """
        kind = Kind.OPAQUE if opaque else Kind.TENSOR
        start = (0,) * len(shape) if offset is None else offset
        lengths = shape if size is None else size
        code = self._dtypes.setdefault(dtype, len(self._dtypes))
        self._boxes.append((shape, start, lengths))
        flat = (kind, code, requires_grad, splittable, value, int(settled))
        self._flat.append((self._name(fqn, path), *flat))
        return len(self._flat) - 1

    def object(self, fqn: str, *, path: NamePath | None = None, value: int = 0) -> int:
        """Adds an object.

        Args:
            fqn: Name of the object.
            path: Its place in the nested state dict.
            value: Digest of its content, 0 for none.

        Returns:
            The row of the object.
        """
        self._boxes.append(((), (), ()))
        self._flat.append((self._name(fqn, path), Kind.OBJECT, -1, False, False, value, 0))
        return len(self._flat) - 1

    def build(self) -> Columns:
        """Returns the columns.

        Raises:
            InvalidRequestError: An item is invalid; the message lists all such items.
        """
        uneven = [
            self._flat[row][0]
            for row, boxes in enumerate(self._boxes)
            if not len(boxes[0]) == len(boxes[1]) == len(boxes[2])
        ]
        if uneven:
            names = list(self._names)
            raise InvalidRequestError(
                "expected shape, offset and size of one length, but they differ for "
                + ", ".join(repr(names[name]) for name in uneven)
            )
        flat = list(zip(*self._flat, strict=True)) or [()] * 7
        name, kind, dtype, grad, splittable, value, settled = flat
        shapes, offsets, sizes = zip(*self._boxes, strict=True) if self._boxes else ((), (), ())
        ndim = np.array([*map(len, shapes)], dtype=np.int64)
        width = max(1, int(ndim.max(initial=0)))
        columns = Columns(
            names=tuple(self._names),
            paths=tuple(self._paths),
            dtypes=tuple(self._dtypes),
            name=np.array(name, dtype=np.int32),
            kind=np.array(kind, dtype=np.int8),
            dtype=np.array(dtype, dtype=np.int8),
            ndim=ndim.astype(np.int8),
            shape=padded(shapes, width, 1),
            offset=padded(offsets, width, 0),
            size=padded(sizes, width, 1),
            requires_grad=np.array(grad, dtype=np.bool_),
            splittable=np.array(splittable, dtype=np.bool_),
            value=np.array(value, dtype=np.uint64),
            settled=np.array(settled, dtype=np.int8),
        )
        wrong = check(columns)
        if wrong:
            raise InvalidRequestError("the items can't be saved: " + "; ".join(wrong))
        return columns

    def _name(self, fqn: str, path: NamePath | None) -> int:
        known = self._names.get(fqn)
        if known is None:
            known = self._names[fqn] = len(self._paths)
            self._paths.append(path)
        return known


def check(columns: Columns) -> list[str]:
    """Returns the faults of one rank's columns, one sentence each.

    `make_plan` reports boxes out of bounds, and items that are listed twice, together with the
    conflicts of all ranks.
    """
    wrong = _check_lengths(columns)
    if wrong:
        return wrong
    if len(set(columns.names)) != len(columns.names):
        wrong.append("the vocabulary of names holds a name twice")
    wrong += _check_codes(columns)
    if wrong:
        return wrong
    return _check_boxes(columns)


def encode(columns: Columns) -> bytes:
    """Returns the columns as a record, packed.

    Raises:
        InvalidRequestError: The columns are invalid; see `check`.
    """
    wrong = check(columns)
    if wrong:
        raise InvalidRequestError("these columns can't be sent: " + "; ".join(wrong))
    words = (columns.names, columns.paths, columns.dtypes, int_keys(columns.paths))
    text = json.dumps(words).encode()
    fields = {
        "form": _FORM,
        "rows": len(columns),
        "width": columns.shape.shape[1],
        "text_bytes": len(text),
    }
    arrays = [getattr(columns, key) for key in _FLAT]
    boxes = [column for key in _BOXES for column in getattr(columns, key).T]
    rows = pack([*arrays, *boxes], np.array([len(columns)]))
    return pack_record(fields, [pack_bytes(text, MOST_TEXT_RATIO), rows])


def decode(data: bytes) -> Columns:
    """Returns the columns that `encode` was called on.

    Raises:
        RankDisagreementError: Another version of ray_dcp encoded the bytes.
        InternalError: The bytes are not encoded columns.
    """
    try:
        fields, (words, frame) = unpack_record(data)
        form = fields["form"]
        columns = _decoded(fields, words, frame) if form == _FORM else None
        wrong = [] if columns is None else check(columns)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InternalError(
            f"expected a rank's items, but found bytes that are none: {error!r}"
        ) from error
    if columns is None:
        raise RankDisagreementError(
            f"expected items in form {_FORM}, but found form {form}: run the same version of "
            f"ray_dcp on all ranks"
        )
    if wrong:
        raise InternalError("a rank's items arrived broken: " + "; ".join(wrong))
    return columns


def _decoded(fields: Mapping[str, Any], words: memoryview, frame: memoryview) -> Columns:
    names, paths, dtypes = _vocabulary(bytes(words), fields["text_bytes"])
    width, count = fields["width"], fields["rows"]
    types = [*_FLAT.values(), *[np.int64] * (len(_BOXES) * width)]
    arrays = unpack(frame, types, np.array([count]))
    flat: dict[str, Any] = dict(zip(_FLAT, arrays, strict=False))
    boxes = np.array(arrays[len(_FLAT) :]).reshape(len(_BOXES), width, count)
    places: dict[str, Any] = {
        key: np.ascontiguousarray(box.T) for key, box in zip(_BOXES, boxes, strict=True)
    }
    return Columns(names=names, paths=paths, dtypes=dtypes, **flat, **places)


@lru_cache(maxsize=64)
def _vocabulary(
    packed: bytes, num_bytes: int
) -> tuple[tuple[str, ...], tuple[NamePath | None, ...], tuple[str, ...]]:
    """Why cached: most ranks have the same names; they share one tuple then."""
    text = unpack_bytes(packed, num_bytes, MOST_TEXT_RATIO)
    names, paths, dtypes, keys = json.loads(bytes(text))
    for row, place in keys:
        paths[row][place] = IntKey(paths[row][place])
    return (
        tuple(map(str, names)),
        tuple(None if path is None else tuple(path) for path in paths),
        tuple(map(str, dtypes)),
    )


def int_keys(paths: Sequence[NamePath | None]) -> list[tuple[int, int]]:
    """Returns the places in the paths of keys that are numbers: JSON has only texts as keys."""
    # Why this check first: it runs in C, and most state dicts have no such keys.
    if IntKey not in set(map(type, chain.from_iterable(path for path in paths if path))):
        return []
    return [
        (row, place)
        for row, path in enumerate(paths)
        for place, part in enumerate(path or ())
        if type(part) is IntKey
    ]


def _check_lengths(columns: Columns) -> list[str]:
    count = len(columns.name)
    wrong = []
    if len(columns.paths) != len(columns.names):
        wrong.append(f"{len(columns.names)} names have {len(columns.paths)} paths")
    for key in _FLAT:
        shape = getattr(columns, key).shape
        if shape != (count,):
            wrong.append(f"expected column {key!r} of shape {(count,)}, found {shape}")
    width = columns.shape.shape[-1] if columns.shape.ndim == 2 else -1
    for key in _BOXES:
        shape = getattr(columns, key).shape
        if shape != (count, width) or not 1 <= width <= _MAX_NDIM:
            wrong.append(
                f"expected column {key!r} of shape {(count, 'D')}, D up to 64, found {shape}"
            )
    return wrong


def _check_codes(columns: Columns) -> list[str]:
    wrong = []
    is_object = columns.kind == Kind.OBJECT
    width = columns.shape.shape[1]
    bounds = (
        ("name", columns.name, 0, len(columns.names) - 1),
        ("kind", columns.kind, 0, max(Kind)),
        ("settled", columns.settled, 0, max(Settled)),
        ("ndim", columns.ndim, 0, width),
        ("dtype of a tensor", columns.dtype[~is_object], 0, len(columns.dtypes) - 1),
        ("dtype of an object", columns.dtype[is_object], -1, -1),
        ("ndim of an object", columns.ndim[is_object], 0, 0),
    )
    for what, codes, low, high in bounds:
        bad = codes[(codes < low) | (codes > high)]
        if len(bad):
            wrong.append(f"expected {what} from {low} to {high}, found {int(bad[0])}")
    return wrong


def _check_boxes(columns: Columns) -> list[str]:
    padding = np.arange(columns.shape.shape[1]) >= columns.ndim[:, None]
    filled = (columns.shape == 1) & (columns.offset == 0) & (columns.size == 1)
    negative = (columns.shape < 0) | (columns.size < 0)
    # Why 16: no dtype has longer elements, and a product that overflows must not look small.
    spans = np.maximum(np.maximum(columns.shape, columns.size), 1).astype(np.float64)
    huge = np.prod(spans, axis=1) * 16 > _MAX_BYTES
    far = (columns.offset >= 1 << 61) | (columns.offset <= -(1 << 61))
    return (
        _describe_faults(
            columns, np.any(padding & ~filled, axis=1), "is not padded with offset 0 and size 1"
        )
        + _describe_faults(columns, np.any(negative, axis=1), "has a negative shape or size")
        + _describe_faults(columns, huge | np.any(far, axis=1), "is beyond 2**62 bytes")
    )


def _describe_faults(columns: Columns, bad: Any, what: str) -> list[str]:
    return [f"{columns.names[columns.name[row]]!r} {what}" for row in np.flatnonzero(bad)]


# --- Entries of lists ----------------------------------------------------------------------------

_IDENTITY = "\x1f"
"""Separates the index of a list's entry from its identity."""
_ENTRY = re.compile(rf"{_IDENTITY}[0-9a-f]{{16}}(?:-[0-9]+)?")


def identified(path: NamePath, place: int, identity: str) -> tuple[str, NamePath]:
    """Returns the name and path of a value in an entry of a list that ranks have in part.

    Args:
        path: Path of the value.
        place: Place in the path of the entry's index.
        identity: 16 hexadecimal digits, and a number if a rank has several such entries.
    """
    entry = f"{path[place]}{_IDENTITY}{identity}"
    marked = (*path[:place], entry, *path[place + 1 :])
    return ".".join(map(str, marked)), marked


def has_identity(name: str) -> bool:
    """Returns whether a name is a result of `identified`."""
    return _IDENTITY in name and _ENTRY.search(name) is not None


def without_identity(name: str) -> str:
    """Returns a name as the user knows it.

    Examples:
        >>> name, _ = identified(("o", "param_groups", 0, "lr"), 2, "3f2a" * 4)
        >>> has_identity(name), without_identity(name)
        (True, 'o.param_groups.0.lr')
    """
    return _ENTRY.sub("", name) if _IDENTITY in name else name


class ListNumbers:
    """Numbers the entries of lists of which ranks have different ones, in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[NamePath, dict[str, int]] = {}

    def resolve(self, name: str, path: NamePath | None) -> tuple[str, NamePath | None]:
        """Returns name and path with the entry's index in the list of all ranks.

        Examples:
            >>> numbers = ListNumbers()
            >>> [numbers.resolve(*identified(("groups", 0, "lr"), 1, one * 16))[0] for one in "abb"]
            ['groups.0.lr', 'groups.1.lr', 'groups.1.lr']
        """
        if path is None or not has_identity(name):
            return name, path
        for place, part in enumerate(path):
            if isinstance(part, str) and has_identity(part):
                entries = self._numbers.setdefault(path[:place], {})
                number = entries.setdefault(part.partition(_IDENTITY)[2], len(entries))
                found = (*path[:place], number, *path[place + 1 :])
                return ".".join(map(str, found)), found
        return name, path


# --- Per-rank names ------------------------------------------------------------------------------

ANY = "*"
"""Placeholder for a rank's own number."""

_NUMBER = re.compile(r"\.rank-(0|[1-9][0-9]{0,8})-of-[0-9]+")


def number_in(names: Sequence[str], world_size: int) -> int | None:
    """Returns the rank in the per-rank names of one rank; None if there is none, or several.

    Args:
        names: Names of the rank's items.
        world_size: Number of ranks, which these names contain too.

    Examples:
        >>> number_in(["w", "loader.rank-3-of-8"], 8), number_in(["loader.rank-3-of-8"], 4)
        (3, None)
    """
    end = f"-of-{world_size}"
    # Why this check first: per-rank names are rare, and a check of each name takes longer than the
    # rest.
    if f"{end}\0" not in "\0".join((*names, "")):
        return None
    found = {_number(name) for name in names if name.endswith(end)} - {None}
    return found.pop() if len(found) == 1 else None


def is_own(name: str, world_size: int) -> bool:
    """Returns whether a name is a per-rank name in the form that describes all ranks."""
    return name.endswith(f".{_part(ANY, world_size)}")


def without_rank(columns: Columns, world_size: int) -> Columns:
    """Returns columns with `*` in place of the rank's number, if their names contain one."""
    number = number_in(columns.names, world_size)
    return columns if number is None else _rename_indices(columns, str(number), ANY, world_size)


def for_rank(columns: Columns, rank: int, world_size: int) -> Columns:
    """Returns columns with a rank's number in place of `*`."""
    return _rename_indices(columns, ANY, str(rank), world_size)


def _rename_indices(columns: Columns, old: str, new: str, world_size: int) -> Columns:
    before, after = _part(old, world_size), _part(new, world_size)
    end = f".{before}"
    names, paths = list(columns.names), list(columns.paths)
    for index, name in enumerate(names):
        if name.endswith(end):
            names[index] = name.removesuffix(before) + after
            paths[index] = _path(paths[index], before, after)
    return replace(columns, names=tuple(names), paths=tuple(paths))


def _path(path: NamePath | None, before: str, after: str) -> NamePath | None:
    return (*path[:-1], after) if path and path[-1] == before else path


@lru_cache(maxsize=1 << 12)
def _part(number: str, world_size: int) -> str:
    return f"rank-{number}-of-{world_size}"


def _number(name: str) -> int | None:
    match = _NUMBER.fullmatch(name[name.rfind(".rank-") :]) if ".rank-" in name else None
    return int(match[1]) if match else None
