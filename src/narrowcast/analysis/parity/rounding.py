"""What rounding may make of a distance: asked of the programs, by calls that are a unit in the last place off."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from narrowcast.analysis.parity.exchange import OF_NOISE
from narrowcast.analysis.parity.programs import Live, OneProgram, distance, live_program
from narrowcast.observation.trial.noise import Noise
from narrowcast.observation.trial.trial import Trial
from narrowcast.reports.results.run_differences import RunDifferences
from narrowcast.runtime.torch_bridge import FORMATS, LOW
from narrowcast.runtime.torch_surface.dispatch import tree_map_only

_LOW = frozenset(FORMATS[dtype].name for dtype in LOW)
_OF_RUNS = 1e-5
"""The distance of two runs in fp32 that may be rounding, in nats or relatively, where neither program is there to be
asked.
"""


def is_rounding(whole: float, programs: Sequence[OneProgram], found: RunDifferences) -> bool:
    """Return whether a distance is no more than rounding makes of it, and, in low formats, formats are the same and no
    kernel is beyond its bound, either.
    """
    runs = [one for one in programs if isinstance(one, Live) and not one.trial.is_made]
    if not runs:
        return all(map(is_wide, programs)) and whole <= _OF_RUNS
    may_be = all(map(is_wide, programs)) or (found.first_format is None and not beyond_bounds(found))
    return may_be and whole <= noise_of(runs[0])


def beyond_bounds(found: RunDifferences) -> bool:
    """Return whether the same kernel of both is beyond its bound, on the same numbers."""
    return any(
        [a.op for a in row.a] == [b.op for b in row.b] and row.inputs <= row.round_off_bound for row in found.producers
    )


def is_wide(program: OneProgram) -> bool:
    """Return whether no call computes in a low format."""
    return not any(_LOW.intersection(call.computes.split(",")) for call in program.run.calls)


def in_fp32(programs: tuple[Live, Live]) -> tuple[Live, Live] | None:
    """Return copies of both that compute in fp32; None of what does not run so."""
    made = []
    try:
        for one in programs:
            inputs = tree_map_only(torch.Tensor, _wide, (one.trial.args, one.trial.kwargs))
            program = live_program(
                one.name, Trial.of("parity", _wide(copy.deepcopy(one.module)), inputs), None, one.tokens
            )
            program.run = program.captured()
            made.append(program)
    except Exception:  # some layer's code names a format
        return None
    return made[0], made[1]


def _wide(one: Any) -> Any:
    return one if isinstance(one, torch.Tensor) and one.dtype not in LOW else one.float()


def noise_of(program: Live) -> float:
    """Return how far from itself a program may be by rounding: a few times what it is where every call is off by up to
    a unit in the last place; once that in low formats, where that is much.
    """
    if program.noise is None:
        times = OF_NOISE if is_wide(program) else 1
        moved = (program.exchanged(moves=Noise(n))[0] for n in (0, 1))
        program.noise = times * max(distance(program, program, output).rms for output in moved)
    return program.noise
