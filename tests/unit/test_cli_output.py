"""What becomes of the output of a command: full disks, closed pipes, other letters, Ctrl-C."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import ray_dcp
from ray_dcp.cli import output
from ray_dcp.cli.main import main
from ray_dcp.errors import InvalidRequestError
from ray_dcp.manager import Item
from ray_dcp.store.local import LocalStorage
from ray_dcp.view.progress import Meter
from ray_dcp.view.verify import VerifyInterrupted
from tests.support import checkpoints


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
    read = LocalStorage.read

    def interrupted(self: LocalStorage, key: str, *more: object) -> bytes:
        if self.url.endswith("step-3") and key.endswith(".distcp"):
            raise KeyboardInterrupt
        return read(self, key, *more)

    monkeypatch.setattr(LocalStorage, "read", interrupted)
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
    read, seen = LocalStorage.read, list[int]()

    def interrupted(self: LocalStorage, key: str, *more: object) -> bytes:
        if when == "opened" and self.url.endswith("second") and key.endswith(".distcp"):
            raise KeyboardInterrupt
        return read(self, key, *more)

    class Interrupt(Meter):
        def add(self, num_bytes: int, file: str = "") -> None:
            seen.append(num_bytes)
            if len(seen) == 3:  # of the step's own file and of each item's
                raise KeyboardInterrupt

    monkeypatch.setattr(LocalStorage, "read", interrupted)
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
