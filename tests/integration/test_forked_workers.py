"""The workers of the tests' Ray are forks of one process, and yet each is like one of its own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from tests.integration.forked_workers import variables_alone
from tests.polling import eventually, lives


@ray.remote(num_cpus=0)
class Drawer:
    def drawn(self):
        ids = ray.WorkerID.from_random().hex(), ray.ObjectRef.from_random().hex()
        return *ids, np.random.rand(), torch.rand(1).item(), os.getpgid(0)

    def ids(self):
        return os.getpid(), os.getppid()


def test_each_draws_other_numbers_and_dies_alone(ray_session):
    actors = [Drawer.remote() for _ in range(3)]
    drawn = ray.get([actor.drawn.remote() for actor in actors])
    assert [len(set(values)) for values in zip(*drawn, strict=True)] == [3] * 5
    (pid, parent), *others = ray.get([actor.ids.remote() for actor in actors])
    assert {parent} == {of for _, of in others}
    assert Path(f"/proc/{parent}/comm").read_text() != "raylet\n"
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not lives(pid))
    assert ray.get([actor.ids.remote() for actor in actors[1:]]) == others


@pytest.mark.parametrize(
    ("context", "variables"),
    [
        ({}, {}),
        ({"env_vars": {"A": "1", "RAY_TRAIN_X": "2"}}, {"A": "1", "RAY_TRAIN_X": "2"}),
        ({"env_vars": {"RAY_testing_rpc_failure": "1"}}, None),
        ({"env_vars": {"A": "${PATH}:/x"}}, None),
        ({"command_prefix": ["nice"]}, None),
        ({"py_executable": "/elsewhere/python"}, None),
    ],
)
def test_a_worker_that_needs_more_than_variables_is_left_to_ray(context, variables):
    assert variables_alone(json.dumps(context)) == variables
