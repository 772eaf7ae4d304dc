"""A checkpoint of which another one is made: it is one state, and stands until the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray_dcp.errors import DamagedCheckpointError, InvalidRequestError
from ray_dcp.io.checkpoint import what_became_of
from ray_dcp.store.storage import KeyMissingError
from ray_dcp.view.checkpoint_view import CheckpointView
from ray_dcp.view.verify import items_instead


def check_one_state(view: CheckpointView, key: str = "source") -> None:
    """Checks that a checkpoint is none of a step of several items, which has only their names.

    Args:
        view: The checkpoint.
        key: Name of the argument that the user passed.

    Raises:
        InvalidRequestError: It is.
    """
    if items := items_instead(view.storage, view.checkpoint):
        raise InvalidRequestError(
            f"expected a checkpoint of one state as source, but {view.url} has the items "
            f"{', '.join(items)}, each a folder in it: take these one by one",
            key=key,
        )


def check_still_stands(view: CheckpointView) -> None:
    """Checks that a view's checkpoint is still that of its place.

    Conversions open the place again, and make sure that all their loads read one checkpoint. If
    that of the view stands after a conversion, the conversion has read it.

    Raises:
        CheckpointError: It was replaced or deleted.
    """
    if (reason := what_became_of(view.storage, view.checkpoint)) is not None:
        raise reason


@contextmanager
def still_there(view: CheckpointView) -> Iterator[None]:
    """Turns an error of damage into a better one if the checkpoint was deleted or replaced.

    Raises:
        CheckpointNotFoundError: The checkpoint was deleted while it was read.
        StorageError: The checkpoint was replaced while it was read.
        DamagedCheckpointError: The checkpoint is damaged.
    """
    try:
        yield
    except (DamagedCheckpointError, KeyMissingError) as error:
        became = what_became_of(view.storage, view.checkpoint)
        if became is None:
            raise
        raise became from error
