"""New tensors in the place of targets that have no memory, or another dtype than is to be kept."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from ray_dcp.seam.shards import Layouts, sharded
from ray_dcp.seam.sink import fresh_like

__all__ = ["fresh_dtensor", "fresh_plain"]


def fresh_plain(
    tensor: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Returns a new tensor like a plain one, as what it is and as the parts to fill.

    Args:
        tensor: On any device; one on the meta device gets memory.
        dtype: Of the new one.
    """
    made = _fresh(tensor, dtype, None)
    if isinstance(tensor, torch.nn.Parameter):
        may_learn = tensor.requires_grad and (dtype.is_floating_point or dtype.is_complex)
        return torch.nn.Parameter(made, requires_grad=may_learn), (made,)
    return made, (made,)


def fresh_dtensor(
    tensor: DTensor, fqn: str, dtype: torch.dtype
) -> tuple[DTensor, tuple[torch.Tensor, ...]]:
    """Returns a new DTensor like one, as what it is and as the parts to fill.

    Args:
        tensor: On any device; one on the meta device gets memory.
        fqn: For messages.
        dtype: Of the new one.
    """
    # Shape and stride are told, as the tensor may be sharded unevenly.
    made = DTensor.from_local(
        _fresh(tensor.to_local(), dtype, tensor.device_mesh.device_type),
        device_mesh=tensor.device_mesh,
        placements=tensor.placements,
        shape=tensor.size(),
        stride=tensor.stride(),
    )
    return made, sharded(made, fqn, Layouts(), saving=False).tensors


def _fresh(tensor: torch.Tensor, dtype: torch.dtype, device_type: str | None) -> torch.Tensor:
    if not tensor.is_meta:
        return torch.empty_like(tensor, dtype=dtype, requires_grad=False)
    if dtype != tensor.dtype:
        tensor = torch.empty_like(tensor, dtype=dtype)
    return fresh_like(tensor, device_type)
