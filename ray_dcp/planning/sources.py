"""The rule by which a save may link or copy a published file: `Known`.

A file is a source only if this process knows all of its bytes: it wrote them, or it has read all of
them through their checksums. That knowledge ages. A bit may flip on a disk at any time, and each
save that links the file has the flipped bit as well. So it holds for fewer than `MOST_LINKS` saves
and for less than a day; then the file is read again, or written anew from the memory of the
trainer. The bytes of every step were therefore written or read by its process at most a day, and
`MOST_LINKS` saves, before it was committed.

*Price*: a file is read again once half of either is over, so each settled byte is read twice a day,
or 2 / `MOST_LINKS` times for each save if that is more. *Why half*: a save never waits for a read,
and writes what is overdue. 100 GB per rank and a save each 10 minutes: 3 reads, 300 GB a day, 3.5
MB/s on average.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_LINKS = 100
"""So many saves may link a file, counted since all of its bytes were last read or written."""
MOST_AGE_S = 86_400.0
"""For so long a file may be linked since all of its bytes were last read or written, in seconds."""


@dataclass(frozen=True)
class Known:
    """When a process last wrote or read all bytes of a file, and how many saves linked it since.

    Examples:
        >>> known = Known(since_s=0.0)
        >>> known.may_be_linked(60.0), known.is_due(60.0), known.linked().num_links
        (True, False, 1)
        >>> Known(0.0, 99).may_be_linked(60.0), Known(0.0, 100).may_be_linked(60.0)
        (True, False)
        >>> known.is_due(43_200.0), known.may_be_linked(86_400.0)
        (True, False)
    """

    since_s: float
    """By a clock that never goes back."""
    num_links: int = 0

    def may_be_linked(self, now_s: float) -> bool:
        """Returns whether a save may link the file now."""
        return self.num_links < MOST_LINKS and now_s - self.since_s < MOST_AGE_S

    def is_due(self, now_s: float) -> bool:
        """Returns whether the file should be read again, so that it may be linked later on."""
        return 2 * self.num_links >= MOST_LINKS or 2 * (now_s - self.since_s) >= MOST_AGE_S

    def linked(self) -> Known:
        """Returns what is known of the name, or the copy, that a save has made of the file."""
        return replace(self, num_links=self.num_links + 1)
