"""Placement on random programs: brute force, an independent count of what the placed program costs, and its bits."""

import itertools
import random
import struct
import sys
import time
from pathlib import Path

import pytest

import narrowcast as nc
from narrowcast.core.ops import op_kind
from narrowcast.formats import FORMATS, bf16, fp32
from narrowcast.programs.passes import (
    AFTER_AUTOGRAD,
    BEFORE_AUTOGRAD,
    assign_casts,
    drop_casts,
    move_casts,
    share_casts,
)
from narrowcast.programs.placement import Optimum, minimise
from narrowcast.programs.placement.memory import KeptBytes, Smallest, place_within
from narrowcast.programs.placement.place import as_high, as_the_policy, place_formats
from narrowcast.programs.placement.prices import CastBytes, ValuePrice
from narrowcast.programs.placement.question import EXACT, FREE, TRIPS, find_choices
from narrowcast.programs.program import Block, Operand, Program, Step, Value, apply_edits, verify

sys.path.insert(0, str(Path(__file__).parent))
from program_text import parse_program

NATIVE = nc.Policy.native("cpu")
REGION = parse_program(
    "program p\nregion 0: cpu bf16 enabled cached session 0 policy native\nblock main() {\n  return\n}\n"
).regions


class RandomPrices:
    """Whole numbers that depend on the call, the value and the formats."""

    unit = "ns"

    def __init__(self, seed, program=None):
        self.seed = seed
        self.steps = program.steps if program is not None else {}

    def draw(self, *key):
        return random.Random(f"{self.seed} {key}").randint(0, 50)

    def call(self, step, operands, format):
        return self.draw("call", step.id, format.name)

    def value(self, value, maker, readers, formats):
        return ValuePrice({(a, b): self.cast(value.id, a, b) for a in formats for b in formats if a is not b})

    def cast(self, number, src, dst):
        while number in self.steps and self.steps[number].is_cast:  # equal casts are one, whatever their number
            number = self.steps[number].operands[0].value
        return self.draw("cast", number, src.name, dst.name)

    def stores(self, reader):
        return False


KINDS = ("mm", "mm", "exp", "relu", "t", "cat", "add", "pin", "cast", "write", "loop")


def random_program(seed, length, lows=("bf16",), results=2, kinds=KINDS, near=0):
    """mm (lowered by the policy), calls that follow, views, cat, additions that promote, ops that nobody knows, the
    user's own casts to these low formats and back, and sometimes a loop that reads what is outside. near: a call reads
    one of the last so many values; 0 for any.
    """
    rng = random.Random(seed)
    parameters = tuple(Value(n, rng.choice(["fp32", "fp32", "bf16"]), (4, 4), "cpu") for n in range(3))
    ids = itertools.count(3)

    def steps_of(values, count, depth):
        steps = []
        for _ in range(count):
            what = rng.choice(kinds)
            a, b = rng.choice(values[-near:]), rng.choice(values)
            number = next(ids)
            if what == "loop":
                if depth:
                    continue
                inner = steps_of(list(values), rng.randint(1, 3), 1)
                blocks = (Block("body", (), tuple(inner), ()),)
                steps.append(Step(Value(number, "none"), "prim.Loop", (), blocks=blocks))
                continue
            one, two = (Operand("self", a.id),), (Operand("self", a.id), Operand("other", b.id))
            wide = a.type if a.type == b.type else "fp32"
            op, operands, kind, more = {
                "mm": ("aten.mm.default", (two[0], Operand("mat2", b.id)), "bf16", {"computes": True}),
                "exp": ("aten.exp.default", one, a.type, {"computes": True}),
                "relu": ("aten.relu.default", one, a.type, {"computes": True}),
                "t": ("aten.t.default", one, a.type, {"aliases": (0,)}),
                "cat": ("aten.cat.default", (Operand("tensors", a.id), Operand("tensors", b.id)), wide, {}),
                "add": ("aten.add.Tensor", two, wide, {"computes": True}),
                "pin": ("lib.pin.default", one, "fp32", {"computes": True}),
                "cast": ("cast", one, next(f for f in ((*lows[number % len(lows) :], "fp32")) if f != a.type), {}),
                "write": ("aten.relu_.default", (Operand("self", a.id, True),), a.type, {"aliases": (0,)}),
            }[what]
            if what == "write" and (a.id < 3 or depth):
                continue
            if what == "cat" and (a.type != b.type or a.type == "fp16"):  # native refuses a third format
                continue
            region = None if what == "cast" else 0
            made = Value(number, kind, (4, 4), "cpu")
            steps.append(Step(made, op, operands, region=region, **more))
            values.append(made)
        return steps

    values = list(parameters)
    steps = steps_of(values, length, 0)
    made = {s.id for s in steps if s.op == "cast"}  # a cast that is returned has memory of its own
    values = [v for v in values if v.id not in made]
    returns = tuple(v.id for v in rng.sample(values, min(results, len(values))))
    program = Program("p", Block("main", parameters, tuple(steps), returns), REGION)
    assigned = apply_edits(program, assign_casts(program, {"native": NATIVE}))
    for _ in range(length):
        assigned = apply_edits(assigned, drop_casts(assigned, after_autograd=True))
    verify(assigned)
    return assigned, frozenset(assigned.steps) - frozenset(program.steps)


