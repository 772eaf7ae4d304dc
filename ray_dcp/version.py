"""The versions of this library and of torch, for whoever must not import the facade."""

__version__ = "0.1.0"

OLDEST_TORCH = "2.9"
NEWEST_TORCH = "2.15"
"""The oldest and the newest torch that was tried; `docs/limits.md` has all of them."""
