"""The errors of object stores: what each one means, which are repeated, and for how long.

Errors of obstore become `StorageError`s that name the failed call and the key (`object_failure`).
A message never shows signatures or tokens, which URLs may contain. `worth_s` decides how long a
call is repeated; `_PASSING` lists the answers that are repeated as 503 is.
"""

from __future__ import annotations

import math
import re

from ray_dcp.core import bounds
from ray_dcp.errors import StorageError, StorageRefusedError
from ray_dcp.store.storage import KeyExistsError, KeyMissingError

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_TEXT = re.compile(r"<Message>([^<]*)</Message>")
_RETRIES = re.compile(r"(?:after|retried) (\d+) (?:retries|times)")
_QUERY = re.compile(r"\?[^\s)]*")
_OF_CREDENTIALS = ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired")
_MOST_CHARS = 400
_WHOLE = "non-partial response"
"""obstore's message about a server that answers a range request with 200, as rclone does."""

_NO_CREDENTIALS = re.compile(r"External \w+ credential provider: (.*)")
"""obstore's message about a `credential_provider` that raised an exception."""
_INSTANCE = re.compile(
    r"://(?:169\.254\.(?:169\.254|170\.23?)|\[fd00:ec2::\d+\]|metadata\.google\.internal)[/:]"
)
"""Servers that give a container or machine its credentials."""

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


_PASSING_CODES = (
    "RequestTimeout", "OperationAborted", "ConditionalRequestConflict", "SlowDown",
    "BadDigest", "XAmzContentSHA256Mismatch",
)  # fmt: skip
"""Error codes worth a retry. The last two report that the body was altered in transit."""
_PASSING = ("408", "429", "500", "502", "503", "504")


_INVALID = "Got invalid"
"""obstore's message about an answer that is truncated or altered, or not from an S3 server."""


class ConflictError(Exception):
    """A conditional put conflicted with another request, but the key does not exist."""


class AlteredError(Exception):
    """An answer is inconsistent: it was truncated or altered in transit."""


def is_past_the_end(error: BaseException) -> bool:
    """Returns whether the store refused a range because the value is too short."""
    text = str(error)
    return "416" in _STATUS.findall(text) or "InvalidRange" in text or "range starting at" in text


def is_about_credentials(error: BaseException) -> bool:
    """Returns whether the store refused the credentials, which may have been renewed since."""
    text = str(error)
    is_refused = _first(_STATUS, text) in ("401", "403") or _first(_CODE, text) in _OF_CREDENTIALS
    return is_refused or bool(_explain_missing_credentials(text))


def _explain_missing_credentials(text: str) -> str:
    """Returns why there were no credentials to send; empty if there were."""
    is_instance = _INSTANCE.search(text) is not None
    return _first(_NO_CREDENTIALS, text) or "the container or instance gave none" * is_instance


def worth_s(error: BaseException) -> float:
    """Returns for how long an error is retried, in seconds since the first try.

    Returns:
        0 for permanent errors, such as 403 or a malformed request.
    """
    text = str(error)
    if isinstance(error, ConflictError | AlteredError):
        return math.inf
    if _INVALID in text:
        return bounds.REFUSED_S
    if _STATUS.search(text):
        passes = _first(_STATUS, text) in _PASSING or _first(_CODE, text) in _PASSING_CODES
        return math.inf if passes else 0.0
    if "kind: Connect" in text or _INSTANCE.search(text):
        return bounds.REFUSED_S
    return math.inf if _is_cut(text) else 0.0


def _is_cut(text: str) -> bool:
    return not _STATUS.search(text) and any(sign in text for sign in _CUT)


def object_failure(
    error: BaseException, doing: str, key: str, where: str, credentials: str = ""
) -> StorageError:
    """Returns the `StorageError` that describes an error of obstore.

    Args:
        error: Exception raised by obstore.
        doing: Verb for the message: "write", "read".
        key: The key concerned.
        where: URL of the key.
        credentials: Which credentials were used, for errors about them.

    Returns:
        `KeyMissingError`, `KeyExistsError`, or a `StorageError` with the answer of the store, the
        number of retries and a remedy.

    Examples:
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
    said = _describe_answer(text, status, code)
    way_out = _WAY_OUT.get(code) or _BY_STATUS.get(status)
    if _WHOLE in text:
        way_out = (
            "this server can't serve ranges: use another, or reach it through fsspec: "
            "Location(path, filesystem=s3fs.S3FileSystem(...))"
        )
    if way_out is None and (_is_cut(text) or isinstance(error, AlteredError) or _INVALID in text):
        way_out = "the connection failed: check the endpoint and the network, then retry"
    lacking = _explain_missing_credentials(text)
    if lacking:
        said = f"there are no valid credentials: {lacking}"
        way_out = "give them in storage_options or the environment, or renew them"
    if credentials and is_about_credentials(error):
        way_out = f"{way_out or 'check the credentials'}. Tried: {credentials}"
    message = f"could not {doing} {where}: {said} ({name}, {told})"
    # Why only with a status: a broken connection is not a refusal.
    is_refused = (bool(status) or bool(lacking)) and worth_s(error) == 0
    cls = StorageRefusedError if is_refused else StorageError
    return cls(message + (f"; {way_out}" if way_out else ""), key=key or None)


def _describe_answer(text: str, status: str, code: str) -> str:
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
    # Why one line: Azure appends the request id and the time on further lines.
    return found[1].strip().partition("\n")[0] if found else ""
