"""What the errors of obstore mean, as `StorageError`s that say which call on which key failed.

Pure but for reading the error. A message never shows signatures or tokens, which URLs may carry.
"""

from __future__ import annotations

import math
import re

from ray_dcp.errors import StorageError, StorageRefusedError
from ray_dcp.store.storage import KeyExistsError, KeyMissingError

__all__ = ["ConflictError", "is_about_credentials", "is_past_the_end", "object_failure", "worth_s"]

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_TEXT = re.compile(r"<Message>([^<]*)</Message>")
_RETRIES = re.compile(r"(?:after|retried) (\d+) (?:retries|times)")
_QUERY = re.compile(r"\?[^\s)]*")
_OF_CREDENTIALS = ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired")
_MOST_CHARS = 400
_WHOLE = "non-partial response"
"""What obstore says of a server that answers 200 to a range, as rclone's does."""

_WAY_OUT = {
    "NoSuchBucket": "create the bucket, or correct its name",
    "ContainerNotFound": "create the container, or correct its name",
    "ExpiredToken": "the token has expired: give a credential_provider that renews it",
    "RequestTimeTooSkewed": "set this machine's clock",
    "SignatureDoesNotMatch": "check the secret key in storage_options or the environment",
    "InvalidAccessKeyId": "check the access key in storage_options or the environment",
    "AccessDenied": "give these credentials the right to do that, or choose another place",
    "SlowDown": "the store throttles: lower num_threads or num_requests, or retry later",
    "BadDigest": "the network altered what was sent: use https, and check network and memory",
    "QuotaExceeded": "free space there, or save elsewhere",
    "StorageFull": "free space there, or save elsewhere",
}
_BY_STATUS = {
    "401": "check the credentials in storage_options or the environment",
    "403": "check the credentials in storage_options or the environment, and their rights",
    "404": "check the name of the bucket or container",
    "429": "the store throttles: lower num_threads or num_requests, or retry later",
    "500": "the store failed; retry later",
    "503": "the store is busy or down; retry later",
    "507": "free space there, or save elsewhere",
}
_CUT = (
    "error sending request", "error decoding response body", "error reading a body",
    "connection closed", "connection reset", "incomplete message", "timed out", "TimedOut",
    "IncompleteMessage", "ConnectionReset", "error trying to connect", "Connection refused",
    "Wrong size", "operation timed out", "response body error", "kind: Interrupted",
)  # fmt: skip


_CONNECT_S = 10.0
"""How long a refused connection or an unknown host is tried again: nobody is there."""
_PASSING_CODES = (
    "RequestTimeout", "OperationAborted", "ConditionalRequestConflict", "SlowDown",
    "BadDigest", "XAmzContentSHA256Mismatch",
)  # fmt: skip
"""The last two: the body was altered on its way."""
_PASSING = ("408", "429", "500", "502", "503", "504")


class ConflictError(Exception):
    """A key could not be created, and yet there is none: another request was in the way."""


def is_past_the_end(error: BaseException) -> bool:
    """Tells whether the store refused a range because the value is too short for it."""
    text = str(error)
    return "416" in _STATUS.findall(text) or "InvalidRange" in text or "range starting at" in text


def is_about_credentials(error: BaseException) -> bool:
    """Tells whether the store refused the credentials, which may be others by now."""
    text = str(error)
    return _first(_STATUS, text) in ("401", "403") or _first(_CODE, text) in _OF_CREDENTIALS


def worth_s(error: BaseException) -> float:
    """Returns for how long a call is worth further tries, in seconds from the first one.

    Returns:
        0 where the answer will be the same next time: 403, a request that is malformed.
    """
    text = str(error)
    if isinstance(error, ConflictError):
        return math.inf
    if _STATUS.search(text):
        passes = _first(_STATUS, text) in _PASSING or _first(_CODE, text) in _PASSING_CODES
        return math.inf if passes else 0.0
    if "kind: Connect" in text:
        return _CONNECT_S
    return math.inf if _is_cut(text) else 0.0


def _is_cut(text: str) -> bool:
    return not _STATUS.search(text) and any(sign in text for sign in _CUT)


def object_failure(error: BaseException, doing: str, key: str, where: str) -> StorageError:
    """Returns the `StorageError` that says what an error of obstore means.

    Args:
        error: What obstore raised.
        doing: Verb for the message: "write", "read".
        key: The key concerned.
        where: URL of the key.

    Returns:
        `KeyMissingError`, `KeyExistsError`, or a `StorageError` with the answer of the store, how
        often it was asked, and a way out.

    Example:
        >>> print(object_failure(ValueError("no"), "read", "a", "s3://b/a"))
        could not read s3://b/a: no (ValueError, not retried) [key a]
    """
    text = str(error)
    name = type(error).__name__
    status, code = _first(_STATUS, text), _first(_CODE, text)
    is_bucket = code in ("NoSuchBucket", "ContainerNotFound")
    if isinstance(error, FileNotFoundError) and not is_bucket:
        return KeyMissingError(f"could not {doing} {where}: there is no such key", key=key)
    if name == "AlreadyExistsError" or (name == "PreconditionError" and doing == "create"):
        return KeyExistsError(f"could not {doing} {where}: it exists already", key=key)
    retries = _first(_RETRIES, " ".join([*getattr(error, "__notes__", ()), text])) or "0"
    told = f"retried {retries} times" if retries != "0" else "not retried"
    said = _said(text, status, code)
    way_out = _WAY_OUT.get(code) or _BY_STATUS.get(status)
    if _WHOLE in text:
        way_out = (
            "this server can't serve ranges: use another, or reach it through fsspec: "
            "Location(path, filesystem=s3fs.S3FileSystem(...))"
        )
    if way_out is None and _is_cut(text):
        way_out = "the connection failed: check the endpoint and the network, then retry"
    message = f"could not {doing} {where}: {said} ({name}, {told})"
    # Why not of a cut connection: that is no answer.
    is_refused = bool(status) and worth_s(error) == 0
    cls = StorageRefusedError if is_refused else StorageError
    return cls(message + (f"; {way_out}" if way_out else ""), key=key or None)


def _said(text: str, status: str, code: str) -> str:
    if status:
        told = _first(_TEXT, text)
        return (
            f"the store answered {status}"
            + (f" {code}" if code else "")
            + (f", {told}" if told else "")
        )
    line = _QUERY.sub("?…", text.split("\n\nDebug source")[0].replace("\n", " "))
    return line[:_MOST_CHARS].strip()


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    # Why one line: Azure puts ids of the request and the time behind it.
    return found[1].strip().partition("\n")[0] if found else ""
