"""What is staged between a rank's memory and the storage: the byte budget. No Ray, no torch."""
