"""Values on their way to a part of a job's step: what Ray stores of them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import ray_dcp


def test_tensors_of_a_value_lie_beside_its_pickle_without_a_copy():
    tensor = torch.arange(1 << 16)
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(
        ray_dcp.PartValue({"rows": tensor}), protocol=5, buffer_callback=buffers.append
    )
    (buffer,) = buffers
    assert np.frombuffer(buffer, np.uint8).ctypes.data == tensor.data_ptr()
    assert len(data) < 1000
    # Who gets it maps the store's memory, which must not be written, without a warning.
    held = bytes(buffer)
    found = pickle.loads(data, buffers=[held]).value["rows"]
    assert found.data_ptr() == np.frombuffer(held, np.uint8).ctypes.data
    assert torch.equal(found, tensor)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_value_comes_as_it_was(protocol):
    whole = torch.arange(12.0).view(3, 4)
    value = {
        "whole": whole, "turned": whole.t(), "part": whole[1:, ::2], "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4), "half": torch.ones(3, dtype=torch.bfloat16),
        "conjugated": torch.tensor([1 + 2j]).conj(), "bits": torch.tensor([True, False]),
        "trained": torch.ones(2, requires_grad=True), "weight": torch.nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    wrapped = ray_dcp.PartValue({**value, "sparse": torch.eye(3).to_sparse(), "rows": [(1, "b")]})
    found = pickle.loads(pickle.dumps(wrapped, protocol=protocol)).value
    for name, tensor in value.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    assert found["rows"] == [(1, "b")]
