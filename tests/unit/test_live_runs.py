"""Runs that are looked at, verified and copied while their job replaces and deletes steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import ray_dcp
from ray_dcp.cli.main import main
from ray_dcp.errors import CheckpointNotFoundError
from ray_dcp.manager import CheckpointManager, Item
from ray_dcp.store.local import LocalStorage
from tests.support import checkpoints
from tests.support.storages import interpose


def save(path: Path, value: float = 1.0) -> None:
    ray_dcp.save({"w": torch.full((64,), value)}, checkpoint_id=path, no_dist=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save(tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


@pytest.mark.parametrize(("becomes", "state"), [(save, "committed"), (ray_dcp.delete, "deleted")])
def test_a_step_that_is_replaced_or_deleted_while_its_run_is_listed_is_not_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch, becomes: Callable, state: str
):
    done = interpose(
        monkeypatch, LocalStorage, "read", "*/step-2/manifest-*", lambda: becomes(run / "step-2")
    )
    steps = ray_dcp.open(run)
    assert done
    assert [step.state for step in steps] == ["committed", state, "committed"]


def test_a_checkpoint_that_is_replaced_while_it_is_verified_is_verified_anew(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    done = interpose(
        monkeypatch, LocalStorage, "read", "*.distcp", lambda: save(run / "step-2", 2.0)
    )
    report = ray_dcp.verify(run / "step-2")
    assert done
    assert report.ok, report


def test_a_checkpoint_that_is_deleted_while_it_is_verified_is_gone_and_not_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    done = interpose(
        monkeypatch, LocalStorage, "read", "*.distcp", lambda: ray_dcp.delete(run / "step-2")
    )
    with pytest.raises(CheckpointNotFoundError, match="it was deleted"):
        ray_dcp.verify(run / "step-2")
    assert done


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_step_that_goes_while_its_run_is_verified_is_no_damage(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    interpose(monkeypatch, LocalStorage, "read", "*.distcp", lambda: ray_dcp.delete(run / "step-3"))
    found = invoke("verify", run)
    assert found.exit_code == 0, found.output
    assert f"{run}/step-3: deleted meanwhile" in found.stdout
    assert found.stdout.count(": ok, ") == 2


@pytest.mark.parametrize(
    ("becomes", "left"),
    [
        (lambda step: ray_dcp.delete(step), "1 step: deleted meanwhile"),
        (lambda step: save(step, 2.0), "copied 3 steps"),
    ],
    ids=["deleted", "replaced"],
)
def test_a_run_is_copied_while_its_steps_are_replaced_and_deleted(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, becomes: Callable, left: str
):
    interpose(monkeypatch, LocalStorage, "open_writer", "*.distcp", lambda: becomes(run / "step-3"))
    found = invoke("cp", run, tmp_path / "copy", "--verify")
    assert found.exit_code == 0, found.output
    assert left in found.stdout
    states = {step.step: step.state for step in ray_dcp.open(tmp_path / "copy")}
    assert states == dict.fromkeys((1, 2) if "deleted" in left else (1, 2, 3), "committed")


@pytest.mark.parametrize("verb", ["cp", "export"])
def test_a_step_of_a_manager_stays_while_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
):
    """Retention finds the reader's lease."""
    root, state = tmp_path / "run", {"w": torch.ones(64)}
    manager = CheckpointManager(root, 1, max_to_keep=1, chkpt_on_preemption=False)
    with manager:
        manager.save(1, state)
        manager.join()
        method = {"cp": "open_writer", "export": "read_into"}[verb]
        done = interpose(
            monkeypatch, LocalStorage, method, "*.distcp",
            lambda: (manager.save(2, state), manager.join()),
        )  # fmt: skip
        found = invoke(verb, f"{root}@1", tmp_path / "out")
        assert done
        assert found.exit_code == 0, found.output
        assert not list((root / ".manager" / "reading").glob("*"))
        assert ray_dcp.verify(root / "step-00000001").ok


