"""`RayDcpCallback`: checkpoints of a Hugging Face `Trainer`. Requires `ray-dcp[transformers]`.

It replaces the Trainer's own checkpoints: pass `TrainingArguments(save_strategy="no")`.

A callback sees neither the other callbacks nor how the Trainer counts its losses, and it can't make
the Trainer skip data. So this one finds the Trainer that owns it, and extends some methods of that
object:

* `train` is given a folder to resume from, in which the Trainer finds its own state and its random
  states. It skips the data and restores these as from a checkpoint of its own.
* `_inner_training_loop` goes on at the newest step if the Trainer begins it again, with smaller
  batches after an error of memory.
* `_load_from_checkpoint` leaves that folder alone: weights, optimizer and scheduler are loaded by
  the manager in `on_train_begin`, when all of them exist.
* `_run_epoch` trains nothing if the restored run had ended.
* `_maybe_log_save_evaluate` is followed by the save, so that a step is saved with what the Trainer
  logged and evaluated at it.
* `_finalize_training` counts the losses and the time from before the restart too.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from ray_dcp.errors import CheckpointNotFoundError, InvalidRequestError
from ray_dcp.manager.collective_actions import RestoreReport
from ray_dcp.manager.manager import CheckpointManager
from ray_dcp.manager.retention import Trust, TrustRule, rankings
from ray_dcp.options import LoadOptions
from ray_dcp.saving import CheckpointId
from ray_dcp.torch_adapter.state import PerRank
from ray_dcp.transform.exporting import export
from ray_dcp.transform.hf_assets import hf_assets, write_files
from ray_dcp.view.run_view import open_checkpoint

logger = logging.getLogger(__name__)

COUNTERS = ("global_step", "epoch", "total_flos", "num_input_tokens_seen")
"""Fields of the Trainer's state that are saved as values of their own."""

STATE_FILE = "trainer_state.json"
"""File from which a Trainer reads its state."""


