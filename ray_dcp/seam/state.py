"""Top-level `Stateful` values: into plain state before a save or load, and back after a load.

Nested `Stateful` values are left alone, as DCP leaves them.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from ray_dcp.errors import StateDictError
from ray_dcp.seam.key_maps import concerns

__all__ = ["put_back", "stateful_to_load_targets", "stateful_to_state_dict"]

_NEVER = frozenset({torch.Tensor, torch.nn.Parameter, dict, list, int, float, str, bool})


def stateful_to_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a shallow copy in which every top-level `Stateful` is its `state_dict()`.

    Args:
        state_dict: What the user gave to `save`. Not changed.

    Returns:
        The same keys in the same order.

    Raises:
        StateDictError: `state_dict` is no mapping.

    Source: `torch/distributed/checkpoint/state_dict_saver.py`, `_stateful_to_state_dict`.
    """
    _check_mapping(state_dict)
    return {
        key: value if type(value) in _NEVER else _plain(value) for key, value in state_dict.items()
    }


def stateful_to_load_targets(
    state_dict: Mapping[str, Any], prefixes: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the state to load into: sorted by key, `Stateful` values as their `state_dict()`.

    Keys are sorted so that all ranks call `state_dict()` (which may run collectives of the
    training job) in the same order.

    Args:
        state_dict: What the user gave to `load`. Not changed.
        prefixes: See `LoadOptions.prefixes`: keys that they do not concern are left out.

    Returns:
        A new dictionary with the same values or their states.

    Raises:
        StateDictError: `state_dict` is no mapping, or its keys can't be sorted.

    Source: `torch/distributed/checkpoint/state_dict_loader.py`, `load`.
    """
    _check_mapping(state_dict)
    # Why the second look: a `state_dict()` call may drop keys of the mapping that holds it.
    return {
        key: value if type(value := state_dict[key]) in _NEVER else _plain(value)
        for key in _sorted_keys(state_dict)
        if (not prefixes or concerns(str(key), prefixes)) and key in state_dict
    }


def put_back(state_dict: MutableMapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Hands the loaded state to the `Stateful` values and replaces all others.

    Args:
        state_dict: What the user gave to `load`; changed in place.
        loaded: The value of `stateful_to_load_targets`, after it was loaded into.

    Source: `torch/distributed/checkpoint/state_dict_loader.py`, `load`.
    """
    for key in _sorted_keys(state_dict):
        if key not in state_dict or key not in loaded:
            continue
        value = state_dict[key]
        if type(value) not in _NEVER and _is_stateful(value):
            value.load_state_dict(loaded[key])
        else:
            state_dict[key] = loaded[key]


def _plain(value: Any) -> Any:
    return value.state_dict() if _is_stateful(value) else value


def _is_stateful(value: Any) -> bool:
    # Why: the protocol check costs 5 us, and most values of a flat state dict are tensors.
    return type(value) not in _NEVER and isinstance(value, Stateful)


def _check_mapping(state_dict: object) -> None:
    if not isinstance(state_dict, Mapping):
        raise StateDictError(
            f"expected a state dict (a mapping of names to values), found "
            f"{type(state_dict).__name__}; a module or optimizer goes in under a name: "
            f"{{'model': model}}"
        )


def _sorted_keys(state_dict: Mapping[str, Any]) -> list[str]:
    try:
        return sorted(state_dict)
    except TypeError as error:
        kinds = sorted({type(key).__name__ for key in state_dict})
        raise StateDictError(
            f"the top-level keys of a state dict must be strings, found {', '.join(kinds)}"
        ) from error
