"""`SaveRecorder`: what the coordinator receives and does in one save, with times. Pure.

One clock for all ranks: a phase ends when the message that ends it arrives. A rank reports as
durations what it did before its first message, and what it copied between messages.
"""

from __future__ import annotations

from ray_dcp.format.save_trace import PHASES, RankTimes, SaveTrace, Span, make_trace
from ray_dcp.protocol.commands import (
    Answer,
    BuildCommit,
    CreateRecord,
    MakePlan,
    ReadRecords,
    Task,
    WriteTable,
)
from ray_dcp.protocol.messages import (
    PartsHeld,
    PartsWritten,
    Request,
    SaveAgain,
    SaveGo,
    SaveJoin,
    SaveReceipt,
    SaveStaged,
)

TASKS: dict[type, str] = {
    ReadRecords: "look",
    MakePlan: "plan",
    BuildCommit: "build",
    WriteTable: "table",
    CreateRecord: "record",
}


class SaveRecorder:
    """The notes of one save.

    Args:
        first: The first join; hand it to `hears` as well.
        unix_s: When it came, in seconds since 1970.
        now_s: The same on the clock of all other notes, which never goes back.

    Attributes:
        attempt: Id of the attempt, once there is one.

    Complexity:
        A microsecond for each message.
    """

    def __init__(self, first: SaveJoin, unix_s: float, now_s: float) -> None:
        self.attempt = ""
        self._world_size = first.world_size
        self._staged = first.staged
        self._unix_s = unix_s - now_s
        self._begun: dict[int, float] = {}
        self._joined: dict[int, float] = {}
        self._told: dict[int, float] = {}
        self._held: dict[int, float] = {}
        self._written: dict[int, float] = {}
        self._bytes: dict[int, dict[int, int]] = {}
        self._where: dict[int, str] = {}
        self._takeovers: list[tuple[int, float]] = []
        self._tasks: list[tuple[str, float, float]] = []

    def hears(self, request: Request, now_s: float, where: str = "") -> None:
        """Notes a request.

        Args:
            request: Of this save; it may come twice, and only its first counts.
            now_s: When.
            where: Process and node of the rank.
        """
        if isinstance(request, SaveJoin):
            self._begun.setdefault(request.rank, now_s - request.capture_s)
            self._joined.setdefault(request.rank, now_s)
            if where:
                self._where[request.rank] = where
            return
        if not isinstance(request, SaveReceipt | SaveStaged | PartsHeld | PartsWritten):
            return
        failed = not isinstance(request, PartsHeld) and request.error is not None
        if request.attempt != self.attempt or failed:
            return
        rank = request.rank
        match request:
            case SaveReceipt():
                if request.staged_s and rank in self._told:
                    self._held.setdefault(rank, self._told[rank] + request.staged_s)
                self._wrote(request, now_s)
            case PartsHeld(incarnation=0) | SaveStaged(incarnation=0):
                self._held.setdefault(rank, now_s)
            case PartsHeld():
                self._takeovers.append((rank, now_s))
            case PartsWritten():
                self._wrote(request, now_s)

    def tells(self, answer: Answer, now_s: float) -> None:
        """Notes an answer that tells ranks what to write."""
        if isinstance(answer.reply, SaveGo | SaveAgain):
            self.attempt = answer.reply.attempt
            for rank in answer.ranks:
                self._told.setdefault(rank, now_s)

    def performed(self, task: Task, start_s: float, stop_s: float) -> None:
        """Notes a task of the coordinator."""
        name = TASKS.get(type(task))
        if name is not None:
            self._tasks.append((name, start_s, stop_s))

    def trace(self, committed_s: float) -> SaveTrace | None:
        """Returns the trace of a save that was committed just now; None when too little is known.

        Args:
            committed_s: When, on the clock of the notes.
        """
        # Copies: a message that comes late may still be noted, in another thread.
        begun, joined, told = dict(self._begun), dict(self._joined), dict(self._told)
        held, written = dict(self._held), dict(self._written)
        if not self.attempt or not begun:
            return None
        zero_s = min(begun.values())
        steps = {
            "capture": (begun, joined),
            "plan": (joined, told),
            "stage": (told, held),
            "write": ({**told, **held} if not self._staged else told, written),
        }
        return make_trace(
            self.attempt,
            "async_save" if held else "save",
            self._world_size,
            self._unix_s + zero_s,
            committed_s - zero_s,
            [
                Span(name, None, round(start - zero_s, 5), round(stop - zero_s, 5))
                for name, start, stop in list(self._tasks)
            ],
            {phase: self._times(phase, *steps[phase], zero_s) for phase in PHASES},
            takeovers=[(rank, at_s - zero_s) for rank, at_s in list(self._takeovers)],
            where=self._where,
        )

    def _wrote(self, request: SaveReceipt | PartsWritten, now_s: float) -> None:
        files = self._bytes.setdefault(request.rank, {})
        before = len(files)
        for receipt in request.files:
            files.setdefault(receipt.file, receipt.num_bytes)
        # Why: a file that two stagers wrote was durable with the first.
        if len(files) > before or request.rank not in self._written:
            self._written[request.rank] = now_s

    def _times(
        self, phase: str, starts: dict[int, float], stops: dict[int, float], zero_s: float
    ) -> RankTimes:
        ranks = sorted(starts.keys() & stops.keys())
        moved = [sum(self._bytes.get(rank, {}).values()) for rank in ranks]
        return RankTimes.of(
            ranks,
            [starts[rank] - zero_s for rank in ranks],
            [stops[rank] - zero_s for rank in ranks],
            moved if phase in ("stage", "write") else None,
        )
