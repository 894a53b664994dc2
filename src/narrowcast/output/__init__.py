"""What leaves the process: text at a terminal's width, progress, and files that are replaced at once."""
