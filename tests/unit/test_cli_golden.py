"""Every verb, on each kind of checkpoint, prints what the golden files hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import cli_story

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
