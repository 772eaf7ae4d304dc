"""The info that a `CheckpointManager` stores beside a step's checkpoint, with its catalogue.

Each file is one canonical JSON object with a digest of its content. Names relate an info to its
commit: the info written at slot P belongs to the first manifest above P.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ray_dcp.core.json_text import NOT_FINITE
from ray_dcp.errors import DamagedCheckpointError, InvalidRequestError
from ray_dcp.format.manifest import (
    attempt,
    canonical,
    damaged,
    integer,
    sealed,
    seconds,
    short,
    text,
    unsealed,
)

_INFO_KEY = re.compile(r"step-info-([0-9]{8,16})\.json")
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}(?:\.[0-9]{1,16})?")
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """The info that the user gave about a step when it was saved."""

    step: int
    created_s: float
    """Seconds since 1970 by the clock of rank 0."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's metadata: values that JSON can represent; NaN and infinities too."""
    items: Mapping[str, str] = field(default_factory=dict)
    """Folder of each named item, below the step's; empty for a step with one unnamed state."""
    order_s: float | None = None
    """Place of the save among those of the run, on the scale of `created_s`: later saves have
    higher values, also where a clock was set back. None if it is `created_s`."""


@dataclass(frozen=True)
class CatalogueRow:
    """What is known about a step folder; valid until its highest slot changes."""

    name: str
    last_slot: int = 0
    """Highest slot in use."""
    slot: int = 0
    """Slot of the committed manifest; 0 if there is none, or it is not known."""
    attempt: str = ""
    """Attempt of that manifest; "" if there is none."""
    created_s: float = 0.0
    """Seconds since 1970 by the clock of the rank that saved it; 0 for stock checkpoints."""
    info: StepInfo | None = None
    """The info that a manager stored about the step."""

    @property
    def order_s(self) -> float:
        """Place of the save among those of the run; see `StepInfo.order_s`."""
        found = None if self.info is None else self.info.order_s
        return self.created_s if found is None else found


def info_key(slot: int) -> str:
    """Returns the key of an info that is written while `slot` is the highest slot in use.

    Examples:
        >>> info_key(0)
        'step-info-00000000.json'
    """
    return f"step-info-{slot:08d}.json"


def info_slot(key: str) -> int | None:
    """Returns the slot of an `info_key`; None for other keys."""
    found = _INFO_KEY.fullmatch(key)
    return int(found[1]) if found else None


def check_metadata(metadata: object) -> dict[str, Any]:
    """Returns the user's metadata of a step after checking that JSON preserves it.

    Args:
        metadata: A mapping, or None.

    Raises:
        InvalidRequestError: JSON does not preserve the metadata.

    Examples:
        >>> check_metadata({"commit": "3f2a", "tokens": 10**12})
        {'commit': '3f2a', 'tokens': 1000000000000}
    """
    if metadata is None:
        return {}
    try:
        if not isinstance(metadata, Mapping):
            raise TypeError(f"it is a {type(metadata).__name__}")
        found = json.loads(canonical(dict(metadata)))
        _restore(found, _not_finite_in(metadata))
        if not _equal(found, metadata):
            raise TypeError(f"it would be read back as {short(found)}")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"metadata must be a dict of what JSON can hold (texts as keys, no tuples), but "
            f"{error}. Put everything else into the state dict",
            key="metadata",
        ) from error
    return found  # type: ignore[no-any-return]


def _not_finite_in(value: object, path: tuple[str | int, ...] = ()) -> Iterator[list[str | int]]:
    """Yields the path of each NaN and infinity, which JSON holds as texts.

    Raises:
        TypeError: A key above one of them is no text.

    Examples:
        >>> list(_not_finite_in({"best": {"loss": [0.5, math.inf]}}))
        [['best', 'loss', 1]]
    """
    match value:
        case float() if not math.isfinite(value):
            yield [*path]
        case Mapping():
            for key, one in value.items():
                for found in _not_finite_in(one, (*path, key)):
                    if not isinstance(key, str):
                        raise TypeError(f"a key is {short(key)}")
                    yield found
        case list() | tuple():
            for number, one in enumerate(value):
                yield from _not_finite_in(one, (*path, number))


def _restore(metadata: Any, paths: Iterable[Sequence[str | int]]) -> None:
    """Replaces the texts at `paths` by the numbers that they stand for.

    Raises:
        LookupError: There is nothing, or no such text, at a path.
        TypeError: As `LookupError`.
        ValueError: A path is empty.
    """
    for path in paths:
        *above, last = path
        owner = metadata
        for key in above:
            owner = owner[key]
        owner[last] = NOT_FINITE[owner[last]]


