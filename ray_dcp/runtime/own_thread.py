"""Work that may hang for ever, awaited from an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_own_thread"]

T = TypeVar("T")


async def in_own_thread(work: Callable[[], T]) -> T:
    """Returns what work gives that may hang for ever: in a thread of its own.

    Why not asyncio.to_thread: a few tasks that hang would fill its pool.

    Args:
        work: Never raises.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        result = work()
        loop.call_soon_threadsafe(future.set_result, result)

    threading.Thread(target=run, daemon=True).start()
    return await future
