"""The command group loads a command when it is called, and no other."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import torch
from click.testing import CliRunner

import ray_dcp
from ray_dcp.cli import listing
from ray_dcp.cli.main import COMMANDS, EXAMPLES, main
from ray_dcp.format.save_trace import RankTimes, Span, encode_trace, make_trace, trace_key
from ray_dcp.format.step_info import StepInfo, encode_info, info_key
from tests.support import big_views, checkpoints, cli_story


def test_help_lists_every_command_without_loading_any():
    program = (
        "import sys\n"
        "from ray_dcp.cli.main import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print([m for m in sys.modules if m.startswith('ray_dcp.cli.')])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=400, check=True
    )
    assert all(name in found.stdout for name in COMMANDS)
    assert found.stdout.splitlines()[-1] == "['ray_dcp.cli.main']"


def test_every_help_ends_with_two_examples_and_other_names_are_no_command():
    assert set(EXAMPLES) == set(COMMANDS)
    for name in COMMANDS:
        told = CliRunner().invoke(main, [name, "-h"])
        assert told.exit_code == 0
        lines = told.output.rstrip().splitlines()
        assert lines[-3] == "  Examples:"
        assert [line.split()[:2] for line in lines[-2:]] == [["ray-dcp", name]] * 2
    found = CliRunner().invoke(main, ["nope"])
    assert (found.exit_code, "No such command 'nope'" in found.output) == (2, True)
    found = CliRunner().invoke(main, ["--version"])
    assert (found.exit_code, found.output) == (0, f"ray-dcp, version {ray_dcp.__version__}\n")


def test_the_examples_of_the_help_run_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cli_story.make_ours(tmp_path / "run")
    ray_dcp.open_run(tmp_path / "run").tag(100, "before-lr-drop", remove=True)
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    monkeypatch.chdir(tmp_path)
    for name in [*(name for name in COMMANDS if name not in ("rm", "gc")), "gc", "rm"]:
        for words in EXAMPLES[name]:
            if name == "watch" and "--looks" not in words:
                words += " --looks 1"
            if "s3:" in words or name == "demo":  # elsewhere: only whether it can be parsed
                command = main.get_command(click.Context(main), name)
                assert command is not None
                command.make_context(name, shlex.split(words), parent=click.Context(main))
                continue
            found = CliRunner().invoke(main, [name, *shlex.split(words)])
            assert found.exit_code == 0, (name, words, found.output)


@pytest.mark.parametrize(
    ("words", "module"),
    [(["ls", "run"], "click"), (["export", "run@200", "out"], "ray_dcp.cli.places")],
)
def test_ctrl_c_while_a_command_starts_is_130_without_a_traceback(
    words: list[str], module: str, tmp_path: Path
):
    """It arrives while the modules of the command are imported, which takes most of its time."""
    code = f"""
import builtins, os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
real = builtins.__import__
def importing(name, *arguments, **more):
    if name == {module!r} and sys.modules.get(name) is None:
        builtins.__import__ = real
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *arguments, **more)
builtins.__import__ = importing
sys.argv = ["ray-dcp", *{words!r}]
runpy.run_module("ray_dcp", run_name="__main__")
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=400
    )
    assert found.returncode == 130
    assert found.stdout == ""
    early = module == "click"
    assert found.stderr == ("" if early else "Error: interrupted; what was begun was taken back\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "completes"),
    [
        ("ver", "plain,verify"),
        ("show --te", "plain,--tensor"),
        ("cp run@latest co", "file,co"),
    ],
)
def test_a_shell_completes_commands_options_and_paths(typed: str, completes: str):
    words = f"ray-dcp {typed}"
    env = {"COMP_WORDS": words, "COMP_CWORD": str(typed.count(" ") + 1)}
    found = CliRunner().invoke(
        main, [], prog_name="ray-dcp", env={**env, "_RAY_DCP_COMPLETE": "bash_complete"}
    )
    assert found.output.splitlines() == [completes]


# --- --json ---------------------------------------------------------------------------------------

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


# --- golden files ---------------------------------------------------------------------------------

LONG_NAMES = [
    "loss", "validation/perplexity_on_held_out_set", "validation/accuracy_on_held_out_set",
    "train/gradient_norm_before_clipping", "train/tokens_per_second_per_gpu",
]  # fmt: skip

