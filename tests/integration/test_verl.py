"""The checkpoint manager of verl, without verl: `test_verl_itself.py` has what needs it."""

from __future__ import annotations

import inspect
import os
import random
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

import ray_dcp
from ray_dcp.errors import CheckpointError, CheckpointNotFoundError, InvalidRequestError
from ray_dcp.integrations import verl as plug_in
from ray_dcp.integrations.verl import RayDcpCheckpointManager, export_pretrained
from ray_dcp.integrations.verl_manager import write_model
from ray_dcp.integrations.verl_trainer import STEP_NAME, TRACKER, put_in_place
from ray_dcp.store.opening import open_storage, target_of
from ray_dcp.worker_group import WorkerGroup, this_rank

if TYPE_CHECKING:
    from tests.support.servers.s3 import DevStore

NUM_RANKS = 2

ALL = ["model", "optimizer", "extra"]


class Config(dict[str, Any]):
    """A config as verl's are: read by `get` and by attributes."""

    __getattr__ = dict.__getitem__


def config(root: object, *, is_async: bool = False, **trainer: Any) -> Config:
    checkpoint = {"save_contents": ALL, "async_save": is_async}
    own = {"default_local_dir": str(root), "resume_mode": "auto", "resume_from_path": None}
    return Config(
        trainer=Config(own | trainer),
        actor_rollout_ref=Config(actor=Config(checkpoint=Config(checkpoint))),
        critic=Config(checkpoint=Config(checkpoint)),
    )


def managed(contents: list[str] | None = None, **other: Any) -> RayDcpCheckpointManager:
    """Returns a manager of a model that has trained for a step."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    kept = contents or ALL
    told = Config(save_contents=kept, load_contents=kept)
    made = RayDcpCheckpointManager(model, optimizer, scheduler, None, told, **other)
    train(made, 1.0)
    return made


def train(one: RayDcpCheckpointManager, value: float) -> None:
    for each in one.model.parameters():
        each.grad = torch.full_like(each, value)
    one.optimizer.step()
    one.optimizer.zero_grad()
    one.lr_scheduler.step()


def whole(one: RayDcpCheckpointManager) -> dict[str, Any]:
    """Returns weights and state of the optimizer, unsharded, and the scheduler's."""
    options = StateDictOptions(full_state_dict=True)
    weights, state = get_state_dict(one.model, one.optimizer, options=options)
    moments = {name: (it["exp_avg"], it["exp_avg_sq"]) for name, it in state["state"].items()}
    return {"weights": weights, "moments": moments, "at": one.lr_scheduler.last_epoch}


# --- One process --------------------------------------------------------------------------------


def test_all_of_a_rank_comes_back_from_a_path(tmp_path: Path):
    saved, path = managed(), f"{tmp_path}/global_step_5/actor"
    saved.save_checkpoint(path, None, 5)
    expected = whole(saved)
    drawn = torch.rand(1), np.random.rand(), random.random()
    found = managed()
    train(found, 7.0)
    found.load_checkpoint(path, del_local_after_load=True)
    assert str(whole(found)) == str(expected)
    assert (torch.rand(1), np.random.rand(), random.random()) == drawn
    names = ray_dcp.open_checkpoint(path).names
    assert {name.partition(".")[0] for name in names} == {
        "model",
        "optimizer",
        "lr_scheduler",
        "rank",
    }


def test_what_the_config_leaves_out_is_neither_saved_nor_loaded(tmp_path: Path):
    path = f"{tmp_path}/all"
    managed().save_checkpoint(path)
    found = managed(["model"])
    train(found, 7.0)
    before = whole(found)
    found.load_checkpoint(path)
    after = whole(found)
    assert str(after["weights"]) == str(whole(managed())["weights"])
    assert str(after["moments"]) == str(before["moments"])
    assert after["at"] == before["at"]
    found.save_checkpoint(f"{tmp_path}/model")
    export_pretrained(f"{tmp_path}/model", tmp_path / "hub")  # it has neither config nor tokenizer
    assert all(
        name.startswith("model.") for name in ray_dcp.open_checkpoint(f"{tmp_path}/model").names
    )
    with pytest.raises(CheckpointError, match="Missing key"):
        managed().load_checkpoint(f"{tmp_path}/model")
    found.optimizer, found.checkpoint_save_contents = None, ALL
    with pytest.raises(InvalidRequestError, match=r"save_contents.*has none"):
        found.save_checkpoint(path)


