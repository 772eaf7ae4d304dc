"""What tests start as programs, or run on ranks."""
