"""`save_state` and `load_state` of an `Accelerator`, beside its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, ProjectConfiguration
from torch.optim.swa_utils import AveragedModel

import ray_dcp
from ray_dcp.errors import CheckpointExistsError, CheckpointNotFoundError, InvalidRequestError
from ray_dcp.integrations.accelerate import load_state, save_state
from tests.support.processes import eventually
from tests.support.programs import accelerate_ranks
from tests.support.programs.forks import REPOSITORY, Programs, plain_environment

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, of many kinds

EXAMPLE = REPOSITORY / "docs" / "examples" / "accelerate_fsdp2.py"


def started(programs: Programs, ranks: int, *line: str) -> list[str]:
    """Returns what each rank of a program printed."""
    ended = programs.run(
        *line, ranks=ranks, env=plain_environment(OMP_NUM_THREADS="1"),
        imports=["accelerate", "ray_dcp.integrations.accelerate"],
    )  # fmt: skip
    assert [one.returncode for one in ended] == [0] * ranks, [one.stderr for one in ended]
    return [one.stdout for one in ended]


def losses(programs: Programs, ranks: int, folder: Path, mode: str) -> list[dict[str, list[float]]]:
    line = ("-m", "tests.support.programs.accelerate_ranks", str(folder), mode)
    return [json.loads(printed) for printed in started(programs, ranks, *line)]


def committed(run: Path) -> list[int]:
    return [step.step for step in ray_dcp.open(run).steps if step.state == "committed"]


def test_fsdp2_goes_on_as_after_accelerates_own_save_also_with_other_ranks(
    programs: Programs, tmp_path: Path
):
    for one in losses(programs, 2, tmp_path, "save"):
        assert one["ours"] == one["stock"] == one["uninterrupted"]
    for one in losses(programs, 3, tmp_path, "load"):
        assert one["ours"] == one["stock"]
    # The same checkpoint without FSDP2, in one process.
    alone = accelerate_ranks.Training(seed=3, fsdp2=False)
    load_state(alone.accelerator, tmp_path / "ours")
    stored = ray_dcp.read_state_dict(tmp_path / "ours")
    for name, value in alone.model.named_parameters():
        assert torch.equal(value, stored["model"][name])
        moments = alone.optimizer.optimizer.state[value]
        assert torch.equal(moments["exp_avg"], stored["optimizer"]["state"][name]["exp_avg"])
    assert alone.scheduler.get_last_lr() != [0.05]


def test_the_example_goes_on_with_more_ranks(programs: Programs, tmp_path: Path):
    first, *_ = started(programs, 2, str(EXAMPLE), str(tmp_path), "10")
    assert first.startswith("begins\nstep 10")
    assert first.endswith("rank 0 has [16, 8]\n")
    first, *_ = started(programs, 3, str(EXAMPLE), str(tmp_path), "20")
    assert first.startswith("step 20")
    assert first.endswith("rank 0 has [11, 8]\n")
    assert committed(tmp_path / "checkpoints") == [2, 3]  # total_limit=2


class Words:
    """A registered object whose state has another shape each time."""

    def __init__(self, *words: str) -> None:
        self.words = list(words)

    def state_dict(self) -> dict[str, Any]:
        return {"words": self.words, "length": torch.arange(len(self.words))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.words = list(state["words"])
        assert state["length"].tolist() == list(range(len(self.words)))


def prepared(folder: Path, seed: int, **project: Any) -> tuple[Accelerator, Any, Any]:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch.manual_seed(seed)
    names = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, **project)
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, project_config=names, dataloader_config=config)
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(3, 1)]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9)
    loader = torch.utils.data.DataLoader(torch.arange(40), batch_size=2, shuffle=True)
    *models, _, loader = accelerator.prepare(*models, optimizer, loader)
    return accelerator, models, loader


def weights(models: list[torch.nn.Module]) -> list[list[float]]:
    return [model.weight.flatten().tolist() for model in models]


def orders(loader: Any) -> list[list[int]]:
    return [torch.cat(list(loader)).tolist() for _ in range(2)]


def scaled_step(accelerator: Any, model: torch.nn.Module, factor: float) -> None:
    """Steps with gradients of the scaler, which leave the weights as they are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accelerator.backward(sum(each.sum() for each in model.parameters()) * factor)
    accelerator.scaler.step(optimizer)
    accelerator.scaler.update()
    optimizer.zero_grad()


