"""The commands that write: `export`, `import`, `cp`, `average`, `rm`, `gc`, `tag` and `metadata`.

They import torch only where they write tensors, and never Ray.
"""

from __future__ import annotations

import glob
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import click

from ray_dcp.cli.main import JSON
from ray_dcp.cli.output import (
    agree,
    dry_run,
    dtype,
    interrupted,
    part,
    patterns,
    printed,
    progress,
    says,
    told,
    yes,
)
from ray_dcp.cli.places import (
    PLACE,
    Address,
    address_of,
    addresses_of,
    check_answers,
    kept,
    part_of,
    run_at,
    step_at,
    step_in_run,
    steps_between,
)
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core.quantities import count_text, size_text
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidRequestError,
    StorageError,
    UnsafeCheckpointError,
)
from ray_dcp.format.manifest import slot_of
from ray_dcp.format.names import (
    SHARED_FOLDER,
    check_note,
    check_tag,
)
from ray_dcp.format.step_info import info_slot
from ray_dcp.format.verdicts import TRUST, trust_key
from ray_dcp.io.checkpoint import CheckpointReplacedError
from ray_dcp.io.reserve import RESERVE, keep_reserve
from ray_dcp.place.done_marks import marks_removed_last
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import absolute_target, open_storage, place_below
from ray_dcp.store.storage import is_full
from ray_dcp.transform.exporting import (
    ExportFormat,
    ExportPlan,
    copied_bytes,
    format_of,
    plan_export,
)
from ray_dcp.transform.exporting import copy as copy_checkpoint
from ray_dcp.transform.exporting import export as export_checkpoint
from ray_dcp.transform.hf_assets import MODEL_CONFIG
from ray_dcp.transform.importing import check_source, import_checkpoint
from ray_dcp.transform.new_checkpoint import check_writable
from ray_dcp.transform.peft_adapter import CONFIG_FILE
from ray_dcp.transform.source import still_there
from ray_dcp.view.checkpoint_view import CheckpointView, read_view
from ray_dcp.view.file_check import Problem
from ray_dcp.view.model_choice import find_model
from ray_dcp.view.progress import Meter
from ray_dcp.view.run_listing import FOREIGN, folders_above
from ray_dcp.view.run_view import StepView, check_no_step, read_run
from ray_dcp.view.verify import items_of
from ray_dcp.view.verify import verify as verify_path
from ray_dcp.view.wording import few

if TYPE_CHECKING:
    from ray_dcp.place.listing import CollectReport

_MOST_TRIES = 20
"""How often the copy of a step is retried if the step is replaced meanwhile."""


@click.command()
@click.argument("source", type=PLACE)
@click.argument("target", type=PLACE)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "hf", "torch", "dcp"]),
    help="safetensors, torch: one file; hf: a folder for from_pretrained; dcp: for stock DCP. "
    "By default, that of the ending of TARGET.",
)
@part
@patterns
@dtype
@click.option("--strip-prefix", default="", metavar="TEXT", help="Leave it out before names.")
@click.option(
    "--key-map",
    "renames",
    metavar="REGEX=TEXT",
    multiple=True,
    help="Replace in names, as '^layers=model.layers'; may be given often.",
)
@click.option("--model-only", is_flag=True, help="The model's tensors, named as in the model.")
@click.option(
    "--assets", type=PLACE, metavar="FOLDER", help="Copy config and tokenizer from it, for hf."
)
@dry_run
def export(
    source: str,
    target: str,
    kind: str | None,
    part: str | None,
    include: tuple[str, ...],
    dtype: str | None,
    strip_prefix: str,
    renames: tuple[str, ...],
    model_only: bool,
    assets: str | None,
    dry_run: bool,
) -> None:
    """Write the checkpoint SOURCE, a path or RUN@STEP, as TARGET in another format.

    The export is streamed: memory holds at most one tensor. Free disk space is checked first.
    safetensors and hf contain tensors only; objects that they leave out are listed. Beside the
    weights, hf has the files of config and tokenizer that the checkpoint has, or FOLDER.
    """
    address = part_of(address_of(source), part)
    view = address.open(source)
    lines = list[str]()
    if model_only:
        if include or strip_prefix:
            raise InvalidRequestError("give --model-only, or --tensor and --strip-prefix; not both")
        model = find_model(view)
        include, strip_prefix = (f"{glob.escape(model.prefix)}*",), model.prefix
        others = f", and not {few(model.others)}" if model.others else ""
        lines.append(f"took the model in {model.prefix or 'the whole checkpoint'}{others}")
    choice: dict[str, Any] = {"include": include, "dtype": dtype, "strip_prefix": strip_prefix}
    choice |= {"key_map": [_rename(one) for one in renames] or None, "assets": assets}
    form = format_of(target, cast(ExportFormat | None, kind))
    plan = plan_export(view, target, form, **choice)
    if not dry_run:
        with marks_removed_last(), progress("exporting", target) as meter, kept(address.place):
            export_checkpoint(address.place, target, form, **choice, progress=meter)
    told({**asdict(plan), "dry_run": dry_run}, *_export_lines(plan, address.name, dry_run), *lines)


