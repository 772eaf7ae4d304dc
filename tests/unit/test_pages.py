"""What the README and the pages of docs/ say can be run, runs."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import pydoc
import re
from pathlib import Path

import pytest

from ray_dcp.cli.main import COMMANDS

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "ray_dcp"
DOCS = REPOSITORY / "docs"
FOR_DEVELOPERS = {
    name: (REPOSITORY / name).read_text() for name in ("CONTRIBUTING.md", "ray_dcp/DESIGN.md")
}
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


@pytest.mark.parametrize("page", PAGES | FOR_DEVELOPERS)
def test_every_linked_file_exists(page: str):
    links = re.findall(r"\]\(([^)#:]+)[)#]", (PAGES | FOR_DEVELOPERS)[page])
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


# --- the way through the code ---------------------------------------------------------------------


def section(page: str, start: str, stop: str) -> str:
    """Returns the part of a page between two texts that it has."""
    text = FOR_DEVELOPERS[page].partition(start)[2]
    assert text
    found, end, _ = text.partition(stop)
    assert end
    return found


def is_defined(name: str) -> bool:
    """Returns whether `module:name` or `module:Class.name` is in the package, without imports."""
    module, _, path = name.partition(":")
    file = PACKAGE / f"{module.replace('.', '/')}.py"
    body: list[ast.stmt] = ast.parse(file.read_text()).body if file.exists() else []
    for part in path.split("."):
        found = [node for node in body if part in names_of(node)]
        body = list(getattr(found[0], "body", [])) if found else []
        if not found:
            return False
    return True


def names_of(node: ast.stmt) -> list[str]:
    """Returns the names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


@pytest.mark.parametrize("page", FOR_DEVELOPERS)
def test_what_the_pages_for_developers_name_is_there(page: str):
    """Who moves one of these changes the page with it."""
    named = re.findall(
        r"`([a-z_]+(?:\.[a-z_]+)*:[A-Za-z_]+(?:\.[A-Za-z_]+)?)`", FOR_DEVELOPERS[page]
    )
    assert len(named) > 30
    assert [name for name in named if not is_defined(name)] == []
    assert not is_defined("saving:saved")
    assert not is_defined("rank.rank_save:RankSave.joined")


def test_a_save_has_20_stops_and_a_load_12():
    for start, stop, count in (
        ("**One save in 20 stops**", "**One load", 20),
        ("**One load in 12 stops**", "## 2.", 12),
    ):
        stops = re.findall(r"^(\d+)\. `[a-z_.]+:", section("ray_dcp/DESIGN.md", start, stop), re.M)
        assert [int(number) for number in stops] == list(range(1, count + 1))


def test_the_twenty_words_are_twenty():
    words = section("ray_dcp/DESIGN.md", "**Twenty words.**", "**One save")
    assert len(set(re.findall(r"\*([a-z ]+)\*", words)) | {".metadata"}) >= 20


def test_what_to_change_for_20_changes_is_said():
    rows = section("CONTRIBUTING.md", "### What do I change for", "### What changes together")
    assert rows.count("\n| ") > 20
    assert len(re.findall(r"^\| [^|]+ \| .*`[a-z_.]+:\w+", rows, re.M)) >= 20


def test_the_table_of_modules_is_that_of_their_docstrings():
    script = DOCS / "make_modules.py"
    spec = importlib.util.spec_from_file_location("make_modules", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == module.PAGE.read_text(), "run: python docs/make_modules.py"
