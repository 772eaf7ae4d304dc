"""Reports of what is settled: none of them may turn a committed save, or a load, into a failure.

After a commit, and after the last byte of a load has its place, there are only reports: warnings,
which may be errors (`python -W error`), logs, whose handlers may raise, and calls of the user's own
objects. All of them go through here.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

logger = logging.getLogger(__name__)


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Logs what a report raises, and goes on.

    Args:
        what: Reports, in words.

    Examples:
        >>> logger.disabled = True
        >>> with contained("a listener"):
        ...     raise ValueError("no")
        >>> logger.disabled = False
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, what it reports stands
        # Suppressed: it may be a handler of logs that raised.
        with suppress(Exception):
            logger.warning("%s failed: %s: %s", what, type(error).__name__, error)


def warn(message: str, *, stacklevel: int) -> None:
    """Warns the user; where warnings are errors, logs the message instead.

    Args:
        message: What to tell.
        stacklevel: As for `warnings.warn`, from the caller.
    """
    with contained("A warning"):
        try:
            warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)
        except UserWarning:
            logger.warning("%s", message)
