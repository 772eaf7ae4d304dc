"""Plain scripts of two ranks save without any Ray, and leave nothing but their checkpoints.

One of them is started by torchrun. It runs DCP's documented examples, too, with nothing but the
imports changed: one side loads what the other saved.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ray_dcp
from tests.support.processes import eventually, session_members
from tests.support.programs import dcp_examples_runner
from tests.support.programs.forks import REPOSITORY, plain_environment

SCRIPT = ("-m", "tests.support.programs.torchrun_script")


def told(printed: str) -> list[dict[str, Any]]:
    """Returns what ranks told, by rank."""
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    return sorted(map(json.loads, lines), key=lambda facts: facts["rank"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder in which two ranks have saved, what they told, and what they printed."""
    folder = tmp_path_factory.mktemp("torchrun")
    finished = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "--local-addr=127.0.0.1", *SCRIPT, "save", str(folder)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=REPOSITORY, timeout=400,
        env=plain_environment(OMP_NUM_THREADS="1"), check=False, start_new_session=True,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    ranks = told(finished.stdout)
    assert [facts["rank"] for facts in ranks] == [0, 1], finished.stdout
    return folder, ranks, finished.stdout


def test_two_ranks_save_without_ray_and_one_loads_the_same(saved, programs):
    folder, (one, other), _ = saved
    assert one["session"] == other["session"]
    assert not one["has_ray"]
    assert not other["has_ray"]
    # torchrun was the first process of its own session.
    assert eventually(lambda: not session_members(one["torchrun"]))
    assert one["digests"] == other["digests"]
    assert ray_dcp.open(folder / "all").world_size == 2
    (ended,) = programs.run(*SCRIPT, "load", str(folder), ranks=1, env=plain_environment())
    assert ended.returncode == 0, ended.stderr
    (alone,) = told(ended.stdout)
    assert alone["digests"] == one["digests"]
    assert alone["session"] is None


def test_a_group_of_one_and_a_process_without_group_save_beside_the_others(saved):
    folder, _, printed = saved
    for rank in range(2):
        found = {"w": torch.zeros(5, dtype=torch.int64), "note": ""}
        ray_dcp.load(found, checkpoint_id=folder / f"rank-{rank}", no_dist=True)
        assert found["w"].tolist() == [rank] * 5
        assert found["note"] == f"rank {rank}"
        assert ray_dcp.open(folder / f"rank-{rank}").world_size == 1
    assert sorted(ray_dcp.open(folder / "both").tensors) == ["of 0", "of 1"]
    assert "refused: " in printed
    assert "rank 1" in printed
    assert not (folder / "nobody").exists()


def test_the_examples_of_dcp_work_and_understand_each_other(saved):
    folder, ranks, _ = saved
    for facts in ranks:
        assert len(facts["equal"]) == 9 + 2
        assert all(facts["equal"].values()), facts["equal"]

    # The same checkpoints in one process, without FSDP and without a group.
    state = ray_dcp.read_state_dict(folder / "fsdp_checkpoint-ours-stock")["app"]
    assert state["model"]["net1.weight"].shape == (17, 16)
    assert float(state["optim"]["state"]["net1.weight"]["step"]) == 2
    whole = load_file(folder / "hugging_face-ours-stock" / "model-00001-of-00001.safetensors")
    ray_dcp.export(folder / "hugging_face-ours-stock" / "sharded", folder / "whole", "hf")
    index = json.loads((folder / "whole" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == whole.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / "whole" / file)[name], whole[name])
    torch.manual_seed(5)
    assert torch.equal(whole["net1.weight"], torch.nn.Linear(16, 17).weight)


def test_only_the_imports_of_the_examples_are_changed():
    before = dcp_examples_runner.EXAMPLES
    after = before.replace("torch.distributed.checkpoint", "ray_dcp").splitlines()
    changed = [old for old, new in zip(before.splitlines(), after, strict=True) if old != new]
    assert changed
    assert all(line.startswith(("import ", "from ")) for line in changed)
