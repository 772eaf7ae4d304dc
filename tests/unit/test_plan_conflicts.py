"""Ranks whose items make no checkpoint: all that is wrong with one save is told together."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import ray_dcp
from ray_dcp.core.columns import ColumnsBuilder, encode
from ray_dcp.errors import CoverageError, PlanConflictError
from ray_dcp.planning.fingerprint import fingerprint
from ray_dcp.planning.global_plan import make_plan
from ray_dcp.planning.merge import contents_of, without_contents
from ray_dcp.protocol.commands import MakePlan, Planned
from ray_dcp.runtime.tasks import plan_of
from ray_dcp.torch_adapter.capture import capture
from tests.conflicts import ALL, CONFLICTS, Boxes, Conflict
from tests.crash.ranks import save_ranks
from tests.inline_ranks import run_ranks


def captured(state, rank, world_size):
    return capture(state, rank=rank, world_size=world_size)


HOW = {
    "save": {},
    "async": {"staged": True},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW.keys())
@pytest.mark.parametrize("conflict", [*CONFLICTS.values(), ALL], ids=[*CONFLICTS, "all"])
def test_every_rank_is_told_all_conflicts_by_name_and_rank(tmp_path, conflict, how):
    states = [conflict.state(rank) for rank in range(3)]
    url = str(tmp_path / "c")
    results = run_ranks(save_ranks({}, 3, url, states=states, capture=captured, **how))
    assert {type(result.error) for result in results} == {conflict.kind}
    assert len({str(result.error) for result in results}) == 1
    for line in conflict.told:
        assert line in str(results[0].error)
    assert not (tmp_path / "c").exists()


ALONE = Conflict(
    lambda rank: {
        "overlap": Boxes((0, 5), (4, 8)),
        "gap": Boxes((0, 5)),
        "bounds": Boxes((0, 9)),
        "twice": Boxes((0, 3), (3, 8), (0, 3)),
    },
    PlanConflictError,
    (
        "'overlap': [0:5] on rank 0 overlaps [4:8] on rank 0",
        "'gap': no rank holds 3 of 8 elements, first [5:8]; the rest is on rank 0",
        "'bounds': [0:9] on rank 0 reaches out of the shape (8,)",
        "'twice': [0:3] is listed more than once by rank 0",
    ),
)


def save_and_wait(state, path, **options):
    ray_dcp.async_save(state, checkpoint_id=path, **options).result()


@pytest.mark.parametrize("save", [ray_dcp.save, save_and_wait])
def test_a_process_that_is_alone_is_told_all_at_once(tmp_path, save):
    path = tmp_path / "c"
    call = partial(ray_dcp.save, checkpoint_id=path, no_dist=True)
    if save is save_and_wait:
        call = partial(save_and_wait, path=path, no_dist=True)
    with pytest.raises(PlanConflictError) as caught:
        call(ALONE.state(0))
    for line in ALONE.told:
        assert line in str(caught.value)
    assert not path.exists()
    call({"w": torch.ones(3)})
    assert ray_dcp.verify(path).ok


def repeated(rank: int) -> ColumnsBuilder:
    builder = ColumnsBuilder()
    builder.tensor("w", "float32", (9, 2), offset=(3 * rank, 0), size=(3, 2))
    builder.tensor("scalar", "float32", ())
    builder.object("step")
    if rank:
        builder.tensor("w", "float32", (9, 2), offset=(3 * rank, 0), size=(3, 2))
        builder.tensor("scalar", "float32", ())
        builder.object("step")
        builder.object("step")
    return builder


def test_what_is_listed_again_is_told_once_for_all_ranks_that_do_it():
    with pytest.raises(PlanConflictError) as caught:
        make_plan([repeated(rank).build() for rank in range(3)])
    assert str(caught.value).splitlines()[1:] == [
        "  'w': [3:6, 0:2] is listed more than once by rank 1",
        "  'scalar': the scalar is listed more than once by ranks 1-2",
        "  'step': the object is listed more than once by ranks 1-2",
        "  'w': [6:9, 0:2] is listed more than once by rank 2",
    ]


def test_boxes_without_elements_may_be_listed_again():
    def fill(rank: int):
        builder = ColumnsBuilder()
        builder.tensor("w", "float32", (3,), offset=(3 * rank,), size=(3 - 3 * rank,))
        builder.tensor("w", "float32", (3,), offset=(3,), size=(0,))
        return builder.build()

    assert make_plan([fill(0), fill(1)]).table.size.tolist() == [[3], [0]]


WORLD_SIZE = 128


def slabs(rank: int, wrong: bool = False):
    """Returns what a rank holds of ten tensors that lie in equal slabs."""
    builder = ColumnsBuilder()
    for index in range(10):
        low = 2 * rank
        if wrong and index == 3 and rank == 90:
            low -= 1
        builder.tensor(f"w{index}", "float32", (2 * WORLD_SIZE, 2), offset=(low, 0), size=(2, 2))
    if wrong and rank == 7:
        builder.tensor("w5", "float32", (2 * WORLD_SIZE, 2), offset=(14, 0), size=(2, 2))
    return builder.build()


def planned(columns, asked):
    """Makes a plan of what the asked ranks send; of the others only fingerprints are known."""
    how = {"world_size": len(columns), "container": "torch_save", "part_bytes": 1 << 30}
    return plan_of(
        MakePlan(
            tuple(
                encode(without_contents(own)) if rank in asked else b""
                for rank, own in enumerate(columns)
            ),
            "torch_save", 1 << 30, False,
            tuple(map(contents_of, columns)),
            tuple(fingerprint(own, **how) for own in columns),
            tuple(range(len(columns))),
        )
    )  # fmt: skip


def test_a_regular_layout_with_some_ranks_in_conflict_is_told_as_by_the_rows():
    few = {0, *(1 << power for power in range(7))}
    sound = [slabs(rank) for rank in range(WORLD_SIZE)]
    assert isinstance(planned(sound, few), Planned)
    columns = [slabs(rank, wrong=True) for rank in range(WORLD_SIZE)]
    assert set(planned(columns, few).ranks) == {7, 90}
    with pytest.raises(PlanConflictError) as caught:
        planned(columns, few | {7, 90})
    assert str(caught.value).splitlines()[1:] == [
        "  'w3': [178:180, 0:2] on rank 89 overlaps [179:181, 0:2] on rank 90",
        "  'w5': [14:16, 0:2] is listed more than once by rank 7",
        "  'w3': no rank holds 2 of 512 elements, first [181:182, 0:2]; the rest is on ranks 0-127",
    ]


@pytest.mark.parametrize("rank", range(3))
def test_a_gap_alone_stays_a_coverage_error(tmp_path, rank):
    states = [{"w": Boxes(*([(3 * r, min(3 * r + 3, 8))] * (r != rank)))} for r in range(3)]
    results = run_ranks(save_ranks({}, 3, str(tmp_path), states=states, capture=captured))
    others = np.delete(np.arange(3), rank)
    assert {type(result.error) for result in results} == {CoverageError}
    told = f"{others[0]}-{others[1]}" if rank != 1 else "0, 2"
    assert f"the rest is on ranks {told}" in str(results[0].error)
