"""What may choose its format, and what is tied: the question that placement answers, program by program."""

import sys
from pathlib import Path

import pytest

from narrowcast.formats import bf16, fp32
from narrowcast.programs.placement.prices import CastBytes, ValuePrice
from narrowcast.programs.placement.question import EXACT, FREE, TRIPS, find_choices

sys.path.insert(0, str(Path(__file__).parent))
from program_text import parse_program


class OneEach:
    """A call costs 1, a cast 1, in whatever format; products store what they read."""

    unit = "ns"

    def call(self, step, operands, format):
        return 1.0

    def value(self, value, maker, readers, formats):
        return ValuePrice({(a, b): 1.0 for a in formats for b in formats if a is not b})

    def stores(self, reader):
        return reader is not None and ".mm." in reader.op


def ask(body, mode=FREE, prices=None, regions="region 0: cpu bf16 enabled cached session 0 policy p", **more):
    return find_choices(
        parse_program(f"program p\n{regions}\nblock main({body}\n}}\n"), prices or OneEach(), mode, **more
    )


def choices(question):
    """The formats that each step may have, the policy's first."""
    short = {bf16: "low", fp32: "high"}
    return {n: " ".join(short.get(f, f.name) for f in question.formats[v]) for n, v in question.variable.items()}


PRODUCT = """%0: fp32[4, 4] cpu, %1: fp32[4, 4] cpu) {
  %2: bf16[4, 4] cpu = cast(self=%0)
  %3: bf16[4, 4] cpu = cast(self=%1)
  %4: bf16[4, 4] cpu = aten.mm.default(self=%2, mat2=%3) computes
  %5: bf16[4, 4] cpu = aten.t.default(self=%4) ~0
  %6: bf16[4, 4] cpu = aten.gelu.default(self=%5) computes
  return %6"""


def test_a_low_call_may_run_high_and_what_moves_values_either_way():
    """Their casts are taken out and placed again; in the mode exact calls that compute keep their format."""
    free, exact = ask(PRODUCT), ask(PRODUCT, EXACT)
    assert choices(free) == {4: "low high", 5: "low high", 6: "low high"}
    assert choices(exact) == {5: "low high"}
    assert set(free.casts) == set(exact.casts) == {2, 3}
    assert (free.fixed, exact.fixed) == (0.0, 2.0)
    assert [c.costs for c in free.energy.choices] == [(1, 1)] * 3
    assert free.energy.flows[0].casts == {(fp32, bf16): 1, (bf16, fp32): 1}
    assert {n: [m.id for m in members] for n, members in free.steps.items()} == {0: [4], 1: [5], 2: [6]}


def test_only_the_casts_that_are_ours_are_placed_anew():
    """The user's own stay, and what reads them is in their format."""
    question = ask(PRODUCT, ours=frozenset([2]))
    assert set(question.casts) == {2}
    assert [(r.step.id, r.reader.needs) for r in question.reads[1]] == [(3, (bf16,))]
    assert [(r.step.id, r.cast.id, r.reader.needs) for r in question.reads[0]] == [(4, 2, (bf16, fp32))]


@pytest.mark.parametrize(
    ("old", "new", "tied"),
    [
        ("aten.gelu.default(self=%5)", "aten.gelu.default(self=%5) given approximate", 6),
        ("aten.gelu.default(self=%5) computes", "aten.gelu.default(self=%5) computes effects order", 6),
        ("aten.gelu", "lib.gelu", 6), ("aten.t.default", "lib.t.default", 5),
        ("%6: bf16[4, 4] cpu = aten.gelu", "%6: fp16[4, 4] cpu = aten.gelu", 6),
        ("%6: bf16[4, 4] cpu = aten.gelu", "%6: fp32[4, 4] cpu = aten.gelu", 6),
        ("%6: bf16[4, 4] cpu = aten.gelu.default(self=%5)", "%6: bf16[4, 4] cpu = aten.gelu.default()", 6),
    ],
)  # fmt: skip
def test_what_is_tied_has_no_choice(old, new, tied):
    """Effects, arguments that set a format, ops that nobody knows, formats that are no choice here."""
    assert old in PRODUCT
    found = choices(ask(PRODUCT.replace(old, new)))
    assert tied not in found and 4 in found


