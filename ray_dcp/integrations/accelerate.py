"""`save_state` and `load_state`: checkpoints of a Hugging Face `Accelerator`.

Requires `ray-dcp[accelerate]`. A checkpoint has what `Accelerator.save_state` keeps, under
these names; those of a second model, optimizer or scheduler end with `_1`:

    model.*, optimizer.*, scheduler.*, scaler.*, rank, objects.0.*,
    accelerate._extra_state.{step, num_objects, objects.0.*, loaders.0.*, hook_files.*}

Registered modules and optimizers are `objects.*`: their shards stay shards. The state of any other
registered object is part of the extra state, and is loaded in whatever form it was saved.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from accelerate.data_loader import SeedableRandomSampler, get_sampler
from accelerate.utils import DistributedType
from accelerate.utils.constants import RNG_STATE_NAME

from ray_dcp.asynchronous import SaveHandle, async_save
from ray_dcp.core import bounds
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidRequestError,
)
from ray_dcp.format.names import StepNames, check_file_key
from ray_dcp.loading import load
from ray_dcp.manager.agreement import agree
from ray_dcp.manager.catalogue import Root, look, look_at_step
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.place.step_deletion import delete
from ray_dcp.saving import CheckpointId, session_for
from ray_dcp.store.opening import target_of
from ray_dcp.torch_adapter.load_report import LoadReport
from ray_dcp.torch_adapter.module_names import ModuleNames
from ray_dcp.torch_adapter.state import PerRank

logger = logging.getLogger(__name__)

NAMES = StepNames("checkpoint_{step}")
"""Folders of `ProjectConfiguration(automatic_checkpoint_naming=True)`."""


_SHARDED = (torch.nn.Module, torch.optim.Optimizer)
"""Registered objects whose values may be shards, and are loaded in place."""

_REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""Engines that save their own parts of the state by calls of their own."""


def save_state(
    accelerator: Accelerator,
    output_dir: CheckpointId | None = None,
    *,
    options: SaveOptions | None = None,
) -> SaveHandle:
    """Saves what `Accelerator.save_state` keeps, in the background, as one checkpoint.

    All ranks call it. It returns when the bytes are copied; training may then change the state. The
    checkpoint exists when the handle reports it, and may be loaded by another number of ranks.

    It has all prepared models, optimizers and schedulers, the gradient scaler, the random states of
    each rank, the step of gradient accumulation, the registered objects, and of each data loader
    the epoch, the seed of its sampler and, with `use_stateful_dataloader`, the position of each
    rank. Hooks of `register_save_state_pre_hook` are called as by accelerate: a model whose weights
    a hook removes is not saved, and files that it writes are part of the checkpoint.

    With `automatic_checkpoint_naming` the checkpoint is `project_dir/checkpoints/checkpoint_N`. Of
    `total_limit` the oldest ones beyond are deleted after the commit, so that a save that fails
    deletes nothing. Those with tags or readers are kept, and those that accelerate saved.

    Args:
        accelerator: The accelerator, with all that is prepared.
        output_dir: Path or URL of the checkpoint. As in accelerate, automatic naming ignores it.
        options: See `SaveOptions`.

    Returns:
        The handle of `ray_dcp.async_save`; `result()` waits for the commit.

    Raises:
        InvalidRequestError: There is no `output_dir`, or DeepSpeed or Megatron-LM saves the state.
        CheckpointExistsError: The next automatic name is taken.
        CheckpointError: As for `ray_dcp.async_save`.
    """
    _check(accelerator)
    options = options or SaveOptions()
    project = accelerator.project_configuration
    root: Root | None = None
    if project.automatic_checkpoint_naming:
        root = _root_of(accelerator)
        output_dir = _next_name(root, project.iteration, options)
    elif output_dir is None:
        raise InvalidRequestError(
            "Expected the output_dir of the checkpoint, found None and an accelerator without "
            "automatic naming. Give a path, or ProjectConfiguration(project_dir=..., "
            "automatic_checkpoint_naming=True)",
            key="output_dir",
        )
    models, files = _after_save_hooks(accelerator)
    own = _AnyState(_own_state(accelerator, files))
    mine = {"random": _random_states(accelerator), "positions": _positions(accelerator)}
    state = {**models, **_in_place(accelerator), "accelerate": own, "rank": PerRank(mine)}
    handle = async_save(state, checkpoint_id=output_dir, options=options)
    project.iteration += 1
    limit = project.total_limit
    if root is not None and limit is not None and accelerator.is_main_process:
        deletion = _Deletion(root, limit)
        # Why not of the handle itself: it logs an error of which nobody asked.
        handle.upload_completion.add_done_callback(deletion.run)
        deletion.await_at_exit(options)
    return handle


