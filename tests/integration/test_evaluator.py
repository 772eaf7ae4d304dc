"""The evaluator of docs/examples, killed while it evaluates, and started again."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
import torch

import ray_dcp
from ray_dcp.manager import BestN, LatestN
from tests.integration.test_frameworks import EXAMPLES
from tests.support.processes import eventually, lives
from tests.support.programs.forks import Programs, plain_environment

pytestmark = pytest.mark.usefixtures("ray_session")


def test_an_evaluator_that_is_killed_evaluates_the_same_step_again(
    tmp_path: Path, programs: Programs
):
    run = tmp_path / "run"
    keep = LatestN(1) | BestN(1, "eval_loss", later=True)
    torch.manual_seed(0)
    with ray_dcp.CheckpointManager(run, retention=keep, no_dist=True) as manager:
        for step in (1, 2, 3):
            model = torch.nn.Sequential(
                torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
            )
            manager.save(step, {"model": model})
        address = ray.get_runtime_context().gcs_address
        env = plain_environment(RAY_ADDRESS=address, RAY_AUTH_MODE="disabled")
        line = (str(EXAMPLES / "evaluator.py"), str(run), "0.1")
        first = programs.start(*line, env=env)
        # By handle, while it holds the first step, or at latest when it has recorded it.
        assert eventually(lambda: [*(run / ".manager/reading").glob("*")] or not lives(first.pid))
        first.kill()
        manager.join()
        assert manager.all_steps() == [1, 2, 3]
        (ended,) = programs.run(*line, env=env)
        told = [line.partition(":")[0] for line in ended.stdout.splitlines()]
        assert told[-2:] == ["step 2", "step 3"], ended.stderr
        assert all("eval_loss" in manager.step_info(step).metrics for step in (1, 2, 3))
        best = manager.best_step()
        manager.save(4, {"model": model}, metrics={"eval_loss": 1e9})
        manager.join()
        assert manager.all_steps() == sorted({best, 4})
        (ended,) = programs.run(*line, env=env)
        assert ended.stdout == "", ended.stderr
