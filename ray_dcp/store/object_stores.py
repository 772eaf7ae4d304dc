"""Creates and caches the clients of object stores from URLs and options.

`split_options` is pure: it separates ray_dcp's options from obstore's, and translates the option
names of fsspec. `client_of` returns one shared client per store, for `object_storage`.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from ray_dcp.core.processes import OwnProcess, ProcessLock
from ray_dcp.errors import InvalidRequestError
from ray_dcp.store.credentials import default_credentials, tried
from ray_dcp.store.remote import Retrying, redacted

MIB = 1 << 20
K = TypeVar("K")
V = TypeVar("V")

# Option names of s3fs, gcsfs and adlfs -> obstore's. Names of obstore are used unchanged.
_FSSPEC_NAMES = {
    "s3": {
        "key": "access_key_id",
        "secret": "secret_access_key",
        "token": "session_token",
        "endpoint_url": "endpoint",
        "region_name": "region",
        "anon": "skip_signature",
    },
    "gs": {"token": "application_credentials", "endpoint_url": "base_url"},
    "az": {"connection_string": "", "anon": "skip_signature", "sas_token": "sas_key"},
}
_PASSED_ON = ("client_options", "credential_provider")
_OF_CLIENTS = frozenset(
    (
        "allow_http", "allow_invalid_certificates", "connect_timeout", "default_headers",
        "http1_only", "http2_only", "pool_idle_timeout", "pool_max_idle_per_host", "proxy_url",
        "proxy_ca_certificate", "proxy_excludes", "read_timeout", "root_certificate", "timeout",
        "user_agent",
    )
)  # fmt: skip
"""Options of obstore's HTTP client, which are passed separately from those of a provider."""


