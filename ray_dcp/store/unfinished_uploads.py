"""Uploads in parts that nobody has finished: lists and aborts them, in a bucket of S3.

A killed process leaves its parts behind, where no listing of keys shows them and they are paid for.
obstore can't list them, so the two calls are made here. Azure removes such parts by itself after a
week; GCS's client does not tell its token.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from html import unescape
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

from ray_dcp.errors import StorageError
from ray_dcp.store.hashed_keys import HashedKeys, PlainKeys
from ray_dcp.store.object_stores import provider_of
from ray_dcp.store.paths import TEMP_PREFIX
from ray_dcp.store.signing import S3Credentials, query_text, signed_headers

__all__ = ["LIFECYCLE", "HiddenUploads", "Upload", "UploadsOf", "uploads_of"]

LIFECYCLE = "give the bucket a lifecycle rule AbortIncompleteMultipartUpload"

_UPLOAD = re.compile(r"<Upload>(.*?)</Upload>", re.DOTALL)
_NEXT_KEY = re.compile(r"<NextKeyMarker>(.*?)</NextKeyMarker>", re.DOTALL)
_NEXT_ID = re.compile(r"<NextUploadIdMarker>(.*?)</NextUploadIdMarker>", re.DOTALL)
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_TIMEOUT_S = 30.0
_MOST_BYTES = 16 << 20
_PROBE = "x"
_LIST_THREADS = 16


class Upload(NamedTuple):
    """An upload that somebody has begun."""

    path: str
    """Where its file would lie, below the store's own prefix."""
    upload_id: str


@dataclass(frozen=True)
class UploadsOf:
    """The unfinished uploads of one bucket.

    Attributes:
        root: URL of the bucket.
        prefix: Of the store, with a slash at its end if there is any.
    """

    root: str
    prefix: str
    region: str
    credentials: S3Credentials

    def list(self, prefix: str) -> list[Upload]:
        """Returns those whose path begins so.

        Raises:
            StorageError: The store did not tell.
        """
        found: list[Upload] = []
        query = {"uploads": "", "prefix": self.prefix + prefix}
        while True:
            text = self._ask("GET", "/", query)
            for each in _UPLOAD.findall(text):
                path, upload_id = _inner("Key", each), _inner("UploadId", each)
                # Why looked at: a server may not know prefixes here.
                if upload_id and path.startswith(self.prefix + prefix):
                    found.append(Upload(path[len(self.prefix) :], upload_id))
            key, last = _NEXT_KEY.search(text), _NEXT_ID.search(text)
            if "<IsTruncated>true</IsTruncated>" not in text or key is None:
                return found
            markers = {"key-marker": unescape(key[1])}
            if last is not None:
                markers["upload-id-marker"] = unescape(last[1])
            if markers.items() <= query.items():
                return found
            query = {**query, **markers}

    def abort(self, upload: Upload) -> None:
        """Removes the parts of an upload; one that is gone already is fine.

        Raises:
            StorageError: It could not be aborted.
        """
        path = "/" + quote(self.prefix + upload.path, safe="/-_.~")
        self._ask("DELETE", path, {"uploadId": upload.upload_id}, missing_is_fine=True)

    def _ask(
        self, method: str, path: str, query: Mapping[str, str], *, missing_is_fine: bool = False
    ) -> str:
        url = f"{self.root}{path}?{query_text(query)}"
        now = datetime.now(timezone.utc)
        headers = signed_headers(method, url, self.credentials, self.region, now)
        request = urllib.request.Request(url, method=method, headers=headers)  # noqa: S310 - see uploads_of
        doing = "list unfinished uploads in" if method == "GET" else "abort an upload in"
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - as above
                return str(answer.read(_MOST_BYTES).decode(errors="replace"))
        except urllib.error.HTTPError as error:
            if error.code == 404 and missing_is_fine:
                return ""
            code = _CODE.search(error.read(4096).decode(errors="replace"))
            said = f"{error.code} {code[1] if code else error.reason}"
            raise StorageError(
                f"could not {doing} {self.root}: the store answered {said}"
            ) from None
        except OSError as error:
            raise StorageError(f"could not {doing} {self.root}: {error}") from None


