"""DCP's documented examples with only the imports changed; one side loads what the other saved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

import ray_dcp
from tests.integration import dcp_examples_runner
from tests.integration.test_runtime_own_ray import LEASE_S, REPOSITORY, plain_environment


def test_the_examples_work_and_understand_each_other(tmp_path: Path):
    finished = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "--local-addr=127.0.0.1", "-m", "tests.integration.dcp_examples_runner", str(tmp_path),
         str(LEASE_S)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=REPOSITORY, timeout=400,
        env=plain_environment(OMP_NUM_THREADS="1"), check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-6000:]
    told = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    assert sorted(each["rank"] for each in told) == [0, 1]
    for each in told:
        assert len(each["equal"]) == 9 + 2
        assert all(each["equal"].values()), each["equal"]

    # The same checkpoints in one process, without FSDP and without a group.
    state = ray_dcp.read_state_dict(tmp_path / "fsdp_checkpoint-ours-stock")["app"]
    assert state["model"]["net1.weight"].shape == (17, 16)
    assert float(state["optim"]["state"]["net1.weight"]["step"]) == 2
    whole = load_file(tmp_path / "hugging_face-ours-stock" / "model-00001-of-00001.safetensors")
    ray_dcp.export(tmp_path / "hugging_face-ours-stock" / "sharded", tmp_path / "whole", "hf")
    index = json.loads((tmp_path / "whole" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == whole.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "whole" / file)[name], whole[name])
    torch.manual_seed(5)
    assert torch.equal(whole["net1.weight"], torch.nn.Linear(16, 17).weight)


def test_only_the_imports_are_changed():
    before = dcp_examples_runner.EXAMPLES.splitlines()
    after = dcp_examples_runner.EXAMPLES.replace(
        "torch.distributed.checkpoint", "ray_dcp"
    ).splitlines()
    changed = [old for old, new in zip(before, after, strict=True) if old != new]
    assert changed
    assert all(line.startswith(("import ", "from ")) for line in changed)
