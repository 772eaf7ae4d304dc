"""Whether a state changed between the call of `async_save` and the end of staging.

For people who look for a race of their own: a thread or a CUDA stream that still writes into
tensors while they are saved gives a checkpoint of no moment at all, and nothing else tells.
"""

from __future__ import annotations

from ray_dcp.errors import InvalidRequestError
from ray_dcp.format.checksums import block_check
from ray_dcp.plan.values import Columns, Kind
from ray_dcp.runtime.rank_captured import Captured

__all__ = ["Unchanged", "check_unchanged"]

_MOST_NAMED = 8


class Unchanged:
    """A capture that has noted the content of its tensors; see `Captured` for the rest.

    Args:
        captured: What it notes.
        rank: For the error.
    """

    def __init__(self, captured: Captured, rank: int) -> None:
        self._captured = captured
        self._rank = rank
        self.columns: Columns = captured.columns
        self.warnings: tuple[str, ...] = captured.warnings
        self.source = captured.source
        self.deferred = captured.deferred
        self._rows = (self.columns.kind == Kind.TENSOR).nonzero()[0].tolist()
        self._noted = self._digests()

    def check(self) -> None:
        """Compares the tensors with what they were.

        Raises:
            InvalidRequestError: Some have changed; they are named.
        """
        pairs = zip(self._rows, self._noted, self._digests(), strict=True)
        changed = [row for row, before, now in pairs if before != now]
        if not changed:
            return
        names = [self.columns.names[self.columns.name[row]] for row in changed]
        shown = ", ".join(map(repr, dict.fromkeys(names[:_MOST_NAMED])))
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        raise InvalidRequestError(
            f"Expected nobody to write into the state between the call of async_save and "
            f"staged(), but the bytes of {shown}{more} changed on rank {self._rank}. Another "
            f"thread or CUDA stream still works on them: wait for it before async_save",
            key="check_unchanged",
            rank=self._rank,
        )

    def _digests(self) -> list[int]:
        return [block_check(self._captured.source(row)) for row in self._rows]


def check_unchanged(captured: Captured) -> None:
    """Takes that all bytes of a capture are copied.

    Raises:
        InvalidRequestError: It is an `Unchanged`, and they have changed meanwhile.
    """
    if isinstance(captured, Unchanged):
        captured.check()
