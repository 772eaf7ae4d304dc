"""What a coordinator hears of stagers, for the asynchronous saves that they write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from ray_dcp.protocol.exchange import ExchangeMachine
from ray_dcp.protocol.load import LoadMachine
from ray_dcp.protocol.messages import OpKey
from ray_dcp.protocol.operation import Commands
from ray_dcp.protocol.save import SaveMachine
from ray_dcp.protocol.staged_plan import StagedPlan
from ray_dcp.protocol.staged_save import StagedSaveMachine

__all__ = ["Machine", "StagerHearing"]

Machine = SaveMachine | LoadMachine | ExchangeMachine


class StagerHearing(ABC):
    """Hands what becomes of stagers to the saves that need them."""

    def __init__(self) -> None:
        self._active: dict[OpKey, Machine] = {}

    @abstractmethod
    def _after(self, machine: Machine, commands: Commands) -> Commands:
        """Takes what an event led to."""

    def staged_plan(self, key: OpKey) -> StagedPlan | None:
        """Returns what another coordinator needs to end an asynchronous save that is planned."""
        machine = self._active.get(key)
        return machine.staged_plan() if isinstance(machine, StagedSaveMachine) else None

    def stager_lost(self, stager: str, reason: str) -> Commands:
        """Takes that a stager died or froze: others take over, or saves that need it fail.

        Args:
            stager: `PartsHeld.stager`.
            reason: How it is known, for the error.
        """
        commands: Commands = ()
        for machine in list(self._active.values()):
            if isinstance(machine, StagedSaveMachine):
                commands += self._after(machine, machine.stager_lost(stager, reason))
        return commands

    def stagers(self) -> dict[str, dict[OpKey, float]]:
        """Returns the stagers whose bytes are awaited: for each save its patience, in seconds."""
        found: dict[str, dict[OpKey, float]] = {}
        for key, machine in self._active.items():
            if isinstance(machine, StagedSaveMachine):
                for stager in machine.holders:
                    found.setdefault(stager, {})[key] = machine.options.heartbeat_timeout_s
        return found

    def held_by(self, stager: str) -> dict[OpKey, list[int]]:
        """Returns the ranks whose bytes a stager is to write, of each save, for messages."""
        machines = [one for one in self._active.values() if isinstance(one, StagedSaveMachine)]
        return {one.key: ranks for one in machines if (ranks := one.held_by(stager))}

    def stager_heard(
        self, paces: Mapping[OpKey, Mapping[int, tuple[int, int]]], now_s: float
    ) -> Commands:
        """Takes how far a stager is.

        Args:
            paces: For each save and rank bytes written and bytes in all.
            now_s: Seconds that never go back, always of one clock.
        """
        commands: Commands = ()
        for key, by_rank in paces.items():
            machine = self._active.get(key)
            if isinstance(machine, StagedSaveMachine):
                commands += self._after(machine, machine.heard(by_rank, now_s))
        return commands

    def lags(self, key: OpKey, rank: int, reason: str) -> Commands:
        """Takes that a rank's stager is much slower than the others: another is to help.

        Args:
            key: Which save.
            rank: Whose bytes it writes.
            reason: What was seen, for the report.
        """
        machine = self._active.get(key)
        if not isinstance(machine, StagedSaveMachine):
            return ()
        return self._after(machine, machine.lags(rank, reason))