def load_state(
    accelerator: Accelerator,
    input_dir: CheckpointId | None = None,
    *,
    options: LoadOptions | None = None,
) -> LoadReport:
    """Loads a checkpoint of `save_state` into what the accelerator has prepared, in place.

    All ranks call it; any number of ranks may have saved it. On another number of ranks random
    states and the positions of stateful data loaders are left as they are, with a warning, as they
    belong to one rank each.

    Args:
        accelerator: The accelerator, with the same models, optimizers, schedulers, data loaders and
            registered objects.
        input_dir: Path or URL of the checkpoint. None with automatic naming: the newest one that is
            committed, and the next save takes the number after it.
        options: See `LoadOptions`; without `prefixes`.

    Raises:
        InvalidRequestError: There is no `input_dir`; another number of objects or data loaders is
            registered; or DeepSpeed or Megatron-LM loads the state.
        CheckpointNotFoundError: Nothing is committed there.
        MissingKeyError: Something else saved the checkpoint, such as `Accelerator.save_state`,
            whose folders `Accelerator.load_state` reads; or it lacks what the accelerator has.
        CheckpointError: As for `ray_dcp.load`.
    """
    _check(accelerator)
    options = options or LoadOptions()
    if options.prefixes:
        raise InvalidRequestError(
            f"Expected no LoadOptions.prefixes, as load_state loads all that is prepared, found "
            f"{[*options.prefixes]}. Load single parts by ray_dcp.load",
            key="options",
        )
    project = accelerator.project_configuration
    number: int | None = None
    if input_dir is None:
        if not project.automatic_checkpoint_naming:
            raise InvalidRequestError(
                "Expected the input_dir of a checkpoint, found None and an accelerator without "
                "automatic naming. Give the path that save_state was given",
                key="input_dir",
            )
        root = _root_of(accelerator)
        number = _newest(root, options)
        input_dir = root.below(NAMES.name_of(number)).url
    # Why by itself: the files of hooks are written, and numbers compared, before anything changes.
    own = _AnyState()
    whole = replace(options, strict=None, key_map=None, resize={})
    load({"accelerate": own}, checkpoint_id=input_dir, options=whole)
    saved = own.value
    _check_numbers(saved, accelerator, input_dir)
    with TemporaryDirectory(prefix="ray-dcp-accelerate-") as folder:
        models = _after_load_hooks(accelerator, saved["hook_files"], Path(folder))
        mine = PerRank(None, resized="keep")
        state: dict[str, Any] = {**models, **_in_place(accelerator), "rank": mine}
        report = load(state, checkpoint_id=input_dir, options=options)
    accelerator.step = saved["step"]
    for index, one in enumerate(accelerator._custom_objects):
        if not isinstance(one, _SHARDED):
            one.load_state_dict(saved["objects"][str(index)])
    positions: Mapping[int, Any] = {}
    if mine.value is None:
        if accelerator.is_main_process:
            logger.warning(
                "Another number of ranks saved %s: random states and the positions of stateful "
                "data loaders, which belong to one rank each, stay as they are",
                input_dir,
            )
    else:
        positions = mine.value["positions"]
        _restore_random_states(accelerator, mine.value["random"])
    for index, loader in enumerate(accelerator._dataloaders):
        _restore_loader(loader, saved["loaders"][str(index)], positions.get(index))
    if number is not None:
        project.iteration = number + 1
    return report


class _AnyState(torch.nn.Module):
    """A value of any form, which a load replaces whatever form it has now.

    Why a module: so is its extra state.
    """

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        """Returns the value."""
        return self.value

    def set_extra_state(self, state: Any) -> None:
        """Replaces the value."""
        self.value = state


