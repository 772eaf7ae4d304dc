"""A rank's `Columns`: built row by row, checked, and encoded for the coordinator.

`planning.merge` combines the columns of all ranks.

**Per-rank names** are alike on all ranks but for the rank: `loader.rank-7-of-64`. Ranks that differ
only in their own number in such names hold the same items: the first halves of their fingerprints
are equal, and the rows of one rank determine those of the others (`planning.fingerprint`). Columns
that describe all of these ranks have a `*` in place of the number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from ray_dcp.core.packing import (
    MOST_TEXT_RATIO,
    pack,
    pack_bytes,
    pack_record,
    unpack,
    unpack_bytes,
    unpack_record,
)
from ray_dcp.core.values import Columns, IntKey, Kind, NamePath, Settled, padded
from ray_dcp.errors import InternalError, InvalidRequestError, RankDisagreementError

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
    """Returns the columns as a record of `core.packing`.

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
        _faults(
            columns, np.any(padding & ~filled, axis=1), "is not padded with offset 0 and size 1"
        )
        + _faults(columns, np.any(negative, axis=1), "has a negative shape or size")
        + _faults(columns, huge | np.any(far, axis=1), "is beyond 2**62 bytes")
    )


def _faults(columns: Columns, bad: Any, what: str) -> list[str]:
    return [f"{columns.names[columns.name[row]]!r} {what}" for row in np.flatnonzero(bad)]


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
    return columns if number is None else _renumbered(columns, str(number), ANY, world_size)


def for_rank(columns: Columns, rank: int, world_size: int) -> Columns:
    """Returns columns with a rank's number in place of `*`."""
    return _renumbered(columns, ANY, str(rank), world_size)


def _renumbered(columns: Columns, old: str, new: str, world_size: int) -> Columns:
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
