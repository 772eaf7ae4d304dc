"""Stands for `torch.distributed.checkpoint.protocol` under torch before 2.14, which has none."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["CheckpointableTensor"]


@runtime_checkable
class CheckpointableTensor(Protocol):
    """A plain tensor that says by four attributes which boxes of a global tensor it holds.

    `isinstance` asks for the attributes alone, as torch's own protocol does. Aligned with each
    other, the last three have an entry for each box.

    Attributes:
        global_shape: Of the tensor that is saved.
        global_offsets: Where each box starts in it.
        local_offsets: Where each box starts in this tensor.
        local_sizes: Lengths of each box.

    Example:
        >>> import torch
        >>> tensor = torch.zeros(4)
        >>> isinstance(tensor, CheckpointableTensor)
        False
        >>> tensor.global_shape, tensor.global_offsets = (8,), ((4,),)
        >>> tensor.local_offsets, tensor.local_sizes = ((0,),), ((4,),)
        >>> isinstance(tensor, CheckpointableTensor)
        True

    Source: `torch/distributed/checkpoint/protocol.py` of torch 2.14.
    """

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    local_offsets: tuple[tuple[int, ...], ...]
    local_sizes: tuple[tuple[int, ...], ...]
