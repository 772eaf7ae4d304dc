"""The folder of one checkpoint: its records, its files, and what is removed from it."""
