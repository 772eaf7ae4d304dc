"""Storage backends: one key-to-bytes interface over local disks, memory, object stores and more."""
