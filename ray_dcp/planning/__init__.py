"""Pure planning: which rank writes which bytes of which tensor, where, and which rank reads them.

Planning uses no torch, no ray, no disk and no clock. Its values are defined in `core.values`.
"""
