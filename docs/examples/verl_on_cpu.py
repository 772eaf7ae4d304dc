"""A platform of verl without an accelerator, for `verl_trainer.py`: a plug-in of verl.

verl registers its FSDP engines for CUDA and NPU. Here they are registered for this platform, too,
and a worker begins the process group with gloo.
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
        return True

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
