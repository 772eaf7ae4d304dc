"""Leaves out the doctests of adapters whose framework is not installed: those are extras."""

from importlib.util import find_spec

_NEEDS = {
    "ray_dcp/data/loader.py": "torchdata",
    "ray_dcp/integrations/hf.py": "transformers",
    "ray_dcp/integrations/lightning.py": "lightning_fabric",
    "ray_dcp/integrations/torchtitan.py": "torchtitan",
}
collect_ignore = [path for path, module in _NEEDS.items() if find_spec(module) is None]