class RayDcpCallback(TrainerCallback):
    """Saves due steps through a manager, and resumes from the newest step that can be loaded.

    It saves what the Trainer's own checkpoints contain, in the background: model, optimizer,
    scheduler, gradient scaler, the Trainer's state with the log and the best metric, the states of
    callbacks such as `EarlyStoppingCallback`, the random states of each rank, and the files of
    model config, tokenizer and arguments (see `export_pretrained`). A step is saved after its
    evaluation, and stored with the metrics of that evaluation, so that a retention policy can rank
    by `eval_loss`. Steps without an evaluation have no metrics, and `BestN` does not keep them.

    A resumed run continues at the next batch, and logs what the uninterrupted run would have
    logged. `TrainingArguments(ignore_data_skip=True)` begins the data anew. Random numbers that the
    data pipeline draws in the training process itself, for example in a collator, are restored as
    well as the Trainer's own checkpoints do: not exactly within an epoch. On another number of
    ranks random states begin anew, and the Trainer counts its place in the data by steps.

    With `auto_find_batch_size=True`, a Trainer that ran out of memory continues with smaller
    batches at the newest step, also if `resume="never"` and this run has saved it.

    Args:
        manager: Decides when to save and what to keep. The caller closes it.
        resume: Restore before the first step: `"auto"`, the newest step that can be loaded, if any;
            `"latest"`, the newest step, or raise; `"never"`, do not restore. A restored step
            replaces the checkpoint that is given to `Trainer.train(resume_from_checkpoint)`.
        trust: Resume from the newest step that is trusted: the name of a metric or a tag, or a
            function of `StepFacts`, as for `CheckpointManager`. The manager needs `order="any"`,
            as untrusted steps that are newer stay.

    Raises:
        InvalidRequestError: `manager` is not a `CheckpointManager`, or `resume` or `trust` is
            invalid.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        *,
        resume: Literal["auto", "latest", "never"] = "auto",
        trust: TrustRule | None = None,
    ) -> None:
        if not isinstance(manager, CheckpointManager):
            raise InvalidRequestError(
                f"expected a ray_dcp.CheckpointManager, found {manager!r}", key="manager"
            )
        if resume not in ("auto", "latest", "never"):
            raise InvalidRequestError(
                f"resume must be 'auto', 'latest' or 'never', but is {resume!r}", key="resume"
            )
        if trust is not None:
            Trust(trust)
            if manager.order != "any":
                raise InvalidRequestError(
                    "trust= resumes from a step that may be older than others, which stay, so that "
                    "the next one is refused by a manager of increasing steps; make it with "
                    'order="any"',
                    key="trust",
                )
        self._manager = manager
        self._trust = trust
        self._resume = resume
        self._run: _Run | None = None
        self._files: dict[str, bytes] | None = None
        self.restored: RestoreReport | None = None

    def attach(self, trainer: Any) -> None:
        """Makes a Trainer save and resume through this callback.

        A Trainer that gets the callback in `Trainer(callbacks=[...])` is attached by itself. Call
        this after `Trainer.add_callback`.

        Args:
            trainer: A Trainer that has this callback.
        """
        owner = type(trainer)
        if not hasattr(owner, _ATTACHED):
            trainer.__class__ = _resuming(owner)

    def on_init_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Attaches the Trainer that is being made."""
        self.attach(_owner_of(self))

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Restores a step, as configured by `resume`.

        Raises:
            InvalidRequestError: The callback was added to a Trainer without `attach`.
            CheckpointError: As `CheckpointManager.restore`.
        """
        run = self._run
        if run is None:
            raise InvalidRequestError(
                "Expected a Trainer that this RayDcpCallback is attached to, as it can neither "
                "save nor resume without, but found none. Give Trainer(callbacks=[callback]), or "
                "call callback.attach(trainer) after trainer.add_callback(callback)",
                key="trainer",
            )
        run.began_s = time.monotonic()
        if self._resume == "never" and run.saved is None:
            return
        found = _state_of(kwargs["model"], kwargs["optimizer"], kwargs.get("lr_scheduler"))
        # Why "auto" again: weights may be damaged where the Trainer's state is not.
        wanted: Any = self._resume if run.saved is None or run.falls_back else run.saved.step
        try:
            report = self._manager.restore(wanted, found, trust=self._trust_for(wanted))
        except CheckpointNotFoundError as error:
            if self._resume == "latest" or error.key == "trust":
                raise
            return
        if run.saved is None or report.step != run.saved.step:
            raise _OtherStepError(report.step)
        self.restored = report
        kwargs["model"].load_state_dict(found["model"])
        run.saved.restore_loop(run.trainer)
        logger.info("Goes on at step %d of %s", report.step, self._manager.path)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Decides whether the step is due. It is saved when the Trainer has evaluated it."""
        run = self._run
        if run is None:
            return
        run.folder.cleanup()  # The Trainer has read it.
        run.is_due = self._manager.should_save(state.global_step)
        run.epoch_has_ended = False

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Records that what the Trainer does at the end of the epoch follows."""
        if self._run is not None:
            self._run.epoch_has_ended = True

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Stores the metrics for the save of this step."""
        if self._run is None:
            return  # Of a model that is no step, such as the best one after the training.
        told = kwargs.get("metrics") or {}
        found = {name: float(v) for name, v in told.items() if isinstance(v, (int, float))}
        step, metrics = self._run.evaluated
        # Why both: with several evaluation sets, there is one call for each of them.
        metrics = {**metrics, **found} if step == state.global_step else found
        self._run.evaluated = state.global_step, metrics

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Waits for the saves in progress.

        Raises:
            CheckpointError: A save failed.
        """
        self._manager.join()

    def _train(
        self,
        trainer: Any,
        original: Callable[..., Any],
        resume_from_checkpoint: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls `Trainer.train` so that it continues at the step to restore, if there is one."""
        wanted: Any = self._resume
        while True:
            folder = TemporaryDirectory(prefix="ray-dcp-trainer-", ignore_cleanup_errors=True)
            with folder as path, ExitStack() as hooks:
                saved = None if wanted == "never" else self._read(wanted, trainer)
                run = _Run(trainer, folder, saved, falls_back=wanted == "auto")
                if saved is not None:
                    saved.write(Path(path), trainer)
                    resume_from_checkpoint = path
                self._extend(run, hooks)
                try:
                    return original(resume_from_checkpoint, *args, **kwargs)
                except _OtherStepError as error:
                    wanted = error.step

    def _read(self, wanted: Any, trainer: Any) -> _Saved | None:
        """Reads the Trainer's part of a step; returns None if there is no step and none is needed.

        Raises:
            CheckpointNotFoundError: There is no step, and `resume` is "latest".
        """
        mine = PerRank(None, resized="keep")
        found: dict[str, Any] = {**dict.fromkeys(COUNTERS), "state": "", "rank": mine}
        try:
            report = self._manager.restore(
                wanted,
                {"trainer": found},
                options=LoadOptions(strict=False),
                trust=self._trust_for(wanted),
            )
        except CheckpointNotFoundError as error:
            # Why not anew without a verdict: what was trained would be lost without a word.
            if wanted == "auto" and error.key != "trust":
                return None
            raise
        return _Saved.of(report.step, found, mine.value or {}, trainer)

    def _trust_for(self, wanted: Any) -> TrustRule | None:
        """Returns by what a step is chosen; None for one that is chosen by its number."""
        has_saved = self._run is not None and self._run.has_saved
        return self._trust if isinstance(wanted, str) and not has_saved else None

    def _extend(self, run: _Run, hooks: ExitStack) -> None:
        """Extends methods of the Trainer until `hooks` is closed."""
        trainer = run.trainer

        def training_loop(original: Any, *args: Any, **kwargs: Any) -> Any:
            if run.began_s and (run.has_saved or self._resume != "never"):
                kwargs["resume_from_checkpoint"] = self._begin_again(run) or kwargs.get(
                    "resume_from_checkpoint"
                )
            return original(*args, **kwargs)

        def load_from_checkpoint(original: Any, path: Any, *args: Any, **kwargs: Any) -> None:
            if path != run.folder.name:
                original(path, *args, **kwargs)

        def log_save_evaluate(original: Any, *args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self._save(run)

        def run_epoch(original: Any, *args: Any, **kwargs: Any) -> None:
            if run.saved is not None and _has_ended(trainer):
                trainer.control.should_training_stop = True
                return
            original(*args, **kwargs)

        def finalize(original: Any, trial: Any, num_samples: Any, start_time: float) -> Any:
            if run.saved is not None and run.saved.has_loop:
                # Why: the losses of all sessions are divided by the steps of all sessions, and
                # these by their time.
                trainer._initial_global_step = run.saved.loop["initial_step"]
                start_time -= run.saved.loop["seconds"]
            return original(trial, num_samples, start_time)

        self._run = run
        hooks.callback(setattr, self, "_run", None)
        hooks.enter_context(_extended(trainer, "_inner_training_loop", training_loop))
        hooks.enter_context(_extended(trainer, "_load_from_checkpoint", load_from_checkpoint))
        hooks.enter_context(_extended(trainer, "_maybe_log_save_evaluate", log_save_evaluate))
        hooks.enter_context(_extended(trainer, "_run_epoch", run_epoch))
        hooks.enter_context(_extended(trainer, "_finalize_training", finalize))

    def _begin_again(self, run: _Run) -> str | None:
        """Returns the folder from which the Trainer continues at the newest step, if there is one.

        Why: `auto_find_batch_size` begins the loop again with smaller batches, in the same call.
        """
        self._manager.join()
        run.is_due, run.epoch_has_ended, run.evaluated = False, False, (-1, {})
        wanted: Any = "auto" if run.falls_back or not run.has_saved else "latest"
        run.saved = self._read(wanted, run.trainer)
        if run.saved is None:
            return None
        folder = Path(run.folder.name)
        folder.mkdir(exist_ok=True)
        run.saved.write(folder, run.trainer)
        return run.folder.name

    def _save(self, run: _Run) -> None:
        """Saves the step if it is due, and if the Trainer has done all that it does at it."""
        trainer = run.trainer
        state, control = trainer.state, trainer.control
        ends = control.should_epoch_stop or control.should_training_stop
        if not run.is_due or (not run.epoch_has_ended and (ends or state.epoch % 1 == 0)):
            return
        run.is_due = False
        step, found = run.evaluated
        # Why None: it is no oversight that a step without an evaluation has no metric.
        metrics: dict[str, float | None] = dict.fromkeys(
            one.metric for one in rankings(self._manager.retention)
        )
        if step == state.global_step:
            metrics.update(found)
        values = _state_of(trainer.model, trainer.optimizer, trainer.lr_scheduler)
        values["trainer"] = self._trainer_state(run)
        self._manager.save_async(state.global_step, values, force=True, metrics=metrics)
        run.has_saved = True

    def _trainer_state(self, run: _Run) -> dict[str, Any]:
        trainer = run.trainer
        trainer.store_flos()
        state = trainer.state
        loss = getattr(trainer, "_tr_loss", None)
        mine = {"rng": _rng_files(trainer), "loss": None if loss is None else loss.item()}
        found: dict[str, Any] = {
            **{n: getattr(state, n) for n in COUNTERS if getattr(state, n, None) is not None},
            "rank": PerRank(mine),
        }
        # Why only there: timings in the log differ from rank to rank.
        if trainer.is_world_process_zero():
            if self._files is None:
                self._files = _pretrained_files(trainer)
            found["state"] = json.dumps(_trainer_text(run))
            found["files"] = dict(self._files)
        return found


@dataclasses.dataclass(frozen=True)
class _Saved:
    """The Trainer's part of a step that is restored."""

    step: int
    state: Mapping[str, Any]
    """As in the Trainer's own file."""
    loop: Mapping[str, Any]
    """What the Trainer counts in its loop; empty if the step was saved by another version."""
    scaler: Mapping[str, Any] | None
    rank: Mapping[str, Any]
    """Random states and loss of this rank; empty if another number of ranks saved the step."""

    @classmethod
    def of(
        cls, step: int, found: Mapping[str, Any], rank: Mapping[str, Any], trainer: Any
    ) -> _Saved:
        """Makes it of what was loaded."""
        if not found["state"]:  # Earlier versions saved the counters alone.
            counted = {n: found[n] for n in COUNTERS if found[n] is not None}
            begun: Any = TrainerState(**counted, train_batch_size=trainer.args.train_batch_size)
            begun.compute_steps(trainer.args, trainer.args.max_steps)
            return cls(step, dataclasses.asdict(begun), {}, None, rank)
        told = json.loads(found["state"])
        known = {field.name for field in dataclasses.fields(TrainerState)}
        state = {name: value for name, value in told["state"].items() if name in known}
        return cls(step, state, told["loop"], told["scaler"], rank)

    @property
    def has_loop(self) -> bool:
        """Whether losses and counts of the loop can be restored on all ranks."""
        return bool(self.loop) and self.rank.get("loss") is not None

    def write(self, folder: Path, trainer: Any) -> None:
        """Writes the files that the Trainer reads, and restores its callbacks.

        Args:
            folder: Folder to resume from.
            trainer: The Trainer.
        """
        (folder / STATE_FILE).write_text(json.dumps(dict(self.state)), encoding="utf-8")
        write_files(folder, self.rank.get("rng", {}))
        for name, states in (self.state.get("stateful_callbacks") or {}).items():
            each = (
                one
                for one in trainer.callback_handler.callbacks
                if isinstance(one, ExportableState) and type(one).__name__ == name
            )
            for callback, one in zip(
                each, states if isinstance(states, list) else [states], strict=False
            ):
                # Why only known ones: the names come from a file.
                for attribute in callback.state().get("attributes", {}):
                    if attribute in one.get("attributes", {}):
                        setattr(callback, attribute, one["attributes"][attribute])

    def restore_loop(self, trainer: Any) -> None:
        """Restores what the Trainer has reset since: scaler, losses and counts."""
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None and self.scaler:
            scaler.load_state_dict(dict(self.scaler))
        if self.has_loop and hasattr(trainer, "_tr_loss"):
            trainer._tr_loss.fill_(self.rank["loss"])
            trainer._total_loss_scalar = self.loop["total_loss"]
            trainer._globalstep_last_logged = self.loop["last_logged"]


@dataclasses.dataclass
class _Run:
    """One call of `Trainer.train`."""

    trainer: Any
    folder: TemporaryDirectory[str]
    """From which the Trainer resumes."""
    saved: _Saved | None
    """The restored step, if there is one."""
    falls_back: bool
    """Whether an older step may be restored if the weights of this one are damaged."""
    began_s: float = 0.0
    """When the loop began last; 0 before."""
    has_saved: bool = False
    is_due: bool = False
    """Whether the step that has just ended has to be saved."""
    epoch_has_ended: bool = False
    evaluated: tuple[int, dict[str, float]] = (-1, {})
    """Step and metrics of the last evaluation."""


class _OtherStepError(Exception):
    """The weights that were loaded belong to another step than the Trainer's state."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step} was restored")
        self.step = step


def export_pretrained(
    checkpoint_id: CheckpointId, path: str | os.PathLike[str], *, dtype: str | None = None
) -> None:
    """Writes the model of a saved step as `Trainer.save_model` does, for `from_pretrained`.

    The folder has the weights as safetensors, and the files of model config, tokenizer and
    training arguments, the latter as JSON.

    Args:
        checkpoint_id: Path or URL of a step that a `RayDcpCallback` saved.
        path: The new folder.
        dtype: As for `ray_dcp.export`.

    Raises:
        InvalidRequestError: Something else saved the checkpoint.
        UnsafeCheckpointError: The name of a file leaves the folder.
        CheckpointError: As `ray_dcp.export`.
    """
    if not any(name.startswith("trainer.files.") for name in open_checkpoint(checkpoint_id).names):
        raise InvalidRequestError(
            f"expected a step that a RayDcpCallback saved, but {checkpoint_id} has no files of a "
            f"Trainer; ray_dcp.export writes other checkpoints",
            key="checkpoint_id",
        )
    export(checkpoint_id, path, "hf", include=("model.*",), strip_prefix="model.", dtype=dtype)


def _state_of(model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": getattr(optimizer, "optimizer", optimizer),  # inside of Accelerate's wrapper
        "scheduler": {} if scheduler is None else scheduler,
    }


def _trainer_text(run: _Run) -> dict[str, Any]:
    """Returns what all ranks have in common, as values for JSON."""
    trainer = run.trainer
    parts: list[Any] = [*trainer.callback_handler.callbacks, trainer.control]
    state = dataclasses.asdict(trainer.state)
    stateful: list[Any] = [one for one in parts if isinstance(one, ExportableState)]
    state["stateful_callbacks"] = TrainerState(stateful_callbacks=stateful).stateful_callbacks
    scaler = getattr(trainer.accelerator, "scaler", None)
    before = run.saved.loop if run.saved is not None and run.saved.has_loop else {}
    loop = {
        "total_loss": trainer._total_loss_scalar,
        "last_logged": trainer._globalstep_last_logged,
        "initial_step": before.get("initial_step", getattr(trainer, "_initial_global_step", 0)),
        "seconds": before.get("seconds", 0.0) + time.monotonic() - run.began_s,
    }
    return {
        "state": state,
        "loop": loop,
        "scaler": None if scaler is None else scaler.state_dict(),
    }


def _rng_files(trainer: Any) -> dict[str, bytes]:
    """Returns the files in which the Trainer keeps the random states of this rank."""
    with TemporaryDirectory(prefix="ray-dcp-trainer-") as folder:
        trainer._save_rng_state(folder)
        return _contents(folder)


def _pretrained_files(trainer: Any) -> dict[str, bytes]:
    """Returns the files that `Trainer.save_model` writes beside the weights."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    collator = getattr(trainer.data_collator, "tokenizer", None)
    processing = getattr(trainer, "processing_class", None) or collator
    has_config = hasattr(getattr(model, "config", None), "save_pretrained")
    parts = [model] if has_config or hasattr(model, "peft_config") else []
    parts += [processing] if hasattr(processing, "save_pretrained") else []
    # Why not as the Trainer writes them: reading its pickle runs code.
    told = trainer.args.to_json_string().encode()
    return {**hf_assets(*parts), "training_args.json": told}


def _contents(folder: str) -> dict[str, bytes]:
    files = [each for each in Path(folder).rglob("*") if each.is_file()]
    return {each.relative_to(folder).as_posix(): each.read_bytes() for each in files}


@contextmanager
def _extended(trainer: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Makes a method of one object call `function(original, ...)` within the context.

    Versions of the Trainer that lack the method stay as they are.
    """
    if not hasattr(trainer, name):
        yield
        return
    before = vars(trainer).get(name)
    setattr(trainer, name, functools.partial(function, getattr(trainer, name)))
    try:
        yield
    finally:
        if before is None:
            delattr(trainer, name)
        else:
            setattr(trainer, name, before)


_ATTACHED = "_ray_dcp_is_attached"


def _resuming(owner: Any) -> Any:
    """Returns a class like the one of a Trainer, in which `train` asks a `RayDcpCallback`.

    Why a class: as an attribute of the Trainer, the function would either keep it alive in a cycle
    or not keep it alive, as `Trainer(...).train()` needs.
    """

    @functools.wraps(owner.train)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        original = functools.partial(owner.train, self)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, RayDcpCallback):
                return callback._train(self, original, resume_from_checkpoint, args, kwargs)
        return original(resume_from_checkpoint, *args, **kwargs)

    own = {name: getattr(owner, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(owner.__name__, (owner,), {**own, "train": train, _ATTACHED: True})


def _has_ended(trainer: Any) -> bool:
    """Returns whether there is no step left: the Trainer itself looks only after one more step.

    Why not by `control.should_training_stop`, as it was saved: a callback also sets it to stop for
    a while, before its machine is taken away.
    """
    stopped = (
        one.early_stopping_patience_counter >= one.early_stopping_patience
        for one in trainer.callback_handler.callbacks
        if isinstance(one, EarlyStoppingCallback)
    )
    return trainer.state.global_step >= trainer.state.max_steps or any(stopped)


def _owner_of(callback: TrainerCallback) -> Any:
    """Returns the Trainer whose method is calling a callback.

    Why by the stack: the events of a callback are given everything but the Trainer.
    """
    own = inspect.currentframe()
    # Careful: the locals of this frame would contain it, in a cycle that keeps the Trainer alive.
    frame = None if own is None else own.f_back
    del own
    while frame is not None:
        owner = frame.f_locals.get("self")
        handler = getattr(owner, "callback_handler", None) if isinstance(owner, Trainer) else None
        if handler is not None and any(one is callback for one in handler.callbacks):
            return owner
        frame = frame.f_back
    raise InvalidRequestError(
        "Expected a transformers.Trainer that calls its RayDcpCallback, but found none; call "
        "callback.attach(trainer)",
        key="trainer",
    )
