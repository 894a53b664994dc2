"""Placing: from a Dynamo graph and a goal to the compiled candidate that is kept."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from narrowcast.core.goals import MEMORY, Goal
from narrowcast.core.policy import NOWHERE
from narrowcast.core.policy.settings import ONE_FORMAT
from narrowcast.errors import CaptureError, first_line
from narrowcast.frontends.graphs.check import check_formats
from narrowcast.frontends.graphs.explicit import Explicit, read_explicit
from narrowcast.frontends.graphs.read import ReadGraph
from narrowcast.frontends.graphs.resting import Resting, with_stand_ins
from narrowcast.frontends.race.candidates import PLACED, Candidate, make_candidates, remembered_candidate
from narrowcast.frontends.race.choosing import (
    Choosing,
    Compiled,
    RememberedTimes,
    choice_key,
    load_choice,
    save_choice,
    time_sides,
)
from narrowcast.output.console import in_bytes
from narrowcast.output.progress import long_work
from narrowcast.programs.passes.assign import assign_casts
from narrowcast.programs.program import Program, Writes, print_program
from narrowcast.reports.results.graphs import CandidateTime, CompiledGraph
from narrowcast.reports.results.run_records import site_text
from narrowcast.runtime.devices.device import device_now
from narrowcast.runtime.devices.sweep import foreign_profile, keep, known_profile
from narrowcast.runtime.sites.python_stack import warn_at
from narrowcast.runtime.torch_surface.dynamo import begins_again, without_wrappers

Compiler = Callable[[GraphModule, Sequence[Any]], Compiled]
RULED_OUT, SURE, HOPELESS = 1.25, 0.9, 2.5
"""A candidate that is predicted to take more than RULED_OUT times the best one's time is neither compiled nor timed, if
the part SURE of the calls of both was measured; else more than HOPELESS times.
"""
_RACE = 0.1
"""A race takes at most this part of the time that compiling its candidates took, except for a few rounds."""
LARGE = 40
"""Of a graph in which more calls than these may choose one candidate is compiled: the prediction of many measured calls
lost 0.5 % on 19 such graphs of two machines (5.6 % at most), and compiling another takes as long again.
"""
ALIKE = 1.035
"""Where the policy's formats, or the highest, are predicted to take at most this many times the placed ones' time, they
represent it in compiled code: on 48 graphs of two machines they were the faster ones then, having fewer casts.
"""


@dataclass(slots=True)
class PlacedGraph:
    """The candidates of a graph, and everything that is needed to compile and choose.

    left: those that are written, to be timed: the first is predicted best. choice: what was chosen earlier.
    """

    candidates: list[Candidate]
    left: list[Candidate]
    explicit: Explicit
    goal: Goal
    key: str
    choice: RememberedTimes | None = None


def place_graph(
    graph: GraphModule,
    values: Sequence[Any],
    goal: Goal,
    fused: bool,
    backend: str,
    weights: frozenset[int],
    uncompiled: bool = False,
    rests: bool = True,
) -> PlacedGraph:
    """Return the candidates of a graph whose formats are right; the others are left out, with a warning.

    values: the fake inputs. weights: positions of those that are parameters or buffers. backend: what runs it, for the
    choice's key. uncompiled: the graph may also run as it is, call by call. rests: casts of weights that are made once
    become inputs. Must be called with the regions open that the graph is to run in.
    """
    reading, seconds = read_explicit(graph, values, asserts=False)
    device_type = next((r.facts.device_type for r in reading.program.regions), "cpu")
    if goal.profile:
        profile = foreign_profile(goal.profile, device_type, goal.races)
    else:
        profile = known_profile(device_type)
    known = len(profile.samples)
    is_here = profile.device == device_now(device_type)
    uncompiled = uncompiled and len(reading.modules) == 1 and goal.races
    key = choice_key(
        profile.device, print_program(reading.program), *reading.policies, ", ".join(map(_input_text, values)), backend,
        goal.kind, goal.weights, str(torch.is_grad_enabled()),
    )  # fmt: skip
    earlier = load_choice(key) if goal.races else None
    candidate = None
    if earlier is not None:
        candidate = remembered_candidate(reading, goal, profile, fused, weights, earlier.chosen, earlier.formats)
    if candidate is not None:
        candidates = left = [candidate]
    else:
        earlier = None
        candidates = make_candidates(reading, goal, profile, fused, weights, is_here, uncompiled)
        left = worth_timing(candidates, goal, fused)
    if len(profile.samples) != known and not goal.profile:
        keep(profile)

    def is_usable(candidate: Candidate) -> bool:
        candidate.write(reading, goal, weights, rests)
        return _is_right(candidate, values)

    others = [c for c in candidates if c not in left]
    left = [c for c in left if is_usable(c)] or [c for c in others if is_usable(c)][:1]
    if not left:
        raise CaptureError("a graph with placed formats", "no candidate gives the formats that were captured")
    explicit = Explicit(left[0].graph, reading, left[0].outcome, seconds)
    _tell_aligned(reading, goal)
    _tell_too_slow(candidates, left[0], reading, goal)
    return PlacedGraph(candidates, left, explicit, goal, key, earlier)


def _tell_aligned(reading: ReadGraph, goal: Goal) -> None:
    """Warn of each call that would raise in eager code, because of its formats, and runs under a goal."""
    program, warned = reading.program, set()
    for edit in assign_casts(program, reading.policies):
        rule = edit.why.rule
        step = program.steps[edit.step]
        if rule is None or rule.source != ONE_FORMAT or (step.op, step.site) in warned:
            continue
        warned.add((step.op, step.site))
        where = site_text(*step.site.at)
        warn_at(
            f"narrowcast: {step.op.removesuffix('.default')} raises under autocast, because its tensors come in "
            f"several formats{where}; goal={goal.kind!r} runs it in the one of the tensor that it writes to, "
            'or in the widest. policy="safe" does so without a goal',
            step.site,
        )


def _tell_too_slow(candidates: Sequence[Candidate], taken: Candidate, reading: ReadGraph, goal: Goal) -> None:
    """Warn where fewer bytes could be held, but in more than the time that the goal may take: what to write for it."""
    compiled = [c for c in candidates if c.is_compiled and c.peak is not None]
    least = min(compiled, key=_held, default=taken)
    if taken.peak is None or _held(least) >= 0.99 * _held(taken):
        return
    times = least.predicted_ns / max(min(c.predicted_ns for c in compiled), 1.0)
    first = next((step.site for step in reading.program.steps.values() if step.site.file), NOWHERE)
    warn_at(
        f"narrowcast: goal={goal.kind!r}: the formats that hold fewest bytes at once ({in_bytes(_held(least))}) "
        f"are predicted to take {times:.1f} times the fastest ones' time. Taken are formats that hold "
        f"{in_bytes(_held(taken))} in at most {goal.slowdown_limit:g} times that. For the former give "
        f"goal=nc.Goal.memory(slowdown_limit={math.ceil(times)})",
        first,
    )


def _held(candidate: Candidate) -> float:
    return candidate.peak.bytes if candidate.peak is not None else math.inf


def _is_right(candidate: Candidate, values: Sequence[Any]) -> bool:
    try:
        check_formats(candidate.graph, with_stand_ins(candidate.graph, values))
    except CaptureError as error:
        warnings.warn(f"narrowcast: the candidate {candidate.name!r} is not used: {error}", stacklevel=2)
        return False
    return True


def compile_placed(
    placed: PlacedGraph,
    inputs: Sequence[Any],
    compiler: Compiler,
    around: Callable[[Explicit, CompiledGraph], AbstractContextManager[Any]],
    report: CompiledGraph,
) -> tuple[Compiled, Any]:
    """Compile the candidates; what is returned times them when it is first called, and keeps the best.

    around: what must be open while one of them is compiled; it yields what is the same for them all, which is returned.
    report: gets what was chosen.
    """
    start = time.perf_counter()
    left = placed.left
    reports: dict[str, CompiledGraph] = {}
    sides: dict[str, Compiled] = {}
    expected: Any = ()
    with long_work("compiling", len(left)) as step:
        for candidate in left:
            step(f"compiling {candidate.name}", done=False)
            own = reports[candidate.name] = CompiledGraph(report.number, report.site)
            explicit = Explicit(candidate.graph, placed.explicit.reading, candidate.outcome, 0.0)
            compiled: Compiled = candidate.graph.forward
            try:
                if candidate.is_compiled:
                    with around(explicit, own) as expected:
                        compiled = compiler(candidate.graph, with_stand_ins(candidate.graph, inputs))
            except Exception as error:
                if begins_again(error) or (candidate is left[-1] and not sides):
                    raise
                raised = first_line(error)
                warnings.warn(
                    f"narrowcast: the candidate {candidate.name!r} is not used: its compiler raised {raised}",
                    stacklevel=2,
                )
                continue
            sides[candidate.name] = with_weights(compiled, candidate.resting)
            step()
    report.candidates_seconds = time.perf_counter() - start

    def note_choice(choice: RememberedTimes) -> None:
        own = reports[tell(report, placed, choice)]
        report.joint_before, report.joint_after, report.joint_edits = own.joint_before, own.joint_after, own.joint_edits
        report.forward_steps = own.forward_steps

    if len(sides) == 1:
        note_choice(placed.choice or RememberedTimes(next(iter(sides)), {}, {}, 0, 0.0))
    written, seconds = _written(placed.explicit.reading.program), _RACE * report.candidates_seconds
    return Choosing(sides, written, note_choice, seconds=seconds), expected


def choose_now(placed: PlacedGraph, compiled: Callable[[Candidate], Compiled]) -> RememberedTimes:
    """Return the choice among candidates that take no inputs here; untimed if they write to their inputs."""
    left = placed.left
    if _written(placed.explicit.reading.program):  # each run would change what the caller gave, and the weights
        left = left[:1]
    if len(left) == 1:
        return placed.choice or RememberedTimes(left[0].name, {}, {}, 0, 0.0)
    return time_sides({c.name: compiled(c) for c in left}, (), frozenset())


def worth_timing(candidates: Sequence[Candidate], goal: Goal, fused: bool) -> list[Candidate]:
    """Return the candidates that the prediction does not rule out; the first is predicted best. Where nothing is timed,
    the placed one alone; for memory the one that holds fewest bytes at once in the time that it may take. fused:
    compiling one takes long.
    """
    ordered = sorted(candidates, key=lambda c: (c.predicted_ns, -c.placement.raised))
    if goal.kind == MEMORY:
        usable = [c for c in ordered if c.is_compiled]
        usable = [c for c in usable if c.predicted_ns <= goal.slowdown_limit * usable[0].predicted_ns]
        return sorted(usable, key=_held)[:1]
    if not goal.races:
        return [c for c in ordered if c.name == PLACED] or ordered[:1]
    best = ordered[0]
    limits = [RULED_OUT if min(best.sure, c.sure) >= SURE else HOPELESS for c in ordered]
    left = [c for c, limit in zip(ordered, limits, strict=True) if c.predicted_ns <= limit * best.predicted_ns]
    as_it_is = next((c for c in ordered if not c.is_compiled), None)
    if as_it_is is not None and as_it_is not in left and as_it_is.predicted_ns <= HOPELESS * best.predicted_ns:
        left.append(as_it_is)  # nothing is compiled for it, and what is compiled may turn out not to run
    compiled = [c for c in left if c.is_compiled]
    alike = [c for c in compiled if c.name != PLACED and c.predicted_ns <= ALIKE * compiled[0].predicted_ns]
    if not (fused and compiled):
        return left
    used = [c for c in compiled if not (alike and c.name == PLACED)]
    if len(best.placement.calls) > LARGE:
        used = (alike or compiled)[:1]
    return [c for c in left if c in used or not c.is_compiled]


def tell(report: CompiledGraph, placed: PlacedGraph, choice: RememberedTimes) -> str:
    """Note what was chosen, and what every candidate took and was predicted to take; the chosen one's name."""
    candidate = next(c for c in placed.candidates if c.name == choice.chosen)
    report.goal, report.chosen, report.placement = placed.goal.kind, choice.chosen, candidate.placement
    report.from_disk = choice.from_disk
    report.candidates = tuple(
        CandidateTime(
            c.name,
            c.casts if c.is_written else None,
            c.predicted_ns,
            c.sure,
            choice.times_ns.get(c.name),
            choice.spreads.get(c.name, 0.0),
            choice.dropped.get(c.name, ""),
            c.peak,
        )
        for c in placed.candidates
    )
    report.after, report.edits = candidate.outcome.program, candidate.outcome.edits
    if not choice.from_disk:
        report.candidates_seconds += choice.seconds
        if choice.times_ns or (placed.goal.races and len(placed.left) == 1):
            save_choice(placed.key, replace(choice, formats=candidate.formats))
    return choice.chosen


def with_weights(compiled: Compiled, resting: Resting) -> Compiled:
    """Return a compiled graph that gets its cached weights as inputs, too; Dynamo is kept out of what calls it."""
    compiled = without_wrappers(compiled)
    if not resting.casts:
        return compiled
    return lambda *args: compiled(*args, *resting.inputs(args))


def _written(program: Program) -> frozenset[int]:
    """Return positions of inputs that a call writes to."""
    writes = Writes(program.body)
    return frozenset(n for n, v in enumerate(program.body.parameters) if writes.is_written_after(v.id, -1))


def _input_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes = [[str(s) for s in value.shape], [str(s) for s in value.stride()]]
        return f"{value.dtype}{sizes}{value.device}{value.requires_grad}"
    return str(value)
