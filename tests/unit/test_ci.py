"""`.ci/run` and the README's test command run the same tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import LONGEST

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / ".ci" / "run"
TESTS = REPOSITORY / "tests"


@pytest.fixture
def testpaths(pytestconfig: pytest.Config) -> list[str]:
    return pytestconfig.getini("testpaths")


def test_the_test_stages_are_the_testpaths_of_plain_pytest(testpaths: list[str]):
    stages = re.search(r"TEST_STAGES=\((.*)\)", SCRIPT.read_text())
    assert stages is not None
    assert [f"tests/{stage}" for stage in stages[1].split()] == testpaths


def test_the_stages_run_by_default_include_all_test_stages():
    assert re.search(r'ALL_STAGES=\(.*"\$\{TEST_STAGES\[@\]\}".*\)', SCRIPT.read_text())


def test_no_test_file_lies_outside_the_testpaths(testpaths: list[str]):
    outside = [
        str(path)
        for path in TESTS.rglob("test_*.py")
        if not any(path.is_relative_to(REPOSITORY / each) for each in testpaths)
    ]
    assert outside == []


def test_the_readme_names_the_command_that_the_stages_select_from():
    assert "python -m pytest\n" in (REPOSITORY / "README.md").read_text()
    assert 'python -m pytest "$@"' in SCRIPT.read_text()


def test_the_tests_that_come_first_are_there():
    assert set(LONGEST) <= {path.stem for path in TESTS.rglob("test_*.py")}
