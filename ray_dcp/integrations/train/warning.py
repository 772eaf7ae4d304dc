"""What an operator of a Ray Train run has to know: falls back, failed saves, steps left aside."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass

from ray_dcp.errors import CheckpointError
from ray_dcp.integrations.train.names import StepFolder
from ray_dcp.seam.report import LoadReport

__all__ = ["Warned"]

logger = logging.getLogger(__name__)


@dataclass
class Warned:
    """What was said so far; only rank 0 says anything.

    Args:
        rank: This rank.
    """

    rank: int
    num_failed: int = 0
    """Saves that failed since one was committed."""
    _of_steps: bool = False

    def fell_back(self, report: LoadReport, registered: StepFolder | None) -> None:
        """Tells of newer steps than the one that was restored."""
        if self.rank:
            return
        for path, error in report.damaged:
            self._say(
                f"Restored step {report.step} ({report.checkpoint_id}) instead of the newer "
                f"{path}, which is damaged: {error}. Look at it with `ray-dcp verify {path}`"
            )
        if registered is not None and registered.step > (report.step or 0):
            self._say(
                f"Restored step {report.step}, although Ray Train has registered the newer step "
                f"{registered.step} ({registered.name}), which is no longer there or damaged"
            )

    def failed(self, step: int, error: CheckpointError) -> None:
        """Tells of a save that failed."""
        self.num_failed += 1
        if self.rank == 0:
            self._say(
                f"Step {step} is not saved ({self.num_failed} in a row now): "
                f"{type(error).__name__}: {error}"
            )

    def ignored_steps(self, has_steps: bool, restored: LoadReport | None, url: str) -> None:
        """Tells, once, that a run is saved anew that was not restored though it could be."""
        if has_steps and restored is None and not self._of_steps and self.rank == 0:
            self._say(
                f"{url} has steps of earlier workers of this run, but restore() was not called or "
                f"found none committed: training began anew. Call restore(state) before the first "
                f"save, or give the run another name"
            )
        self._of_steps = True

    def _say(self, text: str) -> None:
        logger.warning(text)
        # Why both: a run shows the one in its log, and a test or a notebook the other.
        warnings.warn(text, UserWarning, stacklevel=4)
