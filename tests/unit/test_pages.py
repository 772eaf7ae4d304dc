"""What the README and the pages of docs/ say can be run, runs."""

from __future__ import annotations

import inspect
import json
import pydoc
import re
from pathlib import Path

import pytest

from ray_dcp.cli.main import COMMANDS

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = {
    page.relative_to(REPOSITORY).as_posix(): page.read_text()
    for page in (REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md")))
}

PROGRAM = """
import json, os, sys, types, warnings
warnings.filterwarnings("error", category=UserWarning, module="ray_dcp")
from ray_dcp.manager import step_export
step_export._NICE = 0  # else an export waits for all that runs beside this test
pages, root = json.loads(sys.argv[1]), sys.argv[2]
for number, (page, code) in enumerate(pages.items()):
    os.mkdir(f"{root}/{number}")
    os.chdir(f"{root}/{number}")
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    with warnings.catch_warnings():
        exec(compile(code, page, "exec"), vars(module))
"""
"""Runs pages one after the other, each in a folder and a `__main__` of its own."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.M | re.S)


def code_of(page: str) -> str:
    """Returns the Python blocks of a page at their lines, and no other lines."""
    found, is_code = [], False
    for line in PAGES[page].splitlines():
        is_code = is_code and line != "```"
        found.append(line if is_code else "")
        is_code = is_code or line == "```python"
    return "\n".join(found)


# Why several pages a process: most of its time is the import of torch.
@pytest.mark.parametrize("half", [0, 1])
def test_the_python_blocks_of_a_page_run_one_after_the_other(half, tmp_path, programs):
    pages = {page: code for page in PAGES if (code := code_of(page)).strip()}
    assert len(pages) > 15
    some = dict([*pages.items()][half::2])
    (finished,) = programs.run("-c", PROGRAM, json.dumps(some), str(tmp_path))
    assert finished.returncode == 0, finished.stderr


def test_every_command_that_is_shown_exists():
    shown = {
        command
        for page in PAGES
        for block in blocks(page, "bash")
        for command in re.findall(r"ray-dcp ([a-z]+)", block)
    }
    assert {"ls", "show", "verify", "demo", "timeline"} <= shown
    assert shown <= set(COMMANDS)


@pytest.mark.parametrize("page", PAGES)
def test_every_linked_file_exists(page: str):
    links = re.findall(r"\]\(([^)#:]+)[)#]", PAGES[page])
    assert [link for link in links if not (REPOSITORY / page).parent.joinpath(link).exists()] == []


def test_readme_and_design_can_be_read_at_once():
    assert len((REPOSITORY / "ray_dcp" / "DESIGN.md").read_bytes()) <= 25_000
    text = PAGES["README.md"]
    assert len(text.splitlines()) <= 150
    assert len(text.encode()) <= 7_000


def test_every_page_is_in_the_menu():
    menu = (REPOSITORY / "mkdocs.yml").read_text()
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert {page for page in pages if f"- {page}\n" not in menu} == set()


def test_the_reference_names_no_files_of_torch():
    documented = [
        pydoc.locate(name)
        for page in PAGES
        for name in re.findall(r"^::: (ray_dcp\.(?!integrations)[\w.]+)", PAGES[page], re.M)
    ]
    methods = [
        member for one in documented if inspect.isclass(one) for member in vars(one).values()
    ]
    assert len(documented) > 70
    sources = re.compile(r"^ *Source: `?torch", re.M)
    assert [
        one for one in documented + methods if sources.search(getattr(one, "__doc__", "") or "")
    ] == []


def test_every_error_is_in_the_catalogue():
    from ray_dcp import errors

    catalogue = PAGES["docs/reference/errors.md"]
    assert [name for name in errors.__all__ if f"`{name}`" not in catalogue] == []


def test_every_difference_from_dcp_names_its_test():
    page = PAGES["docs/differences.md"]
    rows = re.findall(r"^\| ([SLEMD]\d+) \|", page, re.MULTILINE)
    tests = dict(re.findall(r"^\* ([SLEMD]\d+): `([^`]+)`$", page, re.MULTILINE))
    assert rows
    assert sorted(tests) == sorted(rows)
    for test in tests.values():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (REPOSITORY / path).read_text(), test
