"""`python -m tests.bench WHAT`: benchmarks, run by hand. Each prints its limit and its peers."""

from __future__ import annotations

import argparse
import sys

from tests.bench import (
    async_saves,
    elastic,
    hub,
    load,
    plan,
    reshard,
    single,
    storage,
    train,
    unchanged,
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    choices = parser.add_subparsers(dest="what", required=True)
    for what, module in (
        ("async", async_saves), ("day", async_saves), ("small", single), ("big", single),
        ("elastic", elastic), ("hub", hub),
        ("load", load), ("plan", plan), ("reshard", reshard),
        ("storage", storage), ("train", train), ("unchanged", unchanged),
    ):  # fmt: skip
        told = module.__doc__ or ""
        choice = choices.add_parser(what, description=told, help=told.partition("\n")[0])
        choice.add_argument("--dir", default=None, help="where to write (default: the temp folder)")
        if what not in ("elastic", "load", "plan", "reshard"):
            choice.add_argument("--rounds", type=int, default=5, help="interleaved (medians)")
        if what in ("load", "reshard"):
            choice.add_argument("--ranks", type=int, default=8, help="largest number of ranks")
        if what in ("storage", "train"):
            choice.add_argument("--megabytes", type=int, default=512, help="length of the state")
    choices.choices["plan"].add_argument("--tensors", type=int, default=1000, help="of each rank")
    choices.choices["plan"].add_argument("--largest", type=int, default=10240, help="most ranks")
    choices.choices["unchanged"].add_argument("--ray", action="store_true", help="stage by Ray")
    for what in ("async", "day"):
        async_saves.add_arguments(choices.choices[what])
    choices.choices["day"].set_defaults(rows=("day",))
    return _run(parser.parse_args()) or 0


def _run(given: argparse.Namespace) -> int | None:
    match given.what:
        case "async" | "day":
            return async_saves.command(given)
        case "small":
            return single.small(given.rounds, given.dir)
        case "big":
            return single.big(given.rounds, given.dir)
        case "elastic":
            return elastic.elastic(given.dir)
        case "hub":
            return hub.hub(given.rounds, given.dir)
        case "load":
            return load.load(given.dir, given.ranks)
        case "plan":
            return plan.plan(given.tensors, given.largest)
        case "reshard":
            return reshard.reshard(given.ranks, given.dir)
        case "storage":
            return storage.storage(given.rounds, given.dir, given.megabytes)
        case "unchanged":
            return unchanged.unchanged(given.rounds, given.dir, on_ray=given.ray)
    return train.train(given.rounds, given.dir, given.megabytes)


if __name__ == "__main__":
    sys.exit(main())
