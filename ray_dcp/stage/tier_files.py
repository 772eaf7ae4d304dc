"""What a node has in memory of a checkpoint: the index of the memory tier.

A file's bytes are found by their place in the file, so that a load reads them as it would read the
file, and verifies them by the same checksums. Frames and padding are not in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ray_dcp.core.values import Int32Array, Int64Array
from ray_dcp.stage.orders import StagedWindow, StageKey
from ray_dcp.stage.windows import StagingLayout


@dataclass(frozen=True)
class Part:
    """A run of bytes in one window, or of frames between such runs, which are nowhere."""

    window: StagedWindow | None
    offset: int
    """First byte in the window."""
    num_bytes: int


@dataclass(frozen=True, eq=False)
class TierFile:
    """Where the bytes of one part file lie in windows.

    Attributes:
        key: Of the file in its checkpoint; it names the attempt.
        start: int64[s], first byte in the file of each run, ascending.
        num_bytes: int64[s].
        offset: int64[s], first byte in the window.
        windows: int32[s], of each run, in the share.
        share: Whose windows they are.
    """

    key: str
    start: Int64Array
    num_bytes: Int64Array
    offset: Int64Array
    windows: Int32Array
    share: StageKey

    def find(self, start: int, num_bytes: int) -> list[Part] | None:
        """Returns where a range of the file lies; None when its first or last byte is not there.

        Readers take small items together, with the frames between them, of which they use nothing.

        Args:
            start: First byte in the file.
            num_bytes: Number of bytes to find.

        Examples:
            >>> from ray_dcp.commit_protocol.messages import OpKey
            >>> runs = np.array([[100, 170], [64, 36], [0, 64]])
            >>> file = TierFile("x", *runs, np.array([3, 3]), StageKey(OpKey("s", 0), 0, "a"))
            >>> [(part.window is None, part.offset, part.num_bytes) for part in file.find(120, 60)]
            [(False, 20, 44), (True, 0, 6), (False, 64, 10)]
            >>> file.find(0, 200) is None
            True
        """
        starts, lengths, offsets, windows = self._lists
        run = bisect_right(starts, start) - 1
        found: list[Part] = []
        while num_bytes > 0:
            if run < 0 or run >= len(starts):
                return None
            skip = start - starts[run]
            if skip < 0 and found:
                found.append(Part(None, 0, -skip))
                start, num_bytes, skip = start - skip, num_bytes + skip, 0
            left = lengths[run] - skip
            if skip < 0 or left <= 0 or num_bytes <= 0:
                return None
            length = min(left, num_bytes)
            window = StagedWindow(self.share, windows[run])
            found.append(Part(window, offsets[run] + skip, length))
            start, num_bytes, run = start + length, num_bytes - length, run + 1
        return found

    @cached_property
    def all_windows(self) -> tuple[StagedWindow, ...]:
        """All windows that have bytes of it."""
        return tuple(StagedWindow(self.share, one) for one in np.unique(self.windows).tolist())

    @cached_property
    def _lists(self) -> tuple[list[int], list[int], list[int], list[int]]:
        # Why: it is asked for each read, and numbers in numpy take ten times as long.
        columns = (self.start, self.num_bytes, self.offset, self.windows)
        starts, lengths, offsets, windows = (column.tolist() for column in columns)
        return starts, lengths, offsets, windows


@dataclass(frozen=True, eq=False)
class TierEntry:
    """What one node keeps of one attempt."""

    files: tuple[TierFile, ...]


def kept_file(key: str, layout: StagingLayout, index: int, share: StageKey) -> TierFile:
    """Returns where a file lies.

    Args:
        key: Key of the file.
        layout: Layout of the rank's share.
        index: Position of the file in the plan.
        share: Key of the rank's share.
    """
    own = slice(*layout.file_first[index : index + 2].tolist())
    num_bytes = layout.num_bytes[own]
    start = layout.file_end[own] - num_bytes
    order = np.argsort(start, kind="stable")
    return TierFile(
        key=key,
        start=start[order],
        num_bytes=num_bytes[order],
        offset=layout.offset[own][order],
        windows=layout.window[own][order],
        share=share,
    )


def cut(parts: Sequence[Part], low: int, high: int) -> list[Part]:
    """Returns the parts that give the bytes `[low, high)` of what parts give.

    Examples:
        >>> [(part.offset, part.num_bytes) for part in cut([Part(None, 5, 10)] * 3, 8, 21)]
        [(13, 2), (5, 10), (5, 1)]
    """
    found: list[Part] = []
    start = 0
    for part in parts:
        first, last = max(low, start), min(high, start + part.num_bytes)
        if first < last:
            found.append(replace(part, offset=part.offset + first - start, num_bytes=last - first))
        start += part.num_bytes
    return found


def too_many(attempts: Sequence[tuple[str, str, int, bool]]) -> set[str]:
    """Returns the attempts that are not to be kept any longer.

    Those before the newest that is known to be committed go, but for the last few of these. What
    came after it may be committed any time, or never.

    Args:
        attempts: `(run, attempt, how many of the run are to be kept, known to be committed)`,
            oldest first. One that several ranks hold parts of may come several times.

    Examples:
        >>> seen = [("r", "a", 1, True), ("r", "b", 1, True), ("r", "b", 1, False)]
        >>> sorted(too_many([*seen, ("r", "c", 1, False), ("other", "d", 1, True)]))
        ['a']
    """
    runs: dict[str, dict[str, bool]] = {}
    most: dict[str, int] = {}
    for run, attempt, keep, is_committed in attempts:
        known = runs.setdefault(run, {})
        known[attempt] = known.get(attempt, False) or is_committed
        most[run] = keep  # the newest wish counts
    surplus: set[str] = set()
    for run, known in runs.items():
        committed = [attempt for attempt, is_committed in known.items() if is_committed]
        if committed:
            names = list(known)
            surplus |= set(names[: names.index(committed[-1])]) - set(committed[-most[run] :])
    return surplus
