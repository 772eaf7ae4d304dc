"""Names of nested state dicts: flattens by DCP's rules, undoes that, maps names.

The rules: a mapping is walked, its keys as `str(key)`; a list is walked only if it contains a
mapping or a tensor, at any depth of lists; everything else is one value, including tuples:

    {"model": {"w": T}, "steps": [1, 2], "groups": [{"lr": 0.1}]}
    ->  model.w = T,  steps = [1, 2],  groups.0.lr = 0.1

Source: `torch/distributed/checkpoint/_traverse.py` and `_nested_dict.py`.

Beyond DCP, each flat value has its container and its real key there, so that a loaded value is
restored under integer keys too; paths record which keys are numbers; and an empty mapping, which
leaves no trace in DCP, is a value.

`renamer` and `stored_names` are pure functions that map the names of a checkpoint to those of the
state dict.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from ray_dcp.core.values import IntKey, NamePath
from ray_dcp.errors import DamagedCheckpointError, InvalidRequestError, StateDictError
from ray_dcp.format.names import is_unicode
from ray_dcp.options import KeyMap

MAX_DEPTH = 200
"""Deepest nesting of containers. Why: a deeper state dict contains itself, or would need more than
Python's stack."""

MAX_LIST = 1 << 20
"""Longest list that a stored path may create."""

_PLAIN_MAPPINGS = (dict, OrderedDict, defaultdict)

MOST_LISTED = 8
"""Most items that a message lists."""

LARGEST_KEY = 1 << 60
"""Mapping keys from this number on are treated as texts."""

_VALUE, _MAPPING, _LIST, _TENSOR = range(4)


@dataclass(frozen=True, eq=False)
class Flat:
    """A flat state dict in order of first appearance; all lists are aligned.

    Attributes:
        names: FQNs, each once.
        paths: DCP's path of each value: str for mapping keys, int for list indices.
        values: The values.
        parents: The container of each value.
        keys: The key or index of each value in its container.
        empty: Names whose value is a mapping without values, which leaves no trace in DCP.
    """

    names: list[str] = field(default_factory=list)
    paths: list[NamePath] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    parents: list[Any] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    empty: set[str] = field(default_factory=set)

    def only(self, rows: Sequence[int]) -> Flat:
        """Returns the selected rows.

        Args:
            rows: Rows, in the order of the result.
        """
        lists: tuple[list[Any], ...] = (
            self.names,
            self.paths,
            self.values,
            self.parents,
            self.keys,
        )
        names, paths, values, parents, keys = ([each[row] for row in rows] for each in lists)
        return Flat(names, paths, values, parents, keys, self.empty)


def flatten(state_dict: Mapping[Any, Any], *, before_2_4: bool = False) -> Flat:
    """Returns the state dict flattened by DCP's rules.

    Args:
        state_dict: Nested mappings and lists. Not changed.
        before_2_4: Use the rules of torch 2.3 and older, by which mappings too are walked only if
            they contain a tensor.

    Raises:
        StateDictError: Two values get the same name, or containers are nested more than 200 deep
            (or contain themselves).

    Complexity: linear in the number of values, about 0.6 us each.

    Examples:
        >>> flatten({"model": {"w": 1}, "steps": [1, 2], "groups": [{"lr": 0.1}]}).names
        ['model.w', 'steps', 'groups.0.lr']
    """
    flat = Flat()
    _Walker(flat, before_2_4).walk("", (), state_dict, 0)
    if flat.empty and len(set(flat.names)) != len(flat.names):
        # Why: DCP ignores these mappings, so that other values may have their names.
        values = enumerate(flat.values)
        rows = [row for row, value in values if not (isinstance(value, Mapping) and not value)]
        flat = replace(flat.only(rows), empty=set())
    check_names(flat.names)
    return flat


def flatten_top(state_dict: Mapping[Any, Any], *, flatten_sharded_tensors: bool = True) -> Flat:
    """Returns only the top level, as DCP does with `flatten_state_dict=False`.

    Args:
        state_dict: Not changed.
        flatten_sharded_tensors: See DCP's planners, which walk nested values then all the same, and
            leave out those that contain no value.

    Raises:
        StateDictError: Two keys are equal as text.
    """
    keys, values = list(state_dict), list(state_dict.values())
    paths: list[NamePath] = [(key if type(key) is str else _text(key),) for key in keys]
    names = list(map(str, keys))
    pairs = zip(names, values, strict=True) if flatten_sharded_tensors else ()
    empty = {name for name, value in pairs if _has_no_value(value, 0)}
    flat = Flat(names, paths, values, [state_dict] * len(keys), keys, empty)
    check_names(flat.names)
    return flat


def _has_no_value(value: Any, depth: int) -> bool:
    """Returns whether DCP flattens a value to nothing: no mapping in it has an entry."""
    if depth > MAX_DEPTH:
        return False
    if isinstance(value, Mapping):
        return all(_has_no_value(each, depth + 1) for each in value.values())
    return (
        isinstance(value, list) and bool(value) and all(_has_no_value(e, depth + 1) for e in value)
    )


