"""Moves bytes between memory and storage as plans say, checking every block. No torch, no ray."""
