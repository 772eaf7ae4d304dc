"""The `ray-dcp` command."""
