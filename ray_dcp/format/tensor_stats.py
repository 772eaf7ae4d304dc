"""Numbers about tensors that a save may leave beside the checkpoint: norms, NaN and infinities.

Pure: how the parts of ranks are put together, and the JSON file. It is no part of the commit:
nothing refers to it, and nobody misses it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from math import sqrt

from ray_dcp.errors import DamagedCheckpointError

MAX_STATS_BYTES = 256 << 20
_FORMAT, _VERSION = "ray_dcp.stats", 1


@dataclass(frozen=True)
class PartStats:
    """Of a part of a tensor that one rank writes; NaN and infinities count in the last two only."""

    num_elements: int
    square_sum: float
    absmax: float
    num_nan: int
    num_inf: int


@dataclass(frozen=True)
class TensorStats:
    """Of a whole tensor as it was saved; NaN and infinities are left out of the first two."""

    norm: float
    """Euclidean."""
    absmax: float
    """Largest absolute value."""
    num_nan: int
    num_inf: int
    num_elements: int

    @property
    def is_finite(self) -> bool:
        """It has neither NaN nor infinities."""
        return not self.num_nan and not self.num_inf


def stats_key(attempt: str) -> str:
    """Returns the key of an attempt's numbers.

    Examples:
        >>> stats_key("0123456789abcdef")
        'stats.0123456789abcdef.json'
    """
    return f"stats.{attempt}.json"


Part = tuple[str, tuple[int, ...], PartStats]
"""FQN, the box that a rank holds (offsets, then lengths), and its numbers."""


def combine(
    ranks: Iterable[Iterable[Part]], num_elements: Mapping[str, int]
) -> dict[str, TensorStats]:
    """Returns the numbers of whole tensors from those of what ranks hold.

    Args:
        ranks: What each holds, the lowest first: of a box that several hold, its values are saved.
        num_elements: Of each tensor. One of which parts are missing is left out: its norm would be
            wrong.

    Examples:
        >>> half = PartStats(2, 8.0, 2.0, 0, 0)
        >>> ranks = [[("w", (0, 2), half)], [("w", (2, 2), half)], [("w", (2, 2), half)]]
        >>> combine(ranks, {"w": 4})["w"].norm
        4.0
    """
    sums: dict[str, PartStats] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for parts in ranks:
        for name, box, part in parts:
            if (name, box) not in seen:
                seen.add((name, box))
                before = sums.get(name)
                sums[name] = part if before is None else added(before, part)
    return {
        name: TensorStats(sqrt(found.square_sum), found.absmax, found.num_nan, found.num_inf, total)
        for name, total in num_elements.items()
        if (found := sums.get(name)) is not None and found.num_elements == total
    }


def added(one: PartStats, other: PartStats) -> PartStats:
    """Returns the numbers of two parts together.

    Examples:
        >>> added(PartStats(2, 1.0, 1.0, 0, 0), PartStats(3, 4.0, 2.0, 1, 0))
        PartStats(num_elements=5, square_sum=5.0, absmax=2.0, num_nan=1, num_inf=0)
    """
    return PartStats(
        one.num_elements + other.num_elements,
        one.square_sum + other.square_sum,
        max(one.absmax, other.absmax),
        one.num_nan + other.num_nan,
        one.num_inf + other.num_inf,
    )


def encode_parts(parts: Iterable[Part]) -> bytes:
    """Returns what a rank tells of what it holds."""
    return json.dumps([[name, box, astuple(part)] for name, box, part in parts]).encode()


def decode_parts(data: bytes) -> list[Part]:
    """Returns what a rank told; nothing for no bytes.

    Examples:
        >>> parts = [("w", (0, 2), PartStats(2, 8.0, 2.0, 0, 0))]
        >>> decode_parts(encode_parts(parts)) == parts
        True
    """
    rows = json.loads(data) if data else []
    return [(name, tuple(box), PartStats(*part)) for name, box, part in rows]


def encode_stats(attempt: str, stats: Mapping[str, TensorStats]) -> bytes:
    """Returns the bytes of the file; a norm beyond float64 becomes a text.

    Args:
        attempt: Whose they are.
        stats: By FQN.
    """
    rows = {name: [_number(value) for value in astuple(one)] for name, one in stats.items()}
    told = {"format": _FORMAT, "version": _VERSION, "attempt": attempt,
            "columns": ["norm", "absmax", "num_nan", "num_inf", "num_elements"],
            "tensors": rows}  # fmt: skip
    return (json.dumps(told, separators=(",", ":"), allow_nan=False) + "\n").encode()


def decode_stats(data: bytes, *, key: str = "") -> dict[str, TensorStats]:
    """Returns the numbers from their bytes.

    Args:
        data: As `encode_stats` made them.
        key: Of the file, for messages.

    Raises:
        DamagedCheckpointError: These are none, or those of a newer version.

    Examples:
        >>> stats = {"w": TensorStats(2.0, 1.5, 0, 1, 9)}
        >>> decode_stats(encode_stats("a", stats)) == stats
        True
    """
    try:
        if len(data) > MAX_STATS_BYTES:
            raise ValueError(f"more than {MAX_STATS_BYTES} bytes")
        found = json.loads(data)
        if (found["format"], found["version"]) != (_FORMAT, _VERSION):
            raise ValueError(f"{found['format']!r} of version {found['version']!r}")
        return {
            str(name): TensorStats(
                float(row[0]), float(row[1]), int(row[2]), int(row[3]), int(row[4])
            )
            for name, row in found["tensors"].items()
        }
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"expected the numbers of tensors, a JSON object of format {_FORMAT!r} and version "
            f"{_VERSION}, found something else ({type(error).__name__}: {error}). The checkpoint "
            f"itself does not need it",
            key=key or None,
        ) from error


def _number(value: float) -> float | int | str:
    return value if isinstance(value, int) or value < float("inf") else "inf"
