"""Removes what may go off the save path: in a thread, pass by pass, with retries.

One failure ends nothing: what could not be removed is tried again, later and later, and what is
left when the process ends is found by the next writer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from ray_dcp.errors import CheckpointError, CheckpointExistsError, InvalidRequestError

__all__ = ["Remover"]

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 60.0
LEASED_RETRY_S = 5.0
"""How long to wait before a step that is read is tried again, in seconds."""
MOST_TRIES = 20
"""Passes in a row that may fail before the rest is left to the pass after the next save."""

Left = Mapping[str, CheckpointError | None]
logger = logging.getLogger(__name__)


class Remover:
    """Runs passes of removal, one at a time.

    Args:
        url: Of the root, for messages.
        remove: One pass; returns what could not be removed, see `Writer.remove_superfluous`.
        threaded: In a thread; else `drain` runs them.
    """

    def __init__(self, url: str, remove: Callable[[], Left], *, threaded: bool = True) -> None:
        self._url = url
        self._remove = remove
        self._threaded = threaded
        self._changed = threading.Condition()
        self._due_s: float | None = None
        self._tries = 0
        self._left: Left = {}
        self._thread: threading.Thread | None = None
        self._busy = False
        self._closed = False

    @property
    def failed(self) -> dict[str, CheckpointError]:
        """Folders that the last pass could not remove, by name, with why."""
        with self._changed:
            return {name: error for name, error in self._left.items() if error is not None}

    def wake(self) -> None:
        """Has a pass run soon."""
        with self._changed:
            self._due_s, self._tries = time.monotonic(), 0
            if self._threaded and self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._run, name="ray_dcp removal", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Waits until all that can be removed now is removed.

        What is read by somebody, and what has failed, is not waited for.

        Args:
            timeout_s: How long to wait, in seconds; for ever if None.

        Returns:
            Whether nothing is left that could be removed now.
        """
        if not self._threaded:
            while self._is_due():
                self._pass()
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy and not self._is_due(), timeout_s)

    def close(self) -> None:
        """Ends the thread after what it does now."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(LAST_RETRY_S)

    def _is_due(self) -> bool:
        return self._due_s is not None and self._due_s <= time.monotonic()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._is_due():
                    due_s = self._due_s
                    wait_s = None if due_s is None else max(0.0, due_s - time.monotonic())
                    self._changed.wait(wait_s)
                if self._closed:
                    return
            self._pass()

    def _pass(self) -> None:
        with self._changed:
            self._busy, self._due_s = True, None
        left: Left = {}
        try:
            left = self._remove()
        except (CheckpointExistsError, InvalidRequestError) as error:
            # Why no more: whoever lost the right must not delete.
            logger.info("Nothing is removed from %s any more: %s", self._url, error)
        except CheckpointError as error:
            left = {"": error}
        finally:
            with self._changed:
                self._busy, self._left = False, left
                if left and self._due_s is None:
                    self._try_again(left)
                self._changed.notify_all()

    def _try_again(self, left: Left) -> None:
        failed = {name: error for name, error in left.items() if error is not None}
        if failed:
            self._tries += 1
        told = "; ".join(f"{name or 'all'}: {error}" for name, error in failed.items())
        if self._tries >= MOST_TRIES:
            logger.warning(
                "Steps of %s could not be deleted in %d tries and are left: %s. The next save "
                "tries again", self._url, self._tries, told,
            )  # fmt: skip
            return
        if self._tries == 1:
            logger.info("Deleting from %s is tried again: %s", self._url, told)
        wait_s = FIRST_RETRY_S * 2 ** (self._tries - 1) if failed else LEASED_RETRY_S
        self._due_s = time.monotonic() + min(LAST_RETRY_S, wait_s)
