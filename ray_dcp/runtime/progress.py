"""`ProgressBar`: draws how far the writing of a save is, on the terminal of Ray's driver."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["ProgressBar"]

EVERY_S = 0.5

CLOSE_S = 2.0
"""How long the end of a save waits for its bar: it may be asking a stager."""

logger = logging.getLogger(__name__)


class ProgressBar:
    """Draws while it is entered. Without Ray it does nothing; it never raises.

    Args:
        checkpoint_id: Path or URL, of which the end is shown.
        ask: Returns bytes written and bytes in all; called over and over in a thread.
    """

    def __init__(self, checkpoint_id: str, ask: Callable[[], tuple[int, int]]) -> None:
        self._title = f"saving {checkpoint_id[-40:]}"
        self._ask = ask
        self._over = threading.Event()
        self._drawn = 0
        self._bar: Any = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ProgressBar:
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._over.wait(EVERY_S):
                self._draw(*self._ask())
            if self._bar is not None:
                self._bar.close()
        except Exception as error:  # noqa: BLE001 - no save fails because of its bar
            logger.debug("The progress of a save is not drawn: %s", error)

    def _draw(self, written: int, total: int) -> None:
        if not total:
            return
        if self._bar is None:
            from ray.experimental import tqdm_ray

            self._bar = tqdm_ray.tqdm(desc=self._title, total=total, unit="B", flush_interval_s=0.0)
        self._bar.update(written - self._drawn)
        self._drawn = written
