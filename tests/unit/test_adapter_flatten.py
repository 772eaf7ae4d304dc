"""Flattening gives DCP's names and paths, and knows where each value came from."""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from ray_dcp.conversion import nested as nested_by_path
from ray_dcp.errors import DamagedCheckpointError, StateDictError
from ray_dcp.torch_adapter.flatten import flatten, flatten_top

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


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=50, deadline=None)
@given(state_dict=st.dictionaries(st.sampled_from("ab"), nested, max_size=3))
def test_unflattening_gives_what_dcp_gives(state_dict: dict) -> None:
    assume("'0'" not in repr(state_dict))  # Beside the number 0, DCP mixes the two up.
    try:
        values, paths = flatten_state_dict(state_dict)
    except ValueError:
        return
    mine: Any
    theirs: Any
    try:
        theirs = unflatten_state_dict(values, paths)
    except (TypeError, AttributeError):
        return
    mine = nested_by_path({paths[name]: value for name, value in values.items()})
    assert repr(mine) == repr(theirs)


def test_all_colliding_names_are_told_at_once() -> None:
    with pytest.raises(StateDictError, match=r"'a\.b', 'c\.d' would name two values"):
        flatten({"a": {"b": 1}, "a.b": 2, "c": {"d": 1}, "c.d": 3})


def test_a_state_dict_that_contains_itself_is_refused() -> None:
    state_dict: dict[str, Any] = {"a": {}}
    state_dict["a"]["b"] = state_dict
    with pytest.raises(StateDictError, match="does it contain itself"):
        flatten(state_dict)
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateDictError, match="does it contain itself"):
        flatten({"loop": loop})


def test_without_flattening_each_top_value_is_one() -> None:
    flat = flatten_top({"a": {"b": TENSOR}, 3: 4})
    assert flat.names == ["a", "3"]
    assert flat.keys == ["a", 3]
    with pytest.raises(StateDictError, match="duplicated flatten key: '3'"):
        flatten_top({3: 1, "3": 2})


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


def test_an_empty_mapping_gives_way_to_a_value_of_its_name() -> None:
    flat = flatten({0: {}, "0": TENSOR})
    assert flat.names == ["0"]
    assert flat.values[0] is TENSOR


@pytest.mark.parametrize("key", ["\ud83d\ude00", "\ud83d", "a\ude00"])
@pytest.mark.parametrize("flattens", [flatten, flatten_top])
def test_a_key_that_is_no_unicode_text_is_named_before_anything_is_saved(
    flattens: Any, key: str
) -> None:
    with pytest.raises(StateDictError, match="half of a surrogate pair"):
        flattens({"fine": 1, key: TENSOR})