def _own_state(accelerator: Accelerator, files: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Returns what is neither loaded in place nor a value of one rank."""
    objects, loaders = accelerator._custom_objects, accelerator._dataloaders
    return {
        "step": accelerator.step,
        "num_objects": len(objects),
        "objects": {
            str(index): one.state_dict()
            for index, one in enumerate(objects)
            if not isinstance(one, _SHARDED)
        },
        "loaders": {str(index): _loader_state(one) for index, one in enumerate(loaders)},
        "hook_files": files,
    }


def _check_numbers(saved: Mapping[str, Any], accelerator: Accelerator, path: CheckpointId) -> None:
    """Checks that as many objects and data loaders are registered as were saved.

    Raises:
        InvalidRequestError: The numbers differ.
    """
    for what, number, own, way_out in (
        (
            "registered objects",
            saved["num_objects"],
            len(accelerator._custom_objects),
            "call register_for_checkpointing for the same objects in the same order",
        ),
        (
            "data loaders",
            len(saved["loaders"]),
            len(accelerator._dataloaders),
            "prepare the same ones",
        ),
    ):
        if number != own:
            raise InvalidRequestError(
                f"{path} has {number} {what}, but the accelerator has {own}; {way_out}",
                checkpoint_id=str(path),
                key=what,
            )


def _check(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in _REFUSED:
        raise InvalidRequestError(
            f"Expected an accelerator whose state is in its models and optimizers, found "
            f"{kind.value}, whose engine saves its own files. Call accelerator.save_state and "
            f"load_state, or use FSDP2",
            key="accelerator",
        )


# Names of checkpoints


def _root_of(accelerator: Accelerator) -> Root:
    return Root(target_of(f"{str(accelerator.project_dir).rstrip('/')}/checkpoints", None))


def _next_name(root: Root, number: int, options: SaveOptions) -> str:
    """Returns the place of the next checkpoint, the same on all ranks.

    Raises:
        CheckpointExistsError: A checkpoint is committed there.
    """
    name = NAMES.name_of(number)

    def decide(_: Sequence[Any]) -> None:
        if look_at_step(root, name, number) is not None:
            raise CheckpointExistsError(
                f"Expected that iteration {number} of the project is free, found a checkpoint in "
                f"{root.below(name).url}. Call load_state, which goes on with the number after the "
                f"one that it loads, or set accelerator.project_configuration.iteration",
                checkpoint_id=root.below(name).url,
            )

    agree(session_for(None, False, options), f"the name of checkpoint {number}", decide, options)
    return root.below(name).url


def _newest(root: Root, options: LoadOptions) -> int:
    """Returns the number of the newest committed checkpoint, the same on all ranks.

    Raises:
        CheckpointNotFoundError: None is committed.
    """

    def decide(_: Sequence[Any]) -> int:
        steps = look(root, NAMES).steps
        if not steps:
            raise CheckpointNotFoundError(
                f"Expected a checkpoint_N of save_state in {root.url}, found none that is "
                f"committed. Give input_dir, or call save_state first",
                checkpoint_id=root.url,
            )
        return max(steps)

    what = f"the newest checkpoint in {root.url}"
    found: int = agree(session_for(None, False, options), what, decide, SaveOptions())
    return found


class _Deletion:
    """Deletes the checkpoints beyond a limit once a save is committed."""

    _pending: ClassVar[dict[_Deletion, float]] = {}
    """Those that have not ended, with the time in seconds that the end of the process waits."""

    def __init__(self, root: Root, limit: int) -> None:
        self._root, self._limit = root, limit
        self._ended = threading.Event()

    def run(self, saved: Future[Any]) -> None:
        """Deletes the lowest numbers, unless the save failed; logs what it could not delete."""
        try:
            if saved.exception() is None:
                self._delete()
        except CheckpointError as error:
            logger.warning(
                "Checkpoints beyond the total_limit of %d in %s were not deleted: %s. The next "
                "save tries again",
                self._limit,
                self._root.url,
                error,
            )
        finally:
            self._ended.set()
            self._pending.pop(self, None)

    def _delete(self) -> None:
        steps = look(self._root, NAMES).steps.values()
        ours = [one for one in steps if one.is_ours and one.is_known]
        # Why at least one: the checkpoint that was just saved is never deleted.
        for one in ours[: max(len(ours) - max(self._limit, 1), 0)]:
            try:
                delete(self._root.below(one.name), expected=one.attempt)
            except InvalidRequestError as error:  # It has tags or readers.
                logger.info("%s stays beyond the total_limit: %s", one.name, error)

    def await_at_exit(self, options: SaveOptions) -> None:
        """Makes the end of the process wait for it, after its save."""
        self._pending[self] = (
            options.write_timeout_s + options.commit_timeout_s + bounds.DELETION_END_S
        )
        if self._ended.is_set():
            self._pending.pop(self, None)
        # Why each time: handlers run in reverse order, and this one has to run before Ray's.
        atexit.unregister(_await_deletions)
        atexit.register(_await_deletions)


def _await_deletions() -> None:
    for deletion, timeout_s in list(_Deletion._pending.items()):
        deletion._ended.wait(timeout_s)


# Why: a forked child lacks the threads that end them.
os.register_at_fork(after_in_child=_Deletion._pending.clear)


# The parts of the state


def _numbered(name: str, index: int) -> str:
    return f"{name}_{index}" if index else name


def _in_place(accelerator: Accelerator) -> dict[str, Any]:
    """Returns the parts that are loaded in place, beside the models."""
    found: dict[str, Any] = {}
    for index, optimizer in enumerate(accelerator._optimizers):
        found[_numbered("optimizer", index)] = optimizer.optimizer
    for index, scheduler in enumerate(accelerator._schedulers):
        found[_numbered("scheduler", index)] = scheduler
    if accelerator.scaler is not None:
        found["scaler"] = accelerator.scaler
    objects = enumerate(accelerator._custom_objects)
    sharded = {str(index): one for index, one in objects if isinstance(one, _SHARDED)}
    return {**found, "objects": sharded} if sharded else found


def _after_save_hooks(accelerator: Accelerator) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Calls the hooks of saves; returns the models that they leave, and the files they wrote."""
    models = {_numbered("model", i): model for i, model in enumerate(accelerator._models)}
    hooks = accelerator._save_model_state_pre_hook
    if not hooks:
        return dict(models), {}
    # Why none under FSDP: accelerate gives hooks no weights there, so that they remove none.
    gives = accelerator.distributed_type != DistributedType.FSDP
    states = {name: model.state_dict() for name, model in models.items()} if gives else {}
    weights = list(states.values())
    with TemporaryDirectory(prefix="ray-dcp-accelerate-") as folder:
        for hook in hooks.values():
            hook(accelerator._models, weights, folder)
        files = _contents(Path(folder))
    left = {id(one) for one in weights}
    # Why not the models: a hook may have changed the state dicts.
    kept = {
        name: {ModuleNames(models[name]).clean(key): value for key, value in one.items()}
        for name, one in states.items()
        if id(one) in left
    }
    return (kept if gives else dict(models)), files


def _after_load_hooks(
    accelerator: Accelerator, files: Mapping[str, torch.Tensor], folder: Path
) -> dict[str, Any]:
    """Calls the hooks of loads with the files of those of saves; returns the models they leave."""
    _write_files(folder, files)
    # Why none under FSDP: as in `_after_save_hooks`.
    gives = accelerator.distributed_type != DistributedType.FSDP
    left = list(accelerator._models) if gives else []
    for hook in accelerator._load_model_state_pre_hook.values():
        hook(left, str(folder))
    remaining = {id(one) for one in left}
    return {
        _numbered("model", index): model
        for index, model in enumerate(accelerator._models)
        if not gives or id(model) in remaining
    }


def _contents(folder: Path) -> dict[str, torch.Tensor]:
    files = (each for each in sorted(folder.rglob("*")) if each.is_file())
    return {
        each.relative_to(folder).as_posix(): torch.from_numpy(np.fromfile(each, dtype=np.uint8))
        for each in files
    }


def _write_files(folder: Path, files: Mapping[str, torch.Tensor]) -> None:
    for name in files:
        check_file_key(name)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content.numpy().tofile(path)


def _loader_state(loader: Any) -> dict[str, int]:
    """Returns what all ranks have in common of the place in the data."""
    found = {"epoch": int(getattr(loader, "iteration", 0))}
    sampler = get_sampler(loader)
    if isinstance(sampler, SeedableRandomSampler):
        found["sampler_seed"], found["sampler_epoch"] = sampler.initial_seed, sampler.epoch
    return found


def _positions(accelerator: Accelerator) -> dict[int, Any]:
    """Returns the states of stateful data loaders, by number."""
    return {
        index: loader.state_dict()
        for index, loader in enumerate(accelerator._dataloaders)
        if getattr(loader, "use_stateful_dataloader", False)
    }


def _restore_loader(loader: Any, saved: Mapping[str, int], position: Any) -> None:
    if hasattr(loader, "iteration"):
        loader.iteration = saved["epoch"]
    sampler = get_sampler(loader)
    if isinstance(sampler, SeedableRandomSampler) and "sampler_seed" in saved:
        sampler.initial_seed, sampler.epoch = saved["sampler_seed"], saved["sampler_epoch"]
    if position is not None and getattr(loader, "use_stateful_dataloader", False):
        loader.load_state_dict(position)


def _random_states(accelerator: Accelerator) -> bytes:
    """Returns the file in which accelerate keeps the random states of a rank, of all devices."""
    with TemporaryDirectory(prefix="ray-dcp-accelerate-") as folder:
        rank, step = accelerator.process_index, accelerator.step
        save_accelerator_state(Path(folder), [], [], [], [], rank, step)
        (file,) = Path(folder).iterdir()
        return file.read_bytes()


def _restore_random_states(accelerator: Accelerator, content: bytes) -> None:
    rank = accelerator.process_index
    with TemporaryDirectory(prefix="ray-dcp-accelerate-") as folder:
        (Path(folder) / f"{RNG_STATE_NAME}_{rank}.pkl").write_bytes(content)
        load_accelerator_state(Path(folder), [], [], [], [], rank)
