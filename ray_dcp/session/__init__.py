"""A rank's line to its coordinator: inline in one process, else over sockets or through Ray."""
