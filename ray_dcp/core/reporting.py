"""Reports about finished operations: none may turn a committed save, or a load, into a failure.

After a commit, and after a load has filled the last byte, only reports remain: warnings, which may
be errors (`python -W error`), logs, whose handlers may raise, and calls of user objects. All of
them go through this module.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

logger = logging.getLogger(__name__)


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Logs an exception raised in the block, and continues.

    Args:
        what: What reports, for the log.

    Examples:
        >>> logger.disabled = True
        >>> with contained("a listener"):
        ...     raise ValueError("no")
        >>> logger.disabled = False
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, what it reports stands
        # Suppressed: the exception may come from a log handler.
        with suppress(Exception):
            logger.warning("%s failed: %s: %s", what, type(error).__name__, error)


def warn(message: str, *, stacklevel: int) -> None:
    """Warns the user; if warnings are errors, logs the message instead.

    Args:
        message: The warning.
        stacklevel: Argument of `warnings.warn`, counted from the caller.
    """
    with contained("A warning"):
        try:
            warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)
        except UserWarning:
            logger.warning("%s", message)
