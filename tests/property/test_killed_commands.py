"""Every verb of the command that writes, killed at its calls of the operating system, and repeated.

The repeated command ends with 0, and what it leaves equals what an undisturbed one leaves: the same
values, the same files (but for ids of attempts and numbers of slots), no file of the dead one.
Set RAY_DCP_THOROUGH to kill at every call, by every signal.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_dcp
from ray_dcp.manager import Item
from tests.support import checkpoints

SIGNALS = {"SIGKILL": -9, "SIGTERM": 143, "SIGHUP": 129}
IS_THOROUGH = bool(os.environ.get("RAY_DCP_THOROUGH"))


@dataclass(frozen=True)
class Verb:
    """A command line; `{to}` is the folder of the case, `{from}` that of the sources."""

    name: str
    line: str
    changes: str = ""
    """The source that the command changes, and that each case therefore has a copy of."""
    by: tuple[str, ...] = ("SIGKILL", "SIGTERM", "SIGHUP")
    """The signals: a function of Python catches none."""


VERBS = (
    Verb("cp", "cp {from}/run@2 {to}/copy"),
    Verb("cp.stock", "cp {from}/stock {to}/copy"),
    Verb("cp.hub", "cp {from}/hub {to}/copy"),
    Verb("cp.items", "cp {from}/items@1 {to}/copy"),
    Verb("cp.run", "cp {from}/run {to}/copy"),
    Verb("average", "average {from}/run@1 {from}/run@2 -o {to}/mean"),
    Verb("import.torch", "import {from}/w.pt {to}/new"),
    Verb("import.hub", "import {from}/hub {to}/new"),
    Verb("export.safetensors", "export {from}/run@2 {to}/w.safetensors"),
    Verb("export.torch", "export {from}/run@2 {to}/w.pt --format torch"),
    Verb("export.hf", "export {from}/run@2 {to}/hub --format hf"),
    Verb("export.dcp", "export {from}/run@2 {to}/dcp --format dcp"),
    Verb("export.dcp.cast", "export {from}/run@2 {to}/dcp --format dcp --dtype bf16"),
    Verb("tag", "tag {to}/run@2 good --note fine", changes="run"),
    Verb("tag.remove", "tag {to}/run@1 release --remove", changes="run"),
    Verb("gc", "gc {to}/run --abort-unfinished --yes", changes="run"),
    Verb("rm", "rm {to}/run@1 --yes --force", changes="run"),
    Verb("metadata", "metadata {to}/plain", changes="plain"),
    Verb("python.copy", "ray_dcp.copy {from}/run/step-00000002 {to}/copy", by=("SIGKILL",)),
    Verb("python.export", "ray_dcp.export {from}/plain {to}/w.safetensors", by=("SIGKILL",)),
    Verb("python.average", "ray_dcp.average {from}/run@1 {from}/run@2 {to}/mean", by=("SIGKILL",)),
)


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((8, 4), float(step)), "b": torch.arange(3.0)}, "step": step}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp("from")
    with ray_dcp.CheckpointManager(root / "run", 1, chkpt_on_preemption=False) as manager:
        for step in (1, 2):
            manager.save(step, state(step), metrics={"loss": step})
    ray_dcp.open_run(root / "run").tag(1, "release").annotate(2, "a note")
    (root / "run" / "step-00000002" / "__0_7.00000000000000aa.distcp").write_bytes(b"of a crash")
    with ray_dcp.CheckpointManager(
        root / "items", 1, items={"model": Item(), "more": Item()}, chkpt_on_preemption=False
    ) as manager:
        manager.save(1, {"model": state(1)["model"], "more": {"n": 1}})
    checkpoints.save_stock(root / "stock", state(3))
    (root / "hub").mkdir()
    for name in "ab":
        save_file({name: torch.ones(3)}, root / "hub" / f"{name}.safetensors")
    torch.save(state(4), root / "w.pt")
    options = ray_dcp.SaveOptions(stock_metadata=False)
    ray_dcp.save(state(5), checkpoint_id=root / "plain", options=options)
    return root


class Commands:
    """A warm process that forks a child for each command."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.killed_commands"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def run(
        self, arguments: list[str], folder: Path, at: int | None = None, by: str = "SIGKILL"
    ) -> dict[str, Any]:
        """Runs a command line; see `killed_commands.run_command`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        case = {"arguments": arguments, "folder": str(folder), "at": at, "signal": by}
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with closing(Commands()) as made:
        yield made


_ID = re.compile(r"[0-9a-f]{16}")
_SLOT = re.compile(r"(manifest|step-info)-\d{8}")


def left_at(folder: Path) -> dict[str, Any]:
    """Returns what is in a folder: values of checkpoints, names of files, bytes of other files."""
    names: Counter[str] = Counter()
    found: dict[str, Any] = {"names": names}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            names[f"{name}/"] += not any(path.iterdir())
            if any(path.glob("manifest-*")) or (path / ".metadata").exists():
                found[name] = _values(path)
            continue
        if "-probe-" in name and not path.stat().st_size:
            continue  # an empty file, which a later look at what the filesystem can do removes
        known = _SLOT.sub(r"\1-N", _ID.sub("ID", name))
        if known.endswith("/reserve"):
            continue
        if ".manager/" in name and path.name.startswith(".tmp-"):
            continue  # a tag or note that was not published, which nobody reads
        # Why once: an attempt that was ended has left a record, which says so.
        names[known] = 1 if "manifest-N" in known else names[known] + 1
        if name.endswith((".safetensors", ".pt")) or ".manager/" in name:
            found[known] = _read_file(path)
    for known in [known for known in names if "trace.ID" in known]:
        # Why: a trace is of the process that committed, which may not have come to write it. More
        # than one would be left by another.
        names[known] = max(0, names[known] - 1)
    for key in [key for key in found if key.endswith(("reserve", "catalogue")) or "writer-" in key]:
        del found[key]
    return found


def _values(path: Path) -> Any:
    try:
        view = ray_dcp.open_checkpoint(path)
    except ray_dcp.CheckpointNotFoundError:
        return "deleted"
    assert view.verify().ok
    digests = {name: sha256(view[name].raw(...).tobytes()).hexdigest() for name in view.tensors}
    return digests, sorted(view.objects)


def _read_file(path: Path) -> Any:
    """Returns what a file holds: an archive of torch.save has the name of a temporary file."""
    if path.suffix != ".pt":
        return sha256(path.read_bytes()).hexdigest()
    state = torch.load(path)
    return {"step": state["step"]} | {k: v.tolist() for k, v in state["model"].items()}


def fresh(verb: Verb, sources: Path, folder: Path) -> list[str]:
    """Prepares the folder of a case, and returns the arguments of its command."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    if verb.changes:
        shutil.copytree(sources / verb.changes, folder / verb.changes)
    return verb.line.replace("{from}", str(sources)).replace("{to}", str(folder)).split()


