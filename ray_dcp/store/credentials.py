"""Creates and caches the clients of object stores from URLs and options.

`split_options` is pure: it separates ray_dcp's options from obstore's, and translates the option
names of fsspec. `client_of` returns one shared client per store, for `object_storage`.

obstore reads keys among the options and in the environment, and asks the container or the instance
for others. `default_credentials` returns what it lacks, from where the tools of a cloud keep it, if
the library of that cloud is installed:

* AWS: profiles, SSO, assumed roles and processes of `~/.aws`, by botocore (of boto3). Region and
  endpoint come from there, too, each on its own: keys of the environment do not replace them.
* Google: default credentials that are not a service account or a user, by google-auth.
* Azure: what `azure.identity.DefaultAzureCredential` finds, such as the login of `az`.

`tried` describes which credentials a store used, for messages. Neither shows a key.
"""

from __future__ import annotations

import json
import os
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime, timedelta, timezone
from functools import cache, partial
from hashlib import blake2b
from importlib import import_module
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from ray_dcp.core.processes import OwnProcess, ProcessLock
from ray_dcp.errors import InvalidRequestError
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
    "aws_endpoint_url_s3", "endpoint_url_s3", "endpoint_url", "endpoint", "aws_endpoint_url",
    "aws_endpoint", "base_url", "azure_endpoint", "azure_storage_endpoint",
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
    sources = (scheme, bucket, given, _environment(provider), _files(provider, options))
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


_S3_ENDPOINT = "aws_endpoint_url_s3"


def _arguments(store: Any) -> dict[str, Any]:
    """Returns the arguments that make another client of a store."""
    names = ("prefix", "config", "client_options", "credential_provider", "retry_config")
    found = {name: getattr(store, name) for name in names}
    # Why: obstore 0.12 refuses this name as it returns it.
    shown = _S3_ENDPOINT.removeprefix("aws_")
    renamed = {_S3_ENDPOINT if n == shown else n: value for n, value in store.config.items()}
    return {**found, "config": renamed}


def pickled(store: Any) -> Any:
    """Returns what a store is pickled as; `unpickled` returns the store."""
    is_refused = provider_of(store) == "s3" and _S3_ENDPOINT in _arguments(store)["config"]
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
    if "@" in bucket and provider == "az":
        bucket, _, account = bucket.partition("@")
        config.setdefault("account_name", account.partition(".")[0])
    profile = config.get("profile")
    credentials = more.get("credential_provider") or default_credentials(provider, config)
    brought: Mapping[str, Any] = getattr(credentials, "config", None) or {}
    config = _with_settings(provider, {**brought, **config}, profile)
    endpoint = _endpoint(config)
    _check_endpoint(endpoint)
    if provider == "s3":
        # Why: TLS detects altered bytes, and hashing bodies by SHA-256 costs five times as much as
        # the upload (measured: 1.03 instead of 0.22 s of CPU per GiB). Without TLS the server can
        # check a body only by a hash, unless the user chose a checksum. Why both signed hash and
        # checksum: some servers check only one of them (SeaweedFS the checksum).
        is_checked = _is_encrypted(endpoint) or any("checksum" in name for name in config)
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


_SETTINGS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "s3": {
        # The first one is botocore's, whose order decides; then what obstore takes beside it.
        "region": ("AWS_DEFAULT_REGION", "AWS_REGION"),
        "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    },
    "gs": {"base_url": ("GOOGLE_BASE_URL",)},
    "az": {
        "account_name": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ACCOUNT_NAME"),
        "endpoint": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    },
}
"""Options that say which server is asked, with the variables that they are taken from."""


def _with_settings(provider: str, config: Mapping[str, Any], profile: object) -> dict[str, Any]:
    """Returns options with the server that is asked, each setting resolved on its own.

    Options come before the environment, and that before files, as in boto3. *Why the environment
    too*, which obstore reads itself: there, `AWS_ENDPOINT_URL_S3` comes before an option, and two
    stores of one bucket name could not be told apart.

    Args:
        provider: `"s3"`, `"gs"` or `"az"`.
        config: The options that were given.
        profile: The AWS profile that was asked for; None for the default.

    Raises:
        InvalidRequestError: An AWS configuration file can't be read.
    """
    found = dict(config)
    given = {name.lower() for name, value in config.items() if value}
    prefix = _PREFIXES[provider].lower()
    files: Callable[[], Mapping[str, str]] = dict
    if provider == "s3" and _aws_files() and _is_installed("botocore.session"):
        files = cache(partial(_aws_settings, profile if isinstance(profile, str) else None))
    for name, variables in _SETTINGS[provider].items():
        aliases = {name, *map(str.lower, variables)}
        aliases |= {alias.removeprefix(prefix) for alias in aliases}
        if aliases & given:
            continue
        values = (os.environ.get(variable, "") for variable in variables)
        value = next(filter(None, values), "") or files().get(name)
        if value:
            found[name] = value
    other, endpoint = os.environ.get(_S3_ENDPOINT.upper()), _endpoint(found)
    if provider == "s3" and other and endpoint != other:
        found = {name: value for name, value in found.items() if name.lower() not in _ENDPOINTS}
        found[_S3_ENDPOINT] = endpoint
    return found


