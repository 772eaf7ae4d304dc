"""Executes plans: moves bytes between memory and storage, and verifies them. No torch, no Ray."""
