"""How policies of one kind combine."""

from __future__ import annotations

from typing import Any

from ray_dcp.errors import InvalidRequestError


class Combination:
    """A policy that consists of other policies, its parts.

    Args:
        *policies: The parts; at least one.

    Raises:
        InvalidRequestError: There are no parts, or a part is not a policy of this kind.
    """

    def __init__(self, *policies: Any) -> None:
        if not policies:
            raise InvalidRequestError(f"{type(self).__name__} needs at least one policy")
        self.policies = tuple(self._checked(policy) for policy in policies)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.policies))})"

    @staticmethod
    def _checked(policy: object) -> Any:
        """Returns a part after checking that it is a policy of this kind."""
        raise NotImplementedError


def parts_of(policy: Any) -> list[Any]:
    """Returns a policy and all policies that it consists of, at any depth.

    Args:
        policy: Built-in, or a user's.
    """
    return [policy, *(p for part in getattr(policy, "policies", ()) for p in parts_of(part))]