def test_a_call_in_a_region_that_may_be_off_has_no_choice():
    """Nor is a cast there taken out."""
    opened = "region 0: cpu bf16 enabled cached session 0 policy p open enabled"
    body = PRODUCT.replace("computes", "computes in 0").replace("cast(self=%0)", "cast(self=%0) in 0")
    question = ask(body, regions=opened)
    assert set(choices(question)) == {5} and set(question.casts) == {3}
    assert set(choices(ask(body))) == {4, 5, 6}


def test_what_is_given_high_beside_low_may_be_given_lower_where_it_only_moves():
    """What moves fp32 may move low formats that casts of the program give; other ops stay high."""
    body = """%0: fp32[4, 1] cpu, %1: bf16[4, 4] cpu) {
  %2: fp32[4, 4] cpu = aten.expand.default(self=%0) ~0
  %3: bf16[4, 4] cpu = cast(self=%2)
  %4: bf16[4, 4] cpu = aten.mm.default(self=%3, mat2=%1) computes
  %5: fp32[4, 4] cpu = aten.exp.default(self=%2) computes
  return %4, %5"""
    assert choices(ask(body)) == {2: "high low", 4: "low high"}
    raised = body.replace("  return", "  %6: fp32[4, 4] cpu = cast(self=%1)\n  return")
    assert choices(ask(raised)) == {2: "high low", 4: "low high"}  # fp32 is no lower format
    other = body.replace("  return", "  %6: fp16[4, 4] cpu = aten.gelu.default(self=%7) computes\n  return")
    assert choices(ask("%7: fp16[4, 4] cpu, " + other)) == {2: "high low", 4: "low high"}
    flow = next(f for f in ask(body).energy.flows if f.maker == 0)
    assert flow.rounded == {bf16}
    assert [(r.needs, r.keeps, r.stores) for r in flow.readers] == [
        ((fp32,), True, False), ((bf16, fp32), False, True),
    ]  # fmt: skip


def test_calls_of_two_low_formats_have_no_choice():
    """Nor has one whose result is another low format than what it reads."""
    body = """%0: fp32[4, 4] cpu, %1: fp32[4, 4] cpu) {{
  %2: bf16[4, 4] cpu = cast(self=%0)
  %3: fp16[4, 4] cpu = cast(self=%1)
  %4: {}[4, 4] cpu = aten.mm.default(self=%2, mat2=%{}) computes
  return %4"""
    assert choices(ask(body.format("bf16", 3))) == {}
    assert choices(ask(body.format("fp16", 2))) == {}
    assert choices(ask(body.format("bf16", 2))) == {4: "low high"}


LOOP = """%0: fp32[4, 4] cpu, %1: i64 cpu) {{
  %2: fp32[4, 4] cpu = {op}(a=%1)
    block body(%3: fp32[4, 4] cpu) {{
      %4: bf16[4, 4] cpu = cast(self=%0)
      %5: bf16[4, 4] cpu = aten.mm.default(self=%4, mat2=%4) computes
      %6: fp32[4, 4] cpu = cast(self=%5)
      %7: fp32[4, 4] cpu = lib.op.default(self=%6) computes
      return %7
    }}
  %8: bf16[4, 4] cpu = cast(self=%0)
  %9: bf16[4, 4] cpu = aten.mm.default(self=%8, mat2=%8) computes
  return %9, %2"""


@pytest.mark.parametrize(("op", "often"), [("prim.Loop", 10), ("while_loop", 10), ("prim.If", 1)])
def test_what_a_loop_does_counts_as_often_as_it_runs(op, often):
    """Its calls and its casts; a branch runs once."""
    question = ask(LOOP.format(op=op))
    assert choices(question) == {5: "low high", 9: "low high"}
    assert [c.costs for c in question.energy.choices] == [(often, often), (1, 1)]
    assert question.fixed == often  # the call that nobody knows, not the loop
    costs = {tuple(r.choice for r in f.readers): set(f.casts.values()) for f in question.energy.flows if f.readers}
    assert costs[(0, 0)] == {often} and costs[(1, 1)] == {1}


def test_what_a_block_returns_keeps_its_format():
    """So does a cast that only another block reads."""
    body = LOOP.format(op="prim.Loop").replace("return %7", "return %5").replace("%2: fp32", "%2: bf16")
    assert set(choices(ask(body))) == {9}
    outside = LOOP.format(op="prim.Loop").replace("%4: bf16[4, 4] cpu = cast(self=%0)\n", "%4: i64 cpu = lib.a()\n")
    outside = outside.replace("mm.default(self=%4, mat2=%4)", "mm.default(self=%10, mat2=%10)")
    outside = outside.replace(") {\n", ") {\n  %10: bf16[4, 4] cpu = cast(self=%0)\n", 1)
    assert 10 not in ask(outside).casts and {8, 6} <= set(ask(outside).casts)


