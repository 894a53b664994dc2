"""Which calls of a program may choose their format, and what flows between them: the energy of its placement.

A call may choose if it is on the allow list of ops/facts.toml and nothing ties it. Under the policy a low call may also
run in fp32. What only moves values (a view, cat, gather, relu) may have any format that keeps the bits its readers are
to have. In-place calls have the format of what they write to. Values in which loops and branches meet keep theirs.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from functools import partial

from narrowcast.core.ops import POINTWISE, op_kind
from narrowcast.formats import Format, fp32, is_exact
from narrowcast.programs.placement import FIXED, Choice, Energy, Flow, Reader
from narrowcast.programs.placement.prices import Prices, ValuePrice, with_costs
from narrowcast.programs.program import CAST, Block, Memories, Operand, Program, Step, Value, Writes

EXACT, FREE = "exact", "free"
TRIPS = 10
"""How often a loop's body is taken to run, where nothing says."""
_UNITS = 2**28  # costs are scaled so that all together are at most this


Priced = tuple[Flow, ValuePrice, float]
"""A flow without its costs, these, and how often it runs."""


@dataclass(frozen=True, slots=True)
class Read:
    """Who reads a value: the step (None: the program returns it), the operand, through which cast, in which format."""

    step: Step | None
    position: int
    cast: Step | None
    reader: Reader


@dataclass(slots=True)
class Question:
    """A program's energy with what its numbers represent.

    variable: number of the choice of each step that has one. formats: the formats of each choice, the policy's first.
    reads: by value. casts: those that are taken out and placed again, by id. steps: of each choice. fixed: what the
    calls without a choice cost, in the prices' unit.
    """

    program: Program
    energy: Energy
    variable: dict[int, int]
    formats: list[tuple[Format, ...]]
    reads: dict[int, list[Read]]
    casts: dict[int, Step]
    steps: dict[int, list[Step]] = field(default_factory=dict)
    fixed: float = 0.0


def find_choices(
    program: Program,
    prices: Prices,
    mode: str,
    ours: Set[int] | None = None,
    after_autograd: bool = False,
    dense: Set[int] | None = None,
) -> Question:
    """Return the question of placing a program whose casts are explicit, with its energy.

    mode: `exact`, in which calls keep their formats and casts move where every bit is kept (before autograd only where
    no gradient flows); `free`, in which calls may also run higher. ours: ids of the casts that may be placed again;
    None for all of them. dense: in the mode `exact`, the values past which casts may move (None: all).
    """
    return _Finder(program, prices, mode, ours, after_autograd, dense).run()


