"""The coordinator: executes the commands of the protocol for all ranks of a job."""
