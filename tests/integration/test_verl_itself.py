"""The checkpoint manager of verl, in verl: run where `tests.support.verl_env` has installed it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import ray_dcp
from ray_dcp.integrations.verl import export_pretrained
from ray_dcp.integrations.verl_trainer import STEP_NAME
from tests.integration.test_verl import committed
from tests.support import verl_env
from tests.support.daemons import Daemons

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

KILLED = """
import os, signal, sys
sys.argv = ["verl_trainer.py", *sys.argv[1:]]
import verl_trainer
from verl_trainer import begin_ray, main

def die(worker, *_):
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

def on_step(trainer):
    if trainer.global_steps == 3:  # the actor is saved already
        trainer.critic_wg.save_checkpoint = lambda *_: trainer.critic_wg.run(die)

begin_ray(2)
main(sys.argv[1], 4, 2, on_step)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray of its own: verl's workers are begun with paths that forked ones would not read."""
    with closing(Daemons(num_cpus=32, setup_worker_path=None)) as daemons:
        yield daemons.address()


def run(cluster: str, *arguments: object, code: str = "", fails: bool = False) -> str:
    """Runs the program of docs/examples, or a text that imports it; returns what it prints."""
    paths = [str(verl_env.chosen()), str(EXAMPLES), str(EXAMPLES.parents[1])]
    environment = {**os.environ, "RAY_ADDRESS": cluster}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    begin = ["-c", code] if code else [str(EXAMPLES / "verl_trainer.py")]
    ended = subprocess.run(
        [sys.executable, *begin, *map(str, arguments)],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert (ended.returncode != 0) is fails, ended.stderr[-4000:]
    return ended.stdout + ended.stderr


def verls_own(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights that verl wrote on two ranks."""
    shards: list[dict[str, Any]] = []
    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2)
        try:
            path = folder / f"model_world_size_2_rank_{rank}.pt"
            shards.append(torch.load(path, weights_only=False))
        finally:
            dist.destroy_process_group()
    return {
        name: torch.cat([one[name]._local_tensor for one in shards])
        if isinstance(value, DTensor)
        else value
        for name, value in shards[0].items()
    }


@pytest.mark.timeout(3000)  # five programs, each of which begins up to six workers
@pytest.mark.filterwarnings("ignore")  # transformers'
def test_a_run_of_verl_is_the_same_with_each_class_and_goes_on_whatever_dies(
    tmp_path: Path, cluster: str
):
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    assert "from step 0" in run(cluster, stock, 3, 2, "--stock")
    assert "died" in run(cluster, ours, code=KILLED, fails=True)
    assert committed(ours) == [1, 2]
    assert "from step 2" in run(cluster, ours, 3, 3)
    last = ray_dcp.JobCheckpoints(ours, ("data",), step_name=STEP_NAME, read_only=True).at(3)
    for role in ("actor", "critic"):
        found = ray_dcp.read_state_dict(last.part(role))
        expected = verls_own(stock / "global_step_3" / role)
        assert {*found["model"]} == {*expected}
        for name, value in expected.items():
            assert torch.equal(found["model"][name], value), (role, name)
        assert {*found} == {"model", "optimizer", "lr_scheduler", "rank", "huggingface"}

    # What verl's class saved is resumed by it, and saved by ours from then on.
    assert "from step 3" in run(cluster, stock, 4, 2)
    assert committed(stock) == [4]
    assert (stock / "global_step_3" / "actor" / "fsdp_config.json").exists()

    # Without the plug-in, such a run fails by name.
    assert "FileNotFoundError" in run(cluster, stock, 5, 2, "--stock", fails=True)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_pretrained(last.part("actor"), tmp_path / "model")
    for folder in (tmp_path / "model", ours / "huggingface" / "global_step_3" / "actor"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        for name, value in verls_own(stock / "global_step_3" / "actor").items():
            assert torch.equal(model.state_dict()[name], value), name
        assert AutoTokenizer.from_pretrained(folder)("w5")["input_ids"] == [5]
    assert list((ours / "huggingface" / "global_step_3" / "critic").glob("*.safetensors"))
