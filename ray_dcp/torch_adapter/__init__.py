"""The layer between torch's values and those of planning.

It uses neither ray nor ray_dcp's storage. Importing it makes `ray_dcp.CheckpointError` a torch
`CheckpointException` too, so that code written for `torch.distributed.checkpoint` catches it. It
remains an `Exception`.
"""

from torch.distributed.checkpoint.api import CheckpointException

from ray_dcp.errors import CheckpointError

__all__: list[str] = []


def _adopt() -> None:
    """Makes torch's class a second base of `CheckpointError`; idempotent.

    Careful: Python refuses the other order, as the two classes have different memory layouts.
    """
    if CheckpointException not in CheckpointError.__bases__:
        CheckpointError.__bases__ = (Exception, CheckpointException)


_adopt()
