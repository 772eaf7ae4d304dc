"""`Tracing`: keeps the notes of the saves that are under way, and leaves the trace of each.

A trace is written beside the checkpoint once its record stands, while `.metadata` is published and
what the save replaced is deleted. Nothing that goes wrong with it reaches the save.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from ray_dcp.format.save_trace import encode_trace, trace_key
from ray_dcp.protocol.commands import Answer, Answers, Perform, PublishMetadata, Result
from ray_dcp.protocol.messages import OpKey, Refused, Request, SaveJoin, Target
from ray_dcp.protocol.save_recorder import SaveRecorder
from ray_dcp.protocol.together import Together
from ray_dcp.runtime.perform import perform
from ray_dcp.runtime.shell import Performer
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage

__all__ = ["Tracing"]

MOST_SAVES = 64
"""Saves whose notes are kept: of older ones nobody told how they ended."""

WAIT_S = 0.2
"""How long the outcome may wait for a trace that takes longer than publishing `.metadata`. Whoever
lists the place after a save then finds the trace there, unless the storage is slow."""

logger = logging.getLogger(__name__)


class Tracing:
    """The notes of one coordinator.

    Args:
        clock: Seconds that never go back.
        opener: What opens the storage that takes the traces.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        opener: Callable[[Target], Storage] = open_storage,
    ) -> None:
        self._clock = clock
        self._opener = opener
        self._saves: dict[OpKey, SaveRecorder] = {}

    def hears(self, request: Request, where: object = None) -> None:
        """Notes a request that came.

        Args:
            request: Any.
            where: Process and node of the rank, in words when it is printed.
        """
        # Why no context manager here and below: each of 10,000 ranks sends a few of these.
        try:
            is_join = isinstance(request, SaveJoin)
            save = self._saves.get(request.key)
            if save is None:
                if not isinstance(request, SaveJoin) or not request.options.trace:
                    return
                save = self._saves[request.key] = SaveRecorder(request, time.time(), self._clock())
                if len(self._saves) > MOST_SAVES:
                    del self._saves[next(iter(self._saves))]
            save.hears(request, self._clock(), str(where) if where is not None and is_join else "")
        except Exception:  # noqa: BLE001 - no save fails because of its notes
            self._give_up(request.key)

    def hears_together(self, message: Together, where: Sequence[object]) -> None:
        """Notes what several ranks said in one message, as `hears`; costs little if not wanted."""
        first = message.said[0] if isinstance(message.said, tuple) else message.said.first
        wanted = isinstance(first, SaveJoin) and first.options.trace
        if wanted or message.key in self._saves:
            places = [*where] or [None] * len(message.ranks)
            for request, place in zip(message.requests(), places, strict=True):
                self.hears(request, place)

    def tells(self, answer: Answer | Answers) -> None:
        """Notes an answer that is given."""
        save = self._saves.get(answer.key)
        if save is None:
            return
        if isinstance(answer, Answers):
            for rank in answer.ranks:
                self.tells(Answer(answer.key, rank, answer.step, answer.reply))
            return
        try:
            save.tells(answer, self._clock())
            if isinstance(answer.reply, Refused):
                self._saves.pop(answer.key, None)
        except Exception:  # noqa: BLE001 - no save fails because of its notes
            self._give_up(answer.key)

    def perform(self, command: Perform, performer: Performer = perform) -> Result:
        """Returns what came of a task; notes how long it took, and writes the trace with the last.

        Args:
            command: What is to be done.
            performer: Does it.
        """
        save = self._saves.get(command.key)
        if save is None:
            return performer(command.task)
        if isinstance(command.task, PublishMetadata):
            self._saves.pop(command.key, None)
            writing = self._start(save, command.task.target)
            result = performer(command.task)
            writing.join(WAIT_S)
            return result
        start_s = self._clock()
        result = performer(command.task)
        try:
            save.performed(command.task, start_s, self._clock())
        except Exception:  # noqa: BLE001 - no save fails because of its notes
            self._give_up(command.key)
        return result

    def _give_up(self, key: OpKey) -> None:
        """Drops notes that went wrong, which is no reason for a save to fail."""
        self._saves.pop(key, None)
        logger.debug("The notes of save %d are given up", key.seq, exc_info=True)

    def _start(self, save: SaveRecorder, target: Target) -> threading.Thread:
        committed_s = self._clock()

        def run() -> None:
            try:
                self._write(save, target, committed_s)
            except Exception as error:  # noqa: BLE001 - no save fails because of its trace
                logger.debug("The trace of a save to %s was not written: %s", target.url, error)

        thread = threading.Thread(target=run, name="trace", daemon=True)
        thread.start()
        return thread

    def _write(self, save: SaveRecorder, target: Target, committed_s: float) -> None:
        trace = save.trace(committed_s)
        if trace is None:
            return
        # Why not durable: a crash may take it, and an fsync would cost more than all else.
        writer = self._opener(target).open_writer(trace_key(trace.attempt), sync=False)
        try:
            writer.write(encode_trace(trace))
            writer.commit()
        except BaseException:
            writer.abort()
            raise
