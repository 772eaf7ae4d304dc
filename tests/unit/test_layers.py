"""The house rules of DESIGN.md, section 6: imports, heavy things, and which tests run."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import ray_dcp
from tests.conftest import LONGEST
from tests.support import cli_story, newest_torch

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "ray_dcp"

# From below, as in DESIGN.md.
LAYERS = {
    name: layer
    for layer, names in enumerate(
        (
            "errors",
            "options events core",
            "planning format store commit_protocol",
            "torch_adapter io view",
            "place",
            "coordinator rank session stage testing",
            "saving asynchronous loading data job manager transform worker_group",
            "__init__ dcp xla",
            "cli integrations train __main__",
        )
    )
    for name in names.split()
}

# Distribution -> modules that may import it, and modules of those that may not.
HOMES = {
    "ray": (
        {
            "coordinator.actor",
            "coordinator.gatherer",
            "coordinator.metrics",
            "integrations",
            "job.coordinator",
            "job.part_value",
            "job.value",
            "session.ray_calls",
            "session.ray_actors",
            "session.ray_cluster",
            "session.ray_transport",
            "session.shared_reads",
            "session.discovery",
            "session.own_folders",
            "stage.link",
            "stage.memory_tier",
            "stage.stager",
            "worker_group",
        },
        set(),
    ),
    "torch": (
        {
            "torch_adapter",
            "coordinator",
            "rank",
            "session",
            "dcp",
            "xla",
            "integrations",
            "cli.demo",
        }
        | {name for name, layer in LAYERS.items() if layer == 6} - {"transform"}
        | {"transform.averaging", "transform.conversion", "stage.staging_backend"},
        set(),
    ),
    "matplotlib": (set(), set()),
    "click": ({"cli"}, set()),
    "xxhash": ({"core"}, set()),
    "fsspec": ({"store"}, set()),
    "obstore": ({"store"}, set()),
    "boto3": (set(), set()),
    "botocore": ({"store.credentials"}, set()),
    "google": ({"store.credentials"}, set()),
    "azure": ({"store.credentials"}, set()),
    "pyarrow": ({"core", "format", "store", "view.run_view"}, set()),
    "pandas": ({"view.run_view"}, set()),
}

# Modules outside torch's homes that import it inside a call which returns or compares tensors.
TORCH_INSIDE_CALLS = {"view.tensor_handle", "averaging"}

# Modules below the entry points that read the environment, each with its reason.
ENVIRONMENT_READERS = {
    "store.filesystems": "whether it is as it was when a filesystem was made",
    "store.credentials": "keys that obstore takes from there, and the clouds' files",
    "store.object_endpoint": "an endpoint that obstore takes from there",
    "session.discovery": "which process of torchrun this is",
    "session.meeting": "which ranks its launcher has started beside it",
    "session.connection": "RAY_ADDRESS",
    "manager.allocation_end": "SLURM_JOB_END_TIME, which rank 0 alone reads",
    "view.progress": "TERM, as a bar needs a terminal that erases lines",
    "store.environment": "what storages read there, for the stager that writes instead",
    "worker_group": "the interface that gloo uses, which it sets",
}


@dataclass(frozen=True)
class Import:
    """One imported module, by one statement of one module of the package."""

    importer: str
    imported: str
    line: int
    inside_call: bool
    for_types: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def name_of(path: Path) -> str:
    """Returns the dotted name below ray_dcp: `core.values`, `core`, `__init__`."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


@cache
def modules() -> dict[str, ast.Module]:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if not is_for_type_checkers(path)]
    return {name_of(path): ast.parse(path.read_text()) for path in files}


def is_for_type_checkers(path: Path) -> bool:
    """Returns whether a file stands for a submodule of DCP, and is never imported itself."""
    return path.parent == PACKAGE and path.stem in ray_dcp._MODULES


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for name, tree in modules().items() for found in imports_of(name, tree))


def imports_of(importer: str, tree: ast.AST) -> Iterator[Import]:
    def visit(node: ast.AST, inside_call: bool, for_types: bool) -> Iterator[Import]:
        for imported in imported_by(node):
            yield Import(importer, imported, node.lineno, inside_call, for_types)
        inside_call |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            typing_only = isinstance(node, ast.If) and is_type_checking(node) and child in node.body
            yield from visit(child, inside_call, for_types or typing_only)

    yield from visit(tree, False, False)


