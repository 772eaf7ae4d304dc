"""Every verb, on each kind of checkpoint, prints what the golden files hold."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import ray_dcp
from ray_dcp.cli import listing
from ray_dcp.cli.main import main
from ray_dcp.format.save_trace import RankTimes, Span, encode_trace, make_trace, trace_key
from ray_dcp.format.step_info import StepInfo, encode_info, info_key
from tests.support import big_views, checkpoints, cli_story

LONG = [
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


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_screen(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of checkpoints that are given: no two saves take as long. See tests/golden/README.md."""
    for step, changed in ((7, 0), (8, 3)):
        attempt = f"{step:016x}"
        table = big_views.table(64, 4, attempt, changed=changed, files=4)
        for run in ("run", "wide"):
            path = big_views.checkpoint(tmp_path / run / f"step-{step}", table, attempt)
        info = StepInfo(step=step, created_s=1e9, metrics=dict.fromkeys(LONG, float(step)))
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
    screens = on_screen(columns, tmp_path, [
        ["ls", run], ["ls", tmp_path], ["show", run], ["show", tmp_path],
        ["show", f"{run}@8"], ["show", f"{run}@8", "--tensor", "*.0.*"],
        ["diff", f"{run}@7", f"{run}@8"],
        ["reshard", f"{run}@8", "--to", "2"], ["timeline", f"{run}@8"], ["du", run],
        ["watch", run, "--looks", "1"], ["tag", f"{run}@8"], ["rm", f"{run}@7", "--dry-run"],
        ["gc", run, "--dry-run"], ["metadata", f"{run}@8", "--dry-run"],
        ["average", run, "--last", "2", "-o", f"{tmp_path}/mean", "--dry-run"],
    ])  # fmt: skip
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
    cli_story.compare(f"plain-{columns}", told, renew="RENEW_GOLDEN" in os.environ)


def on_screen(columns: int, root: Path, commands: list[list[object]]) -> str:
    """Returns what commands print on a screen of so many columns."""
    told = []
    for command in commands:
        words = [str(word) for word in command]
        found = CliRunner().invoke(main, words, env={"COLUMNS": str(columns)})
        status = f"[exit status {found.exit_code}]\n" if found.exit_code else ""
        told.append(f"$ ray-dcp {' '.join(words)}\n{found.output}{status}")
    return "\n".join(told).replace(str(root), "TMP")
