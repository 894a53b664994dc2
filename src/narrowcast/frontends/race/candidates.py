"""Candidates: one captured graph with its formats placed in several ways, to be timed against each other.

`placed` is what costs least under the cost model; `policy` what the policy says, call by call; `high` runs every call
that may choose in the highest format that it may have. Each may also run op by op, as it is, where compiling does not
pay; `placed` then is what costs least if nothing is fused. For memory `placed` is what keeps fewest bytes within the
limit on time, `fewest kept` the same without that limit, `fastest` what takes least time. Candidates that are the same
program are one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from narrowcast.core.goals import CAST, MEMORY, WORKING, Goal
from narrowcast.errors import EnergyError
from narrowcast.formats import Format, bf16, fp16, fp32
from narrowcast.frontends.graphs.read import ReadGraph, operands_of
from narrowcast.frontends.graphs.resting import Resting, rest_weights
from narrowcast.frontends.graphs.write import write_graph
from narrowcast.output.progress import long_work
from narrowcast.programs.passes import BEFORE_AUTOGRAD, PassResult, run_passes
from narrowcast.programs.placement import Energy, Optimum, minimise
from narrowcast.programs.placement.memory import KeptBytes, Smallest, place_within
from narrowcast.programs.placement.peak import Lives, Peak
from narrowcast.programs.placement.place import Chooser, Placement, as_given, as_high, as_the_policy, place_formats
from narrowcast.programs.placement.prices import CastBytes
from narrowcast.programs.placement.question import FREE, Question, find_choices
from narrowcast.programs.program import Edit, Program, Step, Value, element_bytes, print_program
from narrowcast.reports.results.profile import Profile
from narrowcast.runtime.devices.abilities import slow_families
from narrowcast.runtime.devices.measure import Measurable, MeasuredOperand, measure
from narrowcast.runtime.devices.prices import CostModel, TimePrices, costs_time
from narrowcast.runtime.devices.signature import Workspaces, known_shape
from narrowcast.runtime.torch_bridge import id_with_dtype
from narrowcast.runtime.torch_surface.dispatch import OpOverload

PLACED, POLICY, HIGH, OP_BY_OP = "placed", "policy", "high", "op by op"
FEWEST, FASTEST = "fewest kept", "fastest"
STREAMED_BYTES = 24 * 2**20
"""Weights that together take more than this do not stay in a cache from call to call."""


@dataclass(slots=True, eq=False)
class Candidate:
    """One way to run a graph: a placement, its program, and what it is predicted to take.

    formats: of the choices, in their order; they name the placement. is_compiled: a compiler gets it; the graph runs as
    it is otherwise. sure: the part of the predicted time of its calls that was measured. peak: the most bytes that it
    is predicted to hold at once, where memory is what counts. graph, resting: there once it is written, which it is
    only if it may be used.
    """

    name: str
    outcome: PassResult
    placement: Placement
    formats: tuple[str, ...]
    is_compiled: bool
    sure: float
    peak: Peak | None = None
    graph: GraphModule = field(init=False)
    resting: Resting = field(init=False, default_factory=Resting)
    is_written: bool = field(init=False, default=False)

    @property
    def casts(self) -> int:
        """How many casts one call makes, those of cached weights among them until it is written."""
        return len(self.outcome.program.casts()) - self.resting.removed

    def write(self, reading: ReadGraph, goal: Goal, weights: frozenset[int], rests: bool) -> None:
        """Write it into a graph of its own. weights, rests: as for `make_candidates`."""
        self.graph, own = copy_reading(reading)
        nodes = write_graph(own, self.outcome.program)
        if rests:
            self.resting = rest_weights(self.graph, self.outcome.program, nodes, weights, goal)
        self.is_written = True

    @property
    def predicted_ns(self) -> float:
        """Nanoseconds of one call under the cost model, with the backward where there is one."""
        return self.placement.cost


def make_candidates(
    reading: ReadGraph,
    goal: Goal,
    profile: Profile,
    fused: bool,
    weights: frozenset[int],
    measures: bool = True,
    uncompiled: bool = False,
) -> list[Candidate]:
    """Return the candidates of a graph that was read and not changed since; the placed one first. None is written.

    weights: positions of inputs that are weights. measures: calls that the profile lacks are measured (not where it is
    another device's). uncompiled: the graph may also run as it is.
    """
    model = CostModel(profile)
    candidates: dict[tuple[str, bool], Candidate] = {}
    for is_compiled in (True, False) if fused and uncompiled else (True,):
        for name, choose in _ways(goal).items():
            maker = _Maker(reading, goal, model, fused and is_compiled, weights, measures and not candidates, choose)
            candidate = maker.candidate(name, is_compiled)
            candidates.setdefault((print_program(candidate.outcome.program), is_compiled), candidate)
    return list(candidates.values())


def remembered_candidate(
    reading: ReadGraph, goal: Goal, profile: Profile, fused: bool, weights: frozenset[int], chosen: str,
    formats: Sequence[str],
) -> Candidate | None:  # fmt: skip
    """Return the candidate that was chosen earlier, with these formats; None if they do not fit the graph."""
    name, _, way = chosen.partition(", ")
    is_compiled = way != OP_BY_OP
    earlier = as_given(formats)
    maker = _Maker(reading, goal, CostModel(profile), fused and is_compiled, weights, False, lambda kept: earlier)
    try:
        return maker.candidate(name, is_compiled)
    except EnergyError:
        return None


class _Maker:
    """Makes one candidate: `place` is one of the passes, and what it found is kept for the rest."""

    def __init__(
        self, reading: ReadGraph, goal: Goal, model: CostModel, fused: bool, weights: frozenset[int], measures: bool,
        way: Way,
    ) -> None:  # fmt: skip
        self.reading, self.goal, self.measures, self.way = reading, goal, measures, way
        parameters = [v for n, v in enumerate(reading.program.body.parameters) if n in weights]
        ids = frozenset(v.id for v in parameters)
        self.streamed = ids if sum(v.bytes for v in parameters) > STREAMED_BYTES else frozenset[int]()
        at_rest = frozenset[int]() if goal.weights == CAST else ids
        trains, sizes = goal.weights == WORKING, symbol_sizes(reading)
        self.prices = TimePrices(model, fused, frozenset(), at_rest, trains, sizes)
        self.placements: list[Placement] = []  # the one of `place`
        self.formats: tuple[str, ...] = ()

    def place(self, program: Program) -> list[Edit]:
        """Return the edits that place the program that `assign` left."""
        ours = frozenset(program.steps) - frozenset(self.reading.program.steps)
        from_weights = {c.id for c in program.casts() if c.operands[0].value in self.streamed}
        self.prices.streamed = self.streamed | from_weights
        if self.measures:
            measure_calls(self.reading, program, self.prices)
        kept = None
        if self.goal.kind == MEMORY or self.goal.memory_limit_bytes is not None:
            kept = find_choices(program, KeptBytes(self.prices.fused), FREE, ours).energy
        chooser = self.way(kept)
        sizes: list[float] = []

        def choose(question: Question) -> Optimum:
            optimum = chooser(question)
            self.formats = tuple(format.name for format in optimum.chosen)
            if kept is not None:
                policy = tuple(c.formats[0] for c in kept.choices)
                sizes.extend((kept.evaluate(chosen) or 0) * kept.unit for chosen in (optimum.chosen, policy))
            return optimum

        edits, placement = place_formats(program, self.prices, ours=ours, choose=choose)
        if sizes:
            placement = replace(placement, kept_bytes=sizes[0], policy_kept_bytes=sizes[1])
        self.placements.append(placement)
        return edits

    def candidate(self, name: str, is_compiled: bool) -> Candidate:
        """Return the candidate, not yet written."""
        outcome = run_passes(self.reading.program, (self.place, *BEFORE_AUTOGRAD), self.reading.policies, id_with_dtype)
        full_name = name if is_compiled else f"{name}, {OP_BY_OP}"
        peak = self.peak(outcome.program) if self.goal.kind == MEMORY else None
        return Candidate(full_name, outcome, self.placements[0], self.formats, is_compiled, self.prices.sure(), peak)

    def peak(self, program: Program) -> Peak:
        """Return the most bytes that one call of it is predicted to hold at once."""
        sizes, device = self.prices.sizes, self.prices.model.profile.device
        slow = {f.name: frozenset(slow_families(device.type, f)) for f in (bf16, fp16)}
        workspace = Workspaces(slow, sizes)
        beside = {s.id: workspace(s, [program.values[o.value] for o in s.operands]) for s in program.steps.values()}

        def size(value: Value) -> float:
            return math.prod(known_shape(value.shape, sizes)) * element_bytes(value.type)

        return Lives(program.body, KeptBytes(self.prices.fused), self.prices.is_fused, beside, size).peak()


Way = Callable[[Energy | None], Chooser]
"""What makes a chooser, given the bytes that are kept, where they count."""


def _ways(goal: Goal) -> dict[str, Way]:
    """Return how the candidates of a goal are placed, by their names."""

    def placed(kept: Energy | None) -> Chooser:
        if kept is None:
            return _fastest
        if goal.memory_limit_bytes is not None:
            return place_within(kept, goal.memory_limit_bytes)
        return Smallest(kept, goal.slowdown_limit)

    def fewest(kept: Energy | None) -> Chooser:
        return _fastest if kept is None else Smallest(kept)

    ways: dict[str, Way] = {PLACED: placed, POLICY: lambda kept: as_the_policy, HIGH: lambda kept: as_high}
    return {**ways, FEWEST: fewest, FASTEST: lambda kept: _fastest} if goal.kind == MEMORY else ways


def _fastest(question: Question) -> Optimum:
    return minimise(question.energy)


# -- the calls of a graph, to be measured ------------------------------------------------------------------------------


def measure_calls(reading: ReadGraph, program: Program, prices: TimePrices) -> int:
    """Measure the calls and casts of a program that the profile lacks, in every format that they may have."""
    ours = frozenset(program.steps) - frozenset(reading.program.steps)
    question = find_choices(program, CastBytes(), FREE, ours)  # who may choose does not depend on prices
    groups: dict[str, list[Measurable]] = {}
    for step in program.steps.values():
        formats = question.formats[question.variable[step.id]] if step.id in question.variable else (step.value.format,)
        calls = [_measurable(reading, program, step, f or fp32, prices) for f in formats]
        known = [call for call in calls if call is not None]
        if known:
            groups.setdefault(known[0].signature.text, known)
    with long_work("measuring the model's calls", len(groups)) as measured:
        return measure(prices.model.profile, groups.values(), progress=measured)


def _measurable(
    reading: ReadGraph, program: Program, step: Step, format: Format, prices: TimePrices
) -> Measurable | None:
    node = reading.nodes.get(step.id)
    if node is None or not isinstance(node.target, OpOverload) or not costs_time(step) or "order" in step.effects:
        return None
    operands = [program.values[o.value] for o in step.operands]
    if any(v.shape is None and v.type not in ("int", "symint") for v in operands):
        return None
    signature = prices.signature(step, operands, format)
    tensors: dict[Node, list[Any]] = {}
    for value, (_, source) in zip(operands, operands_of(node), strict=True):
        example = source.meta.get("val", source.meta.get("example_value"))
        if isinstance(example, torch.Tensor):
            low = value.format is not None and value.format.bits < 32
            stride = tuple(_size(s) for s in example.stride()) if example.layout is torch.strided else ()
            shape = tuple(_size(s) for s in example.shape)
            kind = format.name if low else value.type
            tensors.setdefault(source, []).append(MeasuredOperand(shape, stride, kind, value.device, value.gradient))
        else:
            tensors.setdefault(source, []).append(_size(example))

    def filled(source: Node) -> Any:
        waiting = tensors[source]
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    args, kwargs = map_arg((node.args, dict(node.kwargs)), filled)
    return Measurable(signature, node.target, args, kwargs)


def symbol_sizes(reading: ReadGraph) -> dict[str, int]:
    """Return the symbolic sizes of a graph's values for the inputs that it was captured with."""
    sizes: dict[str, int] = {}
    for node in reading.nodes.values():
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, torch.Tensor):
            sizes.update((str(size), _size(size)) for size in value.shape if not isinstance(size, int))
    return sizes