TUPLE = """%0: fp32[4, 4] cpu) {{
  %1: bf16[4, 4] cpu = cast(self=%0)
  %2: tuple = {op}(self=%1){alias}
  %3: bf16[2, 4] cpu = getitem(a0=%2) with "0" ~0
  %4: {second} = getitem(a0=%2) with "1" ~0
  %5: bf16[2, 4] cpu = aten.relu_.default(self=%3!) ~0
  return %3, %4"""


def test_elements_of_a_tuple_have_the_format_of_the_call():
    """If they have it under the policy; one choice for all of them."""
    split = TUPLE.format(op="aten.native_layer_norm.default", alias=" computes", second="bf16[2, 4] cpu")
    plain = split.replace("  %5: bf16[2, 4] cpu = aten.relu_.default(self=%3!) ~0\n", "")
    question = ask(plain)
    assert choices(question) == {2: "low high", 3: "low high", 4: "low high"}
    assert len(question.formats) == 1 and [s.id for s in question.steps[0]] == [2, 3, 4]
    assert question.energy.choices[0].costs == (1, 1)  # an element costs nothing
    mixed = plain.replace("%4: bf16", "%4: fp32")
    assert choices(ask(mixed)) == {2: "low high", 3: "low high"}
    assert choices(ask(plain.replace("%3: bf16", "%3: fp32"))) == {}  # the first says what the call gives
    # one that is written to says nothing of the others: each has memory of its own
    assert choices(ask(split.replace("%4: bf16", "%4: fp32"))) == {2: "low high", 3: "low high", 5: "low high"}
    other = plain.replace("%4: bf16[2, 4] cpu", "%4: i64[4] cpu")
    assert choices(ask(other)) == {2: "low high", 3: "low high"}


def test_what_is_written_to_has_one_format_with_all_that_shares_its_memory():
    """A cast that is written to is not taken out; one choice for all that share, or none."""
    body = """%0: fp32[4, 4] cpu) {
  %1: bf16[4, 4] cpu = cast(self=%0)
  %2: bf16[4, 4] cpu = aten.mm.default(self=%1, mat2=%1) computes
  %3: bf16[4, 4] cpu = aten.add_.Tensor(self=%2!, other=%1) ~0
  %4: bf16[4, 4] cpu = aten.mm.default(self=%3, mat2=%1) computes
  return %4"""
    question = ask(body)
    assert choices(question) == {2: "low high", 3: "low high", 4: "low high"}
    assert question.variable[2] == question.variable[3] != question.variable[4]
    assert [s.id for s in question.steps[question.variable[2]]] == [2, 3]
    tied = ask(body.replace("aten.add_", "lib.add_"))
    assert set(choices(tied)) == {4} and set(tied.casts) == {1}
    given = ask(body.replace("self=%2!", "self=%1!"))
    assert set(given.casts) == set() and set(choices(given)) <= {2, 4}
    source = ask(body.replace("self=%2!", "self=%0!").replace("%3: bf16", "%3: fp32"))
    assert set(source.casts) == set()
    later = body.replace("self=%2!, other=%1) ~0", "self=%2!, other=%1) ~0\n  %5: bf16[4, 4] cpu = lib.b_(self=%4!) ~0")
    assert set(choices(ask(later))) == {2, 3}


@pytest.mark.parametrize(("alias", "shares"), [(" ~0", True), ("", False)])
def test_elements_share_memory_only_if_their_tuple_does(alias, shares):
    """Chunks of a cast that are written to keep it; what is made again does not."""
    question = ask(TUPLE.format(op="lib.split.default", alias=alias, second="bf16[2, 4] cpu"))
    assert (1 in question.casts) is not shares
    given = """%0: fp32[4, 4] cpu, %1: tuple) {
  %3: fp32[2, 4] cpu = getitem(a0=%1) ~0
  %4: bf16[2, 4] cpu = cast(self=%3)
  %6: fp32[2, 4] cpu = getitem(a0=%1) ~0
  %5: fp32[2, 4] cpu = lib.relu_.default(self=%6!) ~0
  return %4"""
    assert ask(given).casts == {}  # what comes in a tuple may share anything


