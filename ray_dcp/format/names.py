"""Names of the files and folders of checkpoints, steps and runs.

* Files of a checkpoint have relative names that stay in its own directory; others are refused.
* Step folders: `StepNames` are those that a `CheckpointManager` writes, and others that it reads.
  `load_newest` takes any number at the end of a name for a step (`view.run_listing.step_of`).
* Tags, notes and damage marks lie beside the steps of a run, in its folder `.manager`. A tag is an
  empty file; retention keeps tagged steps. A note is a text for people. A damage mark is an empty
  file whose name has the step and the attempt that was found damaged.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ray_dcp.errors import InvalidRequestError, UnsafeCheckpointError
from ray_dcp.format import damaged
from ray_dcp.options import plain_integer

_MAX_KEY_CHARS = 4096
_SURROGATE = re.compile("[\ud800-\udfff]")
_ATTEMPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PLAIN_KEY = re.compile(r"\w[\w.-]{0,254}(?:/\w[\w.-]{0,254}){0,8}", re.ASCII)
"""Names in the form that ray_dcp writes, which need no further check."""
_DRIVE = re.compile(r"[A-Za-z]:|[A-Za-z][A-Za-z0-9+.-]*://")


def check_file_key(key: str) -> str:
    """Returns the name of a checkpoint's file after checking that it stays in the directory.

    Args:
        key: The name in the stored bytes.

    Raises:
        UnsafeCheckpointError: The name is empty, too long, absolute or a URL, or has an empty, `.`
            or `..` component, a backslash or a control character.

    Examples:
        >>> check_file_key("__0_0.a1.distcp")
        '__0_0.a1.distcp'
    """
    problem = _find_problem(key)
    if problem is None and any(part in ("", ".", "..") for part in key.split("/")):
        problem = "has an empty, '.' or '..' component"
    if problem is not None:
        raise _unsafe_error(key, problem)
    return key


def check_file_keys(keys: Iterable[str]) -> None:
    """Checks each of many names by `check_file_key`."""
    for key in keys:
        if _PLAIN_KEY.fullmatch(key) is None:
            check_file_key(key)


def resolved_key(path: str) -> str:
    """Returns a path without `.` and inner `..` components, after checking that it may be read.

    Stock checkpoints that share data with their predecessors refer to paths such as
    `../step-1/__0_0.distcp`, which are refused.

    Args:
        path: A `relative_path` of a `.metadata`.

    Raises:
        UnsafeCheckpointError: The path is absolute, or leaves the checkpoint.

    Examples:
        >>> resolved_key("./a/../__0_0.distcp")
        '__0_0.distcp'
    """
    problem = _find_problem(path)
    if problem is not None:
        raise _unsafe_error(path, problem)
    normal = posixpath.normpath(path)
    if normal == "." or ".." in normal.split("/"):
        raise _unsafe_error(
            path,
            "leaves it",
            "one that shares files with another is loaded by torch.distributed.checkpoint itself",
        )
    return normal


def check_attempt(attempt: str) -> str:
    """Returns an attempt id after checking that it can be part of a file name.

    Raises:
        DamagedCheckpointError: The id has characters other than letters, digits, `.`, `_` and `-`,
            begins with a dot or dash, is empty or longer than 128 characters.
    """
    if _ATTEMPT.fullmatch(attempt) is None:
        raise damaged("an attempt of 1 to 128 letters, digits, '.', '_', '-'", repr(attempt[:200]))
    return attempt


def is_unicode(text: str) -> bool:
    """Returns whether a text has no lone surrogate, which neither files nor terminals accept."""
    return text.isascii() or _SURROGATE.search(text) is None


def _find_problem(key: str) -> str | None:
    if not key:
        return "is empty"
    if len(key) > _MAX_KEY_CHARS:
        return f"has more than {_MAX_KEY_CHARS} characters"
    if key.startswith("/") or _DRIVE.match(key):
        return "is absolute"
    if "\\" in key or not key.isprintable():
        return "has a backslash, a control character or a lone surrogate"
    return None


def _unsafe_error(key: str, problem: str, more: str = "") -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"Expected the name of a file in the checkpoint's own directory, but {key[:200]!r} "
        f"{problem}; do not load this checkpoint unless you wrote it" + (f": {more}" * bool(more)),
        key=ascii(key[:200]),
    )


STEP_NAME = "step-{step:08d}"
"""Default name of a step's folder under a manager."""

_MAX_STEP = 10**18
_PATTERN = re.compile(
    r"(?!\.)([^/{}]*(?<!\d))\{step(?::0?(\d{0,2})d?)?\}((?!\d)[^/{}]*)", re.DOTALL
)
"""Text, `{step}` or `{step:08d}`, and text. The text has no digits next to the number, as these
would be read as part of it."""


