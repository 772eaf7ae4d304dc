"""`WindowBytes`: the bytes of a window, as they lie in the buffers of an object."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np


class WindowBytes:
    """The bytes of a window, as the runs of an object.

    Args:
        runs: The bytes, in consecutive runs, each uint8[n].
        ref: Reference by which other processes of this node get the same bytes.

    Attributes:
        ref: As given, until `release`.
        borrowers: Who uses the bytes by it.
    """

    def __init__(self, runs: Sequence[np.ndarray], ref: Any = None) -> None:
        self.ref = ref
        self.borrowers: set[Hashable] = set()
        self._runs = [memoryview(run) for run in runs]  # type: ignore[arg-type]
        self._ends = list(accumulate(map(len, runs)))
        self._arrays = [weakref.ref(run) for run in runs]

    def views(self, offset: int, num_bytes: int) -> Iterator[memoryview]:
        """Yields some of them: the part in each run, one behind the other."""
        index = bisect_right(self._ends, offset)
        while num_bytes > 0:
            start = offset - self._ends[index] + len(self._runs[index])
            found = self._runs[index][start : start + num_bytes]
            yield found
            offset, num_bytes, index = offset + len(found), num_bytes - len(found), index + 1

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fills `target` with their bytes from `offset` on."""
        for part in self.views(offset, len(target)):
            # Why numpy: unlike an assignment to a memoryview it lets other threads run.
            np.copyto(np.frombuffer(target[: len(part)], np.uint8), np.frombuffer(part, np.uint8))
            target = target[len(part) :]

    def release(self) -> None:
        """Lets go of the bytes."""
        self._runs.clear()
        self.ref = None

    @property
    def has_bytes(self) -> bool:
        """Whether it was not let go."""
        return bool(self._runs)

    @property
    def is_gone(self) -> bool:
        """Whether nobody uses the bytes any more."""
        return not self.borrowers and all(array() is None for array in self._arrays)


def runs_of(buffers: Sequence[Any]) -> list[np.ndarray]:
    """Returns the runs of an object that came through Ray, where they lie."""
    return [np.frombuffer(buffer, np.uint8) for buffer in buffers]
