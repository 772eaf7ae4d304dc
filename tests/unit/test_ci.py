"""`.ci/run` and the README's test command run the same tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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
    stages = re.findall(r"^stage_\w+\(\) \{ tests (tests/\w+); \}$", SCRIPT.read_text(), re.M)
    assert sorted(stages) == sorted(testpaths)


def test_the_stages_run_by_default_include_all_test_stages(testpaths: list[str]):
    defaults = re.search(r"ALL_STAGES=\((.*)\)", SCRIPT.read_text())
    assert defaults is not None
    assert {Path(path).name for path in testpaths} <= set(defaults[1].split())


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


def test_an_unknown_stage_is_refused_before_anything_runs():
    found = subprocess.run(
        [str(SCRIPT), "lint", "nope"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert found.returncode == 2
    assert "there is no stage 'nope'; choose from: install lint" in found.stderr
    assert "=====" not in found.stdout


def test_the_tests_that_come_first_are_there():
    assert set(LONGEST) <= {path.stem for path in TESTS.rglob("test_*.py")}


def pytest_on(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the tests of a file with what `tests/conftest.py` does for all tests."""
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", *options, str(file)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=400, check=False,
        cwd=file.parent, env=environment,
    )  # fmt: skip


def test_a_test_that_fails_hands_nothing_broken_to_the_next(tmp_path: Path):
    file = tmp_path / "test_shared.py"
    file.write_text("""
import pytest

@pytest.fixture(scope="session")
def daemon():
    return []

@pytest.fixture(scope="module")
def group(daemon):
    return daemon

@pytest.mark.parametrize("number", [0, 1, 2])
def test_it(group, number):
    group.append(number)
    assert group != [0]
""")
    found = pytest_on(file)
    assert "[0]" in found.stdout
    # With what the first had left, the second had found [0, 1], and the third [0, 1, 2].
    assert "1 failed, 2 passed" in found.stdout


def test_no_test_joins_a_ray_that_it_did_not_start(tmp_path: Path):
    file = tmp_path / "test_alone.py"
    file.write_text("""
from ray._private.services import canonicalize_bootstrap_address

def test_it():
    # What `ray.init()` asks: whether to join a cluster, or to start one.
    assert canonicalize_bootstrap_address(None) is None
""")
    assert "1 passed" in pytest_on(file).stdout
