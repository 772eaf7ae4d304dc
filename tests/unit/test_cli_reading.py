"""`ls`, `show` and `verify` tell people and programs what is stored."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result

import ray_dcp
from ray_dcp.cli.main import main
from ray_dcp.cli.output import table
from tests.support import checkpoints


def invoke(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": None}).invoke(main, [str(one) for one in arguments])


def output_of(*arguments: object) -> str:
    found = invoke(*arguments)
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture
def run(saved_checkpoint: Path, stock_checkpoint: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved_checkpoint, tmp_path / "step-10")
    shutil.copytree(stock_checkpoint, tmp_path / "step-20")
    return tmp_path


def test_ls_says_why_a_checkpoint_is_damaged_and_of_nothing_that_it_is_nothing(run: Path):
    file = checkpoints.data_file(run / "step-10")
    file.unlink()
    output = output_of("ls", run)
    assert "damaged" in output
    assert f"step-10: {file.name} is missing" in output
    (run / "none").mkdir()
    assert output_of("ls", run / "none") == f"no checkpoints at or below {run / 'none'}\n"
    assert json.loads(output_of("ls", run / "none", "--json")) == []


def test_show_filters_by_pattern_and_a_tree_counts_tensors_and_objects(saved_checkpoint: Path):
    lines = output_of("show", saved_checkpoint, "--tensor", "model.[hl]*").splitlines()
    assert {line.split()[0] for line in lines[3:5]} == {"model.half", "model.large"}
    assert lines[5] == "2 of 10 names match 'model.[hl]*'"
    lines = output_of("show", saved_checkpoint, "--tensor", "nope").splitlines()
    assert lines[2:] == ["0 of 10 names match 'nope'"]
    hint = output_of("show", saved_checkpoint, "--tensor", "model.hafl")
    assert "match 'model.hafl'; did you mean 'model.half'" in hint
    lines = output_of("show", saved_checkpoint, "--tree").splitlines()
    assert lines[2].startswith("├── model: 7 tensors, ")
    assert lines[-3:-1] == ["└── note[x]: 2 objects", "    ├── text: 'hello'"]


def test_a_long_name_is_not_cut_when_the_output_is_piped(tmp_path: Path):
    name = "x" * 300
    ray_dcp.save({name: torch.ones(1)}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert name in output_of("show", tmp_path / "c")


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_wrong_use_or_a_place_without_checkpoint_exits_with_2(command: str, tmp_path: Path):
    for arguments in ([], ["/tmp", "--nope"], ["ftp://host/run"], [tmp_path / "none"]):
        found = invoke(command, *arguments)
        assert (found.exit_code, found.stdout) == (2, "")
        assert "Traceback" not in found.stderr
        assert len(arguments) != 1 or str(arguments[0]) in found.stderr


def test_a_table_on_a_terminal_has_colours_and_no_control_characters_of_names(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    head, row = table(
        [{"name": "a\x1b[2Jb", "state": "damaged", "size": "1 KiB"}],
        left=("name", "state"),
        style=lambda column, cell: "red" if column == "state" else "",
    )
    assert click.unstyle(head) == "NAME    STATE     SIZE"
    assert row == "a\ufffd[2Jb  \x1b[31mdamaged\x1b[0m  1 KiB"


@pytest.mark.parametrize("columns", [30, 40, 60])
def test_a_table_is_never_wider_than_the_screen(monkeypatch: pytest.MonkeyPatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [{"name": "model.layers.17.attention.weight", "a": "x" * 12, "b": "y" * 12, "c": ""}]
    lines = [click.unstyle(line) for line in table(rows, left=("name",), least=("a",))]
    assert max(map(len, lines)) <= columns
    assert "B" in lines[0].split()
    assert "C" not in lines[0].split()
    assert ("A" in lines[0].split()) == (columns == 60)
    assert lines[1].startswith("model")
    monkeypatch.delenv("COLUMNS")
    assert "x" * 12 in table(rows, left=("name",), least=("a",))[1]
