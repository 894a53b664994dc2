"""Casts of weights that are kept: in a region, between calls, and in torch's own cache."""