def set_by_path(root: dict[str, Any], path: NamePath, value: Any) -> None:
    """Sets a value at a path, creating dicts and lists on the way; lists are filled with None.

    Raises:
        DamagedCheckpointError: A value on the way is not the container that the path requires, or
            an index is negative or above 2**20.
    """
    here: Any = root
    key: Any
    for key, next_key in pairwise(path):
        _check_step(here, key, path)
        if isinstance(here, list):
            if here[key] is None:
                here[key] = [] if isinstance(next_key, int) else {}
        elif _key(key) not in here:
            here[_key(key)] = [] if isinstance(next_key, int) else {}
        here = here[_key(key)]
    _check_step(here, path[-1], path)
    here[_key(path[-1])] = value


def path_end(path: NamePath | None, rest: str) -> NamePath | None:
    """Returns the end of a path whose text is `rest`; None if the name has been mapped.

    Examples:
        >>> path_end(("model", "layer.weight", "step"), "layer.weight.step")
        ('layer.weight', 'step')
    """
    for start in range(len(path or ()) - 1, -1, -1):
        end = tuple(path or ())[start:]
        if ".".join(map(str, end)) == rest:
            return end
    return None


def path_tail(path: NamePath | None, rest: str) -> NamePath:
    """Returns `path_end`, or the parts of `rest` if the name has been mapped."""
    return path_end(path, rest) or tuple(rest.split("."))


def _key(part: str | int) -> str | int:
    return part.key if isinstance(part, IntKey) else part


class _Walker:
    """Flattens one state dict, with a method call per container, not per value."""

    def __init__(self, flat: Flat, before_2_4: bool) -> None:
        self._flat = flat
        self._before_2_4 = before_2_4
        self._kinds: dict[type, int] = {torch.Tensor: _TENSOR, torch.nn.Parameter: _TENSOR}

    def visit(
        self, parent: Any, key: Any, name: str, path: NamePath, value: Any, depth: int
    ) -> None:
        kind = self._kind(type(value))
        if kind == _MAPPING and not value and not self._before_2_4:
            self._flat.empty.add(name)
            # Why replaced: a mapping of a user's class need not be picklable.
            self._add(parent, key, name, path, value if type(value) in _PLAIN_MAPPINGS else {})
        elif kind == _MAPPING and not (self._before_2_4 and self._is_value(value, depth)):
            self.walk(name + ".", path, value, depth)
        elif kind == _LIST and not self._is_value(value, depth):
            self._list(name + ".", path, value, depth)
        else:
            self._add(parent, key, name, path, value)

    def _add(self, parent: Any, key: Any, name: str, path: NamePath, value: Any) -> None:
        flat = self._flat
        flat.names.append(name)
        flat.paths.append(path)
        flat.values.append(value)
        flat.parents.append(parent)
        flat.keys.append(key)

    def walk(self, prefix: str, path: NamePath, mapping: Mapping[Any, Any], depth: int) -> None:
        """Adds the values of a mapping."""
        _check_depth(depth, path)
        flat, kinds = self._flat, self._kinds
        add_name, add_path, add_value = flat.names.append, flat.paths.append, flat.values.append
        add_key = flat.keys.append
        for key, value in mapping.items():
            text = key if type(key) is str else _text(key)
            kind = kinds.get(type(value))
            if kind in (_TENSOR, _VALUE):
                add_name(prefix + text)
                add_path((*path, text))
                add_value(value)
                add_key(key)
                continue
            flat.parents.extend([mapping] * (len(flat.values) - len(flat.parents)))
            self.visit(mapping, key, prefix + text, (*path, text), value, depth + 1)
        flat.parents.extend([mapping] * (len(flat.values) - len(flat.parents)))

    def _list(self, prefix: str, path: NamePath, values: Sequence[Any], depth: int) -> None:
        _check_depth(depth, path)
        for index, value in enumerate(values):
            self.visit(values, index, f"{prefix}{index}", (*path, index), value, depth + 1)

    def _is_value(self, value: Any, depth: int) -> bool:
        """Returns whether a list (before 2.4: or mapping) is one value: nothing in it is walked."""
        _check_depth(depth, ())
        for entry in value.values() if isinstance(value, Mapping) else value:
            kind = self._kind(type(entry))
            if kind == _TENSOR:
                return False
            if kind == _MAPPING and not self._before_2_4:
                return False
            if kind in (_LIST, _MAPPING) and not self._is_value(entry, depth + 1):
                return False
        return True

    def _kind(self, cls: type) -> int:
        kind = self._kinds.get(cls)
        if kind is None:
            kind = self._kinds[cls] = _classify(cls)
        return kind


def _text(key: Any) -> str:
    return IntKey(key) if type(key) is int and abs(key) < LARGEST_KEY else str(key)


def _classify(cls: type) -> int:
    if issubclass(cls, torch.Tensor):
        return _TENSOR
    if issubclass(cls, Mapping):
        return _MAPPING
    return _LIST if issubclass(cls, list) else _VALUE


def _check_depth(depth: int, path: NamePath) -> None:
    if depth > MAX_DEPTH:
        where = ".".join(map(str, path[:4]))
        raise StateDictError(
            f"the state dict is nested deeper than {MAX_DEPTH} containers below {where!r}; does "
            "it contain itself?",
            key=where,
        )