def _rename(text: str) -> tuple[str, str]:
    """Returns the pattern and the replacement of a rename that was given."""
    # Why the last: a pattern such as `(?=...)` has one, and no name of a tensor does.
    pattern, sign, replacement = text.rpartition("=")
    if not sign:
        raise InvalidRequestError(
            f"expected --key-map REGEX=TEXT, as '^layers=model.layers', found {text!r}",
            key="key_map",
        )
    return pattern, replacement


def _export_lines(plan: ExportPlan, name: str, dry_run: bool) -> list[str]:
    verb, form = "would write" if dry_run else "wrote", plan.format
    objects = f" and {count_text(plan.num_objects, 'object')}" if plan.num_objects else ""
    lines = [
        f"{verb} {count_text(plan.num_tensors, 'tensor')}{objects} of {name}, about "
        f"{size_text(plan.num_bytes)}, as {form} to {plan.target}"
    ]
    if plan.assets:
        lines.append(f"{verb} beside the weights: {few(plan.assets)}")
    if plan.adapter is not None:
        called = f" {plan.adapter}" if plan.adapter else ""
        lines.append(f"it is the PEFT adapter{called}; left out {few(plan.left_out)}")
        if CONFIG_FILE not in plan.assets:
            lines.append(f"PEFT needs {CONFIG_FILE} beside it: --assets FOLDER copies it")
    elif plan.left_out:
        count = count_text(len(plan.left_out), "object")
        lines.append(f"left out {count}, as {form} holds tensors alone: {few(plan.left_out)}")
        lines.append("--format torch and --format dcp hold objects, too")
    if form == "hf" and plan.adapter is None and MODEL_CONFIG not in plan.assets:
        lines.append(f"from_pretrained needs {MODEL_CONFIG} beside it: --assets FOLDER copies it")
    if plan.tied:
        pairs = few([f"{name} = {before}" for name, before in plan.tied.items()])
        lines.append(f"{verb} once what was of one memory when it was saved: {pairs}")
    return lines


@click.command("import")
@click.argument("source", type=PLACE)
@click.argument("target", type=PLACE)
@patterns
@dtype
@click.option("--unsafe", is_flag=True, help="Run code that a torch.save file asks for.")
@dry_run
def import_(
    source: str,
    target: str,
    include: tuple[str, ...],
    dtype: str | None,
    unsafe: bool,
    dry_run: bool,
) -> None:
    """Create the checkpoint TARGET from SOURCE: a torch.save or safetensors file, or a folder.

    A folder contains safetensors files or a checkpoint of stock DCP.
    """
    check_source(source)
    check_answers(target)
    check_no_step(target, "target")
    check_writable(open_storage(target))
    value = {"source": source, "target": target, "dry_run": dry_run}
    if dry_run:
        told(value, f"would save {source} to {target}")
        return
    with progress("importing", target) as meter:
        try:
            view = import_checkpoint(
                source, target,
                include=include, dtype=dtype, weights_only=not unsafe, progress=meter,
            )  # fmt: skip
        except UnsafeCheckpointError as error:
            error.message = error.message.replace("pass weights_only=False", "give --unsafe")
            raise
    counts = {"num_tensors": len(view.tensors), "num_objects": len(view.objects)}
    told(
        {**value, **counts, "num_bytes": view.num_bytes},
        f"saved {count_text(len(view.tensors), 'tensor')} and "
        f"{count_text(len(view.objects), 'object')}, {size_text(view.num_bytes)}, to {target}",
    )


