"""The options of an object store: `ObjectOptions` are ray_dcp's, the others obstore's.

`split_options` is pure: it separates the two, and translates the option names of fsspec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ray_dcp.errors import InvalidRequestError

MIB = 1 << 20
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
