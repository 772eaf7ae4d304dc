"""`TrainerSteps`: the steps of a verl trainer, which its driver saves.

A step has the parts `actor`, `critic` and `data` (the state of the data loader), and is committed
by one record: all of them, or none. It lies in the folder `global_step_N` of the trainer's
`default_local_dir`, which may be a URL.

`put_in_place` gives a class of trainers the methods. `integrations.verl` calls it.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import ray

from ray_dcp import events
from ray_dcp.errors import CheckpointError, InvalidRequestError
from ray_dcp.integrations.verl_manager import contents_of, is_due, is_verls, write_model
from ray_dcp.job.checkpoints import JobCheckpoints
from ray_dcp.job.committed import CommittedStep
from ray_dcp.job.part import Part
from ray_dcp.job.step import JobStep
from ray_dcp.session import ray_calls
from ray_dcp.store.environment import StorageVariables
from ray_dcp.store.opening import open_storage, target_of
from ray_dcp.store.storage import read_if_there

logger = logging.getLogger(__name__)

STEP_NAME = "global_step_{step}"
"""Pattern of verl's folders of steps."""

TRACKER = "latest_checkpointed_iteration.txt"
"""File of a run in which verl notes the step that it resumes from."""

MODELS = "huggingface"
"""Folder of a run that has the Hugging Face models of its steps."""

_STATE = "_ray_dcp_steps"
"""Attribute of a trainer that has its `TrainerSteps`."""


