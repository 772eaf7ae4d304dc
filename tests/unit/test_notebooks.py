"""The notebooks are stored as they should be; `.ci/run docs` executes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
PATHS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
ABSOLUTE = r"[\"'](?:/(?:home|root|tmp|work|opt|mnt|dev)/|[A-Z]:\\\\)"
STORIES = ["quickstart", "elastic_resharding", "failures", "compare_checkpoints", "ray_train"]


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_there_is_a_notebook_for_each_story():
    assert [path.stem.partition("_")[2] for path in PATHS] == STORIES


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


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_tells_a_story_with_pictures(path: Path):
    told = cells(path, "markdown")
    assert source(told[0]).startswith("# ")
    assert sum(len(source(cell).split()) for cell in told) > 50
    code = "\n".join(source(cell) for cell in cells(path, "code"))
    assert "optimizer" in code or "demo.train" in code  # it trains
    assert re.search(r"plt\.show|line_chart|picture_", code)  # it draws


def test_the_script_runs_every_notebook_that_is_there():
    script = (REPOSITORY / ".ci" / "run").read_text()
    assert "begin_beside notebooks tests.notebooks\n    tests --doctest-modules" in script
