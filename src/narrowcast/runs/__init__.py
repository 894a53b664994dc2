"""Runs of a model, looked at call by call: what each computes, where two differ, where the first NaN is made."""
