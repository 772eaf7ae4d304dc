"""Staging on a node: memory, slots, copies, write queue, memory tier. No Ray, no torch."""
