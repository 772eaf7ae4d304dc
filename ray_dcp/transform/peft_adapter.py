"""Names of the tensors of a PEFT adapter in a state dict, in the files that PEFT reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_dcp.errors import InvalidRequestError

CONFIG_FILE = "adapter_config.json"
"""File with the config of an adapter. PEFT keeps that of another adapter than `default` in a
folder of its name."""
WEIGHTS_FILE = "adapter_model.safetensors"
DEFAULT = "default"
"""The name that PEFT gives an adapter."""
BASE = "base_model.model."
"""What precedes the names of the wrapped model's tensors."""

# Source: the `prefix` of each tuner in `peft/tuners/*/model.py`, and `peft/utils/other.py`.
_OF_ADAPTERS = re.compile(
    r"(?:lora|ia3|hada|lokr|oft|boft|vera_lambda|pvera_lambda|randlora|fourierft|waveft|hra|c3a"
    r"|miss|road|delora|gralora|lily|ln_tuning|shira)_\w+|trainable_tokens_delta|modules_to_save"
)
"""A component of a name that the name of an adapter follows."""
_SAVED_MODULE = "modules_to_save"
_MAGNITUDE = "lora_magnitude_vector"


@dataclass(frozen=True)
class PeftAdapter:
    """The tensors of one adapter."""

    name: str
    """Name of the adapter in the model; "" if the names had none, as in PEFT's own files."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names in the files, by those in the state dict. The base model's are not among them."""


def find_adapter(names: Iterable[str], config: Mapping[str, Any] | None) -> PeftAdapter | None:
    """Returns the adapter whose tensors a state dict has; None if it is no PEFT model.

    Args:
        names: Names of the tensors, without what precedes the model.
        config: The contents of `adapter_config.json`, as far as known.

    Raises:
        InvalidRequestError: There are several adapters.

    Examples:
        >>> inner = ["q.base_layer.weight", "q.lora_A.default.weight"]
        >>> found = find_adapter([f"base_model.model.{name}" for name in inner], None)
        >>> found.name, list(found.names.values())
        ('default', ['base_model.model.q.lora_A.weight'])
    """
    chosen = list(names)
    # Why: only PEFT's own class has the prefix; models with `add_adapter` are known by the config.
    is_wrapped = any(name.startswith(BASE) for name in chosen)
    if not is_wrapped and (config is None or not _is_one_model(chosen)):
        return None
    parts = {name: name.split(".") for name in chosen if name.startswith(BASE) or not is_wrapped}
    found = {_adapter_of(split) for split in parts.values()} - {None}
    if not found:
        return None
    adapters = sorted(one for one in found if one)
    if len(adapters) > 1:
        raise InvalidRequestError(
            f"expected the tensors of one PEFT adapter, found those of {', '.join(adapters)}; "
            f"choose one, as by --tensor '*.{adapters[0]}*'",
            key="include",
        )
    adapter = adapters[0] if adapters else ""
    bias = (config or {}).get("bias", "none")
    tuned = {_layer_of(name) for name, split in parts.items() if _adapter_of(split) is not None}
    files: dict[str, str] = {}
    for name, split in parts.items():
        is_bias = split[-1] == "bias" and (
            bias == "all" or (str(bias).endswith("_only") and _layer_of(name) in tuned)
        )
        if (adapter and adapter in split) or _adapter_of(split) is not None:
            files[name] = _name_in_file(split, adapter, is_wrapped)
        elif is_bias:
            files[name] = name if is_wrapped else f"{BASE}{name}"
    return PeftAdapter(adapter, files)


def _is_one_model(names: Iterable[str]) -> bool:
    """Returns whether the tensors of adapters are parameters of one model, and no state of others.

    Examples:
        >>> _is_one_model(["q.lora_A.a.weight"]), _is_one_model(["o.q.lora_A.a.weight.exp_avg"])
        (True, False)
    """
    for name in names:
        split = name.split(".")
        adapter = _adapter_of(split)
        if adapter is not None and (
            split[-1] not in ("weight", "bias", adapter) or f".{BASE}" in name
        ):
            return False
    return True


def _adapter_of(split: list[str]) -> str | None:
    """Returns the adapter that a name has, "" if it has none; None if it is of no adapter."""
    for at, part in enumerate(split):
        if _OF_ADAPTERS.fullmatch(part):
            after = split[at + 1] if at + 1 < len(split) else ""
            return "" if after in ("weight", "bias") and part != _SAVED_MODULE else after
    return None


def _layer_of(name: str) -> str:
    """Returns the name of the layer that an adapter tunes, from that of one of its tensors."""
    split = name.removesuffix(".bias").removesuffix(".base_layer").split(".")
    stop = next((at for at, part in enumerate(split) if _OF_ADAPTERS.fullmatch(part)), len(split))
    return ".".join(split[:stop])


def _name_in_file(split: list[str], adapter: str, is_wrapped: bool) -> str:
    # Source: `_remove_adapter_name_from_state_dict_key` and `adapter_state_dict` of PEFT 0.21.
    kept = []
    for at, part in enumerate(split):
        is_adapter = part == adapter and at > 0 and bool(_OF_ADAPTERS.fullmatch(split[at - 1]))
        is_saved = part == _SAVED_MODULE and adapter in split[at + 1 : at + 2]
        if not is_adapter and not is_saved:
            kept.append(part)
    if kept[-2:] == [_MAGNITUDE, "weight"]:
        kept.pop()
    name = ".".join(kept)
    return name if is_wrapped else f"{BASE}{name}"
