"""The `ray-dcp` command: its sub-commands, loaded when they are called, and its exit codes.

0: fine. 1: the checkpoint is damaged. 2: the call is wrong, there is no checkpoint, the storage
refused, or the command was interrupted. Reading commands load neither torch nor ray.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from typing import IO, Any

import click

import ray_dcp
from ray_dcp.errors import CheckpointError, DamagedCheckpointError, InvalidRequestError

# Name -> `module:attribute` of its click command, and its summary, as `--help` must not import what
# a command imports.
COMMANDS = {
    "ls": ("listing:ls", "List the checkpoints below a directory."),
    "show": ("showing:show", "Show what is in a checkpoint."),
    "diff": ("comparing:diff", "List the tensors that differ between two checkpoints."),
    "verify": ("showing:verify", "Compare every stored byte with its checksums."),
    "reshard": ("comparing:reshard", "Show what a load on other ranks would read."),
    "timeline": ("timeline:timeline", "Show what took how long on which rank when it was saved."),
    "report": ("report:report", "Write one HTML file with pictures of a run."),
    "export": ("moving:export", "Write a checkpoint as safetensors, torch.save or stock DCP."),
    "import": ("moving:import_", "Make a checkpoint of a file or folder of another program."),
    "cp": ("moving:cp", "Copy a checkpoint, or a run, to another place."),
    "tag": ("changing:tag", "Give a step tags, or a note."),
    "rm": ("changing:rm", "Delete checkpoints."),
    "gc": ("changing:gc", "Delete what crashed saves left behind."),
    "du": ("listing:du", "Show what takes how much space."),
    "doctor": ("doctor:doctor", "Look for what is wrong with a run or its storage."),
    "watch": ("listing:watch", "Print what happens to a run, until Ctrl-C."),
    "metadata": ("changing:metadata", "Write the .metadata that a save left out, for stock DCP."),
    "demo": ("demo:demo", "Train, save, kill, resume on fewer and more ranks."),
    "devstore": ("devstore:devstore", "Run a local S3 server, to try things without a cloud."),
}

JSON, DEBUG, VERBOSE = (f"ray_dcp.{name}" for name in ("json", "debug", "verbose"))
"""Keys in click's `meta`: whether the options of every command were given."""
OPTIONS = {
    "--json": (JSON, "Print JSON, errors too."),
    "--verbose": (VERBOSE, "Also print ids of saves, and numbers of records."),
    "--debug": (DEBUG, "Show a traceback before the message of an error."),
}
"""Of every command, also behind its arguments: key in click's `meta`, and help."""


class Failure(click.ClickException):
    """Ends the command with one message.

    Args:
        message: One line for people.
        exit_code: 1 if a checkpoint is damaged, else 2.
        error: Its class, and where it was, for programs.
    """

    def __init__(self, message: str, exit_code: int = 2, **error: object) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]
        self._error = {"type": "Error", **error, "message": message, "exit_code": exit_code}
        self._as_json = click.get_current_context().meta.get(JSON)

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints the message to standard error, or with `--json` an object to standard output."""
        if self._as_json:
            click.echo(json.dumps({"error": self._error}, indent=2, default=str))
        else:
            click.echo(f"Error: {self.message}", err=True)


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is called.

    Args:
        lazy: Name of each command, with `module:attribute` below `ray_dcp.cli`, and one
            line for `--help`.
    """

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy
        self.params += _options()

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
            command.params += _options()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands from the summaries."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, told) for name, (_, told) in self._lazy.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Takes note of the options of every command, before anything of the call can be wrong."""
        given = args[: args.index("--")] if "--" in args else args
        ctx.meta.update({key: True for name, (key, _) in OPTIONS.items() if name in given})
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; an error becomes one message and an exit code."""
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, click.exceptions.Exit, Failure):
            raise  # who reads our output has seen enough: click ends quietly
        except (Exception, KeyboardInterrupt) as error:
            if ctx.meta.get(DEBUG):
                traceback.print_exc(file=sys.stderr)
            raise _failure(error) from error


def _failure(error: BaseException) -> Failure:
    told: dict[str, Any] = {"type": type(error).__name__}
    match error:
        case CheckpointError():
            # Careful: of a wrong call `key` is an argument's name, which nobody typed here.
            key = None if isinstance(error, InvalidRequestError) else error.key
            found = {"checkpoint": error.checkpoint_id, "rank": error.rank, "file": key}
            told |= {name: value for name, value in found.items() if value not in (None, "")}
            code = 1 if isinstance(error, DamagedCheckpointError) else 2
            where = [f"{n} {v}" for n, v in list(told.items())[1:] if str(v) not in error.message]
            text = f"{error.message} [{', '.join(where)}]" if where else error.message
            if not text.isascii():
                text = text.encode(errors="backslashreplace").decode()
            return Failure(text, code, **told)
        case KeyboardInterrupt():
            return Failure("interrupted; what was begun was taken back", **told)
        case click.Abort():
            return Failure("nothing was done", **told)
        case click.UsageError():
            path = error.ctx.command_path if error.ctx else "ray-dcp"
            return Failure(f"{error.format_message()} See {path} --help", **told)
        case click.ClickException():
            return Failure(error.format_message(), **told)
        case OSError() | MemoryError():
            return Failure(str(error) or type(error).__name__, **told)
    return Failure(
        f"something that ray-dcp does not expect: {type(error).__name__}: {error}. Run it again "
        f"with --debug, and please report what it prints",
        **told,
    )


def _options() -> list[click.Parameter]:
    return [
        click.Option([name], is_flag=True, expose_value=False, help=told)
        for name, (_, told) in OPTIONS.items()
    ]


@click.group(cls=LazyGroup, lazy=COMMANDS)
@click.version_option(ray_dcp.__version__, prog_name="ray-dcp")
def main() -> None:
    """Look at checkpoints of PyTorch jobs, and move them: of ray_dcp, torch's DCP, safetensors.

    A checkpoint is named by its path or URL, or as RUN@STEP: run@latest, run@best, run@best:loss,
    run@500, run@TAG. Commands that write take --dry-run; tables fit the screen.

    Exit status: 0 fine, 1 the checkpoint is damaged, 2 anything else.
    """
