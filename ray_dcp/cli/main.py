"""The `ray-dcp` command: its sub-commands, loaded when they are called, and its exit codes.

0: fine. 1: the checkpoint is damaged. 2: the call is wrong, there is no checkpoint, or the
storage refused. Reading commands load neither torch nor ray.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

import ray_dcp
from ray_dcp.errors import CheckpointError, DamagedCheckpointError

__all__ = ["LazyGroup", "main"]

# Name -> `module:attribute` of its click command, in the order of a look at a run.
COMMANDS = {
    "ls": "ray_dcp.cli.reading:ls",
    "show": "ray_dcp.cli.reading:show",
    "verify": "ray_dcp.cli.reading:verify",
    "timeline": "ray_dcp.cli.timeline:timeline",
    "devstore": "ray_dcp.cli.devstore:devstore",
    "metadata": "ray_dcp.cli.writing:metadata",
    "demo": "ray_dcp.cli.demo:demo",
}

# Why here: `--help` must not import what a command imports.
SUMMARIES = {
    "ls": "List the checkpoints below a directory.",
    "show": "Show what is in a checkpoint.",
    "verify": "Compare every stored byte with its checksums.",
    "timeline": "Show what took how long on which rank when it was saved.",
    "devstore": "Run a local S3 server, for want of a cloud.",
    "metadata": "Write the .metadata that a save left out, for stock DCP.",
    "demo": "Train, save, kill, resume on fewer and more ranks.",
}


class Failure(click.ClickException):
    """Ends the command with one message, because the call is wrong or the storage refused."""

    exit_code = 2


class Damage(click.ClickException):
    """Ends the command with one message, because the checkpoint is damaged."""

    exit_code = 1


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is called.

    Args:
        commands_at: Name of each command and `module:attribute` where it is.
        summaries: One line for each, for `--help`.
    """

    def __init__(
        self, *args: Any, commands_at: dict[str, str], summaries: dict[str, str], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._commands_at = commands_at
        self._summaries = summaries

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names in their order, without importing anything."""
        return list(self._commands_at)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns a command after importing its module; None for an unknown name."""
        place = self._commands_at.get(cmd_name)
        if place is None:
            return None
        module, _, attribute = place.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands from the summaries."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._summaries[name]) for name in self._commands_at])

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; an error of ours becomes one message and an exit code."""
        try:
            return super().invoke(ctx)
        except CheckpointError as error:
            ending = Damage if isinstance(error, DamagedCheckpointError) else Failure
            raise ending(str(error)) from error


@click.group(cls=LazyGroup, commands_at=COMMANDS, summaries=SUMMARIES)
@click.version_option(ray_dcp.__version__, prog_name="ray-dcp")
def main() -> None:
    """Look at checkpoints of PyTorch jobs: written by ray_dcp or by torch's DCP.

    Exit status: 0 fine, 1 the checkpoint is damaged, 2 anything else.
    """
