"""The credentials of object stores that obstore does not find by itself.

obstore reads keys among the options and in the environment, and asks the container or the instance
for others. `default_credentials` returns what it lacks, from where the tools of a cloud keep it, if
the library of that cloud is installed:

* AWS: profiles, SSO, assumed roles and processes of `~/.aws`, by botocore (of boto3). Region and
  endpoint come from there, too, each on its own: keys of the environment do not replace them.
* Google: default credentials that are not a service account or a user, by google-auth.
* Azure: what `azure.identity.DefaultAzureCredential` finds, such as the login of `az`.

`tried` describes which credentials a store used, for messages. It shows no key.
"""

from __future__ import annotations

import json
import os
import re
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from importlib import import_module
from typing import Any

from ray_dcp.errors import InvalidRequestError

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
PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
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
        aws_settings(name)

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


def aws_settings(profile: str | None) -> dict[str, str]:
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
        is_there = aws_files() and is_installed("botocore.session")
        return AwsCredentials() if is_there else None
    return AzureCredentials() if is_installed("azure.identity") else None


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
    if provider == "s3" and aws_files() and not is_installed("botocore.session"):
        text += "; for AWS profiles: pip install boto3"
    if provider == "az" and not is_installed("azure.identity"):
        text += "; for the login of az: pip install azure-identity"
    return text


def _secrets_in(provider: str, names: Mapping[str, Any]) -> list[str]:
    """Returns the names of options or variables that have credentials."""
    prefix = PREFIXES[provider] if names is os.environ else ""
    found = (name for name in names if name.upper().startswith(prefix) and names[name])
    return sorted(name for name in found if _KEYS[provider].fullmatch(name.upper()))


def _of_profile(profile: object) -> AwsCredentials:
    if not isinstance(profile, str):
        raise InvalidRequestError(
            f"storage option profile must be the name of an AWS profile, but is {profile!r}",
            key="profile",
        )
    if not is_installed("botocore.session"):
        raise InvalidRequestError(
            "storage option profile needs boto3, which is not installed: pip install boto3",
            key="profile",
        )
    return AwsCredentials(profile)


def aws_files() -> bool:
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
    if not is_installed("google.auth.transport.requests"):
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


def is_installed(module: str) -> bool:
    """Returns whether a module of a cloud's library can be imported."""
    try:
        import_module(module)
    except ImportError:
        return False
    return True


def cloud_variables(provider: str) -> list[tuple[str, str]]:
    """Returns the variables that a client of a cloud reads, in order of their names."""
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


def credential_files(provider: str, options: Mapping[str, object]) -> list[tuple[str, object]]:
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
