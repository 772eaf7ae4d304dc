"""The id of an attempt: new for each save, copy or deletion."""

from __future__ import annotations

import secrets


def new_attempt() -> str:
    """Returns an attempt id that no other save ever had: 16 random hex digits."""
    return secrets.token_hex(8)
