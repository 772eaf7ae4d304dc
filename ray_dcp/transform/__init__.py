"""Makes checkpoints and model files out of other checkpoints."""
