"""Staging on a node: windows and their budget, write queue, memory tier. No Ray, no torch."""
