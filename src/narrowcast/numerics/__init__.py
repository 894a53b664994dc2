"""Numerics: correctly rounded conversion, and the comparison of two runs."""

from narrowcast.numerics.compare import as_real, compare, difference, output_errors, peak_bytes, relative_error, sqnr_db
from narrowcast.numerics.rounding import round_to

__all__ = ["as_real", "compare", "difference", "output_errors", "peak_bytes", "relative_error", "round_to", "sqnr_db"]
