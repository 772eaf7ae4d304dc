"""Several runs below one directory: each has steps, marks, tags and comparisons of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import ray_dcp
from ray_dcp.cli.main import main
from tests.unit.test_cli_json import printed

METRICS = [
    "loss", "validation/perplexity_on_held_out_set", "validation/accuracy_on_held_out_set",
    "train/gradient_norm_before_clipping", "train/tokens_per_second_per_gpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of three steps, whose frozen tensor is the same within a run, and a single one."""
    root = tmp_path_factory.mktemp("runs")
    for name, value in (("lr-1", 1.0), ("deep/lr-2", 2.0)):
        with ray_dcp.CheckpointManager(root / name, 1) as manager:
            for step in (9, 10, 11):
                state = {"w": torch.full((4,), value * step), "frozen": torch.full((99,), value)}
                metrics = dict.fromkeys(METRICS, abs(step - 9 - value))
                manager.save(step, state, metrics=metrics)
            manager.join()
        ray_dcp.open_run(root / name).tag(9, f"first-of-{name[-4:]}").annotate(10, f"noted {value}")
    ray_dcp.save({"w": torch.ones(4)}, checkpoint_id=root / "final")
    return root


Told = Callable[..., str]


@pytest.fixture
def told() -> Told:
    def run(*words: object, columns: int = 0) -> str:
        env = {"COLUMNS": str(columns) if columns else None}
        found = CliRunner().invoke(main, [*map(str, words)], env=env)
        assert found.exit_code == 0, found.output
        return found.output

    return run


def test_ls_has_a_table_for_each_run_with_its_own_latest_and_best(parent: Path, told: Told):
    parts = told("ls", parent).split("\n\n")
    assert [part.splitlines()[0] for part in parts] == [
        ".: 1 checkpoint", "deep/lr-2: 3 checkpoints", "lr-1: 3 checkpoints",
    ]  # fmt: skip
    for part, number in ((parts[1], 2), (parts[2], 1)):
        rows = [line for line in part.splitlines() if line.startswith("step-")][:3]
        assert [row.split()[0] for row in rows] == [f"step-{step:08d}" for step in (9, 10, 11)]
        assert "latest" in rows[2]
        assert f"first-of-lr-{number}" in rows[0]
        assert f"step-00000010: noted {number}.0" in part


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
    screen = told("doctor", parent, columns=80)
    assert max(map(len, screen.splitlines())) <= 80
    told("report", parent, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("</table>") == 3
    assert page.count("deep/lr-2") > 2


@pytest.mark.parametrize("columns", [40, 100, 222])
def test_no_table_is_wider_than_the_screen_and_what_is_left_out_is_named(
    parent: Path, told: Told, columns: int
):
    text = told("ls", parent, columns=columns)
    assert max(map(len, text.splitlines())) <= columns
    for part in text.split("\n\n")[1:]:
        lines = part.splitlines()
        head = lines[1 : [line.startswith("step-") for line in lines].index(True)]
        note = part.partition("left out: ")[2].partition("(a wider")[0]
        left_out = {name.strip() for name in note.replace("\n", " ").split(",")} - {""}
        assert ("LOSS" in " ".join(head).split()) == ("loss" not in left_out)
        assert bool(left_out) == (columns < 222)


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
