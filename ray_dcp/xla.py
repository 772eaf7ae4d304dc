"""The names of torch_xla's `experimental.distributed_checkpoint`, for its place.

`from torch_xla.experimental.distributed_checkpoint import X` becomes `from ray_dcp.xla import X`.
torch_xla itself is imported only where it is in use.
"""

from __future__ import annotations

from ray_dcp.manager.spmd import SPMDCheckpointManager as CheckpointManager
from ray_dcp.torch_adapter.priming import prime_optimizer
from ray_dcp.torch_adapter.spmd import SPMDLoadPlanner, SPMDSavePlanner

__all__ = ["CheckpointManager", "SPMDLoadPlanner", "SPMDSavePlanner", "prime_optimizer"]
