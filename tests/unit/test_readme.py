"""What the README says can be run, runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ray_dcp.cli.main import COMMANDS

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def test_the_readme_has_an_example():
    assert len(blocks("python")) >= 2


@pytest.mark.parametrize("block", blocks("python"))
def test_a_python_block_runs_in_a_fresh_process(block: str, tmp_path: Path):
    finished = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:ray_dcp", "-c", block],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr


def test_the_first_example_has_twenty_lines():
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) <= 20


def test_every_command_that_is_shown_exists():
    shown = set(re.findall(r"ray-dcp ([a-z]+)", "".join(blocks("bash"))))
    assert {"ls", "show", "verify", "demo"} <= shown
    assert shown <= set(COMMANDS)


def test_every_linked_file_exists():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert [link for link in links if not (REPOSITORY / link).exists()] == []
