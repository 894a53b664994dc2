"""Placing: from a Dynamo graph and a goal to the compiled candidate that is kept."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from narrowcast.costs import Profile
from narrowcast.costs.choices import Choice, choice_key, load_choice, save_choice
from narrowcast.costs.known import foreign_profile, keep, known_profile
from narrowcast.costs.measure import device_now
from narrowcast.errors import CaptureError
from narrowcast.fx.candidates import Candidate, make_candidates
from narrowcast.fx.check import check_formats
from narrowcast.fx.choosing import Choosing, Side
from narrowcast.fx.explicit import Explicit, read_explicit
from narrowcast.fx.resting import Resting, weight_positions, with_stand_ins
from narrowcast.goals import Goal
from narrowcast.program import Program, Writes
from narrowcast.report import CandidateTime, CompiledGraph

Compiled = Callable[..., Any]
Compiler = Callable[[GraphModule, Sequence[Any]], Compiled]
HOPELESS = 2.5
"""A candidate that is predicted to take so many times the best one's time is not compiled."""


@dataclass(slots=True)
class Placed:
    """The candidates of a graph, and everything that is needed to compile and choose."""

    candidates: list[Candidate]
    explicit: Explicit
    profile: Profile
    goal: Goal
    key: str


def place_graph(
    graph: GraphModule, values: Sequence[Any], goal: Goal, fused: bool, backend: str, uncompiled: bool = False
) -> Placed:
    """The candidates of a graph whose formats are right; those whose are not are left out, with a warning.

    values: the fake inputs. uncompiled: the graph may also run as it is, call by call. Must be called with the regions open that the graph is to run in.
    """
    reading, seconds = read_explicit(graph, values)
    device_type = next((r.facts.device_type for r in reading.program.regions), "cpu")
    if goal.profile:
        profile = foreign_profile(goal.profile, device_type, goal.verify)
    else:
        profile = known_profile(device_type)
    known = len(profile.samples)
    weights = weight_positions(graph)
    is_here = profile.device == device_now(device_type)
    uncompiled = uncompiled and len(reading.modules) == 1 and goal.verify
    candidates = make_candidates(reading, goal, profile, fused, weights, is_here, uncompiled)
    if len(profile.samples) != known and not goal.profile:
        keep(profile)
    right = [c for c in candidates if _is_right(c, values)]
    if not right:
        raise CaptureError("a graph with placed formats", "no candidate gives the formats that were captured")
    inputs = ", ".join(_input_text(value) for value in values)
    key = choice_key(
        profile.device, *(str(c.outcome.program) for c in right), inputs, backend, goal.kind, goal.weights,
        str(goal.memory_limit_bytes), str(torch.is_grad_enabled()),
    )  # fmt: skip
    explicit = Explicit(right[0].graph, reading, right[0].outcome, seconds)
    return Placed(right, explicit, profile, goal, key)


def _is_right(candidate: Candidate, values: Sequence[Any]) -> bool:
    try:
        check_formats(candidate.graph, with_stand_ins(candidate.graph, values))
    except CaptureError as error:
        warnings.warn(f"narrowcast: the candidate {candidate.name!r} is not used: {error}", stacklevel=2)
        return False
    return True


def compile_placed(
    placed: Placed,
    inputs: Sequence[Any],
    compiler: Compiler,
    around: Callable[[Explicit, CompiledGraph], AbstractContextManager[Any]],
    report: CompiledGraph,
) -> Compiled:
    """Compile the candidates; what is given times them when it is first called, and keeps the best.

    around: what must be open while one of them is compiled. report: told what was chosen.
    """
    start = time.perf_counter()
    candidates = sorted(placed.candidates, key=lambda c: (c.predicted_ns, -c.placement.raised))
    names = [c.name for c in candidates]
    choice = load_choice(placed.key, names) if placed.goal.verify and len(names) > 1 else None
    if choice is not None:
        left = [c for c in candidates if c.name == choice.chosen]
    elif not placed.goal.verify or placed.goal.kind != "fast" or placed.goal.memory_limit_bytes is not None:
        left = [c for c in placed.candidates if c.name == "placed"] or candidates[:1]
    else:
        left = [c for c in candidates if c.predicted_ns <= HOPELESS * candidates[0].predicted_ns]
    reports: dict[str, CompiledGraph] = {}
    sides: list[Side] = []
    for candidate in left:
        own = reports[candidate.name] = CompiledGraph(report.number, report.place)
        explicit = Explicit(candidate.graph, placed.explicit.reading, candidate.outcome, 0.0)
        if not candidate.is_compiled:
            sides.append(Side(candidate.name, _as_it_is(candidate), candidate.predicted_ns))
            continue
        with around(explicit, own):
            compiled = compiler(candidate.graph, with_stand_ins(candidate.graph, inputs))
        sides.append(Side(candidate.name, with_weights(compiled, candidate.resting), candidate.predicted_ns))
    report.candidates_seconds = time.perf_counter() - start

    def found(choice: Choice) -> None:
        tell(report, placed, choice, reports.get(choice.chosen))
        if not choice.from_disk:
            report.candidates_seconds += choice.seconds
            save_choice(placed.key, choice)

    if choice is not None:
        found(choice)
    elif len(sides) == 1:
        tell(report, placed, None, reports[sides[0].name], sides[0].name)
    return Choosing(sides, _written(placed.explicit.reading.program), found)


def tell(
    report: CompiledGraph, placed: Placed, choice: Choice | None, own: CompiledGraph | None, chosen: str = ""
) -> None:
    """Note what was chosen, and what every candidate took and was predicted to take."""
    name = choice.chosen if choice is not None else chosen
    times = choice.times_ns if choice is not None else {}
    candidate = next(c for c in placed.candidates if c.name == name)
    report.goal, report.chosen, report.placement = placed.goal.kind, name, candidate.placement
    report.from_disk = choice is not None and choice.from_disk
    report.candidates = tuple(
        CandidateTime(
            c.name,
            len(c.outcome.program.casts()),
            c.predicted_ns,
            c.sure,
            times.get(c.name),
            choice.spreads.get(c.name, 0.0) if choice is not None else 0.0,
        )
        for c in placed.candidates
    )
    report.after, report.edits = candidate.outcome.program, candidate.outcome.edits
    if own is not None:
        report.joint_before, report.joint_after, report.joint_edits = own.joint_before, own.joint_after, own.joint_edits


def with_weights(compiled: Compiled, resting: Resting) -> Compiled:
    """A compiled graph that is given its weights at rest besides."""
    if not resting.casts:
        return compiled
    return lambda *args: compiled(*args, *resting.inputs(args))


def _as_it_is(candidate: Candidate) -> Compiled:
    """The graph, run by Python."""
    return with_weights(candidate.graph.forward, candidate.resting)


def _written(program: Program) -> frozenset[int]:
    """Positions of inputs that a call writes to."""
    writes = Writes(program.body)
    return frozenset(n for n, v in enumerate(program.body.parameters) if writes.is_written_after(v.id, -1))


def _input_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes = [[str(s) for s in value.shape], [str(s) for s in value.stride()]]
        return f"{value.dtype}{sizes}{value.device}{value.requires_grad}"
    return str(value)
