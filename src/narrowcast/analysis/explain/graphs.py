"""Run a model through a graph front end and say what became of its graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from narrowcast.core.goals import MEMORY, Goal
from narrowcast.core.policy import Site
from narrowcast.errors import NarrowcastError
from narrowcast.frontends.compiled.compile import compile
from narrowcast.frontends.exported.export import explicit_program, placed_program, traced_program
from narrowcast.frontends.graphs.compiled import watch_graphs
from narrowcast.frontends.race.eager_ops import eager_note, is_raced, run_watched
from narrowcast.observation.trial.isolation import isolated
from narrowcast.output.console import in_bytes
from narrowcast.reports.results.graphs import CompiledGraph
from narrowcast.runtime.devices.device import held_at_most
from narrowcast.runtime.torch_bridge import tensors_in
from narrowcast.runtime.torch_surface.dispatch import count_dispatch_modes
from narrowcast.runtime.torch_surface.dynamo import forget_compiled_code, watch_frames

FRONT_ENDS = ("eager", "compile", "export", "script")


def graphs_of(
    front_end: str,
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    region: Any,
    goal: Goal,
    backend: str = "inductor",
) -> tuple[tuple[CompiledGraph, ...], str]:
    """The graphs of a model in a region, and what a goal found for the eager code between them.

    A copy of the model is run, uncompiled code between graphs included.

    Functions that Dynamo leaves to Python are among them, with the reason as their fallback and no program.
    The graphs are those of `narrowcast.compile` or `narrowcast.export` on any backend; with the goal `exact` none
    generates code here, with another goal `backend` does, because candidates are timed.
    """
    made: list[Made] = []
    through = _through(front_end, goal, backend, made)
    held = ""
    with warnings.catch_warnings(), isolated(model, args, kwargs, fake=False, through=through) as run:
        warnings.simplefilter("ignore")  # fallbacks are listed
        try:
            with watch_graphs() as graphs, watch_frames() as left:
                note = _run(run, region, front_end == "compile" and is_raced(region, goal))
            if made and goal.kind == MEMORY and not count_dispatch_modes():
                held = _held_at_most(*made[0], region)
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


def _run(run: Callable[[], Any], region: Any, races_eager_code: bool) -> str:
    """Run in the region; what is to be said of its eager code."""
    if not races_eager_code or count_dispatch_modes():  # recorded: no time says much
        with region:
            run()
        return ""
    return eager_note(run_watched(run, region)[1])


Made = tuple[Callable[[], Any], list[torch.Tensor]]
"""A call of what was compiled, and the tensors that gradients flow to."""


def _through(front_end: str, goal: Goal, backend: str, made: list[Made]) -> Callable[..., Any]:
    """What runs a copy of the model."""

    def run_compiled(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forget_compiled_code()
        if not goal.places:
            return compile(model, backend="aot_eager")(*args, **kwargs)
        compiled = compile(model, backend=backend, goal=goal)
        parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
        leaves = [t for t in (*parameters, *tensors_in(args, kwargs)) if t.requires_grad]
        made.append((lambda: compiled(*args, **kwargs), leaves))
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


def _held_at_most(call: Callable[[], Any], leaves: list[torch.Tensor], region: Any) -> str:
    """What one more call holds at most, with its backward where gradients flow, as a sentence."""
    runs_back = False

    def run() -> None:
        nonlocal runs_back
        with region:
            outs = [t for t in tensors_in(call()) if t.requires_grad and t.is_floating_point()]
        runs_back = bool(outs and leaves)
        if runs_back:  # into nobody's `.grad`
            torch.autograd.grad(outs, leaves, [torch.ones_like(t) for t in outs], allow_unused=True)

    try:
        held = held_at_most(run)
    except RuntimeError:  # a model that runs once, or whose results have no backward
        return ""
    directions = "forward and backward" if runs_back else "forward"
    return f"Measured: one call of the compiled model ({directions}) holds {in_bytes(held)} at most." if held else ""
