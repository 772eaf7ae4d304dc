"""Names of what lies beside the steps of a run, in its folder `.manager`: tags and notes.

A tag is an empty file; retention keeps the steps that have one. A note is a text for people.
"""

from __future__ import annotations

import re

from ray_dcp.errors import InvalidRequestError

__all__ = [
    "CATALOGUE",
    "MAX_NOTE_BYTES",
    "NOTES",
    "SHARED_FOLDER",
    "TAGS",
    "check_note",
    "check_tag",
    "note_key",
    "noted_step",
    "tag_key",
    "tag_of",
]

SHARED_FOLDER = ".manager"
"""Folder of a run that holds what is shared."""
CATALOGUE = "catalogue.json"
TAGS = "tags/"
NOTES = "notes/"
MAX_NOTE_BYTES = 64 << 10

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TAG_KEY = re.compile(r"tags/(\d{1,18})\.(.+)")
_NOTE_KEY = re.compile(r"notes/(\d{1,18})\.txt")


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


def check_note(text: object) -> bytes:
    """Returns the bytes of a note.

    Raises:
        InvalidRequestError: It is no text, or longer than 64 KiB.
    """
    data = text.encode("utf-8", "replace") if isinstance(text, str) else b""
    if not isinstance(text, str) or len(data) > MAX_NOTE_BYTES:
        raise InvalidRequestError(
            f"a note must be a text of at most {MAX_NOTE_BYTES >> 10} KiB, but is "
            f"{f'{len(data)} bytes long' if data else type(text).__name__}",
            key="note",
        )
    return data


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


def note_key(step: int) -> str:
    """Returns the key, in the shared folder, of the note on a step.

    Example:
        >>> noted_step(note_key(500))
        500
    """
    return f"{NOTES}{step}.txt"


def noted_step(key: str) -> int | None:
    """Returns the step of such a key; None for other keys."""
    found = _NOTE_KEY.fullmatch(key)
    return int(found[1]) if found else None