def test_checkpoints_beyond_the_limit_go_with_what_verl_wrote_beside(tmp_path: Path):
    one = managed()
    for number in range(4):
        one.save_checkpoint(f"{tmp_path}/global_step_{number}", None, number, 2)
        (tmp_path / f"global_step_{number}" / "data_0.pt").touch()
    assert sorted(os.listdir(tmp_path)) == ["global_step_2", "global_step_3"]
    one.save_checkpoint("memory://verl/1", None, 1, 1)  # a URL has no folder beside
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_of_verl_itself_is_left_to_verl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found: list[Any] = []

    class Verls:
        def __init__(self, **given: Any) -> None:
            found.append(given["model"])

        def load_checkpoint(self, path: str) -> None:
            found.append(path)

    one, path = managed(), str(tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        one.load_checkpoint(path)
    (tmp_path / "fsdp_config.json").touch()
    (tmp_path / "model_world_size_8_rank_0.pt").touch()
    monkeypatch.setattr(RayDcpCheckpointManager, "verls", Verls)
    with pytest.raises(CheckpointNotFoundError, match=r"on 1 ranks, found model_world_size_8_rank"):
        one.load_checkpoint(path)
    (tmp_path / "model_world_size_1_rank_0.pt").touch()
    one.load_checkpoint(path)
    assert found == [one.model, path]


@pytest.fixture
def language_model(tmp_path: Path) -> tuple[Any, Any]:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    small = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**small, **heads, tie_word_embeddings=True))
    return model, PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a")


@pytest.mark.filterwarnings("ignore")  # transformers'
def test_the_model_of_chosen_steps_is_written_for_from_pretrained(
    tmp_path: Path, language_model: Any
):
    from transformers import AutoTokenizer, LlamaForCausalLM

    model, tokenizer = language_model
    contents = Config(save_contents=["model", "hf_model:2"], load_contents=["model"])
    one = RayDcpCheckpointManager(model, checkpoint_config=contents, tokenizer=tokenizer)
    for number in (1, 2):
        one.save_checkpoint(f"{tmp_path}/{number}", None, number)
    one.save_checkpoint(f"{tmp_path}/2", None, 2)  # again: the model is replaced
    assert not (tmp_path / "1" / "huggingface").exists()
    for folder in (tmp_path / "2" / "huggingface", tmp_path / "exported"):
        if folder.name == "exported":  # config and tokenizer are in every checkpoint
            export_pretrained(tmp_path / "1", folder)
        found = LlamaForCausalLM.from_pretrained(folder)
        for name, value in found.state_dict().items():
            assert torch.equal(value, model.state_dict()[name])
        assert AutoTokenizer.from_pretrained(folder)("b")["input_ids"] == [1]
    write_model(tmp_path / "1", "memory://verl-model")
    stored = open_storage(target_of("memory://verl-model", None))
    assert {each.key: each.num_bytes for each in stored.list()} == {
        path.name: path.stat().st_size for path in (tmp_path / "exported").iterdir()
    }
    contents["save_contents"] = ["hf_model:many"]
    with pytest.raises(InvalidRequestError, match="number of steps after 'hf_model'"):
        RayDcpCheckpointManager(model, checkpoint_config=contents).save_checkpoint(f"{tmp_path}/3")


