"""Whatever happens to its files, a load gives the values that were saved, or fails."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

import ray_dcp
from ray_dcp.errors import CheckpointError
from ray_dcp.options import LoadOptions
from ray_dcp.store.memory import MemoryStorage

_NAMES = (f"property-load-{number}" for number in itertools.count())


def state(number: float) -> dict[str, object]:
    """Small tensors, one that is read straight into its target, a transposed one and an object."""
    return {
        **{f"small.{i}": torch.arange(40.0) * number + i for i in range(30)},
        "large": torch.arange(80_000.0).reshape(400, 200) * number,
        "turned": (torch.arange(600.0) * number).reshape(20, 30).t(),
        "half": torch.arange(100).to(torch.bfloat16) * number,
        "empty": torch.zeros(0, 3),
        "step": [number, "text"],
    }


@pytest.fixture(scope="module")
def stored() -> dict[str, bytes]:
    name = next(_NAMES)
    ray_dcp.save(state(2.0), checkpoint_id=f"memory://{name}", no_dist=True)
    storage = MemoryStorage(name)
    return {entry.key: storage.read(entry.key) for entry in storage.list()}


@st.composite
def damaged(draw: st.DrawFn, files: dict[str, bytes]) -> dict[str, bytes]:
    """The files after one to three of them were cut, changed, lost, swapped or written over."""
    wrong = dict(files)
    for _ in range(draw(st.integers(1, 3))):
        if not wrong:
            break
        key = draw(st.sampled_from(sorted(wrong)))
        data = bytearray(wrong[key])
        low = draw(st.integers(0, max(len(data) - 1, 0)))
        count = draw(st.sampled_from([1, 2, 8, 512, 4096]))
        match draw(st.sampled_from(["flip", "cut", "drop", "insert", "zero", "lose", "swap"])):
            case "flip" if data:
                data[low] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[low:]
            case "drop":
                del data[low : low + count]
            case "insert":
                data[low:low] = bytes(count)
            case "zero":
                data[low : low + count] = bytes(len(data[low : low + count]))
            case "lose":
                del wrong[key]
                continue
            case "swap":
                data = bytearray(wrong[draw(st.sampled_from(sorted(wrong)))])
        wrong[key] = bytes(data)
    return wrong


@settings(max_examples=30, deadline=None)
@given(source=st.data())
def test_damaged_files_never_give_other_values(stored: dict[str, bytes], source: st.DataObject):
    name = next(_NAMES)
    storage = MemoryStorage(name)
    for key, data in source.draw(damaged(stored)).items():
        storage.write(key, data)
    target, expected = state(0.0), state(2.0)
    threads = source.draw(st.integers(1, 2))
    try:
        options = LoadOptions(num_threads=threads)
        ray_dcp.load(target, checkpoint_id=f"memory://{name}", no_dist=True, options=options)
    except CheckpointError:
        event("refused")
    else:
        event("loaded")
        assert target.pop("step") == expected.pop("step")
        for fqn, value in expected.items():
            assert torch.equal(target[fqn], value), fqn
    finally:
        storage.delete(entry.key for entry in storage.list())
