"""Placement: which format each call and which position each cast is given, as the exact minimum of an energy.

question: what may choose. prices, memory, peak: what it costs. energy, minimum, min_cut, integer_program: the least.
place: the edits.
"""

from narrowcast.programs.placement.energy import FIXED, Choice, Energy, Flow, Optimum, Reader
from narrowcast.programs.placement.integer_program import minimise_by_integer_program
from narrowcast.programs.placement.min_cut import minimise, minimise_by_cut

__all__ = [
    "FIXED", "Choice", "Energy", "Flow", "Optimum", "Reader", "minimise", "minimise_by_cut",
    "minimise_by_integer_program",
]  # fmt: skip