def _environment(provider: str) -> list[tuple[str, str]]:
    """Returns the variables that a client is made from."""
    wanted = re.compile(
        _VARIABLES[provider] + r"|\w+_PROXY|SSL_CERT_(FILE|DIR)|HOME", re.IGNORECASE
    )
    return sorted(one for one in os.environ.items() if wanted.fullmatch(one[0]))


_VARIABLES = {
    "s3": r"AWS_\w+",
    "gs": r"(GOOGLE|CLOUDSDK|GCLOUD|GCE)_\w+",
    "az": r"(AZURE|MSI|IDENTITY|ARM)_\w+",
}


def _files(provider: str, options: Mapping[str, object]) -> list[tuple[str, object]]:
    """Returns the files that a client is made from, with what changes when they are written."""
    paths = _aws_paths() if provider == "s3" else []
    if provider == "gs":
        names = ("application_credentials", "token")
        paths = [_google_file({"application_credentials": options.get(n)}) for n in names]
    found: list[tuple[str, object]] = []
    for path in paths:
        state: object = None
        with suppress(OSError, ValueError):
            status = os.stat(path)
            state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        found.append((path, state))
    return found


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


_KEYS = {
    "s3": re.compile(
        r"(AWS_)?(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|TOKEN|SKIP_SIGNATURE)"
    ),
    "gs": re.compile(
        r"(GOOGLE_)?(SERVICE_ACCOUNT(_PATH|_KEY)?|SKIP_SIGNATURE|BEARER_TOKEN)"
    ),
    "az": re.compile(
        r"(AZURE_)?(STORAGE_)?((ACCOUNT_|ACCESS_|MASTER_|SAS_)?KEY|(SAS_|BEARER_)?TOKEN"
        r"|CLIENT_SECRET|USE_EMULATOR|USE_AZURE_CLI|SKIP_SIGNATURE)"
    ),
}  # fmt: skip
"""Names of the options and variables that obstore takes credentials from, in capitals."""
_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_GOOGLE_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_AZURE_SCOPE = "https://storage.azure.com/.default"
_OWN_TIME = timedelta(minutes=10)
"""How long keys of AWS are used at most: tools that log in write new ones into the files. obstore
asks again 5 minutes before the end."""


class _Default:
    """Returns the credentials that a library finds, as obstore's `credential_provider`.

    They are looked for at the first call, as that may ask a server.

    *Why not those of `obstore.auth`*: they can't be pickled, theirs for AWS uses credentials for 30
    minutes that may end in 10, and theirs for Google gives impersonated accounts no scope.

    Args:
        name: Name of the profile or file, for messages.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._found: Any = None

    def __call__(self) -> dict[str, Any]:
        """Returns valid credentials in obstore's form."""
        with self._lock:
            if self._found is None:
                self._found = self._find()
            return self._current(self._found)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._name,)

    def _find(self) -> Any:
        raise NotImplementedError

    def _current(self, found: Any) -> dict[str, Any]:
        raise NotImplementedError


