"""What commands print: helps, tables, JSON, golden files; and what becomes of their output."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import torch
from click.testing import CliRunner

import ray_dcp
from ray_dcp.cli import listing, output
from ray_dcp.cli.main import COMMANDS, EXAMPLES, main
from ray_dcp.errors import InvalidRequestError
from ray_dcp.format.save_trace import RankTimes, Span, encode_trace, make_trace, trace_key
from ray_dcp.format.step_info import StepInfo, encode_info, info_key
from ray_dcp.manager import Item, LatestN
from ray_dcp.store.local import LocalStorage
from ray_dcp.view.progress import Meter
from ray_dcp.view.verify import VerifyInterrupted
from tests.support import checkpoints, cli_story
from tests.support.storages import interpose


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Returns how a command ended that a shell ran."""
    line = line.replace("ray-dcp", f"{sys.executable} -m ray_dcp")
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"],
        capture_output=True, timeout=400, check=False, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize("command", ["show {}", "verify {}/none --json"])
def test_an_output_that_can_not_be_written_is_no_damage(saved_checkpoint: Path, command: str):
    found = shell(f"ray-dcp {command.format(saved_checkpoint)} > /dev/full")
    assert found.returncode == 2, found
    assert b"Traceback" not in found.stderr
    assert found.stderr.startswith(b"Error: ")
    assert len(found.stderr.splitlines()) == 1
    if b"none" not in found.stderr:
        assert b"the output could not be written" in found.stderr


def test_a_closed_output_is_told_before_anything_is_done(saved_checkpoint: Path):
    found = shell(f"ray-dcp verify {saved_checkpoint} >&-")
    assert found.returncode == 2
    assert b"standard output is closed" in found.stderr
    found = shell(f"ray-dcp verify {saved_checkpoint} 2>&- <&-")
    assert (found.returncode, b": ok, " in found.stdout) == (0, True)


def test_who_ends_before_all_is_printed_is_no_damage(saved_checkpoint: Path):
    found = shell(f"ray-dcp show {saved_checkpoint} --all | true")
    assert (found.returncode, found.stderr) in ((141, b""), (0, b""))
    found = shell(f"(sleep 0.2; ray-dcp show {saved_checkpoint} --all) | exec true")
    assert (found.returncode, found.stderr) == (141, b"")


def test_an_output_with_few_letters_gets_others(tmp_path: Path):
    state = {"model": {"größe": torch.ones(2), "層": torch.ones(1)}}
    ray_dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    found = shell(f"ray-dcp show {tmp_path}/c --tree", PYTHONIOENCODING="latin-1")
    assert (found.returncode, found.stderr) == (0, b"")
    told = found.stdout.decode("latin-1")
    assert all(one in told for one in ("`-- model: 2 tensors", "größe", r"\u5c64"))


