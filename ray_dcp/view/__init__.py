"""Looking at checkpoints without torch or Ray: list, show, verify."""
