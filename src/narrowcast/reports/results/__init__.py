"""Results as data: what was found, the questions to it, and the file that it is saved in."""
