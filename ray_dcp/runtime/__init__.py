"""Carries out the protocol: `inline` in one process without Ray, everything else as Ray actors."""
