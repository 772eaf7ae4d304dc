"""The `ray-dcp` command: its subcommands, which are imported when they are called, and exit codes.

Exit codes: 0, success. 1, the checkpoint is damaged. 2, the call is invalid, there is no
checkpoint, the storage failed, or the output could not be written. 130, interrupted by Ctrl-C; 129
and 143, by SIGHUP (a closed terminal) and SIGTERM. 141, the reader of the output has ended.
Commands that only read import neither torch nor Ray.
"""

from __future__ import annotations

import codecs
import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any

import click

import ray_dcp
from ray_dcp.core.json_text import to_json
from ray_dcp.errors import CheckpointError, DamagedCheckpointError, InvalidRequestError

# Name -> `module:attribute` of its click command, and its summary. Why the summary is here:
# `--help` must not import the modules of all commands.
COMMANDS = {
    "ls": ("listing:ls", "List the checkpoints below a directory."),
    "show": ("showing:show", "Show what is at a path, and how to load it."),
    "diff": ("showing:diff", "List the tensors that differ between two checkpoints."),
    "verify": ("showing:verify", "Compare every stored byte with its checksums."),
    "reshard": ("showing:reshard", "Show what a load on other ranks would read."),
    "timeline": ("showing:timeline", "Show what took how long on which rank when it was saved."),
    "report": ("listing:report", "Write one HTML file with pictures of a run."),
    "export": ("writing:export", "Write a checkpoint as safetensors, torch.save or stock DCP."),
    "import": ("writing:import_", "Make a checkpoint of a file or folder of another program."),
    "cp": ("writing:cp", "Copy a checkpoint, or a run, to another place."),
    "average": ("writing:average", "Write the weighted mean of checkpoints."),
    "tag": ("writing:tag", "Give a step tags, or a note."),
    "rm": ("writing:rm", "Delete checkpoints."),
    "gc": ("writing:gc", "Delete what crashed saves left behind."),
    "du": ("listing:du", "Show what takes how much space."),
    "doctor": ("listing:doctor", "Look for what is wrong with a run or its storage."),
    "watch": ("listing:watch", "Print what happens to a run, until Ctrl-C."),
    "metadata": ("writing:metadata", "Write the .metadata that a save left out, for stock DCP."),
    "demo": ("demo:demo", "Train, save, kill, resume on fewer and more ranks."),
}

EXAMPLES = {
    "ls": ("run", "s3://bucket/runs --json"),
    "show": ("run", "run@latest --tensor '*.weight'"),
    "diff": ("run@100 run@200", "run@100 run@best --values"),
    "verify": ("run", "run@latest --json"),
    "reshard": ("run@latest --to 4x2", "run@latest --to 16 --tensor 'model.*'"),
    "timeline": ("run@latest", "run@latest --chrome trace.json"),
    "report": ("run", "run pictures.html"),
    "export": ("run@best out --format hf --dtype bf16 --model-only", "run@latest w.safetensors"),
    "import": ("w.pt imported", "w.pt runs/step-0 --dry-run"),
    "cp": ("run@best best --verify", "run s3://bucket/run"),
    "average": ("run --last 2 -o mean", "run@100 run@200 --weights 1,3 -o weighted"),
    "tag": ("run@200 released --note 'lr 3e-4'", "run@200 released --remove"),
    "rm": ("run@100 --dry-run", "run@100 --yes"),
    "gc": ("run --dry-run", "run --abort-unfinished --yes"),
    "du": ("run", "s3://bucket/run --json"),
    "doctor": ("run", "s3://bucket/run --write"),
    "watch": ("run", "run --looks 1 --json"),
    "metadata": ("run@latest --dry-run", "run@latest"),
    "demo": ("", "--dir somewhere"),
}
"""Two command lines of each command, for its `--help`, without the name of the command."""

JSON, DEBUG, VERBOSE = (f"ray_dcp.{name}" for name in ("json", "debug", "verbose"))
"""Keys in click's `meta` for the common options of all commands; True if given."""
OPTIONS = {
    "--json": (JSON, "Print JSON, errors too."),
    "--verbose": (VERBOSE, "Also print ids of saves, and numbers of records."),
    "--debug": (DEBUG, "Show a traceback before the message of an error."),
}
"""Common options, accepted at any position of a command line: key in click's `meta`, and help."""