def test_a_copy_of_a_run_goes_on_where_it_was_interrupted(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ray_dcp.open(run).tag(1, "kept").annotate(2, "look").tag(3, "last")
    target = tmp_path / "copy"
    with monkeypatch.context() as patch:
        interpose(patch, LocalStorage, "open_writer", "*/step-3/*.distcp", KeyboardInterrupt())
        found = invoke("cp", run, target)
    assert found.exit_code == 130
    assert "copied 2 steps" in found.stdout
    assert [(one.step, one.tags, one.note) for one in ray_dcp.open(target)] == [
        (1, ("kept",), ""), (2, (), "look")
    ]  # fmt: skip
    before = {p: p.stat().st_mtime_ns for p in (target / "step-1").iterdir()}
    found = invoke("cp", run, target, "--json")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert (told["num_copied"], told["num_there"], told["num_checkpoints"]) == (1, 2, 1)
    assert before == {p: p.stat().st_mtime_ns for p in (target / "step-1").iterdir()}
    assert [one.tags for one in ray_dcp.open(target)] == [("kept",), (), ("last",)]
    save(run / "step-2", 5.0)
    found = invoke("cp", run, target)
    assert (found.exit_code, "expected nothing of a checkpoint" in found.stderr) == (2, True)


def test_copies_of_what_others_wrote_are_compared_byte_by_byte(tmp_path: Path):
    run, target = tmp_path / "run", tmp_path / "copy"
    for step in (1, 2):
        checkpoints.save_stock(run / f"step-{step}", {"w": torch.full((8,), float(step))})
    assert invoke("cp", run, target).exit_code == 0
    assert "2 steps: there already" in invoke("cp", run, target).stdout
    file = checkpoints.data_file(target / "step-1")
    checkpoints.flip(file, file.read_bytes().index(torch.ones(8).numpy().tobytes()))
    found = invoke("cp", run, target)
    assert (found.exit_code, "expected nothing of a checkpoint" in found.stderr) == (2, True)


def damage(step: Path) -> None:
    checkpoints.data_file(step).unlink()


def test_a_damaged_step_of_a_run_keeps_the_others_from_nothing(run: Path, tmp_path: Path):
    damage(run / "step-2")
    for verify in ([], ["--verify"]):
        found = invoke("cp", run, tmp_path / "copy", *verify)
        assert found.exit_code == 1, found.output
        assert "not copied: " in found.stdout
        assert "step-2" in found.stdout.rpartition("not copied: ")[2]
        assert [one.step for one in ray_dcp.open(tmp_path / "copy")] == [1, 3]
    (problem,) = json.loads(invoke("cp", run, tmp_path / "copy", "--json").stdout)["problems"]
    assert "is missing" in problem


def test_latest_says_which_step_it_is_and_when_a_newer_one_is_damaged(run: Path, tmp_path: Path):
    damage(run / "step-3")
    out = tmp_path / "w.safetensors"
    for command in (["show", f"{run}@latest"], ["export", f"{run}@latest", out],
                    ["cp", f"{run}@latest", tmp_path / "copy"],
                    ["diff", f"{run}@1", f"{run}@latest"],
                    ["reshard", f"{run}@latest", "--to", "2"],
                    ["tag", f"{run}@latest", "good"]):  # fmt: skip
        found = invoke(*command)
        assert found.exit_code == 0, found.output
        assert "step-2" in found.stdout
        assert "warning: step-2 is used as 'latest' because step-3 is damaged" in (found.stderr)
    found = invoke("verify", f"{run}@latest")
    assert (found.exit_code, f"{run}/step-3: 1 problem" in found.stdout) == (1, True)
    found = invoke("rm", f"{run}@latest", "--yes")
    assert (found.exit_code, "which step of" in found.stderr) == (2, True)
    assert [step.state for step in ray_dcp.open(run)] == ["committed", "committed", "damaged"]
    with pytest.warns(UserWarning, match="because step-3 is damaged"):
        assert ray_dcp.open(f"{run}@latest").url.endswith("step-2")


def test_the_best_step_that_is_damaged_is_not_passed_over_silently(tmp_path: Path):
    with CheckpointManager(tmp_path, 1, chkpt_on_preemption=False) as manager:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3)):
            manager.save(step, {"w": torch.ones(64)}, metrics={"loss": loss})
    damage(tmp_path / "step-00000002")
    found = invoke("show", f"{tmp_path}@best")
    assert (found.exit_code, "step-00000003" in found.stdout) == (0, True)
    assert "because step-00000002 is damaged" in found.stderr
    found = invoke("verify", f"{tmp_path}@best:loss")
    assert (found.exit_code, "step-00000002: 1 problem" in found.stdout) == (1, True)


