"""`python -m tests.bench WHAT`: benchmarks, run by hand. Each prints its limit and its peers."""

from __future__ import annotations

import argparse
import sys

from tests.bench import (
    async_saves,
    checksums,
    elastic,
    load,
    manager,
    plan,
    reshard,
    single,
    soak,
    staging,
    storage,
    train,
    view,
)

CHOICES = (
    "async", "small", "big", "checksums", "elastic", "load", "manager", "plan", "reshard",
    "soak", "staging", "storage", "train", "view",
)  # fmt: skip


def main() -> int:
    if sys.argv[1:2] == ["soak"]:
        return soak.command(sys.argv[2:])
    if sys.argv[1:2] == ["async"]:
        return async_saves.command(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("what", choices=CHOICES)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (medians)")
    parser.add_argument("--dir", default=None, help="where to write (default: the temp folder)")
    parser.add_argument(
        "--ranks", type=int, default=8, help="largest number of ranks (reshard, load)"
    )
    parser.add_argument(
        "--megabytes", type=int, default=512, help="length of the state (storage, load)"
    )
    parser.add_argument("--tensors", type=int, default=1000, help="tensors of each rank (plan)")
    parser.add_argument("--largest", type=int, default=10240, help="most ranks (plan)")
    arguments = parser.parse_args()
    if arguments.what == "small":
        single.small(arguments.rounds, arguments.dir)
    elif arguments.what == "big":
        single.big(arguments.rounds, arguments.dir)
    elif arguments.what == "checksums":
        checksums.checksums(arguments.rounds, arguments.dir)
    elif arguments.what == "load":
        return load.load(arguments.rounds, arguments.dir, arguments.megabytes, arguments.ranks)
    elif arguments.what == "manager":
        manager.manager(arguments.rounds, arguments.dir)
    elif arguments.what == "plan":
        return plan.plan(arguments.tensors, arguments.largest)
    elif arguments.what == "elastic":
        return elastic.elastic(arguments.dir)
    elif arguments.what == "train":
        return train.train(arguments.rounds, arguments.dir, arguments.megabytes)
    elif arguments.what == "staging":
        staging.staging(arguments.rounds, arguments.dir)
    elif arguments.what == "view":
        return view.view(arguments.rounds, arguments.dir)
    elif arguments.what == "storage":
        storage.storage(arguments.rounds, arguments.dir, arguments.megabytes)
    else:
        return reshard.reshard(arguments.ranks, arguments.dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
