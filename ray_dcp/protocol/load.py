"""The load machine: all ranks read the same checkpoint, and none before every rank can.

| phase | waits for | then |
|---|---|---|
| joining | `LoadJoin` of every rank | find the checkpoint |
| opening | `CheckpointRead` | `LoadGo` to every rank |
| planning | `LoadReady` of every rank: its reads are planned, nothing was touched | share reads |
| sharing | `ReadsShared`; passed over when no two ranks would share any | `LoadProceed` |
| reading | `LoadDone` of every rank | `LoadOutcome`: done |

An error in any phase is told to every rank. Up to `planning` no target has changed by then.
"""

from __future__ import annotations

from collections.abc import Mapping

from ray_dcp.errors import CheckpointError, DeadlineError
from ray_dcp.plan.read_once import RankShare, ReadNeeds, ReadShares, may_pay
from ray_dcp.protocol.commands import (
    CheckpointRead,
    Failed,
    ReadCheckpoint,
    ReadsShared,
    Result,
    ShareReads,
)
from ray_dcp.protocol.messages import (
    LoadDone,
    LoadGo,
    LoadJoin,
    LoadOutcome,
    LoadProceed,
    LoadReady,
    Request,
)
from ray_dcp.protocol.operation import Commands, Operation
from ray_dcp.protocol.verdict import combine, located

__all__ = ["LoadMachine"]


SHARE_S = 60.0
"""How long may be thought about who reads what for whom, in seconds; after that everybody reads
for himself."""


class LoadMachine(Operation):
    """One load of all ranks of a session.

    Args:
        first: The first join; hand it to `receive` as well.
    """

    roll_calls = ("joining", "planning")

    def __init__(self, first: LoadJoin) -> None:
        super().__init__(first)
        self._target = first.target
        self._options = first.options
        self._bytes_needed = 0
        self._bytes_read = 0
        self._bytes_from_memory = 0
        self._bytes_from_peers = 0
        self._bytes_read_instead = 0
        self._needs: dict[int, ReadNeeds] = {}

    def _on_request(self, request: Request) -> Commands:
        match self.phase, request:
            case "joining", LoadJoin():
                self._admit(request)
            case "planning", LoadReady() if 0 <= request.rank < self.world_size:
                self._note(request, request.error)
                if request.needs is not None:
                    self._needs[request.rank] = request.needs
            case "reading", LoadDone() if 0 <= request.rank < self.world_size:
                self._note(request, request.error)
                self._bytes_needed += request.bytes_needed
                self._bytes_read += request.bytes_read
                self._bytes_from_memory += request.bytes_from_memory
                self._bytes_from_peers += request.bytes_from_peers
                self._bytes_read_instead += request.bytes_read_instead
            case _:
                raise self._contradiction(f"{type(request).__name__} of rank {request.rank}")
        return self._came()

    def _on_result(self, result: Result) -> Commands:
        match self.phase, result:
            case "opening", CheckpointRead():
                go = LoadGo(result.kind, result.slot, result.record, result.table)
                self._call("planning")
                return (self._arm(self._options.plan_timeout_s), *self._give(lambda _: go))
            case "opening", Failed():
                return self._refuse_all(located(result.error, self._target.url))
            case "sharing", ReadsShared(shares):
                return self._proceed(shares if len(shares) else None)
            case "sharing", Failed():
                # Why go on: it was only to spare the storage.
                return self._proceed(None)
        raise self._contradiction(f"result {type(result).__name__}")

    def _on_expired(self) -> Commands:
        if self.phase == "opening":
            return self._refuse_all(
                DeadlineError(
                    f"Expected the storage to show the checkpoint within "
                    f"{self._options.plan_timeout_s:g} s, but it was slower. Raise "
                    f"LoadOptions.plan_timeout_s, or look at the storage",
                    checkpoint_id=self._target.url,
                )
            )
        if self.phase == "sharing":
            return self._proceed(None)
        self._overdue(*self._awaited())
        return self._refuse_all(combine(self._roll.errors, self._target.url))

    def _on_lost(self, errors: Mapping[int, CheckpointError]) -> Commands:
        if self.phase in ("opening", "sharing"):
            return self._refuse_all(combine(errors, self._target.url))
        if self.phase == "reading":
            errors = {rank: e for rank, e in errors.items() if rank not in self._roll.came}
        self._roll.blame(errors)
        return self._came()

    def _awaited(self) -> tuple[str, float, str]:
        plan_s, read_s = self._options.plan_timeout_s, self._options.read_timeout_s
        match self.phase:
            case "joining":
                return "join the load", plan_s, "raise LoadOptions.plan_timeout_s"
            case "planning":
                return "plan its reads", plan_s, "raise LoadOptions.plan_timeout_s"
        return "read its share", read_s, "raise LoadOptions.read_timeout_s"

    def _came(self) -> Commands:
        if not self._roll.is_complete:
            return self._wait(self._awaited()[1])
        if self._roll.errors:
            return self._refuse_all(combine(self._roll.errors, self._target.url))
        match self.phase:
            case "joining":
                task = ReadCheckpoint(self._target)
                return self._step("opening", task, self._options.plan_timeout_s)
            case "planning":
                if not may_pay(self._needs.values()):
                    return self._proceed(None)
                sharing = ShareReads(dict(self._needs), self.world_size)
                options = self._options
                within_s = min(SHARE_S, options.plan_timeout_s, options.read_timeout_s)
                return self._step("sharing", sharing, within_s)
        outcome = LoadOutcome(
            self._bytes_needed, self._bytes_read, self._bytes_from_memory,
            self._bytes_from_peers, self._bytes_read_instead,
        )  # fmt: skip
        return (*self._conclude(outcome), *self._end("done"))

    def _proceed(self, shares: ReadShares | None) -> Commands:
        self._needs.clear()
        self._abandon()
        self._call("reading")

        def share(rank: int) -> RankShare | None:
            part = None if shares is None else shares.of_rank(rank)
            return part if part is not None and len(part) else None

        proceed = self._give(lambda rank: LoadProceed(share(rank)))
        return (self._arm(self._options.read_timeout_s), *proceed)