INTERRUPTED, PIPE_CLOSED = 130, 141
"""Exit codes of a program ended by a signal: 128 plus the number of SIGINT or SIGPIPE."""
_BY_SIGNAL = (129, 143)
"""The same of SIGHUP and SIGTERM."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP was received: what was begun is taken back, as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def exit_code_of(error: BaseException | None) -> int:
    """Returns the exit code after an interrupt."""
    return error.exit_code if isinstance(error, Terminated) else INTERRUPTED


@contextmanager
def _terminable() -> Iterator[None]:
    """Raises `Terminated` in the block at the first SIGTERM or SIGHUP.

    Later ones are ignored: a closed terminal sends several, and the cleanup must not be cut short.
    A signal that was ignored before, as by `nohup`, stays so.
    """
    before: dict[signal.Signals, Any] = {}

    def received(number: int, frame: object) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise Terminated(number)

    # Suppressed: another thread than the main one can't be interrupted.
    with suppress(ValueError):
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, received)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is received:
                signal.signal(number, handler)


class Failure(click.ClickException):
    """Ends the command with a single message.

    Args:
        message: One line for people.
        exit_code: 1 if a checkpoint is damaged, 130 after Ctrl-C, else 2.
        **error: Class and location of the error, for programs.
    """

    def __init__(self, message: str, exit_code: int = 2, **error: object) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]
        self._error = {"type": "Error", **error, "message": message, "exit_code": exit_code}
        self._as_json = click.get_current_context().meta.get(JSON)

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints the message to standard error or, with `--json`, an object to standard output."""
        if self._as_json:
            click.echo(to_json({"error": self._error}, indent=2, default=str))
        else:
            click.echo(f"Error: {self.message}", err=True)


def colors_wanted(environment: Mapping[str, str]) -> bool | None:
    """Returns whether output has colours; None for those of a terminal alone.

    `NO_COLOR` and `FORCE_COLOR` count if they are not empty (no-color.org, force-color.org); the
    first one wins.

    Examples:
        >>> colors_wanted({"NO_COLOR": "1"}), colors_wanted({"NO_COLOR": "", "FORCE_COLOR": "1"})
        (False, True)
        >>> colors_wanted({"TERM": "dumb"}), colors_wanted({"TERM": "xterm"})
        (False, None)
    """
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return False if environment.get("TERM") == "dumb" else None


class LazyGroup(click.Group):
    """A command group that imports the module of a command when the command is called.

    Args:
        lazy: For each command name, `module:attribute` below `ray_dcp.cli`, and the line for
            `--help`.
    """

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy
        self.params += _options()

    def main(self, *args: Any, **extra: Any) -> Any:
        """Runs the command line. Lost output never gives the exit code of a damaged checkpoint."""
        run: Callable[..., Any] = super().main
        if not extra.pop("standalone_mode", True):
            return run(*args, standalone_mode=False, **extra)
        code: Any = 2
        try:
            with _terminable():
                _open_streams()
                # Why not click's own handling: it exits with 1 on a closed pipe and on Ctrl-C.
                code = run(*args, standalone_mode=False, **extra)
        except click.ClickException as error:
            code = error.exit_code
            try:
                error.show()
            except OSError:
                # Why: after SIGHUP there is no terminal any more.
                code = code if code > 128 else 2
                with suppress(OSError):
                    click.echo(f"Error: {error.format_message()}", err=True)
        except (click.Abort, KeyboardInterrupt) as error:
            code = exit_code_of(error.__cause__ if isinstance(error, click.Abort) else error)
        except SystemExit as error:
            code = error.code
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except (OSError, ValueError, KeyboardInterrupt) as error:
            # Other lost output was reported above.
            codes = {BrokenPipeError: PIPE_CLOSED, KeyboardInterrupt: INTERRUPTED}
            code = code if code in _BY_SIGNAL else codes.get(type(error), code)
            _drop_output()
        sys.exit(code if isinstance(code, int) else 0)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the command names in order, without importing anything."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the module of a command and returns the command; None for an unknown name."""
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        loaded = importlib.import_module(f"ray_dcp.cli.{module}")
        command: click.Command = getattr(loaded, attribute)
        if not any(parameter.name == "debug" for parameter in command.params):
            command.params += _options()
            lines = [f"  ray-dcp {cmd_name} {words}".rstrip() for words in EXAMPLES[cmd_name]]
            command.epilog = "\n".join(["\b", "Examples:", *lines])
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands with their summaries."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, told) for name, (_, told) in self._lazy.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Records the common options first, so that errors in parsing respect them."""
        given = args[: args.index("--")] if "--" in args else args
        ctx.meta.update({key: True for name, (key, _) in OPTIONS.items() if name in given})
        ctx.color = colors_wanted(os.environ) if ctx.color is None else ctx.color
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command, and turns an error into one message and an exit code."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _drop_output()
            raise click.exceptions.Exit(PIPE_CLOSED) from None
        except (click.exceptions.Exit, Failure):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if ctx.meta.get(DEBUG):
                traceback.print_exc(file=sys.stderr)
            raise _failure(error) from error


