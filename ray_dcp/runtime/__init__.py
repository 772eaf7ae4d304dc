"""Carries out the protocol: inline in one process, else over sockets or by actors of Ray."""