def test_all_that_is_registered_comes_back_with_epochs_hooks_and_objects(tmp_path: Path):
    accelerator, models, loader = prepared(tmp_path, seed=1)
    average = AveragedModel(models[1])
    accelerator.register_for_checkpointing(Words("a", "b", "c"), average)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (float("inf"), 1.0):  # The first step is skipped, and halves the scale.
        scaled_step(accelerator, models[0], factor)
    assert accelerator.scaler.get_scale() == 4.0
    orders(loader)

    def save(given: list[Any], states: list[Any], folder: str) -> None:
        torch.save(states.pop(), Path(folder) / "second.pt")

    hook = accelerator.register_save_state_pre_hook(save)
    save_state(accelerator).result()
    hook.remove()
    assert "model_1.weight" not in ray_dcp.open(tmp_path / "checkpoints" / "checkpoint_0").tensors
    expected = orders(loader), torch.rand(3)

    other, found, again = prepared(tmp_path, seed=2)
    words, loaded = Words(), AveragedModel(found[1])
    other.register_for_checkpointing(words, loaded)
    other.scaler = torch.amp.GradScaler("cpu")

    def load(given: list[Any], folder: str) -> None:
        given.pop().load_state_dict(torch.load(Path(folder) / "second.pt"))

    other.register_load_state_pre_hook(load)
    load_state(other)
    assert words.words == ["a", "b", "c"]
    assert weights([loaded.module]) == weights([average.module])
    assert other.scaler.state_dict() == accelerator.scaler.state_dict()
    scaled_step(other, found[0], float("inf"))
    assert other.scaler.get_scale() == 2.0
    assert weights(found) == weights(models)
    assert orders(again) == expected[0]
    assert torch.equal(torch.rand(3), expected[1])
    # The next save takes the number after the one that was loaded.
    save_state(other, None).result()
    assert (tmp_path / "checkpoints" / "checkpoint_1").is_dir()


def test_the_limit_deletes_after_the_commit_and_keeps_what_has_a_tag(tmp_path: Path):
    accelerator, _, _ = prepared(tmp_path, seed=1, total_limit=2)
    run = tmp_path / "checkpoints"
    with pytest.raises(CheckpointNotFoundError, match="committed"):
        load_state(accelerator)

    for _ in range(2):
        save_state(accelerator).result()
    with ray_dcp.CheckpointManager(run, step_name="checkpoint_{step}") as manager:
        manager.tag(0, "keep")
    for _ in range(2):
        save_state(accelerator).result()
    assert eventually(lambda: committed(run) == [0, 2, 3])
    (run / "checkpoint_4").mkdir()
    (run / "checkpoint_4" / "__0_0.0123456789abcdef.distcp").touch()  # a save that was cut off
    other, models, _ = prepared(tmp_path, seed=2)
    load_state(other)
    assert other.project_configuration.iteration == 4
    other.project_configuration.iteration = 3
    with pytest.raises(CheckpointExistsError, match="checkpoint_3"):
        save_state(other)
    before = weights(models)
    other.register_for_checkpointing(Words())
    with pytest.raises(InvalidRequestError, match="0 registered objects"):
        load_state(other)
    assert weights(models) == before
    with pytest.raises(InvalidRequestError, match="prefixes"):
        load_state(other, options=ray_dcp.LoadOptions(prefixes=("model.",)))
    other.state.distributed_type = DistributedType.DEEPSPEED
    with pytest.raises(InvalidRequestError, match="DEEPSPEED"):
        save_state(other)