def _size(size: Any) -> int:
    if isinstance(size, int):
        return int(size)
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if hint is not None else 64


# -- copies ------------------------------------------------------------------------------------------------------------


def copy_reading(reading: ReadGraph) -> tuple[GraphModule, ReadGraph]:
    """Return a copy of the graph, bodies of higher-order ops included, and the reading as if it had been read there.

    Its constants are shared: a real tensor cannot be copied while fake ones are made.
    """
    root = reading.modules[0]
    kept = [[*vars(m).values(), *m.parameters(recurse=False), *m.buffers(recurse=False)] for m in root.modules()]
    copied = copy.deepcopy(root, {id(t): t for tensors in kept for t in tensors if isinstance(t, torch.Tensor)})
    names = {id(module): name for name, module in root.named_modules()}
    modules: list[Any] = [copied.get_submodule(names[id(module)]) for module in reading.modules]
    twin: dict[Node, Node] = {}
    for old, new in zip(reading.modules, modules, strict=True):
        twin.update(zip(old.graph.nodes, new.graph.nodes, strict=True))
    nodes = {number: twin[node] for number, node in reading.nodes.items()}
    ids = {twin[node]: number for node, number in reading.ids.items()}
    return copied, replace(reading, nodes=nodes, ids=ids, modules=modules)
