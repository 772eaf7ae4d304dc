"""Kept until all tests import `tests.support`."""

from tests.support.world import *  # noqa: F403
from tests.support.arrays import *  # noqa: F403
from tests.support.arrays import ArrayCapture as NumpyCapture, ArrayWork as NumpyWork  # noqa: F401
