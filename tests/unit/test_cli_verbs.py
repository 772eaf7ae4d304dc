"""What goes wrong on the command line: one short message, an exit code, nothing half-written."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import ray_dcp
from ray_dcp import CheckpointManager
from ray_dcp.cli import output, writing
from ray_dcp.cli.listing import changes
from ray_dcp.cli.main import COMMANDS, main
from ray_dcp.core import bounds
from ray_dcp.errors import DamagedCheckpointError, StorageError
from ray_dcp.io.lease_holders import LeaseHolder
from ray_dcp.manager import Item
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.reader_leases import ReaderLease
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.opening import absolute_target
from tests.support import checkpoints
from tests.support.storages import interpose
from tests.unit.test_cli_output import printed


def invoke(*arguments: object, **more: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], **more)


def refused(*arguments: object, exit_code: int = 2) -> str:
    """Returns the message of a command that fails."""
    found = invoke(*arguments)
    assert found.exit_code == exit_code, found.output
    assert "Traceback" not in found.output
    # Before it, lines tell how far a command has come that takes long, as on a busy machine.
    assert re.search("^(Error|Usage): ", found.stderr, re.MULTILINE)
    return found.stderr


@pytest.fixture
def run(saved_checkpoint: Path, tmp_path: Path) -> Path:
    for step in (10, 20):
        shutil.copytree(saved_checkpoint, tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


def test_what_is_not_there_is_told_with_the_nearest_names(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(run.parent)
    for command in (["show"], ["diff", run], ["reshard", "--to", "2"], ["export", "out"],
                    ["cp", "out"], ["rm", "--yes"], ["metadata"]):  # fmt: skip
        verb, *more = command
        assert "nearest: 10, 20" in refused(verb, f"{run}@11", *more)
        assert "did you mean 'latest'" in refused(verb, f"{run}@latst", *more)
    for command in ("ls", "du", "doctor", "gc", "watch", "show"):
        assert "did you mean 'run'" in refused(command, run.parent / "runn")
    told = f"name one of its 2 steps, as {run}@latest or {run}@20"
    for command in (["reshard", run, "--to", 2], ["export", run, run / "out"], ["tag", run, "a"]):
        assert told in refused(*command)
    assert "name one" in refused("rm", run, "--yes")
    # The run is there: its own name is no hint at what else was meant.
    assert "did you mean" not in refused("show", f"{run}@999")
    assert [path.name for path in run.parent.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("left", "verbs"),
    [
        ("data", ["verify", "cp", "export"]),
        ("table", ["diff", "verify", "cp"]),
        ("record", ["show", "reshard", "timeline"]),
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
    denied = StorageError("could not read: [EACCES] Permission denied", key="step-10")
    interpose(monkeypatch, LocalStorage, what, "*", denied, times=None)
    one, out = run / "step-10", run.parent / "out"
    commands = [["diff", one, run / "step-20"], ["reshard", one, "--to", "2"], ["cp", one, out],
                ["export", one, out], ["show", one], ["verify", one]]  # fmt: skip
    if what == "list":
        commands += [["ls", run], ["watch", run], ["rm", one, "--yes"], ["tag", f"{run}@10", "a"]]
    for command in commands:
        assert "Permission denied" in refused(*command), command
    assert sorted(p.name for p in run.parent.iterdir()) == ["run"]


def test_one_folder_that_can_not_be_read_stops_nothing(run: Path, monkeypatch: pytest.MonkeyPatch):
    lists, reads = LocalStorage.list, LocalStorage.read

    def listed(self: LocalStorage, prefix: str = "") -> list[object]:
        key = f"{self.url}/{prefix}".removeprefix(f"{run}/")
        if key == "" or key.startswith("step-10"):
            raise StorageError("[EACCES] Permission denied")
        return list(lists(self, prefix))

    def read(self: LocalStorage, key: str, *more: object) -> bytes:
        if "/step-10/manifest-" in f"{self.url}/{key}":
            raise StorageError("[EACCES] Permission denied")
        return reads(self, key, *more)

    for name, denied in (("list", listed), ("read", read)):
        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, name, denied)
            for command in (["ls", run], ["du", run], ["gc", run, "--yes"], ["verify", run]):
                found = invoke(*command)
                assert found.exit_code == 2 * (command[0] == "verify"), found.output
                assert "Permission denied" in found.output
                assert "step-20" in found.output or command[0] == "gc"
            steps = json.loads(invoke("ls", run, "--json").stdout)
            assert [step["state"] for step in steps] == ["unreadable", "committed"]


def test_a_data_file_that_can_not_be_read_is_no_damage_and_no_success(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    reads = LocalStorage.read

    def read(self: LocalStorage, key: str, start: int = 0, *more: object) -> bytes:
        if self.url.endswith("step-10") and key.endswith(".distcp") and start == 0:
            raise StorageError("input/output error")
        return reads(self, key, start, *more)

    monkeypatch.setattr(LocalStorage, "read", read)
    found = invoke("verify", run)
    assert (found.exit_code, found.stdout.count("  unread: __0_0.")) == (2, 1)
    assert found.stdout.splitlines()[-1] == "newest good: step 20"


def test_the_copy_of_a_run_has_its_tags_and_notes_and_none_of_what_is_damaged(run: Path):
    ray_dcp.open(run).tag(10, "kept").annotate(20, "look")
    target = run.parent / "copy"
    assert invoke("cp", run, target, "--verify").exit_code == 0
    assert [(s.name, s.state, s.tags, s.note) for s in ray_dcp.open(target)] == [
        ("step-10", "committed", ("kept",), ""), ("step-20", "committed", (), "look")
    ]  # fmt: skip
    checkpoints.data_file(run / "step-10").unlink()
    found = invoke("verify", run)
    assert (found.exit_code, f"{run}/step-20: ok" in found.stdout) == (1, True)
    assert [invoke("ls", run, *more).exit_code for more in ([], ["--check"])] == [0, 1]
    assert invoke("cp", run, run.parent / "other").exit_code == 1
    assert [step.name for step in ray_dcp.open(run.parent / "other")] == ["step-20"]


@pytest.mark.parametrize("kind", ["native", "stock"])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_flipped_bit_is_not_copied(tmp_path: Path, kind: str, place: str):
    path, target = tmp_path / "step-1", tmp_path / "copy"
    values = {"a": torch.arange(3 << 20, dtype=torch.float32), "b": torch.ones(5)}
    if kind == "stock":
        checkpoints.save_stock(path, values)
    else:
        ray_dcp.save(values, checkpoint_id=path)
    file = checkpoints.data_file(path)
    start = file.read_bytes().find(values["a"].numpy().tobytes())
    assert start >= 0
    end = start + values["a"].nbytes - 1
    checkpoints.flip(file, {"first": start, "middle": (start + end) // 2, "last": end}[place])
    with pytest.raises(DamagedCheckpointError, match=r"of 'a': .*; copy another step"):
        ray_dcp.copy(path, target)
    found = invoke("cp", path, target)
    assert (found.exit_code, file.name in found.output) == (1, True), found.output
    assert not target.exists() or not [*target.iterdir()]


def test_a_flipped_bit_beside_the_tensors_is_not_copied(run: Path):
    for pattern in ("__0_*.distcp", "chunks.*"):
        (file,) = (run / "step-10").glob(pattern)
        data = file.read_bytes()
        for offset in (len(data) - 1, len(data) // 2):
            checkpoints.flip(file, offset)
            found = invoke("cp", run, run.parent / f"{file.name}-{offset}")
            assert found.exit_code == 1, found.output
            steps = [step.name for step in ray_dcp.open(run.parent / f"{file.name}-{offset}")]
            assert steps == ["step-20"]
            file.write_bytes(data)


def test_a_bit_that_is_wrong_at_one_read_only_does_not_fail_a_copy(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    reads, flipped = LocalStorage.read, []

    def read(self: LocalStorage, key: str, start: int = 0, *more: object) -> bytes:
        data = reads(self, key, start, *more)
        if key.endswith(".distcp") and start == 0 and self.url.endswith("step-10") and not flipped:
            flipped.append(key)
            data = bytes([data[0] ^ 1]) + data[1:]
        return data

    monkeypatch.setattr(LocalStorage, "read", read)
    assert invoke("cp", run, run.parent / "copy").exit_code == 0
    assert flipped
    assert ray_dcp.verify(run.parent / "copy").ok


def test_a_report_is_one_page_that_needs_nothing_from_outside(run: Path, tmp_path: Path):
    found = invoke("report", run, tmp_path / "r.html")
    assert found.exit_code == 0, found.output
    page = (tmp_path / "r.html").read_text()
    for told in ("step-20", "model.large", "coordinator", "loaded by 2 ranks", "10 unchanged"):
        assert told in page
    assert not any(word in page for word in ("http:", "https:", "<script", "<link", " src="))
    assert "no directory" in refused("report", run, tmp_path / "no" / "r.html")


def test_no_help_speaks_of_slots_and_attempts_and_show_does_if_asked(run: Path):
    helps = [invoke(name, "--help").stdout for name in COMMANDS]
    assert not [told for told in helps if re.search(r"\b(slot|attempt)s?\b", told)]
    assert "in slot 1" in invoke("show", f"{run}@20", "--verbose").stdout


def test_an_export_of_the_model_alone_names_what_there_is_instead(run: Path, tmp_path: Path):
    assert invoke("export", f"{run}@10", tmp_path / "b.safetensors", "--model-only").exit_code == 0
    assert "weight" in ray_dcp.open(tmp_path / "b.safetensors").names
    ray_dcp.save({"net": {"w": torch.ones(1)}}, checkpoint_id=tmp_path / "net")
    said = refused("export", tmp_path / "net", tmp_path / "c.safetensors", "--model-only")
    assert "found net: choose with --tensor and --strip-prefix" in said


MODULE = {"embed.weight": torch.ones(2), "lm_head.weight": torch.ones(3)}
INNER = {"model.embed.weight": torch.ones(2), "lm_head.weight": torch.ones(3)}
MOMENTS = {"state": {"model.embed.weight": {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1}]}


@pytest.mark.parametrize(
    ("state", "prefix", "others"),
    [
        ({"app": {"model": MODULE, "optim": MOMENTS}}, "app.model.", ""),
        ({"net": INNER, "optimizer": MOMENTS}, "net.", ""),
        ({"model": INNER, "ema": {"model": MODULE}}, "model.", "ema.model."),
        ({"app": {"module": MODULE}, "critic": MODULE}, "app.module.", "critic."),
        (INNER, "the whole checkpoint", ""),
        ({"a": {"model": {"weight": torch.ones(1)}}}, "a.model.", ""),
    ],
)  # fmt: skip
def test_the_model_is_found_at_any_depth_and_told(
    state: dict[str, Any], prefix: str, others: str, tmp_path: Path
):
    ray_dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    found = invoke("export", tmp_path / "c", tmp_path / "w.pt", "--model-only")
    assert f"took the model in {prefix}{f', and not {others}' if others else ''}" in found.stdout
    inner = state
    for part in () if " " in prefix else prefix.rstrip(".").split("."):
        inner = inner[part]
    assert [*torch.load(tmp_path / "w.pt")] == [*inner]


def test_models_among_which_none_is_the_likeliest_are_named(tmp_path: Path):
    state = {"actor": {"model": MODULE}, "critic": {"model": MODULE}}
    ray_dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    said = refused("export", tmp_path / "c", tmp_path / "w.pt", "--model-only")
    assert "found actor.model., critic.model." in said


def test_an_export_renames_and_tells_what_lies_beside_the_weights(tmp_path: Path):
    assets = {"config.json": b"{}", "tokenizer.json": b"{}"}
    state = {"model": MODULE, "hf_assets": assets}
    ray_dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    told = ["export", tmp_path / "c", tmp_path / "hf", "--format", "hf", "--model-only"]
    told += ["--key-map", "^embed=model.embed", "--key-map", "(?=weight$)=own."]
    found = invoke(*told)
    assert "wrote beside the weights: config.json, tokenizer.json" in found.stdout
    names = ["model.embed.own.weight", "lm_head.own.weight"]
    assert sorted(ray_dcp.open(tmp_path / "hf").names) == sorted(names)
    assert "expected --key-map REGEX=TEXT" in refused(*told[:3], "--key-map", "embed")
    ray_dcp.save({"model": MODULE}, checkpoint_id=tmp_path / "bare", no_dist=True)
    found = invoke("export", tmp_path / "bare", tmp_path / "b", "--format", "hf", "--model-only")
    assert "--assets FOLDER" in found.stdout


def test_files_of_other_kinds_are_one_line_and_exit_code_2(tmp_path: Path):
    text = tmp_path / "a.txt"
    text.write_text("no checkpoint")
    assert "a.txt" in refused("show", tmp_path)
    for command in (["import", text, tmp_path / "x"], ["show", text], ["diff", text, tmp_path],
                    ["verify", text], ["cp", text, tmp_path / "x"], ["ls", text],
                    ["watch", tmp_path, "--looks", "0"]):  # fmt: skip
        assert len(refused(*command).splitlines()) == 1, command


def test_a_traceback_comes_with_debug_alone(run: Path, monkeypatch: pytest.MonkeyPatch):
    for arguments in (["--debug", "show", f"{run}@11"], ["show", f"{run}@11", "--debug"]):
        found = invoke(*arguments)
        assert found.exit_code == 2
        assert "Traceback" in found.stderr
        assert "CheckpointNotFoundError" in found.stderr
    monkeypatch.setattr("ray_dcp.cli.showing.address_of", lambda text: 1 / 0)
    said = refused("show", run / "step-10")
    assert "ZeroDivisionError" in said
    assert "--debug" in said


def test_ctrl_c_ends_a_watch_quietly_and_takes_back_what_was_begun(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    interpose(monkeypatch, LocalStorage, "open_writer", "*", KeyboardInterrupt(), times=None)
    assert "interrupted" in refused("cp", f"{run}@10", run.parent / "copy", exit_code=130)
    assert not [p for p in run.parent.rglob("copy/**/*") if p.is_file()]
    process = subprocess.Popen(
        [sys.executable, "-m", "ray_dcp", "watch", str(run), "--interval", "60"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    lines = [process.stdout.readline(), process.stdout.readline()]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=400)
    assert (process.returncode, out, err) == (130, "", "")
    assert lines[0].startswith("step-10: committed")


def test_destroying_asks_and_takes_no_for_an_answer(run: Path, monkeypatch: pytest.MonkeyPatch):
    before = sorted(run.rglob("*"))
    assert "give --yes" in refused("rm", f"{run}@10")
    monkeypatch.setattr(output, "_is_asked", lambda: True)
    found = invoke("rm", f"{run}@10", input="n\n")
    assert (found.exit_code, "nothing was done" in found.stderr) == (2, True)
    assert sorted(run.rglob("*")) == before
    found = invoke("rm", f"{run}@10", input="y\n")
    assert found.exit_code == 0
    left = ray_dcp.open(run)
    assert {s.step: s.state for s in left} == {10: "deleted", 20: "committed"}
    assert [s.step for s in left.present] == [20]
    for verb in ("ls", "du", "watch --looks 1"):
        assert "step-10" not in invoke(*verb.split(), str(run)).output
    assert "1 deleted step: --all" in invoke("ls", str(run)).output
    assert "step-10  deleted" in invoke("ls", "--all", str(run)).output
    assert "1 checkpoint, 1 deleted" in left._repr_html_()


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


def test_a_step_with_text_after_its_number_is_found_by_it_and_kept_by_its_tag(tmp_path: Path):
    with ray_dcp.CheckpointManager(tmp_path, 1, step_name="{step}.ckpt") as manager:
        for step in (500, 1000):
            manager.save(step, {"w": torch.full((2,), float(step))})
        manager.tag(500, "pinned")
    run = ray_dcp.open_run(tmp_path)
    assert [(step.step, step.tags) for step in run] == [(500, ("pinned",)), (1000, ())]
    assert run["latest"]["w"][...].tolist() == run[1000]["w"][...].tolist() == [1000, 1000]
    for place in (f"{tmp_path}@500", tmp_path / "500.ckpt"):
        assert "has the tag pinned" in refused("rm", place, "--yes")


def test_a_copy_of_a_step_beside_it_is_neither_that_step_nor_has_its_tags(tmp_path: Path):
    with ray_dcp.CheckpointManager(tmp_path, 1) as manager:
        manager.save(7, {"w": torch.ones(2)}, tags=["good"])
        manager.join()
        ray_dcp.copy(tmp_path / "step-00000007", tmp_path / "best")
        run = ray_dcp.open_run(tmp_path)
        assert [(one.name, one.step, one.tags) for one in run] == [
            ("step-00000007", 7, ("good",)),
            ("best", None, ()),
        ]
        assert run.step(7).name == run.step("good").name == "step-00000007"
        assert invoke("rm", tmp_path / "best", "--yes", "--force").exit_code == 0
        assert ray_dcp.open_run(tmp_path).step(7).tags == ("good",)


def test_gc_tells_of_what_the_user_keeps_in_a_step_and_not_of_its_items_which_go_with_it(
    tmp_path: Path,
):
    with ray_dcp.CheckpointManager(tmp_path, 1, items={"model": Item()}) as manager:
        manager.save(1, {"model": {"w": torch.ones(2)}}, metrics={"loss": 0.5})
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    lines = invoke("gc", tmp_path).stdout.splitlines()
    assert [line for line in lines if "kept" in line] == [
        "  kept notes.txt: ray_dcp did not write it"
    ]
    found = invoke("rm", f"{tmp_path}@1", "--yes")
    assert [line for line in found.stdout.splitlines() if "kept" in line] == [
        "  kept notes.txt: ray_dcp did not write it"
    ]
    assert not list(tmp_path.rglob("*.distcp"))


def test_a_step_of_items_is_shown_removed_and_exported_by_its_items(tmp_path: Path):
    items = {"data": Item(), "model": Item()}
    with ray_dcp.CheckpointManager(tmp_path / "run", 1, items=items) as manager:
        manager.save(1, {"model": {"w": torch.ones(2)}, "data": {"at": 1}})
    step = tmp_path / "run" / "step-00000001"
    for path in (tmp_path / "run", step):
        assert f'checkpoint_id="{step}/data"' in invoke("show", path).stdout
    assert "is an item of the step" in refused("rm", step / "model", "--yes")
    assert "ray_dcp did not write it" not in repr(ray_dcp.delete(step, dry_run=True).kept)
    for kind in ("safetensors", "torch", "hf"):
        told = refused("export", step, tmp_path / "out", "--format", kind)
        assert "has the items data, model, each a folder in it" in told
    assert "has the items data, model" in refused("import", step, tmp_path / "imported")
    assert invoke("export", step / "model", tmp_path / "w.safetensors").exit_code == 0
    whole = invoke("export", step, tmp_path / "whole", "--format", "dcp", "--json")
    assert json.loads(whole.stdout)["num_tensors"] == 1
    assert json.loads(whole.stdout)["num_bytes"] > 0
    assert ray_dcp.read_state_dict(tmp_path / "whole" / "model")["w"].tolist() == [1, 1]
    assert invoke("rm", step / "model", "--yes", "--force").exit_code == 0
    assert not ray_dcp.verify(step).ok


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


def test_doctor_tries_the_storage_cleans_up_and_finds_what_is_wrong(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    before = sorted(p.name for p in run.iterdir())
    found = json.loads(invoke("doctor", run, "--write", "--json").stdout)
    assert {one["what"]: one["level"] for one in found["findings"]}["commit"] == "ok"
    assert sorted(p.name for p in run.iterdir()) == before
    assert ray_dcp.__version__ in found["findings"][0]["told"]
    checkpoints.data_file(run / "step-20").unlink()
    found = invoke("doctor", run)
    assert (found.exit_code, "wrong" in found.stdout) == (1, True)
    assert "damaged: __0_0." in found.stdout

    denied = StorageError("[EROFS] Read-only file system")
    interpose(monkeypatch, LocalStorage, "write", "*", denied, times=None)
    found = invoke("doctor", run, "--write")
    assert (found.exit_code, "Read-only" in found.stdout) == (2, True)


def test_diff_exits_with_1_where_that_is_asked_for(run: Path):
    ray_dcp.save({"w": torch.ones(1)}, checkpoint_id=run / "step-30")
    for step, more, code in ((20, ["--exit-code"], 0), (30, [], 0), (30, ["--exit-code"], 1)):
        assert invoke("diff", f"{run}@10", f"{run}@{step}", *more).exit_code == code


def test_diff_shows_modules_where_many_names_differ(tmp_path: Path):
    """The summary comes first; each name is listed if that is asked for."""
    steps = [tmp_path / f"step-{step}" for step in (1, 2)]
    for value, step in enumerate(steps):
        state = {
            f"layers.{layer}.{name}": torch.full((4,), float(value))
            for layer in range(30) for name in ("weight", "bias")
        }  # fmt: skip
        more = {"new": torch.ones(2)} if value else {}
        ray_dcp.save({**state, "kept": torch.ones(3), **more}, checkpoint_id=step)
    lines = invoke("diff", *steps).stdout.splitlines()
    assert lines[1].startswith("1 unchanged, 60 changed, 1 added; 968 B differ")
    assert len(lines) == 2 + 1 + 31 + 1
    assert lines[3].split() == ["layers.0", "2", "changed", "32", "B", "32", "B"]
    assert lines[-2].split()[:3] == ["new", "1", "added"]
    assert len(invoke("diff", *steps, "--tensor", "*").stdout.splitlines()) == 2 + 1 + 61
    assert len(json.loads(invoke("diff", *steps, "--json").stdout)["tensors"]) == 61


def test_diff_compares_the_names_that_match(tmp_path: Path):
    for step in (1, 2):
        state = {"w": torch.ones(2), "step": step}
        ray_dcp.save(state, checkpoint_id=tmp_path / f"step-{step}")
    steps = (f"{tmp_path}@1", f"{tmp_path}@2", "--exit-code", "--tensor")
    for pattern, code in (("w", 0), ("s*", 1), ("none", 0)):
        found = invoke("diff", *steps, pattern)
        assert (found.exit_code, "1 changed" in found.stdout) == (code, code == 1)
    assert "no name matches 'none'" in found.stdout
    assert json.loads(invoke("diff", *steps, "w", "--json").stdout)["counts"] == {"unchanged": 1}


def test_a_step_of_a_run_is_no_target(run: Path, tmp_path: Path):
    one, step = f"{run}@10", f"{run}@30"
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    for call in (
        ("cp", one, step),
        ("cp", one, one),
        ("average", one, "-o", step),
        ("export", one, step),
        ("import", tmp_path / "w.pt", step),
    ):
        assert "names a step of the run" in refused(*call)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "w.pt"]
    assert invoke("cp", one, tmp_path / "user@host").exit_code == 0
    for name in ("run@30.safetensors", "run@v2.safetensors"):
        assert invoke("export", one, tmp_path / name).exit_code == 0


@pytest.mark.parametrize("is_open", [True, False])
def test_a_store_that_does_not_answer_is_told_soon(
    tmp_path: Path, saved_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool
):
    """Not after the minutes for which a save tries again."""
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    monkeypatch.setattr(bounds, "FIRST_ANSWER_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for name, value in (("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s"), ("REGION", "r"),
                            ("ENDPOINT_URL", endpoint)):  # fmt: skip
            monkeypatch.setenv(f"AWS_{name}", value)
        if not is_open:
            silent.close()
        for command in (["ls", "s3://bucket/ls"], ["cp", saved_checkpoint, "s3://bucket/cp"],
                        ["import", tmp_path / "w.pt", "s3://bucket/import"]):  # fmt: skip
            began_s = time.monotonic()
            assert "the connection failed: check the endpoint" in refused(*command)
            # Far less than the minutes for which a save tries again.
            assert time.monotonic() - began_s < 100


# --- rm beside others -----------------------------------------------------------------------------

STATE = {"w": torch.ones(3)}


def step_1(root: Path) -> Any:
    return next(step for step in ray_dcp.open(root) if step.step == 1)


def meanwhile(monkeypatch: pytest.MonkeyPatch, happens: Any) -> None:
    """Does something while the user reads what is about to be deleted."""
    monkeypatch.setattr(writing, "agree", lambda what, *, yes: happens())


def test_a_checkpoint_that_is_committed_while_the_user_reads_the_prompt_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "step-7"
    place.mkdir()
    (place / "__0_0.0123456789abcdef.distcp").write_bytes(b"crashed")
    meanwhile(monkeypatch, lambda: ray_dcp.save(STATE, checkpoint_id=place))
    found = invoke("rm", str(place))
    assert found.exit_code == 2
    assert "stands there by now" in found.output
    assert ray_dcp.verify(place).ok


def saved(root: Path, **first: Any) -> Path:
    with CheckpointManager(root, 1) as manager:
        manager.save(1, STATE, **first)
        manager.save(2, STATE)
    return root


def test_a_step_that_is_being_read_stays_unless_forced(tmp_path: Path) -> None:
    with ReaderLease(Root(absolute_target(saved(tmp_path))), 1, lease_s=30.0):
        found = invoke("rm", f"{tmp_path}@1", "--yes")
        assert found.exit_code == 2
        assert "is being read by process" in found.output
        assert ray_dcp.verify(tmp_path / "step-00000001").ok
        assert invoke("rm", f"{tmp_path}@1", "--yes", "--force").exit_code == 0
    assert [step.step for step in ray_dcp.open(tmp_path) if step.is_readable] == [2]


def test_a_reader_whose_process_is_gone_holds_nothing(tmp_path: Path) -> None:
    with ReaderLease(Root(absolute_target(saved(tmp_path))), 1, lease_s=30.0):
        (lease,) = (tmp_path / ".manager" / "reading").iterdir()
        found = LeaseHolder.decode(lease.read_bytes())
    assert found is not None
    gone = LeaseHolder(found.machine, found.pid, "before", found.host)
    lease.parent.mkdir(exist_ok=True)
    lease.write_bytes(gone.encode())
    assert invoke("rm", f"{tmp_path}@1", "--yes").exit_code == 0


def test_the_number_of_an_item_s_folder_is_no_step(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, 1, items={"model": Item()}) as manager:
        for value in range(4):
            state = {"model": {"w": torch.full((3,), float(value))}}
            manager.save(1, state, replace=value > 0)
        manager.tag(1, "keep")
    assert (tmp_path / "step-00000001" / "model.3").is_dir()
    assert "expected step 3" in invoke("rm", f"{tmp_path}@3", "--yes").output
    assert "step-00000001: a checkpoint of ray_dcp" in invoke("show", f"{tmp_path}@latest").output
    state = {"model": {"w": torch.zeros(3)}}
    with CheckpointManager(tmp_path, 1, items={"model": Item()}) as manager:
        manager.restore(1, state)
    assert state["model"]["w"].tolist() == [3, 3, 3]


def test_the_tags_and_the_info_of_a_step_that_was_saved_again_meanwhile_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path, 1, order="any") as manager:
        manager.save(1, STATE, tags=["good"], metrics={"loss": 2.0})
        manager.save(2, STATE)
        deletes = LocalStorage.delete

        def delete(storage: LocalStorage, keys: Any) -> Any:
            # What a delete removes after its record: now the number is free for the job.
            gone = deletes(storage, keys)
            if any(str(key).endswith(".distcp") for key in keys):
                monkeypatch.undo()
                manager.save(1, STATE, tags=["good"], metrics={"loss": 1.0})
            return gone

        monkeypatch.setattr(LocalStorage, "delete", delete)
        found = invoke("rm", f"{tmp_path}@1", "--yes", "--force")
        assert found.exit_code == 0, found.output
    # The catalogue remembers what the info said: without it, the info itself is read.
    (tmp_path / ".manager" / "catalogue.json").unlink()
    step = step_1(tmp_path)
    assert (step.tags, dict(step.metrics)) == (("good",), {"loss": 1.0})


@pytest.mark.parametrize("refused", [StorageError("the disk is read-only"), KeyboardInterrupt()])
def test_a_deletion_that_fails_gives_the_tags_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: BaseException
) -> None:
    saved(tmp_path, tags=["good"])
    interpose(monkeypatch, LocalStorage, "write", "*/manifest-*", refused, times=None)
    assert invoke("rm", f"{tmp_path}@1", "--yes", "--force").exit_code != 0
    assert step_1(tmp_path).tags == ("good",)
    assert ray_dcp.verify(tmp_path / "step-00000001").ok


# --- several runs below one directory -------------------------------------------------------------


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of three steps, whose frozen tensor is the same within a run, and a single one."""
    root = tmp_path_factory.mktemp("runs")
    for name, value in (("lr-1", 1.0), ("deep/lr-2", 2.0)):
        with ray_dcp.CheckpointManager(root / name, 1) as manager:
            for step in (9, 10, 11):
                state = {"w": torch.full((4,), value * step), "frozen": torch.full((99,), value)}
                manager.save(step, state, metrics={"loss": abs(step - 9 - value)})
            manager.join()
        ray_dcp.open_run(root / name).tag(9, f"first-of-{name[-4:]}").annotate(10, f"noted {value}")
    ray_dcp.save({"w": torch.ones(4)}, checkpoint_id=root / "final")
    return root


