"""FSDP2 of docs/examples; others are in `test_evaluator`, `test_frameworks` and `test_train`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.integration.test_frameworks import EXAMPLES
from tests.support.programs.forks import plain_environment

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")


def output_of(name: str, *arguments: object, launcher: tuple[str, ...] = ()) -> str:
    """Returns what a program of docs/examples prints."""
    finished = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name), *map(str, arguments)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=400, check=False,
        env=plain_environment(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_fsdp2_goes_on_with_fewer_ranks(tmp_path: Path):
    two = (*TORCHRUN, "--nproc-per-node=2")
    assert output_of("fsdp2_torchrun.py", tmp_path, 10, launcher=two).startswith("steps 1 to 10")
    one = output_of("fsdp2_torchrun.py", tmp_path, 15, launcher=TORCHRUN)
    assert one.startswith("steps 11 to 15")
