"""place: each call in the format, and each cast in the position, that cost least together.

Before, and after, where casting the product's two inputs costs more than it saves:

    %4: bf16[2, 4] cpu = cast(self=%1)                       %3: fp32[2, 8] cpu = aten.mm.default(%1, %0)
    %5: bf16[4, 8] cpu = cast(self=%0)                       %6: bf16[2, 8] cpu = cast(self=%3)
    %3: bf16[2, 8] cpu = aten.mm.default(%4, %5)             return %6
    return %3

In the mode `exact` every value keeps its bits: calls stay as they are, and casts move through what only moves values,
to the side with fewer elements. In the mode `free` a low call may also run in fp32: never less precise than the policy.
What the program returns keeps its format. Refuses: what question.py leaves tied. Recurses into all blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from narrowcast.core.policy import Site
from narrowcast.errors import EnergyError
from narrowcast.formats import Format
from narrowcast.output.collector import collector_paused
from narrowcast.programs.placement import Optimum, minimise
from narrowcast.programs.placement.prices import CastBytes, Prices
from narrowcast.programs.placement.question import EXACT, FREE, Question, Read, find_choices
from narrowcast.programs.program import CastReturn, Edit, Follow, InsertCast, Program, Reread, Why

NAME = "place"
GIVEN = "given"
"""The method of a placement that is no optimum: the policy's own, or all high."""
Chooser = Callable[[Question], Optimum]


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """One call that could choose: the formats that it may have (the policy's first), its cost in each, and its format.

    saved: what the chosen format saves against the policy's, casts apart; negative where it enables other savings.
    """

    step: int
    op: str
    site: Site
    shape: tuple[int | str, ...] | None
    formats: tuple[Format, ...]
    costs: tuple[float, ...]
    chosen: Format

    @property
    def saved(self) -> float:
        """The policy's cost less the chosen one."""
        return self.costs[0] - self.costs[self.formats.index(self.chosen)]


@dataclass(frozen=True, slots=True)
class Placement:
    """What was chosen, the proof, and the totals in `unit` (`ns` or `bytes`).

    cost, policy_cost: of the placement and of the policy's own. bound: what no placement can be below. method: how that
    was proven; `gap` is 0 for a minimum cut. fixed: of the calls that had no choice, which is in all three.
    kept_bytes, policy_kept_bytes: what is predicted to be kept for the backward, where memory is what counts.
    """

    calls: tuple[PlacedCall, ...]
    unit: str
    cost: float
    policy_cost: float
    bound: float
    method: str
    fixed: float = 0.0
    kept_bytes: float | None = None
    policy_kept_bytes: float | None = None

    @property
    def gap(self) -> float:
        """(cost - bound) / cost."""
        return (self.cost - self.bound) / self.cost if self.cost else 0.0

    @property
    def raised(self) -> int:
        """How many calls have another format than the policy's."""
        return sum(call.chosen is not call.formats[0] for call in self.calls)


def place_formats(
    program: Program,
    prices: Prices,
    mode: str = FREE,
    ours: Set[int] | None = None,
    choose: Chooser = lambda question: minimise(question.energy),
    after_autograd: bool = False,
    dense: Set[int] | None = None,
) -> tuple[list[Edit], Placement]:
    """Return the edits that place a program whose casts are explicit, and the placement.

    ours: ids of the casts that may be placed again; None for all. choose: another choice than the optimum (all high, as
    the policy says), for comparison.
    """
    with collector_paused():
        question = find_choices(program, prices, mode, ours, after_autograd, dense)
        energy, optimum = question.energy, choose(question)
        policy = tuple(c.formats[0] for c in energy.choices)
        policy_cost = energy.evaluate(policy) or 0  # it never forbids itself
        if mode == EXACT and optimum.cost >= policy_cost:
            optimum = Optimum(policy, policy_cost, optimum.bound, optimum.method)  # nothing to gain: nothing moves
        fixed, calls = question.fixed, _calls(question, optimum, prices)
        cost, of_policy, bound = (n * energy.unit + fixed for n in (optimum.cost, policy_cost, optimum.bound))
        placement = Placement(calls, prices.unit, cost, of_policy, bound, optimum.method, fixed)
        return _edits(question, optimum.chosen), placement


def move_casts(program: Program, after_autograd: bool = False, dense: Set[int] | None = None) -> list[Edit]:
    """Return the edits that keep every bit and move the fewest bytes.

    dense: the values that a cast gives with the strides that they have; casts move past these only. None: all.
    """
    return place_formats(program, CastBytes(), EXACT, after_autograd=after_autograd, dense=dense)[0]


def as_the_policy(question: Question) -> Optimum:
    """Place every call in the policy's format."""
    return question.energy.given(tuple(c.formats[0] for c in question.energy.choices), GIVEN)


def as_high(question: Question) -> Optimum:
    """Place every call in the highest format that it may have."""
    highest = tuple(max(c.formats, key=lambda f: f.bits) for c in question.energy.choices)
    return question.energy.given(highest, GIVEN)


def as_given(formats: Sequence[str]) -> Chooser:
    """Return a chooser that gives each call the format of that name. EnergyError where the names do not fit."""

    def choose(question: Question) -> Optimum:
        choices = question.energy.choices
        chosen = tuple(f for c, name in zip(choices, formats, strict=False) for f in c.formats if f.name == name)
        if len(formats) != len(choices) or len(chosen) != len(choices) or question.energy.evaluate(chosen) is None:
            raise EnergyError("a placement that was chosen earlier", "the graph has other choices now")
        return question.energy.given(chosen, GIVEN)

    return choose


def _calls(question: Question, optimum: Optimum, prices: Prices) -> tuple[PlacedCall, ...]:
    placed = []
    for number, members in question.steps.items():
        formats = question.formats[number]
        for step in members:
            if step.op != "getitem" and step.computes:
                operands = [question.program.values[o.value] for o in step.operands]
                costs = tuple(prices.call(step, operands, f) for f in formats)
                chosen = optimum.chosen[number]
                placed.append(PlacedCall(step.id, step.op, step.site, step.value.shape, formats, costs, chosen))
    return tuple(sorted(placed, key=lambda call: call.step))


def _edits(question: Question, chosen: tuple[Format, ...]) -> list[Edit]:
    program = question.program
    why = Why(NAME, "it costs least so")
    edits: list[Edit] = []
    for number, variable in question.variable.items():
        step = program.steps[number]
        if step.value.format is not None and step.value.format is not chosen[variable]:
            edits.append(Follow(number, chosen[variable], why))
    for value, reads in question.reads.items():
        own = chosen[question.variable[value]] if value in question.variable else program.values[value].format
        for read in reads:
            need = read.reader.needs[question.energy.position(read.reader.choice, chosen)]
            if own is not None and need is not None:
                edits += _for_reader(value, own, read, need, why)
    return edits


def _for_reader(value: int, own: Format, read: Read, need: Format, why: Why) -> list[Edit]:
    """Return the edits that give one reader what it needs: nothing, the value itself, or a cast of it."""
    if read.step is None:  # a cast that is returned stays, idle perhaps
        return [] if read.cast is not None or need is own else [CastReturn(value, read.position, need, why)]
    if read.step.is_cast:
        return []  # it casts by itself
    if read.cast is not None and need is read.cast.value.format and need is not own:
        return []
    edits: list[Edit] = [Reread(read.step.id, read.position, value, why)] if read.cast is not None else []
    if need is not own:
        edits.append(InsertCast(read.step.id, read.position, need, why))
    return edits
