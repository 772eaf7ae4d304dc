"""Keys to bytes: one small interface over local disks, memory and (later) object stores."""
