"""What a trial of Ray Tune runs in tests: a Ray Train run.

A module of its own: processes of trials and controllers need nothing else, and start quickly.
"""

from __future__ import annotations

import importlib
from typing import Any


def trial(config: dict[str, Any]) -> None:
    """Trains on one worker, or two in the first trial; a name of each trial's own is the run's."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    DataParallelTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=1 if config["number"] else 2, resources_per_worker={"CPU": 0.5}
        ),
        run_config=RunConfig(name=f"trial-{config['number']}", storage_path=config["url"]),
    ).fit()


def train(config: dict[str, Any]) -> None:
    """Runs in each worker what is named by its module and name."""
    module, _, name = config["train_fn"].rpartition(".")
    getattr(importlib.import_module(module), name)(config)
