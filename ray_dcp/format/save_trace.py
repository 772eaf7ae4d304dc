"""The trace of a save: how long each phase took on each rank, as a small JSON file beside it.

Pure. All times are seconds on the coordinator's clock, counted from the first action of any rank
for the save. The file is not part of the commit: nothing refers to it, and it may be missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.json_text import to_json
from ray_dcp.errors import DamagedCheckpointError

PHASES = ("capture", "plan", "stage", "write")
"""Phases of a rank, in their order; see `Span.phase`."""

HELD_BY = "capture plan stage"

MOST_RANKS = 64
"""Most ranks whose spans are listed. With more ranks, the latest of each phase and a sample are
listed."""
MOST_STRAGGLERS = 24
MAX_TRACE_BYTES = 1 << 20
"""Longest file that is read as a trace. Why: a trace has about 16 KB, since it lists 64 ranks at
most."""

LATE_RATIO, LATE_S = 2.0, 0.05
"""A rank is a straggler if it takes at least twice the median, and 50 ms longer."""

_FORMAT, _VERSION = "ray_dcp.trace", 1
_ENDING = b',\n "xxh3_128": "%s"}\n'

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Span:
    """One phase of one rank, or of the coordinator."""

    phase: str
    """For a rank: `capture` (state dict to items, until it has joined), `plan` (until it has its
    part of the plan, which includes the wait for the last rank), `stage` (the copy, while training
    waits) and `write` (until its files are durable). For the coordinator: `look` (find what is
    stored there), `plan`, `build` (check the receipts, make the chunk table), `table`, and
    `record`: the commit."""
    rank: int | None
    """The rank; None for the coordinator."""
    start_s: float
    stop_s: float
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Duration of the phase."""
        return self.stop_s - self.start_s


@dataclass(frozen=True)
class PhaseSummary:
    """Duration of a phase over all ranks, in seconds, not only those whose spans are listed."""

    phase: str
    num_ranks: int
    min_s: float
    median_s: float
    p90_s: float
    p99_s: float
    max_s: float
    num_bytes: int = 0


@dataclass(frozen=True)
class Straggler:
    """A rank that ended a phase much later than the others."""

    rank: int
    phase: str
    seconds: float
    """From the first rank's begin of the phase to this rank's end."""
    median_s: float
    """The same duration for the median rank."""
    where: str = ""
    """Process and node of the rank, if Ray knows them."""


@dataclass(frozen=True, kw_only=True)
class SaveTrace:
    """The course of one save up to its commit.

    Publishing `.metadata` and removing what the save replaced follow the commit and are not
    included.

    Examples:
        >>> times = {"write": RankTimes.of([0, 1], [0.0, 0.0], [0.1, 0.9], [8, 8])}
        >>> trace = make_trace("0123456789abcdef", "save", 2, 1e9, 1.0, [], times)
        >>> [(span.rank, span.stop_s) for span in trace.spans]
        [(0, 0.1), (1, 0.9)]
        >>> trace.stragglers[0].rank, decode_trace(encode_trace(trace)) == trace
        (1, True)
    """

    attempt: str
    mode: str
    """`"save"` or `"async_save"`."""
    world_size: int
    began_s: float
    """When the save began, in seconds since 1970 by the coordinator's clock."""
    committed_s: float
    """When the checkpoint was committed, in seconds since the begin."""
    spans: tuple[Span, ...] = ()
    """Spans of the coordinator, then those of the ranks in `ranks`, by rank."""
    phases: tuple[PhaseSummary, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    """The stragglers, the latest first; at most 24."""
    held_by: str = HELD_BY
    """Phases of an asynchronous save for which training waits. `stage` is not among them if a
    thread copies, even if a rank waited for that too. The file omits the default."""
    linked_bytes: int = 0
    """Bytes of files that were linked and not written. The file omits the default."""
    copied_bytes: int = 0
    """Bytes of files that the storage copied. The file omits the default."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose spans are listed, ascending."""
        return tuple(sorted({span.rank for span in self.spans if span.rank is not None}))

    @property
    def num_bytes(self) -> int:
        """Bytes that all ranks wrote together."""
        return sum(phase.num_bytes for phase in self.phases if phase.phase == "write")

    @property
    def stall_s(self) -> float:
        """How long training waited for the slowest rank, in seconds."""
        if self.mode != "async_save":
            return self.committed_s
        held_by = self.held_by.split()
        ends = [s.stop_s for s in self.spans if s.rank is not None and s.phase in held_by]
        return max(ends, default=0.0)

    def lanes(self) -> dict[int | None, tuple[Span, ...]]:
        """Returns the spans of each lane of a timeline: the coordinator's (None), then each rank's.

        A rank has an additional span `commit`: from the end of its writes to the commit.
        """
        found: dict[int | None, list[Span]] = {None: []}
        for span in self.spans:
            found.setdefault(span.rank, []).append(span)
        for rank, spans in found.items():
            ends = [span.stop_s for span in spans if span.phase == "write"]
            if rank is not None and ends:
                start_s = min(ends[-1], self.committed_s)
                spans.append(Span("commit", rank, start_s, self.committed_s))
        return {lane: tuple(spans) for lane, spans in found.items()}


@dataclass(frozen=True, eq=False)
class RankTimes:
    """The times of a phase on many ranks, as columns of equal length."""

    rank: npt.NDArray[np.int64]
    start_s: FloatArray
    stop_s: FloatArray
    num_bytes: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls,
        rank: Sequence[int],
        start_s: Sequence[float],
        stop_s: Sequence[float],
        num_bytes: Sequence[int] | None = None,
    ) -> RankTimes:
        """Returns columns made of lists; an end before the begin is moved to the begin."""
        start = np.asarray(start_s, np.float64)
        stop = np.maximum(np.asarray(stop_s, np.float64), start)
        count = np.zeros(len(rank), np.int64) if num_bytes is None else np.asarray(num_bytes)
        return cls(np.asarray(rank, np.int64), start, stop, count.astype(np.int64))

    @property
    def late_s(self) -> FloatArray:
        """For each rank, the time from the first rank's begin to its own end."""
        late_s: FloatArray = self.stop_s - self.start_s.min()
        return late_s


