"""`narrowcast explain TARGET`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import narrowcast as nc
from narrowcast.cli.target import (
    AllOption,
    DeviceOption,
    Target,
    TraceOption,
    UnderOption,
    check_folder,
    grad,
    load_case,
    write_page,
    write_trace,
)
from narrowcast.core.goals import FAST, MEMORY, Goal, as_goal
from narrowcast.errors import GoalError, TargetError
from narrowcast.output.console import print_all, print_text, terminal
from narrowcast.output.files import replace_text
from narrowcast.output.screen import columns


def explain_command(
    target: Target,
    under: UnderOption = None,
    device: DeviceOption = None,
    run: Annotated[bool, typer.Option("--run", help="Also run fp32 and the region: errors, metric, cost.")] = False,
    real: Annotated[bool, typer.Option("--real", help="Do not try fake tensors.")] = False,
    front_end: Annotated[str, typer.Option(help="eager, or explain the graphs: compile, export, script.")] = "eager",
    goal: Annotated[str, typer.Option(help="exact, fast or memory: with compile and export.")] = "exact",
    profile: Annotated[Path | None, typer.Option(help="Plan with this profile, not this device's own.")] = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not time the candidates of fast.")] = False,
    memory_limit_bytes: Annotated[int | None, typer.Option(help="Of fast: kept for the backward, per graph.")] = None,
    slowdown_limit: Annotated[float | None, typer.Option(help="Of memory: times the fastest formats' time.")] = None,
    backend: Annotated[str, typer.Option(help="Compiler of a goal's candidates: inductor, eager.")] = "inductor",
    show: Annotated[str, typer.Option(help="'program': print the programs of the graphs, too.")] = "",
    every: AllOption = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write JSON there ('-': to the terminal).")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page there that shows it all.")] = None,
    trace: TraceOption = None,
    model_explorer: Annotated[Path | None, typer.Option(help="A folder for Model Explorer: with export.")] = None,
) -> None:
    """Run TARGET's model under a policy; show in which format every op computes, every cast, and what it costs."""
    check_folder("--json", json_file)
    check_folder("--html", html)
    check_folder("--trace", trace)
    check_folder("--model-explorer", model_explorer)
    if model_explorer is not None and (front_end != "export" or goal != "exact" or device is not None):
        found = f"front end {front_end}, goal {goal}, device {device or 'of the model'}"
        advice = "Write --front-end export, without a goal and a device."
        raise TargetError(f"--model-explorer {model_explorer}", found, advice=advice)
    if show not in ("", "program"):
        raise TargetError(f"--show {show}", "no such thing to show", advice="Write --show program.")
    said = {
        "profile": profile, "memory_limit_bytes": memory_limit_bytes, "slowdown_limit": slowdown_limit,
        "verify": False if no_verify else None,
    }  # fmt: skip
    wanted = _goal(goal, {name: value for name, value in said.items() if value is not None})
    case = load_case(target)
    with grad(False):
        explanation = nc.explain(
            case, under=under, device=device, run=run, real=real, front_end=front_end, goal=wanted,
            backend=backend, times=trace is not None or model_explorer is not None,
        )  # fmt: skip
        if model_explorer is not None:
            _write_model_explorer(explanation, _exported(case, under), model_explorer)
    write_trace(explanation, trace)
    write_page(explanation, html)
    if json_file is not None and str(json_file) == "-":
        typer.echo(explanation.to_json(indent=1))
        return
    if json_file is not None:
        replace_text(json_file, explanation.to_json(indent=1) + "\n")
    print_text(explanation.to_text(every, width=columns()))
    if show:
        from narrowcast.reports.render.programs import program_parts

        print_all(terminal(), program_parts(explanation))


def _exported(case: nc.Case, under: str | None) -> Any:
    """The program whose nodes the explanation names: the same that the front end has made of a copy."""
    model: Any = case.model
    return nc.export(model, case.inputs, under=under)


def _write_model_explorer(explanation: nc.Explanation, program: Any, folder: Path) -> None:
    """The program, and a file of node data for each thing that is known of its nodes."""
    folder.mkdir(exist_ok=True)
    for name, text in explanation.to_model_explorer().items():
        replace_text(folder / f"{name}.json", text + "\n")
    import torch

    torch.export.save(program, folder / "model.pt2")


_BELONGS = {FAST: ("profile", "memory_limit_bytes", "verify"), MEMORY: ("profile", "slowdown_limit")}


def _goal(name: str, said: dict[str, Any]) -> Goal:
    """The goal with what belongs to it; GoalError for what does not."""
    others = [option for option in said if option not in _BELONGS.get(name, ())]
    if others:
        flag = "--no-verify" if others[0] == "verify" else f"--{others[0].replace('_', '-')}"
        goals = " or ".join(f"--goal {goal}" for goal, options in _BELONGS.items() if others[0] in options)
        raise GoalError(f"{flag} with --goal {name}", "it has no effect there", advice=f"Write {goals}.")
    if not said:
        return as_goal(name)
    return Goal.fast(**said) if name == FAST else Goal.memory(**said)
