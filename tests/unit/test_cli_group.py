"""The command group loads a command when it is called, and no other."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

import ray_dcp
from ray_dcp.cli.main import COMMANDS, LazyGroup, main
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidRequestError,
    StorageError,
)


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


def test_every_command_exists_no_other_does_and_the_version_is_told():
    for name in COMMANDS:
        assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0
    found = CliRunner().invoke(main, ["nope"])
    assert (found.exit_code, "No such command 'nope'" in found.output) == (2, True)
    found = CliRunner().invoke(main, ["--version"])
    assert (found.exit_code, found.output) == (0, f"ray-dcp, version {ray_dcp.__version__}\n")


@pytest.mark.parametrize(
    ("error", "exit_code", "where"),
    [
        (DamagedCheckpointError("expected a, found b", key="x.json"), 1, " [file x.json]"),
        (CheckpointNotFoundError("expected a checkpoint"), 2, ""),
        (CheckpointNotFoundError("nothing in /run", checkpoint_id="/run", key=""), 2, ""),
        (StorageError("permission denied", checkpoint_id="/run", key="a.json", rank=3), 2,
         " [checkpoint /run, rank 3, file a.json]"),
        (InvalidRequestError("a layout is written as 8", key="to"), 2, ""),
    ],
)  # fmt: skip
def test_an_error_of_ours_is_one_message_and_an_exit_code(
    error: CheckpointError, exit_code: int, where: str
):
    """What the message says already is not repeated behind it."""
    group = LazyGroup(name="g", lazy={})

    def fail() -> None:
        raise error

    group.add_command(click.Command("fail", callback=fail))
    group.get_command = lambda ctx, name: group.commands[name]
    found = CliRunner().invoke(group, ["fail"])
    assert (found.exit_code, found.stderr) == (exit_code, f"Error: {error.message}{where}\n")