def trace_key(attempt: str) -> str:
    """Returns the key of an attempt's trace.

    Args:
        attempt: Id of the attempt.

    Examples:
        >>> trace_key("0123456789abcdef")
        'trace.0123456789abcdef.json'
    """
    return f"trace.{attempt}.json"


def make_trace(
    attempt: str,
    mode: str,
    world_size: int,
    began_s: float,
    committed_s: float,
    coordinator: Sequence[Span],
    times: Mapping[str, RankTimes],
    *,
    where: Mapping[int, str] = MappingProxyType({}),
) -> SaveTrace:
    """Returns a trace of bounded size: stragglers, a sample of the other ranks, quantiles of all.

    Args:
        attempt: Id of the attempt.
        mode: See `SaveTrace`.
        world_size: Number of ranks.
        began_s: See `SaveTrace`.
        committed_s: See `SaveTrace`.
        coordinator: Spans of the coordinator.
        times: Times of the ranks, as far as known, by phase of `PHASES`.
        where: Process and node of each rank, as far as known.

    Complexity:
        O(ranks log ranks) in numpy: with `encode_trace` 13 ms of CPU for 10,000 ranks.
    """
    known = {phase: times[phase] for phase in PHASES if phase in times and len(times[phase].rank)}
    stragglers = _stragglers(known, where)
    chosen = _choose_ranks(known, world_size, [straggler.rank for straggler in stragglers])
    spans = list(coordinator)
    for phase, columns in known.items():
        rows = np.flatnonzero(np.isin(columns.rank, chosen))
        spans += [
            Span(
                phase,
                int(columns.rank[row]),
                _tidy(columns.start_s[row]),
                _tidy(columns.stop_s[row]),
                int(columns.num_bytes[row]),
            )
            for row in rows.tolist()
        ]
    order = {phase: index for index, phase in enumerate(PHASES)}
    spans.sort(key=lambda span: (-1, 0) if span.rank is None else (span.rank, order[span.phase]))
    return SaveTrace(
        attempt=attempt,
        mode=mode,
        world_size=world_size,
        began_s=round(began_s, 3),
        committed_s=_tidy(committed_s),
        spans=tuple(spans),
        phases=tuple(_summary(phase, columns) for phase, columns in known.items()),
        stragglers=stragglers,
    )


_OMITTED = ("held_by", "linked_bytes", "copied_bytes")
"""Fields that are left out of a file in which they have their defaults."""


def encode_trace(trace: SaveTrace) -> bytes:
    """Returns a trace as JSON in UTF-8, with one line per span and a digest at its end.

    Args:
        trace: The trace to encode.
    """
    told: dict[str, Any] = {"format": _FORMAT, "version": _VERSION}
    for one in fields(trace):
        value = getattr(trace, one.name)
        if one.name not in _OMITTED or value != one.default:
            told[one.name] = value
    parts = []
    for name, value in told.items():
        if name in ("spans", "phases", "stragglers"):
            rows = [list(asdict(row).values()) for row in value]
            lines = ",\n  ".join(to_json(row) for row in rows)
            parts.append(f'"{name}": [\n  {lines}\n ]' if rows else f'"{name}": []')
        else:
            parts.append(f'"{name}": {to_json(value)}')
    body = ("{" + ",\n ".join(parts)).encode()
    return body + _ENDING % digest_bytes(body).hex().encode()


