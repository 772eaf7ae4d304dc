"""Every verb on a run that lies on an S3 server; the place is named by a URL, as users do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import cli_story


def test_every_verb_prints_what_it_did(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": server.access_key_id,
        "AWS_SECRET_ACCESS_KEY": server.secret_access_key,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    run = f"{server.location.url}/cli/run"
    cli_story.make_ours(run)
    names = [f"step-{step:08d}" for step in (100, 200)]
    todo = cli_story.commands(run, tmp_path, names, ours=True)
    found = cli_story.tell(todo, {run: "RUN", str(tmp_path): "WORK"})
    # What doctor says of buckets is the only difference from a run on a disk.
    told, of_bucket = re.subn(
        r"^note uploads the bucket needs a lifecycle rule .*\n", "", found, flags=re.M
    )
    assert of_bucket == 1
    cli_story.compare("ours", told, renew=False)