@click.command()
@click.argument("source", type=PLACE)
@click.argument("target", type=PLACE)
@click.option("--verify", is_flag=True, help="Read the copy and compare it with its checksums.")
@dry_run
def cp(source: str, target: str, verify: bool, dry_run: bool) -> None:
    """Copy the checkpoint SOURCE, a path or RUN@STEP, to TARGET, a path or URL.

    SOURCE may be a run: its steps are copied below TARGET, oldest first, with their tags and notes.
    A copy becomes visible when it is complete and durable; an interrupted copy leaves nothing.
    Steps that were copied before are skipped, so that an interrupted command can be repeated, also
    one that was killed. Every byte is verified on its way: a damaged step is not copied, and the
    exit status is 1; where TARGET has another checkpoint for a step, that step is not copied, and
    it is 2. Steps in TARGET itself are no part of the run.
    """
    check_answers(target)
    check_no_step(target, "target")
    is_run, found = addresses_of(source)
    if is_run:
        found = _not_below(found, target, source)
        if not found:
            raise InvalidRequestError(
                f"expected steps to copy in {source}, found only those in the target {target}: "
                f"choose another target"
            )
    copies = []
    for one in found:
        name = one.step.name if is_run and one.step is not None else ""
        to: AnyPlace = place_below(absolute_target(target), name) if name else target
        copies.append(_Copy(one, to, is_run))
    for copy in copies:
        copy.plan(source)
    planned = [copy for copy in copies if copy.num_files]
    value = {
        "source": source if is_run else found[0].name,
        "target": target,
        "num_files": sum(copy.num_files for copy in planned),
        "num_bytes": sum(copy.num_bytes for copy in planned),
        "num_checkpoints": len(planned),
        "dry_run": dry_run,
    }
    if dry_run:
        files = count_text(sum(copy.num_files for copy in planned), "file")
        told(value, *_copy_lines(source, target, copies, f"would copy {files} of"))
        return
    sizes = [copy.num_bytes * (1 + verify) for copy in copies] if is_run else ()
    try:
        with progress("copying", source, sizes) as meter:
            for number, copy in enumerate(copies, start=1):
                copy.run(target, meter, number, verify=verify)
                if is_run and copy.state != "there":
                    printed(meter, *copy.lines())
    except KeyboardInterrupt:
        interrupted(_copy_result(value, copies), *_copy_lines(source, target, copies, "copied"))
    except CheckpointError:
        if is_run and not says(JSON):
            told(None, *_copy_lines(source, target, copies, "copied"))
        raise
    damages = [f"damaged: {problem}" for copy in copies for problem in copy.problems]
    failures = [copy.failure for copy in copies if copy.failure is not None]
    problems = [*damages, *(f"not copied: {error}" for error in failures)]
    lines = [*_copy_lines(source, target, copies, "copied"), *([] if is_run else problems)]
    lines += ["ok"] if verify and not problems else []
    told({**_copy_result(value, copies), "problems": problems}, *lines)
    if problems:
        others = (StorageError, CheckpointExistsError)
        is_unread = all(isinstance(error, others) for error in failures)
        sys.exit(2 if is_unread and not damages else 1)


def _not_below(steps: Sequence[Address], target: str, source: str) -> list[Address]:
    """Returns the steps of a run that do not lie in the target of its copy.

    Symbolic links and other spellings of one place are the same place.
    """
    to, run = _real(target), _real(source)
    if not to.startswith(f"{run}/"):
        return [*steps]
    return [one for one in steps if not _real(one.place).startswith(f"{to}/")]


def _real(place: AnyPlace) -> str:
    """Returns a path or URL without symbolic links, and without slashes at its end."""
    storage = open_storage(place)
    url = os.path.realpath(storage.url) if isinstance(storage, LocalStorage) else storage.url
    return url.rstrip("/")


