"""How many processes run the tests, and which doctests are left out."""

import os
from importlib.util import find_spec

import pytest

MOST_PROCESSES = 8
"""Each may have a Ray of its own, with a gigabyte of memory."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns how many processes `-n auto` means: one more than cores, as a test often waits.

    None beside this one for single files: a file stays in one process, and to start others takes
    seconds.
    """
    if all(".py" in argument for argument in config.args):
        return 0
    return min(len(os.sched_getaffinity(0)) + 1, MOST_PROCESSES)


# Adapters whose framework is not installed: those are extras.
_NEEDS = {
    "ray_dcp/data.py": "torchdata",
    "ray_dcp/integrations/hf.py": "transformers",
    "ray_dcp/integrations/lightning.py": "lightning_fabric",
    "ray_dcp/integrations/torchtitan.py": "torchtitan",
}
collect_ignore = [path for path, module in _NEEDS.items() if find_spec(module) is None]
