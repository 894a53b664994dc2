"""The parts: one file each, with a function that takes a Context."""
