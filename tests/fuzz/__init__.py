"""Fuzzing of all that reads stored bytes: only a `CheckpointError` may come out.

`python -m tests.fuzz --seconds 600` runs for long, by hand; `tests/property/test_bit_flips.py` runs
it shortly. `targets` makes, spoils and reads them.
"""
