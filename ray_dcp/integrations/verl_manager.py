"""`RayDcpCheckpointManager`: verl's checkpoint manager for FSDP and VeOmni engines.

It has the methods of verl's `FSDPCheckpointManager`, and needs nothing of verl.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import random
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np
import torch

from ray_dcp.asynchronous import async_save
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidRequestError,
)
from ray_dcp.job.part import Part
from ray_dcp.loading import load
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.place.step_deletion import delete
from ray_dcp.saving import save
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import open_storage, target_of
from ray_dcp.torch_adapter.state import PerRank
from ray_dcp.transform.conversion import read_state_dict
from ray_dcp.transform.exporting import export
from ray_dcp.transform.hf_assets import check_files, write_files
from ray_dcp.view.checkpoint_view import read_view

logger = logging.getLogger(__name__)

FILES = "huggingface"
"""Name of the files of model config and tokenizer in a checkpoint, and of verl's folder of them."""

HF_MODEL = "hf_model"
"""What verl's `save_contents` has for a Hugging Face model of each step; `hf_model:500` makes one
of each 500th."""

_VERLS = "fsdp_config.json"
"""A file that each of verl's own checkpoints has."""

_COPY_BYTES = 16 << 20


class RayDcpCheckpointManager:
    """Saves and loads what verl's `FSDPCheckpointManager` does, and is called as that one.

    A checkpoint has these names; any number of ranks loads it:

        model.*, optimizer.*, lr_scheduler.*, rank (random states of each rank), huggingface.*

    `huggingface` has the files of model config and tokenizer, as they were when this process saved
    first. On another number of ranks random states stay as they are.

    A save to a path is durable when it returns. A save to a part of a `JobStep` returns when its
    bytes are staged, and is committed with the step.

    Args:
        model: The module, as FSDP wraps it.
        optimizer: Its optimizer.
        lr_scheduler: The scheduler of that.
        processing_class: Tokenizer or processor.
        checkpoint_config: verl's config of the checkpoint: `save_contents`, `load_contents`,
            `save_lora_only`.
        trust_remote_code: Of no effect: a Hugging Face model is exported without its class.
        **kwargs: `tokenizer`, an older name of `processing_class`.

    Attributes:
        save_options: Options of all saves; set them on the class in a plug-in of your own.
        load_options: Options of all loads; `prefixes` is set by each.
    """

    save_options: SaveOptions = SaveOptions()
    load_options: LoadOptions = LoadOptions()
    verls: ClassVar[Any] = None
    """verl's own class, which loads checkpoints that it wrote; None until verl imports it."""
    _savers: ClassVar[WeakSet[RayDcpCheckpointManager]] = WeakSet()
    """The managers of this process that save parts: verl may put several models into one."""

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        processing_class: Any = None,
        checkpoint_config: Any = None,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> None:
        if processing_class is None:
            processing_class = kwargs.get("tokenizer")
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.processing_class = processing_class
        self.checkpoint_config = checkpoint_config
        self.trust_remote_code = trust_remote_code
        has_group = torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if has_group else 0
        self.world_size = torch.distributed.get_world_size() if has_group else 1
        self.checkpoint_save_contents = contents_of(checkpoint_config, "save_contents")
        self.checkpoint_load_contents = contents_of(checkpoint_config, "load_contents")
        self.previous_global_step: int | None = None
        self.previous_saved_paths: list[str] = []
        self._files: Mapping[str, bytes] | None = None

    def save_checkpoint(
        self,
        local_path: str | Part | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Saves the state. All ranks call it.

        Args:
            local_path: Path or URL of the checkpoint; or a part of a step.
            hdfs_path: Not used, as in verl's class. Give the URL as `local_path`.
            global_step: The step.
            max_ckpt_to_keep: How many of the checkpoints that this process saved to paths are kept;
                older ones are deleted after the commit. A step of parts is deleted as a whole, by
                whoever opened it.

        Raises:
            InvalidRequestError: The config asks for what this manager does not have.
            CheckpointError: As for `ray_dcp.save`.
        """
        if local_path is None:
            return
        self.previous_global_step = global_step
        state = self._state_to_save()
        if isinstance(local_path, Part):
            self._savers.add(self)
            # Why: the models of one process are saved one after the other, and belong together.
            most = max(self.save_options.max_pending, len(self._savers))
            options = replace(self.save_options, max_pending=most)
            async_save(state, checkpoint_id=local_path, options=options).staged()
            return
        path = str(local_path)
        save(state, checkpoint_id=path, options=self.save_options)
        if self.rank == 0:
            if is_due(self.checkpoint_save_contents, global_step):
                write_model(path, f"{path.rstrip('/')}/{FILES}")
            self._delete_older(path, max_ckpt_to_keep)

    def load_checkpoint(
        self,
        local_path: str | Part | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = False,
    ) -> None:
        """Loads a checkpoint in place. All ranks call it; any number of ranks may have saved it.

        A checkpoint that verl's own class wrote is loaded by that class, on as many ranks as wrote
        it.

        Args:
            local_path: Path or URL of the checkpoint; or a part of a committed step.
            hdfs_path: Not used, as in verl's class.
            del_local_after_load: Not used: no local copy is made.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            CheckpointError: As for `ray_dcp.load`.
        """
        if local_path is None:
            return
        state, prefixes = self._state_to_load()
        options = replace(self.load_options, prefixes=tuple(prefixes))
        try:
            load(state, checkpoint_id=local_path, options=options)
        except CheckpointNotFoundError as error:
            if isinstance(local_path, Part) or not is_verls(str(local_path)):
                raise
            self._load_verls(str(local_path), error)
            return
        if "extra" in self.checkpoint_load_contents and state["rank"].value is not None:
            _set_random_states(state["rank"].value)

    # What is saved

    def _state_to_save(self) -> dict[str, Any]:
        contents = self.checkpoint_save_contents
        self._check(contents, "save_contents")
        state: dict[str, Any] = {"model": self.model} if "model" in contents else {}
        if "optimizer" in contents:
            state["optimizer"] = self.optimizer
        if self._adapter_alone and "model" in contents:
            state |= self._adapter_state(with_optimizer="optimizer" in contents)
        if "extra" in contents:
            state |= self._extra(_random_states())
        if self.rank == 0 and (files := self._hub_files()):
            state[FILES] = files
        return state

    def _state_to_load(self) -> tuple[dict[str, Any], list[str]]:
        """Returns the targets, and the names of those that are loaded."""
        contents = self.checkpoint_load_contents
        self._check(contents, "load_contents")
        # Why always the model: an optimizer's values are named by its parameters.
        state: dict[str, Any] = {"model": self.model}
        prefixes: list[str] = [name for name in ("model", "optimizer") if name in contents]
        if "optimizer" in contents:
            state["optimizer"] = self.optimizer
        if self._adapter_alone and "model" in contents:
            prefixes += [f"model.{name}" for name in self._adapter_names()]
            prefixes.remove("model")
        if "extra" in contents:
            extra = self._extra(None)
            state |= extra
            prefixes += extra
        return state, prefixes

    def _extra(self, random_states: Any) -> dict[str, Any]:
        extra = {} if self.lr_scheduler is None else {"lr_scheduler": self.lr_scheduler}
        return {**extra, "rank": PerRank(random_states, resized="keep")}

    def _check(self, contents: Collection[str], key: str) -> None:
        for name in ("model", "optimizer"):
            if name in contents and getattr(self, name) is None:
                raise InvalidRequestError(
                    f"expected {name!r} to be there, as checkpoint.{key} names it, but this "
                    f"engine has none; leave it out of {key}",
                    key=key,
                )

    @property
    def _adapter_alone(self) -> bool:
        return bool(_get(self.checkpoint_config, "save_lora_only", False)) and hasattr(
            getattr(self.model, "_fsdp_wrapped_module", self.model), "peft_config"
        )

    def _adapter_names(self) -> list[str]:
        found = [name for name in self.model.state_dict() if "lora_" in name or ".adapter_" in name]
        if not found:
            raise InvalidRequestError(
                "expected names with 'lora_' or '.adapter_' in the model, as "
                "checkpoint.save_lora_only is set and it has a peft_config, but found none",
                key="save_lora_only",
            )
        return found

    def _adapter_state(self, *, with_optimizer: bool) -> dict[str, Any]:
        """Returns the weights of the adapter alone, and the optimizer under the model's names."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        own = self.model.state_dict()
        state: dict[str, Any] = {"model": {name: own[name] for name in self._adapter_names()}}
        if with_optimizer:
            state["optimizer"] = get_optimizer_state_dict(self.model, self.optimizer)
        return state

    def _hub_files(self) -> Mapping[str, bytes]:
        """Returns the files of model config and tokenizer, by their names."""
        if self._files is None:
            model = getattr(self.model, "_fsdp_wrapped_module", self.model)
            with TemporaryDirectory(prefix="ray-dcp-verl-") as folder:
                _write_hub_files(model, self.processing_class, Path(folder))
                each = sorted(it for it in Path(folder).rglob("*") if it.is_file())
                self._files = {it.relative_to(folder).as_posix(): it.read_bytes() for it in each}
        return self._files

    # Checkpoints of paths

    def _delete_older(self, path: str, most: int | None) -> None:
        """Deletes the oldest checkpoints that this process saved, beyond a limit."""
        paths = self.previous_saved_paths
        paths[:] = [one for one in paths if one != path] + [path]
        if not isinstance(most, int) or most <= 0:
            return
        for one in paths[:-most]:
            try:
                delete(one)
            except CheckpointError as error:
                logger.warning(
                    "%s stays beyond the limit of %d checkpoints, and the next save tries again: "
                    "%s",
                    one,
                    most,
                    error,
                )
                continue
            paths.remove(one)
            if "://" not in one:
                # Why: it has what verl and `write_model` wrote beside. verl deletes all of it, too.
                shutil.rmtree(one, ignore_errors=True)

    def _load_verls(self, path: str, error: CheckpointNotFoundError) -> None:
        own = f"model_world_size_{self.world_size}_rank_{self.rank}.pt"
        if self.verls is None or not os.path.exists(os.path.join(path, own)):
            found = sorted(map(os.path.basename, glob.glob(os.path.join(path, "model_world*"))))
            raise CheckpointNotFoundError(
                f"expected a checkpoint of ray_dcp in {path}, or one that verl wrote on "
                f"{self.world_size} ranks, found {', '.join(found[:3]) or 'neither'}. Resume once "
                f"on the number of ranks in these names: from its next save on the run can be "
                f"resumed on any",
                checkpoint_id=path,
            ) from error
        logger.info("Rank %d loads %s as verl's own class saved it", self.rank, path)
        self.verls(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            processing_class=self.processing_class,
            checkpoint_config=self.checkpoint_config,
            trust_remote_code=self.trust_remote_code,
        ).load_checkpoint(path)


def export_pretrained(
    checkpoint_id: AnyPlace, path: str | os.PathLike[str], *, dtype: str | None = None
) -> None:
    """Writes the model of a checkpoint with its config and tokenizer, for `from_pretrained`.

    Args:
        checkpoint_id: Path or URL of a checkpoint that a `RayDcpCheckpointManager` saved; or a part
            of a committed step, as `JobCheckpoints.at` returns it.
        path: The new folder.
        dtype: As for `ray_dcp.export`.

    Raises:
        UnsafeCheckpointError: The name of a file leaves the folder.
        DamagedCheckpointError: A file has no bytes.
        CheckpointError: As `ray_dcp.export`.
    """
    files = _files_in(checkpoint_id)
    export(checkpoint_id, path, "hf", include=("model.*",), strip_prefix="model.", dtype=dtype)
    write_files(Path(path), files)


def write_model(checkpoint_id: AnyPlace, target: str) -> None:
    """Does what `export_pretrained` does, to a folder that may be a URL, or have a model already.

    Args:
        checkpoint_id: As for `export_pretrained`.
        target: Path or URL of the folder.

    Raises:
        CheckpointError: As `export_pretrained`, or the storage of the target failed.
    """
    with TemporaryDirectory(
        prefix=".ray-dcp-verl-", dir=None if "://" in target else _made(Path(target).parent)
    ) as folder:
        made = Path(folder, "model")
        export_pretrained(checkpoint_id, made)
        if "://" not in target:
            shutil.rmtree(target, ignore_errors=True)
            made.rename(target)
            return
        storage = open_storage(target_of(target, None))
        for file in sorted(it for it in made.rglob("*") if it.is_file()):
            writer = storage.open_writer(file.relative_to(made).as_posix())
            try:
                with file.open("rb") as source:
                    while block := source.read(_COPY_BYTES):
                        writer.write(block)
                writer.commit()
            except BaseException:
                writer.abort()
                raise


def contents_of(config: Any, key: str) -> list[str]:
    """Returns what is saved or loaded, as verl's config says it.

    Examples:
        >>> contents_of({"save_contents": ["model"]}, "save_contents"), contents_of(None, "x")
        (['model'], ['model', 'optimizer', 'extra'])
    """
    found: Sequence[str] | None = _get(config, key, None)
    return ["model", "optimizer", "extra"] if found is None else list(found)


def is_due(contents: Sequence[str], step: int) -> bool:
    """Returns whether a Hugging Face model of a step is to be written.

    Raises:
        InvalidRequestError: The number after `hf_model:` is none.

    Examples:
        >>> is_due(["model", "hf_model"], 7), is_due(["hf_model:5"], 7), is_due(["hf_model:5"], 10)
        (True, False, True)
    """
    for one in contents:
        name, _, every = one.partition(":")
        if name != HF_MODEL:
            continue
        if every and not (every.isdecimal() and int(every)):
            raise InvalidRequestError(
                f"expected a number of steps after {HF_MODEL!r} in save_contents, as in "
                f"'{HF_MODEL}:500', found {one!r}",
                key="save_contents",
            )
        return not every or step % int(every) == 0
    return False


def is_verls(path: str) -> bool:
    """Returns whether verl's own class wrote a checkpoint to a folder of this machine."""
    return os.path.exists(os.path.join(path, _VERLS))


def _get(config: Any, key: str, default: Any) -> Any:
    """Returns a value of a config: a mapping, verl's dataclass or omegaconf's."""
    return default if config is None else config.get(key, default)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# Files of a model


def _write_hub_files(model: Any, processing_class: Any, folder: Path) -> None:
    """Writes the files of config and tokenizer that verl's class writes, without weights."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        auto_map = getattr(config, "auto_map", None)
        if auto_map and None in auto_map:
            # Why: such a config can't be written as JSON.
            config.auto_map = {key: one for key, one in auto_map.items() if key is not None}
        config.save_pretrained(folder)
        if auto_map:
            from transformers.dynamic_module_utils import custom_object_save

            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            custom_object_save(base, folder, config=config)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        # Suppressed: some models have one that transformers refuses to write.
        with suppress(ValueError):
            generation.save_pretrained(folder)
    if processing_class is not None:
        processing_class.save_pretrained(folder)
    adapters = getattr(model, "peft_config", None) or {}
    if adapter := adapters.get("default") or next(iter(adapters.values()), None):
        adapter.save_pretrained(folder)
        kind = getattr(adapter.task_type, "value", adapter.task_type)
        told = {"r": adapter.r, "lora_alpha": adapter.lora_alpha, "task_type": kind}
        # Why: verl's merger of models reads it.
        (folder / "lora_train_meta.json").write_text(json.dumps(told, indent=4))


def _files_in(checkpoint_id: AnyPlace) -> Mapping[str, bytes]:
    """Returns the files of config and tokenizer that a checkpoint has, checked.

    Raises:
        UnsafeCheckpointError: The name of a file leaves its folder.
        DamagedCheckpointError: A file has no bytes.
    """
    if not any(name.startswith(f"{FILES}.") for name in read_view(checkpoint_id).names):
        return {}
    files: Mapping[str, Any] = read_state_dict(checkpoint_id, include=(f"{FILES}.*",))[FILES]
    check_files(files)
    return files


# Random states


def _random_states() -> dict[str, Any]:
    """Returns the random states of this process, and that of its device."""
    states = {
        "cpu": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }
    if torch.accelerator.is_available():
        states["device"] = torch.get_device_module().get_rng_state()
    return states


def _set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    np.random.set_state(states["numpy"])
    random.setstate(states["random"])
    if "device" in states and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(states["device"])
