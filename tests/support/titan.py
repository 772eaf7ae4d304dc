"""torchtitan, installed once below the environment, without what it asks for.

`python -m tests.support.titan` installs it. Why without: it pins an old fsspec, and half a gigabyte
of what it needs is for training only.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

VERSION = "0.3.0"
HOME = Path(sys.prefix) / "share" / f"torchtitan-{VERSION}"


def installed() -> Path:
    """Returns the folder that it is imported from, after installing it if that is needed."""
    if not HOME.exists():
        HOME.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=HOME.parent) as directory:
            subprocess.run(
                [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps",
                 "--target", f"{directory}/it", f"torchtitan=={VERSION}"],
                stdin=subprocess.DEVNULL, check=True,
            )  # fmt: skip
            # Suppressed: another process was first.
            with suppress(OSError):
                Path(directory, "it").rename(HOME)
    return HOME


if __name__ == "__main__":
    print(installed())