def test_a_cast_that_is_returned_is_one_where_its_source_is_there_too():
    """Idle, it would be a copy for nothing; it pins its source."""
    body = """%0: fp32[4, 1] cpu, %1: bf16[4, 4] cpu) {{
  %2: fp32[4, 4] cpu = aten.relu.default(self=%0)
  %3: bf16[4, 4] cpu = cast(self=%2)
  return %3{}"""
    assert choices(ask(body.format(""))) == {2: "high low"}
    assert choices(ask(body.format(", %2"))) == {}
    view = body.format(", %5").replace("  return", "  %5: fp32[16] cpu = aten.view.default(self=%2) ~0\n  return")
    assert 2 not in choices(ask(view))
    given = body.format("").replace("aten.relu.default(self=%0)", "aten.t.default(self=%0) ~0")
    assert choices(ask(given)) == {}
    reads = ask(body.format("")).reads[2]
    assert [(r.step, r.position, r.cast.id, r.reader.needs) for r in reads] == [(None, 0, 3, (bf16,))]
    twice = ask(body.format(", %3"), ours=frozenset([3]))
    assert [r.position for r in twice.reads[2]] == [0, 1]


def test_dense_values_alone_are_passed_in_the_mode_exact():
    """And before autograd only what carries no gradient."""
    body = """%0: fp32[4, 1] cpu{g}, %1: bf16[4, 4] cpu) {{
  %2: fp32[4, 4] cpu{g} = aten.expand.default(self=%0) ~0
  %3: bf16[4, 4] cpu{g} = cast(self=%2)
  %4: bf16[4, 4] cpu{g} = aten.mm.default(self=%3, mat2=%1) computes
  return %4"""
    plain, grad = body.format(g=""), body.format(g=" grad")
    exact = {"mode": EXACT, "prices": CastBytes()}
    assert choices(ask(plain, **exact)) == {2: "high low"}
    for dense, expected in (({0, 2}, {2: "high low"}), ({0}, {}), ({2}, {}), (set(), {})):
        assert choices(ask(plain, dense=frozenset(dense), **exact)) == expected
    assert choices(ask(grad, **exact)) == {} and ask(grad, **exact).casts == {}
    assert choices(ask(grad, after_autograd=True, **exact)) == {2: "high low"}
    assert set(ask(grad, after_autograd=True, **exact).casts) == {3}
    both = plain.replace("aten.expand.default(self=%0)", "aten.cat.default(tensors=%0, tensors=%5)")
    both = both.replace("%0: fp32[4, 1] cpu,", "%0: fp32[4, 1] cpu, %5: fp32[4, 3] cpu,")
    for dense, expected in (({0, 5, 2}, {2: "high low"}), ({0, 2}, {}), ({5, 2}, {})):
        assert choices(ask(both.replace(" ~0", ""), dense=frozenset(dense), **exact)) == expected
    quiet = grad.replace("cast(self=%2)", "cast(self=%2) nograd")
    assert set(ask(quiet, **exact).casts) == {3}
    assert choices(ask(grad, FREE)) == {2: "high low", 4: "low high"}


def test_a_chain_of_casts_is_the_user_s():
    """The source of another cast is not taken out; the last one is."""
    body = """%0: fp32[4, 4] cpu) {
  %1: bf16[4, 4] cpu = cast(self=%0)
  %2: fp32[4, 4] cpu = cast(self=%1)
  %3: fp32[4, 4] cpu = lib.op.default(self=%2) computes
  return %3"""
    assert set(ask(body).casts) == {2}


