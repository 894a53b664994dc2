"""`narrowcast explain TARGET`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import narrowcast as nc
from narrowcast.cli.options import DeviceOption, ModelOptions, ResultOptions, TraceOption, check_folder, show
from narrowcast.cli.target import grad, load_case
from narrowcast.core.goals import FAST, MEMORY, Goal, as_goal
from narrowcast.errors import GoalError, TargetError
from narrowcast.output.console import terminal
from narrowcast.output.files import replace_text
from narrowcast.reports.results.verdicts import AT_FAULT, RAISES


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """The execution mode that is explained, and how its formats are chosen."""

    front_end: Annotated[str, typer.Option(help="eager, compile, export or script.")] = "eager"
    goal: Annotated[str, typer.Option(help="exact, fast or memory; with compile and export.")] = "exact"
    profile: Annotated[Path | None, typer.Option(help="Plan with this profile instead of this device's.")] = None
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Fast: do not time the candidates.")] = False
    memory_limit_bytes: Annotated[int | None, typer.Option(help="Fast: kept for the backward, per graph.")] = None
    slowdown_limit: Annotated[float | None, typer.Option(help="Memory: slowdown over the fastest formats.")] = None
    backend: Annotated[str, typer.Option(help="Compiler of a goal's candidates: inductor, eager.")] = "inductor"
    programs: Annotated[bool, typer.Option("--programs", help="Also print the programs of the graphs.")] = False


def explain_command(
    model: ModelOptions,
    result: ResultOptions,
    graphs: GraphOptions,
    device: DeviceOption = None,
    run: Annotated[bool, typer.Option("--run", help="Also run in fp32 and as asked: errors, metric, time.")] = False,
    real: Annotated[bool, typer.Option("--real", help="Run the model, do not try fake tensors.")] = False,
    trace: TraceOption = None,
    model_explorer: Annotated[
        Path | None, typer.Option(help="Write a folder for Model Explorer; with export.", callback=check_folder)
    ] = None,
) -> None:
    """Show in which format every op of TARGET's model computes, every cast, and what it costs.

    Exits with 1 if the model raises under the policy, or if --run finds an op at fault, or NaN or infinity.
    """
    if model_explorer is not None and (graphs.front_end != "export" or graphs.goal != "exact" or device is not None):
        found = f"--front-end {graphs.front_end}, --goal {graphs.goal}, --device {device or 'of the model'}"
        advice = "Write --front-end export, without --goal and --device."
        raise TargetError(f"--model-explorer {model_explorer}", found, advice=advice)
    goal = _goal(graphs)
    case = load_case(model.target)
    with grad(False, case):
        explanation = nc.explain(
            case, under=model.under, device=device, run=run, real=real, front_end=graphs.front_end, goal=goal,
            backend=graphs.backend, times=trace is not None or model_explorer is not None,
        )  # fmt: skip
        if model_explorer is not None:
            module: Any = case.model
            program = nc.export(module, case.inputs, under=model.under)  # whose nodes the explanation names
            model_explorer.mkdir(exist_ok=True)
            for name, text in explanation.to_model_explorer().items():
                replace_text(model_explorer / f"{name}.json", text + "\n")
            import torch

            torch.export.save(program, model_explorer / "model.pt2")
    show(explanation, result, trace=trace)
    if graphs.programs and not result.json:
        console = terminal()
        for part in program_parts(explanation):
            console.print(part)
    if explanation.verdict in (*AT_FAULT, RAISES):
        raise typer.Exit(1)


_BELONGS = {FAST: ("profile", "memory_limit_bytes", "verify"), MEMORY: ("profile", "slowdown_limit")}


def _goal(graphs: GraphOptions) -> Goal:
    asked: dict[str, Any] = {
        "profile": graphs.profile, "memory_limit_bytes": graphs.memory_limit_bytes,
        "slowdown_limit": graphs.slowdown_limit, "verify": False if graphs.no_verify else None,
    }  # fmt: skip
    given = {name: value for name, value in asked.items() if value is not None}
    others = [option for option in given if option not in _BELONGS.get(graphs.goal, ())]
    if others:
        flag = "--no-verify" if others[0] == "verify" else f"--{others[0].replace('_', '-')}"
        goals = " or ".join(f"--goal {goal}" for goal, options in _BELONGS.items() if others[0] in options)
        raise GoalError(f"{flag} with --goal {graphs.goal}", "it has no effect there", advice=f"Write {goals}.")
    if not given:
        return as_goal(graphs.goal)
    return Goal.fast(**given) if graphs.goal == FAST else Goal.memory(**given)


def program_parts(explanation: nc.Explanation) -> list[str]:
    """Return the programs of every graph before and after the passes, in their text form."""
    from rich.markup import escape

    from narrowcast.programs.program import print_program

    parts = []
    for graph in explanation.graphs:
        for title, program in (
            ("as captured", graph.before),
            ("with explicit casts", graph.after),
            ("joint graph, as autograd made it", graph.joint_before),
            ("joint graph, after the passes", graph.joint_after),
        ):
            if program is not None:
                parts += [f"[bold]graph {graph.number}: {title}[/bold]", escape(print_program(program))]
    return parts