def test_ctrl_c_prints_what_was_found_and_exits_as_of_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for step in (1, 2, 3):
        checkpoints.save(tmp_path / f"step-{step}")
    file = checkpoints.data_file(tmp_path / "step-1")
    checkpoints.flip(file, file.stat().st_size // 2)
    interrupt = KeyboardInterrupt()
    interpose(monkeypatch, LocalStorage, "read", "*/step-3/*.distcp", interrupt, times=None)
    found = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert (found.exit_code, found.stderr) == (130, "Error: interrupted\n")
    assert f"{tmp_path}/step-1: 1 problem" in found.stdout
    lines = [line.removeprefix(f"{tmp_path}/") for line in found.stdout.splitlines()]
    assert [line.partition(",")[0] for line in lines[2:]] == [
        "step-2: ok", "step-3 (in part): no problem so far",
    ]  # fmt: skip
    assert lines[1].startswith("  damaged: ")
    told = json.loads(CliRunner().invoke(main, ["verify", str(tmp_path), "--json"]).stdout)
    assert told["interrupted"]
    assert [one["ok"] for one in told["steps"]][:2] == [False, True]
    found = CliRunner().invoke(main, ["verify", str(tmp_path / "step-3"), "--json"])
    assert (found.exit_code, json.loads(found.stdout)["interrupted"]) == (130, True)


@pytest.mark.parametrize("when", ["opened", "checked"])
def test_a_verify_that_is_interrupted_in_an_item_has_what_it_found_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
):
    items = {"first": Item(), "second": Item()}
    with ray_dcp.CheckpointManager(tmp_path, 1, items=items) as manager:
        manager.save(5, {name: {"w": torch.ones(300)} for name in items})
    step = tmp_path / "step-00000005"
    damaged = [checkpoints.data_file(step / name) for name in items]
    for file in damaged:
        checkpoints.flip(file, file.stat().st_size // 2)
    seen = list[int]()

    class Interrupt(Meter):
        def add(self, num_bytes: int, file: str = "") -> None:
            seen.append(num_bytes)
            if len(seen) == 3:  # of the step's own file and of each item's
                raise KeyboardInterrupt

    if when == "opened":
        interpose(monkeypatch, LocalStorage, "read", "*/second/*.distcp", KeyboardInterrupt())
    with pytest.raises(VerifyInterrupted) as raised:
        ray_dcp.verify(step, progress=Interrupt("verifying", ""))
    found = [step / one.file for one in raised.value.report.problems]
    assert found == damaged[: {"opened": 1, "checked": 2}[when]]


@pytest.mark.parametrize("tag", ["latest", "500", "step-1"])
def test_a_tag_that_would_name_another_step_is_refused_and_can_be_removed(tmp_path: Path, tag: str):
    for step in (1, 2):
        checkpoints.save(tmp_path / f"step-{step}")
    with pytest.raises(InvalidRequestError, match=f"the tag '{tag}'|a tag can't be '{tag}'"):
        ray_dcp.open(tmp_path).tag(2, tag)
    found = CliRunner().invoke(main, ["tag", f"{tmp_path}@2", tag])
    assert (found.exit_code, found.stdout) == (2, "")
    old = tmp_path / ".manager" / "tags"
    old.mkdir(parents=True)
    (old / f"2.{tag}").touch()
    found = CliRunner().invoke(main, ["tag", f"{tmp_path}@2", tag, "--remove"])
    assert (found.exit_code, list(tmp_path.glob(".manager/tags/*"))) == (0, []), found.output


@pytest.mark.parametrize("target", ["s3:/bucket/x", "gs:bucket"])
def test_what_is_nearly_a_url_makes_no_folder(
    saved_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    for command in (["cp", saved_checkpoint, target], ["import", "w.pt", target],
                    ["export", saved_checkpoint, target, "--format", "hf"]):  # fmt: skip
        found = CliRunner().invoke(main, [str(one) for one in command])
        assert (found.exit_code, "would make a folder" in found.stderr) == (2, True), found.output
    with pytest.raises(InvalidRequestError, match="would make a folder"):
        ray_dcp.save({"w": torch.ones(1)}, checkpoint_id=target, no_dist=True)
    found = CliRunner().invoke(
        main, ["export", str(saved_checkpoint), "s3://bucket/x", "--format", "hf"]
    )
    assert (found.exit_code, "a path on this machine" in found.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["w.pt"]


@pytest.mark.parametrize("kind", ["ours", "stock"])
@pytest.mark.parametrize("what", ["short", "missing"])
def test_show_tells_of_files_that_are_missing_or_short(tmp_path: Path, kind: str, what: str):
    path = (checkpoints.save if kind == "ours" else checkpoints.save_stock)(tmp_path / "c")
    file = checkpoints.data_file(path)
    os.truncate(file, file.stat().st_size // 2) if what == "short" else file.unlink()
    found = CliRunner().invoke(main, ["show", str(path)])
    assert (found.exit_code, f"damaged: {file.name}" in found.stdout) == (1, True), found.output
    told = CliRunner().invoke(main, ["show", str(path), "--json"])
    assert (told.exit_code, len(json.loads(told.stdout)["problems"])) == (1, 1)


def test_ctrl_c_at_a_question_is_no_answer(saved_checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: object, **more: object) -> None:  # as click does
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise click.Abort from None

    monkeypatch.setattr(output, "_is_asked", lambda: True)
    monkeypatch.setattr(click, "confirm", interrupt)
    found = CliRunner().invoke(main, ["rm", str(saved_checkpoint)])
    assert found.exit_code == 130
    assert "nothing was done" in found.stderr


def test_a_table_on_a_terminal_has_colours_and_no_control_characters_of_names(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    head, row = output.table(
        [{"name": "a\x1b[2Jb", "state": "damaged", "size": "1 KiB"}],
        left=("name", "state"),
        style=lambda column, cell: "red" if column == "state" else "",
    )
    assert click.unstyle(head) == "NAME    STATE     SIZE"
    assert row == "a\ufffd[2Jb  \x1b[31mdamaged\x1b[0m  1 KiB"


@pytest.mark.parametrize(
    ("environment", "on_terminal", "elsewhere"),
    [
        ({"NO_COLOR": ""}, True, False), ({"NO_COLOR": "0", "FORCE_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False), ({"TERM": "dumb", "FORCE_COLOR": "3"}, True, True),
    ],
)  # fmt: skip
def test_the_environment_decides_about_colours(
    saved_checkpoint: Path, environment: dict[str, str], on_terminal: bool, elsewhere: bool
):
    environment = {"TERM": "xterm", "COLUMNS": "80", **environment}
    command = ["ls", str(saved_checkpoint)]
    found = CliRunner(env=environment).invoke(main, command)
    assert ("\x1b[" in found.stdout) is elsewhere
    controller, terminal = os.openpty()
    with open(controller, "rb", buffering=0) as screen, open(terminal, "wb") as stdout:
        words = [sys.executable, "-m", "ray_dcp", *command]
        subprocess.run(words, stdout=stdout, check=True, env={**os.environ, **environment})
        shown = screen.read(1 << 16)
    assert (b"\x1b[" in shown) is on_terminal
    assert b"committed" in shown


def test_show_filters_by_pattern_and_tells_of_what_is_not_there(saved_checkpoint: Path):
    def lines(*more: str) -> list[str]:
        found = CliRunner(env={"COLUMNS": None}).invoke(
            main, ["show", str(saved_checkpoint), *more]
        )
        assert found.exit_code == 0, found.output
        return found.stdout.splitlines()

    told = lines("--tensor", "model.[hl]*")
    assert {line.split()[0] for line in told[3:5]} == {"model.half", "model.large"}
    assert told[5:] == ["2 of 10 names match 'model.[hl]*'"]
    assert "match 'model.hafl'; did you mean 'model.half'" in lines("--tensor", "model.hafl")[-1]
    assert lines("--tree")[-3:-1] == ["└── note[x]: 2 objects", "    ├── text: 'hello'"]


# --- the command group --------------------------------------------------------------------------


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
FORMS = jsonschema.Draft202012Validator
FORMS.check_schema(SCHEMA)

RUN_ELSEWHERE = {"demo"}
"""Commands that start a Ray."""


def printed(*arguments: object, exit_code: int = 0) -> Any:
    """Returns what a command prints after checking its form."""
    words = [*map(str, arguments), "--json"]
    found = CliRunner().invoke(main, words)
    assert (found.exit_code, found.stderr) == (exit_code, ""), (words, found.output)
    kind = "error" if exit_code == 2 else words[0]
    texts = found.stdout.splitlines() if words[0] == "watch" else [found.stdout]
    for value in [json.loads(text, parse_constant=pytest.fail) for text in texts]:
        # Why not `jsonschema.validate`: it checks the schema itself each time.
        FORMS({"$defs": SCHEMA["$defs"], "$ref": f"#/$defs/{kind}"}).validate(value)
    return json.loads(texts[-1])


def test_numbers_that_json_lacks_are_printed_as_texts(tmp_path: Path):
    run = tmp_path / "run"
    with ray_dcp.CheckpointManager(run, 1, retention=LatestN(9)) as manager:
        for step, loss in ((1, math.nan), (2, math.inf), (3, -math.inf), (4, 0.5)):
            metadata = {"losses": [loss, 1]}
            state = {"w": torch.full((2,), step - 1.0)}
            manager.save(step, state, metrics={"loss": loss}, metadata=metadata)
    texts = ["NaN", "Infinity", "-Infinity", 0.5]
    for command in (["ls", run], ["watch", run, "--looks", 1]):
        found = CliRunner().invoke(main, [*map(str, command), "--json"])
        lines = found.stdout.splitlines() if command[0] == "watch" else [found.stdout]
        told = [json.loads(text, parse_constant=pytest.fail) for text in lines]
        rows = sorted(told if command[0] == "watch" else told[0], key=itemgetter("step"))
        assert [row["metrics"]["loss"] for row in rows] == texts
        assert [row["metadata"]["losses"] for row in rows] == [[text, 1] for text in texts]
    assert (
        printed("diff", f"{run}@1", f"{run}@2", "--values", exit_code=0)["tensors"][0]["values"][
            "relative"
        ]
        == "Infinity"
    )
    # In files too; a reader has the numbers back.
    for file in run.rglob("*.json"):
        json.loads(file.read_text(), parse_constant=pytest.fail)
    steps = {step.step: step for step in ray_dcp.open_run(run)}
    assert math.isnan(steps[1].metrics["loss"])
    assert math.isnan(steps[1].metadata["losses"][0])
    for step, loss in ((2, math.inf), (3, -math.inf), (4, 0.5)):
        assert (steps[step].metrics, steps[step].metadata) == (
            {"loss": loss}, {"losses": [loss, 1]},
        )  # fmt: skip


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
        == set(SCHEMA["$defs"]) - {"error", "float"}
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
        table = checkpoints.large_table(64, 4, attempt, changed=changed, files=4)
        for run in ("run", "wide"):
            path = checkpoints.place_table(tmp_path / run / f"step-{step}", table, attempt)
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
