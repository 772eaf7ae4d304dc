"""Deletes steps off the save path: in a thread, with retries, one after the other.

One failure ends nothing: the step is tried again, later and later, and what is left when the
process ends is found by the next writer.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time

from ray_dcp.errors import CheckpointError, CheckpointExistsError, InvalidRequestError
from ray_dcp.manager.reading import Deletions
from ray_dcp.manager.steps import Steps
from ray_dcp.manager.writing import Right

__all__ = ["Remover"]

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 60.0
LEASED_RETRY_S = 5.0
"""How long to wait before a step that is read is tried again, in seconds."""

logger = logging.getLogger(__name__)


class Remover:
    """Removes step folders that may go.

    Args:
        steps: Of the root.
        right: To write there; without it nothing is removed.
        deletions: Knows who reads.
        lock: Guards `steps`.
        threaded: In a thread; else `drain` removes.
        most_tries: After so many failures a folder is left to the next writer.
    """

    def __init__(
        self,
        steps: Steps,
        right: Right,
        deletions: Deletions,
        lock: threading.RLock,
        *,
        threaded: bool = True,
        most_tries: int = 20,
    ) -> None:
        self._steps = steps
        self._right = right
        self._deletions = deletions
        self._lock = lock
        self._threaded = threaded
        self._most_tries = most_tries
        self._todo: list[tuple[float, int, str, int]] = []
        self._told: dict[str, CheckpointError] = {}
        self._woken = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = False
        self._closed = False
        self._number = 0

    @property
    def failed(self) -> dict[str, CheckpointError]:
        """Folders whose last try failed, by name, with why; empty when all went well."""
        with self._woken:
            return dict(self._told)

    def remove(self, name: str) -> None:
        """Takes on a folder, whose removal has been decided (`Steps.doom`).

        Args:
            name: Of the folder.
        """
        with self._woken:
            self._add(name, 0.0, 0)
            if self._threaded and self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="ray_dcp removal", daemon=True
                )
                self._thread.start()
            self._woken.notify_all()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Waits until all that can be removed now is removed.

        What is read by somebody, and what has failed, is not waited for.

        Args:
            timeout_s: How long to wait, in seconds; for ever if None.

        Returns:
            Whether nothing is left that could be removed now.
        """
        if not self._threaded:
            while self._try_one():
                pass
            return True
        with self._woken:
            return self._woken.wait_for(lambda: not self._busy and not self._ready(), timeout_s)

    def close(self) -> None:
        """Ends the thread after what it does now."""
        with self._woken:
            self._closed = True
            self._woken.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(LAST_RETRY_S)

    def _add(self, name: str, wait_s: float, tries: int) -> None:
        self._number += 1
        heapq.heappush(self._todo, (time.monotonic() + wait_s, self._number, name, tries))

    def _ready(self) -> bool:
        return bool(self._todo) and self._todo[0][0] <= time.monotonic()

    def _run(self) -> None:
        while True:
            with self._woken:
                while not self._closed and not self._ready():
                    self._woken.notify_all()
                    wait_s = self._todo[0][0] - time.monotonic() if self._todo else None
                    self._woken.wait(None if wait_s is None else max(0.0, wait_s))
                if self._closed:
                    return
            self._try_one()

    def _try_one(self) -> bool:
        """Tries the folder whose turn it is; tells whether there was one."""
        with self._woken:
            if not self._ready():
                return False
            _, _, name, tries = heapq.heappop(self._todo)
            self._busy = True
        again_s, error = None, None
        try:
            again_s, error = self._remove(name, tries)
        finally:
            with self._woken:
                self._busy = False
                self._told.pop(name, None)
                if error is not None:
                    self._told[name] = error
                if again_s is not None:
                    self._add(name, again_s, tries + (error is not None))
                self._woken.notify_all()
        return True

    def _remove(self, name: str, tries: int) -> tuple[float | None, CheckpointError | None]:
        """Removes a folder; returns after how many seconds to try again, and what went wrong."""
        step = self._steps.names.step_of(name)
        try:
            # Why each time: whoever lost the right must not delete any more.
            self._right.check()
        except (CheckpointExistsError, InvalidRequestError):
            return None, None
        except CheckpointError as error:
            return self._later(name, tries, error)
        try:
            if step is not None and not self._deletions.begin(step):
                return LEASED_RETRY_S, None
            self._steps.remove(name)
            if step is not None:
                self._deletions.end(step)
        except CheckpointError as error:
            return self._later(name, tries, error)
        with self._lock:
            self._steps.doomed.discard(name)
        return None, None

    def _later(
        self, name: str, tries: int, error: CheckpointError
    ) -> tuple[float | None, CheckpointError]:
        """Returns after how many seconds a folder is tried again; None when no more."""
        if tries + 1 >= self._most_tries:
            logger.warning(
                "%s/%s could not be deleted in %d tries and is left: %s. The next writer tries "
                "again", self._steps.root.url, name, tries + 1, error,
            )  # fmt: skip
            return None, error
        if tries == 0:
            logger.info("Deleting %s/%s is tried again: %s", self._steps.root.url, name, error)
        return min(LAST_RETRY_S, FIRST_RETRY_S * 2**tries), error