class _Copy:
    """The copy of one checkpoint.

    Attributes:
        state: `planned`, `copied`, `there` (was copied before), `gone` (was deleted meanwhile), or
            `failed`.
        failure: Error of a step of a run that is damaged or can't be read.
        num_files: Number of files to copy, including those of its items.
        num_bytes: Number of bytes to copy, including those of its items.
        problems: Damages found in the copy.
        in_run: The checkpoint is a step of a run, and may be replaced or deleted meanwhile.
    """

    def __init__(self, source: Address, target: AnyPlace, in_run: bool) -> None:
        self.source = source
        self.state = "planned"
        self.num_files = self.num_bytes = 0
        self.problems: tuple[Problem, ...] = ()
        self.failure: CheckpointError | None = None
        self._target = target
        self.in_run = in_run

    def plan(self, text: str) -> None:
        """Determines the files to copy.

        Raises:
            CheckpointExistsError: The target contains another checkpoint.
            CheckpointError: The checkpoint can't be copied.
        """

        def look() -> None:
            view = self.source.open("" if self.in_run else text)
            with still_there(view):
                folders = ("", *items_of(view.storage, view.checkpoint))
            # Why not there yet: a copy that was killed left a lease, and maybe more to do.
            is_left = any(map(self._has_lease, folders))
            if not is_left and copied_bytes(view, self._target) is not None:
                self.state = "there"
                return
            with still_there(view):
                self.num_files, self.num_bytes = _count_files(view, folders[1:])
            if not is_left:
                check_writable(open_storage(self._target))

        self._try(look)

    def _has_lease(self, folder: str) -> bool:
        from ray_dcp.place.target_lease import leases_at

        place = place_below(self._target, folder) if folder else self._target
        return bool(leases_at(open_storage(place)))

    def run(self, target: str, meter: Meter, number: int, *, verify: bool) -> None:
        """Copies the checkpoint, with its tags and its note.

        Args:
            target: Target of the run.
            meter: Shows the progress.
            number: Number of this copy, from 1.
            verify: Read and verify the copy.
        """

        def act() -> None:
            meter.begin(self.source.name, number, doing="copying")
            with kept(self.source.place):
                copy_checkpoint(self.source.open(), self._target, progress=meter)
            self.state = "copied"

        if self.state == "planned":
            self._try(act)
        if self.state not in ("copied", "there"):
            return
        if self.in_run and self.source.step is not None:
            _copy_marks(self.source.step, target)
        if verify:
            meter.begin(self.source.name, number, doing="verifying")
            report = verify_path(self._target, progress=meter)
            self.problems = (*report.problems, *report.unread)

    def lines(self) -> list[str]:
        """Returns lines with the result of a step of a run, and below it what was found."""
        what = {"copied": f"copied, {size_text(self.num_bytes)}", "gone": "deleted meanwhile"}
        result = what.get(self.state, f"not copied: {self.failure}")
        damages = [f"  damaged: {problem}" for problem in self.problems]
        return [f"{self.source.name}: {result}", *damages]

    def _try(self, act: Callable[[], None]) -> None:
        """Calls `act`; handles that a step of a run is replaced, deleted or damaged meanwhile."""
        for number in range(_MOST_TRIES):
            try:
                return act()
            except CheckpointReplacedError:
                if number == _MOST_TRIES - 1:
                    raise
            except CheckpointNotFoundError as error:
                if not self.in_run:
                    raise
                if self._is_there():
                    # Why: the step stands, and one of its items is gone.
                    self._failed(DamagedCheckpointError(error.message))
                else:
                    self.state = "gone"
                return None
            except CheckpointExistsError as error:
                if not self.in_run:
                    raise
                self._failed(error)
                return None
            except (DamagedCheckpointError, StorageError) as error:
                # Why continue: a damaged step does not affect the others. An error of the target
                # would affect all of them, and is raised.
                is_unread = self.source.step is not None and self.source.step.state == "unreadable"
                if not self.in_run or (isinstance(error, StorageError) and not is_unread):
                    raise
                self._failed(error)
                return None
        return None

    def _is_there(self) -> bool:
        try:
            self.source.open()
        except CheckpointNotFoundError:
            return False
        return True

    def _failed(self, error: CheckpointError) -> None:
        self.state, self.failure, self.num_files = "failed", error, 0
        error.message = f"{self.source.name}: {error.message}"


def _copy_lines(source: str, target: str, copies: Sequence[_Copy], verb: str) -> list[str]:
    """Returns lines that describe what was or would be copied."""
    states = Counter(copy.state for copy in copies)
    counted = "copied" if verb == "copied" else "planned"
    todo = [copy for copy in copies if copy.state == counted]
    size = size_text(sum(copy.num_bytes for copy in todo))
    if not copies[0].in_run:
        if copies[0].state == "there":
            return [f"{target} is a copy of {copies[0].source.name} already"]
        return [f"{verb} {copies[0].source.name}, {size}, to {target}"] if todo else []
    steps = count_text(len(todo), "step")
    lines = [f"{verb} {steps} of {source}, {size}, to {target}"]
    for state, what in (("there", "there already"), ("gone", "deleted meanwhile")):
        if states[state]:
            lines.append(f"{count_text(states[state], 'step')}: {what}")
    return lines


def _copy_result(value: dict[str, Any], copies: Sequence[_Copy]) -> dict[str, Any]:
    """Returns the JSON value of a copy with the number of checkpoints by outcome."""
    states = Counter(copy.state for copy in copies)
    counts = {"num_copied": "copied", "num_there": "there", "num_gone": "gone"}
    return {**value, **{name: states[state] for name, state in counts.items()}}


