"""Kept until all tests import `tests.support`."""

from tests.support.world import World as Gathered  # noqa: F401
