"""Adapters for training frameworks, and the training program of `ray-dcp demo`."""