def decode_trace(data: bytes, *, key: str = "") -> SaveTrace:
    """Returns the trace that `encode_trace` encoded.

    Args:
        data: Content of the file.
        key: Key of the file, for messages.

    Raises:
        DamagedCheckpointError: The bytes are no trace, or one of a newer version.
    """
    try:
        if len(data) > MAX_TRACE_BYTES:
            raise ValueError(f"more than {MAX_TRACE_BYTES} bytes")
        body = data[: -len(_ENDING % (b"0" * 32))]
        if data != body + _ENDING % digest_bytes(body).hex().encode():
            raise ValueError("its bytes do not match the digest at its end")
        found = json.loads(data)
        if found["format"] != _FORMAT or found["version"] != _VERSION:
            raise ValueError(f"{found['format']!r} of version {found['version']!r}")
        rows: dict[str, Any] = {
            name: tuple(_row(kind, row) for row in found[name]) for name, kind in _ROWS.items()
        }
        about = {
            field.name: _checked(str(field.type), found.get(field.name, field.default))
            for field in fields(SaveTrace)
            if field.name not in rows
        }
        return SaveTrace(**about, **rows)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"expected the trace of a save, a JSON object of format {_FORMAT!r} and version "
            f"{_VERSION}, found something else ({type(error).__name__}: {error}). The checkpoint "
            f"itself does not need it",
            key=key or None,
        ) from error


_ROWS: dict[str, type] = {"spans": Span, "phases": PhaseSummary, "stragglers": Straggler}
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (float, int),
}


def _row(kind: type, values: Any) -> Any:
    """Returns a dataclass made from a row with its fields in order, each of the field's type."""
    named = zip(fields(kind), values, strict=True)
    return kind(*(_checked(str(field.type), value) for field, value in named))


def _checked(kind: str, value: Any) -> Any:
    is_finite = not isinstance(value, int | float) or (isfinite(value) and abs(value) < 1e18)
    if not isinstance(value, _TYPES[kind]) or isinstance(value, bool) or not is_finite:
        raise ValueError(f"expected {kind}, found {value!r}")
    return value


def _tidy(seconds: float) -> float:
    return round(float(seconds), 5)


def _summary(phase: str, columns: RankTimes) -> PhaseSummary:
    seconds = columns.stop_s - columns.start_s
    low, median, p90, p99, high = map(_tidy, np.quantile(seconds, [0.0, 0.5, 0.9, 0.99, 1.0]))
    num_bytes = int(columns.num_bytes.sum())
    return PhaseSummary(phase, len(seconds), low, median, p90, p99, high, num_bytes)


def _stragglers(times: Mapping[str, RankTimes], where: Mapping[int, str]) -> tuple[Straggler, ...]:
    found: list[Straggler] = []
    for phase, columns in times.items():
        if phase == "plan":
            continue  # ranks that join early wait longest
        late_s = columns.late_s
        # Why the lower median: of two ranks, one is compared with the other.
        median_s = float(np.sort(late_s)[(len(late_s) - 1) // 2])
        bound_s = max(LATE_RATIO * median_s, median_s + LATE_S)
        rows = np.flatnonzero(late_s > bound_s)
        rows = rows[np.argsort(-late_s[rows], kind="stable")][:MOST_STRAGGLERS]
        for row in rows.tolist():
            rank = int(columns.rank[row])
            told = (_tidy(late_s[row]), _tidy(median_s), where.get(rank, "")[:200])
            found.append(Straggler(rank, phase, *told))
    found.sort(key=lambda straggler: (straggler.median_s - straggler.seconds, straggler.rank))
    return tuple(found[:MOST_STRAGGLERS])


def _choose_ranks(
    times: Mapping[str, RankTimes], world_size: int, stragglers: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Returns the ranks whose spans are listed: at most `MOST_RANKS`."""
    if world_size <= MOST_RANKS:
        return np.arange(world_size)
    chosen = dict.fromkeys(stragglers)
    for columns in times.values():
        chosen.update(dict.fromkeys(columns.rank[np.argsort(-columns.stop_s)[:4]].tolist()))
    left = max(0, MOST_RANKS - len(chosen))
    chosen.update(dict.fromkeys(np.linspace(0, world_size - 1, left).astype(int).tolist()))
    return np.asarray([*chosen][:MOST_RANKS], np.int64)