def finished(program, edits):
    """The program with these edits, its casts shared and cleaned up."""
    made = apply_edits(program, edits)
    verify(made)
    for _ in range(3):
        made = apply_edits(made, share_casts(made, after_autograd=True))
        made = apply_edits(made, drop_casts(made, after_autograd=True))
    verify(made)
    return made


def steps_and_times(block, often=1):
    """Every step with how often it is taken to run: those of loops more often."""
    for step in block.steps:
        for inner in step.blocks:
            yield from steps_and_times(inner, often * TRIPS)
        yield step, often


def count_cost(placed, prices, question):
    """What a placed program costs, read off its steps alone."""
    total = 0
    for step, often in steps_and_times(placed.body):
        if step.is_cast:
            source = placed.values[step.operands[0].value]
            maker = source.id
            while maker in placed.steps and placed.steps[maker].is_cast:
                maker = placed.steps[maker].operands[0].value
            total += often * prices.cast(maker, source.format, step.value.format)
        elif step.id in question.variable:
            total += often * prices.call(step, (), step.value.format)
    return total


@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
def test_no_placement_is_cheaper(block):
    """Brute force over all placements of 1,200 random programs; and energy is what the placed program costs."""
    sizes = 0
    for seed in range(block * 200, block * 200 + 200):
        program, ours = random_program(seed, 3 + seed % 9)
        prices = RandomPrices(seed, program)
        question = find_choices(program, prices, FREE, ours)
        energy = question.energy
        if len(energy.choices) > 12:
            continue
        sizes = max(sizes, len(energy.choices))
        best, cheapest = None, None
        for chosen in itertools.product(*(c.formats for c in energy.choices)):
            cost = energy.evaluate(chosen)
            if cost is not None and (best is None or cost < best):
                best, cheapest = cost, chosen
        found = minimise(energy)
        assert found.cost == found.bound == best, seed
        for chosen in (found.chosen, cheapest, tuple(c.formats[0] for c in energy.choices)):
            given = Optimum(chosen, energy.evaluate(chosen), 0, "given")
            edits, _ = place_formats(program, prices, ours=ours, choose=lambda _, given=given: given)
            placed = finished(program, edits)
            assert count_cost(placed, prices, question) == energy.evaluate(chosen), seed
    assert sizes > 8


def test_what_comes_out_keeps_its_formats():
    """Under every goal the program returns the formats that the policy gives, and nothing pinned has moved."""
    for seed in range(120):
        program, ours = random_program(seed, 10)
        for choose in (lambda q: minimise(q.energy), as_high, as_the_policy):
            edits, _ = place_formats(program, RandomPrices(seed), ours=ours, choose=choose)
            placed = finished(program, edits)
            pairs = zip(program.body.returns, placed.body.returns, strict=True)
            assert all(program.values[a].type == placed.values[b].type for a, b in pairs)
            for step in program.steps.values():
                if step.op == "lib.pin.default":
                    assert placed.steps[step.id].value == step.value
                    before, after = program.values[step.operands[0].value], placed.steps[step.id].operands[0].value
                    assert placed.values[after].type == before.type


# -- bits --------------------------------------------------------------------------------------------------------------