def _count_files(view: CheckpointView, folders: Sequence[str]) -> tuple[int, int]:
    """Returns the number of files and bytes of a checkpoint with the items in its folders."""
    from ray_dcp.transform.copying import plan_copy

    items = [read_view(place_below(view.place or view.url, one)) for one in folders]
    plans = [plan_copy(one.storage, one.checkpoint) for one in (view, *items)]
    return sum(plan.num_files for plan in plans), sum(plan.num_bytes for plan in plans)


def _copy_marks(step: StepView, target: str) -> None:
    """Copies tags, note and later metrics of a step in a run, and by what the run trusts steps."""
    shared = open_storage(place_below(Target(target), SHARED_FOLDER))
    if step.step is not None and step.trust and not list(shared.list(TRUST)):
        shared.write(trust_key(step.trust), b"")
    if step.step is not None and step.metrics:
        from ray_dcp.manager.following import record_metrics, recorded_metrics

        attempt = step.manifest.attempt if step.manifest else ""
        recorded = recorded_metrics(step.run_place, step.step, attempt)
        if recorded:
            record_metrics(Target(target), step.step, recorded)
    if not step.tags and not step.note:
        return
    run = read_run(Target(target))
    copied = run.step(step.name)
    tags = {*step.tags} - {*copied.tags}
    run = run.tag(step.name, *sorted(tags)) if tags else run
    if step.note and step.note != copied.note:
        run.annotate(step.name, step.note)


def _numbers(context: click.Context, option: click.Parameter, value: str | None) -> list[float]:
    try:
        return [float(part) for part in (value or "").split(",") if part]
    except ValueError:
        raise click.BadParameter(f"expected numbers such as 1,1,2, found {value!r}") from None


@click.command()
@click.argument("sources", type=PLACE, nargs=-1, required=True, metavar="SOURCE...")
@click.option("-o", "--out", required=True, metavar="PATH", help="Path or URL of the result.")
@click.option(
    "--weights",
    callback=_numbers,
    metavar="W,W,...",
    help="A number for each source; equal if not given.",
)
@click.option(
    "--ema",
    type=float,
    metavar="DECAY",
    help="Weights 1, DECAY, DECAY**2, ... from the last source back.",
)
@click.option(
    "--last",
    type=click.IntRange(1),
    metavar="N",
    help="SOURCE is a run: average its N newest steps.",
)
@part
@dtype
@patterns
@dry_run
def average(
    sources: tuple[str, ...],
    out: str,
    weights: list[float],
    ema: float | None,
    last: int | None,
    part: str | None,
    dtype: str | None,
    include: tuple[str, ...],
    dry_run: bool,
) -> None:
    """Write the weighted mean of the checkpoints SOURCE, paths or RUN@STEP, to PATH.

    RUN@100..200 are the steps from 100 to 200. With --part, that part of each step is averaged; a
    part that is kept from another of these steps counts once.

    Floating-point tensors are averaged in float64, without the sources of weight 0. Integers and
    objects are those of the last source. The state of optimizers is left out unless --tensor
    chooses it; then it is that of the last source. Sources may differ in sharding and format;
    differences in names, shapes and dtypes are an error that lists all of them.
    """
    from ray_dcp.transform.averaging import average as average_checkpoints
    from ray_dcp.transform.averaging import decayed, plan_average

    if weights and ema is not None:
        raise InvalidRequestError("give --weights or --ema, not both")
    if last is not None:
        named = [(one, "") for one in _newest(sources, last)]
    else:
        named = [
            (one, text) for text in sources for one in steps_between(text) or [address_of(text)]
        ]
    named, repeated = _parts_of(named, part)
    addresses = [one for one, _ in named]
    check_answers(out)
    check_writable(open_storage(out))
    numbers = decayed(ema, len(addresses)) if ema is not None else weights or None
    with marks_removed_last(), ExitStack() as stack:
        for address in addresses:
            stack.enter_context(kept(address.place))
        views = [address.open(text) for address, text in named]
        choice: dict[str, Any] = {"weights": numbers, "dtype": dtype, "keys": include or None}
        if dry_run:
            report = plan_average(views, out, **choice).report
        else:
            with progress("averaging", out) as meter:
                report = average_checkpoints(views, out, **choice, progress=meter)
    lines = [
        f"{'would write' if dry_run else 'wrote'} the mean of {len(views)} checkpoints, "
        f"{count_text(len(report.averaged), 'tensor')}, about {size_text(report.num_bytes)}, to "
        f"{out}",
        *(f"{one['weight']:.4g} x {one['checkpoint']}" for one in report.sources),
    ]
    lines += repeated
    if report.taken:
        lines.append(f"from the last: {few(report.taken)}")
    if report.left_out:
        lines.append(f"left out: {few(report.left_out)}")
    value = {name: list(getattr(report, name)) for name in ("averaged", "taken", "left_out")}
    about = {"target": out, "num_bytes": report.num_bytes, "dry_run": dry_run}
    told({**about, "sources": [dict(one) for one in report.sources], **value}, *lines)


