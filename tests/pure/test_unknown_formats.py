"""Formats, devices and regions that only the running program knows: decided as far as they are known, golden."""

import sys
from pathlib import Path

import pytest

import narrowcast as nc
from narrowcast.core.decide import Argument, Call, Region, decide
from narrowcast.core.policy import Kind
from narrowcast.errors import NarrowcastError
from narrowcast.formats import bf16, fp16, fp32, fp64
from narrowcast.programs.passes import BEFORE_AUTOGRAD, hoist_casts, run_passes
from narrowcast.programs.program import apply_edits, print_program, verify

sys.path.insert(0, str(Path(__file__).parent))
from program_text import parse_program

NATIVE = {"native": nc.Policy.native("cpu"), "cuda": nc.Policy.native("cuda")}
CPU = Region("cpu", bf16)
KNOWN = "region 0: cpu bf16 enabled cached session 1 policy native"
OPEN = f"{KNOWN} open enabled"
CUDA = "region 1: cuda fp16 enabled cached session 1 policy cuda open device"
UNKNOWN = Argument("a", None, unknown=True)


def parse(body, *regions):
    return parse_program("\n".join(["program p", *(regions or (KNOWN,)), body]))


def lines(program):
    return [line.strip() for line in print_program(program).splitlines() if " = " in line]


def decided(op, *arguments, policy=None):
    return decide(Call(op, arguments), policy or NATIVE["native"], CPU)


# -- decide


def test_an_unknown_format_is_eligible():
    """Whoever casts looks at what came; fp64 that is known to be fp64 stays."""
    plan = decided("aten.mm.default", UNKNOWN, Argument("b", fp64))
    assert plan.formats == (bf16, None) and plan.undecided is None


def test_what_compares_formats_waits():
    """Promotion, alignment and inside say nothing about formats yet."""
    assert decided("aten.cat.default", UNKNOWN, Argument("b", fp16)).undecided is Kind.PROMOTE
    policy = nc.Policy.native("cpu").with_rules(nc.Rule("aten.add.Tensor", "align"), nc.Rule("aten.gelu", "inside"))
    assert decided("aten.add.Tensor", UNKNOWN, Argument("b", fp16), policy=policy).undecided is Kind.ALIGN
    assert decided("aten.gelu.default", UNKNOWN, policy=policy).undecided is Kind.INSIDE
    assert decided("aten.cat.default", UNKNOWN, Argument("b", fp16)).formats == (None, None)


def test_known_formats_are_compared_at_once():
    """Nothing waits that need not."""
    plan = decided("aten.cat.default", Argument("a", bf16), Argument("b", fp32))
    assert plan.undecided is None and plan.formats == (fp32, None)


# -- programs

LOOP = """block main(%0: tensor["?"] grad, %1: tensor["?"] grad, %2: fp32[4, 4] cpu grad weight, %3: other) {
  %4: tensor["?"] grad = aten.cat.default(tensors=%0, tensors=%1) computes in 0
  %5: bf16["?"] grad = aten.mm.default(self=%4, mat2=%2) computes in 0
  %6: bf16["?"] grad = prim.Loop(a0=%3, a1=%5, a2=%2) ~1 effects order
    block block0(%7: other, %8: bf16["?"] grad) {
      %9: bf16["?"] grad = aten.mm.default(self=%8, mat2=%2) computes in 0
      return %9
    }
  return %6
}
"""
TWO = """block main(%0: tensor["?"] grad, %1: fp32[4, 4] cpu) {
  %4: tensor["?"] grad = aten.mm.default(self=%0, mat2=%1) computes in 0,1
  return %4
}
"""


@pytest.mark.parametrize("body, regions", [(LOOP, (KNOWN,)), (TWO, (OPEN, CUDA))])
def test_the_text_is_parsed_back(body, regions):
    """Tensors of unknown format, open regions, several regions around one call, blocks that read what is outside."""
    program = parse(body, *regions)
    assert parse_program(print_program(program)) == program
    verify(program)


def test_operands_are_cast_together():
    """One step takes all, as many come out; the weight of two mm's is cast once, in front of the loop."""
    passes = (*BEFORE_AUTOGRAD[:1], lambda program: hoist_casts(program, {1: 4}), *BEFORE_AUTOGRAD[1:])
    made = run_passes(parse(LOOP), passes, NATIVE)
    assert lines(made.program) == [
        '%10: tuple grad = cast.together(tensors=%0, tensors=%1) with "promote" in 0',
        '%11: tensor["?"] grad = getitem(a0=%10) with "0" ~0 in 0',
        '%12: tensor["?"] grad = getitem(a0=%10) with "1" ~0 in 0',
        '%4: tensor["?"] grad = aten.cat.default(tensors=%11, tensors=%12) computes in 0',
        '%13: bf16["?"] grad = cast(self=%4) in 0',
        "%16: bf16[4, 4] cpu grad = cast(self=%2) in 0",
        '%5: bf16["?"] grad = aten.mm.default(self=%13, mat2=%16) computes in 0',
        '%6: bf16["?"] grad = prim.Loop(a0=%3, a1=%5, a2=%2) ~1 effects order',
        '%9: bf16["?"] grad = aten.mm.default(self=%8, mat2=%16) computes in 0',
    ]
    assert parse_program(print_program(made.program)) == made.program
    assert ("share", "the weight cache") in [(e.kind, e.reason) for e in made.edits]
    assert hoist_casts(made.program, {1: 4}) == []


def test_what_may_be_a_weight_is_looked_at_when_it_runs():
    """Of an input of a script nobody knows: the casts that were there stay, and find nothing to do."""
    body = LOOP.replace("%2: fp32[4, 4] cpu grad weight", '%2: tensor["?"] grad')
    passes = (*BEFORE_AUTOGRAD[:1], lambda program: hoist_casts(program, {1: 4}), *BEFORE_AUTOGRAD[1:])
    made = run_passes(parse(body), passes, NATIVE)
    found = [line for line in lines(made.program) if "%2" in line.split(" = ")[1] and "Loop" not in line]
    assert len(found) == 1 and "cast.weight(" in found[0]
    assert hoist_casts(made.program, {1: 4}) == []


@pytest.mark.parametrize(
    "change",
    [
        ("enabled cached", "enabled uncached"),
        ("mat2=%2) computes in 0\n      return", "mat2=%8) computes in 0\n      return"),
    ],
)
def test_what_is_not_hoisted(change):
    """Regions that do not cache; a weight that is read once."""
    program = parse(*[text.replace(*change) for text in (LOOP, KNOWN)])
    assigned = run_passes(program, BEFORE_AUTOGRAD[:1], NATIVE).program
    assert hoist_casts(assigned, {1: 4}) == []


def test_a_call_in_regions_of_two_device_types():
    """Each casts what is on its device: the inner one first."""
    made = run_passes(parse(TWO, OPEN, CUDA), (), NATIVE)
    assert lines(made.program)[:3] == [
        '%5: bf16["?"] grad = cast(self=%0) in 0',
        "%6: bf16[4, 4] cpu = cast(self=%1) in 0",
        '%7: fp16["?"] grad = cast(self=%5) in 1',
    ]


def test_an_edit_that_does_not_fit_is_refused():
    """A step that is not there."""
    from narrowcast.programs.program import CastTogether, Why

    with pytest.raises(NarrowcastError):
        apply_edits(parse(LOOP), [CastTogether(99, (0,), Why("test", "none"))])