class AwsCredentials(_Default):
    """Credentials of a profile of `~/.aws`, or else of the environment, container or instance.

    Args:
        name: The profile; None for that of `AWS_PROFILE`, or `default`.

    Raises:
        InvalidRequestError: There is no such profile, or a file can't be read.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        from botocore.session import Session

        self._method = ""
        self._open: Callable[[], Any] = partial(Session, profile=name)
        _aws_settings(name)

    def __str__(self) -> str:
        name = self._name or os.environ.get("AWS_PROFILE") or "default"
        return f"those of the AWS profile {name!r}" + (f" (by {self._method})" * bool(self._method))

    def _find(self) -> Any:
        found = self._open().get_credentials()
        if found is None:
            raise LookupError("there are no credentials in it, nor of a container or instance")
        self._method = found.method
        return found

    def _current(self, found: Any) -> dict[str, Any]:
        keys = found.get_frozen_credentials()
        ends = datetime.now(timezone.utc) + _OWN_TIME
        # Some processes give keys for a few minutes only.
        known = getattr(found, "_expiry_time", None)
        if known is None:
            self._found = None  # keys of a file, which is read again
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": ends if known is None else min(ends, known.astimezone(timezone.utc)),
        }


def _aws_settings(profile: str | None) -> dict[str, str]:
    """Returns region and endpoint of a profile, or else of the environment, as botocore has them.

    Args:
        profile: Name of the profile; None for that of `AWS_PROFILE`, or `default`.

    Raises:
        InvalidRequestError: There is no such profile, or a file can't be read.
    """
    from botocore.configprovider import ConfiguredEndpointProvider
    from botocore.exceptions import BotoCoreError, ConfigParseError
    from botocore.session import Session

    session: Any = Session(profile=profile)
    try:
        scoped = session.get_scoped_config()
        endpoint = None
        if not session.get_config_variable("ignore_configured_endpoint_urls"):
            # Why so: `services` sections and AWS_ENDPOINT_URL count too, and no client is made.
            endpoint = ConfiguredEndpointProvider(
                full_config=session.full_config, scoped_config=scoped, client_name="s3"
            ).provide()
        found = {"region": session.get_config_variable("region"), "endpoint": endpoint}
    except ConfigParseError as error:
        raise _unreadable(str(error.kwargs.get("path", "")), error.kwargs.get("error")) from None
    except BotoCoreError as error:
        raise InvalidRequestError(
            f"expected a profile of the AWS configuration files, but {error}; it has "
            f"{', '.join(session.available_profiles) or 'no profile'}",
            key="profile",
        ) from None
    return {name: value for name, value in found.items() if value}


def _unreadable(path: str, error: object) -> InvalidRequestError:
    """Returns the error for an AWS configuration file that can't be parsed."""
    # Careful: the text of the error quotes lines, which may have keys.
    numbers = [number for number, _ in getattr(error, "errors", ())]
    line = getattr(error, "lineno", None) or next(iter(numbers), None)
    where = f"{path}, line {line}" if line else path
    what = "it is not UTF-8" if isinstance(error, UnicodeError) else "found something else"
    return InvalidRequestError(
        f"expected sections like [default], with lines like region = eu-1, in the AWS "
        f"configuration file {where}, but {what}: mend it, or name another file by "
        f" AWS_CONFIG_FILE or AWS_SHARED_CREDENTIALS_FILE",
        key="profile",
    )


class GoogleCredentials(_Default):
    """Credentials of a file of application default credentials, by google-auth."""

    def __str__(self) -> str:
        return f"the default credentials of {self._name}"

    def _find(self) -> Any:
        from google import auth

        with warnings.catch_warnings():
            # It warns of files by strangers; this one is of the user's own configuration.
            warnings.simplefilter("ignore", DeprecationWarning)
            load: Any = auth.load_credentials_from_file
            return load(self._name, scopes=[_GOOGLE_SCOPE])[0]

    def _current(self, found: Any) -> dict[str, Any]:
        from google.auth.transport.requests import Request

        found.refresh(Request())
        # google-auth keeps UTC without a timezone.
        ends = found.expiry and found.expiry.replace(tzinfo=timezone.utc)
        return {"token": found.token, "expires_at": ends}


class AzureCredentials(_Default):
    """Credentials that `DefaultAzureCredential` of azure-identity finds."""

    def __str__(self) -> str:
        return "those of azure.identity.DefaultAzureCredential"

    def _find(self) -> Any:
        from azure.identity import DefaultAzureCredential

        return DefaultAzureCredential()

    def _current(self, found: Any) -> dict[str, Any]:
        token = found.get_token(_AZURE_SCOPE)
        ends = datetime.fromtimestamp(token.expires_on, timezone.utc)
        return {"token": token.token, "expires_at": ends}