def _parts_of(
    named: Sequence[tuple[Address, str]], part: str | None
) -> tuple[list[tuple[Address, str]], list[str]]:
    """Returns a part of each step, and a line for each that is the part of another of them."""
    if part is None:
        return [*named], []
    found, lines = list[tuple[Address, str]](), list[str]()
    numbers = {None if one.step is None else one.step.step for one, _ in named}
    for one, text in named:
        below = part_of(one, part)
        source = one.open(text).parts[part].kept_from
        if source is not None and source in numbers:
            lines.append(f"counted once: {below.name} is kept from step {source}")
        else:
            found.append((below, text))
    return found, lines


def _newest(sources: Sequence[str], number: int) -> list[Address]:
    """Returns the newest steps of a run, oldest first.

    Raises:
        CheckpointNotFoundError: There are fewer.
        InvalidRequestError: There is more than one source.
    """
    if len(sources) != 1:
        raise InvalidRequestError(f"--last takes one run, but there are {len(sources)} sources")
    run = run_at(sources[0])
    steps = [one for one in run if one.is_readable and one.step is not None]
    steps = [one for one in steps if "/" not in one.name and one.name != "."]
    if len(steps) < number:
        raise CheckpointNotFoundError(
            f"expected {number} steps in {run.url} that can be read, found {len(steps)}"
        )
    return [
        Address(f"{sources[0].rstrip('/')}/{one.name}", one.path, one) for one in steps[-number:]
    ]


_MOST_SHOWN = 20


@click.command()
@click.argument("steps", type=PLACE, nargs=-1, required=True)
@click.option(
    "--force", is_flag=True, help="Also items of a step, and steps that are tagged or being read."
)
@click.option("--quiet", is_flag=True, help="Name no files.")
@yes
@dry_run
def rm(steps: tuple[str, ...], force: bool, quiet: bool, yes: bool, dry_run: bool) -> None:
    """Delete the checkpoints at STEPS, which are paths or RUN@STEP.

    Each deletion is atomic: a load finds the checkpoint complete or deleted. Files of other
    programs are kept.
    """
    from ray_dcp.place.step_deletion import StepDeletion

    found = [step_at(step) for step in steps]
    deletions = [StepDeletion(step.path, step.step) for step in found]
    ways = {"untag": "ray-dcp tag --remove", "forced": "--force"}
    for step, deletion in zip(found, deletions, strict=True):
        _check_ours(step)
        deletion.check(force=force, **ways)
        if not force:
            _check_no_item(step.path)
    total = sum(step.whole_bytes for step in found)
    names = ", ".join(step.path.url for step in found)
    if not dry_run:
        agree(f"delete {names} ({size_text(total)})", yes=yes)
    reports: list[tuple[str, CollectReport]] = []
    try:
        for step, deletion in zip(found, deletions, strict=True):
            check = partial(deletion.check, force=force, **ways)
            reports += _told_below(deletion.delete(_expected(step), dry_run=dry_run, check=check))
    except CheckpointError:
        if not says(JSON):
            _print_reports(reports, dry_run=dry_run, quiet=quiet)
        raise
    _print_reports(reports, dry_run=dry_run, quiet=quiet)


def _told_below(reports: Sequence[CollectReport]) -> list[tuple[str, CollectReport]]:
    """Returns the reports of a step and of its items, by path, with each file in one of them."""
    step, *items = reports
    step = _without_known(".", step, [one.path.rpartition("/")[2] for one in items])
    return [(one.path, one) for one in (step, *items)]


def _check_ours(step: StepView) -> None:
    if step.state in FOREIGN:
        raise InvalidRequestError(
            f"{step.path.url} was written by another program, and ray-dcp deletes only its own "
            f"files; remove the directory yourself to delete it"
        )


