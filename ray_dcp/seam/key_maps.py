"""Which name of a checkpoint a load takes for which name of the state dict: pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from ray_dcp.errors import InvalidRequestError
from ray_dcp.options import KeyMap

__all__ = ["below", "concerns", "renamer", "stored_names"]

Rename = Callable[[str], "str | None"]


def renamer(key_map: KeyMap) -> Rename:
    """Returns what a key map makes of one name.

    Args:
        key_map: See `LoadOptions.key_map`.

    Raises:
        InvalidRequestError: A pattern is no regular expression.

    Example:
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
    """Returns the names by which a state dict may ask, each with its number in the checkpoint.

    Args:
        names: Of the checkpoint.
        key_map: See `LoadOptions.key_map`.

    Raises:
        InvalidRequestError: Two names of the checkpoint get the same name, or one gets something
            that is no text.
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
            f"leads {'; '.join(clashes[:8])}: map one of them to None to leave it out",
            key="key_map",
        )
    return index


def below(name: str, prefixes: Iterable[str]) -> bool:
    """Whether a dotted name is one of the prefixes, or lies below one.

    Example:
        >>> below("model.w", ["model"]), below("model2.w", ["model"])
        (True, False)
    """
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def concerns(key: str, prefixes: Sequence[str]) -> bool:
    """Whether anything at or below a top-level key can be below a prefix.

    Example:
        >>> concerns("model", ["model.layers"]), concerns("optimizer", ["model.layers"])
        (True, False)
    """
    return below(key, prefixes) or any(prefix.startswith(key + ".") for prefix in prefixes)
