"""Where the cases run: on a GPU, or on host memory with a played driver."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from ray_dcp.torch_adapter import devices
from tests.gpu.played import Played


class Machine:
    """A device. As a context manager it makes its driver that of this process.

    Attributes:
        device: Of torch.
        is_played: Whether rates mean nothing here.
        state_bytes: How long a large state is.
    """

    device: torch.device
    is_played: bool
    state_bytes: int

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of host memory on the device."""
        raise NotImplementedError

    def launch(self, work: Callable[[], Any]) -> None:
        """Gives work to the caller's stream; it may be done later."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Returns when all work is done."""
        raise NotImplementedError

    def registered_bytes(self) -> int:
        """Returns how much host memory is pinned."""
        raise NotImplementedError

    def fill_up(self, left_bytes: int) -> list[Any]:
        """Takes the device's memory but for some, and returns what holds it."""
        raise NotImplementedError

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Gpu(Machine):
    """The current CUDA device."""

    is_played = False

    def __init__(self, state_bytes: int) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.state_bytes = state_bytes
        self.mode = mig_mode()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def launch(self, work: Callable[[], Any]) -> None:
        work()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def registered_bytes(self) -> int:
        return sum(len(one) for one in devices._registered.values())

    def fill_up(self, left_bytes: int) -> list[Any]:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(self.device).total_memory
        allowed = torch.cuda.memory_reserved(self.device) + left_bytes
        torch.cuda.set_per_process_memory_fraction(allowed / total, self.device)
        return [_Whole(self.device)]


class _Whole:
    """Gives a process the whole device again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __del__(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, self._device)


class PlayedGpu(Machine):
    """Host memory that a played driver takes for a device's."""

    is_played = True
    device = torch.device("cpu")

    def __init__(self, state_bytes: int = 4 << 20) -> None:
        self.state_bytes = state_bytes
        self.driver = Played()
        self._real = devices.CUDA

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        self.driver.own(tensor)
        return tensor

    def launch(self, work: Callable[[], Any]) -> None:
        self.driver.launch(work)

    def synchronize(self) -> None:
        self.driver.synchronize()

    def registered_bytes(self) -> int:
        return sum(self.driver.registered.values())

    def fill_up(self, left_bytes: int) -> list[Any]:
        self.driver.memory_bytes = left_bytes
        return [_Unbounded(self.driver)]

    def __enter__(self) -> Machine:
        devices.CUDA = self.driver
        return self

    def __exit__(self, *_: object) -> None:
        devices.CUDA = self._real


class _Unbounded:
    def __init__(self, driver: Played) -> None:
        self._driver = driver

    def __del__(self) -> None:
        self._driver.memory_bytes = None


def machine(gigabytes: float = 8.0) -> Machine:
    """Returns the GPU of this machine, or one that is played where there is none."""
    return Gpu(int(gigabytes * 1e9)) if torch.cuda.is_available() else PlayedGpu()


def mig_mode() -> str:
    """Returns what the driver says of partitions (MIG); only asks, and sets nothing."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "not known"
    asked = [command, "--query-gpu=mig.mode.current,mig.mode.pending", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "not known"
    return done.stdout.strip() or "not known"