Told = Callable[..., str]


@pytest.fixture
def told() -> Told:
    def run(*words: object) -> str:
        found = CliRunner().invoke(main, [*map(str, words)])
        assert found.exit_code == 0, found.output
        return found.output

    return run


def test_new_bytes_are_those_of_the_step_before_in_the_same_run(parent: Path, told: Told):
    rows = {row["name"]: row for row in json.loads(told("ls", parent, "--json"))}
    assert list(rows) == [
        "final",
        *(f"{run}/step-{step:08d}" for run in ("deep/lr-2", "lr-1") for step in (9, 10, 11)),
    ]
    for run in ("deep/lr-2", "lr-1"):
        first, *others = (rows[f"{run}/step-{step:08d}"]["new_bytes"] for step in (9, 10, 11))
        assert first > 99 * 4
        assert all(0 < other < 99 * 4 for other in others)


def test_a_view_has_the_runs_with_names_tags_and_best_steps_of_their_own(parent: Path):
    run = ray_dcp.open_run(parent)
    own, deep, flat = run.runs
    assert [step.name for step in own] == ["final"]
    assert deep.url == f"{parent}/deep/lr-2"
    assert deep["first-of-lr-2"].url == f"{deep.url}/step-00000009"
    assert [one.best("loss").step for one in (deep, flat)] == [11, 10]
    assert deep.step("latest").note == ""
    assert deep.step(10).note == "noted 2.0"
    assert [one.run_place.url for one in flat] == [flat.url] * 3
    assert deep.runs == (deep,)


