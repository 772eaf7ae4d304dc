"""Values, arithmetic and small services that the other modules share; and the versions."""

__version__ = "0.1.0"

OLDEST_TORCH = "2.9"
NEWEST_TORCH = "2.15"
"""The oldest and the newest tested version of torch; `docs/limits.md` lists all of them."""
