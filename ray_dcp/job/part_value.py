"""`PartValue`: a value on its way to a part, whose tensors Ray's object store has uncopied.

Ray by default pickles a torch tensor into the object. Here tensors are buffers beside the pickle,
as those of numpy are: they are copied once, into the store, and who gets the object maps them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import numpy as np
import torch
from ray import cloudpickle

Restore = tuple[Callable[..., Any], tuple[Any, ...]]


class PartValue:
    """Wraps what an actor or a task returns for `JobStep.put`, so that its tensors are not pickled.

    It is saved as what it wraps. Tensors are taken as they are when Ray stores the object; those of
    other devices are copied to the CPU. What Ray gives to others is mapped from its store, and must
    not be changed.

    Args:
        value: Anything that `JobStep.put` accepts.

    Attributes:
        value: The value.

    Examples:
        Of an actor that has a buffer::

            def state_dict(self):
                return ray_dcp.PartValue({"samples": self.samples})
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce_ex__(self, protocol: SupportsIndex) -> Restore:
        buffers: list[pickle.PickleBuffer] = []
        with io.BytesIO() as file:
            _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(self.value)
            data = file.getvalue()
        if int(protocol) < 5:
            return _restored, (data, [bytes(one) for one in buffers])
        return _restored, (data, buffers)


def _restored(data: bytes, buffers: Sequence[Any]) -> PartValue:
    return PartValue(pickle.loads(data, buffers=buffers))


_CloudPickler: Any = cloudpickle.CloudPickler


class _Pickler(_CloudPickler):  # type: ignore[misc]
    """Pickles plain tensors as their bytes, beside the pickle."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or not _has_bytes(obj):
            return super().reducer_override(obj)
        plain = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
        array = plain.view(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(array.data), plain.dtype, tuple(plain.shape))


def _has_bytes(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized
    return is_plain and tensor.device.type != "meta"


class _Mapped:
    """Memory as an array that torch takes without a warning that it must not be changed."""

    def __init__(self, data: Any) -> None:
        self._array = np.frombuffer(data, np.uint8)
        known = self._array.__array_interface__
        self.__array_interface__ = {**known, "data": (known["data"][0], False)}


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not memoryview(data).nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.asarray(_Mapped(data))).view(dtype).view(shape)
