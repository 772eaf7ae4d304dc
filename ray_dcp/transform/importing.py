"""`import_checkpoint`: a checkpoint out of a file or folder of another program.

It streams: memory holds neither side whole.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray_dcp.core.checksums import digest_bytes
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidRequestError,
)
from ray_dcp.options import SaveOptions, check_patterns
from ray_dcp.place.scratch import scratch
from ray_dcp.store.location import AnyPlace, checked_url, split_url
from ray_dcp.store.opening import target_of
from ray_dcp.transform.float_dtypes import torch_dtype
from ray_dcp.transform.new_checkpoint import new_checkpoint
from ray_dcp.transform.rewriting import rewrite, save_file
from ray_dcp.transform.source import check_one_state, still_there
from ray_dcp.view.checkpoint_view import SUFFIX, CheckpointView, is_safetensors, read_view
from ray_dcp.view.progress import ShowProgress
from ray_dcp.view.run_view import check_no_step


def import_checkpoint(
    source: str | os.PathLike[str],
    target: AnyPlace,
    *,
    include: Sequence[str] = (),
    dtype: str | None = None,
    weights_only: bool = True,
    options: SaveOptions | None = None,
    progress: ShowProgress = False,
) -> CheckpointView:
    """Converts a file or folder of another program to a checkpoint of ray_dcp.

    Args:
        source: A `torch.save` file, a safetensors file or folder, or a checkpoint of stock DCP.
        target: Path or URL of the new checkpoint, where no checkpoint may exist.
        include: Shell patterns of FQNs; everything if empty.
        dtype: The dtype to cast floating-point tensors to; unchanged if None.
        weights_only: Refuse objects of a `torch.save` file that are not on the allow-list.
        options: As for `save`.
        progress: As for `export`.

    Returns:
        A view of the new checkpoint.

    Raises:
        CheckpointNotFoundError: The source does not exist.
        CheckpointExistsError: The target has files of a checkpoint.
        InvalidRequestError: Nothing matches, an argument is invalid, the target names a step as
            `RUN@STEP`, or the source is a step of several items.
        UnsafeCheckpointError: The file would run code.
        StorageError: There is not enough space, or a storage failed.
        CheckpointError: The source can't be read.
    """
    check_patterns(include, "include")
    check_source(source)
    check_no_step(target, "target")
    source = _plain_path(source)
    path = Path(source)
    is_file = path.is_file()
    is_torch = is_file and not is_safetensors(path)
    seen = [path.stat().st_size, path.stat().st_mtime_ns] if is_file else []
    text = json.dumps([os.fspath(source), *seen, include, dtype, weights_only], default=str)
    work = f"import {digest_bytes(text.encode()).hex()}"
    choice: dict[str, Any] = {"include": list(include), "dtype": torch_dtype(dtype)}
    num_bytes = seen[0] if is_torch else 0
    at = target_of(target, None)
    with new_checkpoint("importing", at, work, num_bytes=num_bytes, progress=progress) as new:
        if is_torch:
            choice |= {"weights_only": weights_only, "options": options}
            save_file(path, target, choice, new)
        elif is_file:
            with scratch(Path(tempfile.gettempdir())) as folder:
                Path(folder, f"{path.stem}{SUFFIX}").symlink_to(path.absolute())
                try:
                    rewrite(read_view(folder), folder, target, choice, new, options)
                except CheckpointError as error:
                    if error.checkpoint_id == os.fspath(folder):
                        error.checkpoint_id = os.fspath(source)
                    raise
        else:
            view = read_view(source)
            check_one_state(view)
            with still_there(view):
                rewrite(view, source, target, choice, new, options)
        return read_view(target)


def _plain_path(source: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Returns the path of a `file://` URL; anything else as it is."""
    scheme, rest = split_url(os.fspath(source))
    return rest if scheme in ("file", "local") else source


def check_source(source: str | os.PathLike[str]) -> None:
    """Checks that the source of an import exists and is of a known kind.

    Raises:
        CheckpointNotFoundError: The source does not exist.
        InvalidRequestError: The source is a file of another kind.
    """
    path = Path(_plain_path(checked_url(source)))
    if not path.exists() and "://" not in os.fspath(_plain_path(source)):
        raise CheckpointNotFoundError(f"expected a file or folder to import, but {source} is none")
    if path.is_file() and not is_safetensors(path):
        with path.open("rb") as file:
            begin = file.read(2)
        # A zip archive, or the pickle that torch wrote before version 1.6.
        if begin not in (b"PK", b"\x80\x02"):
            raise InvalidRequestError(
                f"expected a file of torch.save or safetensors, or a folder of one, but {source} "
                f"is another kind of file",
                key="source",
            )
