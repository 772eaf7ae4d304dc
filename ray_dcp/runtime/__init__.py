"""Carries out the protocol: inline in one process, over sockets between several, or by Ray actors."""
