"""Run a model through a graph front end and say what became of its graphs, and what their calls take."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from narrowcast.core.goals import MEMORY, Goal
from narrowcast.core.policy import Site
from narrowcast.errors import NarrowcastError
from narrowcast.formats import FORMATS, fp32
from narrowcast.frontends.compiled.compile import compile
from narrowcast.frontends.exported.export import explicit_program, placed_program, traced_program
from narrowcast.frontends.graphs.compiled import watch_graphs
from narrowcast.frontends.race.eager_ops import eager_note, is_raced, run_watched
from narrowcast.observation.trial.isolation import Through
from narrowcast.observation.trial.trial import Trial
from narrowcast.output.console import in_bytes
from narrowcast.programs.program import Program
from narrowcast.reports.results.graphs import CompiledGraph
from narrowcast.reports.results.profile import load_profile
from narrowcast.runtime.devices.device import device_now, held_at_most
from narrowcast.runtime.devices.prices import CostModel, TimePrices, costs_time
from narrowcast.runtime.devices.signature import cast_signature
from narrowcast.runtime.torch_bridge import tensors_in
from narrowcast.runtime.torch_surface.dispatch import count_dispatch_modes
from narrowcast.runtime.torch_surface.dynamo import forget_compiled_code, watch_frames

FRONT_ENDS = ("eager", "compile", "export", "script")


def graphs_of(
    front_end: str, trial: Trial, region: Any, goal: Goal, backend: str
) -> tuple[tuple[CompiledGraph, ...], str]:
    """Return the graphs of a model in a region, and what a goal found for the eager code between them.

    A copy of the model is run, uncompiled code between graphs included.

    Functions that Dynamo leaves to Python are among them, with the reason as their fallback and no program.
    The graphs are those of `narrowcast.compile` or `narrowcast.export` on any backend; with the goal `exact` none
    generates code here, with another goal `backend` does, because candidates are timed.
    """
    compiled: list[Made] = []
    through = _through(front_end, goal, backend, compiled)
    note = held = ""
    with warnings.catch_warnings(), trial.isolated(through=through) as run:
        warnings.simplefilter("ignore")  # fallbacks are listed
        try:
            with watch_graphs() as graphs, watch_frames() as left:
                if front_end == "compile" and is_raced(region, goal) and not count_dispatch_modes():
                    note = eager_note(run_watched(run, region)[1])
                else:  # if it is recorded: no time says much
                    with region:
                        run()
            if compiled and goal.kind == MEMORY and not count_dispatch_modes():
                held = _held_at_most(*compiled[0], region, trial.device_type)
        finally:
            if front_end == "compile":  # not earlier: Dynamo forgets where graphs break with the rest
                forget_compiled_code()
    known = {graph.broken_at for graph in graphs}
    alone = dict.fromkeys(row for row in left if f"{row[0]}:{row[1]}" not in known)
    graphs += [
        CompiledGraph(len(graphs) + n, Site(file=file, line=line), fallback=reason)
        for n, (file, line, reason) in enumerate(alone)
    ]
    return tuple(graphs), " ".join(filter(None, (note, held)))


Made = tuple[Callable[[], Any], list[torch.Tensor]]
"""A call of what was compiled, and the tensors that gradients flow to."""


def _through(front_end: str, goal: Goal, backend: str, calls: list[Made]) -> Through:
    def run_compiled(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forget_compiled_code()
        if not goal.places:
            return compile(model, backend="aot_eager")(*args, **kwargs)
        compiled = compile(model, backend=backend, goal=goal)
        parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
        leaves = [t for t in (*parameters, *tensors_in(args, kwargs)) if t.requires_grad]
        calls.append((lambda: compiled(*args, **kwargs), leaves))
        return compiled(*args, **kwargs)

    def exported(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(model, torch.nn.Module):
            raise NarrowcastError(
                asked="explain with front_end='export'", found="the model is no Module",
                advice="torch.export takes modules: write one whose forward calls the function.",
            )  # fmt: skip
        program = traced_program(model, args, kwargs)
        if goal.places:
            return placed_program(program, args, kwargs, goal, fold=True, fused=backend == "inductor")
        return explicit_program(program)

    return run_compiled if front_end == "compile" else exported


def _held_at_most(call: Callable[[], Any], leaves: list[torch.Tensor], region: Any, device_type: str) -> str:
    """Return what one more call holds at most, with its backward where gradients flow, as a sentence."""
    runs_back = False

    def run() -> None:
        nonlocal runs_back
        with region:
            outs = [t for t in tensors_in(call()) if t.requires_grad and t.is_floating_point()]
        runs_back = bool(outs and leaves)
        if runs_back:  # into nobody's `.grad`
            torch.autograd.grad(outs, leaves, [torch.ones_like(t) for t in outs], allow_unused=True)

    try:
        held = held_at_most(run, device_type)
    except RuntimeError:  # a model that runs once, or whose results have no backward
        return ""
    directions = "forward and backward" if runs_back else "forward"
    return f"Measured: one call of the compiled model ({directions}) holds {in_bytes(held)} at most." if held else ""


def predict_costs(graphs: Iterable[CompiledGraph], device_type: str) -> None:
    """Note in each graph what its calls and casts take one by one, by this device's profile; nothing is measured."""
    model = CostModel(load_profile(device_now(device_type)))
    for graph in graphs:
        if graph.after is not None:
            graph.costs = _costs(graph.after, model)


def _costs(program: Program, model: CostModel) -> dict[int, tuple[float, str]]:
    prices = TimePrices(model, fused=False)
    costs = {}
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
        costs[step.id] = (estimate.ns, estimate.source)
    return costs
