"""Numbers about what a rank is to save: norms, NaN and infinities, by `SaveOptions`.

They are taken from the bytes that will be saved, before the ranks join the save: a save that is
refused has neither plan nor file. How the numbers of ranks are put together is in `tensor_stats`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from warnings import warn

import numpy as np
import numpy.typing as npt

from ray_dcp.errors import InvalidRequestError, NonFiniteError
from ray_dcp.format.numbers import READABLE, as_numbers, raw_dtype
from ray_dcp.format.tensor_stats import Part, PartStats, added, encode_parts
from ray_dcp.options import SaveOptions
from ray_dcp.plan.values import Columns, Kind
from ray_dcp.seam.capture import Capture

__all__ = ["MeasuredCapture", "check_measurable", "measured", "part_stats"]

_SLAB_ELEMENTS = 1 << 16
"""Values that are looked at together: they stay in the cache."""
_MOST_NAMED = 8


@dataclass(frozen=True, eq=False)
class MeasuredCapture(Capture):
    """A capture with the numbers that its rank tells the others."""

    stats: bytes = b""


def check_measurable(options: SaveOptions, path: str) -> None:
    """Checks that what is asked can be done where a storage writer of others saves.

    Raises:
        InvalidRequestError: It can't.
    """
    asked = [
        name
        for name, is_set in (
            ("stats=True", options.stats), (f"nonfinite={options.nonfinite!r}", _looks(options))
        )
        if is_set
    ]  # fmt: skip
    if asked:
        raise InvalidRequestError(
            f"SaveOptions({', '.join(asked)}) needs a storage of ray_dcp, but this save goes "
            f"through {path} storage; leave it out, or save to a path or URL",
            key=asked[0].partition("=")[0],
        )


def measured(take: Callable[[], Capture], options: SaveOptions, rank: int) -> Callable[[], Capture]:
    """Returns what captures as `take` does, and looks at the values as the options ask.

    Args:
        take: Captures the state.
        options: `stats` and `nonfinite` count.
        rank: Of this process, for messages.

    Raises:
        NonFiniteError: When it is called: there are NaN or infinities, and they are refused.
    """
    if not options.stats and not _looks(options):
        return take

    def look() -> Capture:
        captured = take()
        parts = list(_parts(captured))
        bad = [part for part in parts if part[2].num_nan or part[2].num_inf]
        warnings = captured.warnings
        if bad and _looks(options):
            told = _told(bad, rank)
            if options.nonfinite == "refuse":
                raise NonFiniteError(
                    f"{told}. Nothing was saved, as SaveOptions(nonfinite='refuse') asks",
                    rank=rank,
                    key=bad[0][0],
                )
            if rank:
                # Why here: of what a save notes only the first rank's is shown, as most of it is
                # the same on all; this no other rank knows.
                warn(told, UserWarning, stacklevel=2)
            warnings = (*warnings, told)
        return MeasuredCapture(
            captured.columns, captured.source, captured.deferred, warnings,
            encode_parts(parts) if options.stats else b"",
        )  # fmt: skip

    return look


def part_stats(raw: npt.NDArray[Any], dtype: str) -> PartStats:
    """Returns the numbers of values.

    Args:
        raw: One dimension of `raw_dtype(dtype)`.
        dtype: Name of a torch dtype, one of `READABLE`.

    Example:
        >>> part_stats(np.array([3.0, -4.0, np.nan], np.float32), "float32")
        PartStats(num_elements=3, square_sum=25.0, absmax=4.0, num_nan=1, num_inf=0)
    """
    found = PartStats(0, 0.0, 0.0, 0, 0)
    for low in range(0, len(raw), _SLAB_ELEMENTS):
        found = added(found, _slab_stats(as_numbers(raw[low : low + _SLAB_ELEMENTS], dtype)))
    return found


def _slab_stats(values: npt.NDArray[Any]) -> PartStats:
    count = len(values)
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.vdot(values, values).real)
        if np.isfinite(total):
            return PartStats(count, total, _largest(values), 0, 0)
        size = np.abs(values)
        # Why once more: only here is something not finite, or so large that its square is not.
        num_nan = int(np.count_nonzero(np.isnan(size)))
        num_inf = int(np.count_nonzero(np.isinf(size)))
        size = size[np.isfinite(size)]
        total = float(np.dot(size, size))
    return PartStats(count, total, float(size.max(initial=0.0)), num_nan, num_inf)


def _largest(values: npt.NDArray[Any]) -> float:
    if not len(values) or np.iscomplexobj(values):
        return float(np.abs(values).max(initial=0.0))
    return max(float(values.max()), -float(values.min()))


def _looks(options: SaveOptions) -> bool:
    return options.nonfinite != "ignore"


def _parts(captured: Capture) -> Iterator[Part]:
    columns: Columns = captured.columns
    rows = zip(
        columns.name.tolist(), columns.kind.tolist(), columns.dtype.tolist(),
        columns.ndim.tolist(), columns.offset.tolist(), columns.size.tolist(), strict=True,
    )  # fmt: skip
    for row, (name, kind, code, ndim, offset, size) in enumerate(rows):
        dtype = columns.dtypes[code] if code >= 0 else ""
        if kind != Kind.TENSOR or dtype not in READABLE:
            continue
        raw = np.frombuffer(captured.source(row), raw_dtype(dtype))
        yield columns.names[name], (*offset[:ndim], *size[:ndim]), part_stats(raw, dtype)


def _told(bad: list[Part], rank: int) -> str:
    some = ", ".join(
        f"{name!r} ({part.num_nan} NaN and {part.num_inf} infinite of {part.num_elements})"
        for name, _, part in bad[:_MOST_NAMED]
    )
    more = f" and {len(bad) - _MOST_NAMED} more tensors" if len(bad) > _MOST_NAMED else ""
    return f"expected finite values on rank {rank}, found {some}{more}"
