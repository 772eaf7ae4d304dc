"""Every verb of `ray-dcp` on one run, as text to compare: what was typed, printed and returned.

What differs from run to run (attempts, ages, durations, sizes that hold compressed tables) is
replaced by words; runs of spaces become one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from click.testing import CliRunner

import ray_dcp
from ray_dcp.cli.main import main
from ray_dcp.store.opening import open_storage
from tests.support import checkpoints

__all__ = ["commands", "make_ours", "make_safetensors", "make_stock", "tell"]

GOLDEN = Path(__file__).parents[1] / "golden"

_RULES = [
    (re.compile(r"\b[0-9a-f]{16}\b"), "ATTEMPT"),
    (re.compile(r'("(?:age_s|created_s|began_s|stall_s|durable_s)": )[0-9.e+-]+'), r"\1SECONDS"),
    (re.compile(r"\b\d+(?:\.\d+)? (?:ms|s|min)\b"), "DURATION"),
    (re.compile(r"(?<= )\d+[smhd](?=\s)"), "AGE"),
    (re.compile(r"\b\d+(?:\.\d+)? (?:[KMG]iB)/s"), "SPEED"),
    (re.compile(r"^(\W*versions|ok +versions).*$", re.MULTILINE), "ok versions VERSIONS"),
    (re.compile(r"python 3\.\d+\.\d+,[^\"\n]*"), "VERSIONS"),
    (re.compile(r"[ \t]+"), " "),
]
_LOOSE = ("ls", "du", "rm", "gc", "watch", "doctor", "cp")
"""Commands whose sizes are those of whole folders, with compressed tables in them."""
_SIZES = [
    (re.compile(r"\b\d+(?:\.\d+)? (?:B|[KMG]iB)\b"), "SIZE"),
    (re.compile(r'("(?:num_bytes|data|left|records|other|checked_bytes)": )\d+'), r"\1BYTES"),
]


def values(step: int) -> dict[str, object]:
    """Returns what is saved at a step: something frozen, something that changes, an object."""
    return {
        "model": {
            "weight": torch.full((64, 8), float(step)),
            "half": torch.arange(6, dtype=torch.bfloat16) * step,
            "frozen": torch.arange(100.0),
        },
        "step": step,
    }


def make_ours(root: object) -> None:
    """Saves two steps with metrics, tags and a note; of a third one a crash has left a file."""
    with ray_dcp.CheckpointManager(root, 1) as manager:
        for step, loss in ((100, 0.5), (200, 0.25)):
            manager.save(step, values(step), metrics={"loss": loss})
        manager.join()
    run = ray_dcp.open(root)
    run.tag(100, "before-lr-drop").annotate(200, "the good one")
    left = ray_dcp.Location(str(root)) / "step-00000300"
    storage = open_storage(left)
    storage.write("__0_0.00000000000000aa.distcp", b"left by a crash")


def make_stock(root: Path) -> None:
    """Saves two steps with stock DCP."""
    for step in (100, 200):
        checkpoints.save_stock(root / f"step-{step}", values(step))


def make_safetensors(root: Path) -> None:
    """Writes two folders as the Hugging Face hub has them."""
    from safetensors.torch import save_file

    for step in (100, 200):
        (root / f"step-{step}").mkdir(parents=True)
        tensors = {f"model.{k}": v for k, v in values(step)["model"].items()}
        save_file(tensors, root / f"step-{step}" / "model.safetensors")


def commands(run: str, work: Path, names: Sequence[str], *, ours: bool) -> list[list[str]]:
    """Returns every verb, first those that read.

    Args:
        run: Path or URL of the run.
        work: A directory of this machine for what is written.
        names: Of its two step folders.
        ours: ray_dcp saved it.
    """
    a, b = f"{run}@100", f"{run}@latest"
    told = [
        ["ls", run],
        ["ls", run, "--brief"],
        ["ls", run, "--json"],
        ["show", b],
        ["show", f"{run}/{names[1]}", "--tensor", "*.w*"],
        ["show", b, "--tree", "--depth", "2"],
        ["show", b, "--json"],
        ["diff", a, b],
        ["diff", a, b, "--values", "--all"],
        ["diff", a, b, "--hashes-only"],
        ["diff", a, b, "--json", "--tensor", "*.weight"],
        ["verify", a],
        ["verify", b, "--json"],
        ["verify", run],
        ["verify", run, "--json"],
        ["reshard", b, "--to", "2"],
        ["reshard", b, "--to", "2x2", "--json", "--tensor", "*.weight"],
        ["du", run],
        ["du", run, "--json"],
        ["doctor", run],
        ["watch", run, "--looks", "1"],
        ["watch", run, "--looks", "1", "--json"],
        ["tag", a],
        ["export", b, str(work / "w.safetensors"), "--tensor", "model.*", "--dry-run"],
        ["export", b, str(work / "w.safetensors"), "--tensor", "model.*", "--dtype", "bf16"],
        ["show", str(work / "w.safetensors")],
        ["export", b, str(work / "hub"), "--format", "hf", "--model-only"],
        ["show", str(work / "hub")],
        ["export", b, str(work / "w.pt"), "--format", "torch"],
        ["export", b, str(work / "dcp"), "--format", "dcp"],
        ["verify", str(work / "dcp")],
        ["import", str(work / "w.pt"), str(work / "imported"), "--dry-run"],
        ["import", str(work / "w.pt"), str(work / "imported")],
        ["diff", b, str(work / "imported")],
        ["cp", a, str(work / "copy"), "--dry-run"],
        ["cp", a, str(work / "copy"), "--verify"],
        ["diff", a, str(work / "copy"), "--exit-code"],
        ["cp", run, str(work / "runs"), "--verify"],
        ["cp", run, str(work / "runs")],
        ["average", run, "--last", "2", "--ema", "0.5", "-o", str(work / "mean"), "--dry-run"],
        ["average", a, b, "--weights", "1,3", "-o", str(work / "mean"), "--dtype", "float32"],
        ["show", str(work / "mean")],
        ["verify", str(work / "mean")],
        ["average", a, run, "-o", str(work / "mean2")],
        ["tag", a, "kept", "--note", "look here", "--dry-run"],
        ["tag", a, "kept", "--note", "look here"],
        ["tag", a],
        ["rm", a, "--dry-run"],
        ["tag", a, "kept", "before-lr-drop", "--remove"],
        ["rm", a, "--dry-run"],
        ["rm", a],
        ["rm", a, "--yes"],
        ["gc", run, "--dry-run"],
        ["gc", run, "--abort-unfinished", "--yes"],
        ["ls", run, "--brief"],
        ["metadata", b, "--dry-run"],
    ]
    if ours:
        told[9:9] = [["timeline", b, "--json"], ["show", f"{run}@best"]]
    return told


def tell(todo: Sequence[Sequence[str]], words: dict[str, str]) -> str:
    """Runs commands and returns what they printed, with what differs each time replaced.

    Args:
        todo: Commands, in order.
        words: What each path or URL is called.
    """
    told = []
    for arguments in todo:
        found = CliRunner().invoke(main, list(arguments), env={"COLUMNS": None})
        if arguments[0] == "timeline":
            output = f"{len(found.output) > 200}\n"  # its form is tested elsewhere
        else:
            output = normal(found.output, loose=arguments[0] in _LOOSE)
        text = f"$ ray-dcp {' '.join(arguments)}\n{output}"
        if found.exit_code:
            text += f"[exit status {found.exit_code}]\n"
        for path, word in sorted(words.items(), key=lambda pair: -len(pair[0])):
            text = text.replace(path, word)
        told.append(text)
    return "\n".join(told)


def compare(name: str, found: str, *, renew: bool) -> None:
    """Holds text against a golden file, or writes it."""
    path = GOLDEN / f"{name}.txt"
    if renew:
        path.write_text(found)
    assert found == path.read_text(), "see tests/golden/README.md"


def normal(text: str, *, loose: bool) -> str:
    """Returns an output with words in place of what differs each time."""
    for rule, word in [*_RULES, *(_SIZES if loose else [])]:
        text = rule.sub(word, text)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())
