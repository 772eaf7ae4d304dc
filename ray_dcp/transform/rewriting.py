"""Writes a checkpoint again, under other names or in other dtypes, which exports and imports share.

It streams: memory holds neither side whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ray_dcp.options import SaveOptions, matches
from ray_dcp.place.scratch import remove_dead_scratch, scratch
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import AnyPlace
from ray_dcp.transform.free_space import check_free_bytes, check_space
from ray_dcp.transform.new_checkpoint import NewCheckpoint
from ray_dcp.transform.source import check_still_stands
from ray_dcp.view.checkpoint_view import CheckpointView


def rewrite(
    view: CheckpointView,
    source: AnyPlace,
    target: AnyPlace,
    choice: Mapping[str, Any],
    new: NewCheckpoint,
    options: SaveOptions | None = None,
) -> None:
    """Saves the source anew, by way of a mapped temporary file: only its pages are in memory."""
    from ray_dcp.transform.conversion import dcp_to_torch_save

    local = isinstance(new.storage, LocalStorage)
    parent = Path(new.storage.url).parent if local else Path(tempfile.gettempdir())
    parent = next(folder for folder in (parent, *parent.parents) if folder.is_dir())
    if new.lease.is_done:
        remove_dead_scratch(parent)
        return
    include, dtype = choice["include"], choice["dtype"]
    infos = [info for name, info in view.tensors.items() if matches(name, include)]
    num_bytes = sum(
        info.num_bytes if dtype is None or "float" not in info.dtype
        else prod(info.shape) * dtype.itemsize
        for info in infos
    )  # fmt: skip
    check_space(new.storage, 2 * num_bytes)
    with scratch(parent) as folder:
        check_free_bytes(folder, num_bytes)
        made = Path(folder, "state.pt")
        # What is written: the load expects what is read.
        new.meter.expect(sum(info.num_bytes for info in infos))
        dcp_to_torch_save(source, made, **choice, progress=new.meter)
        check_still_stands(view)
        save_file(made, target, {"weights_only": True, "options": options}, new)


def save_file(file: Path, target: AnyPlace, choice: Mapping[str, Any], new: NewCheckpoint) -> None:
    """Saves a `torch.save` file under the lease of the target, unless that was done before."""
    from ray_dcp.transform.conversion import save_torch_file

    if not new.lease.is_done:
        new.check_free()
        save_torch_file(file, target, **choice, progress=new.meter, attempt=new.lease.attempt)
