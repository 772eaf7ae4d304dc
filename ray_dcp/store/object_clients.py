"""The clients of object stores: `client_of` returns one for each store, shared by all that use it.

They are created by obstore from URLs and options, and cached. Neither messages nor names of stores
show a key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import timedelta
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

from ray_dcp.core.processes import OwnProcess, ProcessLock
from ray_dcp.errors import InvalidRequestError
from ray_dcp.store.credentials import cloud_variables, credential_files, default_credentials, tried
from ray_dcp.store.object_endpoint import (
    S3_ENDPOINT,
    check_endpoint,
    endpoint_in,
    is_encrypted,
    with_server,
)
from ray_dcp.store.object_options import ObjectOptions, split_options
from ray_dcp.store.redaction import redacted
from ray_dcp.store.retries import Retrying

K = TypeVar("K")
V = TypeVar("V")
PROVIDERS = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs",
    "az": "az", "azure": "az", "abfs": "az", "abfss": "az",
}  # fmt: skip
"""URL scheme -> provider, which is also the scheme of the URLs that ray_dcp writes."""
_CLASSES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
_REQUEST_TIMEOUT = timedelta(seconds=120)
_CONNECT_TIMEOUT = timedelta(seconds=10)
_MOST_RETRIES = 20
_MOST_KEPT = 32

_LOCK = ProcessLock()
_STORES: OrderedDict[str, tuple[Any, ObjectOptions]] = OrderedDict()
_CLIENTS: OrderedDict[tuple[int, float], tuple[Any, Client]] = OrderedDict()
_used_in: list[OwnProcess] = []
"""The process that created the first client."""


def make_store(
    scheme: str, bucket: str, options: Mapping[str, object]
) -> tuple[Any, ObjectOptions]:
    """Returns a client for a bucket, and ray_dcp's own options.

    Clients are cached with their connections. Equal options give the same client, as long as the
    environment and the files that it was made from are as they were.

    Args:
        scheme: One of `PROVIDERS`.
        bucket: Bucket or container.
        options: As the user gave them.

    Raises:
        InvalidRequestError: obstore is not installed, the bucket is missing, or an option is
            unknown.
    """
    provider = PROVIDERS[scheme]
    if not bucket:
        raise InvalidRequestError(
            f"expected {scheme}://bucket/path, but found no bucket in {scheme}://"
        )
    # Why by repr: options need not be hashable.
    given = sorted((key, repr(value)) for key, value in options.items())
    sources = (
        scheme,
        bucket,
        given,
        cloud_variables(provider),
        credential_files(provider, options),
    )
    # Why a digest: what it is made of contains credentials.
    name = blake2b(repr(sources).encode(errors="surrogateescape")).hexdigest()
    return _get_or_make(_STORES, name, lambda: _make(provider, bucket, options))


def _get_or_make(cache: OrderedDict[K, V], key: K, make: Callable[[], V]) -> V:
    """Returns an entry of an LRU cache, and creates it if it is missing."""
    with _LOCK:
        _used_in[:] = _used_in or [OwnProcess()]
        # Why: a forked child lacks obstore's threads, and calls in it would never return.
        _used_in[0].check(
            "obstore", "Start children by spawn or forkserver, or before this process uses a bucket"
        )
        if key not in cache:
            cache[key] = make()
        cache.move_to_end(key)
        while len(cache) > _MOST_KEPT:
            cache.popitem(last=False)
        return cache[key]


class Client(NamedTuple):
    """Makes the calls to a store."""

    calls: Any
    """Another client of the same store, without retries of its own."""
    retrying: Retrying
    """Retries all calls, so that they share one budget."""


def client_of(store: Any, timeout_s: float) -> Client:
    """Returns the shared client of a store.

    Args:
        store: A store of obstore.
        timeout_s: Deadline of a call including all retries, in seconds.
    """

    def make() -> tuple[Any, Client]:
        calls = store
        if provider_of(store) is not None:
            calls = type(store)(**{**_arguments(store), "retry_config": {"max_retries": 0}})
        # Why also the store: the cache key is its `id`, which may be reused after it is freed.
        return store, Client(calls, Retrying(timeout_s))

    return _get_or_make(_CLIENTS, (id(store), timeout_s), make)[1]


def _arguments(store: Any) -> dict[str, Any]:
    """Returns the arguments that make another client of a store."""
    names = ("prefix", "config", "client_options", "credential_provider", "retry_config")
    found = {name: getattr(store, name) for name in names}
    # Why: obstore 0.12 refuses this name as it returns it.
    shown = S3_ENDPOINT.removeprefix("aws_")
    renamed = {S3_ENDPOINT if n == shown else n: value for n, value in store.config.items()}
    return {**found, "config": renamed}


def pickled(store: Any) -> Any:
    """Returns what a store is pickled as; `unpickled` returns the store."""
    is_refused = provider_of(store) == "s3" and S3_ENDPOINT in _arguments(store)["config"]
    return (type(store), _arguments(store)) if is_refused else store


def unpickled(found: Any) -> Any:
    """Returns the store that `pickled` was called with."""
    return found[0](**found[1]) if isinstance(found, tuple) else found


def forget_store(store: Any) -> None:
    """Drops the cached clients of a store, so that the next one reads the credentials again.

    Args:
        store: A store whose credentials were refused. An unknown store is ignored.
    """
    with _LOCK:
        caches: tuple[OrderedDict[Any, tuple[Any, Any]], ...] = (_STORES, _CLIENTS)
        for cache in caches:
            for key in [key for key, (kept, _) in cache.items() if kept is store]:
                del cache[key]


def base_url(store: Any) -> str:
    """Returns the URL of the root of a store."""
    config = getattr(store, "config", None) or {}
    prefix = str(getattr(store, "prefix", None) or "").strip("/")
    kind = type(store).__name__
    provider = provider_of(store)
    if provider is None:
        # Why the id: two in-memory stores are two locations.
        root = str(getattr(store, "url", "")) or f"obstore+{kind.lower()}://{id(store):x}"
    else:
        bucket = config.get("bucket") or config.get("container_name") or ""
        root = f"{provider}://{bucket}"
    return f"{root.rstrip('/')}/{prefix}" if prefix else root.rstrip("/")


def name_of_store(store: Any) -> str:
    """Returns a unique name of a bucket, including its server: two may have equal buckets."""
    config = getattr(store, "config", None) or {}
    root = base_url(store).removesuffix(str(getattr(store, "prefix", None) or ""))
    return f"{root} at {endpoint_in(config) or config.get('account_name') or ''}"


def provider_of(store: Any) -> str | None:
    """Returns `"s3"`, `"gs"` or `"az"`, or None for a store that only this process can access."""
    kind = type(store).__name__
    return next((name for name, found in _CLASSES.items() if found == kind), None)


def credentials_text(store: Any) -> str:
    """Returns which credentials a store used, for messages; empty if it takes none."""
    return tried(provider_of(store), store)


def _make(provider: str, bucket: str, options: Mapping[str, object]) -> tuple[Any, ObjectOptions]:
    try:
        from obstore import store as stores
        from obstore.exceptions import BaseError
    except ImportError as exc:
        raise InvalidRequestError(
            f"{provider}:// needs obstore, which is not installed: pip install 'ray-dcp[s3]'"
        ) from exc
    ours, config, more = split_options(provider, options)
    if "@" in bucket and provider == "az":
        bucket, _, account = bucket.partition("@")
        config.setdefault("account_name", account.partition(".")[0])
    profile = config.get("profile")
    credentials = more.get("credential_provider") or default_credentials(provider, config)
    brought: Mapping[str, Any] = getattr(credentials, "config", None) or {}
    config = with_server(provider, {**brought, **config}, profile)
    endpoint = endpoint_in(config)
    check_endpoint(endpoint)
    if provider == "s3":
        # Why: TLS detects altered bytes, and hashing bodies by SHA-256 costs five times as much as
        # the upload (measured: 1.03 instead of 0.22 s of CPU per GiB). Without TLS the server can
        # check a body only by a hash, unless the user chose a checksum. Why both signed hash and
        # checksum: some servers check only one of them (SeaweedFS the checksum).
        is_checked = is_encrypted(endpoint) or any("checksum" in name for name in config)
        checksum = {} if is_checked else {"checksum_algorithm": "SHA256"}
        config = {"unsigned_payload": is_checked, **checksum, **config}
    client: dict[str, Any] = {
        "timeout": _REQUEST_TIMEOUT,
        "connect_timeout": _CONNECT_TIMEOUT,
        # Why: this only permits an http endpoint that the user has configured, here or in the
        # environment.
        "allow_http": True,
    }
    client.update(more.get("client_options") or {})
    retries = {
        "max_retries": _MOST_RETRIES,
        "retry_timeout": timedelta(seconds=ours.retry_timeout_s),
    }
    arguments: dict[str, Any] = {"retry_config": retries}
    if credentials is not None:
        arguments["credential_provider"] = credentials
    cls = getattr(stores, _CLASSES[provider])
    try:
        store = cls(bucket, config=config, client_options=client, **arguments)
    except (BaseError, ValueError, TypeError) as exc:
        # Careful: obstore's message may quote values. Its first line names the option.
        raise InvalidRequestError(
            f"the storage_options for {provider}://{bucket} are not understood: "
            f"{redacted(str(exc).splitlines()[0], config)}",
            key="storage_options",
        ) from None
    return store, ours
