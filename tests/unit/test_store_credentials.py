"""Credentials where the tools of the clouds keep them, against servers that note who asks."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import botocore.credentials
import botocore.loaders
import botocore.session
import botocore.tokens
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ray_dcp.errors import InvalidRequestError, StorageError, StorageRefusedError
from ray_dcp.store import credentials, object_clients, object_endpoint
from ray_dcp.store.credentials import tried
from ray_dcp.store.filesystems import filesystem_of
from ray_dcp.store.location import Location
from ray_dcp.store.object_clients import make_store
from ray_dcp.store.opening import open_storage
from tests.support.processes import eventually

SECRET = "hush-hush-secret"


class Cloud(ThreadingHTTPServer):
    """Notes the authorization of each request, and gives roles and tokens."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[tuple[str, str]] = []
        self.status = 404
        self.num_roles = 0
        self.role_lives = timedelta(hours=1)


class Answers(BaseHTTPRequestHandler):
    server: Cloud

    def log_message(self, *_: object) -> None:
        """Writes nothing."""

    def do_GET(self) -> None:
        ends = datetime.now(timezone.utc) + self.server.role_lives
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length)
        if self.path.startswith("/federation/credentials"):
            self.server.num_roles += 1
            self.server.asked.append(("sso", self.headers["x-amz-sso_bearer_token"]))
            role = {
                "accessKeyId": f"SSOKEY{self.server.num_roles}", "secretAccessKey": SECRET,
                "sessionToken": "tok", "expiration": int(ends.timestamp() * 1000),
            }  # fmt: skip
            self._answer(200, {"roleCredentials": role})
        elif self.path == "/sts":
            self.server.asked.append(("sts", body.decode()))
            issued = "urn:ietf:params:oauth:token-type:access_token"
            self._answer(200, {"access_token": "of-google", "expires_in": 3600,
                               "token_type": "Bearer", "issued_token_type": issued})  # fmt: skip
        else:
            self.server.asked.append((self.path, self.headers.get("authorization", "")))
            self._answer(self.server.status, {})

    do_POST = do_GET  # noqa: N815 - the name is of http.server

    def _answer(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with Cloud() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and an environment without credentials."""
    for name in os.environ:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "CLOUDSDK_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    # botocore looked for the home when it was imported.
    cache = str(tmp_path / ".aws" / "sso" / "cache")
    for provider in (botocore.credentials.SSOProvider, botocore.tokens.SSOTokenProvider):
        monkeypatch.setattr(provider, "_SSO_TOKEN_CACHE_DIR", cache)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def profile(home: Path, name: str, key: str, **more: str) -> None:
    lines = {"aws_access_key_id": key, "aws_secret_access_key": SECRET, **more}
    text = "".join(f"{name} = {value}\n" for name, value in lines.items())
    config = home / ".aws" / "config"
    config.parent.mkdir(exist_ok=True)
    with config.open("a") as file:
        file.write(f"[{'default' if name == 'default' else f'profile {name}'}]\n{text}")


def signer(cloud: Cloud, place: Location | str) -> str:
    """Reads a key that is not there, and returns the access key and region of the request."""
    cloud.asked.clear()
    with pytest.raises(StorageError, match="no such key"):
        open_storage(place).read("a")
    scope = cloud.asked[-1][1].partition("Credential=")[2].split("/")
    return f"{scope[0]} {scope[2]}"


def test_profiles_of_aws_give_keys_region_and_endpoint(cloud, home, monkeypatch):
    for name in ("default", "train"):
        profile(home, name, f"KEY-{name}", region=f"eu-{name}", endpoint_url=cloud.url)
    assert signer(cloud, "s3://by-files/run") == "KEY-default eu-default"
    # Without TLS the server has to compare bodies with a hash.
    assert make_store("s3", "by-files", {})[0].config["unsigned_payload"] == "false"
    assert signer(cloud, Location("s3://by-option/run", {"profile": "train"})) == (
        "KEY-train eu-train"
    )
    monkeypatch.setenv("AWS_PROFILE", "train")
    assert signer(cloud, "s3://by-variable/run") == "KEY-train eu-train"
    assert signer(cloud, Location("s3://with-region/run", {"region": "mine"})) == "KEY-train mine"
    storage = pickle.loads(pickle.dumps(open_storage("s3://by-variable/run")))
    with pytest.raises(StorageError, match="no such key"):
        storage.read("a")
    assert "KEY-train" in cloud.asked[-1][1]


def test_keys_of_options_and_environment_come_before_profiles(cloud, home, monkeypatch):
    profile(home, "default", "KEY-file")
    options = {"endpoint": cloud.url, "region": "us-1"}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    place = Location("s3://bucket/run", options)
    assert signer(cloud, place) == "KEY-environment us-1"
    place = Location("s3://bucket/run", {**options, "key": "KEY-option", "secret": SECRET})
    assert signer(cloud, place) == "KEY-option us-1"
    # As in boto3, a profile that is asked for in the call comes before the environment.
    place = Location("s3://bucket/run", {**options, "profile": "default"})
    assert signer(cloud, place) == "KEY-file us-1"


LOADER = botocore.loaders.create_loader()
"""Keeps the descriptions of services, which take 0.2 s to read."""
SERVICES = "services = own\n[services own]\ns3 =\n  endpoint_url = {url}\n"


@pytest.mark.parametrize("profile", [None, "other"])
@pytest.mark.parametrize(
    "environment",
    [
        {}, {"AWS_DEFAULT_REGION": "us-env"}, {"AWS_ENDPOINT_URL": "http://env:1"},
        {"AWS_ENDPOINT_URL_S3": "http://s3.env:1", "AWS_ENDPOINT_URL": "http://env:1"},
        {"AWS_PROFILE": "other"}, {"AWS_PROFILE": "other", "AWS_DEFAULT_REGION": "us-env"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("keys", [{}, {"AWS_ACCESS_KEY_ID": "KEY", "AWS_SECRET_ACCESS_KEY": "s"}])
@pytest.mark.parametrize("options", [{}, {"region": "eu-opt", "endpoint": "http://option:1"}])
def test_each_setting_comes_from_where_boto3_takes_it(
    home, monkeypatch, profile, environment, keys, options
):
    write(
        home / ".aws" / "config",
        "[default]\nregion = eu-file\nendpoint_url = http://file:1\n"
        f"[profile other]\nregion = eu-other\n{SERVICES.format(url='http://s3.other:1')}",
    )
    write(home / ".aws" / "credentials", "[default]\naws_access_key_id = FILE\n"
          "aws_secret_access_key = s\n[other]\naws_access_key_id = OTHER\n"
          "aws_secret_access_key = s\n")  # fmt: skip
    for name, value in {**environment, **keys}.items():
        monkeypatch.setenv(name, value)
    session = botocore.session.Session(profile=profile)
    session.register_component("data_loader", LOADER)
    client = session.create_client(
        "s3", region_name=options.get("region"), endpoint_url=options.get("endpoint")
    )
    given = options if profile is None else {**options, "profile": profile}
    store, _ = make_store("s3", "by-boto", given)
    used = store.config
    assert used["region"] == client.meta.region_name
    assert object_endpoint.endpoint_in(used) == client.meta.endpoint_url
    frozen = client._request_signer._credentials.get_frozen_credentials()
    provider = store.credential_provider
    assert (provider()["access_key_id"] if provider else "KEY") == frozen.access_key


def test_the_server_of_an_option_is_asked_whatever_the_environment_says(cloud, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    options = {"endpoint_url": cloud.url, "region": "us-1"}
    place = Location("s3://option-first/run", options)
    assert signer(cloud, place) == "KEY us-1"
    storage = pickle.loads(pickle.dumps(open_storage(place)))
    with pytest.raises(StorageError, match="no such key"):
        storage.read("a")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"aws_secret_access_key = {SECRET}\n", 1),
        (f"[default]\nregion = eu-1\n{SECRET}\n", 3),
        ("[default]\nregion = a\nregion = b\n", 3),
        ("[default]\n[default]\n", 2),
        (f"[default]\ns3 =\n  {SECRET}\n", None),
        ("[default]\nregion = \udcff\n", None),
    ],
)
@pytest.mark.parametrize("keys", [True, False])
def test_an_aws_file_that_can_not_be_parsed_is_named_with_the_line(
    home, monkeypatch, text, line, keys
):
    file = home / ".aws" / "config"
    file.parent.mkdir()
    file.write_bytes(text.encode(errors="surrogateescape"))
    if keys:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with pytest.raises(InvalidRequestError, match=f"configuration file {file}") as raised:
        open_storage("s3://unparsable/run")
    assert (f"line {line}" in str(raised.value)) == (line is not None)
    assert SECRET not in str(raised.value)
    # Who names region and server needs no file.
    options = {"key": "a", "secret": "b", "region": "us-1", "endpoint": "http://option:1"}
    open_storage(Location("s3://unparsable/run", options))


def test_a_client_is_made_anew_when_what_it_was_made_from_changes(cloud, home, monkeypatch):
    """As in a notebook, where somebody sets a variable or logs in after the first try."""
    store = make_store("s3", "tried-again", {})[0]
    assert make_store("s3", "tried-again", {})[0] is store
    assert store.credential_provider is None
    profile(home, "default", "KEY-default", region="eu-default")
    profile(home, "train", "KEY-train", region="eu-train")
    place = Location("s3://tried-again/run", {"endpoint": cloud.url})
    assert signer(cloud, place) == "KEY-default eu-default"
    monkeypatch.setenv("AWS_PROFILE", "train")
    assert signer(cloud, place) == "KEY-train eu-train"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-env")
    assert signer(cloud, place) == "KEY-train us-env"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY-env")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert signer(cloud, place) == "KEY-env us-env"
    (home / ".aws" / "config").unlink()
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_REGION", "us-again")
    assert signer(cloud, place) == "KEY-env us-again"


def test_one_bucket_name_on_two_servers_is_two_stores(cloud, home, monkeypatch):
    names = set()
    for endpoint in ("http://one:1", "http://two:1"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        names.add(object_clients.name_of_store(make_store("s3", "bucket", {"region": "a"})[0]))
    for account in ("one", "two"):
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", account)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
        names.add(object_clients.name_of_store(make_store("az", "bucket", {})[0]))
    assert len(names) == 4


def test_a_filesystem_of_fsspec_is_made_anew_in_another_environment(monkeypatch):
    class Tokens(MemoryFileSystem):
        """Takes a token from the environment when it is made, as others do."""

        protocol = "tokens"
        cachable = True

        def __init__(self, **options: object) -> None:
            super().__init__(**options)
            self.token = os.environ.get("TOKENS_TOKEN")

    fsspec.register_implementation("tokens", Tokens, clobber=True)
    tokens = []
    for token in ("first", "first", "second", "first"):
        monkeypatch.setenv("TOKENS_TOKEN", token)
        storage = open_storage("tokens://bucket/run")
        tokens.append((storage.filesystem.token, storage.filesystem))
    assert [token for token, _ in tokens] == ["first", "first", "second", "first"]
    assert tokens[0][1] is tokens[1][1]


def test_s3fs_is_made_anew_for_variables_that_it_reads_alone(monkeypatch):
    made = []
    for name, value in (
        ("AWS_PROFILE", "one"), ("LOSS_SCALE", "1"), ("LOSS_SCALE", "2"), ("AWS_PROFILE", "two"),
        ("BOTO_DISABLE_CRT", "true"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
        made.append(filesystem_of("s3://bucket/run", {"key": "K", "secret": "S"})[0])
    assert made[0] is made[1] is made[2]
    assert made[2] is not made[3] is not made[4]


def test_keys_that_a_tool_wrote_into_the_file_meanwhile_are_used(home):
    profile(home, "default", "KEY-old")
    provider = make_store("s3", "written-anew", {})[0].credential_provider
    assert provider()["access_key_id"] == "KEY-old"
    (home / ".aws" / "config").unlink()
    profile(home, "default", "KEY-new", aws_session_token="tok")
    found = provider()
    assert (found["access_key_id"], found["token"]) == ("KEY-new", "tok")


def sso(home: Path, cloud: Cloud, *, ends: timedelta) -> None:
    """Writes a profile with SSO as `aws configure sso` does, and a login that ends at a time."""
    write(
        home / ".aws" / "config",
        f"[default]\nregion = eu-1\nservices = fake\nendpoint_url = {cloud.url}\n"
        "sso_session = corp\nsso_account_id = 1\nsso_role_name = trainer\n"
        f"[sso-session corp]\nsso_start_url = {cloud.url}/start\nsso_region = eu-1\n"
        "sso_registration_scopes = sso:account:access\n"
        f"[services fake]\nsso =\n  endpoint_url = {cloud.url}\n"
        f"sso_oidc =\n  endpoint_url = {cloud.url}\n",
    )
    now = datetime.now(timezone.utc)
    form = "%Y-%m-%dT%H:%M:%SZ"
    login = {
        "startUrl": f"{cloud.url}/start", "region": "eu-1", "accessToken": "logged-in",
        "expiresAt": (now + ends).strftime(form), "clientId": "c", "clientSecret": "s",
        "registrationExpiresAt": (now + timedelta(days=9)).strftime(form), "refreshToken": "again",
    }  # fmt: skip
    cache = home / ".aws" / "sso" / "cache" / f"{hashlib.sha1(b'corp').hexdigest()}.json"
    write(cache, json.dumps(login))


def test_sso_gives_keys_of_a_role_once_for_many_requests(cloud, home):
    sso(home, cloud, ends=timedelta(hours=8))
    storage = open_storage("s3://by-sso/run")
    for _ in range(5):
        with pytest.raises(StorageError, match="no such key"):
            storage.read("a")
    asked = [what for what, _ in cloud.asked]
    assert asked == ["sso", *["/by-sso/run/a"] * 5]
    assert cloud.asked[0][1] == "logged-in"
    assert "Credential=SSOKEY1/" in cloud.asked[-1][1]


def test_keys_that_are_about_to_expire_are_renewed(cloud, home):
    sso(home, cloud, ends=timedelta(hours=8))
    cloud.role_lives = timedelta(seconds=20)
    used: set[str] = set()

    def are_renewed() -> bool:
        # obstore asks once in 0.1 s.
        used.add(signer(cloud, "s3://short-lived/run"))
        return len(used) == 3

    assert eventually(are_renewed)


def test_without_an_sso_login_the_command_to_log_in_is_named(cloud, home):
    sso(home, cloud, ends=timedelta(hours=8))
    (login,) = (home / ".aws" / "sso" / "cache").iterdir()
    data = login.read_text()
    login.unlink()
    with pytest.raises(StorageRefusedError, match=r"no valid credentials: .*SSO") as raised:
        open_storage("s3://logged-out/run").read("a")
    assert "not retried" in str(raised.value)
    assert "Tried: those of the AWS profile 'default'" in str(raised.value)
    # After `aws sso login` the same process goes on.
    login.write_text(data)
    assert signer(cloud, "s3://logged-out/run") == "SSOKEY1 eu-1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": "trian"}, r"The config profile \(trian\) could not be found; it has default"),
        ({"profile": 3}, "must be the name of an AWS profile, but is 3"),
        ({"profile": "default", "key": "a"}, "profile and access_key_id both give credentials"),
    ],
)
def test_a_profile_that_can_not_be_used_is_told(home, options, message):
    profile(home, "default", "KEY")
    with pytest.raises(InvalidRequestError, match=message):
        open_storage(Location("s3://bad-profile/run", options))


def test_without_boto3_a_profile_is_not_read_and_the_package_is_named(cloud, home, monkeypatch):
    monkeypatch.setattr(credentials, "is_installed", lambda module: False)
    with pytest.raises(InvalidRequestError, match="pip install boto3"):
        open_storage(Location("s3://no-boto/run", {"profile": "default"}))
    profile(home, "default", "KEY")
    store, _ = make_store("s3", "no-boto", {"endpoint": cloud.url})
    assert store.credential_provider is None
    assert "for AWS profiles: pip install boto3" in tried("s3", store)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(
    ("options", "environment", "tried"),
    [
        ({"profile": "train"}, {}, "those of the AWS profile 'train' (by config-file)"),
        ({"key": "a", "secret": SECRET}, {},
         "access_key_id of storage_options, secret_access_key of storage_options"),
        ({"key": "a"}, {"AWS_SECRET_ACCESS_KEY": SECRET},
         "access_key_id of storage_options, AWS_SECRET_ACCESS_KEY of the environment"),
        ({"anon": True}, {}, "skip_signature of storage_options"),
        ({"credential_provider": lambda: {"access_key_id": "a", "secret_access_key": SECRET,
                                          "expires_at": None}}, {},
         "those of the credential_provider function"),
    ],
)  # fmt: skip
def test_a_refusal_says_which_credentials_were_tried(
    cloud, home, monkeypatch, status, options, environment, tried
):
    profile(home, "train", "KEY")
    cloud.status = status
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    place = Location("s3://refused/run", {"endpoint": cloud.url, "region": "x", **options})
    with pytest.raises(StorageRefusedError, match=str(status)) as raised:
        open_storage(place).read("a")
    assert f"Tried: {tried}" in str(raised.value)
    assert SECRET not in str(raised.value)


def external_account(home: Path, cloud: Cloud) -> str:
    token = write(home / "subject", "who-i-am")
    return json.dumps({
        "type": "external_account", "audience": "//iam.googleapis.com/pool",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": f"{cloud.url}/sts", "credential_source": {"file": str(token)},
    })  # fmt: skip


@pytest.mark.parametrize(
    "where", ["home", "GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "token"]
)
def test_default_credentials_of_google_of_any_type_are_taken(cloud, home, monkeypatch, where):
    folder = home / (".config/gcloud" if where == "home" else "elsewhere")
    path = write(folder / "application_default_credentials.json", external_account(home, cloud))
    options = {"base_url": cloud.url}
    if where == "token":
        options["token"] = str(path)
    elif where != "home":
        monkeypatch.setenv(where, str(folder if where == "CLOUDSDK_CONFIG" else path))
    storage = open_storage(Location(f"gs://of-{where.lower()}/run", options))
    with pytest.raises(StorageError, match="no such key"):
        storage.read("a")
    assert "subject_token=who-i-am" in cloud.asked[0][1]
    assert cloud.asked[-1][1] == "Bearer of-google"
    cloud.status = 403
    with pytest.raises(StorageRefusedError, match="Tried: the default credentials of") as raised:
        pickle.loads(pickle.dumps(storage)).read("a")
    assert str(path) in str(raised.value)


def test_a_user_and_a_service_account_of_google_are_left_to_obstore(cloud, home):
    login = {
        "type": "authorized_user",
        "client_id": "a",
        "client_secret": "b",
        "refresh_token": "c",
    }
    path = home / ".config/gcloud/application_default_credentials.json"
    write(path, json.dumps(login))
    store, _ = make_store("gs", "authorized-user", {"base_url": cloud.url})
    assert store.credential_provider is None
    assert tried("gs", store) == f"the default credentials of {path}"


def test_the_login_of_az_is_taken(cloud, home, monkeypatch):
    pytest.importorskip("azure.identity")
    az = write(
        home / "bin" / "az",
        "#!/bin/sh\n"
        """echo '{"accessToken": "of-azure", "expiresOn": "2099-01-01 00:00:00.000000"}'\n""",
    )
    az.chmod(0o755)
    monkeypatch.setenv("PATH", f"{az.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "AzureCliCredential")
    options = {"endpoint": cloud.url, "account_name": "mine"}
    storage = open_storage(Location("az://container/run", options))
    with pytest.raises(StorageError, match="no such key"):
        storage.read("a")
    assert cloud.asked[-1][1] == "Bearer of-azure"
    cloud.status = 403
    with pytest.raises(StorageRefusedError, match=r"Tried: those of azure\.identity\.Default"):
        storage.read("a")


def test_a_key_of_azure_comes_before_the_login(cloud, monkeypatch):
    for name in ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "a2V5" if name.endswith("KEY") else "sv=1&sig=a")
            store, _ = make_store("az", name.lower(), {"account_name": "mine"})
            assert store.credential_provider is None
            assert tried("az", store) == f"{name} of the environment"
