"""`load_newest`: the newest trusted checkpoint of a run that can be loaded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from ray_dcp import events
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import CheckpointNotFoundError, InvalidRequestError
from ray_dcp.job.part import Part
from ray_dcp.loading import load, run_load_newest
from ray_dcp.manager.catalogue import Root, look
from ray_dcp.manager.following import AnyNames
from ray_dcp.manager.retention import Trust, TrustRule
from ray_dcp.options import LoadOptions
from ray_dcp.rank.rank_load import StepRange
from ray_dcp.saving import CheckpointId, StateDict, check_options, session_for
from ray_dcp.store.opening import absolute_target
from ray_dcp.torch_adapter.dispatch import check_plug_in
from ray_dcp.torch_adapter.load_report import LoadReport
from ray_dcp.torch_adapter.operation_log import OperationLog
from ray_dcp.view.progress import ShowProgress
from ray_dcp.view.run_listing import ListedRun


def load_newest(
    state_dict: StateDict,
    run: CheckpointId,
    *,
    at_most: int | None = None,
    newer_than: int | None = None,
    trust: TrustRule | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    options: LoadOptions | None = None,
    progress: ShowProgress = False,
) -> LoadReport:
    """Loads the newest undamaged checkpoint of a run, in place, as `load` does.

    All ranks of the group must call this function. A run is a directory of step folders, such as
    `step-1000` or `epoch=2-step=500`: the number at the end of a folder's name is its step, and the
    highest step is the newest. Folders without a number, and folders inside step folders, are
    ignored.

    The newest committed checkpoint is tried first. If any rank finds it damaged (a file is missing
    or truncated, a checksum does not match, a record can't be read), all ranks load the next older
    one into the same targets. A warning names each damaged checkpoint, and the report lists every
    step that was skipped.

    Errors for which an older checkpoint is no remedy are raised at once: a state dict that does not
    match, objects that `LoadOptions.weights_only` refuses, a storage failure, a dead rank or a
    missed deadline.

    Args:
        state_dict: The targets, as for `load`. A damaged checkpoint may overwrite some of them
            before an older one is loaded. If the older one lacks such a value, the load fails even
            with `LoadOptions(strict=False)`, as the value can't be left unchanged.
        run: Path, URL, `Location` or filesystem of the directory. A `Part` of a committed step is
            loaded itself, and no other instead: the parts of a step are of one moment.
        at_most: Load this step or an older one, for example to go back before a loss spike.
        newer_than: Load only steps above this one, for example to wait for the next checkpoint.
        trust: Load only a step that is trusted: the name of a metric or a tag, or a function of
            `StepFacts`, as for `CheckpointManager`. That of rank 0 counts.
        planner: As for `load`. It is set up again for each checkpoint that is tried.
        process_group: As for `load`.
        no_dist: As for `load`.
        options: As for `load`. With `verify="never"`, damage inside files is not detected.
        progress: As for `save`; it names the checkpoint that is tried.

    Returns:
        As `load`, with `checkpoint_id`, `step` and `skipped`.

    Raises:
        CheckpointNotFoundError: No step is committed, or trusted; the message names what is there
            instead.
        DamagedCheckpointError: Every committed step is damaged. The state dict may hold parts of
            those that were tried.
        MissingKeyError: As for `load`; or an older step lacks a value that a damaged one
            overwrote.
        CheckpointError: As `load` does, with a note on each step that was skipped before.

    Complexity:
        One listing of all files of the run by one rank, and one load for each step that is tried.

    Examples:
        >>> import pathlib, tempfile, torch, ray_dcp, warnings
        >>> with tempfile.TemporaryDirectory() as run:
        ...     for step in (9, 10):
        ...         state = {"w": torch.full((1000,), step)}
        ...         _ = ray_dcp.save(state, checkpoint_id=f"{run}/step-{step}")
        ...     (data,) = pathlib.Path(run, "step-10").glob("*.distcp")
        ...     data.unlink()
        ...     with warnings.catch_warnings(record=True) as told:
        ...         warnings.simplefilter("always")
        ...         report = ray_dcp.load_newest(state, run)
        >>> report.step, state["w"][0].item(), len(report.damaged), len(told)
        (9, 9, 1, 1)
    """
    check_plug_in(planner, "planner", LoadPlanner, SavePlanner)
    check_options(options, LoadOptions)
    steps = StepRange(at_most=at_most, newer_than=newer_than)
    trusted = None if trust is None else Trust(trust)
    if isinstance(run, Part):
        _check_alone(run, at_most=at_most, newer_than=newer_than, trust=trust)
        report = load(
            state_dict,
            checkpoint_id=run,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            options=options,
            progress=progress,
        )
        return replace(report, step=run.step)
    target = absolute_target(run)
    with OperationLog("load_newest", checkpoint_id=run, planner=planner) as log:
        report = run_load_newest(
            session := session_for(process_group, no_dist, options),
            state_dict,
            options or LoadOptions(),
            target,
            planner,
            steps,
            log,
            progress,
            None if trusted is None else partial(_trusted_steps, target, steps, trusted),
        )
    if session.rank == 0:
        for path, error in report.damaged:
            events.warn(
                f"Loaded {report.checkpoint_id} instead of the newer {path}, which is damaged: "
                f"{error}. Look at it with `ray-dcp verify {path}`",
                stacklevel=2,
            )
    return report


def _check_alone(part: Part, **given: Any) -> None:
    """Raises if an argument would choose another step than that of a part."""
    chosen = [name for name, value in given.items() if value is not None]
    if chosen:
        raise InvalidRequestError(
            f"{chosen[0]}= chooses among the steps of a run, but {part.name!r} is a part of step "
            f"{part.step}, which JobCheckpoints.latest() chose for all parts; leave it out, or "
            f"give the run",
            step=part.step,
            key=chosen[0],
        )


def _trusted_steps(run: Target, steps: StepRange, trust: Trust, listed: ListedRun) -> ListedRun:
    """Returns a listed run with the steps that are trusted.

    Raises:
        CheckpointNotFoundError: There are none.
    """
    catalogue = look(Root(run), AnyNames())
    trusted = {n for n, one in catalogue.folders.items() if catalogue.is_trusted(one, trust)}
    found = tuple(one for one in listed.steps if one.name in trusted)
    if not found:
        raise CheckpointNotFoundError(
            f"expected a step that is trusted by {trust.rule!r}{steps} in the run {listed.url}, "
            f"found {listed.in_words()}, without such a verdict: give one, or load without trust=",
            checkpoint_id=listed.url,
        )
    return replace(listed, steps=found)
