"""The evaluator of docs/examples, killed while it evaluates, and started again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch

import ray_dcp
from ray_dcp.manager import BestN, LatestN
from tests.integration.test_frameworks import EXAMPLES
from tests.support.processes import eventually
from tests.support.programs.forks import plain_environment

pytestmark = pytest.mark.usefixtures("ray_session")


def evaluator(run: Path) -> subprocess.Popen[str]:
    address = ray.get_runtime_context().gcs_address
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / "evaluator.py"), str(run), "0.1"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=plain_environment(OMP_NUM_THREADS="1", RAY_ADDRESS=address, RAY_AUTH_MODE="disabled"),
    )  # fmt: skip


def test_an_evaluator_that_is_killed_evaluates_the_same_step_again(tmp_path: Path):
    run = tmp_path / "run"
    keep = LatestN(1) | BestN(1, "eval_loss", later=True)
    torch.manual_seed(0)
    with ray_dcp.CheckpointManager(run, retention=keep, no_dist=True) as manager:
        for step in (1, 2, 3):
            model = torch.nn.Sequential(
                torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
            )
            manager.save(step, {"model": model})
        first = evaluator(run)
        # By handle, while it holds the first step, or at latest when it has recorded it.
        assert eventually(lambda: [*(run / ".manager/reading").glob("*")] or first.poll())
        first.kill()
        first.communicate()
        manager.join()
        assert manager.all_steps() == [1, 2, 3]
        output, errors = evaluator(run).communicate(timeout=300)
        told = [line.partition(":")[0] for line in output.splitlines()]
        assert told[-2:] == ["step 2", "step 3"], errors
        assert all("eval_loss" in manager.step_info(step).metrics for step in (1, 2, 3))
        best = manager.best_step()
        manager.save(4, {"model": model}, metrics={"eval_loss": 1e9})
        manager.join()
        assert manager.all_steps() == sorted({best, 4})
        again, errors = evaluator(run).communicate(timeout=300)
        assert again == "", errors