class Trainer:
    """A trainer as verl's: its methods are replaced."""

    use_critic = True
    total_training_steps = 5

    def __init__(self, config: Config, actor: Any = None, critic: Any = None) -> None:
        self.config, self.actor_rollout_wg, self.critic_wg = config, actor, critic
        self.train_dataloader = StatefulDataLoader([*range(12)], batch_size=2, shuffle=True)
        self.global_steps = 0
        self.told: list[str] = []
        self.checkpoint_callback = self

    def on_save(self, global_step: int, checkpoint_dir: str, async_save: bool, **_: Any) -> None:
        self.told.append(f"{Path(checkpoint_dir).name} {async_save}")

    def _load_checkpoint(self) -> None:
        self.told.append("verl loads")

    def _save_checkpoint(self) -> None:
        self.told.append("verl saves")


class Replaced(Trainer):
    _load_checkpoint, _save_checkpoint = Trainer._load_checkpoint, Trainer._save_checkpoint


put_in_place(Replaced, skips_whole_epochs=False)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"resume_mode": "never"}, "resume_mode"),
        ({"default_hdfs_dir": "hdfs://a"}, "default_hdfs_dir"),
        ({"resume_mode": "resume_path", "resume_from_path": "/a/step_5"}, "resume_from_path"),
    ],
)
def test_a_config_that_can_not_be_kept_is_refused_when_the_training_begins(
    tmp_path: Path, given: dict[str, Any], key: str
):
    with pytest.raises(InvalidRequestError, match="found") as refused:
        Replaced(config(tmp_path, **given))._load_checkpoint()
    assert refused.value.key == key


def test_modes_with_prompts_in_flight_keep_the_methods_of_verl(tmp_path: Path):
    trainer: Any = Replaced(config(tmp_path))
    trainer.trainer_mode = "colocate_async"
    trainer._load_checkpoint()
    trainer._save_checkpoint()
    assert trainer.told == ["verl loads", "verl saves"]
    trainer.config = config(tmp_path, is_async=True)
    with pytest.raises(InvalidRequestError, match="async_save to be false"):
        trainer._load_checkpoint()


def test_classes_are_replaced_when_their_module_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "some_trainers.py").write_text("class Own: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_trainers", raising=False)

    def replaced(module: Any) -> None:
        module.Found = module.Own

    monkeypatch.setattr(plug_in, "_REPLACED", {"some_trainers": replaced})
    module: Any = __import__("some_trainers")
    assert module.Found is module.Own
    assert "class Own" in inspect.getsource(module)
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert "verl" not in sys.modules


# --- Ranks in Ray -------------------------------------------------------------------------------


def make(roles: tuple[str, ...] = ("actor", "critic")) -> dict[str, RayDcpCheckpointManager]:
    return {role: managed() for role in roles}


class Group:
    """A worker group as verl's: its methods are called on all ranks."""

    def __init__(self, ranks: WorkerGroup, role: str) -> None:
        self.ranks, self.role = ranks, role

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.ranks.run(run_with, self.role, function, *arguments)

    def save_checkpoint(self, *arguments: Any) -> None:
        self.run(RayDcpCheckpointManager.save_checkpoint, *arguments)

    def load_checkpoint(self, local_path: Any, del_local_after_load: bool) -> None:
        self.run(RayDcpCheckpointManager.load_checkpoint, local_path)


def run_with(role: str, function: Callable[..., Any], *arguments: Any) -> Any:
    rank = this_rank()
    assert rank is not None
    return function(rank.state[role], *arguments)


def die_on_rank_1(one: RayDcpCheckpointManager, *_: Any) -> None:
    if one.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def trainer_of(ranks: WorkerGroup, root: object, **given: Any) -> Any:
    return Replaced(config(root, **given), Group(ranks, "actor"), Group(ranks, "critic"))


def committed(root: Path) -> list[int]:
    run = ray_dcp.JobCheckpoints(root, ("data",), step_name=STEP_NAME, read_only=True)
    return run.all_steps()


