"""Steps of verl's PPO trainer by one commit: python verl_trainer.py RUN LAST_STEP RANKS.

verl's own workers hold an actor and a critic, sharded by FSDP2, and verl's own trainer saves and
loads them, by the methods that ray_dcp.integrations.verl has put in their place. What is left out
of verl is the rollouts, whose servers need an accelerator: here a step makes gradients itself.

A second call, on any number of ranks, goes on from the last step. `--stock` uses verl without the
plug-in. Needs verl 0.9.1 with what it imports, beside this file `verl_on_cpu.py`, and a Ray with
room for the ranks.
"""

import os
import sys
from pathlib import Path
from typing import Any

PLUG_INS = "verl_on_cpu" + ("" if "--stock" in sys.argv else ",ray_dcp.integrations.verl")
os.environ["VERL_USE_EXTERNAL_MODULES"] = PLUG_INS
sys.path.insert(0, str(Path(__file__).parent))

import ray  # noqa: E402 - verl reads the environment when it is imported
import torch  # noqa: E402
import verl_on_cpu  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402
from verl.single_controller.base.decorator import Dispatch, register  # noqa: E402
from verl.single_controller.ray import (  # noqa: E402
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
)
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback  # noqa: E402
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync  # noqa: E402
from verl.workers.config import (  # noqa: E402
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker  # noqa: E402


class Worker(TrainingWorker):
    def __init__(self, config: TrainingWorkerConfig) -> None:
        verl_on_cpu.begin()
        super().__init__(config=config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, value: float) -> None:
        engine = self.engine
        for parameter in engine.module.parameters():
            parameter.grad = torch.full_like(parameter, value)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        engine.lr_scheduler.step()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def run(self, function: Any, *arguments: Any) -> Any:
        return function(self, *arguments)


def make_model(folder: str) -> None:
    """Writes a tiny language model with its tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(64)}, unk_token="w3"))  # noqa: S106
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w3"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def make_workers(model: str, model_type: str, num_ranks: int) -> RayWorkerGroup:
    config = TrainingWorkerConfig(
        model_type=model_type,
        model_config=HFModelConfig(
            path=model,
            enable_gradient_checkpointing=False,
            use_remove_padding=False,
            override_config={"attn_implementation": "eager"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2", forward_only=False, model_dtype="fp32", use_torch_compile=False
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=100),
        checkpoint_config=CheckpointConfig(),
    )
    group = RayWorkerGroup(
        resource_pool=RayResourcePool([num_ranks], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(Worker), config=config),
        device_name="cpu",
    )
    group.reset()
    return group


def make_trainer(run: str, last_step: int, num_ranks: int, **options: Any) -> Any:
    """Returns a trainer of verl with its groups of workers; without rollouts."""
    model = f"{run}-model"
    if not Path(model).exists():
        make_model(model)
    contents = ["model", "optimizer", "extra", "hf_model:3"]  # a model of each third step
    checkpoint = {"save_contents": contents, "async_save": False}
    checkpoint |= {key: options.pop(key) for key in list(checkpoint) if key in options}
    of_trainer = {
        "default_local_dir": run,
        "default_hdfs_dir": None,
        "resume_mode": "auto",
        "del_local_ckpt_after_load": False,
        "max_actor_ckpt_to_keep": 2,
        "max_critic_ckpt_to_keep": 2,
    }
    trainer = object.__new__(PPOTrainerSync)
    trainer.config = OmegaConf.create(
        {
            "trainer": of_trainer | options,
            "actor_rollout_ref": {"actor": {"checkpoint": checkpoint}},
            "critic": {"checkpoint": checkpoint},
        }
    )
    trainer.use_critic, trainer.trainer_mode = True, "sync"
    trainer.actor_rollout_wg = make_workers(model, "language_model", num_ranks)
    trainer.critic_wg = make_workers(model, "value_model", num_ranks)
    trainer.train_dataloader = StatefulDataLoader(range(1000), batch_size=4, shuffle=True)
    trainer.checkpoint_callback = CheckpointCallback()
    trainer.total_training_steps = last_step
    return trainer


def main(run: str, last_step: int, num_ranks: int, on_step: Any = lambda _: None) -> int:
    """Trains to a step; returns the step that it went on from."""
    torch.manual_seed(0)  # the order of the data
    trainer = make_trainer(run, last_step, num_ranks, async_save="--stock" not in sys.argv)
    trainer._load_checkpoint()
    first: int = trainer.global_steps
    batches = iter(trainer.train_dataloader)
    for number in range(first + 1, last_step + 1):
        trainer.global_steps = number
        value = float(next(batches).float().mean()) / 1000
        trainer.actor_rollout_wg.train(value)
        trainer.critic_wg.train(-value)
        on_step(trainer)
        trainer._save_checkpoint()
    return first


def begin_ray(num_ranks: int) -> None:
    """Begins a Ray of this machine, or joins that of RAY_ADDRESS."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    variables = {"VERL_USE_EXTERNAL_MODULES": PLUG_INS, "PYTHONPATH": paths}
    num_cpus = None if "RAY_ADDRESS" in os.environ else 3 * num_ranks
    ray.init(
        num_cpus=num_cpus,
        runtime_env={"env_vars": variables},
        include_dashboard=False,
        log_to_driver=False,
    )


if __name__ == "__main__":
    begin_ray(int(sys.argv[3]))
    print("went on from step", main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
