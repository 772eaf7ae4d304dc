"""How much of something is there already, for those who wait while another writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import open_storage

__all__ = ["Told", "watched"]

LOOKS_S = 0.25

Told = Callable[[int, int], None]
"""What is told bytes done and in all, now and then."""


@contextmanager
def watched(target: AnyPlace, told: Told | None, done: int, total: int) -> Iterator[None]:
    """Tells now and then how much of what is saved is there, which a save itself does not.

    Args:
        target: Where it is saved; what is no directory of this machine is not looked at.
        told: Called with bytes done and in all, from another thread.
        done: Bytes that were done before.
        total: What is told in the end.
    """
    if told is None:
        yield
        return
    storage, over = open_storage(target), threading.Event()
    folder = Path(storage.url) if isinstance(storage, LocalStorage) else None

    def look() -> None:
        while folder is not None and not over.wait(LOOKS_S):
            with suppress(OSError):
                found = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
                told(min(done + found, total), total)

    looking = threading.Thread(target=look, name="ray-dcp-watched", daemon=True)
    looking.start()
    try:
        yield
        told(total, total)
    finally:
        over.set()
        looking.join()
