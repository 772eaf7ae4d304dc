"""The versions of this library and of torch, for whoever must not import the facade."""

__version__ = "0.1.0"

OLDEST_TORCH = "2.9"
NEWEST_TORCH = "2.15"
"""The versions of torch with which all tests were run, from the one to the other."""
