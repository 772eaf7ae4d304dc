"""The command `doctor`: finds problems of a run or its storage. Imports neither torch nor Ray."""

from __future__ import annotations

import platform
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import click

import ray_dcp
from ray_dcp.cli.listing import run_of
from ray_dcp.cli.output import styled, told
from ray_dcp.errors import CheckpointError
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import KeyExistsError, Storage
from ray_dcp.view.run_view import RunView, StepView
from ray_dcp.view.wording import count_text, seconds_text, size_text

Level = Literal["ok", "note", "wrong"]
_STYLES = {"ok": "green", "note": "yellow", "wrong": "red"}
_PACKAGES = ("torch", "ray", "numpy", "pyarrow", "fsspec", "obstore")
_PROBE_BYTES = 16 << 20
_CLOCK_S = 300.0
_LIFECYCLE = (
    "the bucket needs a lifecycle rule AbortIncompleteMultipartUpload (of 7 days, say): parts of "
    "uploads that a killed process began appear in no listing and are paid for"
)


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    level: Level
    what: str
    told: str


@click.command()
@click.argument("root")
@click.option(
    "--write",
    is_flag=True,
    help="Try to write as well: whether names can be created once, and how fast. Cleans up.",
)
def doctor(root: str, write: bool) -> None:
    """Find problems of the run at ROOT, or of its storage.

    Exit status: 0 no problem, 1 a checkpoint is damaged, 2 the storage refuses.
    """
    found = [_versions()]
    storage = open_storage(root)
    began_s = time.perf_counter()
    run = run_of(root)
    took = seconds_text(time.perf_counter() - began_s)
    found.append(Finding("ok", "reading", f"{count_text(len(run), 'checkpoint')} listed in {took}"))
    if storage.url.startswith(("s3://", "gs://")):
        found.append(Finding("note", "uploads", _LIFECYCLE))
    found += _steps(run)
    refused = False
    if write:
        try:
            found += _probe(storage)
        except CheckpointError as error:
            refused = True
            found.append(Finding("wrong", "writing", str(error)))
    findings = [asdict(one) for one in found]
    width = max(len(one.what) for one in found)
    lines = [
        f"{styled(f'{f.level:<5}', _STYLES[f.level])} {f.what:<{width}} {f.told}" for f in found
    ]
    told({"path": run.url, "findings": findings}, *lines)
    if refused:
        sys.exit(2)
    if any(one.level == "wrong" for one in found):
        sys.exit(1)


def _versions() -> Finding:
    told = [f"python {platform.python_version()}", f"ray-dcp {ray_dcp.__version__}"]
    for name in _PACKAGES:
        try:
            told.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            told.append(f"no {name}")
    return Finding("ok", "versions", ", ".join(told))


def _steps(run: RunView) -> Iterator[Finding]:
    for step in run:
        for level, what in _odd(step):
            yield Finding(level, step.name, what)
    readable = [step for step in run if step.is_readable]
    if not readable:
        yield Finding("note", "latest", "there is no checkpoint to load")
        return
    try:
        newest = run.step("latest")
    except CheckpointError as error:
        yield Finding("wrong", "latest", str(error))
        return
    try:
        if newest.view.checkpoint.metadata_is_stale:
            told = ".metadata is missing or older: stock DCP does not see it; see ray-dcp metadata"
            yield Finding("note", newest.name, told)
        size = size_text(newest.view.num_bytes)
        yield Finding("ok", "latest", f"{newest.name} can be opened, {size}")
    except CheckpointError as error:
        yield Finding("wrong", newest.name, str(error))


def _odd(step: StepView) -> Iterator[tuple[Level, str]]:
    if step.state in ("damaged", "unreadable"):
        yield "wrong", f"{step.state}: {step.detail}"
    if step.state == "in flight":
        yield "note", f"a save under way, or that crashed: {step.detail}; see ray-dcp gc"
    elif step.in_flight:
        saves = count_text(len(step.in_flight), "save")
        yield "note", f"{saves} over it under way, or crashed; see ray-dcp gc"
    if step.state in ("committed", "aborted", "deleted") and step.detail:
        yield "note", f"{step.state}: {step.detail}"
    if step.created_s is not None and step.created_s > time.time() + _CLOCK_S:
        yield "note", "was saved in the future: the clocks of this machine and of the job differ"


def _probe(storage: Storage) -> Iterator[Finding]:
    """Tries the operations of a save, on keys of its own, and removes these again."""
    key = f".ray-dcp-doctor-{secrets.token_hex(6)}"
    try:
        storage.write(key, b"1", create=True)
        once = False
        try:
            storage.write(key, b"2", create=True)
        except KeyExistsError:
            once = storage.traits.create_if_absent
        told = "created twice: only one job at a time may save to a checkpoint"
        if once:
            told = "created once, whoever tries: saves of two jobs can't mix"
        yield Finding("ok" if once else "note", "commit", f"a name can be {told}")
        data = secrets.token_bytes(1 << 20)
        began_s = time.perf_counter()
        writer = storage.open_writer(f"{key}.part")
        try:
            for _ in range(_PROBE_BYTES >> 20):
                writer.write(data)
            writer.commit()
        finally:
            writer.abort()
        speed = size_text(int(_PROBE_BYTES / (time.perf_counter() - began_s)))
        began_s = time.perf_counter()
        same = storage.read(f"{key}.part", _PROBE_BYTES - len(data), len(data)) == data
        took = seconds_text(time.perf_counter() - began_s)
        told = f"{speed}/s by one thread; 1 MiB read in {took}"
        yield Finding("ok" if same else "wrong", "writing", told)
    finally:
        storage.delete([key, f"{key}.part"])
