"""Pure planning: which bytes of which tensor are written by whom, where, and read back by whom.

No torch, no ray, no disk, no clock. The values that it works on are in `core.values`.
"""
