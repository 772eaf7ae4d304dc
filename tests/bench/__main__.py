"""`python -m tests.bench WHAT`: benchmarks, run by hand. Each prints its limit and its peers."""

from __future__ import annotations

import argparse
import sys

from tests.bench import (
    async_saves,
    elastic,
    hub,
    job,
    load,
    plan,
    single,
    storage,
    train,
    unchanged,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    choices = parser.add_subparsers(dest="what", required=True)
    for what, module in (
        ("async", async_saves), ("day", async_saves), ("small", single), ("big", single),
        ("elastic", elastic), ("hub", hub), ("job", job), ("load", load), ("plan", plan),
        ("storage", storage), ("train", train), ("unchanged", unchanged),
    ):  # fmt: skip
        told = (module.__doc__ or "").replace("%", "%%")
        choice = choices.add_parser(what, description=told, help=told.partition("\n")[0])
        choice.add_argument("--dir", default=None, help="where to write (default: the temp folder)")
        choice.add_argument("--rounds", type=int, default=5, help="interleaved (medians)")
        choice.add_argument("--ranks", type=int, default=8, help="largest number of ranks of load")
        if what in ("async", "day"):
            async_saves.add_arguments(choice)
        elif what in ("job", "storage", "train"):
            default = 1000 if what == "job" else 512
            choice.add_argument("--megabytes", type=int, default=default, help="of the state")
    choices.choices["plan"].add_argument("--tensors", type=int, default=1000, help="of each rank")
    choices.choices["plan"].add_argument("--largest", type=int, default=10240, help="most ranks")
    choices.choices["unchanged"].add_argument("--ray", action="store_true", help="stage by Ray")
    choices.choices["day"].set_defaults(rows=("day",))
    given = parser.parse_args()
    match given.what:
        case "async" | "day":
            return async_saves.command(given) or 0
        case "small" | "big":
            return getattr(single, given.what)(given.rounds, given.dir) or 0
        case "elastic":
            return elastic.elastic(given.dir)
        case "job":
            return job.job(given.rounds, given.dir, given.megabytes)
        case "load":
            return load.load(given.dir, given.ranks)
        case "plan":
            return plan.plan(given.tensors, given.largest)
        case "unchanged":
            return unchanged.unchanged(given.rounds, given.dir, on_ray=given.ray) or 0
        case "hub":
            return hub.hub(given.rounds, given.dir)
        case "storage":
            return storage.storage(given.rounds, given.dir, given.megabytes) or 0
    return train.train(given.rounds, given.dir, given.megabytes)


if __name__ == "__main__":
    sys.exit(main())
