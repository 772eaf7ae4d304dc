"""A run of `docs/examples/whole_state.py` that goes on, and as it goes on with a part forgotten.

`python -m tests.support.programs.whole_state_ranks FOLDER` on each rank prints one line of JSON.
"""

from __future__ import annotations

import json
import runpy
import sys

import torch.distributed as dist

from tests.support.programs.forks import REPOSITORY

EXAMPLE = REPOSITORY / "docs" / "examples" / "whole_state.py"
PARTS = ("model", "average", "optimizer", "scheduler", "scaler", "random", "data")


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    train = runpy.run_path(str(EXAMPLE))["main"]
    found = {"whole": train(f"{folder}/whole", 5), "again": train(f"{folder}/whole", 5)}
    found["adapters"] = train(f"{folder}/adapters", 5, adapters=True)
    found["adapters again"] = train(f"{folder}/adapters", 5, adapters=True)
    for part in PARTS:
        found[part] = train(f"{folder}/adapters", 5, adapters=True, forget=(part,))
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