def test_actor_critic_and_data_are_one_step_whatever_dies(tmp_path: Path, ranks: WorkerGroup):
    root = tmp_path / "run"
    most = {"max_actor_ckpt_to_keep": 2, "max_critic_ckpt_to_keep": 1}
    ranks.keep(make)
    trainer = trainer_of(ranks, root, is_async=True, **most)
    trainer._load_checkpoint()
    assert trainer.global_steps == 0
    batches = iter(trainer.train_dataloader)
    for number in range(1, 4):
        trainer.global_steps = number
        next(batches)
        trainer.actor_rollout_wg.run(train, number)
        trainer.critic_wg.run(train, -number)
        trainer._save_checkpoint()
    upcoming = next(batches)
    expected = [trainer.actor_rollout_wg.run(whole)[0], trainer.critic_wg.run(whole)[0]]
    assert trainer.told == [f"global_step_{number} True" for number in range(1, 4)]

    # Killed between the parts of a step.
    trainer.global_steps = 4
    trainer.critic_wg.save_checkpoint = lambda *_: trainer.critic_wg.run(die_on_rank_1)
    with pytest.raises(CheckpointError):
        trainer._save_checkpoint()
    assert (root / TRACKER).read_text() == "3"

    ranks.resize(3)
    ranks.keep(make)
    trainer = trainer_of(ranks, root, **most)
    trainer._load_checkpoint()
    assert trainer.global_steps == 3
    found = [trainer.actor_rollout_wg.run(whole)[2], trainer.critic_wg.run(whole)[1]]
    assert str(found) == str(expected)
    assert torch.equal(next(iter(trainer.train_dataloader)), upcoming)
    assert committed(root) == [2, 3]

    # The training goes on, from no other step than the newest.
    trainer.global_steps = 4
    trainer._save_checkpoint()
    assert (root / TRACKER).read_text() == "4"
    older = trainer_of(
        ranks, root, resume_mode="resume_path", resume_from_path=root / "global_step_3"
    )
    with pytest.raises(InvalidRequestError, match=r"newest is 4.*ray-dcp rm .*run@4"):
        older._load_checkpoint()
    assert older.global_steps == 3
    with pytest.raises(InvalidRequestError, match=r"no step after 0"):
        trainer_of(ranks, root, resume_mode="disable")._load_checkpoint()
    with suppress(CheckpointError):
        ranks.resize(NUM_RANKS)


def test_a_run_on_s3_is_saved_asynchronously_and_resumed(
    ranks: WorkerGroup, server: DevStore, monkeypatch: pytest.MonkeyPatch
):
    variables = {
        "AWS_ENDPOINT_URL": server.endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": server.access_key_id,
        "AWS_SECRET_ACCESS_KEY": server.secret_access_key,
    }  # fmt: skip
    root = f"s3://ckpt/{secrets.token_hex(6)}"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ranks.keep(make)
    ranks.run(set_variables, variables)
    try:
        trainer = trainer_of(ranks, root, is_async=True, max_actor_ckpt_to_keep=1)
        trainer.config.critic.checkpoint["save_contents"] = ["model", "optimizer", "hf_model:2"]
        trainer.total_training_steps = 3  # Which is waited for.
        trainer._load_checkpoint()
        batches = iter(trainer.train_dataloader)
        for number in (1, 2, 3):
            trainer.global_steps = number
            next(batches)
            trainer.actor_rollout_wg.run(train, number)
            trainer._save_checkpoint()
        upcoming, expected = next(batches), trainer.actor_rollout_wg.run(whole)[0]
        assert trainer.told == [f"global_step_{step} {step < 3}" for step in (1, 2, 3)]
        stored = open_storage(target_of(root, None))
        assert stored.read(TRACKER) == b"3"
        assert [one.key for one in stored.list("huggingface/")] == [
            f"huggingface/global_step_2/critic/{name}"
            for name in ("model-00001-of-00001.safetensors", "model.safetensors.index.json")
        ]
        ranks.keep(make)
        for given in (
            {},
            {"resume_mode": "resume_path", "resume_from_path": f"{root}/global_step_3"},
        ):
            again = trainer_of(ranks, root, **given)
            again._load_checkpoint()
            assert again.global_steps == 3
            assert str(again.actor_rollout_wg.run(whole)[1]) == str(expected)
            assert torch.equal(next(iter(again.train_dataloader)), upcoming)
    finally:
        ranks.run(set_variables, dict.fromkeys(variables))


def set_variables(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
