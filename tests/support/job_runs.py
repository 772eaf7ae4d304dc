"""Runs of `JobCheckpoints`, made without Ray by what its coordinator calls on storage."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import ray_dcp
from ray_dcp.errors import CheckpointError
from ray_dcp.format.job_parts import PartRecord
from ray_dcp.io.lease_holders import this_process
from ray_dcp.job.kept_parts import KeptParts
from ray_dcp.job.step_files import create_record, part_source, remove_parts
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.root_writer import Writer
from ray_dcp.manager.settings import Item, Settings
from ray_dcp.manager.step_target import StepTarget
from ray_dcp.store.location import Location
from ray_dcp.store.opening import target_of
from ray_dcp.view.checkpoint_view import read_view


def policy(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((3000,), value)}}


def buffer(value: float) -> dict[str, Any]:
    return {"rows": torch.full((100,), value), "at": int(value)}


class JobRun:
    """A run of the parts `policy` and `buffer`.

    Args:
        root: Its place.
        takeover: Whether it is taken from a process that lives.
    """

    def __init__(self, root: Path | Location, *, takeover: bool = False) -> None:
        self.root = root
        settings = Settings(items={"policy": Item(), "buffer": Item()}, takeover=takeover)
        self.writer = Writer(Root(target_of(root, None)), settings, holder=this_process())
        self.now_s = 0.0
        self.kept = KeptParts(self.writer.root, settings, lambda: self.now_s)

    def begin(
        self,
        step: int,
        states: Mapping[str, Mapping[str, Any]],
        *,
        keep: Collection[str] = (),
        version: int | None = None,
    ) -> tuple[StepTarget, dict[str, PartRecord]]:
        """Makes parts durable, of a step that has no record yet."""
        place = self.writer.begin(step, metrics={"loss": 1.0 / step})
        records = {}
        for name, state in states.items():
            path = self.root / place.name / place.folder_of(name)
            ray_dcp.save(state, checkpoint_id=path)
            records[name] = PartRecord(attempt=read_view(path).attempt or "", version=version)
        for name in keep:
            found, known = part_source(self.writer, name, step)
            attempt = self.kept.link(found, name, f"{place.name}/{place.folder_of(name)}")
            assert known is not None
            records[name] = replace(known, attempt=attempt, kept_from=found.step)
        return place, records

    def save(self, step: int, states: Mapping[str, Mapping[str, Any]], **how: Any) -> None:
        place, records = self.begin(step, states, **how)
        assert create_record(self.writer, place, records) is None
        self.writer.finish(place, True)

    def give_up(self, step: int, states: Mapping[str, Mapping[str, Any]]) -> None:
        place, records = self.begin(step, states)
        attempts = {name: one.attempt for name, one in records.items()}
        remove_parts(self.writer, place, attempts, CheckpointError("the buffer died"))
        self.writer.finish(place, False)


def make(root: Path) -> None:
    """Makes steps 1 and 2, which keeps the policy of 1; 3, given up; 4, whose writer crashed."""
    run = JobRun(root)
    run.save(1, {"policy": policy(1.0), "buffer": buffer(1.0)}, version=7)
    run.save(2, {"buffer": buffer(2.0)}, keep=["policy"])
    run.give_up(3, {"policy": policy(3.0), "buffer": buffer(3.0)})
    run.begin(4, {"policy": policy(4.0)})
    run.writer.close()
