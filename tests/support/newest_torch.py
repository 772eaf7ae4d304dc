"""`python -m tests.support.newest_torch [VERSION...]`: demo and tests under other versions of
torch.

Too heavy for `.ci/run`: each version gets an environment of its own, of some gigabytes, in which
`pip install .` has put this package. One that is there already is used again. Prints what passed,
as a table; ends with 1 if something failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
VERSIONS = ("2.14.1", "2.15.0")
DEFAULT_PLACE = Path("~/.cache/ray-dcp")

INTEGRATION = "tests/integration/test_"
STEPS: dict[str, tuple[str, ...]] = {
    "demo": ("-m", "ray_dcp", "demo"),
    "unit": ("-m", "pytest", "tests/unit"),
    "exchange": (
        "-m", "pytest", f"{INTEGRATION}exchange_stock.py", f"{INTEGRATION}exchange_safetensors.py",
    ),
    "torchrun": ("-m", "pytest", f"{INTEGRATION}torchrun.py", f"{INTEGRATION}examples.py"),
}  # fmt: skip
"""What is run, by the name of the step."""

OF_TESTS = """
import importlib.metadata as metadata
for line in metadata.requires("ray-dcp"):
    package, _, marker = line.partition(";")
    if "'test'" in marker.replace('"', "'") and not package.startswith("torch="):
        print(package.strip())
"""


def build(place: Path, version: str) -> Path:
    """Makes the environment of a version, with this tree as it is now; returns its interpreter.

    Args:
        place: Where environments are.
        version: Of torch.
    """
    folder = place.expanduser().absolute() / f"torch-{version}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch = f"torch=={version}"
    # Why first without dependencies: a tree whose version has not changed would be passed over.
    _run([*pip, "--no-deps", "--force-reinstall", str(REPOSITORY)])
    of_tests = _run([str(python), "-c", OF_TESTS]).split("\n")
    _run([*pip, str(REPOSITORY), torch, *filter(None, of_tests)])
    return python


def _run(command: list[str]) -> str:
    """Returns what a command prints."""
    print("+", *command, file=sys.stderr)
    # Why: the pip of a machine may be told to take no torch as new as this.
    environment = os.environ | {"PIP_CONFIG_FILE": os.devnull}
    environment.pop("PYTHONPATH", None)
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd="/", check=False
    )
    if ran.returncode:
        raise SystemExit(f"making the environment failed: {' '.join(command)}")
    return ran.stdout


def run(python: Path, step: str, processes: str, log: Path) -> str:
    """Runs a step in an environment; returns the last line that it printed, or how it failed.

    Args:
        python: Its interpreter.
        step: One of `STEPS`.
        processes: How many run tests.
        log: Where all that it prints goes.
    """
    is_test = STEPS[step][1] == "pytest"
    command = [str(python), *STEPS[step], *(("-q", "-n", processes) if is_test else ())]
    print("+", *command, ">", log, file=sys.stderr)
    environment = os.environ | ({"PYTHONPATH": str(REPOSITORY)} if is_test else {})
    if not is_test:
        environment.pop("PYTHONPATH", None)  # what `pip install .` has put there is shown
    start = time.monotonic()
    with log.open("w") as out:
        ended = subprocess.run(
            command, cwd=REPOSITORY if is_test else log.parent, env=environment, stdout=out,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    lines = log.read_text(errors="replace").strip().splitlines() or [""]
    told = f"{lines[-1]}, {time.monotonic() - start:.0f} s"
    return told if ended.returncode == 0 else f"FAILED ({ended.returncode}): {told}; see {log}"


def main() -> int:
    """Runs all steps for all versions that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.newest_torch", description=__doc__
    )
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="of torch")
    parser.add_argument("--dir", type=Path, default=DEFAULT_PLACE, help="where environments are")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), help="steps")
    parser.add_argument("--processes", default="auto", help="how many run tests")
    given = parser.parse_args()
    rows = []
    for version in given.versions:
        python = build(given.dir, version)
        for step in given.only:
            told = run(python, step, given.processes, python.parents[1] / f"{step}.log")
            rows.append((version, step, told))
            print(f"{version} {step}: {told}", file=sys.stderr)
    print(f"{'torch':<10}{'step':<10}result")
    for version, step, told in rows:
        print(f"{version:<10}{step:<10}{told}")
    return int(any(told.startswith("FAILED") for _, _, told in rows))


if __name__ == "__main__":
    sys.exit(main())