MAKERS = {
    "ours": cli_story.make_ours,
    "stock": cli_story.make_stock,
    "safetensors": cli_story.make_safetensors,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_verb_prints_what_it_did(kind: str, tmp_path: Path):
    run, work = tmp_path / "run", tmp_path / "work"
    run.mkdir()
    work.mkdir()
    MAKERS[kind](run)
    ours = kind == "ours"
    names = [f"step-{step:08d}" if ours else f"step-{step}" for step in (100, 200)]
    todo = cli_story.commands(str(run), work, names, ours=ours)
    found = cli_story.tell(todo, {str(run): "RUN", str(work): "WORK", str(tmp_path): "TMP"})
    cli_story.compare(kind, found, renew="RENEW_GOLDEN" in os.environ)


@pytest.mark.parametrize("columns", [30, 80, 120])
def test_tables_fit_the_screen(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of checkpoints that are given: no two saves take as long. See tests/golden/README.md."""
    for step, changed in ((7, 0), (8, 3)):
        attempt = f"{step:016x}"
        table = big_views.table(64, 4, attempt, changed=changed, files=4)
        for run in ("run", "wide"):
            path = big_views.checkpoint(tmp_path / run / f"step-{step}", table, attempt)
        info = StepInfo(step=step, created_s=1e9, metrics=dict.fromkeys(LONG_NAMES, float(step)))
        (path / info_key(0)).write_bytes(encode_info(info))
        path = tmp_path / "run" / f"step-{step}"
        times = {
            "capture": RankTimes.of(range(4), [0.0] * 4, [0.1] * 4),
            "write": RankTimes.of(range(4), [0.2] * 4, [0.8, 0.8, 0.8, 1.9], [3 << 20] * 4),
        }
        record = [Span("record", None, 1.9, 2.0)]
        trace = make_trace(attempt, "save", 4, 1e9, 2.0, record, times)
        (path / trace_key(attempt)).write_bytes(encode_trace(trace))
    monkeypatch.setattr(listing.time, "time", lambda: 1e9 + 7200)
    run = f"{tmp_path}/run"
    others = [
        ["ls", tmp_path], ["show", run], ["show", tmp_path],
        ["show", f"{run}@8"], ["show", f"{run}@8", "--tensor", "*.0.*"],
        ["diff", f"{run}@7", f"{run}@8"],
        ["reshard", f"{run}@8", "--to", "2"], ["timeline", f"{run}@8"], ["du", run],
        ["watch", run, "--looks", "1"], ["tag", f"{run}@8"], ["rm", f"{run}@7", "--dry-run"],
        ["gc", run, "--dry-run"], ["metadata", f"{run}@8", "--dry-run"],
        ["average", run, "--last", "2", "-o", f"{tmp_path}/mean", "--dry-run"],
    ]  # fmt: skip
    screens = on_screen(columns, tmp_path, [["ls", run], *(others if columns > 30 else [])])
    assert "[exit status" not in screens
    assert max(len(line) for line in screens.splitlines()) <= columns
    cli_story.compare(f"screens-{columns}", screens, renew="RENEW_GOLDEN" in os.environ)


@pytest.mark.parametrize("columns", [80, 120])
def test_plain_lines_are_whole_whatever_the_screen(columns: int, tmp_path: Path):
    """What `verify`, `export` and `cp` print where their output is piped: one line a fact."""
    for step in (7, 8):
        state = {"model": {"w": torch.arange(3000.0), "b": torch.ones(5)}, "step": step}
        ray_dcp.save(state, checkpoint_id=tmp_path / "run" / f"step-{step}", no_dist=True)
    file, first, _ = checkpoints.payload_of(tmp_path / "run" / "step-8", "model.w")
    checkpoints.flip(file, first + 5000)
    run = f"{tmp_path}/run"
    told = on_screen(columns, tmp_path, [
        ["verify", f"{run}@7"], ["verify", f"{run}@8"], ["verify", run], ["verify", f"{run}@9"],
        ["export", f"{run}@7", f"{tmp_path}/w.safetensors", "--dry-run"],
        ["export", f"{run}@7", f"{tmp_path}/w.safetensors", "--tensor", "*.b", "--dtype", "bf16"],
        ["export", f"{run}@8", f"{tmp_path}/hub", "--format", "hf"],
        ["cp", f"{run}@7", f"{tmp_path}/copy", "--dry-run"],
        ["cp", f"{run}@7", f"{tmp_path}/copy", "--verify"], ["cp", f"{run}@7", f"{tmp_path}/copy"],
        ["cp", run, f"{tmp_path}/runs", "--verify"], ["cp", run, f"{tmp_path}/runs"],
    ])  # fmt: skip
    told = cli_story.normal(told, loose=False)
    told = re.sub(r"(?<=, )[\d.]+ (B|KiB)(?=, to|\n)", "SIZE", told)  # of copies, with tables
    cli_story.compare("plain", told, renew="RENEW_GOLDEN" in os.environ)


def on_screen(columns: int, root: Path, commands: list[list[object]]) -> str:
    """Returns what commands print on a screen of so many columns."""
    told = []
    for command in commands:
        words = [str(word) for word in command]
        found = CliRunner().invoke(main, words, env={"COLUMNS": str(columns)})
        status = f"[exit status {found.exit_code}]\n" if found.exit_code else ""
        told.append(f"$ ray-dcp {' '.join(words)}\n{found.output}{status}")
    return "\n".join(told).replace(str(root), "TMP")
