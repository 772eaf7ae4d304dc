"""Makes the clients of object stores from URLs and options, and keeps them while they are used.

What is done with a client is in `object_storage`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ray_dcp.errors import InvalidRequestError
from ray_dcp.protocol.messages import Target
from ray_dcp.store.location import split_url
from ray_dcp.store.object_options import ObjectOptions, split_options

__all__ = [
    "PROVIDERS",
    "base_url",
    "forget_store",
    "make_store",
    "name_of_store",
    "place_in",
    "provider_of",
]

PROVIDERS = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs",
    "az": "az", "azure": "az", "abfs": "az", "abfss": "az",
}  # fmt: skip
"""URL scheme -> provider, which is also the scheme of the URLs that we write."""
_CLASSES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    # Why unsigned: our own checksums cover every byte, and hashing bodies by SHA-256 costs five
    # times what the upload does (measured: 1.03 instead of 0.22 s of CPU per GiB).
    "s3": {"unsigned_payload": True},
    "gs": {},
    "az": {},
}
_REQUEST_TIMEOUT = timedelta(seconds=120)
_CONNECT_TIMEOUT = timedelta(seconds=10)
_MOST_RETRIES = 20
_MOST_KEPT = 32

_LOCK = threading.Lock()
_KEPT: OrderedDict[str, tuple[Any, ObjectOptions]] = OrderedDict()


def make_store(
    scheme: str, bucket: str, options: Mapping[str, object]
) -> tuple[Any, ObjectOptions]:
    """Returns a client for a bucket, and our own options.

    Clients are kept, with their connections, and given again for the same options.

    Args:
        scheme: One of `PROVIDERS`.
        bucket: Bucket or container.
        options: As the user gave them.

    Raises:
        InvalidRequestError: obstore is not installed, the bucket is missing, or an option is not
            understood.
    """
    provider = PROVIDERS[scheme]
    if not bucket:
        raise InvalidRequestError(
            f"expected {scheme}://bucket/path, but found no bucket in {scheme}://"
        )
    # Why by repr: options need not be hashable. Never shown: it holds the credentials.
    name = repr((scheme, bucket, sorted((key, repr(value)) for key, value in options.items())))
    with _LOCK:
        if name in _KEPT:
            _KEPT.move_to_end(name)
            return _KEPT[name]
    made = _make(provider, bucket, options)
    with _LOCK:
        _KEPT[name] = made
        while len(_KEPT) > _MOST_KEPT:
            _KEPT.popitem(last=False)
    return made


def forget_store(store: Any) -> None:
    """Has the next one who asks for this client get a new one, with the credentials of then.

    Args:
        store: One whose credentials were refused; any other is fine.
    """
    with _LOCK:
        for name in [name for name, (kept, _) in _KEPT.items() if kept is store]:
            del _KEPT[name]


def place_in(store: Any, url: str) -> Target:
    """Returns the target for a path in a ready store, or for one of its URLs.

    Args:
        store: A store of obstore; its prefix is part of the place.
        url: Path below the store's prefix, or URL that begins with the store's own; may be empty.
    """
    base = base_url(store)
    if split_url(url)[0]:
        if url != base and not url.startswith(f"{base}/"):
            raise InvalidRequestError(
                f"expected a path in the given store, or a URL that begins with {base}/, but "
                f"found {url!r}",
                key="checkpoint_id",
            )
        return Target(url.rstrip("/"), filesystem=store)
    path = url.strip("/")
    return Target(f"{base}/{path}" if path else base, filesystem=store)


def base_url(store: Any) -> str:
    """Returns the URL of what a store calls its root."""
    config = getattr(store, "config", None) or {}
    prefix = str(getattr(store, "prefix", None) or "").strip("/")
    kind = type(store).__name__
    provider = provider_of(store)
    if provider is None:
        # Why the id: two stores in memory are two places.
        root = str(getattr(store, "url", "")) or f"obstore+{kind.lower()}://{id(store):x}"
    else:
        bucket = config.get("bucket") or config.get("container_name") or ""
        root = f"{provider}://{bucket}"
    return f"{root.rstrip('/')}/{prefix}" if prefix else root.rstrip("/")


def name_of_store(store: Any) -> str:
    """Returns what tells a bucket from all others: two servers may have one of the same name."""
    config = getattr(store, "config", None) or {}
    root = base_url(store).removesuffix(str(getattr(store, "prefix", None) or ""))
    return f"{root} at {_endpoint(config) or config.get('account_name') or ''}"


def provider_of(store: Any) -> str | None:
    """Returns `"s3"`, `"gs"` or `"az"`; None for stores that no other process sees by a URL."""
    kind = type(store).__name__
    return next((name for name, found in _CLASSES.items() if found == kind), None)


def _make(provider: str, bucket: str, options: Mapping[str, object]) -> tuple[Any, ObjectOptions]:
    try:
        from obstore import store as stores
        from obstore.exceptions import BaseError
    except ImportError as exc:
        raise InvalidRequestError(
            f"{provider}:// needs obstore, which is not installed: pip install 'ray-dcp[s3]'"
        ) from exc
    ours, config, more = split_options(provider, options)
    config = {**_DEFAULTS[provider], **config}
    if "@" in bucket and provider == "az":
        bucket, _, account = bucket.partition("@")
        config.setdefault("account_name", account.partition(".")[0])
    client: dict[str, Any] = {
        "timeout": _REQUEST_TIMEOUT,
        "connect_timeout": _CONNECT_TIMEOUT,
        # Why: it only lets an endpoint be without TLS that the user named so, here or in the
        # environment.
        "allow_http": True,
    }
    client.update(more.get("client_options") or {})
    retries = more.get("retry_config") or {
        "max_retries": _MOST_RETRIES,
        "retry_timeout": timedelta(seconds=ours.retry_timeout_s),
    }
    arguments: dict[str, Any] = {"retry_config": retries}
    if more.get("credential_provider") is not None:
        arguments["credential_provider"] = more["credential_provider"]
    cls = getattr(stores, _CLASSES[provider])
    try:
        store = cls(bucket, config=config, client_options=client, **arguments)
    except (BaseError, ValueError, TypeError) as exc:
        # Careful: the message of obstore may quote values; only its first line names the key.
        raise InvalidRequestError(
            f"the storage_options for {provider}://{bucket} are not understood: "
            f"{_without(str(exc).splitlines()[0], config)}",
            key="storage_options",
        ) from None
    return store, ours


def _endpoint(config: Mapping[str, Any]) -> str:
    names = ("aws_endpoint_url_s3", "endpoint", "aws_endpoint", "base_url")
    return next((str(config[name]) for name in names if config.get(name)), "")


def _without(text: str, config: Mapping[str, Any]) -> str:
    """Returns a text without the values of any option."""
    for value in config.values():
        if isinstance(value, str) and len(value) > 3:
            text = text.replace(value, "…")
    return text
