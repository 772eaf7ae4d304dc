"""`checkpointer`: makes the `Checkpointer` of a worker of Ray Train; checks what all ranks give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from ray_dcp.errors import InvalidRequestError
from ray_dcp.integrations.train import telling
from ray_dcp.integrations.train.checkpointer import Checkpointer, OnError
from ray_dcp.integrations.train.context import run_facts
from ray_dcp.integrations.train.joining import join
from ray_dcp.options import LoadOptions, SaveOptions

__all__ = ["checkpointer"]


def checkpointer(
    *,
    folder: str = "checkpoints",
    max_to_keep: int = 0,
    save_interval: int = 1,
    on_error: OnError = "warn",
    options: SaveOptions | None = None,
    load_options: LoadOptions | None = None,
    storage_options: Mapping[str, object] | None = None,
    check_preemption_every: int = 0,
) -> Checkpointer:
    """Returns what saves and restores the state of the Ray Train run that this worker belongs to.

    Every rank calls it once, inside `train_fn`, with the same arguments; and then the methods of
    what it returns, in the same order. Checkpoints go into `folder` of the run's own storage
    (`RunConfig`), straight from the workers' nodes.

    Args:
        folder: Name of a folder in the run's storage.
        max_to_keep: Newest committed steps that ray_dcp keeps, 0 for all. Leave it out where Ray
            Train keeps `CheckpointConfig(num_to_keep=...)`.
        save_interval: `save` saves the steps that this divides.
        on_error: What happens when a save fails: `"warn"` and go on, or `"raise"` on every rank,
            which ends the worker group. A call that differs between ranks is raised in any case.
        options: How to save; `keep_in_memory` makes restarts quick.
        load_options: How to restore.
        storage_options: Credentials and options of an `s3://`, `gs://` or `az://` storage path;
            by default those of its URL, and of the environment.
        check_preemption_every: Ask `ray.train.get_preemption_info()` at every so manieth `save`,
            which is a barrier of all ranks. 0 leaves that to `SaveBeforeResize` in
            `RunConfig(callbacks=[...])`, which costs nothing while nobody is preempted.

    Raises:
        InvalidRequestError: This is no Ray Train worker, or an argument is wrong.
        CheckpointExistsError: Another run of this name lives and writes here.
        CheckpointError: The storage can't be listed, or the ranks do not find each other.

    Example:
        ::

            def train_fn(config):
                model = ray.train.torch.prepare_model(Model())
                optimizer = torch.optim.AdamW(model.parameters())
                state = {"model": model, "optimizer": optimizer}
                with ray_dcp.train.checkpointer(save_interval=100, max_to_keep=3) as ckpt:
                    done = ckpt.restore(state)
                    for step in range(0 if done is None else done + 1, 10_000):
                        loss = train_one_step(model, optimizer, step)
                        ckpt.save(step, state, metrics={"loss": loss})
    """
    settings = _checked(save_interval, on_error, options, load_options, check_preemption_every)
    facts = run_facts()
    group = join(facts, folder, max_to_keep, storage_options, telling.broadcast)
    return Checkpointer(facts, group, folder, save_interval, on_error, *settings)


def _checked(
    save_interval: object,
    on_error: object,
    options: SaveOptions | None,
    load_options: LoadOptions | None,
    check_preemption_every: object,
) -> tuple[SaveOptions, LoadOptions, int]:
    """Returns the options, after checking what all ranks must give alike.

    Raises:
        InvalidRequestError: An argument has a value that it can't have.
    """
    for name, number, least in (
        ("save_interval", save_interval, 1), ("check_preemption_every", check_preemption_every, 0),
    ):  # fmt: skip
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise InvalidRequestError(
                f"{name} must be a whole number from {least}, but is {number!r}", key=name
            )
    if on_error not in get_args(OnError):
        raise InvalidRequestError(
            f"on_error must be 'warn' or 'raise', but is {on_error!r}", key="on_error"
        )
    for name, given, kind in (
        ("options", options, SaveOptions), ("load_options", load_options, LoadOptions),
    ):  # fmt: skip
        if given is not None and not isinstance(given, kind):
            raise InvalidRequestError(f"{name} must be {kind.__name__}, but is {given!r}", key=name)
    return options or SaveOptions(), load_options or LoadOptions(), int(str(check_preemption_every))
