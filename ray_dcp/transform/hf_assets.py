"""Files beside the weights of a Hugging Face model: config, generation config, tokenizer.

A state dict has them as bytes under the name `hf_assets`, where `export` finds them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ray_dcp.errors import DamagedCheckpointError, InvalidRequestError
from ray_dcp.format.names import check_file_key
from ray_dcp.transform.peft_adapter import CONFIG_FILE, DEFAULT

MODEL_CONFIG = "config.json"
_IN_STATE = re.compile(r"(?:(?:.*?\.)?hf_assets|trainer\.files)\.(.+)", re.DOTALL)
"""Names in a checkpoint: where a user put the files, and where the callback of a Trainer does."""
_KINDS = frozenset((".json", ".jinja", ".txt", ".model", ".tiktoken", ".spm", ".vocab", ".py"))
"""Suffixes of files of configs, of tokenizers and of code that a model brings along."""
_INDEX = ".index.json"
"""End of the names of files that list the files of weights."""


def hf_assets(*parts: Any) -> dict[str, bytes]:
    """Returns the files that `save_pretrained` writes beside the weights, to be saved with a state.

    Saved under the name `hf_assets`, `export` writes them beside the weights of the format `hf`.

    Args:
        *parts: Models of transformers or PEFT, of which the configs are taken; tokenizers,
            processors and configs; or folders, of which all files but weights are taken.

    Raises:
        InvalidRequestError: A part is none of these.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "config.json").write_text("{}")
        >>> _ = (folder / "model.safetensors").write_text("")
        >>> hf_assets(folder)
        {'config.json': b'{}'}
    """
    found: dict[str, bytes] = {}
    for part in parts:
        if isinstance(part, (str, os.PathLike)):
            found.update(files_of(part))
        else:
            found.update(_files_of_object(part))
    return found


def files_of(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """Returns the files of a folder that are neither weights nor hidden.

    Raises:
        InvalidRequestError: It is no folder, or has no such file.
    """
    top = Path(folder)
    if not top.is_dir():
        raise InvalidRequestError(
            f"expected a folder with config.json and the files of a tokenizer, but {top} is none",
            key="assets",
        )
    found = {name: path.read_bytes() for name, path in _all_files(top) if _is_asset(name)}
    if not found:
        raise InvalidRequestError(
            f"expected config.json or the files of a tokenizer in {top}, found none", key="assets"
        )
    return found


def _is_asset(name: str) -> bool:
    parts = name.split("/")
    is_shown = not any(part.startswith(".") for part in parts)
    return is_shown and Path(name).suffix in _KINDS and not name.endswith(_INDEX)


def _all_files(folder: Path) -> Iterable[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def _files_of_object(part: Any) -> dict[str, bytes]:
    adapters = getattr(part, "peft_config", None)
    is_peft = isinstance(adapters, Mapping) and hasattr(part, "base_model")
    configs: list[Any] = [part]
    if not is_peft and hasattr(part, "state_dict"):
        configs = [getattr(part, "config", None), getattr(part, "generation_config", None)]
        configs = [one for one in configs if one is not None]
    if not is_peft and not (configs and all(hasattr(one, "save_pretrained") for one in configs)):
        raise InvalidRequestError(
            f"expected a model of transformers or PEFT, a tokenizer, a config or a folder, found "
            f"{type(part).__name__}",
            key="parts",
        )
    with TemporaryDirectory(prefix="ray-dcp-assets-") as folder:
        if is_peft and isinstance(adapters, Mapping):
            _write_adapters(part, adapters, Path(folder))
        else:
            for config in configs:
                config.save_pretrained(folder)
        found = {name: path.read_bytes() for name, path in _all_files(Path(folder))}
    if MODEL_CONFIG in found and configs[0] is not part:
        name = type(part).__name__.removeprefix("FSDP")
        config = json.loads(found[MODEL_CONFIG])
        # Source: `PreTrainedModel.save_pretrained`, which names the class of the model.
        found[MODEL_CONFIG] = _as_json({**config, "architectures": [name]})
    return found


def _write_adapters(model: Any, adapters: Mapping[str, Any], folder: Path) -> None:
    # Source: `PeftModel.save_pretrained` of PEFT 0.21.
    for name, config in adapters.items():
        own = folder if name == DEFAULT else folder / check_file_key(name)
        config.save_pretrained(os.fspath(own))
        told = json.loads((own / CONFIG_FILE).read_bytes())
        base = told.get("base_model_name_or_path") or getattr(model, "name_or_path", None) or None
        told = {**told, "base_model_name_or_path": base, "inference_mode": True}
        (own / CONFIG_FILE).write_bytes(_as_json(told))


def _as_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def assets_in(names: Iterable[str]) -> dict[str, str]:
    """Returns the files that a checkpoint has, by the names of their values.

    Examples:
        >>> assets_in(["model.w", "hf_assets.config.json", "trainer.files.vocab.txt"])
        {'hf_assets.config.json': 'config.json', 'trainer.files.vocab.txt': 'vocab.txt'}
    """
    found = ((name, _IN_STATE.fullmatch(name)) for name in names)
    return {name: match[1] for name, match in found if match is not None}


def check_files(files: Mapping[str, Any]) -> None:
    """Checks that files of a checkpoint stay in the folder that they are written to.

    Raises:
        UnsafeCheckpointError: The name of a file leaves the folder.
        DamagedCheckpointError: A file has no bytes.
    """
    for name, content in files.items():
        check_file_key(name)
        if not isinstance(content, bytes):
            raise DamagedCheckpointError(
                f"expected bytes as the file {name!r} beside a model, found a "
                f"{type(content).__name__}; save what ray_dcp.hf_assets returns"
            )


def as_exported(files: Mapping[str, bytes], adapter: str | None, dtype: str | None) -> Any:
    """Returns the files that an export writes.

    Args:
        files: The files of the model.
        adapter: Name of the PEFT adapter that is exported; None if it is a whole model.
        dtype: What floating-point tensors are cast to; None if they stay.
    """
    found = dict(files)
    if adapter is not None:
        # The weights are in the folder itself, and the base model's config is not theirs.
        own = found.pop(f"{adapter}/{CONFIG_FILE}", None)
        found.pop(MODEL_CONFIG, None)
        found |= {} if own is None else {CONFIG_FILE: own}
    elif dtype is not None and MODEL_CONFIG in found:
        config = json.loads(found[MODEL_CONFIG])
        name = "torch_dtype" if "torch_dtype" in config else "dtype"
        # Why: transformers loads weights in the dtype of the config.
        found[MODEL_CONFIG] = _as_json({**config, name: dtype})
    return found


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files into a folder.

    Raises:
        UnsafeCheckpointError: The name of a file leaves the folder.
        DamagedCheckpointError: A file has no bytes.
    """
    check_files(files)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