def rounded(number, name):
    """A Python float in a format, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", number))[0]
    if name == "fp16":
        return struct.unpack("<e", struct.pack("<e", number))[0]
    if name == "bf16":
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0]


def run(program, seed):
    """The program on numbers: one number per value is enough; every call rounds to its result's format."""
    rng = random.Random(seed)
    memory = {v.id: [rounded(rng.uniform(-2, 2), v.type)] for v in program.body.parameters}

    def walk(block):
        for step in block.steps:
            for inner in step.blocks:
                walk(inner)
            if not step.operands:
                continue
            read = [memory[o.value][0] for o in step.operands]
            name = step.op.split(".")[1] if "." in step.op else step.op
            if name == "t":
                memory[step.id] = memory[step.operands[0].value]
                continue
            if name == "relu_":
                memory[step.operands[0].value][0] = max(read[0], 0.0)
                memory[step.id] = memory[step.operands[0].value]
                continue
            made = {
                "mm": lambda r: r[0] * r[1] + 0.3, "exp": lambda r: r[0] * 1.7, "relu": lambda r: max(r[0], 0.0),
                "cat": lambda r: r[0] if r[0] != 0 else r[1], "add": sum, "pin": lambda r: r[0] * 0.9,
                "cast": lambda r: r[0],
            }[name](read)  # fmt: skip
            memory[step.id] = [rounded(made, step.value.type)]

    walk(program.body)
    return [memory[v][0] for v in program.body.returns]


MOVING = ("t", "relu", "cast", "cast", "add", "exp", "mm")


def test_moved_casts_keep_every_bit():
    """Casts move through views, cat and relu on 200 random programs: equal numbers, and never more bytes. What a cast
    of the user's rounds stays rounded for all that reads it, whatever format it is read in.
    """
    moved = 0
    for seed in range(200):
        more = {} if seed % 2 else {"lows": ("bf16", "fp16"), "results": 3, "kinds": MOVING, "near": 1}
        program, _ = random_program(seed, 4 + seed % 12, **more)
        before = finished(program, [])
        after = finished(before, move_casts(before, after_autograd=True))
        assert run(before, seed) == run(program, seed) == run(after, seed), seed
        assert cast_bytes(after) <= cast_bytes(before), seed
        moved += cast_bytes(after) < cast_bytes(before)
    assert moved > 12


def cast_bytes(program):
    """Bytes that casts read and write, those in loops as often as these are taken to run."""
    return sum(
        often * (program.values[step.operands[0].value].bytes + step.value.bytes)
        for step, often in steps_and_times(program.body)
        if step.is_cast
    )


def test_higher_formats_never_lose_bits():
    """Every read of a placed program gives at least the bits that the policy's gives: nothing is rounded on the way
    that the policy does not round.
    """
    for seed in range(160):
        program, ours = random_program(seed, 10)
        edits, _ = place_formats(program, RandomPrices(seed), ours=ours)
        placed = finished(program, edits)
        kept_before, kept_after = kept_bits(program), kept_bits(placed)
        for step in program.steps.values():
            if step.is_cast or step.op == "prim.Loop":
                continue
            pairs = zip(step.operands, placed.steps[step.id].operands, strict=True)
            for old, new in pairs:
                moves = op_kind(step.op).commutes  # may read what its own readers round anyway
                assert moves or kept_after[new.value] >= kept_before[old.value], (seed, step.id)


def kept_bits(program):
    """For each value the bits of the narrowest format on its way since it was computed."""
    found = {v.id: v.format.mantissa_bits for v in program.body.parameters}
    for step in program.steps.values():
        if step.value.format is None:
            continue
        own = step.value.format.mantissa_bits
        passes_on = step.is_cast or op_kind(step.op).commutes
        reads = [found[o.value] for o in step.operands if o.value in found]
        found[step.id] = min([own, *reads]) if passes_on else own
    return found


# -- single cases ------------------------------------------------------------------------------------------------------


def parse(body):
    return parse_program(f"program p\nregion 0: cpu bf16 enabled cached session 0 policy native\n{body}")


