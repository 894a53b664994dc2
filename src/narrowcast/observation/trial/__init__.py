"""Trials: a model, or one call of it, run again from the same state, in formats of our choice."""