@dataclass(frozen=True)
class StepNames:
    """The naming of step folders in a root.

    Args:
        pattern: Pattern of the folders that are written, with one `{step}` or `{step:08d}`.
        also: Further patterns of folders that are read.

    Raises:
        InvalidRequestError: A pattern is invalid, or that of the folders that are written ends with
            digits of its own.

    Examples:
        >>> names = StepNames(also=("{step}", "global_step{step}"))
        >>> names.name_of(500), names.step_of("global_step70"), names.step_of("final")
        ('step-00000500', 70, None)
    """

    pattern: str = STEP_NAME
    """Pattern of the folders that are written."""
    also: tuple[str, ...] = ()
    """Further patterns of folders that are read."""
    _readers: tuple[re.Pattern[str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        also: object = self.also
        if not isinstance(also, tuple):
            raise InvalidRequestError(
                f"also_read must be a tuple of names, as ('{{step}}',), but is {also!r}",
                key="also_read",
            )
        readers = tuple(_reader(pattern) for pattern in (self.pattern, *self.also))
        # Why: `load_newest` and RUN@STEP would take them for the step.
        if self.pattern[-1].isdecimal():
            raise InvalidRequestError(
                f"a name of step folders must have no digits at its end but those of the step, "
                f"but is {self.pattern!r}; write them before it, and read what is there already by "
                f"also_read=({self.pattern!r},)",
                key="step_name",
            )
        object.__setattr__(self, "_readers", readers)

    def name_of(self, step: int) -> str:
        """Returns the folder name of a step.

        Raises:
            InvalidRequestError: The step is no integer from 0.
        """
        step = plain_integer(step)
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < _MAX_STEP:
            raise InvalidRequestError(
                f"a step must be a whole number from 0 to {_MAX_STEP - 1}, but is {step!r}",
                key="step",
            )
        return self.pattern.format(step=step)

    def step_of(self, name: str) -> int | None:
        """Returns the step of a folder; None if its name is not that of a step."""
        for reader in self._readers:
            found = reader.fullmatch(name)
            if found is not None:
                return int(found[1])
        return None


def _reader(pattern: object) -> re.Pattern[str]:
    """Returns a regular expression that matches the names of a pattern."""
    found = _PATTERN.fullmatch(pattern) if isinstance(pattern, str) else None
    if found is None:
        raise InvalidRequestError(
            f"a name of step folders must be a text without slashes that has {{step}} or "
            f"{{step:08d}} once, as {STEP_NAME!r}, but is {pattern!r}",
            key="step_name",
        )
    digits = rf"(\d{{{max(1, int(found[2] or 1))},18}})"
    return re.compile(re.escape(found[1]) + digits + re.escape(found[3]), re.DOTALL)


SHARED_FOLDER = ".manager"
"""Folder of a run that holds what its steps share."""
TAGS = "tags/"
READING = "reading/"
CATALOGUE = "catalogue.json"
NOTES = "notes/"
DAMAGED = "damaged/"
MAX_NOTE_BYTES = 64 << 10

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TAG_KEY = re.compile(r"tags/(\d{1,18})\.(.+)")
_NOTE_KEY = re.compile(r"notes/(\d{1,18})\.txt")
_DAMAGE_KEY = re.compile(r"damaged/(\d{1,18})\.([A-Za-z0-9][A-Za-z0-9._-]{0,127})")


def check_tag(tag: object, *, existing: bool = False) -> str:
    """Returns a tag after checking that it can be part of a file name, and can name a step.

    Args:
        tag: The tag that the user passed.
        existing: The tag exists already, so that it may have a name that new tags may not have.

    Raises:
        InvalidRequestError: The tag can't be part of a file name, or `RUN@TAG` would name another
            step.

    Examples:
        >>> check_tag("release-1.0")
        'release-1.0'
    """
    if not isinstance(tag, str) or _TAG.fullmatch(tag) is None:
        raise InvalidRequestError(
            f"a tag must be 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or "
            f"digit, but is {tag!r}",
            key="tags",
        )
    if not existing and (tag in ("latest", "best") or tag.isdecimal()):
        raise InvalidRequestError(
            f"a tag can't be {tag!r}, which names a step by itself in RUN@{tag}; choose another "
            f"one, as {tag}-run",
            key="tags",
        )
    return tag


def check_note(text: object) -> bytes:
    """Returns the bytes of a note.

    Raises:
        InvalidRequestError: The note is no text, or longer than 64 KiB.
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
    """Returns the key, in the shared folder, of a step's tag.

    Examples:
        >>> tag_of(tag_key(500, "release-1.0"))
        (500, 'release-1.0')
    """
    return f"{TAGS}{step}.{tag}"


def tag_of(key: str) -> tuple[int, str] | None:
    """Returns the step and tag of a `tag_key`; None for other keys."""
    found = _TAG_KEY.fullmatch(key)
    return (int(found[1]), found[2]) if found else None


def tags_in(keys: Iterable[str]) -> dict[int, frozenset[str]]:
    """Returns the tags of each step that has one.

    Args:
        keys: What lies in the shared folder.

    Examples:
        >>> tags_in([tag_key(500, "best"), "catalogue.json"])
        {500: frozenset({'best'})}
    """
    tags: dict[int, frozenset[str]] = {}
    for step, tag in filter(None, map(tag_of, keys)):
        tags[step] = tags.get(step, frozenset()) | {tag}
    return tags


def note_key(step: int) -> str:
    """Returns the key, in the shared folder, of a step's note.

    Examples:
        >>> noted_step(note_key(500))
        500
    """
    return f"{NOTES}{step}.txt"


def noted_step(key: str) -> int | None:
    """Returns the step of a `note_key`; None for other keys."""
    found = _NOTE_KEY.fullmatch(key)
    return int(found[1]) if found else None


def damage_key(step: int, attempt: str) -> str:
    """Returns the key, in the shared folder, of the mark that a step is damaged.

    Args:
        step: Number of the step.
        attempt: Attempt that committed it; a step that is saved again has no mark.

    Examples:
        >>> marked_damaged([damage_key(500, "0123456789abcdef"), "catalogue.json"])
        frozenset({(500, '0123456789abcdef')})
    """
    return f"{DAMAGED}{step}.{attempt}"


def marked_damaged(keys: Iterable[str]) -> frozenset[tuple[int, str]]:
    """Returns step and attempt of each damage mark.

    Args:
        keys: What lies in the shared folder.
    """
    found = map(_DAMAGE_KEY.fullmatch, keys)
    return frozenset((int(one[1]), one[2]) for one in found if one is not None)
