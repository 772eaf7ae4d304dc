"""Where two states differ, to the bit: tensors of every kind, containers and objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

from ray_dcp import PerRank
from tests.support.exchange_cases import raw


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Returns where two states are not the same, to the bit, a short line each."""
    return list(_differing(found, expected, path))


def _differing(found: Any, expected: Any, path: str) -> Iterator[str]:
    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor):
            yield f"{path}: a {type(found).__name__} where a tensor was"
            return
        ours, theirs = found.detach(), expected.detach()
        if isinstance(theirs, DTensor):
            ours, theirs = ours.to_local(), theirs.to_local()
        if isinstance(theirs, TwoTensor):
            if not isinstance(ours, TwoTensor):
                yield f"{path}: no TwoTensor any more"
                return
            yield from _differing(ours.a, theirs.a, f"{path}.a")
            yield from _differing(ours.b, theirs.b, f"{path}.b")
        elif (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            yield f"{path}: {ours.dtype}{list(ours.shape)}, was {theirs.dtype}{list(theirs.shape)}"
        elif raw(ours) != raw(theirs):
            yield f"{path}: other bits of {theirs.dtype}{list(theirs.shape)}"
    elif isinstance(expected, PerRank):
        yield from _differing(found.value, expected.value, f"{path} of the rank")
    elif type(found) is not type(expected):
        yield f"{path}: a {type(found).__name__}, was a {type(expected).__name__}"
    elif isinstance(expected, Mapping):
        for key in [*expected, *(key for key in found if key not in expected)]:
            if key not in found or key not in expected:
                yield f"{path}.{key!r}: {'gone' if key in expected else 'new'}"
            else:
                yield from _differing(found[key], expected[key], f"{path}.{key!r}")
        if [*found] != [*expected]:
            yield f"{path}: keys in another order"
    elif isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            yield f"{path}: {len(found)} entries, were {len(expected)}"
            return
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from _differing(one, other, f"{path}.{number}")
    elif not _equal(found, expected):
        yield f"{path}: {found!r:.60}, was {expected!r:.60}"


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, (np.ndarray, np.generic)):
        return (
            found.dtype == expected.dtype
            and found.shape == expected.shape
            and found.tobytes() == expected.tobytes()
            and (expected.size < 2 or found.flags.fnc == expected.flags.fnc)
        )
    if isinstance(expected, torch.Generator):
        return torch.equal(found.get_state(), expected.get_state())
    if dataclasses.is_dataclass(expected):
        return not differences(vars(found), vars(expected))
    if isinstance(expected, float):
        return repr(found) == repr(expected)
    return bool(found == expected)
