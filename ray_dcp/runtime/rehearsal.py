"""A small save in this process's memory, so that its first real one finds everything loaded.

What a process imports at its first save takes 0.3 to 0.6 s, most of it pyarrow looking for pandas.
An actor that plays one save while nobody waits for it spares the first save of the job that time.
"""

from __future__ import annotations

import importlib
import logging
import secrets
import threading
from collections.abc import Callable, Sequence

from ray_dcp.options import SaveOptions
from ray_dcp.plan.columns import ColumnsBuilder
from ray_dcp.plan.values import Columns
from ray_dcp.protocol.messages import Target
from ray_dcp.runtime.inline import InlineSession
from ray_dcp.runtime.rank import drive
from ray_dcp.runtime.rank_captured import Captured
from ray_dcp.runtime.rank_save import save_rank
from ray_dcp.store.memory import MemoryStorage

__all__ = ["begin_rehearsal", "rehearse"]

logger = logging.getLogger(__name__)


def begin_rehearsal(
    capture: Callable[[], Captured] | None = None, *, modules: Sequence[str] = ()
) -> threading.Thread:
    """Plays a save in a thread of its own; one that fails is logged, and changes nothing.

    Args:
        capture: As for `rehearse`.
        modules: Further modules to import.

    Returns:
        The thread; it ends with the rehearsal.
    """

    def run() -> None:
        try:
            for module in modules:
                importlib.import_module(module)
            rehearse(capture)
        except Exception:
            logger.warning("The rehearsal failed; the first save will be slower", exc_info=True)

    thread = threading.Thread(target=run, name="ray_dcp rehearsal", daemon=True)
    thread.start()
    return thread


def rehearse(capture: Callable[[], Captured] | None = None) -> None:
    """Saves a few bytes to memory of this process, as one rank alone, and removes them.

    Args:
        capture: Gives what is saved; by default a tensor and an object, without torch.

    Raises:
        CheckpointError: The save failed.

    Example:
        >>> rehearse()
    """
    url = f"memory://ray-dcp-rehearsal/{secrets.token_hex(8)}"
    session = InlineSession("rehearsal")
    try:
        save = save_rank(
            session.next_key(), rank=0, world_size=1, target=Target(url), options=SaveOptions(),
            capture=capture or _Small, memory=session.plans,
        )  # fmt: skip
        drive(save, session.call)
    finally:
        storage = MemoryStorage(url.removeprefix("memory://"))
        storage.delete([entry.key for entry in storage.list()])


class _Small:
    """A tensor and an object."""

    warnings: tuple[str, ...] = ()

    def __init__(self) -> None:
        builder = ColumnsBuilder()
        builder.tensor("w", "float32", (2, 3))
        builder.object("step")
        self.columns: Columns = builder.build()

    def source(self, row: int, /) -> memoryview:
        """See `Captured.source`."""
        return memoryview(bytes(24))

    def deferred(self, row: int, /) -> bytes:
        """See `Captured.deferred`."""
        return b"0"
