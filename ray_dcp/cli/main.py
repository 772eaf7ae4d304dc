"""The `ray-dcp` command: its sub-commands, loaded when they are called, and its exit codes.

0: fine. 1: the checkpoint is damaged. 2: the call is wrong, there is no checkpoint, the storage
refused, or the command was interrupted. Reading commands load neither torch nor ray.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Any

import click

import ray_dcp
from ray_dcp.errors import CheckpointError, DamagedCheckpointError, InvalidRequestError

# Name -> `module:attribute` of its click command, in the order of a look at a run; and its summary,
# as `--help` must not import what a command imports.
COMMANDS = {
    "ls": ("listing:ls", "List the checkpoints below a directory."),
    "show": ("showing:show", "Show what is in a checkpoint."),
    "diff": ("comparing:diff", "Tell which tensors differ between two checkpoints."),
    "verify": ("showing:verify", "Compare every stored byte with its checksums."),
    "reshard": ("comparing:reshard", "Tell what a load on other ranks would read."),
    "timeline": ("timeline:timeline", "Show what took how long on which rank when it was saved."),
    "export": ("moving:export", "Write a checkpoint as safetensors, torch.save or stock DCP."),
    "import": ("moving:import_", "Make a checkpoint of a file or folder of another program."),
    "cp": ("moving:cp", "Copy a checkpoint to another place."),
    "tag": ("changing:tag", "Give a step tags, or a note."),
    "rm": ("changing:rm", "Delete checkpoints."),
    "gc": ("changing:gc", "Delete what crashed saves left behind."),
    "du": ("listing:du", "Tell what takes how much space."),
    "doctor": ("doctor:doctor", "Look for what is wrong with a run or its storage."),
    "watch": ("listing:watch", "Tell what happens to a run, until Ctrl-C."),
    "metadata": ("changing:metadata", "Write the .metadata that a save left out, for stock DCP."),
    "demo": ("demo:demo", "Train, save, kill, resume on fewer and more ranks."),
    "devstore": ("devstore:devstore", "Run a local S3 server, for want of a cloud."),
}

DEBUG = "ray_dcp.debug"
"""Key in click's `meta`: show tracebacks."""


class Failure(click.ClickException):
    """Ends the command with one message, because the call is wrong or the storage refused."""

    exit_code = 2


class Damage(click.ClickException):
    """Ends the command with one message, because the checkpoint is damaged."""

    exit_code = 1


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is called.

    Each command takes `--debug`, also behind its arguments: a traceback then comes before the
    message of an error.

    Args:
        lazy: Name of each command, with `module:attribute` below `ray_dcp.cli`, and one
            line for `--help`.
    """

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names in their order, without importing anything."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns a command after importing its module; None for an unknown name."""
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        loaded = importlib.import_module(f"ray_dcp.cli.{module}")
        command: click.Command = getattr(loaded, attribute)
        if not any(parameter.name == "debug" for parameter in command.params):
            command.params.append(_debug_option())
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands from the summaries."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, told) for name, (_, told) in self._lazy.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; an error becomes one message and an exit code."""
        try:
            return super().invoke(ctx)
        except CheckpointError as error:
            _trace(ctx)
            ending = Damage if isinstance(error, DamagedCheckpointError) else Failure
            raise ending(_words(error)) from error
        except KeyboardInterrupt as error:
            _trace(ctx)
            raise Failure("interrupted; what was begun was taken back") from error
        except BrokenPipeError:
            raise  # who reads our output has seen enough: click ends quietly
        except click.Abort as error:
            raise Failure("nothing was done") from error
        except (click.ClickException, click.exceptions.Exit):
            raise
        except (OSError, MemoryError) as error:
            _trace(ctx)
            raise Failure(str(error) or type(error).__name__) from error
        except Exception as error:
            _trace(ctx)
            raise Failure(
                f"something that ray-dcp does not expect: {type(error).__name__}: {error}. Run it "
                f"again with --debug, and please report what it prints"
            ) from error


def _words(error: CheckpointError) -> str:
    """Returns an error for people: its message, and where it was if that is not said there.

    Careful: of a wrong call `key` is an argument's name in Python, which nobody typed here.
    """
    key = None if isinstance(error, InvalidRequestError) else error.key
    found = (("checkpoint", error.checkpoint_id), ("rank", error.rank), ("file", key))
    where = [
        f"{name} {value}"
        for name, value in found
        if value not in (None, "") and str(value) not in error.message
    ]
    text = f"{error.message} [{', '.join(where)}]" if where else error.message
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _debug_option() -> click.Option:
    def note(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value:
            ctx.find_root().meta[DEBUG] = True

    return click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        callback=note,
        help="Show a traceback before the message of an error.",
    )


def _trace(ctx: click.Context) -> None:
    if ctx.find_root().meta.get(DEBUG):
        traceback.print_exc(file=sys.stderr)


@click.group(cls=LazyGroup, lazy=COMMANDS)
@click.option("--debug", is_flag=True, help="Show a traceback before the message of an error.")
@click.version_option(ray_dcp.__version__, prog_name="ray-dcp")
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:
    """Look at checkpoints of PyTorch jobs, and move them: of ray_dcp, torch's DCP, safetensors.

    A checkpoint is named by its path or URL, or as RUN@STEP: run@latest, run@best, run@best:loss,
    run@500, run@TAG. Commands that read take --json, those that write take --dry-run.

    Exit status: 0 fine, 1 the checkpoint is damaged, 2 anything else.
    """
    if debug:
        ctx.meta[DEBUG] = True
