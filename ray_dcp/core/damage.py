"""`DamageLog`: what this process found damaged, for those that rely on bytes that they know.

A load, a verification or a look in the background adds a place; a save that could link to files
asks before it does (`rank.unchanged`). The log says nothing about bytes: it makes others read
or write them again.
"""

from __future__ import annotations

from collections import deque

from ray_dcp.core.processes import ProcessLock

_MOST_PLACES = 256


class DamageLog:
    """Places that were found damaged, in order. Thread-safe.

    Examples:
        >>> log = DamageLog()
        >>> before = log.count
        >>> log.add("/run/step-3")
        >>> log.has_below("/run", before), log.has_below("/other", before)
        (True, False)
        >>> log.has_below("/run", log.count)
        False
    """

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._count = 0
        self._last: deque[str] = deque(maxlen=_MOST_PLACES)

    @property
    def count(self) -> int:
        """How many places were added."""
        return self._count

    def add(self, url: str) -> None:
        """Adds a place.

        Args:
            url: URL of a checkpoint, as its storage has it.
        """
        with self._lock:
            self._count += 1
            self._last.append(url)

    def has_below(self, url: str, since: int) -> bool:
        """Returns whether a place below a URL was added after the first `since` ones.

        True as well if so many were added since that not all are known.
        """
        with self._lock:
            num_new = self._count - since
            new = list(self._last)[-num_new:] if num_new else []
            return num_new > len(new) or any(f"{one}/".startswith(f"{url}/") for one in new)


DAMAGE = DamageLog()
"""What this process found damaged."""
