"""An elastic Ray Train run, of one or two workers: python ray_train_elastic.py STORAGE LAST_STEP.

A second call with a later step goes on from the newest checkpoint.
"""

import sys

import ray.train
import torch
from ray.train.torch import TorchTrainer

import ray_dcp


def train_fn(config: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    with ray_dcp.train.checkpointer(save_interval=10, max_to_keep=2) as checkpointer:
        done = checkpointer.restore(state)  # None: nothing was ever committed in this run
        for step in range(1 if done is None else done + 1, config["last_step"] + 1):
            x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpointer.save(step, state, metrics={"loss": loss.item()})


def main(storage: str, last_step: int) -> None:
    trainer = TorchTrainer(
        train_fn,
        train_loop_config={"last_step": last_step},
        scaling_config=ray.train.ScalingConfig(
            num_workers=(1, 2), resources_per_worker={"CPU": 0.5}
        ),
        run_config=ray.train.RunConfig(
            name="elastic",
            storage_path=storage,
            failure_config=ray.train.FailureConfig(max_failures=3),
            callbacks=[ray_dcp.train.SaveBeforeResize()],
        ),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