def _check_no_item(place: Target) -> None:
    """Raises if a checkpoint is an item of a committed step, which would be damaged without it."""
    above, _, name = place.url.rstrip("/").rpartition("/")
    if not above or above.endswith("/"):
        return
    step = replace(place, url=above)
    if not any(slot_of(entry.key) for entry in open_storage(step).list("manifest-")):
        return
    with suppress(CheckpointNotFoundError):
        view = read_view(step)
        if name in items_of(view.storage, view.checkpoint):
            raise InvalidRequestError(
                f"{place.url} is an item of the step in {above}, which can't be loaded without it: "
                f"delete the step, or give --force"
            )


def _expected(step: StepView) -> str | None:
    """Returns the attempt of a step as it was read; "" if nothing is committed, None if unknown."""
    if step.manifest is not None:
        return step.manifest.attempt
    return None if step.state == "damaged" else ""


@click.command()
@click.argument("root", type=PLACE)
@click.option(
    "--abort-unfinished",
    is_flag=True,
    help="End saves that may still be committed, too: right when their jobs have ended.",
)
@click.option("--quiet", is_flag=True, help="Name no files.")
@yes
@dry_run
def gc(root: str, abort_unfinished: bool, quiet: bool, yes: bool, dry_run: bool) -> None:
    """Delete files that crashed and aborted saves left at and below ROOT; checkpoints are kept."""
    run = run_at(root)
    begun = [one for one in run if one.items and one.state == "in flight"]
    # Why these, too: nobody can commit them any more.
    gone = [one for one in run if one.items and one.state == "deleted"]
    gone += begun if abort_unfinished else []
    others = {*begun, *gone, *(item for one in gone for item in run.items_of(one))}
    ours = [one for one in run if one.state not in (*FOREIGN, "unreadable") and one not in others]

    def remove(dry_run: bool) -> list[tuple[str, CollectReport]]:
        found = _collect(ours, abort_unfinished=abort_unfinished, dry_run=dry_run)
        return found + _remove_begun(gone, dry_run=dry_run)

    planned = remove(dry_run=True)
    count = sum(len(report.deleted) for _, report in planned)
    size = size_text(sum(report.num_bytes for _, report in planned))
    if not dry_run and (count or abort_unfinished):
        agree(f"delete {count_text(count, 'file')} ({size}) at and below {root}", yes=yes)
        planned = remove(dry_run=False)
        if any(is_full(warning) for _, report in planned for warning in report.warnings):
            shared = open_storage(place_below(run.place, SHARED_FOLDER))
            shared.delete([RESERVE])  # for the records that end saves
            planned += remove(dry_run=False)
            keep_reserve(shared)
    folders = {step.name for step in run}
    planned = [(name, _without_known(name, report, folders)) for name, report in planned]
    begun = [] if abort_unfinished else begun
    open_saves = bool(begun) or any(report.kept for _, report in planned)
    shown = [pair for pair in planned if pair[1].deleted or pair[1].warnings or pair[1].kept]
    freed = size_text(sum(report.num_bytes for _, report in planned))
    lines = [f"{'would free' if dry_run else 'freed'} {freed}"]
    lines += [f"{one.name}: left alone: {one.detail}" for one in run if one.state == "unreadable"]
    lines += [
        f"{one.name}: left alone: {one.detail}; the next that writes the run deletes it"
        for one in begun
    ]
    if open_saves and not abort_unfinished:
        lines.append(
            "if no job saves there any more: --abort-unfinished ends and deletes those, too"
        )
    _print_reports(shown, *lines, dry_run=dry_run, quiet=quiet)


def _without_known(name: str, report: CollectReport, folders: Collection[str]) -> CollectReport:
    """Leaves out kept files that a manager removes itself: step infos, and items of a step."""

    def is_known(key: str) -> bool:
        path = key if name == "." else f"{name}/{key}"
        above = (one for one in folders_above(path) if one in folders)
        return info_slot(key) is not None or any(one != name for one in above)

    return replace(report, kept=tuple(one for one in report.kept if not is_known(one.key)))


def _collect(
    steps: Sequence[StepView], *, abort_unfinished: bool, dry_run: bool
) -> list[tuple[str, CollectReport]]:
    from ray_dcp.place.collect import collect

    reports = []
    for step in steps:
        try:
            found = collect(step.path, abort_unfinished=abort_unfinished, dry_run=dry_run)
            reports.append((step.name, found))
        except CheckpointError as error:
            # Why continue: a damaged folder must not prevent the cleanup of the others.
            click.echo(f"{step.name}: left alone: {error.message}", err=True)
    return reports