def test_a_cast_goes_to_the_side_with_fewer_elements():
    """Behind a gather of few rows it stays; in front of an expansion it goes."""
    expanded = parse(
        """block main(%0: fp32[4, 1] cpu, %1: bf16[8, 4] cpu) {
  %2: fp32[4, 8] cpu = aten.expand.default(self=%0) ~0
  %3: bf16[4, 8] cpu = cast(self=%2)
  %4: bf16[4, 4] cpu = aten.mm.default(self=%3, mat2=%1) computes
  return %4
}
"""
    )
    made = finished(expanded, move_casts(expanded))
    assert [(s.op, s.value.type, s.value.shape) for s in made.body.steps[:2]] == [
        ("cast", "bf16", (4, 1)), ("aten.expand.default", "bf16", (4, 8)),
    ]  # fmt: skip
    gathered = parse(
        """block main(%0: fp32[100, 8] cpu, %1: i64[2] cpu) {
  %2: fp32[2, 8] cpu = aten.embedding.default(weight=%0, indices=%1)
  %3: bf16[2, 8] cpu = cast(self=%2)
  return %3
}
"""
    )
    assert move_casts(gathered) == []


def test_nothing_moves_where_a_gradient_flows_before_autograd():
    """Gradients would add up elsewhere; after autograd it moves."""
    program = parse(
        """block main(%0: fp32[4, 1] cpu grad, %1: bf16[8, 4] cpu) {
  %2: fp32[4, 8] cpu grad = aten.expand.default(self=%0) ~0
  %3: bf16[4, 8] cpu grad = cast(self=%2)
  %4: bf16[4, 4] cpu grad = aten.mm.default(self=%3, mat2=%1) computes
  return %4
}
"""
    )
    assert move_casts(program) == place_formats(program, CastBytes(), EXACT)[0] == []
    assert move_casts(program, after_autograd=True)


def test_max_pooling_with_indices_does_not_commute():
    """Rounded values tie, and then another index is given."""
    program = parse(
        """block main(%0: fp32[4, 8] cpu) {
  %2: tuple = aten.max_pool2d_with_indices.default(self=%0) computes
  %3: fp32[2, 4] cpu = getitem(a0=%2) with "0" ~0
  %4: bf16[2, 4] cpu = cast(self=%3)
  return %4
}
"""
    )
    assert move_casts(program, after_autograd=True) == []


def chain(length):
    """Matmuls with a residual stream and normalisation between, as in a transformer."""
    rng = random.Random(0)
    parameters = (Value(0, "fp32", (64, 64), "cpu"), Value(1, "fp32", (64, 64), "cpu"))
    steps, stream = [], 0
    for number in range(2, length + 2, 5):
        a = Step(Value(number, "bf16", (64, 64), "cpu"), "aten.mm.default",
                 (Operand("self", stream), Operand("mat2", 1)), computes=True, region=0)  # fmt: skip
        b = Step(Value(number + 1, "bf16", (64, 64), "cpu"), "aten.gelu.default", (Operand("self", number),),
                 computes=True, region=0)  # fmt: skip
        c = Step(Value(number + 2, "bf16", (64, 64), "cpu"), "aten.t.default", (Operand("self", number + 1),),
                 aliases=(0,), region=0)  # fmt: skip
        d = Step(Value(number + 3, "bf16", (64, 64), "cpu"), "aten.mm.default",
                 (Operand("self", number + 2), Operand("mat2", 1)), computes=True, region=0)  # fmt: skip
        e = Step(Value(number + 4, "fp32", (64, 64), "cpu"), "aten.add.Tensor",
                 (Operand("self", stream), Operand("other", number + 3)), computes=True, region=0)  # fmt: skip
        steps += [a, b, c, d, e]
        stream = number + 4 if rng.random() < 0.9 else stream
    program = Program("p", Block("main", parameters, tuple(steps), (stream,)), REGION)
    assigned = apply_edits(program, assign_casts(program, {"native": NATIVE}))
    return assigned, frozenset(assigned.steps) - frozenset(program.steps)


@pytest.mark.slow
def test_twenty_thousand_calls_are_placed_with_a_certificate():
    """A graph of 20,000 calls in seconds, and proven: what is cut is what flows."""
    program, ours = chain(20_000)
    start = time.process_time()
    edits, placement = place_formats(program, RandomPrices(1), ours=ours)
    assert time.process_time() - start < 15  # the bound of 5 s is kept in benchmarks/placement.py
    assert placement.method == "minimum cut"
    assert placement.gap == 0
    assert placement.cost <= placement.policy_cost
    assert 0 < placement.raised < 20_000
    verify(apply_edits(program, edits))


def test_the_same_program_is_placed_alike():
    """Twice the same edits, in the same order."""
    program, ours = random_program(7, 12)
    first, second = (place_formats(program, RandomPrices(7), ours=ours)[0] for _ in range(2))
    assert first == second


