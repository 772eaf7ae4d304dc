"""Checkpoints of Ray Train runs: what each rank does, and what the controller asks of them.

Public names are in `ray_dcp.train`.
"""
