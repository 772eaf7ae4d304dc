"""`--json` prints what `ray_dcp/cli/schema.json` says, for each command, and errors too."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from click.testing import CliRunner

import ray_dcp
from ray_dcp.cli.main import COMMANDS, main
from tests.support import checkpoints, cli_story

SCHEMA = json.loads(files("ray_dcp.cli").joinpath("schema.json").read_text())

RUN_ELSEWHERE = {"demo"}
"""Commands that start a Ray."""


def printed(*arguments: object, exit_code: int = 0) -> Any:
    """Returns what a command prints after checking its form."""
    words = [*map(str, arguments), "--json"]
    found = CliRunner().invoke(main, words)
    assert (found.exit_code, found.stderr) == (exit_code, ""), (words, found.output)
    kind = "error" if exit_code == 2 else words[0]
    texts = found.stdout.splitlines() if words[0] == "watch" else [found.stdout]
    for value in map(json.loads, texts):
        jsonschema.validate(value, {"$defs": SCHEMA["$defs"], "$ref": f"#/$defs/{kind}"})
    return json.loads(texts[-1])


def test_each_command_prints_what_the_schema_says(tmp_path: Path):
    run = tmp_path / "run"
    cli_story.make_ours(run)
    shutil.copytree(checkpoints.save_stock(tmp_path / "stock"), run / "stock-7")
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    a, b = f"{run}@100", f"{run}@200"
    todo = [
        ["ls", run], ["ls", run, "--brief"], ["show", b], ["show", run / "stock-7"], ["show", run],
        ["diff", a, b, "--values"], ["verify", b], ["verify", run], ["reshard", b, "--to", "4"],
        ["timeline", b], ["report", run, tmp_path / "r.html"], ["du", run], ["doctor", run],
        ["watch", run, "--looks", 1], ["tag", a], ["tag", a, "kept", "--note", "x"],
        ["export", b, tmp_path / "b.safetensors"], ["import", tmp_path / "w.pt", tmp_path / "w"],
        ["import", tmp_path / "w.pt", tmp_path / "x", "--dry-run"],
        ["cp", b, tmp_path / "copy", "--verify"], ["cp", b, tmp_path / "c", "--dry-run"],
        ["average", a, b, "-o", tmp_path / "mean"], ["show", tmp_path / "mean"],
        ["average", run, "--last", 2, "-o", tmp_path / "m", "--dry-run"],
        ["metadata", b], ["gc", run, "--dry-run"], ["gc", run, "--abort-unfinished", "--yes"],
        ["rm", b, "--dry-run"], ["rm", b, "--yes"],
    ]  # fmt: skip
    assert (
        {str(words[0]) for words in todo} | RUN_ELSEWHERE
        == set(COMMANDS)
        == set(SCHEMA["$defs"]) - {"error"}
    )
    for words in todo:
        printed(*words)
    checkpoints.data_file(run / "step-00000100").unlink()
    assert printed("verify", a, exit_code=1)["problems"]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["show", "nothing"], "CheckpointNotFoundError"),
        (["ls"], "MissingParameter"),
        (["ls", ".", "--nope"], "NoSuchOption"),
        (["show", ".", "--depth", "0"], "BadParameter"),
    ],
)
def test_errors_are_json_too(words: list[str], kind: str, tmp_path: Path):
    assert printed(*words, exit_code=2)["error"]["type"] in kind.split()
    plain = CliRunner().invoke(main, words)
    assert (plain.exit_code, plain.stdout) == (2, "")
    assert len(plain.stderr.splitlines()) == 1


def test_show_tells_small_values_as_python_writes_them(tmp_path: Path):
    state = {"lr": 3e-4, "name": "a\nb", "pair": (1, 2), "none": None, "big": "x" * 10_000,
             "dtype": torch.float32}  # fmt: skip
    ray_dcp.save(state, checkpoint_id=tmp_path / "c")
    assert printed("show", tmp_path / "c")["objects"] == {
        "lr": "0.0003", "name": "'a\\nb'", "pair": "(1, 2)", "none": "None", "big": None,
        "dtype": None,
    }  # fmt: skip
