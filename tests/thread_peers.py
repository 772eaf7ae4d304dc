"""The transport of shared reads among threads of one process: what ranks on Ray do, without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ray_dcp.commit_protocol.load import Decline, Enter, Leave, Offer, SharedReads, Use
from ray_dcp.commit_protocol.messages import OpKey
from ray_dcp.planning.reads import RankShare

KEY = OpKey("threads", 0)


class Board:
    """What all ranks of one load share.

    Attributes:
        held_bytes: Of the units that are offered now, by reader.
        most_bytes: The most that each reader ever had offered.
    """

    def __init__(self) -> None:
        self.handover = SharedReads()
        self.changed = threading.Condition()
        self.held_bytes: dict[int, int] = {}
        self.most_bytes: dict[int, int] = {}


class ThreadExchange:
    """Implements `Transport` for one rank.

    Args:
        board: What the ranks of the load share.
        rank: This rank.
        refuses: Whether a unit that this rank has read can't be handed on.
        loses: Whether a unit that was handed on can't be had.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        refuses: Callable[[int], bool] = lambda _: False,
        loses: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._board, self._rank = board, rank
        self._refuses, self._loses = refuses, loses
        self._freed: Callable[[int], None] = lambda _: None
        self._seen = 0
        self._there: dict[int, bytes] = {}
        self._gone: set[int] = set()
        self._lengths: dict[int, int] = {}
        self._left = False
        self._offered: list[int] = []
        self._reader: dict[int, int] = {}

    def enter(self, share: RankShare, freed: Callable[[int], None]) -> None:
        self._freed = freed
        self._reader = dict(zip(share.unit.tolist(), share.reader.tolist(), strict=True))
        self._say(Enter(KEY, self._rank, tuple(self._reader), tuple(self._reader.values())))
        threading.Thread(target=self._listen, daemon=True).start()

    def offer(self, unit: int, ranks: int, data: memoryview) -> memoryview | None:
        if self._refuses(unit):
            return None
        held = bytes(data)
        board = self._board
        with board.changed:
            now = board.held_bytes.get(self._rank, 0) + len(held)
            board.held_bytes[self._rank] = now
            board.most_bytes[self._rank] = max(board.most_bytes.get(self._rank, 0), now)
            self._lengths[unit] = len(held)
            self._offered.append(unit)
        self._say(Offer(KEY, self._rank, unit, ranks, held))
        return memoryview(held)

    def decline(self, units: Sequence[int]) -> None:
        self._say(Decline(KEY, self._rank, tuple(units)))

    def take(self, unit: int, reader: int) -> memoryview | None:
        if self._loses(unit):
            return None
        with self._board.changed:
            while unit not in self._there and unit not in self._gone and not self._left:
                assert self._board.changed.wait(180), f"nobody offers unit {unit}"
            found = self._there.get(unit)
        return None if found is None else memoryview(found)

    def use(self, unit: int) -> None:
        with self._board.changed:
            self._there.pop(unit, None)
        self._say(Use(KEY, self._rank, (unit,)))

    def leave(self) -> None:
        self._left = True
        self._say(Leave(KEY, self._rank, tuple(self._offered)))

    def _say(self, word: Enter | Offer | Decline | Use | Leave) -> None:
        with self._board.changed:
            self._board.handover.take(word)
            self._board.changed.notify_all()

    def _listen(self) -> None:
        board = self._board
        while not self._left:
            with board.changed:
                news = board.handover.updates(self._rank, self._seen)
                if not news:
                    board.changed.wait(0.05)
                self._seen += len(news)
                freed = []
                for new in news:
                    if self._reader[new.unit] == self._rank:
                        freed.append(new.unit)
                        board.held_bytes[self._rank] -= self._lengths.pop(new.unit)
                    elif new.what == "there":
                        self._there[new.unit] = new.handle
                    else:
                        self._gone.add(new.unit)
                board.changed.notify_all()
            for unit in freed:
                self._freed(unit)
