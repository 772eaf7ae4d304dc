"""Keys to bytes: one interface over local disks, memory, object stores and other libraries."""
