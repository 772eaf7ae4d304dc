"""`StepPart`: a part of a step of a job, or an item of a step of a manager, as a view tells it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A part of a committed step; a checkpoint of its own."""

    folder: str
    """Its folder, relative to the step."""
    version: int | None = None
    """The version that was given with it."""
    kept_from: int | None = None
    """The step whose part this is, if it was kept."""

    def in_words(self, name: str) -> str:
        """Returns the part in a few words.

        Examples:
            >>> StepPart(folder="policy", kept_from=100).in_words("policy")
            'policy (kept from step 100)'
        """
        return name if self.kept_from is None else f"{name} (kept from step {self.kept_from})"