class HiddenUploads:
    """The unfinished uploads below one storage, under keys that no file can have.

    Args:
        store: A store of obstore.
        keys: Where the keys of the storage lie.

    Attributes:
        unseen: Why the last look may have told less than there is, and what to do; else None.
    """

    def __init__(self, store: Any, keys: PlainKeys | HashedKeys) -> None:
        self._store = store
        self._keys = keys
        self.unseen: str | None = None

    def look(self) -> dict[str, tuple[UploadsOf, Upload]]:
        """Returns the uploads by such a key; empty where they can't be listed."""
        known = uploads_of(self._store)
        if not isinstance(known, UploadsOf):
            self.unseen = known
            return {}
        places = [f"{place}/" if place else "" for place in self._keys.places("")]
        try:
            with ThreadPoolExecutor(min(_LIST_THREADS, len(places))) as threads:
                found = [each for part in threads.map(known.list, places) for each in part]
        except StorageError as error:
            # Why no error: nothing depends on it, and the right to list them is another one.
            self.unseen = f"{error.message}: {LIFECYCLE}"
            return {}
        self.unseen = None
        keys = ((self._keys.key(each.path), each) for each in found)
        return {_hidden_key(key, each): (known, each) for key, each in keys if key is not None}

    def abort(self, keys: Collection[str]) -> None:
        """Aborts uploads by the keys that `look` gives them; others are gone already.

        Raises:
            StorageError: One could not be aborted.
        """
        found = self.look()
        for known, upload in (found[key] for key in keys if key in found):
            known.abort(upload)


def uploads_of(store: Any, environment: Mapping[str, str] | None = None) -> UploadsOf | str | None:
    """Returns what lists the unfinished uploads of a store.

    Args:
        store: A store of obstore.
        environment: Where credentials may be; this process's by default.

    Returns:
        None where there is nothing to list; where they can't be listed, why, and what to do.
    """
    provider = provider_of(store)
    if provider is None or provider == "az":
        return None
    if provider == "gs":
        return f"unfinished uploads of killed processes can't be listed on gs://: {LIFECYCLE}"
    import obstore

    try:
        # Why a signed URL: it tells endpoint, style, region, and whose credentials are used.
        signed = obstore.sign(store, "GET", _PROBE, expires_in=timedelta(seconds=60))
    except Exception as error:  # noqa: BLE001 - anything of the credentials' source; nothing depends on it
        return (
            f"unfinished uploads of killed processes can't be listed ({type(error).__name__}: no "
            f"credentials to sign with): {LIFECYCLE}"
        )
    parts = urlsplit(signed)
    query = parse_qs(parts.query)
    scope = query.get("X-Amz-Credential", [""])[0].split("/")
    if parts.scheme not in ("http", "https") or len(scope) != 5:
        return f"unfinished uploads of killed processes can't be listed: {LIFECYCLE}"
    secret = _secret_of(scope[0], store, os.environ if environment is None else environment)
    if secret is None:
        return (
            f"unfinished uploads of killed processes can't be listed with credentials that are "
            f"neither in storage_options nor in the environment: {LIFECYCLE}"
        )
    prefix = str(getattr(store, "prefix", None) or "").strip("/")
    prefix = f"{prefix}/" if prefix else ""
    # Why decoded: a prefix may be encoded in more than one way.
    path = unquote(parts.path).removesuffix(prefix + _PROBE).rstrip("/")
    token = query.get("X-Amz-Security-Token", [None])[0]
    return UploadsOf(
        f"{parts.scheme}://{parts.netloc}{quote(path, safe='/-_.~')}", prefix, scope[2],
        S3Credentials(scope[0], secret, token),
    )  # fmt: skip


def _secret_of(access_key_id: str, store: Any, environment: Mapping[str, str]) -> str | None:
    """Returns the secret that belongs to a key id, where this process can know it."""
    config = {name.removeprefix("aws_"): value for name, value in (store.config or {}).items()}
    given = _given_by(getattr(store, "credential_provider", None))
    for found in (
        config,
        given,
        {name.removeprefix("AWS_").lower(): value for name, value in environment.items()},
    ):
        if found.get("access_key_id") == access_key_id and found.get("secret_access_key"):
            return str(found["secret_access_key"])
    return None


def _given_by(provider: Callable[[], Any] | None) -> Mapping[str, Any]:
    # Why not asynchronous ones: they belong to a loop that is not ours.
    if provider is None or inspect.iscoroutinefunction(getattr(provider, "__call__", provider)):  # noqa: B004
        return {}
    found = provider()
    return found if isinstance(found, Mapping) else {}


def _hidden_key(key: str, upload: Upload) -> str:
    """Returns a key that tells an upload and the key of its file, and that no file has."""
    folder, slash, name = key.rpartition("/")
    token = hashlib.blake2s(upload.upload_id.encode(), digest_size=6).hexdigest()
    return f"{folder}{slash}{TEMP_PREFIX}{token}-{name}"


def _inner(tag: str, text: str) -> str:
    found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return unescape(found[1]) if found else ""
