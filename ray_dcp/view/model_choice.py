"""Which module of a checkpoint is the model, by the structure of its state dict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ray_dcp.errors import InvalidRequestError
from ray_dcp.view.checkpoint_view import CheckpointView
from ray_dcp.view.wording import few

_NAMES = ("model", "module", "net", "network", "model_state_dict", "state_dict")
"""What a model is called in a state dict, the likeliest first."""


@dataclass(frozen=True)
class ModelChoice:
    """The names of one module."""

    prefix: str
    """What precedes its names, with the dot; "" if the whole checkpoint is one module."""
    others: tuple[str, ...] = ()
    """Prefixes of the other modules of the checkpoint."""


def find_model(view: CheckpointView) -> ModelChoice:
    """Returns which names of a checkpoint are those of the model.

    Modules are the mappings whose keys have dots, as those of `Module.state_dict()`; optimizers are
    none. Of several, the one that is called `model` or so is taken, the outermost first.

    Raises:
        InvalidRequestError: There is no module, or it is not clear which one is the model.
    """
    paths = [info.path for info in view.tensors.values() if info.path is not None]
    # Why: the names in safetensors files are all that is known of them.
    is_known = view.kind != "safetensors" and len(paths) == len(view.tensors)
    prefixes = _modules([tuple(map(str, path)) for path in paths], view.names) if is_known else []
    prefixes = prefixes or _called_model(view.names)
    chosen = _likeliest(prefixes)
    if chosen is None:
        found = few([one or "the whole" for one in prefixes]) if prefixes else few(_tops(view))
        expected = "one module that is the model" if prefixes else "a model"
        raise InvalidRequestError(
            f"expected {expected} in {view.url}, found {found}: choose with --tensor and "
            f"--strip-prefix"
        )
    return ModelChoice(chosen, tuple(one for one in prefixes if one != chosen))


def _tops(view: CheckpointView) -> list[str]:
    return sorted({name.partition(".")[0] for name in view.names})


def _modules(paths: Sequence[tuple[str, ...]], names: Iterable[str]) -> list[str]:
    """Returns the prefixes of the mappings that have tensors under keys with dots.

    Examples:
        >>> _modules([("app", "model", "0.weight"), ("opt", "state", "0.weight", "exp_avg")],
        ...          ["app.model.0.weight", "opt.state.0.weight.exp_avg", "opt.param_groups.0.lr"])
        ['app.model.']
    """
    tops = {path[:at] for path in paths for at, key in enumerate(path) if "." in key}
    optimizers = tuple({n.partition("param_groups.")[0] for n in names if "param_groups." in n})
    found = {".".join((*top, "")) if top else "" for top in tops}
    return sorted(one for one in found if not one.startswith(optimizers))


def _called_model(names: Iterable[str]) -> list[str]:
    """Returns the outermost prefixes that end in `model`."""
    found = set()
    for name in names:
        parts = name.split(".")[:-1]
        if "model" in parts:
            found.add(".".join((*parts[: parts.index("model") + 1], "")))
    depth = min((one.count(".") for one in found), default=0)
    return sorted(one for one in found if one.count(".") == depth)


def _likeliest(prefixes: Sequence[str]) -> str | None:
    if len(prefixes) == 1:
        return prefixes[0]
    for name in _NAMES:
        called = [one for one in prefixes if one.rstrip(".").rpartition(".")[2] == name]
        depth = min((one.count(".") for one in called), default=0)
        outermost = [one for one in called if one.count(".") == depth]
        if outermost:
            return outermost[0] if len(outermost) == 1 else None
    return None
