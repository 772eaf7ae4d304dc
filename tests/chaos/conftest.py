"""The same Ray as for the integration tests."""

from tests.integration.conftest import pytest_configure, ray_session

__all__ = ["pytest_configure", "ray_session"]
