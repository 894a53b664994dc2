"""The energy of a placement: choices of formats that share casts, and their exact minimum."""

from narrowcast.energy.integer_program import minimise_by_integer_program
from narrowcast.energy.min_cut import minimise_by_cut
from narrowcast.energy.minimum import minimise
from narrowcast.energy.model import FIXED, Choice, Energy, Flow, Optimum, Reader

__all__ = [
    "FIXED", "Choice", "Energy", "Flow", "Optimum", "Reader", "minimise", "minimise_by_cut",
    "minimise_by_integer_program",
]  # fmt: skip