# -- memory ------------------------------------------------------------------------------------------------------------


TRAINED = """block main(%0: fp32[64, 64] cpu grad, %1: fp32[64, 64] cpu grad weight) {
  %2: bf16[64, 64] cpu grad = aten.mm.default(self=%0, mat2=%1) computes in 0
  %3: bf16[64, 64] cpu grad = aten.mm.default(self=%2, mat2=%1) computes in 0
  %4: bf16[64, 64] cpu grad = aten.mm.default(self=%3, mat2=%1) computes in 0
  return %4
}
"""


class FastInFp32(CastBytes):
    """fp32 takes no time, bf16 some."""

    unit = "ns"

    def call(self, step, operands, format):
        return 100.0 if format is bf16 else 10.0

    def value(self, value, maker, readers, formats):
        return ValuePrice({(a, b): 1.0 for a in formats for b in formats if a is not b})


def test_memory_is_an_objective_and_a_limit():
    """Without a limit fp32 is fastest; the smallest keeps bf16 copies; a limit between takes a placement between."""
    program = parse(TRAINED)
    assigned = apply_edits(program, assign_casts(program, {"native": NATIVE}))
    ours = frozenset(assigned.steps) - frozenset(program.steps)
    kept = find_choices(assigned, KeptBytes(False), FREE, ours).energy

    def kept_bytes(choose):
        chosen = []
        place_formats(assigned, FastInFp32(), ours=ours, choose=lambda q: chosen.append(choose(q)) or chosen[0])
        return kept.evaluate(chosen[0].chosen) * kept.unit, chosen[0]

    most, fastest = kept_bytes(lambda q: minimise(q.energy))
    least, small = kept_bytes(Smallest(kept))
    assert set(fastest.chosen) == {fp32}
    assert least < most
    middle, between = kept_bytes(place_within(kept, int((least + most) / 2)))
    assert least <= middle <= (least + most) / 2
    assert fastest.cost <= between.cost <= small.cost
    assert between.bound == fastest.cost
    with pytest.raises(nc.errors.EnergyError, match="keeps"):
        kept_bytes(place_within(kept, int(least) - 1))
    for slowdown in (1.0, 2.0, 4.0, 1e9):  # fewest bytes in this many times the least time
        chooser = Smallest(kept, slowdown)
        size, found = kept_bytes(chooser)
        assert least <= size <= most and found.cost <= slowdown * fastest.cost
    assert size == least


def test_pipelines_have_what_their_names_say():
    """Cleaning up is the beginning of what runs before autograd; nothing in it places."""
    assert share_casts in BEFORE_AUTOGRAD
    assert move_casts not in BEFORE_AUTOGRAD
    assert len(AFTER_AUTOGRAD) > len(BEFORE_AUTOGRAD)
    assert {EXACT, FREE} == {"exact", "free"}
    assert set(FORMATS) >= {"fp32", "bf16"}


class Large(FastInFp32):
    """So much that costs are scaled for the solver."""

    def call(self, step, operands, format):
        return 1e9 * super().call(step, operands, format)

    def value(self, value, maker, readers, formats):
        return ValuePrice({(a, b): 1e9 for a in formats for b in formats if a is not b}, dict.fromkeys(formats, 2e9))


SCALED = """block main(%0: fp32[4, 4] cpu, %1: fp32[4, 4] cpu) {
  %2: bf16[4, 4] cpu = cast(self=%0)
  %3: bf16[4, 4] cpu = cast(self=%1)
  %4: bf16[4, 4] cpu = aten.mm.default(self=%2, mat2=%3) computes
  %5: bf16[4, 4] cpu = lib.op.default(self=%4) computes
  return %5
}
"""


def test_a_placement_s_totals_are_in_the_prices_unit():
    """However the solver's costs are scaled; calls that cannot choose are in all of them."""
    edits, placed = place_formats(parse(SCALED), Large())
    # three values are read for 2 each; raised, the product is cast for the call that has no choice
    calls, values = 100.0 + 10.0, 8.0
    assert placed.fixed == pytest.approx(100e9)
    assert placed.cost == pytest.approx(placed.bound) == pytest.approx((calls + values + 1) * 1e9, rel=1e-6)
    assert placed.policy_cost == pytest.approx((200 + values + 2) * 1e9, rel=1e-6)
    assert placed.method == "minimum cut" and placed.gap == 0 and placed.unit == "ns"
    assert [(c.step, c.op, c.formats, c.chosen, c.saved) for c in placed.calls] == [
        (4, "aten.mm.default", (bf16, fp32), fp32, 90e9)
    ]
    assert edits


