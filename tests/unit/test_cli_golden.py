"""Every verb, on each kind of checkpoint, prints what the golden files hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from ray_dcp.cli import listing
from ray_dcp.cli.main import main
from ray_dcp.format.save_trace import RankTimes, Span, encode_trace, make_trace, trace_key
from ray_dcp.format.step_info import StepInfo, encode_info, info_key
from tests.support import big_views, cli_story

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
    run, told = f"{tmp_path}/run", []
    for words in (
        ["ls", run], ["ls", tmp_path], ["show", run], ["show", tmp_path],
        ["show", f"{run}@8"], ["show", f"{run}@8", "--tensor", "*.0.*"],
        ["diff", f"{run}@7", f"{run}@8"],
        ["reshard", f"{run}@8", "--to", "2"], ["timeline", f"{run}@8"], ["du", run],
        ["watch", run, "--looks", "1"], ["tag", f"{run}@8"], ["rm", f"{run}@7", "--dry-run"],
        ["gc", run, "--dry-run"], ["metadata", f"{run}@8", "--dry-run"],
        ["average", run, "--last", "2", "-o", f"{tmp_path}/mean", "--dry-run"],
    ):  # fmt: skip
        found = CliRunner().invoke(main, [*map(str, words)], env={"COLUMNS": str(columns)})
        assert found.exit_code == 0, found.output
        told.append(
            f"$ ray-dcp {' '.join(map(str, words))}\n{found.output}".replace(str(tmp_path), "TMP")
        )
    assert max(len(line) for text in told for line in text.splitlines()) <= columns
    cli_story.compare(f"screens-{columns}", "\n".join(told), renew="RENEW_GOLDEN" in os.environ)
