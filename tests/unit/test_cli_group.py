"""The command group loads a command when it is called, and no other."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import ray_dcp
from ray_dcp.cli.main import COMMANDS, EXAMPLES, main
from tests.support import cli_story


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
