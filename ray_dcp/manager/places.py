"""Where the files of a managed root lie: one folder a step, and `.manager` for what is shared.

Names only; who writes what, and when, is in the modules that use them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ray_dcp.format.run_files import (
    CATALOGUE,
    NOTES,
    SHARED_FOLDER,
    TAGS,
    check_tag,
    note_key,
    tag_key,
    tag_of,
)
from ray_dcp.protocol.messages import Target
from ray_dcp.store.location import url_below

__all__ = [
    "CATALOGUE",
    "FOLDER",
    "NOTES",
    "READING",
    "TAGS",
    "Root",
    "check_tag",
    "note_key",
    "tag_key",
    "tag_of",
]

FOLDER = SHARED_FOLDER
READING = "reading/"


@dataclass(frozen=True)
class Root:
    """A directory of step folders."""

    target: Target
    """Absolute."""

    @property
    def url(self) -> str:
        """Path or URL."""
        return self.target.url

    def below(self, name: str) -> Target:
        """Returns the target of a folder of the root."""
        # Why replaced: with the options, or the ready filesystem, of the root.
        return replace(self.target, url=url_below(self.url, name))

    @property
    def shared(self) -> Target:
        """The target of what managers share."""
        return self.below(FOLDER)
