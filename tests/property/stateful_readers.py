"""What stands at a place, by every reader there is: ours at any world size, stock DCP, the files.

Every element of a state tells its value, so that a mixture of two saves is seen.
"""

from __future__ import annotations

import ast
import shutil
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.api import CheckpointException

from ray_dcp.errors import CheckpointNotFoundError
from ray_dcp.io.checkpoint import METADATA_KEY
from ray_dcp.store.local import LocalStorage
from tests.inline_ranks import run_ranks
from tests.numpy_ranks import load_ranks


def state_of(value: int) -> dict:
    """Returns a state in which every element tells its value."""
    return {
        "a": np.arange(35, dtype=np.float32).reshape(7, 5) + value * 100,
        "rep.large": np.arange(620, dtype=np.float64).reshape(31, 20) + value * 1000,
        "rep.bias": np.full(5, value, np.int32),
        "step": {"step": value},
    }


SHAPES = state_of(0)


def keys_at(storage) -> set[str]:
    """Returns the keys of a storage, those of unpublished files as well."""
    unpublished = getattr(storage, "unpublished", tuple)()
    return {entry.key for entry in (*storage.list(), *unpublished)}


def contents(storage) -> dict[str, bytes]:
    """Returns every file of a storage."""
    return {entry.key: storage.read(entry.key) for entry in storage.list()}


def loaded(work) -> int:
    """Returns which value the work of a rank loaded, whole."""
    value = ast.literal_eval(work.state["step"].decode())["step"]
    work.check(state_of(value))
    return value


def what_stands(url: str, world_size: int) -> int | None:
    """Returns the value that loads, the same on every rank; None when there is no checkpoint."""
    ranks, works = load_ranks(SHAPES, world_size, url)
    results = run_ranks(ranks)
    if any(isinstance(result.error, CheckpointNotFoundError) for result in results):
        return None
    for result in results:
        result.get()
    (value,) = {loaded(work) for work in works}
    return value


def stock_sees(storage, directory: Path):
    """Returns the value that stock DCP loads, None if it sees no checkpoint, or its error."""
    keys = [entry.key for entry in storage.list()]
    if METADATA_KEY not in keys:
        return None
    if isinstance(storage, LocalStorage):
        path = Path(storage.url)
    else:
        path = directory
        shutil.rmtree(path, ignore_errors=True)
        for key in keys:
            (path / key).parent.mkdir(parents=True, exist_ok=True)
            (path / key).write_bytes(storage.read(key))
    arrays = {name: value for name, value in SHAPES.items() if isinstance(value, np.ndarray)}
    found = {
        name: torch.zeros(a.shape, dtype=torch.from_numpy(a).dtype) for name, a in arrays.items()
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stock.load(found, checkpoint_id=str(path), no_dist=True)
    except (Exception, CheckpointException) as error:
        return error
    value = int(found["rep.bias"][0])
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor.numpy(), state_of(value)[name], err_msg=name)
    return value
