"""Unfinished uploads without S3: signatures, pages, whose credentials, what is refused."""

from __future__ import annotations

import threading
from datetime import datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from ray_dcp.errors import StorageError
from ray_dcp.store.hashed_keys import PlainKeys
from ray_dcp.store.signing import S3Credentials, signed_headers
from ray_dcp.store.unfinished_uploads import HiddenUploads, Upload, UploadsOf, uploads_of

EXAMPLE = S3Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")


@pytest.mark.parametrize(
    ("query", "signature"),
    [
        ("lifecycle=", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        ("max-keys=2&prefix=J", "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
    ],
)
def test_signatures_are_those_of_the_examples_in_the_documentation_of_s3(query, signature):
    url = f"https://examplebucket.s3.amazonaws.com/?{query}"
    headers = signed_headers("GET", url, EXAMPLE, "us-east-1", datetime(2013, 5, 24))
    assert headers["authorization"].endswith(f"Signature={signature}")
    assert EXAMPLE.secret_access_key not in repr((headers, EXAMPLE))


class Bucket(BaseHTTPRequestHandler):
    """Two pages of uploads; other prefixes are not left out, as some servers do."""

    aborted: list[tuple[str, str]] = []  # noqa: RUF012
    refusal = 0

    def log_message(self, *_):
        pass

    def do_GET(self):
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        assert "uploads" in query
        first = "key-marker" not in query
        more = "<NextKeyMarker>k</NextKeyMarker><NextUploadIdMarker>1</NextUploadIdMarker>"
        uploads = [("pre/run/a&amp;b", "1"), ("pre/other", "2")] if first else [("pre/run/c", "3")]
        text = "".join(
            f"<Upload><Key>{key}</Key><UploadId>{number}</UploadId></Upload>"
            for key, number in uploads
        )
        end = f"<IsTruncated>{'true' if first else 'false'}</IsTruncated>"
        self._answer(self.refusal or 200, f"<R>{text}{more if first else ''}{end}</R>")

    def do_DELETE(self):
        parts = urlsplit(self.path)
        self.aborted.append((parts.path, parts.query))
        self._answer(404 if "gone" in parts.query else self.refusal or 204, "<Code>Why</Code>")

    def _answer(self, status, text):
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def bucket(monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), Bucket)
    monkeypatch.setattr(Bucket, "aborted", [])
    monkeypatch.setattr(Bucket, "refusal", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield S3Store(
        "ckpt", prefix="pre", client_options={"allow_http": True},
        config={"endpoint": f"http://127.0.0.1:{server.server_port}", "access_key_id": "me",
                "secret_access_key": "hush", "region": "eu-1"},
    )  # fmt: skip
    server.shutdown()
    server.server_close()
    thread.join()


def test_all_pages_are_listed_and_only_what_lies_below_the_prefix(bucket):
    known = uploads_of(bucket)
    assert isinstance(known, UploadsOf)
    assert (known.prefix, known.region) == ("pre/", "eu-1")
    assert known.list("run/") == [Upload("run/a&b", "1"), Upload("run/c", "3")]


def test_an_upload_is_aborted_by_its_hidden_key_and_one_that_is_gone_is_fine(bucket):
    hidden = HiddenUploads(bucket, PlainKeys("run"))
    found = hidden.look()
    assert [key.rpartition("-")[2] for key in found] == ["a&b", "c"]
    assert all(key.startswith(".tmp-") for key in found)
    hidden.abort([next(iter(found)), ".tmp-0123456789ab-other"])
    assert Bucket.aborted == [("/ckpt/pre/run/a%26b", "uploadId=1")]
    uploads_of(bucket).abort(Upload("run/c", "gone"))


def test_a_refusal_is_told_and_nothing_is_seen(bucket, monkeypatch):
    monkeypatch.setattr(Bucket, "refusal", 403)
    hidden = HiddenUploads(bucket, PlainKeys("run"))
    assert hidden.look() == {}
    assert "403" in hidden.unseen
    assert "lifecycle rule" in hidden.unseen
    assert "hush" not in hidden.unseen
    with pytest.raises(StorageError, match=r"could not abort an upload.*403 Why"):
        uploads_of(bucket).abort(Upload("run/c", "3"))
    monkeypatch.setattr(Bucket, "refusal", 0)
    assert len(hidden.look()) == 2
    assert hidden.unseen is None


def test_where_they_can_not_be_listed_the_reason_tells_what_to_do(monkeypatch):
    assert uploads_of(MemoryStore()) is None
    assert uploads_of(AzureStore("c", config={"account_name": "a", "use_emulator": True})) is None
    assert "lifecycle rule" in uploads_of(GCSStore("b", config={"skip_signature": True}))
    # The key id of the environment is another one: its secret is not that of the store.
    given = {"access_key_id": "me", "secret_access_key": "hush", "region": "eu-1"}
    store = S3Store("b", config=given)
    assert isinstance(uploads_of(store, {}), UploadsOf)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "env")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "env-hush")
    by_environment = S3Store("b", config={"region": "eu-1"})
    assert uploads_of(by_environment).credentials.secret_access_key == "env-hush"
    another = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    assert "neither in storage_options" in uploads_of(by_environment, another)