def _remove_begun(steps: Sequence[StepView], *, dry_run: bool) -> list[tuple[str, CollectReport]]:
    """Deletes steps of items that are not committed; whose saves they are can't commit them."""
    from ray_dcp.place.step_deletion import StepDeletion

    reports: list[tuple[str, CollectReport]] = []
    for step in steps:
        try:
            deletion = StepDeletion(step.path, step.step)
            # Why unannounced: nothing protects what is not committed, and tags of this number may
            # be those of a step in another folder.
            found = _told_below(deletion.delete("", dry_run=dry_run, announced=False, check=dict))
        except CheckpointError as error:
            # Why continue: as in `_collect`.
            click.echo(f"{step.name}: left alone: {error.message}", err=True)
            continue
        base = found[0][0]
        reports += [(step.name + path.removeprefix(base), one) for path, one in found]
    return reports


def _print_reports(
    reports: Sequence[tuple[str, CollectReport]], *more: str, dry_run: bool, quiet: bool
) -> None:
    verb, lines = "would delete" if dry_run else "deleted", list[str]()
    reports = [(name, _without_known(name, report, ())) for name, report in reports]
    for name, report in reports:
        count, size = count_text(len(report.deleted), "file"), size_text(report.num_bytes)
        lines.append(
            f"{name}: {f'{verb} {count}, {size}' if report.deleted else 'nothing to delete'}"
        )
        if not quiet:
            lines += [f"  {key}" for key in report.deleted[:_MOST_SHOWN]]
            if len(report.deleted) > _MOST_SHOWN:
                lines.append(f"  ... and {len(report.deleted) - _MOST_SHOWN} more")
            for one in report.kept[:_MOST_SHOWN]:
                lines.append(f"  kept {one.key}: {one.reason.replace('attempt', 'the save')}")
        for warning in report.warnings:
            click.echo(f"warning: {warning}", err=True)
    value = [
        {
            "name": name,
            "deleted": list(report.deleted),
            "kept": {one.key: one.reason for one in report.kept},
            "num_bytes": report.num_bytes,
            "warnings": list(report.warnings),
        }
        for name, report in reports
    ]
    told({"dry_run": dry_run, "places": value}, *lines, *more)


@click.command()
@click.argument("step", type=PLACE)
@click.argument("tags", nargs=-1)
@click.option("--remove", is_flag=True, help="Remove these tags.")
@click.option("--note", metavar="TEXT", help="Put a note on the step; '' removes it.")
@dry_run
def tag(step: str, tags: tuple[str, ...], remove: bool, note: str | None, dry_run: bool) -> None:
    """Add tags or a note to STEP, such as RUN@500; without any, print those it has.

    A CheckpointManager never deletes a step that has a tag.
    """
    run, found = step_in_run(step)
    for one in tags:
        check_tag(one, existing=remove)
    if note is not None:
        check_note(note)
    if remove and not tags:
        raise InvalidRequestError("which tags are to be removed? Name them after the step")
    lines, verb = list[str](), "would have" if dry_run else "has"
    if not tags and note is None:
        lines = [*found.tags, *([f"note: {found.note}"] if found.note else [])]
    else:
        run.check_step(found.name)
    if not dry_run:
        run = run.tag(found.name, *tags, remove=remove) if tags else run
        run = run if note is None else run.annotate(found.name, note)
    if tags:
        lines.append(f"{found.name} {verb} {'no longer ' if remove else ''}{' '.join(tags)}")
    if note is not None:
        lines.append(f"{found.name} {verb} the note {note!r}")
    now = run.step(found.name)
    told({"name": now.name, "tags": list(now.tags), "note": now.note, "dry_run": dry_run}, *lines)


@click.command()
@click.argument("path", type=PLACE)
@dry_run
def metadata(path: str, dry_run: bool) -> None:
    """Write the .metadata of the checkpoint at PATH, so that stock DCP can read it.

    Use it for a checkpoint that was saved with SaveOptions(stock_metadata=False), or copied without
    its dot file.
    """
    from ray_dcp.place.stock_metadata import write_metadata
    from ray_dcp.view.checkpoint_view import read_view

    path, place, _ = address_of(path)
    value = {"path": path, "dry_run": dry_run}
    if dry_run:
        view = read_view(place)
        told(value, f"would write {view.url}/.metadata of {len(view)} tensors and objects")
    elif write_metadata(absolute_target(place)):
        told(value, f"stock DCP can read {path}")
    else:
        raise CheckpointExistsError(f"{path} was replaced meanwhile by a save without .metadata")
