"""A save that waits, once all ranks have joined it, until it is let in.

Who lets it in, or refuses it, counts the saves of a session that are under way (`queueing`).
"""

from __future__ import annotations

from ray_dcp.errors import CheckpointError
from ray_dcp.options import SaveOptions
from ray_dcp.protocol.operation import Commands
from ray_dcp.protocol.save import SaveMachine

__all__ = ["QueuedSave"]


class QueuedSave(SaveMachine):
    """See `SaveMachine`; between its phases "joining" and "reading" is "queued"."""

    @property
    def is_queued(self) -> bool:
        """Every rank has joined, and nothing else has happened."""
        return self.phase == "queued"

    @property
    def is_under_way(self) -> bool:
        """It was let in and has not ended: it may hold a copy of the state."""
        return not self.over and self.phase not in ("joining", "queued", "projecting")

    @property
    def is_replaceable(self) -> bool:
        """Nothing of it is known to be written, and nothing of it can be committed."""
        begun = bool(self._receipts) or self._error is not None or self._outcome is not None
        phases = ("gathering", "reading", "planning", "writing")
        return self.phase in phases and not begun

    @property
    def options(self) -> SaveOptions:
        """How it is to be saved."""
        return self._options

    @property
    def url(self) -> str:
        """Where it is saved."""
        return self._target.url

    def let_in(self) -> Commands:
        """Takes that it may begin."""
        return super()._joined()

    def refuse(self, error: CheckpointError) -> Commands:
        """Takes that it may not begin.

        Args:
            error: Why, for all ranks.
        """
        return self._refuse_all(error)

    def _joined(self) -> Commands:
        if not self._roll.is_complete or self._roll.errors:
            return super()._joined()
        self._to("queued")
        return ()
