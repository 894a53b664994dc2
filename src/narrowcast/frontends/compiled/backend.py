"""The compile backend: each graph that Dynamo captures is made explicit, and handed to the compiler inside.

`torch.compile(model, backend="narrowcast")` finds `compile_graph` by its entry point.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from narrowcast.core.goals import Goal, as_goal
from narrowcast.core.policy import Policy
from narrowcast.errors import CaptureError, NarrowcastError, PolicyError, ProgramError, first_line
from narrowcast.frontends.compiled.stepwise import find_elsewhere, steppable
from narrowcast.frontends.graphs.backward import LISTED, SAME, Backward, State, autocast_state, parse_backward
from narrowcast.frontends.graphs.capture import all_nodes, detached, fake_mode_of, noted
from narrowcast.frontends.graphs.check import check_formats, tell_other_paths
from narrowcast.frontends.graphs.compiled import note_reading, report_graph
from narrowcast.frontends.graphs.explicit import Explicit, edit_joint, forward_steps, make_explicit
from narrowcast.frontends.graphs.resting import Resting, rest_weights, weight_positions, with_stand_ins
from narrowcast.frontends.race.placing import compile_placed, place_graph, with_weights
from narrowcast.reports.results.graphs import CompiledGraph
from narrowcast.runtime.regions.failures import note_failure
from narrowcast.runtime.regions.marks import MARKS
from narrowcast.runtime.sites.python_stack import warn_here
from narrowcast.runtime.torch_surface.dynamo import (
    InductorCompiler,
    begins_again,
    compiler_text,
    functorch_config,
    inner_compiler,
)
from narrowcast.runtime.torch_surface.state import ENTER_AUTOCAST, any_autocast, autocast_off

Compiled = Callable[..., Any]
Compiling = Callable[[], tuple[Compiled, State]]
"""What has the compiler inside compile a graph, and gives the autocast state, too, that its backward expects."""


@dataclass(frozen=True)
class GraphBackend:
    """A backend for torch.compile. Equal backends share compiled code.

    inner:    the compiler that gets the explicit graphs, as torch.compile makes it from its arguments.
    backward: under which autocast backwards run. rules: a policy's rules about the backward. goal: what is asked of
    the formats, and of weights. model: the one that is compiled, if it is a Module.
    """

    inner: Compiled
    backward: Backward = field(default_factory=lambda: parse_backward("as_eager"))
    rules: Policy | None = None
    goal: Goal = field(default_factory=Goal)
    model: weakref.ref[torch.nn.Module] | None = field(default=None, compare=False, repr=False)

    def __call__(self, graph: GraphModule, inputs: Sequence[Any], **_: Any) -> Compiled:
        """What torch.compile asks of a backend: the graph, compiled."""
        opens = (n.op == "call_function" and n.target in (ENTER_AUTOCAST, *MARKS) for n in all_nodes(graph))
        if not (any_autocast() or any(opens)) and self.rules is None:
            return self._without_regions(graph, inputs)
        report = report_graph(graph)
        _note_break(report, graph)
        compiling = False
        try:
            start = time.perf_counter()
            explicit, compile_it = (self._place if self.goal.places else self._explicit)(graph, inputs, report)
            report.seconds = time.perf_counter() - start
            model = self.model() if self.model is not None else None
            if model is not None:
                tell_other_paths(model, explicit.reading.program)
            compiling = True
            compiled, expected = compile_it()
        except Exception as error:
            if not _may_fall_back(error, compiling):
                raise
            return self._fall_back(graph, inputs, report, error)
        return self._running(graph, explicit, compiled, expected)

    def _running(self, graph: GraphModule, explicit: Explicit, compiled: Compiled, expected: State) -> Compiled:
        """Return the compiled graph as Dynamo calls it: outside of regions, its backward watched."""
        elsewhere = find_elsewhere(graph, explicit)
        device_type = next((r.facts.device_type for r in explicit.reading.program.regions), "cpu")
        watched = _watched(compiled, expected, self.backward)

        def run(*args: Any) -> Any:
            if elsewhere is not None and elsewhere.is_elsewhere():
                return elsewhere.run(*args)
            try:
                with autocast_off():
                    return watched(*args)
            except RuntimeError as error:
                note_failure(error, device_type)
                raise

        return run

    def _inner(self, graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Compile a graph with the inner compiler; while a run is observed, the graph runs call by call."""
        return steppable(graph, self.inner(graph, inputs))

    def _without_regions(self, graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Compile a graph without regions: nothing to decide; its backward is checked all the same."""
        with self.backward.tracing(graph) as expected:
            compiled = self._inner(graph, inputs)
        return _watched(compiled, expected, self.backward)

    def _place(self, graph: GraphModule, inputs: Sequence[Any], report: CompiledGraph) -> tuple[Explicit, Compiling]:
        """Return the graph in the formats that are predicted to be the best, and what compiles its candidates."""
        values = _fake_inputs(graph, inputs)
        fused = isinstance(self.inner, InductorCompiler)
        uncompiled = self.rules is None and self.backward.runs_as_inputs
        with fake_mode_of(graph):
            placed = place_graph(
                graph, values, self.goal, fused, compiler_text(self.inner), weight_positions(graph, inputs), uncompiled
            )
        note_reading(report, placed.explicit.reading)
        report.capture_seconds = placed.explicit.capture_seconds
        return placed.explicit, partial(compile_placed, placed, inputs, self._inner, self._compiling, report)

    def _explicit(self, graph: GraphModule, inputs: Sequence[Any], report: CompiledGraph) -> tuple[Explicit, Compiling]:
        """Return the graph with explicit casts, and what compiles it."""
        values = _fake_inputs(graph, inputs)
        with fake_mode_of(graph):
            explicit = make_explicit(graph, values)
            weights = weight_positions(graph, inputs)
            resting = rest_weights(explicit.graph, explicit.outcome.program, explicit.nodes, weights, self.goal)
            start = time.perf_counter()
            check_formats(explicit.graph, with_stand_ins(explicit.graph, values))
            report.capture_seconds = explicit.capture_seconds + time.perf_counter() - start
        note_reading(report, explicit.reading)
        report.after, report.edits = explicit.outcome.program, explicit.outcome.edits
        return explicit, partial(self._compile, explicit, resting, inputs, report)

    def _compile(
        self, explicit: Explicit, resting: Resting, inputs: Sequence[Any], report: CompiledGraph
    ) -> tuple[Compiled, State]:
        with self._compiling(explicit, report) as expected:
            compiled = self._inner(explicit.graph, with_stand_ins(explicit.graph, inputs))
        return with_weights(compiled, resting), expected

    def _fall_back(
        self, graph: GraphModule, inputs: Sequence[Any], report: CompiledGraph, error: Exception
    ) -> Compiled:
        """Compile the graph as captured, traced inside its regions as eager code runs in them; its backward is checked.

        Where a backward is asked for that only an explicit graph can have, the error is raised.
        """
        if self.rules is not None or self.backward.kind == LISTED:
            raise error
        report.fallback = first_line(error)
        warn_here(
            f"narrowcast: a graph at {report.site} could not be given explicit casts and is compiled as eager "
            f"autocast would run it ({report.fallback})"
        )
        same = self.backward.kind == SAME
        with functorch_config.patch(backward_pass_autocast="same_as_forward" if same else "off"):
            compiled = self._inner(graph, inputs)
        return _watched(compiled, autocast_state() if same else (), self.backward)

    @contextmanager
    def _compiling(self, explicit: Explicit, report: CompiledGraph) -> Any:
        """Put the joint graph of the inner compiler through the passes for after autograd. Yields the state that the
        backward is compiled for.
        """
        earlier = functorch_config.joint_custom_pass
        program = explicit.reading.program
        given = explicit.graph.graph.find_nodes(op="placeholder")
        own = {k for k, node in enumerate(given) if isinstance(noted(node), torch.nn.Parameter)}
        # of functions without parameters, leaves are the weights
        weights = frozenset(own or (k for k, value in enumerate(program.body.parameters) if value.weight))
        regions = {r.facts.device_type: r.facts for r in reversed(program.regions) if r.facts.enabled}
        rules = self.rules

        def run_joint(joint: GraphModule, joint_inputs: Any) -> GraphModule:
            if callable(earlier):
                joint = earlier(joint, joint_inputs)
            start = time.perf_counter()
            reading, outcome = edit_joint(joint, regions, rules, weights, explicit)
            if rules is not None:
                _check_joint(joint, rules)
            report.joint_before, report.joint_after = reading.program, outcome.program
            report.joint_edits = outcome.edits
            report.forward_steps = forward_steps(reading, explicit.nodes)
            report.seconds += time.perf_counter() - start
            return joint

        settings: dict[str, Any] = {"joint_custom_pass": run_joint}
        if rules is not None:  # AOTAutograd's cache does not know of them
            settings["enable_autograd_cache"] = False
        with self.backward.tracing(explicit.graph) as expected, functorch_config.patch(settings):
            yield expected


class _Registered:
    """What `torch.compile(backend="narrowcast")` calls: a backend that is made for each graph from torch's arguments.

    Dynamo asks whether a backend is a registered one by comparing it to those that are; after others it leaves weak
    references on weights, with which they could not be swapped. So every backend of ours is equal to this one.
    """

    __name__ = "narrowcast"

    def __call__(
        self, graph: GraphModule, inputs: Sequence[Any], *, mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Compiled:  # fmt: skip
        """The backend `narrowcast` of torch.compile. Options: `backend` (inductor), `backward` (as_eager), `goal`
        (exact), `weights` (folded), `options`.

        Regions around the call and inside the model are honoured; a policy comes with them, or with
        `narrowcast.compile`. Raises PolicyError for an option that is not one of these.
        """
        given = dict(options or {})
        inner = inner_compiler(given.pop("backend", "inductor"), mode, given.pop("options", None), None)
        backward = parse_backward(given.pop("backward", "as_eager"))
        goal = as_goal(given.pop("goal", "exact"), weights=given.pop("weights", "folded"))
        if given:
            raise PolicyError(
                asked=f"option {next(iter(given))!r} of the backend narrowcast",
                found="no such option",
                advice="Give backend, backward, goal, weights or options (those of the backend inside); a policy goes "
                "to nc.autocast or nc.compile.",
            )
        return GraphBackend(inner, backward, goal=goal)(graph, inputs)

    def __eq__(self, other: object) -> bool:
        return other is self or isinstance(other, GraphBackend)

    def __hash__(self) -> int:
        return id(self)


compile_graph = _Registered()


def _watched(compiled: Compiled, expected: State, choice: Backward) -> Compiled:
    """Return the compiled graph, whose backward checks that autocast is as it was compiled for."""

    def run(*args: Any) -> Any:
        results = compiled(*args)
        if torch.is_grad_enabled():
            choice.watch(results, expected)
        return results

    return run


def _check_joint(joint: GraphModule, rules: Policy) -> None:
    """Raise CaptureError, with the rules, if an op does not take the formats that they ask for."""
    with fake_mode_of(joint):
        try:
            check_formats(joint, [noted(node) for node in joint.graph.find_nodes(op="placeholder")])
        except CaptureError as error:
            raise CaptureError(
                asked="a backward under " + "; ".join(map(str, rules.rules)),
                found=f"{error.asked} {error.found}",
                where=error.where,
                advice="Give this op another format, or leave it out of the rule.",
            ) from error


def _fake_inputs(graph: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Return the graph's inputs as Dynamo's fake tensors, without the autograd of what was written to them."""
    fakes = [noted(node) for node in graph.graph.find_nodes(op="placeholder")]
    for n, (fake, given) in enumerate(zip(fakes, inputs, strict=False)):
        if isinstance(fake, torch.Tensor) and isinstance(given, torch.Tensor):
            if fake.requires_grad and not given.requires_grad:
                fakes[n] = detached(fake)
    return fakes


def _may_fall_back(error: Exception, compiling: bool) -> bool:
    """Return whether a graph that raised is compiled as captured: not where the error is the user's to see, as of a
    warning that is to be an error, nor where Dynamo begins again.
    """
    if isinstance(error, Warning):
        return False
    if isinstance(error, NarrowcastError):
        return not compiling and isinstance(error, (CaptureError, ProgramError))  # faults of ours, not of the user's
    return not (compiling and begins_again(error))


def _note_break(report: CompiledGraph, graph: GraphModule) -> None:
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is not None and getattr(reason, "graph_break", False):
        report.broken_by = str(reason.reason).strip().partition("\n")[0]
        if reason.user_stack:
            frame = reason.user_stack[-1]
            report.broken_at = f"{frame.filename}:{frame.lineno}"
