"""Casts of weights that are kept: in a region, between calls, in the cache of torch; and what stores weights."""