@dataclass(frozen=True, kw_only=True)
class ObjectOptions:
    """ray_dcp's own options of an object store; given among `storage_options`.

    Raises:
        InvalidRequestError: A field has an invalid value.

    Examples:
        >>> ObjectOptions(request_bytes=8 << 20).upload_bytes >> 20
        128
    """

    request_bytes: int = 16 * MIB
    """Length of one part of an upload, and of the longest file that is put by a single request."""
    upload_bytes: int = 128 * MIB
    """Maximum number of bytes held in memory by uploads, over all files that this process writes
    to the store. In addition, each file has the part that it fills."""
    num_requests: int = 8
    """Number of parts of one file that are uploaded concurrently."""
    retry_timeout_s: float = 180.0
    """How long a call is retried after transient errors, in seconds, with exponential backoff and
    jitter; at most 10 s if no server answers."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 1:
                raise InvalidRequestError(
                    f"storage option {field.name} must be a number of at least 1, but is {value!r}",
                    key=field.name,
                )
        if self.request_bytes < 5 * MIB:
            raise InvalidRequestError(
                f"storage option request_bytes must be at least 5 MiB, which S3 asks of a part, "
                f"but is {self.request_bytes}",
                key="request_bytes",
            )


def split_options(
    provider: str, options: Mapping[str, object]
) -> tuple[ObjectOptions, dict[str, Any], dict[str, Any]]:
    """Returns ray_dcp's own options, the configuration of the provider, and store arguments.

    Args:
        provider: `"s3"`, `"gs"` or `"az"`.
        options: As the user gave them.

    Raises:
        InvalidRequestError: An option of ray_dcp has an invalid value, or an option is given by two
            names.

    Examples:
        >>> split_options("s3", {"key": "me", "client_kwargs": {"region_name": "eu-1"}})[1]
        {'access_key_id': 'me', 'region': 'eu-1'}
    """
    names = _FSSPEC_NAMES[provider]
    own = {field.name for field in fields(ObjectOptions)}
    given = dict(options)
    nested = given.pop("client_kwargs", {})
    if isinstance(nested, Mapping):
        given.update(nested)
    config: dict[str, Any] = {}
    for name, value in given.items():
        if name in own or name in _PASSED_ON or value is None:
            continue
        target = names.get(name, name)
        if not target:
            raise InvalidRequestError(
                f"storage option {name} is not understood for {provider}://; pass account_name "
                f"and account_key, or a filesystem made from it",
                key=name,
            )
        if target in config:
            raise InvalidRequestError(
                f"storage option {target} is given twice, also as {name}", key=name
            )
        config[target] = value
    of_client = {name: config.pop(name) for name in _OF_CLIENTS & config.keys()}
    if of_client:
        chosen: Any = given.get("client_options") or {}
        given["client_options"] = {**of_client, **chosen}
    ours = ObjectOptions(**{name: given[name] for name in own & given.keys()})  # type: ignore[arg-type]
    return ours, config, {name: given[name] for name in _PASSED_ON if name in given}


PROVIDERS = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs",
    "az": "az", "azure": "az", "abfs": "az", "abfss": "az",
}  # fmt: skip
"""URL scheme -> provider, which is also the scheme of the URLs that ray_dcp writes."""
_CLASSES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
_ENDPOINTS = (
    "aws_endpoint_url_s3", "endpoint_url", "endpoint", "aws_endpoint_url", "aws_endpoint",
    "base_url", "azure_endpoint", "azure_storage_endpoint",
)  # fmt: skip
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

    Clients are cached with their connections; equal options give the same client.

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
    # Why by repr: options need not be hashable. Never log this name: it contains credentials.
    name = repr((scheme, bucket, sorted((key, repr(value)) for key, value in options.items())))
    return _kept(_STORES, name, lambda: _make(provider, bucket, options))


def _kept(cache: OrderedDict[K, V], key: K, make: Callable[[], V]) -> V:
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
            calls = type(store)(
                prefix=store.prefix,
                config=store.config,
                client_options=store.client_options,
                credential_provider=store.credential_provider,
                retry_config={"max_retries": 0},
            )
        # Why also the store: the cache key is its `id`, which may be reused after it is freed.
        return store, Client(calls, Retrying(timeout_s))

    return _kept(_CLIENTS, (id(store), timeout_s), make)[1]


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
    return f"{root} at {_endpoint(config) or config.get('account_name') or ''}"


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
    credentials = more.get("credential_provider") or default_credentials(provider, config)
    endpoint = _endpoint({**getattr(credentials, "config", {}), **config})
    _check_endpoint(endpoint)
    if provider == "s3":
        # Why: TLS detects altered bytes, and hashing bodies by SHA-256 costs five times as much as
        # the upload (measured: 1.03 instead of 0.22 s of CPU per GiB). Without TLS the server can
        # check a body only by a hash, unless the user chose a checksum. Why both signed hash and
        # checksum: some servers check only one of them (SeaweedFS the checksum).
        is_checked = _is_encrypted(endpoint) or any("checksum" in name for name in config)
        checksum = {} if is_checked else {"checksum_algorithm": "SHA256"}
        config = {"unsigned_payload": is_checked, **checksum, **config}
    if "@" in bucket and provider == "az":
        bucket, _, account = bucket.partition("@")
        config.setdefault("account_name", account.partition(".")[0])
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


def _endpoint(config: Mapping[str, Any]) -> str:
    return next((str(config[name]) for name in _ENDPOINTS if config.get(name)), "")


def _check_endpoint(endpoint: str) -> None:
    """Checks the URL of an endpoint; an invalid one makes obstore panic at the first call.

    Raises:
        InvalidRequestError: It is not the URL of a server.
    """
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if endpoint and not (is_url and endpoint.isascii() and not set(endpoint) & set(" \t\r\n")):
        raise InvalidRequestError(
            f"storage option endpoint must be a URL such as https://host:9000, but is {endpoint!r}",
            key="endpoint",
        )


def _is_encrypted(endpoint: str) -> bool:
    """Returns whether connections to an S3 endpoint use TLS, as those to Amazon do by default."""
    environment = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoints = [endpoint] if endpoint else [os.environ.get(name, "") for name in environment]
    return not any(found.lower().startswith("http:") for found in endpoints)
