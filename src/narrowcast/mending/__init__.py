"""A policy mended: runs looked at, ideas tried, until nothing is wrong, or nothing is left to try."""
