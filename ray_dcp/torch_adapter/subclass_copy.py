"""Copies the values of tensor subclasses into tensors of a load; the result is verified.

A subclass consists of the tensors and the context that its `__tensor_flatten__` returns, or without
that method of its elements and attributes. Between two tensors of one class with equal contexts,
each inner tensor is copied by its name. Otherwise only `copy_` of the classes can copy, which may
round, or copy a part, without an error: so the target is compared with the source afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from ray_dcp.errors import UnsupportedValueError
from ray_dcp.torch_adapter.objects import dump_object, is_simple
from ray_dcp.torch_adapter.tensors import (
    FIELDS,
    dtype_name,
    host_bytes,
    is_plain,
    loses_nothing,
    unsupported_reason,
)

Cut = Callable[[torch.Tensor], torch.Tensor]
"""Returns a part of a tensor as a view."""


def copy_into(target: torch.Tensor, source: torch.Tensor, *, wait: bool = True) -> None:
    """Copies values into a tensor in place, by the classes of both."""
    with torch.inference_mode() if target.is_inference() else torch.no_grad():
        target.detach().copy_(source, non_blocking=not wait)


def place(
    target: torch.Tensor,
    source: torch.Tensor,
    fqn: str,
    *,
    policy: str = "widen",
    look: Callable[[], torch.Tensor] | None = None,
    cut: tuple[Cut, Cut] | None = None,
) -> bool:
    """Copies a tensor into another one; at least one of them is a tensor subclass.

    Args:
        target: The target; changed in place.
        source: The source; has the shape of the target once both are cut.
        fqn: Name of the tensor, for messages.
        policy: `LoadOptions.dtype`. With `"cast"`, another class may round values.
        look: Looks up the target again, after the copy.
        cut: Functions that return the part of the target and of the source; None if both are whole.
            Only a whole target gets attributes; those of a part must be equal.

    Returns:
        Whether values were rounded, which only `policy="cast"` allows.

    Raises:
        UnsupportedValueError: The target does not hold the copied values, or a class refused to
            copy.

    Complexity: O(bytes); the target is read once more.
    """
    whole, is_whole = source, cut is None
    look = look or (lambda: target)
    try:
        with torch.inference_mode() if target.is_inference() else torch.no_grad():
            if cut is not None:
                source = cut[1](whole)
            elif type(target) is type(source):
                _set_attributes(target, source)
            _copy(target if cut is None else cut[0](target), source, fqn, policy)
            found = look()
            is_there = _holds(found if cut is None else cut[0](found), source, policy)
            if type(target) is type(whole):
                is_there = is_there and _same_attributes(target, whole)
    except UnsupportedValueError:
        raise
    except Exception as error:  # user classes may raise anything
        raise UnsupportedValueError(
            f"{_mismatch(fqn, target, source)}, which these classes can't do"
            f"{'' if is_whole else ' for a part of it'} ({type(error).__name__}: {error}); "
            f"{_way_out(target, source, is_whole)}",
            key=fqn,
        ) from error
    if not is_there and (policy != "cast" or type(target) is type(source)):
        raise UnsupportedValueError(
            f"{_mismatch(fqn, target, source)}, which leaves other values there than are saved; "
            f"{_way_out(target, source, is_whole)}",
            key=fqn,
        )
    return not is_there


def _copy(into: torch.Tensor, source: torch.Tensor, fqn: str, policy: str) -> None:
    if type(into) is type(source) and _can_copy_inner(into, source, policy):
        _copy_parts(into, source)
    elif is_plain(into) and into.dtype != source.dtype:
        # Why: the values that the class shows are compared before they are cast.
        between = torch.empty(source.shape, dtype=source.dtype, device="cpu")
        place(between, source, fqn, policy=policy)
        into.detach().copy_(between)
    else:
        into.detach().copy_(source.to(into.dtype) if is_plain(source) else source)


def _mismatch(fqn: str, target: torch.Tensor, source: torch.Tensor) -> str:
    return (
        f"{fqn!r} is saved as a {type(source).__qualname__} and would be copied into a "
        f"{type(target).__qualname__}"
    )


def _way_out(target: torch.Tensor, source: torch.Tensor, is_whole: bool) -> str:
    if type(target) is not type(source):
        return (
            f"load into a {type(source).__qualname__}, or take what copy_ makes of it with "
            "LoadOptions(dtype='cast')"
        )
    if is_whole:
        return f"load into a {type(source).__qualname__} that is made like the saved one"
    return "load it into the parts in which it was saved, on as many ranks"


def class_name(tensor: torch.Tensor) -> str:
    """Returns the name of a tensor's type for a report.

    Examples:
        >>> class_name(torch.ones(1)), class_name(torch.nn.Buffer(torch.ones(1)))
        ('float32', 'float32')
    """
    dtype = dtype_name(tensor.dtype)
    return dtype if is_plain(tensor) else f"{type(tensor).__qualname__}[{dtype}]"


def with_attributes(made: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor with the number and text attributes that the copy lacks.

    Args:
        made: The copy, from `detach`, `clone` or `cpu`.
        tensor: The original.
    """
    if type(made) is type(tensor) and made is not tensor and not is_plain(made):
        own = vars(made)
        for name, value in _attributes(tensor).items():
            if name not in own and is_simple(value):
                setattr(made, name, value)
    return made