def imported_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        # Why both: `from ray_dcp import core` imports a module, as `from ray_dcp.core import X`.
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def is_type_checking(node: ast.If) -> bool:
    return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def package_of(name: str) -> str:
    """Returns the part that has a layer: `core` for `core.values`."""
    return name.split(".", maxsplit=1)[0]


def imported_package(found: Import) -> str | None:
    """Returns the layered part of an internal import; None for a foreign one."""
    first, _, rest = found.imported.partition(".")
    if first != "ray_dcp":
        return None
    part = package_of(rest)
    return part if part in LAYERS else "__init__"


def within(name: str, homes: set[str]) -> bool:
    return any(name == home or name.startswith(f"{home}.") for home in homes)


def test_every_module_has_a_layer():
    assert {package_of(name) for name in modules()} <= set(LAYERS)


def places_of(is_one: Callable[[ast.AST], object]) -> list[str]:
    """Returns module and line of each such node of the package."""
    return [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if is_one(node)
    ]


def test_every_import_is_absolute():
    assert places_of(lambda node: isinstance(node, ast.ImportFrom) and node.level) == []


def test_imports_only_go_down():
    upward = [
        str(found)
        for found in imports()
        if (target := imported_package(found)) is not None
        and LAYERS[target] > LAYERS[package_of(found.importer)]
    ]
    assert upward == []


def imported_module(found: Import) -> str | None:
    """Returns the module of ours that an import loads: `core.values` for a class of it."""
    first, _, name = found.imported.partition(".")
    if first != "ray_dcp":
        return None
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or "__init__"


def test_modules_do_not_import_each_other_in_a_circle():
    """Imports inside functions and for types count as well: they only hide who needs whom."""
    needs: dict[str, set[str]] = {name: set() for name in modules()}
    for found in imports():
        target = imported_module(found)
        if target not in (None, found.importer):
            needs[found.importer].add(target)
    while in_no_circle := needs.keys() - set().union(*needs.values()) | {
        name for name, others in needs.items() if not others
    }:
        needs = {
            name: others - in_no_circle
            for name, others in needs.items()
            if name not in in_no_circle
        }
    assert needs == {}


@pytest.mark.parametrize("distribution", HOMES)
def test_a_heavy_dependency_is_imported_only_at_its_home(distribution: str):
    homes, not_there = HOMES[distribution]
    # Why not for types: the facade names torch's types, and loads them on first use.
    strays = [
        str(found)
        for found in imports()
        if found.imported.split(".")[0] == distribution
        and not found.for_types
        and (not within(found.importer, homes) or within(found.importer, not_there))
        and not (
            distribution == "torch"
            and found.inside_call
            and within(found.importer, TORCH_INSIDE_CALLS)
        )
    ]
    assert strays == []


def test_modules_that_load_without_torch_import_no_torch_module_of_ours_at_once():
    need_torch = HOMES["torch"][0]
    torch_free = {"cli", *(name for name, layer in LAYERS.items() if 1 <= layer <= 3)} - need_torch
    loading = [
        str(found)
        for found in imports()
        if package_of(found.importer) in torch_free
        and not within(found.importer, need_torch)
        and not (found.inside_call or found.for_types)
        and imported_package(found) in need_torch
    ]
    assert loading == []


def test_no_assert_checks_anything_in_the_package():
    assert places_of(lambda node: isinstance(node, ast.Assert)) == []


def test_only_one_module_makes_those_calls_of_ray_that_would_start_one():
    calls = {f"ray.{name}" for name in ("get", "get_actor", "kill", "nodes", "put", "wait")}
    found = places_of(lambda node: isinstance(node, ast.Attribute) and ast.unparse(node) in calls)
    assert {place.split(":")[0] for place in found} == {"session.ray_calls"}, found


def test_no_module_of_ours_takes_the_name_of_a_dcp_submodule():
    spec = importlib.util.find_spec("torch")  # Finds it without importing it.
    assert spec is not None
    assert spec.origin is not None
    stock = Path(spec.origin).parent / "distributed" / "checkpoint"
    submodules = {path.stem for path in stock.glob("*.py")} - {"__init__"}
    assert {"api", "staging", "storage"} <= submodules
    paths = [path for path in PACKAGE.iterdir() if not is_for_type_checkers(path)]
    ours = {path.stem for path in paths if path.suffix == ".py" or path.is_dir()}
    assert ours & submodules == set()


