"""What one rank does in a save and in a load."""