def listed(items: Sequence[str], separator: str = ", ") -> str:
    """Returns the first items for a message, and the number of the others.

    Examples:
        >>> listed([*map(str, range(10))])
        '0, 1, 2, 3, 4, 5, 6, 7, and 2 more'
    """
    more = f"{separator}and {len(items) - MOST_LISTED} more" if len(items) > MOST_LISTED else ""
    return separator.join(items[:MOST_LISTED]) + more


def check_names(names: list[str]) -> None:
    """Raises if names are not unique, or can't be encoded.

    Args:
        names: Names of all values of a state dict.

    Raises:
        StateDictError: Two names are equal, or one has no UTF-8 form (a lone surrogate).
    """
    if not is_unicode("".join(names)):
        wrong = next(name for name in names if not is_unicode(name))
        raise StateDictError(
            f"expected keys that are Unicode text, but {wrong!a} has half of a surrogate pair, "
            f"which no file can hold; rename it, or repair it with "
            "key.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')",
            key=ascii(wrong),
        )
    if len(set(names)) == len(names):
        return
    twice = [name for name, times in Counter(names).items() if times > 1]
    raise StateDictError(
        f"duplicated flatten key: {listed([*map(repr, twice)])} would name two values of the state "
        "dict each; rename one of the nested keys that join to the same dotted name",
        key=twice[0],
    )


def _check_step(here: Any, key: str | int, path: NamePath) -> None:
    if isinstance(key, int) and not isinstance(key, bool) and isinstance(here, list):
        if 0 <= key < MAX_LIST:
            here.extend([None] * (key + 1 - len(here)))
            return
    elif isinstance(key, str) and isinstance(here, dict):
        return
    raise DamagedCheckpointError(
        f"the checkpoint says that a value sits at {path!r}, but {key!r} can't be a place in a "
        f"{type(here).__name__} of {len(here) if isinstance(here, (list, dict)) else 0} entries",
        key=".".join(map(str, path)),
    )


Rename = Callable[[str], "str | None"]


def renamer(key_map: KeyMap) -> Rename:
    """Returns a function that applies a key map to one name.

    Args:
        key_map: See `LoadOptions.key_map`.

    Raises:
        InvalidRequestError: A pattern is not a valid regular expression.

    Examples:
        >>> renamer([("^module[.]", ""), ("[.]gamma$", ".weight")])("module.norm.gamma")
        'norm.weight'
    """
    if isinstance(key_map, Mapping):
        names = dict(key_map)
        return lambda name: names.get(name, name)
    if callable(key_map):
        return key_map
    patterns = [(_compiled(pattern), replacement) for pattern, replacement in key_map]

    def rename(name: str) -> str:
        for pattern, replacement in patterns:
            try:
                name = pattern.sub(replacement, name)
            except (re.error, IndexError) as error:
                raise InvalidRequestError(
                    f"LoadOptions.key_map can't replace {pattern.pattern!r} by {replacement!r}: "
                    f"{error}",
                    key="key_map",
                ) from error
        return name

    return rename


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InvalidRequestError(
            f"LoadOptions.key_map has {pattern!r}, which is no regular expression: {error}",
            key="key_map",
        ) from error


def stored_names(names: Sequence[str], key_map: KeyMap | None) -> dict[str, int]:
    """Returns the names that a state dict may request, each with its number in the checkpoint.

    Args:
        names: Names in the checkpoint.
        key_map: See `LoadOptions.key_map`.

    Raises:
        InvalidRequestError: Two names of the checkpoint are mapped to the same name, or one is
            mapped to something that is no text.
    """
    if key_map is None:
        return {name: number for number, name in enumerate(names)}
    rename, index = renamer(key_map), dict[str, int]()
    clashes = []
    for number, name in enumerate(names):
        wanted = rename(name)
        if wanted is None:
            continue
        if not isinstance(wanted, str):
            raise InvalidRequestError(
                f"LoadOptions.key_map must give a name or None, but gives {wanted!r} for {name!r}",
                key="key_map",
            )
        if wanted in index:
            clashes.append(f"{names[index[wanted]]!r} and {name!r} both to {wanted!r}")
        index.setdefault(wanted, number)
    if clashes:
        raise InvalidRequestError(
            f"LoadOptions.key_map must give each key of the checkpoint a name of its own, but "
            f"leads {listed(clashes, '; ')}: map one of them to None to leave it out",
            key="key_map",
        )
    return index


def below(name: str, prefixes: Iterable[str]) -> bool:
    """Returns whether a dotted name is one of the prefixes, or lies below one.

    Examples:
        >>> below("model.w", ["model"]), below("model2.w", ["model"])
        (True, False)
    """
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def concerns(key: str, prefixes: Sequence[str]) -> bool:
    """Returns whether any name at or below a top-level key can lie below a prefix.

    Examples:
        >>> concerns("model", ["model.layers"]), concerns("optimizer", ["model.layers"])
        (True, False)
    """
    return below(key, prefixes) or any(prefix.startswith(key + ".") for prefix in prefixes)
