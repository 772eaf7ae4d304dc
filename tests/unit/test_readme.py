"""What the README and the notebooks say can be run, runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ray_dcp.cli.main import COMMANDS

# --- The README -----------------------------------------------------------------------------------


REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


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


def test_every_command_that_is_shown_exists():
    shown = set(re.findall(r"ray-dcp ([a-z]+)", "".join(blocks("bash"))))
    assert {"ls", "show", "verify", "demo"} <= shown
    assert shown <= set(COMMANDS)


def test_every_linked_file_exists():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert [link for link in links if not (REPOSITORY / link).exists()] == []


# --- The notebooks --------------------------------------------------------------------------------


PATHS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
ABSOLUTE = r"[\"'](?:/(?:home|root|tmp|work|opt|mnt|dev)/|[A-Z]:\\\\)"


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs_and_for_any_python(path: Path):
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert "version" not in notebook["metadata"]["language_info"]
    for cell in cells(path, "code"):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_code_cell_compiles_and_names_no_place_of_one_machine(path: Path):
    for number, cell in enumerate(cells(path, "code")):
        compile(source(cell), f"{path.name}, code cell {number}", "exec")
        assert not re.search(ABSOLUTE, source(cell))


def test_the_script_runs_every_notebook_that_is_there():
    script = (REPOSITORY / ".ci" / "run").read_text()
    assert "begin_beside notebooks tests.notebooks\n    tests --doctest-modules" in script