def _flat(tensor: Any) -> tuple[dict[str, torch.Tensor], Any] | None:
    """Returns the inner tensors of a subclass by name, and the context; None if it has none."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return None
    names, rest = flatten()
    return {name: getattr(tensor, name) for name in names}, _without_dtype(rest, tensor.dtype)


def _without_dtype(rest: Any, dtype: torch.dtype) -> Any:
    """Returns the context of a flat tensor without the dtype that it shows, which casts may change.

    Why: quantised classes show any dtype on request, and a detach loses it.
    """
    if rest is dtype:
        return _SHOWN
    if type(rest) in (list, tuple):
        return [_without_dtype(one, dtype) for one in rest]
    if isinstance(rest, Mapping):
        return {key: _without_dtype(one, dtype) for key, one in rest.items()}
    return rest


_SHOWN = "the dtype that it shows"


def _elements(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the tensor as a plain one that shares its memory; None if it has no own memory."""
    if is_plain(tensor):
        return tensor.detach()
    try:
        # Why: a wrapper has no storage to look at.
        tensor.untyped_storage().data_ptr()
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.detach().as_subclass(torch.Tensor)
    except Exception:  # noqa: BLE001 - user classes may raise anything
        return None
    return plain if is_plain(plain) else None


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns the attributes that the class or a user keeps on the tensor, without torch's own."""
    state = torch._utils._get_obj_state(tensor)
    own, slots = state if type(state) is tuple else (state, {})
    found = {**(own or {}), **slots}
    return {
        name: value
        for name, value in found.items()
        if not name.startswith("_is_") and name not in FIELDS
    }


def _can_copy_inner(target: torch.Tensor, source: torch.Tensor, policy: str) -> bool:
    """Returns whether each inner tensor can be copied into the one of that name of the target."""
    if type(target) is not type(source) and not (is_plain(target) and is_plain(source)):
        return False
    if target.shape != source.shape:
        return False
    if is_plain(target):
        fits = policy == "cast" or loses_nothing(source.dtype, target.dtype)
        return fits and unsupported_reason(target) is None and unsupported_reason(source) is None
    into, of = _flat(target), _flat(source)
    if into is None or of is None:
        return False
    return (
        into[0].keys() == of[0].keys()
        and _equal(into[1], of[1])
        and all(_can_copy_inner(into[0][name], tensor, policy) for name, tensor in of[0].items())
    )


def _copy_parts(target: torch.Tensor, source: torch.Tensor) -> None:
    if is_plain(target):
        target.detach().copy_(source)
        return
    # Why not of `target.detach()`: some classes copy some of their inner tensors in a detach.
    into, of = _flat(target), _flat(source)
    for name, tensor in (of or ({}, None))[0].items():
        _copy_parts((into or ({}, None))[0][name], tensor)


