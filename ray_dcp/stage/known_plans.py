"""Plans and layouts of the last saves, so that a plan is sent once and not with every save."""

from __future__ import annotations

from collections import OrderedDict

from ray_dcp.plan.values import RankPlan
from ray_dcp.stage.layout import StagingLayout, lay_out_windows
from ray_dcp.stage.values import StageOrder

__all__ = ["KnownPlans"]

_MOST_KEPT = 16


class KnownPlans:
    """The plans of the last orders. Not thread-safe."""

    def __init__(self) -> None:
        self._plans: OrderedDict[bytes, RankPlan] = OrderedDict()
        self._layouts: OrderedDict[tuple[object, ...], StagingLayout] = OrderedDict()

    def plan(self, order: StageOrder) -> RankPlan | None:
        """Returns the plan that came with an order or an earlier one; None when neither did."""
        plan = order.plan or self._plans.get(order.plan_id)
        if plan is not None:
            self._plans[order.plan_id] = plan
            self._plans.move_to_end(order.plan_id)
            while len(self._plans) > _MOST_KEPT:
                self._plans.popitem(last=False)
        return plan

    def layout(self, order: StageOrder, plan: RankPlan) -> StagingLayout:
        """Returns where an order's bytes lie.

        Args:
            order: The order.
            plan: Its plan.
        """
        name = (order.plan_id, order.deferred_bytes, order.window_bytes)
        layout = self._layouts.get(name)
        if layout is None:
            layout = lay_out_windows(plan, order.deferred_bytes, order.window_bytes)
            self._layouts[name] = layout
            while len(self._layouts) > _MOST_KEPT:
                self._layouts.popitem(last=False)
        return layout
