"""The first save of a restarted job, by the plan that the job before has kept beside its steps.

As in `plan`: simulated ranks, the coordinator's real code, CPU seconds of the coordinator alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_dcp.format.plan_template import is_template
from ray_dcp.options import SaveOptions
from ray_dcp.runtime.plan_memory import PlanMemory

OPTIONS = SaveOptions(
    stock_metadata=False, plan_templates=True, plan_templates_in="memory://bench/plans"
)


def measure(world_size: int, tensors: int, regular: bool) -> dict[str, Any]:
    """Saves a state in one job, and again in another; returns what each cost, and the file."""
    from tests.bench import plan

    storage = plan.Written("bench")
    for entry in storage.list():
        storage.delete([entry.key])
    columns = list(plan.slabs(world_size, tensors, regular=regular))
    found = {}
    for seq, job in enumerate(("cold", "template")):
        memories = [PlanMemory() for _ in range(world_size)]
        counted = plan.Counted(storage)
        found[job] = plan.save(counted, seq, world_size, columns.__getitem__, memories, OPTIONS)
    sizes = [entry.num_bytes for entry in storage.list() if is_template(entry.key)]
    return {**found, "template_bytes": sum(sizes)}


def print_table(layouts: Sequence[tuple[int, bool]], worlds: Sequence[int]) -> None:
    """Prints what the first save of a job costs, without a template and by one.

    Args:
        layouts: Tensors of a rank, and whether they lie in equal slabs.
        worlds: Numbers of ranks.
    """
    print("\nthe first save of a restarted job, from the template of the one before:")
    print(f"{'ranks':>6} {'tensors':>7} {'layout':>9} {'job':>8} {'CPU s':>8} {'rows moved':>10}")
    from tests.bench import plan

    for count, regular in layouts:
        for world in worlds:
            found = plan.measured(measure, world, count, regular)
            for job in ("cold", "template"):
                cpu = dict(found[job]["cpu_s"])
                later = cpu.pop("KeepTemplate", 0.0)
                layout = "regular" if regular else "irregular"
                print(
                    f"{world:>6} {count:>7} {layout:>9} {job:>8} {sum(cpu.values()):>8.3f} "
                    f"{found[job]['rows moved']:>10}"
                    + (f"   kept afterwards in {later:.3f} s" if later >= 5e-4 else "")
                )
                print(" " * 21 + ", ".join(f"{k} {v:.3f}" for k, v in cpu.items() if v >= 5e-4))
            told = found["template_bytes"]
            print(
                " " * 21 + (f"template of {told:,} bytes" if told else "too large for a template")
            )
