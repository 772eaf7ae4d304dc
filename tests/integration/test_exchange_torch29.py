"""Exchange with torch 2.9, the oldest that is supported and the only one of torch_xla.

Needs the environment of torch_xla that `python -m tests.support.xla_env` makes (2.4 GB): without it
this file is left out of a run, whose header says so.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import xla_check, xla_env
from tests.support.programs import exchange as exchange_program

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental:UserWarning",  # torch's word for complex32
)

Told = dict[str, str]
"""What failed or differed, by case."""


@pytest.fixture(scope="module")
def run29() -> Callable[..., list[Told]]:
    """Does jobs of `tests.support.programs.exchange` under torch 2.9."""

    def run(*jobs: tuple[str, str, Path]) -> list[Told]:
        words = [str(word) for job in jobs for word in job]
        process = subprocess.run(
            [str(xla_env.chosen()), "-m", "tests.support.programs.exchange", *words],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert process.returncode == 0, process.stderr
        *told, about = map(json.loads, process.stdout.splitlines())
        assert about["torch"].startswith("2.9.")
        assert not about["ray"], "saves and loads of one process imported ray"
        return told

    return run


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory, run29: Callable[..., list[Told]]
) -> tuple[Path, Told]:
    """Checkpoints of both torches and libraries, and what stock DCP of torch 2.9 can't do.

    That is said by stock DCP itself: what it could not save, or not load of what it saved.
    """
    root = tmp_path_factory.mktemp("exchange")
    for name in ("stock", "ours"):
        assert exchange_program.do(name, "save", str(root / name / "here")) == {}
    not_saved, failed, not_loaded = run29(
        ("stock", "save", root / "stock" / "29"),
        ("ours", "save", root / "ours" / "29"),
        ("stock", "load", root / "stock" / "29"),
    )
    assert failed == {}
    return root, not_saved | not_loaded


def test_stock_of_torch_29_can_exchange_nearly_all(saved):
    _, unable = saved
    assert set(unable) <= {"dtype-float4_e2m1fn_x2"}
    assert all("NotImplementedError" in why for why in unable.values())


def test_torch_29_loads_what_this_torch_saved(saved, run29):
    root, unable = saved
    by_stock, by_ours, ours_of_stock = run29(
        ("stock", "load", root / "ours" / "here"),
        ("ours", "load", root / "ours" / "here"),
        ("ours", "load", root / "stock" / "here"),
    )
    assert {name: why for name, why in by_stock.items() if name not in unable} == {}
    assert by_ours == {}
    assert ours_of_stock == {}


@pytest.mark.parametrize("reader", ["ours", "stock"])
@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_this_torch_loads_what_torch_29_saved(saved, reader, writer):
    root, _ = saved
    assert exchange_program.do(reader, "load", str(root / writer / "29")) == {}


def test_torch_29_loads_what_ray_dcp_saved_there(saved, run29):
    root, unable = saved
    by_stock, by_ours = run29(
        ("stock", "load", root / "ours" / "29"), ("ours", "load", root / "ours" / "29")
    )
    assert {name: why for name, why in by_stock.items() if name not in unable} == {}
    assert by_ours == {}


def test_shards_that_torch_xla_brought_to_the_cpu_are_saved_as_tensors_and_loaded():
    ended = xla_check.start(
        xla_env.chosen(), "check_cpu_shards", capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stderr
    assert "1 passed, 0 failed" in ended.stdout