class TrainerSteps:
    """Saves and loads the steps of one trainer.

    Args:
        trainer: A `RayPPOTrainer`, or a `PPOTrainer` of the mode "sync".
        skips_whole_epochs: Whether the state of the data loader is left out where an epoch has just
            ended, as its trainer then begins the next one itself.

    Raises:
        InvalidRequestError: The config asks for what can't be kept.
    """

    def __init__(self, trainer: Any, *, skips_whole_epochs: bool) -> None:
        self._trainer = trainer
        self._skips_whole_epochs = skips_whole_epochs
        config = trainer.config.trainer
        sections = {"actor": trainer.config.actor_rollout_ref.actor}
        if trainer.use_critic:
            sections["critic"] = trainer.config.critic
        self._checkpoints = {role: one.get("checkpoint", None) for role, one in sections.items()}
        if config.get("default_hdfs_dir", None) is not None:
            raise InvalidRequestError(
                f"expected the place of the run as trainer.default_local_dir, which may be a URL, "
                f"found trainer.default_hdfs_dir {config.default_hdfs_dir!r} as well; leave that "
                f"one null",
                key="default_hdfs_dir",
            )
        for role in self._checkpoints:
            self._has_model(role, 0)  # Checks what it is asked for.
        self._run = JobCheckpoints(
            _whole(config.default_local_dir),
            (*self._checkpoints, "data"),
            max_to_keep=self._max_to_keep(),
            step_name=STEP_NAME,
        )
        self._pending: JobStep | None = None
        self._models: dict[Any, CommittedStep] = {}
        """Tasks that write Hugging Face models, with the step that each holds."""

    # Saving

    def save(self) -> None:
        """Saves the step at which the trainer is.

        With `actor.checkpoint.async_save` it returns once all bytes are staged. The next call looks
        at the outcome: a step that failed is warned of, and the one before it stands. The last step
        of the training is always waited for.

        Raises:
            CheckpointError: The step can't be saved; or it failed, and was waited for.
        """
        trainer = self._trainer
        self._end_pending()
        number = trainer.global_steps
        is_last = number >= trainer.total_training_steps
        with self._run.step(number) as step:
            for role, group in self._groups().items():
                group.save_checkpoint(step.part(role), None, number)
            step.put("data", trainer.train_dataloader.state_dict())
        self._pending = step
        if is_last or not self._is_async:
            self._pending = None
            self._after_commit(step)
        self._end_models(waits=is_last)
        callback = getattr(trainer, "checkpoint_callback", None)
        if callback is not None:
            callback.on_save(
                trainer=trainer,
                global_step=number,
                checkpoint_dir=step.checkpoint_id,
                async_save=self._pending is not None,
            )

    def _end_pending(self) -> None:
        step, self._pending = self._pending, None
        if step is None:
            return
        try:
            self._after_commit(step)
        except CheckpointError as error:
            events.warn(
                f"Step {step.step} was not saved. The training goes on, and the step before it "
                f"stands: {error}",
                stacklevel=3,
            )

    def _after_commit(self, step: JobStep) -> None:
        """Waits for the commit of a step, and does what is done after it.

        Raises:
            CheckpointError: The step was not committed.
        """
        place = step.result()
        logger.info("Step %d is committed in %s", step.step, place)
        # Why: without this plug-in, a trainer that finds no tracker begins anew without a word.
        open_storage(target_of(self._run.path, None)).write(TRACKER, str(step.step).encode())
        for role in self._checkpoints:
            if self._has_model(role, step.step):
                self._begin_model(step.step, role)

    def _begin_model(self, number: int, role: str) -> None:
        """Begins to write a Hugging Face model, in a task beside the training."""
        step = self._run.at(number)  # It is not deleted meanwhile.
        target = f"{self._run.path}/{MODELS}/{STEP_NAME.format(step=number)}/{role}"
        task: Any = ray.remote(_write_model)
        run = task.options(num_cpus=0).remote
        self._models[run(ray_calls.storage_variables(), step.part(role), target)] = step

    def _end_models(self, *, waits: bool) -> None:
        """Looks at the tasks that have ended; or waits for all of them."""
        tasks = list(self._models)
        if not tasks:
            return
        timeout_s = None if waits else 0.0
        ended, _ = ray_calls.wait(tasks, num_returns=len(tasks), timeout=timeout_s)
        for one in ended:
            step = self._models.pop(one)
            step.close()
            try:
                ray_calls.get(one)
            except Exception as error:  # noqa: BLE001 - the training goes on, whatever it is
                events.warn(
                    f"The Hugging Face model of step {step.step} was not written, and the training "
                    f"goes on: {error}. ray_dcp.integrations.verl.export_pretrained can make it "
                    f"from {step.checkpoint_id}",
                    stacklevel=3,
                )

    # Resuming

    def restore(self, verls_own: Callable[[], Any]) -> None:
        """Loads the step that the config asks for, and sets the trainer's `global_steps`.

        Args:
            verls_own: verl's own method. It loads a step that verl wrote without this plug-in.

        Raises:
            InvalidRequestError: The run has steps after the one that is resumed from, so that the
                steps that follow could not be saved.
            CheckpointError: As `JobCheckpoints.latest`, or a part can't be loaded.
        """
        trainer = self._trainer
        config = trainer.config.trainer
        trainer.global_steps = 0
        match config.resume_mode:
            case "disable":
                pass
            case "auto":
                last = self._run.latest()
                own = self._step_of_verl()
                if own is not None and (last is None or own > last.step):
                    _close(last)
                    verls_own()
                elif last is not None:
                    self._load(last)
            case "resume_path":
                place = _whole(config.resume_from_path)
                if is_verls(os.path.join(place, "actor")):
                    verls_own()
                else:
                    self._load(self._step_at(place))
            case other:
                raise InvalidRequestError(
                    f"expected trainer.resume_mode 'auto', 'disable' or 'resume_path', found "
                    f"{other!r}",
                    key="resume_mode",
                )
        self._check_goes_on()

    def _load(self, step: CommittedStep) -> None:
        trainer = self._trainer
        with step:
            for role, group in self._groups().items():
                group.load_checkpoint(step.part(role), del_local_after_load=False)
            trainer.global_steps = step.step
            length = len(trainer.train_dataloader) if self._skips_whole_epochs else 0
            if not (length and step.step % length == 0):
                trainer.train_dataloader.load_state_dict(step.value("data"))
        logger.info("Resumed from step %d of %s", step.step, step.checkpoint_id)

    def _step_of_verl(self) -> int | None:
        """Returns the step that verl's own class saved last to the run; None if there is none."""
        told = read_if_there(open_storage(target_of(self._run.path, None)), TRACKER)
        if told is None or not told.strip().isdigit():
            return None
        number = int(told)
        name = STEP_NAME.format(step=number)
        return number if is_verls(os.path.join(self._run.path, name, "actor")) else None

    def _step_at(self, place: str) -> CommittedStep:
        root, _, name = place.rpartition("/")
        number = name.removeprefix(STEP_NAME.format(step=""))
        if not number.isdecimal():
            raise InvalidRequestError(
                f"expected RUN/global_step_N as trainer.resume_from_path, found {place!r}",
                key="resume_from_path",
            )
        names = (*self._checkpoints, "data")
        return JobCheckpoints(root, names, step_name=STEP_NAME, read_only=True).at(int(number))

    def _check_goes_on(self) -> None:
        steps, number = self._run.all_steps(), self._trainer.global_steps
        if steps and steps[-1] > number:
            raise InvalidRequestError(
                f"expected no step after {number}, from which the training goes on, in "
                f"{self._run.path}, but its newest is {steps[-1]}, and steps before that could not "
                f"be saved. Give another trainer.default_local_dir; or remove the newer ones, as "
                f"by `ray-dcp rm {self._run.path}@{steps[-1]}`",
                checkpoint_id=self._run.path,
                step=steps[-1],
            )

    # The config

    def _groups(self) -> dict[str, Any]:
        trainer = self._trainer
        groups = {"actor": trainer.actor_rollout_wg}
        if "critic" in self._checkpoints:
            groups["critic"] = trainer.critic_wg
        return groups

    @property
    def _is_async(self) -> bool:
        return is_async(self._trainer)

    def _has_model(self, role: str, number: int) -> bool:
        return is_due(contents_of(self._checkpoints[role], "save_contents"), number)

    def _max_to_keep(self) -> int:
        """Returns how many steps are kept: as many as verl keeps of any part; 0 for all."""
        config = self._trainer.config.trainer
        if config.get("remove_previous_ckpt_in_save", False):
            return 1
        most = [config.get(f"max_{role}_ckpt_to_keep", None) or 0 for role in self._checkpoints]
        return max(most) if all(most) else 0