def default_credentials(provider: str, config: dict[str, Any]) -> _Default | None:
    """Returns credentials that obstore would not find; None if it needs no help.

    Args:
        provider: `"s3"`, `"gs"` or `"az"`.
        config: Configuration of the provider. The options that name a profile or a file are
            removed, as obstore does not take them.

    Raises:
        InvalidRequestError: The profile does not exist, or the library is not installed that reads
            it.
    """
    profile = config.pop("profile", None) if provider == "s3" else None
    given = _secrets_in(provider, config)
    if profile is not None:
        if given:
            raise InvalidRequestError(
                f"the storage options profile and {given[0]} both give credentials; leave one out",
                key="profile",
            )
        return _of_profile(profile)
    if given or _secrets_in(provider, os.environ):
        return None
    if provider == "gs":
        return _of_google(config)
    if provider == "s3":
        # Why only with such files: obstore itself asks the container and the instance.
        is_there = _aws_files() and _is_installed("botocore.session")
        return AwsCredentials() if is_there else None
    return AzureCredentials() if _is_installed("azure.identity") else None


def tried(provider: str | None, store: Any) -> str:
    """Returns a text that says which credentials a store used; empty if that is not known.

    Args:
        provider: `"s3"`, `"gs"` or `"az"`; None for a store without credentials.
        store: The store of obstore.
    """
    if provider is None:
        return ""
    brought = store.credential_provider
    if brought is not None:
        kind = f"those of the credential_provider {type(brought).__name__}"
        return str(brought) if isinstance(brought, _Default) else kind
    options, variables = _secrets_in(provider, store.config), _secrets_in(provider, os.environ)
    names = [f"{name} of storage_options" for name in options]
    names += [f"{name} of the environment" for name in variables]
    if names:
        return ", ".join(names)
    if provider == "gs" and (path := _google_file(store.config)):
        return f"the default credentials of {path}"
    text = "those of the container or instance, as storage_options and environment have none"
    if provider == "s3" and _aws_files() and not _is_installed("botocore.session"):
        text += "; for AWS profiles: pip install boto3"
    if provider == "az" and not _is_installed("azure.identity"):
        text += "; for the login of az: pip install azure-identity"
    return text


def _secrets_in(provider: str, names: Mapping[str, Any]) -> list[str]:
    """Returns the names of options or variables that have credentials."""
    prefix = _PREFIXES[provider] if names is os.environ else ""
    found = (name for name in names if name.upper().startswith(prefix) and names[name])
    return sorted(name for name in found if _KEYS[provider].fullmatch(name.upper()))


def _of_profile(profile: object) -> AwsCredentials:
    if not isinstance(profile, str):
        raise InvalidRequestError(
            f"storage option profile must be the name of an AWS profile, but is {profile!r}",
            key="profile",
        )
    if not _is_installed("botocore.session"):
        raise InvalidRequestError(
            "storage option profile needs boto3, which is not installed: pip install boto3",
            key="profile",
        )
    return AwsCredentials(profile)


def _aws_files() -> bool:
    """Returns whether there are configuration files of AWS, or one is asked for."""
    if os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE"):
        return True
    return any(map(os.path.isfile, _aws_paths()))


def _aws_paths() -> list[str]:
    """Returns the paths of the configuration files of AWS, whether or not they are there."""
    variables = {"AWS_CONFIG_FILE": "config", "AWS_SHARED_CREDENTIALS_FILE": "credentials"}
    paths = (os.environ.get(name) or f"~/.aws/{file}" for name, file in variables.items())
    return [os.path.expanduser(path) for path in paths]


def _of_google(config: dict[str, Any]) -> GoogleCredentials | None:
    path = _google_file(config)
    kind = None
    with suppress(OSError, ValueError, AttributeError), open(path, encoding="utf-8") as file:
        kind = json.load(file).get("type")
    # Why: obstore reads these itself.
    if kind in (None, "service_account", "authorized_user"):
        return None
    if not _is_installed("google.auth.transport.requests"):
        raise InvalidRequestError(
            f"the default credentials of Google in {path} are of the type {kind!r}, which needs "
            f"google-auth: pip install google-auth requests",
            key="application_credentials",
        )
    config.pop("application_credentials", None)
    return GoogleCredentials(path)


def _google_file(config: Mapping[str, Any]) -> str:
    """Returns the path of the application default credentials; empty if there are none."""
    folder = os.environ.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")
    usual = os.path.join(folder, "application_default_credentials.json")
    given = config.get("application_credentials")
    path = given or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or usual
    return str(path) if os.path.isfile(str(path)) else ""


def _is_installed(module: str) -> bool:
    try:
        import_module(module)
    except ImportError:
        return False
    return True