def test_in_the_mode_exact_nothing_moves_that_gains_nothing():
    """An equal placement is no reason; the policy's own is the answer then."""
    program = parse(SCALED)
    edits, placed = place_formats(program, CastBytes(), EXACT)
    assert edits == [] and placed.cost == placed.policy_cost == placed.bound
    behind = """block main(%0: fp32[4, 4] cpu) {
  %1: bf16[4, 4] cpu = cast(self=%0)
  %2: bf16[4, 4] cpu = aten.t.default(self=%1) ~0
  %3: bf16[4, 4] cpu = aten.mm.default(self=%2, mat2=%2) computes
  return %3
}
"""
    assert move_casts(parse(behind)) == []
    assert [c.step for c in place_formats(parse(behind), CastBytes())[1].calls] == [3]  # a view is no call
    assert place_formats(program, Large(), choose=as_the_policy)[1].raised == 0
    assert place_formats(program, Large(), choose=as_high)[1].raised == 1


def readers_of(body, number=0, mode=FREE):
    """Who reads a value: the formats that each of them needs."""
    question = find_choices(parse(body), CastBytes(), mode)
    return [read.reader.needs for read in question.reads[number]]


@pytest.mark.parametrize(
    ("step", "needs"),
    [
        ("%2: fp32[4] cpu = aten.add.Tensor(self=%0, other=%1) computes", None),
        ("%2: bf16[4] cpu = aten.add.Tensor(self=%0, other=%1) computes", bf16),
        ("%2: fp32[4] cpu = aten.add_.Tensor(self=%0!, other=%1) ~0", bf16),
        ("%2: fp32[4] cpu = aten.add.Tensor(self=%0, other=%1) given dtype computes", bf16),
        ('%2: fp32[4] cpu = aten.where.self(self=%0, other=%1) with "x" given dtype computes', bf16),
        ("%2: fp32[4] cpu = lib.add.Tensor(self=%0, other=%1) computes", bf16),
        ("%2: fp32[4] cpu = aten.sum.default(self=%0, other=%1) given dtype computes", bf16),
    ],
)
def test_what_promotes_by_itself_takes_a_low_operand_in_any_format(step, needs):
    """A pointwise call beside fp32, which has no choice and writes to nothing."""
    body = f"block main(%0: bf16[4] cpu, %1: fp32[4] cpu) {{\n  {step} effects order\n  return %2\n}}\n"
    assert readers_of(body) == [(needs,)]
    assert readers_of(body, 1) == [(fp32,)]


def test_the_bytes_of_casts_are_those_of_both_sides():
    """At least of one element; calls and memory cost nothing."""
    price = CastBytes().value(Value(0, "fp32", (5,)), None, [], (bf16, fp32))
    assert price.casts == {(bf16, fp32): 30.0, (fp32, bf16): 30.0} and not price.reads and not price.stores
    assert CastBytes().value(Value(0, "fp32", ("n",)), None, [], (bf16, fp32)).casts[bf16, fp32] == 6.0
    step = parse(SCALED).steps[4]
    assert CastBytes().call(step, [], bf16) == 0.0 and CastBytes().stores(step) is False


@pytest.mark.parametrize("is_rounded", [False, True])
def test_a_low_value_is_cast_up_before_it_is_repeated_unless_a_cast_has_rounded_it(is_rounded):
    """What a cast has rounded would be cast up from before that."""
    made = "cast(self=%0)" if is_rounded else "aten.mm.default(self=%5, mat2=%5) computes"
    body = f"""block main(%0: fp32[4, 4] cpu) {{
  %5: bf16[4, 4] cpu = cast(self=%0)
  %6: bf16[4, 4] cpu = lib.op.default(self=%5) computes
  %1: bf16[4, 4] cpu = {made}
  %2: bf16[64, 4] cpu = aten.repeat.default(self=%1)
  %3: fp32[64, 4] cpu = cast(self=%2)
  %4: fp32[64, 4] cpu = lib.op.default(self=%3) computes
  return %4, %6
}}
"""
    assert bool(move_casts(parse(body))) is not is_rounded
