"""Writes a checkpoint again, under other names or in other dtypes, which exports and imports share.

It streams: memory holds neither side whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ray_dcp.errors import (
    InvalidRequestError,
)
from ray_dcp.io.checkpoint import what_became_of
from ray_dcp.options import SaveOptions
from ray_dcp.place.scratch import remove_dead_scratch, scratch
from ray_dcp.place.target_lease import TargetLease, leases_at
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import open_storage
from ray_dcp.transform.copying import check_free
from ray_dcp.transform.free_space import check_free_bytes, check_space
from ray_dcp.view.checkpoint_view import CheckpointView
from ray_dcp.view.progress import Meter
from ray_dcp.view.verify import items_instead


def check_still_stands(view: CheckpointView) -> None:
    """Checks that a view's checkpoint is still that of its place.

    Conversions open the place again, and make sure that all their loads read one checkpoint. If
    that of the view stands after a conversion, the conversion has read it.

    Raises:
        CheckpointError: It was replaced or deleted.
    """
    if (reason := what_became_of(view.storage, view.checkpoint)) is not None:
        raise reason


def check_one_state(view: CheckpointView) -> None:
    """Raises for a step of several items, whose own checkpoint has only their names."""
    if items := items_instead(view.storage, view.checkpoint):
        raise InvalidRequestError(
            f"expected a checkpoint of one state as source, but {view.url} has the items "
            f"{', '.join(items)}, each a folder in it: take these one by one",
            key="source",
        )


def rewrite(
    view: CheckpointView,
    source: AnyPlace,
    target: AnyPlace,
    choice: Mapping[str, Any],
    options: SaveOptions | None = None,
    *,
    meter: Meter,
    lease: TargetLease,
) -> None:
    """Saves the source anew, by way of a mapped temporary file: only its pages are in memory."""
    from ray_dcp.transform.conversion import dcp_to_torch_save

    storage = open_storage(target)
    local = isinstance(storage, LocalStorage)
    total = sum(info.num_bytes for info in view.tensors.values())
    check_space(target, 2 * total if local else 0)
    parent = Path(storage.url).parent if local else Path(tempfile.gettempdir())
    parent = next(folder for folder in (parent, *parent.parents) if folder.is_dir())
    if lease.is_done:
        remove_dead_scratch(parent)
        return
    with scratch(parent) as folder:
        check_free_bytes(folder, total)
        made = Path(folder, "state.pt")
        # What is written: the load expects what is read.
        patterns = choice["include"]
        meter.expect(
            sum(
                info.num_bytes
                for name, info in view.tensors.items()
                if not patterns or any(fnmatchcase(name, one) for one in patterns)
            )
        )
        dcp_to_torch_save(source, made, **choice, progress=meter)
        check_still_stands(view)
        save_file(made, target, {"weights_only": True, "options": options}, lease, meter)


def check_writable(target: AnyPlace) -> None:
    """Checks that no checkpoint is at a place, unless a lease of a command is there.

    Raises:
        CheckpointExistsError: There is.
    """
    storage = open_storage(target)
    if not leases_at(storage):
        check_free(storage)


def save_file(
    file: Path, target: AnyPlace, choice: Mapping[str, Any], lease: TargetLease, meter: Meter
) -> None:
    """Saves a `torch.save` file under the lease of the target, unless that was done before."""
    from ray_dcp.transform.conversion import save_torch_file

    if not lease.is_done:
        check_free(open_storage(target), lease.dead)
        save_torch_file(file, target, **choice, progress=meter, attempt=lease.attempt)