@pytest.mark.parametrize("verb", VERBS if IS_THOROUGH else VERBS[::3], ids=lambda verb: verb.name)
def test_a_command_that_was_killed_is_repeated_and_ends_as_if_nothing_had_been(
    verb: Verb, sources: Path, commands: Commands, tmp_path: Path
):
    """The whole, with RAY_DCP_THOROUGH: each call, each signal."""
    arguments = fresh(verb, sources, tmp_path / "to")
    undisturbed = commands.run(arguments, tmp_path)
    assert undisturbed["status"] == 0, undisturbed["output"]
    expected, calls = left_at(tmp_path / "to"), undisturbed["calls"]
    assert calls > 0
    # A sample: one call of each verb, at another part of its work and by another signal than the
    # neighbour's.
    place = VERBS.index(verb)
    chosen = range(calls) if IS_THOROUGH else [calls * (3 + place % 5) // 8]
    wrong, reached = [], Counter[int]()
    for at in chosen:
        for by in verb.by if IS_THOROUGH else [verb.by[place % len(verb.by)]]:
            fresh(verb, sources, tmp_path / "to")
            killed = commands.run(arguments, tmp_path, at, by)
            reached[killed["status"]] += 1
            # Why not one that ended with 0: CPython may handle a signal only after its last call.
            again = commands.run(arguments, tmp_path) if killed["status"] else killed
            told = f"{by} at call {at} of {calls} ({killed['status']}): "
            if killed["status"] not in (SIGNALS[by], 0):
                wrong.append(told + killed["output"])
            if again["status"]:
                wrong.append(told + again["output"])
            elif (found := left_at(tmp_path / "to")) != expected:
                wrong.append(told + _difference(found, expected))
    assert not wrong, f"{len(wrong)} of {reached}:\n" + "\n".join(wrong[:12])
    assert reached.keys() - {0}, "nothing was killed"
    print(f"\n{verb.name}: {calls} calls, {dict(reached)}")


def _difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    told = [f"{key}: {found.get(key)} for {expected.get(key)}" for key in {*found, *expected}
            if key != "names" and found.get(key) != expected.get(key)]  # fmt: skip
    names = (found["names"] - expected["names"], expected["names"] - found["names"])
    return f"too many {dict(names[0])}, missing {dict(names[1])}; {told}"