@dataclass
class _Finder:
    program: Program
    prices: Prices
    mode: str
    ours: Set[int] | None
    after_autograd: bool
    dense: Set[int] | None

    def __post_init__(self) -> None:
        program, ours = self.program, self.ours
        self.values, self.steps = program.values, program.steps
        self.often: dict[int, int] = {}  # how often each step runs
        self.home: dict[int, Block] = {}
        self.writes: dict[int, Writes] = {}
        self.pinned: set[int] = set()
        self.returned: dict[int, list[int]] = {}  # the positions of each value among what is returned
        for position, value in enumerate(program.body.returns):
            self.returned.setdefault(value, []).append(position)
        self.readers: dict[int, list[tuple[Step, int]]] = {}
        self.memories = Memories()
        self._survey(program.body, 1)
        self.written = {self.memories.of(o.value) for s in self.steps.values() for o in s.operands if o.written}
        outside = {self.memories.of(v.id) for v in program.body.parameters}
        outside |= {self.memories.of(v) for v in self.returned if v not in self.steps or not self.steps[v].is_cast}
        for cast in program.casts():  # a copy that must be one in any case: idle, it would be one for nothing
            source = cast.operands[0].value
            if self._is_written(cast.id) or (cast.id in self.returned and self.memories.of(source) in outside):
                self.pinned.add(source)
        self.casts = {s.id: s for s in program.casts() if (ours is None or s.id in ours) and self._is_free_cast(s)}
        given = {cast.value.format for cast in self.casts.values()}
        self.lows = sorted((f for f in given if f is not None and f.bits < fp32.bits), key=lambda f: f.name)
        self.variable: dict[int, int] = {}
        self.rounded: set[int] = set()  # what a cast has rounded, and moved
        self.formats: list[tuple[Format, ...]] = []
        self.members: list[list[Step]] = []

    # -- what there is

    def _survey(self, block: Block, often: int) -> None:
        self.writes[id(block)] = Writes(block)
        if block is not self.program.body:
            self.pinned.update(block.returns)
        for step in block.steps:
            self.often[step.id], self.home[step.id] = often, block
            for position, operand in enumerate(step.operands):
                self.readers.setdefault(operand.value, []).append((step, position))
            maker = self.steps.get(step.operands[0].value) if step.op == "getitem" else None
            makes_new = maker is not None and not maker.aliases  # a parameter's elements may share any memory
            for position in () if makes_new else step.aliases:
                self.memories.join(step.id, step.operands[position].value)
            loops = "loop" in step.op.lower()
            for inner in step.blocks:
                self._survey(inner, often * TRIPS if loops else often)

    def _is_written(self, value: int) -> bool:
        return self.memories.of(value) in self.written

    def _is_free_cast(self, cast: Step) -> bool:
        """Return whether a cast may be taken out: it is no source of another one, nothing writes to its copy, and every
        reader of it is in its block.
        """
        if self.program.open_region(cast) is not None or cast.id in self.pinned:
            return False
        source = self.values[cast.operands[0].value]
        if source.format is None or self._is_written(cast.id) or self._is_written(source.id):
            return False
        home = self.home[cast.id]
        if any(s.op == CAST or self.home[s.id] is not home for s, _ in self.readers.get(cast.id, ())):
            return False
        return self.mode != EXACT or self.after_autograd or not (cast.value.gradient and cast.grad_mode)

    # -- choices

    def run(self) -> Question:
        for step in self.steps.values():
            formats = self._choice(step)
            if formats:
                self.variable[step.id] = len(self.formats)
                self.formats.append(formats)
                self.members.append([step])
        self._join_elements()
        self._join_written()
        pairs = zip(self.formats, self.members, strict=True)
        costs = [[sum(self._cost(s, f) for s in members) for f in formats] for formats, members in pairs]
        reads: dict[int, list[Read]] = {}
        flows: list[Priced] = []
        for value in self.values.values():
            if value.id not in self.casts and value.format is not None:
                reads[value.id] = self._reads(value)
                flows += self._flows(value, value.format, reads[value.id])
        energy = _in_units(self.formats, costs, flows)
        steps = {n: members for n, members in enumerate(self.members) if members}
        left = (s for s in self.steps.values() if s.id not in self.variable and s.id not in self.casts)
        fixed = sum(self._cost(s, s.value.format or fp32) for s in left if not s.blocks)
        return Question(self.program, energy, self.variable, self.formats, reads, self.casts, steps, fixed)

    def _choice(self, step: Step) -> tuple[Format, ...]:
        """Return the formats that a step may have, the policy's first; none if it is tied."""
        kind, read, given = op_kind(step.op), [self.values[o.value] for o in step.operands], self._results(step)
        tied = step.blocks or step.given or step.id in self.pinned or "order" in step.effects
        tied = tied or self.program.open_region(step) is not None
        if not kind.is_known or tied or self._would_show([*read, step.value], given):
            return ()
        inputs, results = ([v.format for v in values if v.format is not None] for values in (read, given))
        if not inputs or not {*inputs, *results} <= {fp32, *self.lows}:
            return ()
        if kind.commutes and not kind.in_place and results and len({*inputs, *results}) == 1:
            if inputs[0] is fp32:
                return (fp32, *self.lows)
            is_rounded = self.mode == EXACT and any(map(self._is_rounded, step.operands))
            if is_rounded:
                self.rounded.update(value.id for value in (step.value, *given))
            return () if is_rounded and any(map(self._is_cast_again, given)) else (inputs[0], fp32)
        lows = {f for f in inputs if f is not fp32}
        runs_low = len(lows) == 1 and lows.issuperset(results[:1])
        return (*lows, fp32) if runs_low and self.mode != EXACT else ()

    def _is_rounded(self, operand: Operand) -> bool:
        """Return whether a low value comes from a cast that rounds, by calls that only move it."""
        maker = self.steps.get(operand.value)
        if operand.value in self.rounded or maker is None or maker.op != CAST:
            return operand.value in self.rounded
        a, b = self.values[maker.operands[0].value].format, maker.value.format
        return a is None or b is None or not is_exact(a, b)

    def _is_cast_again(self, value: Value) -> bool:
        """Return whether a value is cast to another format: one that is wider would be cast to that in one step."""
        return any(s.op == CAST and s.value.format is not value.format for s, _ in self.readers.get(value.id, ()))

    def _would_show(self, values: list[Value], results: list[Value]) -> bool:
        """Return whether another format changes more than rounding: how gradients add up, or strides of results."""
        if self.mode == EXACT and not self.after_autograd and any(v.gradient for v in values):
            return True
        return self.dense is not None and any(v.id not in self.dense for v in (*values[:-1], *results))

    def _results(self, step: Step) -> list[Value]:
        """Return the step's value, or those taken from the tuple that it makes."""
        if step.value.shape is not None:
            return [step.value]
        elements = [s for s, _ in self.readers.get(step.id, ()) if s.op == "getitem"]
        return [s.value for s in sorted(elements, key=lambda s: s.constants)]

    def _join_elements(self) -> None:
        """Give elements of a tuple the choice of the call that makes it, if they have its format under the policy."""
        for step in self.steps.values():
            if step.op == "getitem" and step.operands[0].value in self.variable:
                variable = self.variable[step.operands[0].value]
                if step.value.format is self.formats[variable][0]:
                    self.variable[step.id] = variable
                    self.members[variable].append(step)

    def _join_written(self) -> None:
        """Give all values that share memory that is written to one format: one choice for all, or none."""
        groups: dict[int, list[int]] = {}
        for number in self.values:
            if self._is_written(number):
                groups.setdefault(self.memories.of(number), []).append(number)
        for group in groups.values():
            variables = [self.variable.get(number) for number in group]
            known = list(dict.fromkeys(v for v in variables if v is not None))
            formats = {self.formats[v] for v in known}
            if None in variables or len(formats) != 1:
                for variable in known:
                    self._join(variable, None)
                continue
            for variable in known[1:]:
                self._join(variable, known[0])

    def _join(self, variable: int, into: int | None) -> None:
        members, self.members[variable] = self.members[variable], []
        for step in members:
            if into is None:
                del self.variable[step.id]
            else:
                self.variable[step.id] = into
                self.members[into].append(step)

    def _cost(self, step: Step, format: Format) -> float:
        if step.op == "getitem":
            return 0.0
        operands = [self.values[o.value] for o in step.operands]
        return self.prices.call(step, operands, format) * self.often[step.id]

    # -- values

    def _reads(self, value: Value) -> list[Read]:
        reads: list[Read] = []
        through: list[tuple[int, Step | None]] = [(value.id, None)]
        through += [(s.id, s) for s, _ in self.readers.get(value.id, ()) if s.id in self.casts]
        for number, cast in through:
            for step, position in self.readers.get(number, ()):
                if step.id not in self.casts and step.op != "getitem":
                    reads.append(Read(step, position, cast, self._reader(value, step, position, cast)))
            for position in self.returned.get(number, ()):
                reads.append(Read(None, position, cast, self._reader(value, None, position, cast)))
        return reads

    def _flows(self, value: Value, own: Format, reads: list[Read]) -> list[Priced]:
        """Return one flow for each time and block in which the value's casts can be shared, and how often it runs."""
        variable = self.variable.get(value.id, FIXED)
        formats = self.formats[variable] if variable != FIXED else (own,)
        wanted = dict.fromkeys([*formats, *(n for r in reads for n in r.reader.needs if n is not None)])
        groups: dict[tuple[str | int, int], list[Read]] = {}
        for read in reads:
            groups.setdefault(self._when(value, read), []).append(read)
        flows: list[Priced] = []
        maker = self.steps.get(value.id)
        rounded = frozenset(f for f in formats if not is_exact(own, f))
        for group in groups.values():
            price = self.prices.value(value, maker, [read.step for read in group], tuple(wanted))
            first = group[0].step  # the others are in its block
            often = self.often[first.id] if first is not None else 1
            readers = tuple(read.reader for read in group)
            flows.append((Flow(variable, formats, readers, rounded=rounded), price, often))
        return flows

    def _when(self, value: Value, read: Read) -> tuple[str | int, int]:
        """Return a key of when a cast is made: one per block and write in between, or per returned or written value."""
        if read.step is None:
            return ("returned", read.position)
        if read.step.is_cast and (read.step.id in self.returned or self._is_written(read.step.id)):
            return ("kept", read.step.id)
        block = id(self.home[read.step.id])
        return (block, self.writes[block].count_before(value.id, read.step.id))

    def _reader(self, value: Value, step: Step | None, position: int, cast: Step | None) -> Reader:
        stores = self.prices.stores(step)
        maker = step if step is not None and step.op == CAST else cast  # a user's cast, which stays, reads by itself
        format = value.format if maker is None else maker.value.format
        others = [low for low in self.lows if low is not format]  # through one of these it would be rounded twice
        keeps = value.format is fp32 and bool(format is fp32 or others)
        if step is None or step.id not in self.variable:
            takes_any = maker is None and step is not None and self.mode != EXACT and _promotes(step, position, format)
            return Reader(FIXED, (None if takes_any else format,), stores, keeps)
        variable = self.variable[step.id]
        needs = (format, *self.formats[variable][1:])  # under another format than the policy's it takes that one
        return Reader(variable, needs, stores, keeps)


def _promotes(step: Step, position: int, format: Format | None) -> bool:
    """Return whether a call with operands of several formats promotes this low one itself, and so takes it in any."""
    if format is fp32 or step.operands[position].written or step.given:
        return False
    return op_kind(step.op).family == POINTWISE and step.value.format is fp32


def _in_units(formats: list[tuple[Format, ...]], costs: list[list[float]], flows: list[Priced]) -> Energy:
    """Return an energy with the costs as whole numbers that fit the solver."""
    total = sum(sum(c) for c in costs)
    for _, price, often in flows:
        total += sum((*price.casts.values(), *price.reads.values(), *price.stores.values())) * often
    unit = max(total / _UNITS, 1.0)

    def whole(cost: float, often: float = 1.0) -> int:
        return round(cost * often / unit)

    choices = tuple(Choice(f, tuple(map(whole, c))) for f, c in zip(formats, costs, strict=True))
    scaled = (with_costs(flow, price, partial(whole, often=often)) for flow, price, often in flows)
    return Energy(choices, tuple(scaled), unit)
