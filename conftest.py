"""How many processes run the tests, which files each takes, and which doctests are left out."""

import os
from importlib.util import find_spec
from typing import Any

import pytest

MOST_PROCESSES = 8
"""Each may have a Ray of its own, with a gigabyte of memory."""


BESIDE = 2
"""How many processes run beside one for each core."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns how many processes `-n auto` means: more than cores, as a test often waits.

    None beside this one for single files: a file stays in one process, and to start others takes
    seconds.
    """
    if all(".py" in argument for argument in config.args):
        return 0
    return min(len(os.sched_getaffinity(0)) + BESIDE, MOST_PROCESSES)


WAITING = ("tests/integration/", "tests/chaos/")
"""Folders whose tests wait for a Ray half of the time."""


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Returns what hands out files: the last processes begin with those that wait.

    The others have the cores meanwhile, for tests that compute. Files in the order of the
    collection would have all processes compute at first and all of them wait at the end.
    """
    from xdist.scheduler import LoadFileScheduling

    class WaitBesideWork(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            waiting = (file for file in self.workqueue if file.startswith(WAITING))
            if node in self.nodes[-BESIDE:] and (file := next(waiting, None)):
                self.workqueue.move_to_end(file, last=False)
            super()._assign_work_unit(node)

    return WaitBesideWork(config, log) if config.option.dist == "loadfile" else None


# Adapters whose framework is not installed: those are extras.
_NEEDS = {
    "ray_dcp/data.py": "torchdata",
    "ray_dcp/integrations/accelerate.py": "accelerate",
    "ray_dcp/integrations/hf.py": "transformers",
    "ray_dcp/integrations/lightning.py": "lightning_fabric",
    "ray_dcp/integrations/torchtitan.py": "torchtitan",
}
collect_ignore = [path for path, module in _NEEDS.items() if find_spec(module) is None]
