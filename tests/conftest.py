"""For all tests: what a shell leaves to those that it starts in the background is set right."""

from __future__ import annotations

import signal

# Why: it makes them ignore SIGINT, and so Ctrl-C would do nothing in tests of Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
