"""Replicas that differ between ranks: one rank's value is saved whole, never a mixture."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ray_dcp
from ray_dcp.errors import PlanConflictError
from ray_dcp.options import SaveOptions
from ray_dcp.torch_adapter.capture import Capture, capture
from ray_dcp.torch_adapter.devices import (
    SEGMENT_BYTES,
    content_digest,
    content_digests,
    content_digests_on_device,
)
from tests.support.world import Warm

from .adapter_support import as_rank

MIB = 1 << 20


def of_rank(state, rank: int, world_size: int) -> Capture:
    """What a rank captures; a state that is a function is made in a process group."""
    if not callable(state):
        return capture(state, rank=rank, world_size=world_size)
    with as_rank(rank, world_size):
        return capture(state(rank), rank=rank, world_size=world_size)


def save(warm: Warm, states, replicas="warn"):
    """Saves; returns the outcomes of the ranks."""
    options = SaveOptions(num_threads=1, replicas=replicas)
    return warm.save(states, options=options, capture=of_rank)


def placed(local: torch.Tensor, mesh, placements, shape) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def replicated(length: int):
    """Each rank holds another number everywhere."""

    def state(rank: int):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.full((length,), float(rank))
        return {"w": placed(local, mesh, [Replicate()], (length,))}

    return state


def hsdp(rows: int, differs: bool):
    """Two replicas of two shards; the second replica of the second shard is another."""

    def state(rank: int):
        mesh = init_device_mesh("cpu", (2, 2))
        value = float(rank % 2) + (10 if differs and rank == 3 else 0)
        local = torch.full((rows // 2, 1024), value)
        return {"w": placed(local, mesh, [Replicate(), Shard(0)], (rows, 1024))}

    return state


def test_dtensor_replicas_that_differ_are_the_lowest_ranks(tmp_path):
    warm = Warm(2, str(tmp_path / "ckpt"))
    results = save(warm, replicated(40 * MIB // 4))
    assert "'w' on rank 1" in results[0].get().warnings[0]
    saved = ray_dcp.read_state_dict(warm.url)["w"]
    assert saved.unique().tolist() == [0]


def test_replicas_that_differ_later_are_never_mixed(tmp_path):
    warm = Warm(4, str(tmp_path / "ckpt"))
    assert save(warm, hsdp(4096, differs=False), "check")[0].get().warnings == ()
    assert save(warm, hsdp(4096, differs=False), "check")[0].get().warnings == ()
    assert warm.was_warm
    assert "'w' on rank 3" in save(warm, hsdp(4096, differs=True))[0].get().warnings[0]
    saved = ray_dcp.read_state_dict(warm.url)["w"]
    assert [half.unique().tolist() for half in saved.chunk(2)] == [[0], [1]]
    results = save(warm, hsdp(4096, differs=True), "check")
    assert [type(result.error) for result in results] == [PlanConflictError] * 4


@pytest.mark.parametrize("at", [3 * MIB + 17, 20 * MIB + 5, 40 * MIB - 1])
def test_one_byte_of_a_large_plain_tensor_that_differs_is_found(tmp_path, at):
    states = [{"w": torch.zeros(40 * MIB // 4)} for _ in range(2)]
    states[1]["w"].view(torch.uint8)[at] = 1
    warm = Warm(2, str(tmp_path / "ckpt"))
    assert "'w' on rank 1" in save(warm, states)[0].get().warnings[0]
    assert not ray_dcp.read_state_dict(warm.url)["w"].any()
    assert isinstance(save(warm, states, "check")[0].error, PlanConflictError)


def test_the_digest_tells_contents_apart_and_ignores_strides():
    tensor = torch.arange(12.0).reshape(3, 4)
    assert content_digest(tensor.T.contiguous().T) == content_digest(tensor)
    other = tensor.clone()
    other[2, 3] = 0
    assert content_digest(other) != content_digest(tensor)
    assert content_digest(torch.zeros(0)) != 0


def test_the_digest_of_a_large_tensor_sees_every_byte_and_its_length():
    large = torch.zeros((3 << 20) // 4 + 5)
    digest = content_digest(large)
    for at in (0, SEGMENT_BYTES - 1, SEGMENT_BYTES, (1 << 20) + 3, large.nbytes - 1):
        changed = large.clone()
        changed.view(torch.uint8)[at] = 1
        assert content_digest(changed) != digest
    assert content_digest(torch.zeros((3 << 20) // 4 + 6)) != digest


LENGTHS = [0, 1, 63, 1024, *(SEGMENT_BYTES * n + more for n in (1, 2, 700) for more in (-1, 0, 1))]


def test_a_device_digests_as_the_host_does():
    values = torch.Generator().manual_seed(5)
    tensors = [
        torch.randint(0, 256, (length,), dtype=torch.uint8, generator=values) for length in LENGTHS
    ]
    numbers = torch.randn(300, 400, generator=values)
    tensors += [
        numbers, numbers.T, numbers.bfloat16()[1:, 1:], numbers.bfloat16().view(-1)[1:],
        numbers > 0, torch.complex(numbers, -numbers).conj(), numbers.to(torch.float8_e4m3fn),
        torch.full((1 << 15,), -1), torch.zeros(1 << 15), torch.tensor(3.0, requires_grad=True),
    ]  # fmt: skip
    assert content_digests_on_device(tensors) == content_digests(tensors)