def test_an_item_is_compared_with_that_item_of_the_step_before(tmp_path: Path):
    from ray_dcp.manager import Item

    with ray_dcp.CheckpointManager(tmp_path, items={"a": Item(), "b": Item()}) as manager:
        for step in (9, 10):
            manager.save(step, {name: {name: torch.ones(9)} for name in "ab"})
        manager.join()
    run = ray_dcp.open_run(tmp_path)
    steps = {step.name: step for step in run}
    later, earlier = (f"step-{step:08d}" for step in (10, 9))
    assert len(run.runs) == 1
    for item in ("", "/a", "/b"):
        assert run.before(steps[f"{later}{item}"]) is steps[f"{earlier}{item}"]
        assert run.before(steps[f"{earlier}{item}"]) is None


def test_latest_of_a_directory_of_runs_names_the_runs(parent: Path, tmp_path: Path):
    (tmp_path / "lr-1").symlink_to(parent / "lr-1")
    found = CliRunner().invoke(main, ["diff", f"{parent / 'deep'}@latest", f"{parent}@latest"])
    assert found.exit_code == 2
    assert f"1 runs below it: lr-2; name one of them, as {parent}/deep/lr-2@latest" in found.stderr


def test_doctor_and_du_and_the_report_know_the_runs(parent: Path, told: Told, tmp_path: Path):
    findings = json.loads(told("doctor", parent, "--json"))["findings"]
    names = [one["what"] for one in findings if one["level"] == "ok"]
    assert names == ["versions", "reading", "latest", "deep/lr-2@latest", "lr-1@latest"]
    usage = json.loads(told("du", parent, "--json"))
    assert usage["total"]["other"] == 0
    told("report", parent, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("</table>") == 3
    assert page.count("deep/lr-2") > 2


def test_verify_names_the_newest_good_step_of_each_run(parent: Path, told: Told):
    lines = told("verify", parent).splitlines()[-3:]
    assert lines == [
        "newest good of .: final",
        "newest good of deep/lr-2: step 11",
        "newest good of lr-1: step 11",
    ]
    newest = printed("verify", parent)["newest_good"]
    assert newest == {".": "final", "deep/lr-2": 11, "lr-1": 11}
    assert told("verify", parent / "lr-1").splitlines()[-1] == "newest good: step 11"


def test_where_no_step_is_good_verify_says_so(run: Path):
    for step in run.iterdir():
        os.truncate(checkpoints.data_file(step), 10)
    assert invoke("verify", run).stdout.splitlines()[-1] == "newest good: none"
    assert printed("verify", run, exit_code=1)["newest_good"] is None
