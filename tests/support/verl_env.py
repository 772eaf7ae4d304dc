"""verl, installed below the environment in a folder of its own: `python -m tests.support.verl_env`.

Without what it asks for, of which a gigabyte is for accelerators and other versions of torch; what
its trainer and workers import is beside it. Installing again does nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

HOME_VARIABLE = "RAY_DCP_VERL_HOME"
"""Environment variable with the folder that the tests use."""
VERSION = "0.9.1"
DEFAULT_HOME = Path(sys.prefix) / "share" / f"verl-{VERSION}"

PACKAGES = (
    f"verl=={VERSION}", "tensordict==0.15.3", "pyvers==0.2.3", "orjson", "omegaconf==2.4.0",
    "hydra-core==1.3.8", "antlr4-python3-runtime==4.9.3", "codetiming==1.4.0", "peft==0.21.2",
    "TransferQueue==0.1.11", "datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19",
    "pylatexenc==2.11", "msgspec==0.22.0", "pyzmq==27.3.0", "cachetools==8.0.2",
)  # fmt: skip
"""Those that the `test` extra does not have."""


def chosen() -> Path:
    """Returns the folder that the tests import verl from, there or not."""
    told = os.environ.get(HOME_VARIABLE)
    return Path(told) if told else DEFAULT_HOME


def installed() -> Path:
    """Returns the folder, after installing to it if that is needed."""
    home = chosen()
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent) as directory:
            subprocess.run(
                [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps",
                 "--target", f"{directory}/it", *PACKAGES],
                stdin=subprocess.DEVNULL, check=True,
            )  # fmt: skip
            # Suppressed: another process was first.
            with suppress(OSError):
                Path(directory, "it").rename(home)
    return home


if __name__ == "__main__":
    print(installed())
