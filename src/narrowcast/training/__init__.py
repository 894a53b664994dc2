"""Training: loops that are checked, losses that are scaled."""
