"""Checkpoints of Ray Train runs: the checkpointer of each rank, and the controller's callback.

Public names are in `ray_dcp.train`.
"""