_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_DRAWN = str.maketrans("├└│─…█░▒▓·×", "|`|-~#.+%.x")
"""ASCII replacements of drawing characters, for encodings that lack them."""


def _in_letters_of(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_DRAWN)
    return text.encode("ascii", "backslashreplace").decode(), error.end


def _open_streams() -> None:
    """Prepares the standard streams so that any text can be printed.

    Raises:
        SystemExit: Standard output is closed.
    """
    with suppress(OSError):
        # Why: a file opened later would get the descriptor of a closed stream, and its output.
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(number)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    if sys.stdout is None:
        click.echo("Error: standard output is closed; send it to /dev/null instead", err=True)
        sys.exit(2)
    codecs.register_error("ray_dcp.drawn", _in_letters_of)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="ray_dcp.drawn")


def _drop_output() -> None:
    """Redirects pending output to the null device, so that the exit of the process succeeds."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _failure(error: BaseException) -> Failure:
    told: dict[str, Any] = {"type": type(error).__name__}
    match error:
        case CheckpointError():
            # Careful: in an InvalidRequestError, `key` is the name of a Python argument.
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
            how = str(error) if isinstance(error, Terminated) else ""
            text = f"interrupted{f' by {how}' * bool(how)}; what was begun was taken back"
            return Failure(text, exit_code_of(error), **told)
        case click.Abort():
            is_interrupted = isinstance(error.__context__, KeyboardInterrupt)
            code = exit_code_of(error.__context__) if is_interrupted else 2
            return Failure("nothing was done", code, **told)
        case click.UsageError():
            path = error.ctx.command_path if error.ctx else "ray-dcp"
            return Failure(f"{error.format_message()} See {path} --help", **told)
        case click.ClickException():
            return Failure(error.format_message(), **told)
        case OSError() if error.filename is None and error.errno in _OF_OUTPUT:
            return Failure(f"the output could not be written: {error.strerror}", **told)
        case OSError():
            return Failure(str(error), **told)
        case MemoryError():
            return Failure("there is not enough memory", **told)
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


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExamples:\n  ray-dcp ls run\n  ray-dcp show run@latest",
)
@click.version_option(ray_dcp.__version__, prog_name="ray-dcp")
def main() -> None:
    """Inspect, verify and copy checkpoints of PyTorch jobs: ray_dcp, torch's DCP, safetensors.

    A checkpoint is named by its path or URL, or as RUN@STEP: run@latest, run@best, run@best:loss,
    run@trusted:eval_ok, run@500, run@TAG. Commands that write accept --dry-run. Tables are fitted
    to the terminal.

    Exit status: 0 success, 1 the checkpoint is damaged, 130 interrupted by Ctrl-C (129 by SIGHUP,
    143 by SIGTERM), 2 anything else.
    """
