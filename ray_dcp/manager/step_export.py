"""Exports of steps in the background of a run, as models for other programs.

After the commit of a chosen step, rank 0 starts a process that calls `ray_dcp.export`, at a low
priority. *Why a process*: it shares neither memory nor Python's global lock with the training, and
its end, however it comes, does not touch the run. A reader lease protects the step meanwhile.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import CheckpointError, InvalidRequestError
from ray_dcp.events import Event, contained, emit
from ray_dcp.format.manifest import slot_of
from ray_dcp.format.names import SHARED_FOLDER
from ray_dcp.io.checkpoint import METADATA_KEY
from ray_dcp.manager.background import Background
from ray_dcp.manager.catalogue import Root, StepFound
from ray_dcp.manager.reader_leases import ReaderLease
from ray_dcp.manager.retention import age_in
from ray_dcp.manager.save_policies import (
    SaveFacts,
    SavePolicy,
    asks_only_the_step,
    check_save_policy,
)
from ray_dcp.manager.settings import Settings
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.opening import place_below
from ray_dcp.transform.exporting import ExportFormat, export
from ray_dcp.transform.float_dtypes import float_dtype

logger = logging.getLogger(__name__)

_SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt"}
"""Of the formats that are one file."""
_WORK = ".ray-dcp-export-"
"""Begin of the name of the folder of the export that is being made, beside the finished ones."""
_NICE = 10
_MOST_TOLD = 2000
"""Characters of what a failed process printed that are logged."""


@dataclass(frozen=True, kw_only=True)
class StepExport:
    """Which steps of a run are exported in the background, where to and how.

    Raises:
        InvalidRequestError: A field has an invalid value.

    Examples:
        >>> from ray_dcp.manager import EverySteps
        >>> StepExport(path="models", policy=EverySteps(1000), dtype="bf16").format
        'hf'
    """

    path: str | os.PathLike[str]
    """Folder for the exports, on a filesystem of the node of rank 0. Each step gets a folder or
    file in it, with the name of the step's folder. Give each run a folder of its own: of steps of
    the same name, the last export stays."""
    policy: SavePolicy
    """Which of the saved steps are exported: `EverySteps(1000)`, `AtSteps(...)`, or both combined;
    the step alone must decide."""
    format: ExportFormat = "hf"
    """As for `ray_dcp.export`, like the next three fields."""
    include: Sequence[str] = ()
    dtype: str | None = None
    strip_prefix: str = ""
    item: str = ""
    """Name of the item that is exported, if the steps consist of named items."""

    def __post_init__(self) -> None:
        text = os.fspath(self.path) if isinstance(self.path, (str, os.PathLike)) else ""
        if not text or "://" in text:
            raise InvalidRequestError(
                f"StepExport.path must be a folder of this machine, but is {self.path!r}",
                key="path",
            )
        if not asks_only_the_step(check_save_policy(self.policy)):
            raise InvalidRequestError(
                f"StepExport.policy must decide by the step alone, as EverySteps and AtSteps do, "
                f"but is {self.policy!r}",
                key="policy",
            )
        if self.format not in get_args(ExportFormat):
            raise InvalidRequestError(
                f"StepExport.format must be one of {', '.join(get_args(ExportFormat))}, but is "
                f"{self.format!r}",
                key="format",
            )
        include = self.include
        if not isinstance(include, (list, tuple)) or not all(isinstance(it, str) for it in include):
            raise InvalidRequestError(
                f"StepExport.include must be a list of patterns, but is {include!r}", key="include"
            )
        for name in ("strip_prefix", "item"):
            if not isinstance(getattr(self, name), str):
                raise InvalidRequestError(
                    f"StepExport.{name} must be a text, but is {getattr(self, name)!r}", key=name
                )
        float_dtype(self.dtype)


class StepExporter:
    """Exports committed steps on rank 0, one after the other, in a thread while there are any.

    Args:
        root: The root of the run.
        settings: Settings of the manager.
        chosen: What is exported.

    Raises:
        InvalidRequestError: `chosen` is no `StepExport`, the manager saves nothing, the item that
            is to be exported is none of the manager's, or the exports would replace the steps.
    """

    def __init__(self, root: Root, settings: Settings, chosen: StepExport) -> None:
        if not isinstance(chosen, StepExport):
            raise InvalidRequestError(
                f"export must be a StepExport, but is {chosen!r}", key="export"
            )
        if settings.policy is None:
            raise InvalidRequestError(
                "read_only managers save nothing that could be exported; leave export out",
                key="export",
            )
        if chosen.item not in settings.items:
            raise InvalidRequestError(
                f"StepExport.item must be one of {', '.join(map(repr, settings.items))}, but is "
                f"{chosen.item!r}",
                key="item",
            )
        storage = root.storage
        if (
            chosen.format not in _SUFFIXES
            and isinstance(storage, LocalStorage)
            and os.path.realpath(chosen.path) == os.path.realpath(storage.url)
        ):
            raise InvalidRequestError(
                f"StepExport.path must be a folder of its own, but {chosen.path} has the steps of "
                f"the run itself, which the exports would replace",
                key="path",
            )
        self._root = root
        self._settings = settings
        self._chosen = chosen
        self._folder = Path(chosen.path).absolute()
        # Why the run in its name: another run may export to the same folder.
        run = hashlib.sha256(root.url.encode()).hexdigest()[:12]
        self._work = self._folder / f"{_WORK}{run}"
        self._background = Background("ray_dcp export")
        self._is_first = True

    def committed(self, step: int, steps: Mapping[int, StepFound]) -> None:
        """Begins the export of a step that was committed, if it is due. Never raises.

        With the first commit of a process, the newest due step before it is exported too, if the
        end of an earlier process has prevented that.

        Args:
            step: The step.
            steps: All committed steps.
        """
        with contained(f"Beginning the export of step {step}"):
            due = [step] if self._is_due(step) else []
            if self._is_first:
                self._is_first = False
                oldest_first = sorted(steps.values(), key=age_in(self._settings.order))
                places = [one.step for one in oldest_first]
                before = places[: places.index(step)]
                earlier = next((one for one in reversed(before) if self._is_due(one)), None)
                if earlier is not None and not self._target(earlier).exists():
                    due = [earlier, *due]
            for one in due:
                self._start_export(steps[one])

    def close(self) -> None:
        """Waits for the exports in progress."""
        self._background.wait()

    def _is_due(self, step: int) -> bool:
        return bool(self._chosen.policy.due(SaveFacts(step=step)))

    def _target(self, step: int) -> Path:
        name = self._settings.names.name_of(step)
        return self._folder / f"{name}{_SUFFIXES.get(self._chosen.format, '')}"

    def _start_export(self, found: StepFound) -> None:
        # Why now: the step could be deleted before its turn.
        protected = ExitStack()
        protected.enter_context(ReaderLease(self._root, found.step, lease_s=self._settings.lease_s))

        def run() -> None:
            with protected, contained(f"The export of step {found.step}"):
                self._export(found)

        self._background.add(run)

    def _export(self, found: StepFound) -> None:
        begin_s, target = time.monotonic(), self._target(found.step)
        place = self._root.below(found.name)
        try:
            items = {} if found.info is None else found.info.items
            if self._chosen.item:
                place = place_below(place, items[self._chosen.item])
            error = self._failure_of_process(place, target)
        except Exception as failed:  # noqa: BLE001 - the run goes on, whatever it is
            error = f"{type(failed).__name__}: {failed}"
        name, seconds = "export.failed" if error else "export.exported", time.monotonic() - begin_s
        emit(Event(name=name, checkpoint_id=place.url, seconds=seconds, error=error or None))
        if error:
            told = "The export of step %d to %s failed, and the run goes on. ray_dcp.export can "
            logger.warning(f"{told}make it from %s: %s", found.step, target, place.url, error)

    def _failure_of_process(self, place: Target, target: Path) -> str:
        """Exports a checkpoint in a process; returns why that failed, "" if it did not."""
        chosen = self._chosen
        work = partial(
            _export_step,
            place,
            target,
            self._work,
            format=chosen.format,
            include=tuple(chosen.include),
            dtype=chosen.dtype,
            strip_prefix=chosen.strip_prefix,
        )
        # Why two pickles: the second one needs modules that are found by the first one.
        given = pickle.dumps(sys.path) + pickle.dumps(work)
        # Why the priority first: most of the time of a small export is the import of torch.
        code = (
            f"import os,pickle,sys; os.nice({_NICE}); i=sys.stdin.buffer; "
            "sys.path[:]=pickle.load(i); pickle.load(i)()"
        )
        timeout_s = self._settings.options.write_timeout_s
        with subprocess.Popen(  # noqa: S603 - this interpreter, and code of ours
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                _, printed = process.communicate(given, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                return f"it did not end within {timeout_s:g} s (SaveOptions.write_timeout_s)"
        if process.returncode == 0:
            return ""
        reason = printed.decode(errors="replace").strip()[-_MOST_TOLD:]
        return reason or f"its process ended with status {process.returncode}"


def _export_step(place: Target, target: Path, work: Path, **how: Any) -> None:
    """Exports a checkpoint, and puts the result where an earlier one may be. Runs in a process."""
    if _holds_checkpoint(target, how["format"]):
        sys.exit(
            f"{target} holds a checkpoint, which an export never replaces; choose another "
            f"StepExport.path"
        )
    # Why: an export whose process was killed leaves it.
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
        export(place, work / target.name, **how)
        if target.exists():
            target.rename(work / "replaced")
        (work / target.name).rename(target)
    except (CheckpointError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _holds_checkpoint(target: Path, form: ExportFormat) -> bool:
    """Returns whether a folder holds a checkpoint that was saved, and not exported, to it."""
    if not target.is_dir():
        return False
    if (target.parent / SHARED_FOLDER).is_dir():
        return True
    # Why not for "dcp": what it exports is a checkpoint, too.
    names = os.listdir(target) if form != "dcp" else []
    return any(name == METADATA_KEY or slot_of(name) is not None for name in names)
