"""Files of `torch.save`, read by mapping them: safely, and only what is asked for."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from ray_dcp.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InternalError,
    InvalidRequestError,
    UnsafeCheckpointError,
)
from ray_dcp.seam.torch_values import read_torch_save

__all__ = ["fill_storages", "load_torch_file"]

_WAY_OUT = "pass weights_only=False"


def load_torch_file(path: str | os.PathLike[str], *, weights_only: bool = True) -> Any:
    """Returns what a file of `torch.save` holds; its tensors are its mapped pages.

    Args:
        path: The file. Tensors of files from before torch 1.6 are copies.
        weights_only: Refuse objects that are not on the allow-list. False runs code from the file.

    Raises:
        CheckpointNotFoundError: There is no such file.
        UnsafeCheckpointError: It asks for a class or function that is not on the allow-list.
        DamagedCheckpointError: `torch.save` did not write it, or it is cut off.
        InvalidRequestError: The path is a directory.
    """
    name = os.fspath(path)
    if Path(name).is_dir():
        raise InvalidRequestError(f"expected a file of torch.save, found the directory {name}")
    if not Path(name).exists():
        raise CheckpointNotFoundError(f"there is no file {name}", checkpoint_id=name)
    try:
        if not weights_only:
            is_zip = zipfile.is_zipfile(name)
            return torch.load(name, map_location="cpu", mmap=is_zip, weights_only=False)
        with Path(name).open("rb") as stream:
            # Why not closed: its tensors are views of it. It goes with the last of them.
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return read_torch_save(mapped, is_shared=True)
    except UnsafeCheckpointError as error:
        told = error.message.replace("load with LoadOptions(weights_only=False)", _WAY_OUT)
        error.message = f"a safe load refuses {name}: {told}"
        error.checkpoint_id = name
        raise
    except Exception as error:  # damaged bytes raise anything
        raise DamagedCheckpointError(
            f"expected a file of torch.save, but {name} can't be read: {type(error).__name__}: "
            f"{error}",
            checkpoint_id=name,
        ) from error


def fill_storages(mapped: Any, value: Any) -> None:
    """Copies the bytes of all tensors in one object into those of another like it.

    Args:
        mapped: Whose tensors have the right shapes and no values yet, however deep they are.
        value: What it was made of.

    Raises:
        InternalError: The two are not alike.
    """
    into, of = _storages(mapped), _storages(value)
    if [storage.nbytes() for storage in into] != [storage.nbytes() for storage in of]:
        raise InternalError(
            f"expected tensors of the same bytes in both objects, found {len(into)} and {len(of)}"
        )
    for target, source in zip(into, of, strict=True):
        target.copy_(source)


def _storages(value: Any) -> list[torch.UntypedStorage]:
    finder = _StorageFinder(io.BytesIO(), protocol=2)
    finder.dump(value)
    return finder.found


class _StorageFinder(pickle.Pickler):
    """Goes through an object as `torch.save` does, and keeps what it would write apart."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.found: list[torch.UntypedStorage] = []

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.TypedStorage):
            obj = obj._untyped_storage
        if not isinstance(obj, torch.UntypedStorage):
            return None
        self.found.append(obj)
        return len(self.found)