def _set_attributes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies the attributes (tensors, numbers, texts) of another tensor of the same class."""
    own = _attributes(target)
    for name, value in _own_attributes(source, own).items():
        there = own.get(name)
        if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor):
            if _can_copy_inner(there, value, "error"):
                _copy_parts(there, value)
        elif not _equal(there, value):
            setattr(target, name, value)


def _same_attributes(target: torch.Tensor, source: torch.Tensor) -> bool:
    own = _attributes(target)
    wanted = _own_attributes(source, own)
    return all(name in own and _equal(own[name], value) for name, value in wanted.items())


def _own_attributes(source: torch.Tensor, there: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a tensor that are values, except its inner tensors.

    Args:
        source: The tensor.
        there: Attributes of the target. Names with an underscore that it lacks are omitted: in such
            attributes, frameworks record what they did with a tensor.
    """
    flat = _flat(source)
    return {
        name: value
        for name, value in _attributes(source).items()
        if (flat is None or name not in flat[0])
        and (name in there or not name.startswith("_"))
        and (is_simple(value) or (flat is None and isinstance(value, torch.Tensor)))
    }


def _holds(found: torch.Tensor, source: torch.Tensor, policy: str) -> bool:
    """Returns whether a tensor has the values of another one."""
    if type(found) is type(source):
        return _equal_parts(found, source, policy)
    of, into = _elements(source), _elements(found)
    if of is not None and into is not None:
        return _same_elements(into, of, policy)
    if into is not None:
        shown = _dequantized(source)
        if shown is not None and _same_elements(into, shown, policy):
            return True
    # The values that the target shows, converted to the source's class, must equal the source.
    try:
        again = torch.empty_like(of) if of is not None else source.clone()
        again.copy_(found)
    except Exception:  # noqa: BLE001 - user classes may raise anything
        return False
    return _equal_parts(again, source, policy)


def _dequantized(source: torch.Tensor) -> torch.Tensor | None:
    if type(source).dequantize is torch.Tensor.dequantize:
        return None
    try:
        shown = source.dequantize()
    except Exception:  # noqa: BLE001 - user classes may raise anything
        return None
    return shown if is_plain(shown) else None


def _equal_parts(found: torch.Tensor, source: torch.Tensor, policy: str) -> bool:
    """Returns whether two tensors of a class consist of equal parts."""
    if is_plain(found) and is_plain(source):
        return _same_elements(found, source, policy)
    if type(found) is not type(source) or found.shape != source.shape:
        return False
    into, of = _flat(found), _flat(source)
    if into is not None and of is not None:
        return (
            into[0].keys() == of[0].keys()
            and _equal(into[1], of[1])
            and all(_equal_parts(into[0][n], tensor, policy) for n, tensor in of[0].items())
        )
    first, second = _elements(found), _elements(source)
    if first is None or second is None:
        return _equal(_reduced(found), _reduced(source))
    return _same_elements(first, second, policy)


def _same_elements(found: torch.Tensor, source: torch.Tensor, policy: str) -> bool:
    """Returns whether two plain tensors have the same bits, or differ by an allowed cast."""
    found, source = found.detach(), source.detach()
    if unsupported_reason(found) or unsupported_reason(source):
        return dump_object(found, fqn="") == dump_object(source, fqn="")
    if found.dtype != source.dtype:
        if policy != "cast" and not loses_nothing(source.dtype, found.dtype):
            return False
        source = source.to(found.dtype)
    if found.shape != source.shape:
        return False
    return np.array_equal(
        np.frombuffer(host_bytes(found), np.uint8), np.frombuffer(host_bytes(source), np.uint8)
    )


def _reduced(tensor: torch.Tensor) -> Any:
    """Returns the content of a tensor's pickle, without the parts that are no values."""
    with torch._C.DisableTorchFunctionSubclass():
        made = tensor.detach().requires_grad_(False).__reduce_ex__(2)
    return _without_marks(made)


def _without_marks(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_without_marks, value))
    if isinstance(value, dict):
        return {k: v for k, v in value.items() if not (isinstance(k, str) and k.startswith("_is_"))}
    return value


def _equal(found: Any, wanted: Any) -> bool:
    """Returns whether two values of any kind are known to be equal."""
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and _equal_parts(found, wanted, "error")
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(_equal, found, wanted))
    if isinstance(wanted, Mapping):
        return found.keys() == wanted.keys() and all(_equal(found[k], wanted[k]) for k in wanted)
    with suppress(Exception):  # user classes may raise anything
        if found is wanted or found == wanted:
            return True
    with suppress(UnsupportedValueError):
        return dump_object(found, fqn="") == dump_object(wanted, fqn="")
    return False
