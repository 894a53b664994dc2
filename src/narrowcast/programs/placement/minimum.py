"""The exact minimum of an energy, by whichever way is quicker."""

from __future__ import annotations

from narrowcast.programs.placement.energy import Energy, Optimum
from narrowcast.programs.placement.integer_program import minimise_by_integer_program
from narrowcast.programs.placement.min_cut import minimise_by_cut


def minimise(energy: Energy) -> Optimum:
    """The placement of least energy: by minimum cut if two formats are all there are, else by integer program.

    The same energy gives the same placement. EnergyError if every placement is forbidden.
    """
    if not energy.choices:
        cost = energy.evaluate(()) or 0
        return Optimum((), cost, cost, "nothing to choose")
    return minimise_by_cut(energy) if len(energy.formats) <= 2 else minimise_by_integer_program(energy)
