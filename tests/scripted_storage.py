"""Fault scripts that count changes over all storages of a test, whatever is changed."""

from __future__ import annotations

from typing import Literal

from tests.fault_injection import Call, Fault, Script


class ChangeScript(Script):
    """Makes the change of one number go wrong: a written key, a published part file, a deleted key.

    Args:
        at: Number of the change, from 0; None for none.
        lasting: All later ones go wrong as well.
        effect: Of the fault: nothing happens, or it happens and the answer is lost.
        stops: The process dies with it.
    """

    def __init__(
        self,
        at: int | None,
        *,
        lasting: bool = False,
        effect: Literal["before", "after"] = "before",
        stops: bool = False,
    ) -> None:
        super().__init__()
        self._at = at
        self._lasting = lasting
        self._effect = effect
        self._stops = stops
        self.changes: list[Call] = []

    @property
    def hit(self) -> bool:
        """It was reached."""
        return self._at is not None and len(self.changes) > self._at

    def choose(self, call: Call) -> Fault | None:
        """See `Script.choose`."""
        if call.operation not in ("write", "commit", "delete"):
            return None
        number = len(self.changes)
        self.changes.append(call)
        if self._at is None or number < self._at or (number > self._at and not self._lasting):
            return None
        return Fault(operation=call.operation, effect=self._effect, stops=self._stops)