def is_async(trainer: Any) -> bool:
    """Returns whether a trainer's config asks for asynchronous saves."""
    checkpoint = trainer.config.actor_rollout_ref.actor.get("checkpoint", None) or {}
    return bool(checkpoint.get("async_save", False))


def put_in_place(cls: Any, *, skips_whole_epochs: bool) -> None:
    """Gives a class of trainers the methods that save and load its steps by one commit.

    Modes of a trainer that are not "sync" keep verl's own methods, which write files of prompts in
    flight beside those of actor and critic.

    Args:
        cls: A class of verl with `_save_checkpoint` and `_load_checkpoint`.
        skips_whole_epochs: See `TrainerSteps`.
    """
    own_save, own_load = cls._save_checkpoint, cls._load_checkpoint

    @functools.wraps(own_load)
    def _load_checkpoint(self: Any) -> Any:
        verls_own = functools.partial(own_load, self)
        if getattr(self, "trainer_mode", "sync") != "sync":
            if is_async(self):
                raise InvalidRequestError(
                    f"expected actor.checkpoint.async_save to be false with trainer_mode "
                    f"{self.trainer_mode!r}, as verl then notes no step to resume from; leave it "
                    f"out",
                    key="async_save",
                )
            return verls_own()
        steps = TrainerSteps(self, skips_whole_epochs=skips_whole_epochs)
        setattr(self, _STATE, steps)
        steps.restore(verls_own)
        return self.global_steps

    @functools.wraps(own_save)
    def _save_checkpoint(self: Any) -> None:
        steps: TrainerSteps | None = getattr(self, _STATE, None)
        if steps is None:
            own_save(self)
        else:
            steps.save()

    cls._load_checkpoint, cls._save_checkpoint = _load_checkpoint, _save_checkpoint


def _whole(place: Any) -> str:
    """Returns a URL as it is, and a path from the root of the filesystem."""
    text = str(place)
    return text.rstrip("/") if "://" in text else os.path.abspath(text)


def _close(step: CommittedStep | None) -> None:
    if step is not None:
        step.close()


def _write_model(variables: StorageVariables, part: Part, target: str) -> None:
    """Writes a model in a task, with the keys of the driver: Ray passes on only those it knows."""
    with variables.applied():
        write_model(part, target)
