"""One side of a comparison of two runs: a run, or those of all ranks, with each call at all module call indices as one
bundle; and which of its calls made a tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

from narrowcast.analysis.diff.pieces import Piece, is_whole, piece_of
from narrowcast.analysis.diff.repeated_steps import Key, keys_of, steps_of
from narrowcast.core.ledger.identity import BACKWARD, FORWARD, CallId
from narrowcast.core.ops import op_kind
from narrowcast.formats import FORMATS
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_records import CallRecord

WEIGHT_NAMES = frozenset(["weight", "mat2", "other"])
"""Arguments that may be a weight, if they have few dimensions and no call made them."""
_NAMED = ("weight", "bias", "running_mean", "running_var")
_SCALED = "aten.mul.Scalar"
_READ = ("input", "mat1", "batch1", "query", "self")
"""The main input of a product or a norm, by the names of different ops; `self` of addmm is the bias."""


@dataclass(frozen=True, slots=True)
class RankCall:
    """A call of one rank's run."""

    rank: int
    call: CallRecord


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """A call at all module call indices, and on all ranks. module_calls: by that index, and in each the ranks
    that made the call.

    elements, columns, low, high: of the first result, over all module calls and ranks. weight: of the first module
    call, if there is one; read: the number of its main input, on the first rank.
    """

    position: int
    module_calls: tuple[tuple[RankCall, ...], ...]
    elements: int
    columns: int
    low: float
    high: float
    weight: Piece | None = None
    read: int = -1
    family: str = ""
    call: CallRecord = field(init=False)
    """The first of its calls, on the first rank that made it, without its rank; and its identity, and module."""
    id: CallId = field(init=False)
    path: str = field(init=False)

    def __post_init__(self) -> None:
        """Look these up once: pairs of calls are compared by the million."""
        call = self.first.call
        for name, value in (("call", call), ("id", call.id), ("path", call.id.module_path)):
            object.__setattr__(self, name, value)

    @property
    def first(self) -> RankCall:
        """The first of its calls, on the first rank that made it."""
        return self.module_calls[0][0]

    @property
    def is_loss(self) -> bool:
        """Whether it is a call of a forward that returns one number."""
        return self.id.direction == FORWARD and self.elements == sum(map(len, self.module_calls))


def read_name(call: CallRecord) -> str:
    """Return the name of a call's main input; empty for one that reads no tensor."""
    names = [name for name, _ in call.inputs]
    return next((name for name in _READ if name in names), names[0] if names else "")


def has_bias(call: CallRecord) -> bool:
    """Return whether a call of a product adds a bias, which addmm and baddbmm name `self`."""
    names = {name for name, _ in call.inputs}
    return "bias" in names or len(names & {"self", "mat1", "batch1"}) == 2


def read_by(call: CallRecord) -> int | None:
    """Return the number of a call's main input."""
    return dict(call.inputs).get(read_name(call))


