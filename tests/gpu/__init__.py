"""What is checked with one GPU: `python -m tests.gpu`. Without one, it is played."""
