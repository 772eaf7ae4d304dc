"""`python -m tests.support.newest_torch [VERSION...]`: demo and tests under other versions of
torch.

Too heavy for `.ci/run`: each version gets an environment of its own, of some gigabytes, in which
`pip install .` has put this package. One that is there already is used again. Ends with 1 if
something failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
VERSIONS = ("2.14.1", "2.15.0")
PLACE = Path("~/.cache/ray-dcp")

INTEGRATION = "tests/integration/test_"
STEPS: dict[str, tuple[str, ...]] = {
    "demo": ("-m", "ray_dcp", "demo"),
    "unit": ("-m", "pytest", "tests/unit"),
    "exchange": (
        "-m", "pytest", f"{INTEGRATION}exchange_stock.py", f"{INTEGRATION}exchange_safetensors.py",
    ),
    "programs": ("-m", "pytest", f"{INTEGRATION}torchrun.py", f"{INTEGRATION}frameworks.py"),
}  # fmt: skip
"""What is run, by the name of the step."""

OF_TESTS = """
import importlib.metadata as metadata
for line in metadata.requires("ray-dcp"):
    package, _, marker = line.partition(";")
    if "'test'" in marker.replace('"', "'") and not package.startswith("torch="):
        print(package.strip())
"""


def build(version: str) -> Path:
    """Makes the environment of a version, with this tree as it is now; returns its interpreter."""
    folder = PLACE.expanduser() / f"torch-{version}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # Why first without dependencies: a tree whose version has not changed would be passed over.
    _run([*pip, "--no-deps", "--force-reinstall", str(REPOSITORY)])
    of_tests = _run([str(python), "-c", OF_TESTS]).split("\n")
    _run([*pip, str(REPOSITORY), f"torch=={version}", *filter(None, of_tests)])
    return python


def _run(command: list[str]) -> str:
    """Returns what a command prints; ends the program if it fails."""
    # Why: the pip of a machine may be told to take no torch as new as this.
    environment = os.environ | {"PIP_CONFIG_FILE": os.devnull}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd="/", check=True
    ).stdout


def main() -> int:
    """Runs all steps for all versions that the command line names."""
    told = []
    for version in sys.argv[1:] or VERSIONS:
        python = build(version)
        for step, words in STEPS.items():
            # Why elsewhere: the demo is shown as `pip install .` has put it there.
            folder = REPOSITORY if "pytest" in words else python.parent
            environment = os.environ | {"PYTHONPATH": str(REPOSITORY) * ("pytest" in words)}
            ended = subprocess.run([python, *words], cwd=folder, env=environment, check=False)
            told.append(f"torch {version}, {step}: {'FAILED' if ended.returncode else 'passed'}")
    print(*told, sep="\n")
    return int(any("FAILED" in one for one in told))


if __name__ == "__main__":
    sys.exit(main())
