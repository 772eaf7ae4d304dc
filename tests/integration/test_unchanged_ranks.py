"""`SaveOptions(unchanged="link")` on real ranks, through stagers, and on a real S3 server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import ray_dcp
from tests.support.programs import unchanged as programs
from tests.support.programs.unchanged import holds, inodes, path_of

NUM_RANKS = 2


def totals(came: Sequence[Any], step: int) -> dict[str, int]:
    names = ("bytes_written", "bytes_linked", "bytes_copied")
    return {name: sum(getattr(reports[step], name) for reports in came) for name in names}


@pytest.mark.parametrize("staging", ["call", "background"])
def test_stagers_link_what_did_not_change(ranks, tmp_path, staging):
    came = ranks.run(programs.save_steps, str(tmp_path), 3, "async_save", staging=staging)
    for step in range(3):
        path = path_of(tmp_path, step)
        assert holds(path, step)
        sizes = {file.stat().st_ino: file.stat().st_size for file in path.glob("*.distcp")}
        shared = inodes(path) & inodes(path_of(tmp_path, step - 1)) if step else set()
        linked = sum(sizes[inode] for inode in shared)
        assert totals(came, step) == {
            "bytes_written": sum(sizes.values()) - linked,
            "bytes_linked": linked,
            "bytes_copied": 0,
        }
        assert bool(linked) == bool(step)
        trace = ray_dcp.open(path).trace
        assert (trace.linked_bytes, trace.num_bytes) == (linked, sum(sizes.values()) - linked)


def test_ranks_link_what_they_wrote_together(ranks, tmp_path):
    ranks.run(programs.save_steps, str(tmp_path), 2)
    assert inodes(path_of(tmp_path, 0)) & inodes(path_of(tmp_path, 1))
    assert holds(path_of(tmp_path, 1), 1)


def test_another_number_of_ranks_writes_anew_and_then_links(ranks, tmp_path):
    ranks.run(programs.save_steps, str(tmp_path), 1)
    ranks.resize(1)
    ranks.run(programs.save_steps, str(tmp_path), 3)
    for step in range(3):
        assert holds(path_of(tmp_path, step), step)
    assert inodes(path_of(tmp_path, 1)) & inodes(path_of(tmp_path, 2))


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_s3_copies_what_did_not_change(place, how):
    reports = programs.save_steps(place, 3, how)
    assert all(report.bytes_copied > 0 for report in reports[1:])
    for step in (1, 0, 2):
        assert holds(path_of(place, step), step)
        ray_dcp.delete(path_of(place, step))


def test_an_object_longer_than_a_request_is_copied_too(place):
    small = ray_dcp.Location(
        place.url, storage_options={**place.storage_options, "request_bytes": 5 << 20}
    )
    model = programs.Tuned(width=2000)
    for step in range(2):
        model.set_step(step)
        handle = ray_dcp.async_save(
            {"model": model}, checkpoint_id=path_of(small, step), options=programs.LINK
        )
        handle.committed(120)
    assert handle.report().bytes_copied > 5 << 20
    found = {"model.base.weight": torch.zeros(2000, 2000)}
    ray_dcp.load(found, checkpoint_id=path_of(small, 1))
    assert torch.equal(found["model.base.weight"], model.base.weight)