def _equal(found: object, metadata: object) -> bool:
    """Returns whether two values are equal, where NaN equals NaN."""
    if isinstance(found, dict) and isinstance(metadata, Mapping):
        return found.keys() == metadata.keys() and all(
            _equal(one, metadata[key]) for key, one in found.items()
        )
    if isinstance(found, list) and isinstance(metadata, list):
        return len(found) == len(metadata) and all(map(_equal, found, metadata))
    return bool(found == metadata or (found != found and metadata != metadata))


def encode_info(info: StepInfo) -> bytes:
    """Returns the bytes of an info; equal infos have equal bytes.

    Examples:
        >>> info = StepInfo(step=5, created_s=1.5, metrics={"loss": 0.25})
        >>> decode_info(encode_info(info)) == info
        True
    """
    return sealed("info", canonical({"version": _VERSION, **_fields(info)}))


def decode_info(data: bytes, *, key: str | None = None) -> StepInfo:
    """Returns the info that `encode_info` encoded.

    Args:
        data: Content of the file under an `info_key`.
        key: That key, for messages.

    Raises:
        DamagedCheckpointError: The bytes are not a result of `encode_info`.
    """
    try:
        return _info_of(_decode(data))
    except DamagedCheckpointError as error:
        error.key = error.key or key
        raise


def encode_catalogue(rows: Sequence[CatalogueRow]) -> bytes:
    """Returns the bytes of a catalogue."""
    infos = [None if row.info is None else _fields(row.info) for row in rows]
    told = [
        [row.name, row.last_slot, row.slot, row.attempt, row.created_s, info]
        for row, info in zip(rows, infos, strict=True)
    ]
    return sealed("info", canonical({"version": _VERSION, "rows": told}))


def decode_catalogue(data: bytes) -> list[CatalogueRow]:
    """Returns the rows of a catalogue.

    Raises:
        DamagedCheckpointError: The bytes are not a result of `encode_catalogue`.
    """
    found = _decode(data)
    rows = found.get("rows")
    if found.get("version") != _VERSION or not isinstance(rows, list):
        raise damaged(f"a catalogue of version {_VERSION}", short(found.get("version")))
    try:
        return [
            CatalogueRow(
                text(name, "name"),
                integer(last, "last_slot"),
                integer(slot, "slot"),
                attempt(saved_by, "attempt"),
                seconds(created_s, "created_s"),
                None if info is None else _info_of({"version": _VERSION, **info}),
            )
            for name, last, slot, saved_by, created_s, info in rows
        ]
    except (TypeError, ValueError) as error:
        raise damaged("rows of a catalogue", str(error)) from error


def _fields(info: StepInfo) -> dict[str, Any]:
    """Returns the fields of an info; `order_s` only where clocks do not tell the order."""
    paths = list(_not_finite_in(info.metadata))
    told = {name: value for name, value in asdict(info).items() if value is not None}
    return {**told, **({"not_finite": paths} if paths else {})}


def _info_of(found: Mapping[str, Any]) -> StepInfo:
    paths, has_order = found.get("not_finite", []), "order_s" in found
    if found.get("version") != _VERSION or len(found) != 6 + has_order + ("not_finite" in found):
        raise damaged(f"an info of version {_VERSION}", short(found.get("version")))
    metrics, metadata, items = (_mapping(found, n) for n in ("metrics", "metadata", "items"))
    for name, value in metrics.items():
        value = metrics[name] = NOT_FINITE.get(value, value) if isinstance(value, str) else value
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or (isinstance(value, int) and abs(value) > sys.float_info.max):
            raise damaged(f"a number as metric {short(name)}", short(value))
    try:
        _restore(metadata, paths)
    except (LookupError, TypeError, ValueError) as error:
        raise damaged("NaN or an infinity in the metadata", short(paths)) from error
    for folder in items.values():
        # Why: the folder becomes part of a path, which must not lead out of the step's folder.
        if not isinstance(folder, str) or _FOLDER.fullmatch(folder) is None:
            raise damaged("the folder of an item", short(folder))
    return StepInfo(
        step=integer(found.get("step"), "step"),
        created_s=seconds(found.get("created_s"), "created_s"),
        metrics={name: float(value) for name, value in metrics.items()},
        metadata=metadata,
        items=items,
        order_s=seconds(found["order_s"], "order_s") if has_order else None,
    )


def _mapping(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = found.get(name)
    if not isinstance(value, dict):
        raise damaged(f"a mapping as {name}", short(value))
    return value


def _decode(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(unsealed("info", data))
    except (ValueError, RecursionError) as error:
        raise damaged("JSON", str(error)) from error
    if not isinstance(found, dict):
        raise damaged("an object in JSON", short(found))
    return found