def test_casts_are_shared_by_readers_with_no_write_between_them():
    """Otherwise each has its own; what is returned has its own in any case."""
    body = """%0: bf16[4, 4] cpu, %1: bf16[4, 4] cpu) {{
  %2: bf16[4, 4] cpu = aten.mm.default(self=%0, mat2=%0) computes
  {}%4: bf16[4, 4] cpu = aten.mm.default(self=%0, mat2=%0) computes
  return %0"""

    def groups(between):
        return [len(f.readers) for f in ask(body.format(between)).energy.flows if f.formats == (bf16,) and f.maker < 0
                and f.readers]  # fmt: skip

    assert sorted(groups("")) == [1, 4]
    assert sorted(groups("%3: bf16[4, 4] cpu = lib.add_(self=%0!) ~0\n  ")) == [1, 2, 3]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("return %4", [2]), ("return %4, %1", [1, 1]),
        ("%5: bf16[4, 4] cpu = lib.add_(self=%1!) ~0\n  return %4", [1, 1]),
    ],
)  # fmt: skip
def test_a_user_s_cast_is_shared_unless_it_is_returned_or_written_to(end, expected):
    """It has memory of its own then: what else reads the value needs another cast."""
    body = f"""%0: fp32[4, 4] cpu) {{
  %1: bf16[4, 4] cpu = cast(self=%0)
  %2: bf16[4, 4] cpu = cast(self=%0)
  %3: bf16[4, 4] cpu = lib.op.default(self=%2) computes
  %4: bf16[4, 4] cpu = lib.op.default(self=%1) computes
  {end}"""
    flows = ask(body, ours=frozenset([2])).energy.flows
    assert [len(f.readers) for f in flows if f.formats == (fp32,)] == expected
    own = body.replace(end, "return %1, %2")  # two that are returned share nothing either
    flows = ask(own, ours=frozenset()).energy.flows
    assert [len(f.readers) for f in flows if f.formats == (fp32,)] == [1, 1]


def test_a_user_s_cast_to_fp32_needs_every_bit_of_what_is_fp32():
    """What is rounded anyway may come as it is."""
    body = """%0: fp32[4, 4] cpu, %1: bf16[4, 4] cpu) {
  %2: fp32[4, 4] cpu = cast(self=%0)
  %3: bf16[4, 4] cpu = cast(self=%0)
  %4: fp32[4, 4] cpu = cast(self=%1)
  %5: bf16[4, 4] cpu = cast(self=%1)
  return %2, %3, %4, %5"""
    reads = ask(body, ours=frozenset()).reads
    assert [[r.reader.keeps for r in reads[n] if r.step is not None] for n in (0, 1)] == [[True, False], [False, False]]


def test_what_is_read_in_two_low_formats_is_not_rounded_twice():
    """A call that only moves may have one of them, and then no reader may cast that to the other."""
    body = """%0: fp32[4, 4] cpu) {
  %1: fp32[4, 4] cpu = aten.abs.default(self=%0)
  %2: bf16[4, 4] cpu = cast(self=%1)
  %3: fp16[4, 4] cpu = cast(self=%1)
  %4: bf16[4, 4] cpu = lib.op.default(self=%2) computes
  %5: bf16[4, 4] cpu = cast(self=%3)
  return %4, %5"""
    reads = ask(body, ours=frozenset([2])).reads[1]
    assert [(r.reader.needs[0].name, r.reader.keeps) for r in reads] == [("fp16", True), ("bf16", False)]


def test_what_is_returned_twice_is_cast_twice():
    """And counts twice: nobody shares the casts of what the program returns."""
    body = """%0: fp32[4, 4] cpu) {
  %1: bf16[4, 4] cpu = cast(self=%0)
  %2: bf16[4, 4] cpu = aten.mm.default(self=%1, mat2=%1) computes
  return %2, %2"""
    energy = ask(body).energy
    assert [len(f.readers) for f in energy.flows if f.maker == 0] == [1, 1]
    assert energy.evaluate((fp32,)) == 1 + 2


class Dear(OneEach):
    """Calls cost little, values more than the solver takes."""

    def value(self, value, maker, readers, formats):
        casts = {(a, b): 2.0**27 for a in formats for b in formats if a is not b}
        return ValuePrice(casts, dict.fromkeys(formats, 2.0**26), dict.fromkeys(formats, 2.0**25))


@pytest.mark.parametrize("op", ["prim.Loop", "prim.If"])
def test_costs_are_scaled_so_that_all_of_them_fit_the_solver(op):
    """What values cost is part of them, as often as it is due."""
    energy = ask(LOOP.format(op=op), prices=Dear()).energy
    costs = [c for choice in energy.choices for c in choice.costs]
    for flow in energy.flows:
        costs += [*flow.casts.values(), *flow.reads.values(), *flow.stores.values()]
    assert sum(costs) == pytest.approx(2**28, rel=1e-6)
    assert max(costs) * energy.unit == pytest.approx(2.0**27 * (TRIPS if op == "prim.Loop" else 1), rel=1e-6)
    assert ask(LOOP.format(op=op)).energy.unit == 1.0
