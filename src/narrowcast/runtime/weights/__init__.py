"""Casts of weights that are kept: in a region, at rest between calls, and in torch's own cache."""
