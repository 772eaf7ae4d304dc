"""Builds a small environment of torch 2.9 with torch_xla: `python -m tests.support.xla_env DIR`.

torch_xla's last release, 2.9.0, pairs with torch 2.9.0, of which there is no CPU wheel. Most of
what the CUDA wheel pulls in is never called here, so empty shared libraries stand in for it: 2 GB
instead of 6. Needs gcc, and some minutes. Building again does nothing; the path of the interpreter
is printed last.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

PYTHON_VARIABLE = "RAY_DCP_TORCH29_PYTHON"
"""Environment variable with the interpreter that the tests use."""
DEFAULT_PLACE = Path("~/.cache/ray-dcp/torch29")

VERSIONS = range(10, 14)
"""Minor versions of Python 3 for which both wheels exist."""
WITHOUT_DEPENDENCIES = (
    "torch==2.9.0", "torch-xla==2.9.0", "nvidia-cuda-runtime-cu12==12.8.90",
)  # fmt: skip
OF_TORCH = (
    "typing_extensions", "filelock", "sympy", "networkx", "jinja2", "fsspec", "numpy<2.4",
    "absl-py", "pyyaml", "requests", "packaging", "setuptools<81",
)  # fmt: skip
OF_RAY_DCP = ("pyarrow>=16", "xxhash>=3.4")
"""What saves and loads of one process need beside torch; Ray is not."""

STUBS = {
    "libcudnn.so.9": "cudnn",
    "libcusparseLt.so.0": "cusparselt",
    "libcufile.so.0": "cufile",
    "libcupti.so.12": "cuda_cupti",
    "libcusparse.so.12": "cusparse",
    "libcufft.so.11": "cufft",
    "libnccl.so.2": "nccl",
    "libcurand.so.10": "curand",
    "libcublas.so.12": "cublas",
    "libcublasLt.so.12": "cublas",
    "libnvshmem_host.so.3": "nvshmem",
}
"""Libraries that `import torch` opens and whose functions a CPU never calls, by soname."""
LAZY = "import os, sys; sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)\n"
"""Why: symbols are then looked up when they are first called, and these never are. A `.pth` file
runs in every interpreter of the environment, a `sitecustomize` may be hidden by the system's."""

PROBE = "import torch, torch_xla; print(torch.__version__, torch_xla.__version__)"


def interpreter(place: Path) -> Path:
    """Returns the path of the interpreter of the environment, built or not."""
    return place.expanduser().absolute() / "bin" / "python"


def chosen() -> Path:
    """Returns the path of the interpreter that the tests use, there or not."""
    told = os.environ.get(PYTHON_VARIABLE)
    return Path(told) if told else interpreter(DEFAULT_PLACE)


def build(place: Path) -> Path:
    """Builds the environment if it is not complete; returns its interpreter.

    Raises:
        SystemExit: This Python can't have it, or a step failed; the message says which.
    """
    python = interpreter(place)
    mark = python.parent.parent / "complete"
    recipe = repr((WITHOUT_DEPENDENCIES, OF_TORCH, OF_RAY_DCP, STUBS, LAZY))
    if mark.exists() and mark.read_text() == recipe:
        return python
    if sys.platform != "linux" or sys.version_info[0] != 3 or sys.version_info[1] not in VERSIONS:
        raise SystemExit(
            f"expected Python 3.{VERSIONS.start} to 3.{VERSIONS.stop - 1} on Linux, for which "
            f"torch_xla 2.9 has wheels, found {sys.version.split()[0]} on {sys.platform}"
        )
    venv.create(python.parent.parent, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, *OF_TORCH, *OF_RAY_DCP])
    _run([*pip, "--no-deps", *WITHOUT_DEPENDENCIES])
    packages = Path(_run([str(python), "-c", "import site; print(site.getsitepackages()[0])"]))
    for soname, package in STUBS.items():
        _stub(packages / "nvidia" / package / "lib" / soname)
    (packages / "lazy_symbols.pth").write_text(LAZY)
    print(_run([str(python), "-c", PROBE]), file=sys.stderr)
    mark.write_text(recipe)
    return python


def _stub(path: Path) -> None:
    """Makes an empty shared library that answers to the file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _run(["gcc", "-shared", f"-Wl,-soname,{path.name}", "-x", "c", os.devnull, "-o", str(path)])


def _run(command: list[str]) -> str:
    """Returns what a command prints."""
    print("+", *command, file=sys.stderr)
    try:
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"building the environment of torch 2.9 failed: {error}") from error


def main() -> None:
    """Builds the environment in the folder that the command line names."""
    if len(sys.argv) > 2 or any(argument.startswith("-") for argument in sys.argv[1:]):
        raise SystemExit(f"usage: python -m tests.support.xla_env [DIR]; default {DEFAULT_PLACE}")
    print(build(Path(sys.argv[1]) if sys.argv[1:] else DEFAULT_PLACE))


if __name__ == "__main__":
    main()
