"""A platform of verl without an accelerator, for `verl_trainer.py`: a plug-in of verl.

verl registers its FSDP engines for CUDA and NPU. Here they are registered for this platform, too,
a worker begins the process group with gloo, and a critic does without FlashAttention, which verl
asks for by name.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform


class PlatformCPU(PlatformCUDA):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return False  # no accelerator, with random states of its own

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs beside."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """There is none."""

    def empty_cache(self) -> None:
        """There is none."""

    def communication_backend_name(self) -> str:
        return "gloo"

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}


set_platform(PlatformCPU())


def begin() -> None:
    """Begins what a worker needs: its process group, and the engines."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)

    import verl.utils.model
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import transformer_impl as fsdp

    engines = {
        "language_model": fsdp.FSDPEngineWithLMHead,
        "value_model": fsdp.FSDPEngineWithValueHead,
    }
    for model_type, engine in engines.items():
        EngineRegistry.register(
            model_type=model_type, backend=["fsdp", "fsdp2"], device="cpu", vendor="cpu"
        )(engine)
    # verl's engine looks the function up when it makes a critic.
    verl.utils.model.load_valuehead_model = make_critic


def make_critic(
    local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
) -> Any:
    """Returns the model that verl's `load_valuehead_model` does, with plain attention."""
    from transformers import AutoModelForTokenClassification

    torch.manual_seed(0)  # the checkpoint of a language model has no head of values
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, attn_implementation="eager"
    )
