"""Which file names a checkpoint may hold: relative ones that stay in its own directory."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from ray_dcp.errors import DamagedCheckpointError, UnsafeCheckpointError

__all__ = ["check_attempt", "check_file_key", "check_file_keys", "resolved_key"]

_MAX_KEY_CHARS = 4096
_ATTEMPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DRIVE = re.compile(r"[A-Za-z]:|[A-Za-z][A-Za-z0-9+.-]*://")


def check_file_key(key: str) -> str:
    """Returns the name of a file that a checkpoint refers to, if it stays in its directory.

    Args:
        key: What the stored bytes say.

    Raises:
        UnsafeCheckpointError: It is empty, too long, absolute or a URL, has an empty, `.` or `..`
            component, a backslash or a control character.

    Example:
        >>> check_file_key("a1/rank-00000-part-00000.safetensors")
        'a1/rank-00000-part-00000.safetensors'
    """
    problem = _problem(key)
    if problem is None and any(part in ("", ".", "..") for part in key.split("/")):
        problem = "has an empty, '.' or '..' component"
    if problem is not None:
        raise _unsafe(key, problem)
    return key


def check_file_keys(keys: Sequence[str]) -> Sequence[str]:
    """Returns the names of many files, if all stay in the checkpoint's directory.

    Args:
        keys: What the stored bytes say.

    Raises:
        UnsafeCheckpointError: As `check_file_key`, for the first that does not.

    Complexity:
        O(characters), in C, for keys without anything that may be wrong.
    """
    # Why so strict: what looks odd here is looked at more closely, key by key.
    whole = "/".join(keys)
    odd = (
        not whole.isprintable()
        or any(sign in whole for sign in (":", "\\", "//", "/./", "/../"))
        or whole.startswith(("/", "./", "../"))
        or whole.endswith(("/", "/.", "/.."))
        or whole in ("", ".", "..")
        or max(map(len, keys), default=0) > _MAX_KEY_CHARS
    )
    return [check_file_key(key) for key in keys] if odd else keys


def resolved_key(path: str, *, allowed_parents: int = 0) -> str:
    """Returns a path without its `.` and inner `..` components, if it may be read.

    Stock checkpoints that share data with their predecessors refer to `../step-1/__0_0.distcp`.
    A load refuses these: no caller in ray_dcp allows parents.

    Args:
        path: `relative_path` of a `.metadata`.
        allowed_parents: How many directories above the checkpoint it may climb.

    Raises:
        UnsafeCheckpointError: It is absolute, or leaves what is allowed.

    Example:
        >>> resolved_key("./a/../__0_0.distcp")
        '__0_0.distcp'
        >>> resolved_key("../step-1/__0_0.distcp", allowed_parents=1)
        '../step-1/__0_0.distcp'
    """
    problem = _problem(path)
    if problem is not None:
        raise _unsafe(path, problem)
    normal = posixpath.normpath(path)
    climbs = sum(part == ".." for part in normal.split("/"))
    if climbs > allowed_parents or normal == ".":
        raise _unsafe(
            path,
            "leaves it",
            "one that shares files with another is loaded by torch.distributed.checkpoint itself",
        )
    return normal


def check_attempt(attempt: str) -> str:
    """Returns an attempt id, if it can be part of a file name.

    Raises:
        DamagedCheckpointError: It has other characters than letters, digits, `.`, `_` and `-`,
            begins with a dot or dash, is empty or longer than 128 characters.
    """
    if _ATTEMPT.fullmatch(attempt) is None:
        raise DamagedCheckpointError(
            "Expected an attempt of 1 to 128 letters, digits, '.', '_' and '-', "
            f"found {attempt[:200]!r}; load an earlier step"
        )
    return attempt


def _problem(key: str) -> str | None:
    if not key:
        return "is empty"
    if len(key) > _MAX_KEY_CHARS:
        return f"has more than {_MAX_KEY_CHARS} characters"
    if key.startswith("/") or _DRIVE.match(key):
        return "is absolute"
    if "\\" in key or not key.isprintable():
        return "has a backslash, a control character or a lone surrogate"
    return None


def _unsafe(key: str, problem: str, more: str = "") -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"Expected the name of a file in the checkpoint's own directory, but {key[:200]!r} "
        f"{problem}; do not load this checkpoint unless you wrote it" + (f": {more}" * bool(more)),
        key=ascii(key[:200]),
    )
