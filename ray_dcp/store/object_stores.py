"""Clients of object stores, from URLs and options, kept while they are used.

`split_options` is pure: it separates our own options, obstore's, and the names that fsspec users
know. `client_of` returns the same client to all who ask; `object_storage` calls it.
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
from ray_dcp.store.retry import Retrying
from ray_dcp.store.storage_adapter import redacted

MIB = 1 << 20
K = TypeVar("K")
V = TypeVar("V")

# fsspec's name -> obstore's, of s3fs, gcsfs and adlfs; the same in obstore's own words stay.
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
"""Options of obstore's HTTP client, which takes none of them among those of a provider."""


@dataclass(frozen=True, kw_only=True)
class ObjectOptions:
    """What ray_dcp itself decides about an object store; given among `storage_options`.

    Raises:
        InvalidRequestError: A field has a value that it can't have.

    Examples:
        >>> ObjectOptions(request_bytes=8 << 20).upload_bytes >> 20
        128
    """

    request_bytes: int = 16 * MIB
    """Length of one part of an upload, and the longest file that is put by a single request."""
    upload_bytes: int = 128 * MIB
    """Most bytes that wait for their upload to end, over all files that this process writes to
    the store; each file may have two requests under way beyond that."""
    num_requests: int = 8
    """Parts of one file that are uploaded at the same time."""
    retry_timeout_s: float = 180.0
    """How long a call that failed in a way that may pass is tried again, in seconds, with growing
    pauses and jitter; one that nobody answers at most 10 s."""

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
    """Returns our own options, the configuration of the provider, and arguments of the store.

    Args:
        provider: `"s3"`, `"gs"` or `"az"`.
        options: As the user gave them.

    Raises:
        InvalidRequestError: One of ours has a wrong value, or one is given by two names.

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
"""URL scheme -> provider, which is also the scheme of the URLs that we write."""
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
"""The process that first had one."""


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
    return _kept(_STORES, name, lambda: _make(provider, bucket, options))


def _kept(cache: OrderedDict[K, V], key: K, make: Callable[[], V]) -> V:
    """Returns what a cache of the last ones that were asked for has, made if it is not there."""
    with _LOCK:
        _used_in[:] = _used_in or [OwnProcess()]
        # Why: obstore's threads are not in a child that is forked, and calls there wait for ever.
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
    """What calls a store."""

    calls: Any
    """The same store, by a client that tries once."""
    retrying: Retrying
    """For all calls, so that they have one budget."""


def client_of(store: Any, timeout_s: float) -> Client:
    """Returns what calls a store; the same for all who ask.

    Args:
        store: A store of obstore.
        timeout_s: Of a call with all its repetitions.
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
        # Why the store as well: its id is not given to another one while it is kept.
        return store, Client(calls, Retrying(timeout_s))

    return _kept(_CLIENTS, (id(store), timeout_s), make)[1]


def forget_store(store: Any) -> None:
    """Has the next one who asks for this client get a new one, with the credentials of then.

    Args:
        store: One whose credentials were refused; any other is fine.
    """
    with _LOCK:
        caches: tuple[OrderedDict[Any, tuple[Any, Any]], ...] = (_STORES, _CLIENTS)
        for cache in caches:
            for key in [key for key, (kept, _) in cache.items() if kept is store]:
                del cache[key]


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
    endpoint = _endpoint(config)
    _check_endpoint(endpoint)
    if provider == "s3":
        # Why: TLS finds what is altered on the way, and hashing bodies by SHA-256 costs five times
        # what the upload does (measured: 1.03 instead of 0.22 s of CPU per GiB). Without TLS the
        # server has nothing else to check a body by, unless the user chose a checksum. Why twice:
        # of the signed hash and the checksum some servers check only one (SeaweedFS the latter).
        is_checked = _is_encrypted(endpoint) or any("checksum" in name for name in config)
        checksum = {} if is_checked else {"checksum_algorithm": "SHA256"}
        config = {"unsigned_payload": is_checked, **checksum, **config}
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
    retries = {
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
            f"{redacted(str(exc).splitlines()[0], config)}",
            key="storage_options",
        ) from None
    return store, ours


def _endpoint(config: Mapping[str, Any]) -> str:
    return next((str(config[name]) for name in _ENDPOINTS if config.get(name)), "")


def _check_endpoint(endpoint: str) -> None:
    """Checks a URL, as obstore breaks down at the first call by one that is none.

    Raises:
        InvalidRequestError: It is not one of a server.
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
    """Tells whether connections to an endpoint of S3 have TLS; those to Amazon's own have it."""
    environment = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoints = [endpoint] if endpoint else [os.environ.get(name, "") for name in environment]
    return not any(found.lower().startswith("http:") for found in endpoints)
