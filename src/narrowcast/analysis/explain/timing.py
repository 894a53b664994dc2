"""What calls take: of eager code timed in a run, of graphs predicted from the profile of the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from narrowcast.analysis.capture.capture import capture
from narrowcast.formats import FORMATS, fp32
from narrowcast.frontends.eager import autocast
from narrowcast.observation.trial.trial import Trial
from narrowcast.programs.program import Program
from narrowcast.reports.results.graphs import CompiledGraph
from narrowcast.reports.results.profile import load_profile
from narrowcast.reports.results.run import Run
from narrowcast.runtime.devices.device import device_now
from narrowcast.runtime.devices.prices import CostModel, TimePrices, costs_time
from narrowcast.runtime.devices.signature import cast_signature


def timed_run(trial: Trial, region: autocast) -> Run:
    """One run for real in the region, each call and each cast timed. What a first call sets up counts, too."""
    capture(trial.model, (trial.args, trial.kwargs), under=region)  # what is set up in a first run is not timed
    return capture(trial.model, (trial.args, trial.kwargs), under=region, times=True)


def predict_costs(graphs: Iterable[CompiledGraph], device_type: str) -> None:
    """Note in each graph what its calls and casts take one by one, by this device's profile; nothing is measured."""
    model = CostModel(load_profile(device_now(device_type)))
    for graph in graphs:
        if graph.after is not None:
            graph.costs = _costs(graph.after, model)


def _costs(program: Program, model: CostModel) -> dict[int, tuple[float, str]]:
    prices = TimePrices(model, fused=False)
    found = {}
    for step in program.steps.values():
        operands = [program.values[operand.value] for operand in step.operands]
        src, dst = operands[0].format if operands else None, step.value.format
        if step.is_cast and src is not None and dst is not None:
            estimate = model.estimate(cast_signature(operands[0].shape, src, dst))
        elif costs_time(step) and operands:
            computes = next((value.format for value in operands if value.format is not None), fp32)
            signature = prices.signature(step, operands, FORMATS[computes.name])
            estimate = model.estimate(replace(signature, backward=False))
        else:
            continue
        found[step.id] = (estimate.ns, estimate.source)
    return found
