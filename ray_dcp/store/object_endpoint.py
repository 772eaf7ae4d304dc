"""The server that an object store is asked at: region and endpoint, each resolved on its own.

Options come before the environment, and that before the files of the cloud's tools, as in boto3.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any
from urllib.parse import urlsplit

from ray_dcp.errors import InvalidRequestError
from ray_dcp.store.credentials import (
    PREFIXES,
    aws_files,
    aws_settings,
    is_installed,
)

_ENDPOINTS = (
    "aws_endpoint_url_s3", "endpoint_url_s3", "endpoint_url", "endpoint", "aws_endpoint_url",
    "aws_endpoint", "base_url", "azure_endpoint", "azure_storage_endpoint",
)  # fmt: skip
S3_ENDPOINT = "aws_endpoint_url_s3"

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


def with_server(provider: str, config: Mapping[str, Any], profile: object) -> dict[str, Any]:
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
    prefix = PREFIXES[provider].lower()
    files: Callable[[], Mapping[str, str]] = dict
    if provider == "s3" and aws_files() and is_installed("botocore.session"):
        files = cache(partial(aws_settings, profile if isinstance(profile, str) else None))
    for name, variables in _SETTINGS[provider].items():
        aliases = {name, *map(str.lower, variables)}
        aliases |= {alias.removeprefix(prefix) for alias in aliases}
        if aliases & given:
            continue
        values = (os.environ.get(variable, "") for variable in variables)
        value = next(filter(None, values), "") or files().get(name)
        if value:
            found[name] = value
    other, endpoint = os.environ.get(S3_ENDPOINT.upper()), endpoint_in(found)
    if provider == "s3" and other and endpoint != other:
        found = {name: value for name, value in found.items() if name.lower() not in _ENDPOINTS}
        found[S3_ENDPOINT] = endpoint
    return found


def endpoint_in(config: Mapping[str, Any]) -> str:
    """Returns the endpoint among the options of a store; empty if none is given."""
    return next((str(config[name]) for name in _ENDPOINTS if config.get(name)), "")


def check_endpoint(endpoint: str) -> None:
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


def is_encrypted(endpoint: str) -> bool:
    """Returns whether connections to an S3 endpoint use TLS, as those to Amazon do by default."""
    environment = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoints = [endpoint] if endpoint else [os.environ.get(name, "") for name in environment]
    return not any(found.lower().startswith("http:") for found in endpoints)