class Side:
    """Runs of one process each, without casts, since each call has the formats in which it computes."""

    def __init__(self, runs: Sequence[Run], in_steps: bool = True) -> None:
        """in_steps: the calls of a loop outside of modules are those of its steps, as a cell's or a decoder's are."""
        self.runs, self._in_steps, self.has_steps = tuple(runs), in_steps, False
        self._pieces: dict[tuple[int, int], Piece] = {}
        self._makers: list[dict[int, CallRecord]] = [{} for _ in runs]
        for makers, run in zip(self._makers, runs, strict=True):
            for call in run.calls:
                for _, number in call.outputs:
                    makers.setdefault(number, call)
        self.bundles = self._bundled()
        self.casts_alone: dict[int, Bundle] = {}
        self.casts = sum(call.is_cast for run in runs for call in run.calls)

    def piece(self, rank: int, number: int) -> Piece:
        """Return a tensor of a rank's run."""
        key = (rank, number)
        if key not in self._pieces:
            self._pieces[key] = piece_of(self.runs[rank].tensors[number])
        return self._pieces[key]

    @cached_property
    def has_backward(self) -> bool:
        """Whether a call is of a backward."""
        return any(bundle.id.direction == BACKWARD for bundle in self.bundles)

    @cached_property
    def moves_weights(self) -> bool:
        """Whether an optimizer has stepped."""
        return bool(self._moved)

    def has_moved(self, number: int) -> bool:
        """Return whether a tensor of the first rank's run is a parameter after a step."""
        return number in self._after_steps

    @cached_property
    def _after_steps(self) -> frozenset[int]:
        first, numbers = self._moved, range(len(self.runs[0].tensors)) if self._moved else ()
        return frozenset(n for n in numbers if n not in first and not first.isdisjoint(self._before(0, n)))

    @cached_property
    def _moved(self) -> frozenset[int]:
        """The numbers of the parameters that steps moved, before these."""
        return frozenset(row["before"] for row in self.runs[0].parameters.values() if "before" in row)

    def value(self, parameter: str) -> Piece:
        """Return the value of a parameter of the first rank's run, by its name: before any step, if there were some."""
        row = self.runs[0].parameters[parameter]
        return self.piece(0, row.get("before", row["value"]))

    def maker(self, rank: int, number: int) -> CallRecord | None:
        """Return the call that made a tensor, or wrote last into its memory; casts are skipped."""
        return next((call for call in self._makers_of(rank, number) if not call.is_cast), None)

    def place_in_maker(self, number: int) -> tuple[CallRecord, int] | None:
        """Return the call of the first rank's run that made a tensor, casts skipped, and that result's position."""
        for n in self._before(0, number):
            call = self._makers[0].get(n)
            if call is not None and not call.is_cast:
                return call, [result for _, result in call.outputs].index(n)
        return None

    def origin(self, rank: int, number: int) -> int:
        """Return the tensor that another is, before casts and what was written to its memory."""
        return list(self._before(rank, number))[-1]

    def _makers_of(self, rank: int, number: int) -> Iterator[CallRecord]:
        return (call for n in self._before(rank, number) if (call := self._makers[rank].get(n)) is not None)

    def _before(self, rank: int, number: int) -> Iterator[int]:
        """Yield the number of a tensor, of what it was cast from, and of what was in its memory before."""
        seen: set[int] = set()
        while number >= 0 and number not in seen:
            seen.add(number)
            yield number
            call = self._makers[rank].get(number)
            is_cast = call is not None and call.is_cast and call.inputs
            number = call.inputs[0][1] if call and is_cast else self.runs[rank].tensors[number].lies_in

    def are_whole(self, numbers: Iterable[int]) -> bool:
        """Return whether some of these tensors were cast from whole numbers or flags."""
        return any(is_whole(self.runs[0].tensors[n].format) for number in numbers for n in self._before(0, number))

    def wrote_a_part(self, maker: Bundle, numbers: Sequence[int]) -> bool:
        """Return whether the call that wrote to tensors last wrote in place, and to fewer elements than they have."""
        writes = maker.id.op.split(".")[1].endswith("_")
        return writes and any(self.piece(0, n).elements > maker.elements for n in numbers)

    def strange_casts(self, numbers: Iterable[int]) -> list[CallRecord]:
        """Return casts that round to formats in which no call of the run computes, between these tensors and the calls
        behind.
        """
        casts = [call for n in numbers for call in takewhile(_is_whole_cast, self._makers_of(0, n))]
        formats = [[self.runs[0].tensors[n].format for _, n in (call.inputs[0], call.outputs[0])] for call in casts]
        return [
            call
            for call, (src, dst) in zip(casts, formats, strict=True)
            if dst in self._strange and not (src in FORMATS and FORMATS[src].epsilon >= FORMATS[dst].epsilon)
        ]

    @cached_property
    def _strange(self) -> frozenset[str]:
        calls = [call for call in self.runs[0].calls if not call.is_cast]
        return frozenset(FORMATS).difference(*(call.computes.split(",") for call in calls))

    def by_itself(self, cast: CallRecord) -> Bundle:
        """Return a cast as a bundle, which has no partner."""
        if id(cast) not in self.casts_alone:
            self.casts_alone[id(cast)] = self._bundle(len(self.bundles), {1: [RankCall(0, cast)]})
        return self.casts_alone[id(cast)]

    def with_bias(self, placed: RankCall) -> int:
        """Return the number of a product's result, or if a call that reads it adds its bias, that of the sum."""
        product = placed.call.outputs[0][1]
        return product if has_bias(placed.call) else self._with_bias.get((placed.rank, product), product)

    @cached_property
    def _with_bias(self) -> dict[tuple[int, int], int]:
        """By rank and number of a tensor to which a sum adds a bias: the number of the first such sum."""
        sums: dict[tuple[int, int], int] = {}
        for rank, run in enumerate(self.runs):
            for call in run.calls:
                read = {number for _, number in call.inputs} if op_kind(call.id.op).name == "add" else ()
                for product in read:
                    if all(self._is_bias(rank, number) for number in read if number != product):
                        elements = run.tensors[product].elements
                        same = [n for n in self._before(rank, product) if run.tensors[n].elements == elements]
                        for number in same:  # it may be read as a view
                            sums.setdefault((rank, number), call.outputs[0][1])
        return sums

    def _is_bias(self, rank: int, number: int) -> bool:
        """Return whether a tensor is a vector that no call made but steps, or one times a number (as of addmm)."""
        *_, first = self._before(rank, number)
        maker = self._makers[rank].get(first)
        if maker is not None and maker.id.op == _SCALED and len(maker.inputs) == 1:
            return self._is_bias(rank, maker.inputs[0][1])
        return maker is None and sum(size > 1 for size in self.runs[rank].tensors[number].shape) == 1

    def is_given(self, placed: RankCall, name: str) -> bool:
        """Return whether an argument is a weight or a buffer: no call made it, and it has few dimensions. One that only
        a backward reads is neither: autograd makes it unobserved.
        """
        number = dict(placed.call.inputs).get(name, -1)
        if number < 0 or self.maker(placed.rank, number) is not None:
            return False
        if placed.call.id.direction == BACKWARD and self.read_forward.isdisjoint(self._before(placed.rank, number)):
            return False
        dimensions = len(self.runs[placed.rank].tensors[number].shape)
        return name in _NAMED or (name in WEIGHT_NAMES and dimensions <= 2)

    @cached_property
    def read_forward(self) -> frozenset[int]:
        """The numbers of the tensors that the calls of the first rank's forward read."""
        calls = [call for call in self.runs[0].calls if call.id.direction == FORWARD]
        return frozenset(number for call in calls for _, number in call.inputs)

    @cached_property
    def by_path(self) -> dict[str, list[Bundle]]:
        """The bundles of each module, in order."""
        by_path: dict[str, list[Bundle]] = {}
        for bundle in self.bundles:
            by_path.setdefault(bundle.path, []).append(bundle)
        return by_path

    def _bundled(self) -> list[Bundle]:
        growing: dict[Key, dict[int, list[RankCall]]] = {}
        for rank, run in enumerate(self.runs):
            calls = [call for call in run.calls if not call.is_cast]
            weights = [self._weights_of(RankCall(rank, call)) for call in calls] if self._in_steps else []
            steps = steps_of(calls, weights)
            self.has_steps |= bool(steps)
            for call, (key, module_call) in zip(calls, keys_of(calls, steps), strict=True):
                growing.setdefault(key, {}).setdefault(module_call, []).append(RankCall(rank, call))
        return [self._bundle(n, by_turn) for n, by_turn in enumerate(growing.values())]

    def divides(self, other: Side) -> bool:
        """Return whether its steps divide what the other computes at once: results are as large put together, not one
        by one. Those of an iteration, each of the whole state, are.
        """
        sizes = Counter(bundle.elements for bundle in other.bundles)
        several = [bundle for bundle in self.bundles if bundle.elements > len(bundle.module_calls) > 1]  # no scalars
        together = sum(bundle.elements in sizes for bundle in several)
        return together > sum(bundle.elements // len(bundle.module_calls) in sizes for bundle in several)

    def _weights_of(self, placed: RankCall) -> tuple[int, ...]:
        """Return the numbers of weights and buffers that a call reads, before casts, without scalars."""
        tensors = self.runs[placed.rank].tensors
        read = [n for name, n in placed.call.inputs if self.is_given(placed, name) and tensors[n].shape]
        return tuple(self.origin(placed.rank, number) for number in read)

    def _bundle(self, position: int, by_turn: dict[int, list[RankCall]]) -> Bundle:
        module_calls = tuple(tuple(placed) for _, placed in sorted(by_turn.items()))
        results = [self.piece(p.rank, p.call.outputs[0][1]) for ranks in module_calls for p in ranks if p.call.outputs]
        first = module_calls[0][0]
        weight = next(
            (name for name, _ in first.call.inputs if name in WEIGHT_NAMES and self.is_given(first, name)), ""
        )
        return Bundle(
            position, module_calls, sum(r.elements for r in results), results[0].columns if results else 0,
            min((r.low for r in results), default=0.0), max((r.high for r in results), default=0.0),
            self._weight(first, weight), -1 if (read := read_by(first.call)) is None else read,
            op_kind(first.call.id.op).family,
        )  # fmt: skip

    def _weight(self, placed: RankCall, name: str) -> Piece | None:
        """Return the weight, if its values distinguish it from others."""
        if not name:
            return None
        piece = self.piece(placed.rank, dict(placed.call.inputs)[name])
        return piece if piece.elements >= 16 and piece.low < piece.high and piece.format in FORMATS else None


def _is_whole_cast(call: CallRecord) -> bool:
    """Return whether it is a cast of which both tensors are known: one that vmap maps has none."""
    return bool(call.is_cast and call.inputs and call.outputs)
