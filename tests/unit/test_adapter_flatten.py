"""Flattening gives DCP's names and paths, and knows where each value came from."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import ray_dcp
from ray_dcp.conversion import nested as nested_by_path
from ray_dcp.errors import DamagedCheckpointError, StateDictError
from ray_dcp.torch_adapter.flatten import flatten

TENSOR = torch.ones(2)

leaves = st.sampled_from([TENSOR, torch.nn.Parameter(TENSOR), 1, "x", None, (1, TENSOR), b"b"])
keys = st.sampled_from(["a", "b", 0, 1, "0"])
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=2).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=2).map(MappingProxyType),
    ),
    max_leaves=12,
)


@settings(max_examples=40)
@given(state_dict=st.dictionaries(keys, nested, max_size=4), before_2_4=st.booleans())
def test_names_paths_and_values_are_those_of_dcp(state_dict: dict, before_2_4: bool) -> None:
    try:
        _version._derived_version = "2_3" if before_2_4 else None
        values, paths = flatten_state_dict(state_dict)
    except ValueError:  # two values with one name
        with pytest.raises(StateDictError, match="duplicated flatten key"):
            flatten(state_dict, before_2_4=before_2_4)
        return
    finally:
        _version._derived_version = None
    flat = flatten(state_dict, before_2_4=before_2_4)
    assert before_2_4 or all(flat.values[flat.names.index(name)] == {} for name in flat.empty)
    flat = flat.only([row for row, name in enumerate(flat.names) if name not in flat.empty])
    assert flat.names == list(values)
    assert flat.paths == list(paths.values())
    assert all(a is b for a, b in zip(flat.values, values.values(), strict=True))
    for parent, key, value in zip(flat.parents, flat.keys, flat.values, strict=True):
        assert parent[key] is value


LOOP: list[Any] = []
LOOP.append(LOOP)
SELF: dict[str, Any] = {"a": {}}
SELF["a"]["b"] = SELF


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (
            {"a": {"b": 1}, "a.b": 2, "c": {"d": 1}, "c.d": 3},
            r"'a\.b', 'c\.d' would name two values",
        ),
        (SELF, "does it contain itself"),
        ({"loop": LOOP}, "does it contain itself"),
        ({"fine": 1, "\ud83d\ude00": TENSOR}, "half of a surrogate pair"),
        ({"fine": 1, "a\ude00": TENSOR}, "half of a surrogate pair"),
    ],
)
def test_names_that_no_checkpoint_can_hold_are_told_before_anything_is_saved(
    state: dict, told: str, tmp_path: Path
) -> None:
    with pytest.raises(StateDictError, match=told):
        ray_dcp.save(state, checkpoint_id=tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("state", "told"),
    [({3: 1, "3": 2}, "flatten key: '3'"), ({"\ud83d": 1}, "half of a surrogate pair")],
)
def test_without_flattening_names_must_be_unique_texts_too(state, told, tmp_path: Path) -> None:
    planner = ray_dcp.DefaultSavePlanner(flatten_state_dict=False)
    with pytest.raises(StateDictError, match=told):
        ray_dcp.save(state, checkpoint_id=tmp_path / "c", planner=planner)


@pytest.mark.parametrize(
    "paths",
    [
        {"x": ("a", -1)},
        {"x": ("a", 1 << 21)},
        {"x": (0,)},
        {"x": ("a",), "y": ("a", "b")},
        {"x": ("a", 0), "y": ("a", "b")},
    ],
)
def test_paths_that_contradict_themselves_or_ask_for_the_impossible_are_refused(paths: Any) -> None:
    with pytest.raises(DamagedCheckpointError, match="can't be a place"):
        nested_by_path(dict.fromkeys(paths.values(), 1))
