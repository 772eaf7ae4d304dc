"""Where the files of a managed root lie: one folder a step, and `.manager` for what is shared.

Names only; who writes what, and when, is in the modules that use them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ray_dcp.errors import InvalidRequestError
from ray_dcp.protocol.messages import Target

__all__ = [
    "CATALOGUE",
    "DELETING",
    "FOLDER",
    "READING",
    "TAGS",
    "Root",
    "check_tag",
    "tag_key",
    "tag_of",
]

FOLDER = ".manager"
CATALOGUE = "catalogue.json"
TAGS = "tags/"
READING = "reading/"
DELETING = "deleting/"

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TAG_KEY = re.compile(r"tags/(\d{1,18})\.(.+)")


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
        return replace(self.target, url=f"{self.url.rstrip('/')}/{name}")

    @property
    def shared(self) -> Target:
        """The target of what managers share."""
        return self.below(FOLDER)


def check_tag(tag: object) -> str:
    """Returns a tag after checking that it can be part of a file name.

    Raises:
        InvalidRequestError: It can't.

    Example:
        >>> check_tag("release-1.0")
        'release-1.0'
    """
    if not isinstance(tag, str) or _TAG.fullmatch(tag) is None:
        raise InvalidRequestError(
            f"a tag must be 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or "
            f"digit, but is {tag!r}",
            key="tags",
        )
    return tag


def tag_key(step: int, tag: str) -> str:
    """Returns the key, in the shared folder, that gives a tag to a step.

    Example:
        >>> tag_of(tag_key(500, "release-1.0"))
        (500, 'release-1.0')
    """
    return f"{TAGS}{step}.{tag}"


def tag_of(key: str) -> tuple[int, str] | None:
    """Returns step and tag of such a key; None for other keys."""
    found = _TAG_KEY.fullmatch(key)
    return (int(found[1]), found[2]) if found else None
