"""Where torch begins: tensors and state dicts to plan values and back. No ray, no storage of ours.

Importing it makes `ray_dcp.CheckpointError` a torch `CheckpointException` too, so that code written
for `torch.distributed.checkpoint` catches ours. It stays an `Exception`.
"""

from torch.distributed.checkpoint.api import CheckpointException

from ray_dcp.errors import CheckpointError

__all__: list[str] = []


def _adopt() -> None:
    """Gives `CheckpointError` torch's class as a second base; again changes nothing.

    Careful: in the other order Python refuses, as the two have different memory layouts.
    """
    if CheckpointException not in CheckpointError.__bases__:
        CheckpointError.__bases__ = (Exception, CheckpointException)


_adopt()
