"""A soak in which everything that must not happen is done on purpose: it must be told of it all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.bench.soak_run import SABOTAGE

REPOSITORY = Path(__file__).parents[2]


def test_whatever_a_soak_must_not_let_happen_is_found_when_it_does(tmp_path):
    command = [sys.executable, "-m", "tests.bench", "soak", "--sabotage", "--minutes", "0.4"]
    finished = subprocess.run(
        [*command, "--seed", "1", "--path", str(tmp_path)], cwd=REPOSITORY, capture_output=True,
        text=True, timeout=590, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    counts = re.findall(r"^ +(\d+)  (.+)$", finished.stdout, re.MULTILINE)
    assert {name for count, name in counts if int(count)} >= set(SABOTAGE)
    assert list(tmp_path.iterdir()) == []
