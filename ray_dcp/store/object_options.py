"""Which options an object store takes: ours, obstore's, and the names that fsspec users know.

Pure: options in, options out. The stores are made in `object_stores`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ray_dcp.errors import InvalidRequestError

__all__ = ["ObjectOptions", "split_options"]

MIB = 1 << 20

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


@dataclass(frozen=True, kw_only=True)
class ObjectOptions:
    """What ray_dcp itself decides about an object store; given among `storage_options`.

    Raises:
        InvalidRequestError: A field has a value that it can't have.

    Example:
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

    Example:
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
    ours = ObjectOptions(**{name: given[name] for name in own & given.keys()})  # type: ignore[arg-type]
    return ours, config, {name: given[name] for name in _PASSED_ON if name in given}