def test_a_folder_below_a_run_is_neither_its_latest_nor_its_best_step(run: Path):
    with CheckpointManager(run / "old", 1, chkpt_on_preemption=False) as manager:
        manager.save(900, {"w": torch.ones(64)}, metrics={"loss": 0.1})
    assert f"{run}/step-3" in invoke("show", f"{run}@latest").stdout
    assert f"{run}/step-3" in invoke("rm", f"{run}@latest", "--dry-run").stdout
    found = invoke("show", f"{run}@best")
    assert (found.exit_code, "expected steps with metrics" in found.stderr) == (2, True)


def test_a_note_that_is_altered_on_its_way_is_read_again_and_a_damaged_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with CheckpointManager(tmp_path, 1, items={"m": Item()}, chkpt_on_preemption=False) as manager:
        manager.save(1, {"m": {"w": torch.ones(64)}}, metrics={"loss": 0.1})
    (tmp_path / ".manager" / "catalogue.json").unlink()
    (info,) = (tmp_path / "step-00000001").glob("step-info-*")
    data, read = info.read_bytes(), LocalStorage.read

    def altered(self: LocalStorage, key: str, *more: object) -> bytes:
        found = read(self, key, *more)
        return found[:-2] if key.endswith(info.name) and not seen and not seen.append(1) else found

    seen: list[int] = []
    monkeypatch.setattr(LocalStorage, "read", altered)
    assert ray_dcp.open(tmp_path).step(1).metrics == {"loss": 0.1}
    assert seen
    info.write_bytes(data[:-2])
    assert "its metrics and items are not known" in invoke("ls", tmp_path).stdout
    found = invoke("verify", f"{tmp_path}@1")
    assert (found.exit_code, info.name in found.stdout) == (1, True)
    found = invoke("cp", f"{tmp_path}@1", tmp_path / "copy")
    assert (found.exit_code, info.name in found.stderr) == (1, True)


@pytest.mark.parametrize(
    ("method", "name"),
    [("read", "manifest-"), ("read", "chunks."), ("read", ".distcp"), ("read_into", ".distcp")],
)
def test_a_load_reads_again_what_is_altered_once_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, name: str
):
    """Large tensors, small ones that are read together, slices and objects."""
    state = {f"w{i}": torch.full((300,), float(i)) for i in range(3)}
    state |= {"large": torch.arange(1 << 20), "object": "hello", "slab": torch.ones(64, 64)}
    ray_dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    inner, left = getattr(LocalStorage, method), list[str]()

    def altered(self: LocalStorage, key: str, *more: object) -> object:
        found = inner(self, key, *more)
        if not left or left[0] not in key or found == b"":
            return found
        left.clear()
        if method == "read":
            return bytes([found[0] ^ 1]) + found[1:]
        more[1][len(more[1]) // 2] ^= 1
        return None

    monkeypatch.setattr(LocalStorage, method, altered)
    for names in (["w0", "w1", "w2"], ["large"], ["object"], ["slab"]):
        left.append(name)
        found = {k: state[k] * 0 if k != "object" else "" for k in names}
        ray_dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
        assert not left or (method, name) == ("read", ".distcp")
        assert all(torch.equal(v, state[k]) for k, v in found.items() if k != "object")
        assert found.get("object", "hello") == "hello"
    left[:] = [name]
    view = ray_dcp.open(tmp_path)
    assert view["slab"][:, 3:5].sum() == 128
    assert view["object"] == "hello"
    assert not left