def test_the_environment_is_read_only_by_the_entrypoints_and_listed_modules():
    readers = {
        name
        for name, tree in modules().items()
        if LAYERS[package_of(name)] <= LAYERS["saving"]
        for node in ast.walk(tree)
        if reads_environment(node)
    }
    assert readers == set(ENVIRONMENT_READERS)


def reads_environment(node: ast.AST) -> bool:
    names = ("environ", "environb", "getenv")
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in names for alias in node.names)
    return isinstance(node, ast.Attribute) and ast.unparse(node) in {f"os.{n}" for n in names}


def loaded_by(program: str, *arguments: str, how: Sequence[str] = ()) -> set[str]:
    """Returns which of ray, torch and pandas a fresh interpreter has loaded after a program."""
    report = (
        "import json, sys\n"
        "print(json.dumps([m for m in ('ray', 'torch', 'pandas') if m in sys.modules]))"
    )
    finished = subprocess.run(
        [sys.executable, *how, "-c", f"{program}\n{report}", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return set(json.loads(finished.stdout.splitlines()[-1]))


def test_importing_the_package_loads_neither_ray_nor_torch():
    assert loaded_by("import ray_dcp; ray_dcp.SaveOptions; ray_dcp.CheckpointError") == set()


ALONE = """
import sys, torch, ray_dcp, ray_dcp.asynchronous, ray_dcp.loading
with ray_dcp.CheckpointManager(sys.argv[1], 1) as manager:
    manager.save(1, {"w": torch.ones(1)})
ray_dcp.async_save({"w": torch.ones(1)}, checkpoint_id=sys.argv[1] + "-2").result()
assert "ray" not in sys.modules
import ray_dcp.dcp
for home in (ray_dcp, ray_dcp.dcp):
    for name in {*home.__all__, *dir(home)} - {"train", "__cached__"}:
        getattr(home, name)
place, state = sys.argv[1] + "-3", {"w": torch.ones(3)}
ray_dcp.save(state, storage_writer=ray_dcp.FsspecWriter(place), no_dist=True)
ray_dcp.load(state, storage_reader=ray_dcp.FsspecReader(place), no_dist=True)
"""


def test_a_process_alone_loads_no_ray_and_asks_torch_for_nothing_deprecated(tmp_path: Path):
    how = ["-W", "error::DeprecationWarning", "-W", "error::FutureWarning"]
    loaded_by(ALONE, str(tmp_path / "c"), how=how)


def test_the_commands_load_neither_ray_nor_torch_nor_pandas(saved_checkpoint: Path, tmp_path: Path):
    """All in one process: what one loads the next would find."""
    path, run = str(saved_checkpoint), str(saved_checkpoint.parent)
    managed = str(tmp_path / "managed")  # has leases, tags and recorded metrics
    cli_story.make_ours(managed)
    ray_dcp.record_metrics(managed, 200, {"accuracy": 0.5})
    commands = [
        ["ls", path], ["show", path], ["verify", path], ["diff", path, path],
        ["reshard", path, "--to", "4"], ["du", run], ["doctor", run], ["timeline", path],
        ["watch", run, "--looks", "1"], ["cp", path, str(tmp_path / "copy")],
        ["tag", f"{run}@10"], ["gc", run, "--dry-run"], ["rm", str(tmp_path / "copy"), "--yes"],
        ["export", path, str(tmp_path / "w.pt"), "--format", "torch", "--dry-run"],
        ["cp", f"{managed}@100", str(tmp_path / "step")], ["cp", managed, str(tmp_path / "run")],
        ["average", managed, "--last", "2", "-o", str(tmp_path / "mean"), "--dry-run"],
        ["rm", f"{managed}@100", "--yes", "--force"], ["report", managed, str(tmp_path / "r.html")],
    ]  # fmt: skip
    program = (
        "import json, sys\nfrom ray_dcp.cli.main import main\n"
        "for command in json.loads(sys.argv[1]):\n    main(command, standalone_mode=False)\n"
    )
    assert loaded_by(program, json.dumps(commands)) == set()


# --- which tests run ------------------------------------------------------------------------------


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


def test_the_tests_that_are_named_elsewhere_are_there():
    assert set(LONGEST) <= {path.stem for path in TESTS.rglob("test_*.py")}
    by_hand = {word for words in newest_torch.STEPS.values() for word in words if "/" in word}
    assert by_hand
    assert [word for word in by_hand if not (REPOSITORY / word).exists()] == []
