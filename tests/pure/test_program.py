"""The program: its text form, its verifier and its edits."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import narrowcast as nc
from narrowcast.core.decide import Region
from narrowcast.core.policy import Site
from narrowcast.errors import ProgramError
from narrowcast.formats import bf16, fp16, fp32
from narrowcast.programs.program import (
    Block,
    CastResult,
    CastReturn,
    CastTogether,
    Follow,
    Hoist,
    InsertCast,
    OpenedRegion,
    Operand,
    Program,
    Remove,
    Retarget,
    SetDtype,
    Share,
    Step,
    Value,
    Why,
    Writes,
    apply_edits,
    print_program,
    verify,
)
from narrowcast.programs.program.aliases import reaching
from narrowcast.programs.program.model import element_bytes

sys.path.insert(0, str(Path(__file__).parent))
from program_text import parse_program

WHY = Why("test", "because")
SITE = Site("encoder.0", ("nn.Linear",), ("model.f",), "/home/me/model.py", 12)
LINEAR = """\
program forward
region 0: cpu bf16 enabled cached session 0 policy native:5d41402a
region 1: cuda fp16 disabled uncached session 2 policy -
block main(%0: fp32[8, 4] cpu grad weight, %1: fp32[2, 4] cpu, %2: i64["s0", 4] cuda) {
  %3: fp32[2, 8] cpu grad = aten.linear.default(input=%1, weight=%0!) with "a=\\"(x), y\\"" given dtype computes \
nograd ~0,1 effects random,order in 0 at 0: encoder.0, model.py:12
  %4: tuple grad = higher_order.cond(a0=%3) dgrad ~0
    block body0(%5: fp32[2, 8] cpu grad) {
      %6: bf16[2, 8] cpu = cast(self=%5)
      return %6
    }
  %7: none = aten.noted.default()
  return %4, %3
}
site 0: {"classes": ["nn.Linear"], "file": "/home/me/model.py", "functions": ["model.f"], "line": 12, \
"module_path": "encoder.0"}
"""


def value(number, kind="fp32", gradient=False, weight=False):
    return Value(number, kind, (2, 4), "cpu", gradient, weight)


def cast(number, source, kind, **more):
    return Step(value(number, kind), "cast", (Operand("self", source),), **more)


def call(number, *sources, op="aten.mm.default", kind="fp32", **more):
    operands = tuple(Operand(f"a{n}", s) for n, s in enumerate(sources))
    return Step(value(number, kind), op, operands, computes=True, **more)


def program(*steps, inputs=1, returns=None):
    parameters = tuple(value(n) for n in range(inputs))
    return Program("p", Block("main", parameters, steps, (steps[-1].id,) if returns is None else returns))


def test_text_is_stable_and_says_everything():
    """print(parse(text)) is the text, byte for byte."""
    parsed = parse_program(LINEAR)
    assert print_program(parsed) == LINEAR
    assert parse_program(print_program(parsed)) == parsed
    step = parsed.steps[3]
    assert step.operands[1] == Operand("weight", 0, written=True)
    assert (step.site, step.given, step.aliases) == (SITE, frozenset(["dtype"]), (0, 1))
    assert parsed.regions[1] == OpenedRegion(Region("cuda", fp16, False, False), "", 2)
    assert parsed.values[2].shape == ("s0", 4)
    assert parsed.steps[4].blocks[0].steps[0].is_cast


NAMES = st.text("abcdefghij_.", min_size=1, max_size=8).map(lambda t: f"x{t}")
TYPES = st.sampled_from(["fp32", "bf16", "fp16", "fp64", "i64", "bool"])
SHAPES = st.one_of(st.none(), st.lists(st.one_of(st.integers(0, 9), st.sampled_from(["s0", "Max(1, s1)"])), max_size=3))
SITES = st.builds(
    Site, st.text(max_size=5), st.tuples(NAMES), st.tuples(NAMES), st.text(max_size=9), st.integers(0, 99)
)


@st.composite
def programs(draw):
    """Programs in which every step reads values made before it."""
    number = 0

    def new_value():
        nonlocal number
        shape = draw(SHAPES)
        made = Value(
            number, draw(TYPES), None if shape is None else tuple(shape), draw(st.sampled_from(["", "cpu", "cuda"])),
            draw(st.booleans()), draw(st.booleans()),
        )  # fmt: skip
        number += 1
        return made

    parameters = tuple(new_value() for _ in range(draw(st.integers(1, 3))))
    steps = []
    for _ in range(draw(st.integers(0, 5))):
        known = [v.id for v in parameters] + [s.id for s in steps]
        operands = tuple(
            Operand(draw(NAMES), draw(st.sampled_from(known)), draw(st.booleans()))
            for _ in range(draw(st.integers(0, 3)))
        )
        steps.append(
            Step(
                new_value(), draw(NAMES), operands, draw(st.text(max_size=12)),
                frozenset(draw(st.lists(NAMES, max_size=2))),
                draw(st.booleans()), draw(st.one_of(st.none(), st.just(0))), draw(st.booleans()),
                draw(st.sampled_from(["forward", "backward", "dgrad", "wgrad"])),
                tuple(range(draw(st.integers(0, len(operands))))), tuple(draw(st.lists(NAMES, max_size=2))), (),
                draw(st.one_of(st.just(Site()), SITES)),
            )
        )  # fmt: skip
    region = OpenedRegion(Region("cpu", bf16), "abc")
    return Program("main", Block("main", parameters, tuple(steps), (0,)), (region,))


@given(programs())
def test_what_is_printed_is_parsed_back(made):
    """For any program, whatever is in its texts."""
    text = print_program(made)
    assert parse_program(text) == made
    assert print_program(parse_program(text)) == text


@pytest.mark.parametrize(
    "line, broken",
    [(0, "programme x"), (1, "region 0: cpu"), (3, "block main("), (4, "  %3: fp32 = "),
     (4, "  %3: fp32 = f() at 9: x, y"), (12, "site 0: {nonsense"), (11, "} }")],
)  # fmt: skip
def test_text_that_does_not_parse_names_its_line(line, broken):
    """With the file, and what stands there."""
    lines = LINEAR.split("\n")
    lines[line] = broken
    with pytest.raises(ProgramError) as caught:
        parse_program("\n".join(lines), "model.txt")
    assert str(caught.value.where[0]) == f"model.txt:{line + 1}"


@pytest.mark.parametrize(
    "broken, says",
    [
        (program(call(1, 5)), "not made before"),
        (program(call(1, 0), call(1, 0)), "taken"),
        (program(call(1, 0, region=3)), "region 3 does not exist"),
        (program(call(1, 0, aliases=(4,))), "aliases an operand"),
        (program(Step(value(1), "cast", (Operand("self", 0), Operand("x", 0)))), "exactly one value"),
        (program(Step(value(1, "i64"), "cast", (Operand("self", 0),))), "must be floating"),
        (program(Step(Value(1, "bf16", (9,), "cpu"), "cast", (Operand("self", 0),))), "nothing but the format"),
        (program(call(1, 0), returns=(7,)), "returns %7"),
    ],
)
def test_the_verifier_rejects_what_is_broken(broken, says):
    """Each check, shown a program that it must reject."""
    with pytest.raises(ProgramError, match=says):
        verify(broken)


def test_the_verifier_knows_stages():
    """After assign no region is left."""
    edge = program(Step(Value(1, "none"), "region.enter"), returns=(0,))
    verify(edge)
    with pytest.raises(ProgramError, match="edge is left"):
        verify(edge, assigned=True)


class TestEdits:
    """The only ways in which a program changes."""

    def test_insert(self):
        """Before the step, for one operand."""
        made = apply_edits(program(call(1, 0, 0, region=None)), [InsertCast(1, 1, bf16, WHY)])
        assert [s.op for s in made.body.steps] == ["cast", "aten.mm.default"]
        assert [o.value for o in made.steps[1].operands] == [0, 2]
        verify(made)

    def test_cast_result(self):
        """Everything that read the result reads the cast, returns included."""
        made = apply_edits(program(call(1, 0), call(2, 1), returns=(1, 2)), [CastResult(1, bf16, fp16, WHY)])
        assert made.steps[2].operands[0].value == 3
        assert made.body.returns == (3, 2)
        assert (made.values[1].type, made.values[3].type) == ("bf16", "fp16")
        verify(made)

    def test_set_dtype(self):
        """On the call, or on the overload that takes one."""
        made = apply_edits(program(call(1, 0)), [SetDtype(1, fp32, WHY, "aten.norm.ScalarOpt_dtype")])
        assert made.steps[1].op == "aten.norm.ScalarOpt_dtype"
        assert made.steps[1].given == {"dtype=fp32"}

    def test_share_and_remove_follow_chains(self):
        """A cast that is replaced by one that is itself replaced."""
        start = program(cast(1, 0, "bf16"), cast(2, 0, "bf16"), cast(3, 2, "bf16"), call(4, 3))
        made = apply_edits(start, [Share(2, 1, WHY), Remove(3, WHY, instead=2)])
        assert [s.id for s in made.body.steps] == [1, 4]
        assert made.steps[4].operands[0].value == 1
        verify(made)

    def test_retarget(self):
        """A cast reads another value."""
        start = program(cast(1, 0, "fp64"), call(2, 0), cast(3, 1, "bf16"), call(4, 3))
        made = apply_edits(start, [Retarget(3, 0, WHY)])
        assert [s.id for s in made.body.steps] == [1, 2, 3, 4]
        assert made.steps[3].operands[0].value == 0
        verify(made)

    @pytest.mark.parametrize("edit", [Remove(1, WHY), Share(1, 0, WHY), Retarget(1, 0, WHY)])
    def test_calls_cannot_be_removed(self, edit):
        """Only casts and the edges of regions."""
        with pytest.raises(ProgramError, match="is no cast"):
            apply_edits(program(call(1, 0)), [edit])

    def test_an_edit_about_nothing_is_an_error(self):
        """The program has no such step."""
        with pytest.raises(ProgramError, match="no such step"):
            apply_edits(program(call(1, 0)), [Remove(9, WHY)])


def test_writes_reach_views_and_what_they_are_views_of():
    """And nothing else; what happens before the first step or at the last one itself does not count."""
    view = call(1, 0, op="aten.t.default", aliases=(0,))
    write = Step(value(2), "aten.add_.Tensor", (Operand("self", 1, written=True),), aliases=(0,))
    steps = (view, call(3, 0), write, call(4, 3))
    writes = Writes(Block("b", (value(0),), steps, ()))
    assert writes.share_memory(0, 2) and not writes.share_memory(0, 3)
    assert writes.is_written(0, after=3, before=4) and not writes.is_written(3, after=1, before=4)
    assert not writes.is_written(0, after=2, before=4) and not writes.is_written(0, after=1, before=2)
    assert writes.is_written_after(1, 3) and not writes.is_written_after(1, 2)


def test_a_list_shows_what_it_holds_and_each_of_that_shows_itself():
    """Until something may change the list; a branch by what is in it."""
    held = Step(value(2), "prim.ListConstruct", (Operand("a0", 0), Operand("a1", 1)), aliases=(0, 1))
    kept = Step(value(3), "aten.append", (Operand("a0", 2), Operand("a1", 1)), aliases=(0, 1), effects=("order",))
    write = Step(value(4), "aten.mul_.Tensor", (Operand("self", 0, written=True),), aliases=(0,))
    branch = Step(value(5), "prim.If", blocks=(Block("b0", (), (kept,), ()), Block("b1", (), (), ())))
    for steps, reached in (((held, write), False), ((held, kept, write), True), ((held, branch, write), True)):
        writes = Writes(Block("b", (value(0), value(1)), steps, (2,)))
        assert writes.is_written_after(2, -1) and writes.share_memory(1, 2)
        assert writes.is_written_after(1, -1) is writes.share_memory(0, 1) is reached


def applied(text, *edits):
    """The steps after the edits, as text."""
    made = apply_edits(parse_program(text), edits)
    verify(made)
    return [line.strip() for line in print_program(made).splitlines()[1:-1]]


TWO = """program p
block main(%0: fp32[2] cpu grad weight, %1: tensor[2] cpu grad) {
  %2: bf16[2] cpu grad = cast(self=%0)
  %3: bf16[2] cpu grad = cast(self=%1)
  %4: bf16[2] cpu grad = aten.mul.Tensor(self=%2, other=%3) computes
  %5: bf16[2] cpu grad = cast(self=%0)
  %6: bf16[2] cpu grad = cast(self=%1)
  return %4, %5, %6
}
"""


def test_a_weight_s_casts_are_hoisted_into_one_that_replaces_them():
    """What may turn out to be a weight is cast if it is one, and the casts read that."""
    assert applied(TWO, Hoist(2, 2, (2, 5), WHY), Hoist(3, 2, (3, 6), WHY)) == [
        "block main(%0: fp32[2] cpu grad weight, %1: tensor[2] cpu grad) {",
        "%7: bf16[2] cpu grad = cast(self=%0)",
        '%8: tensor[2] cpu grad = cast.weight(self=%1) with "bf16" ~0',
        "%3: bf16[2] cpu grad = cast(self=%8)",
        "%4: bf16[2] cpu grad = aten.mul.Tensor(self=%7, other=%3) computes",
        "%6: bf16[2] cpu grad = cast(self=%8)",
        "return %4, %7, %6",
    ]


def test_what_is_cast_together_is_taken_from_one_tuple():
    """Each with the gradient that it had, if autograd records here; and the rule's action is said."""
    rule = nc.Rule("aten.mul", "promote")
    text = TWO.replace("computes\n", "computes nograd\n", 1)
    together = CastTogether(4, (0, 1), Why("test", "because", rule))
    assert applied(TWO, together, CastTogether(5, (0,), WHY), InsertCast(6, 0, fp16, WHY))[3:-1] == [
        '%7: tuple grad = cast.together(self=%2, other=%3) with "promote"',
        '%8: tensor[2] cpu grad = getitem(a0=%7) with "0" ~0',
        '%9: tensor[2] cpu grad = getitem(a0=%7) with "1" ~0',
        "%4: bf16[2] cpu grad = aten.mul.Tensor(self=%8, other=%9) computes",
        "%10: tuple grad = cast.together(self=%0)",
        '%11: tensor[2] cpu grad = getitem(a0=%10) with "0" ~0',
        "%5: bf16[2] cpu grad = cast(self=%11)",
        "%12: fp16[2] cpu grad = cast(self=%1)",
        "%6: bf16[2] cpu grad = cast(self=%12)",
    ]
    without = applied(text, together)[3:6]
    assert without == [
        '%7: tuple = cast.together(self=%2, other=%3) with "promote" nograd',
        '%8: tensor[2] cpu = getitem(a0=%7) with "0" nograd ~0',
        '%9: tensor[2] cpu = getitem(a0=%7) with "1" nograd ~0',
    ]


def test_a_result_is_cast_back_to_the_format_of_what_came():
    """To one that is known, or like the values that are named; readers and returns take the cast."""
    results = [CastResult(4, None, None, WHY, like=(2, 3)), CastReturn(5, 1, fp32, WHY)]
    assert applied(TWO, *results, InsertCast(6, 0, fp16, WHY))[3:] == [
        "%4: tensor[2] cpu grad = aten.mul.Tensor(self=%2, other=%3) computes",
        "%7: tensor[2] cpu grad = cast.back(result=%4, like=%2, like=%3)",
        "%5: bf16[2] cpu grad = cast(self=%0)",
        "%8: fp16[2] cpu grad = cast(self=%1)",
        "%6: bf16[2] cpu grad = cast(self=%8)",
        "%9: fp32[2] cpu grad = cast(self=%5)",
        "return %7, %9, %6",
    ]
    known = applied(TWO, CastResult(4, fp32, fp16, WHY, exactly=True))[3:5]
    assert known == [
        "%4: fp32[2] cpu grad = aten.mul.Tensor(self=%2, other=%3) computes",
        "%7: fp16[2] cpu grad = cast(result=%4)",
    ]
    exactly = applied(TWO, CastResult(4, None, fp16, WHY, exactly=True))[4]
    assert exactly == '%7: fp16[2] cpu grad = cast(result=%4) with "exactly"'


def test_a_call_is_given_a_dtype_and_a_result_another_format():
    """With the overload that takes it, where that is another."""
    made = applied(TWO, SetDtype(4, fp32, WHY, "aten.mul.dtype"), Follow(5, fp16, WHY), SetDtype(6, fp32, WHY))
    assert made[3:6] == [
        "%4: bf16[2] cpu grad = aten.mul.dtype(self=%2, other=%3) given dtype=fp32 computes",
        "%5: fp16[2] cpu grad = cast(self=%0)",
        "%6: bf16[2] cpu grad = cast(self=%1) given dtype=fp32",
    ]


def test_an_edit_about_what_is_not_there_or_no_cast_is_refused():
    """Only casts and regions' edges are removed, shared or read again."""
    with pytest.raises(ProgramError, match="no such step"):
        apply_edits(parse_program(TWO), [Remove(99, WHY)])
    for edit in (Remove(4, WHY), Share(4, 2, WHY), Retarget(4, 0, WHY), Hoist(4, 2, (4,), WHY)):
        with pytest.raises(ProgramError, match="is no cast"):
            apply_edits(parse_program(TWO), [edit])


def test_what_blocks_return_is_reached_through_views():
    """And through views of views, in each block."""
    block = parse_program(
        """program p
block main(%0: fp32[2] cpu, %1: fp32[2] cpu) {
  %2: fp32[2] cpu = aten.view.default(self=%0) ~0
  %3: fp32[2] cpu = aten.view.default(self=%1) ~0
  %4: fp32[2] cpu = aten.t.default(self=%2) ~0
  return %4
}
"""
    ).body
    assert reaching((block,)) == {4, 2, 0}
    assert reaching((block, replace(block, returns=(3,)))) == {4, 2, 0, 3, 1}


def test_an_error_about_a_program_has_the_step_s_line():
    """Where one is known."""
    site = Site(file="m.py", line=3)
    broken = program(call(5, 9))
    for here, where in ((site, ["m.py:3"]), (Site(), [])):
        steps = tuple(replace(step, site=here) for step in broken.body.steps)
        with pytest.raises(ProgramError) as caught:
            verify(replace(broken, body=replace(broken.body, steps=steps)))
        assert [str(origin) for origin in caught.value.where] == where


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("program p\n", "found ''"), ("program p", "found 'the end'"), ("nothing", "found 'nothing'"),
        ("program p\nblock main() {", "found 'the end'"), ("program p\nblock main() {\n  return\n", "found ''"),
    ],
)  # fmt: skip
def test_text_that_ends_too_early_says_so(text, found):
    """With what stands there instead."""
    with pytest.raises(ProgramError, match=found):
        parse_program(text)


def test_a_program_prints_itself():
    """In its text form; a step knows whether it writes."""
    assert print_program(parse_program(TWO)) == TWO
    written = parse_program(TWO.replace("self=%2", "self=%2!"))
    assert [step.writes for step in written.body.steps] == [False, False, True, False, False]


def test_a_value_knows_its_size():
    """Whole bytes per element; none where a size is text, or where it is no tensor."""
    sizes = [(v.elements, v.bytes) for v in (
        Value(0, "fp32", (2, 3)), Value(0, "bf16", ()), Value(0, "i64", (5,)), Value(0, "bool", (7,)),
        Value(0, "fp32", (2, "n")), Value(0, "tuple"), Value(0, "u1", (4,)), Value(0, "fp32", (0, 3)),
    )]  # fmt: skip
    assert sizes == [(6, 24), (1, 2), (5, 40), (7, 7), (0, 0), (0, 0), (4, 0), (0, 0)]
    assert Value(0, "fp32", ()).format is fp32 and Value(0, "fp32").format is None
    assert all(isinstance(element_bytes(kind), int) for kind in ("fp32", "i64", "bool", "c128"))


def test_writes_are_counted_before_a_step():
    """To what a value shows; those of the step itself and of later ones do not count."""
    block = parse_program(
        """program p
block main(%0: fp32[2] cpu, %1: fp32[2] cpu) {
  %2: fp32[2] cpu = aten.add_.Tensor(self=%0!) ~0
  %3: fp32[2] cpu = aten.relu.default(self=%0)
  %4: fp32[2] cpu = aten.add_.Tensor(self=%2!) ~0
  %5: fp32[2] cpu = aten.relu.default(self=%0)
  return %5
}
"""
    ).body
    writes = Writes(block)
    assert [writes.count_before(0, step) for step in (2, 3, 4, 5, 99)] == [0, 1, 1, 2, 2]
    assert [writes.count_before(1, step) for step in (2, 5)] == [0, 0]
    assert writes.is_written(0, 2, 5) and not writes.is_written(0, 2, 4) and not writes.is_written_after(0, 4)
    assert writes.is_written_after(0, 3) and writes.is_written(0, -1, 3) and not writes.is_written(1, -1, 99)


def test_a_region_may_be_open():
    """To what only the running program knows; between casts of one tensor it counts which device's they cast."""
    text = "program p\n{}\nblock main(%0: fp32[2]) {{\n  %1: bf16[2] = cast(self=%0) in 0\n  return %1\n}}\n"
    found = {}
    for left_open in ("", " open device", " open enabled", " open enabled,device"):
        made = parse_program(text.format(f"region 0: cpu bf16 enabled cached session 0 policy p{left_open}"))
        found[left_open] = made.open_region(made.steps[1]), *made.casting(made.steps[1])
    assert list(found.values()) == [(None, "cpu", None), (0, "cpu", None), (0, "cpu", 0), (0, "cpu", 0)]
    outside = parse_program(text.format("region 0: cpu bf16 enabled cached session 0 policy p").replace(" in 0", ""))
    assert outside.open_region(outside.steps[1]) is None and outside.casting(outside.steps[1]) == ("", None)
    cuda = text.format("region 0: cuda fp16 enabled cached session 0 policy p")
    known = parse_program(cuda.replace("[2]", "[2] cpu"))
    assert known.casting(known.steps[1]) == ("cpu", None)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"region": 1}, "region 1 does not exist"), ({"aliases": (1,)}, "aliases an operand"),
        ({"region": 0}, None), ({"aliases": (0,)}, None), ({"region": 2}, "region 2 does not exist"),
    ],
)  # fmt: skip
def test_the_verifier_counts_regions_and_operands(broken, says):
    """The first that is not there is rejected, the last that is there is not."""
    regions = parse_program(LINEAR).regions[:1]
    made = program(call(5, 0, **broken))
    made = replace(made, regions=regions)
    if says is None:
        verify(made)
    else:
        with pytest.raises(ProgramError, match=says):
            verify(made)


def test_edits_leave_other_steps_and_other_programs_as_they_are():
    """No edit gives the same program; a step without one is the same step; an inner block returns what it did."""
    made = parse_program(LINEAR)
    assert apply_edits(made, []) is made
    two = parse_program(TWO)
    assert apply_edits(two, [Remove(5, WHY, instead=2)]).body.steps[0] == two.body.steps[0]
    inner = apply_edits(made, [CastReturn(3, 1, fp16, WHY)])
    assert inner.steps[4].blocks[0].returns == (6,) and inner.body.returns == (4, 8)
    assert inner.steps[8].constants == "" and inner.steps[8].region is None
    exactly = apply_edits(two, [InsertCast(6, 0, fp16, WHY, exactly=True), InsertCast(5, 0, fp16, WHY, exactly=True)])
    assert [exactly.steps[n].constants for n in (7, 8)] == ["", "exactly"]
    regions = replace(two, regions=made.regions)
    region = apply_edits(regions, [InsertCast(6, 0, fp16, WHY, region=1), InsertCast(5, 0, fp16, WHY)])
    assert [region.steps[n].region for n in (7, 8)] == [None, 1]
    inside = replace(
        two, regions=made.regions, body=replace(two.body, steps=tuple(replace(s, region=1) for s in two.body.steps))
    )
    assert apply_edits(inside, [InsertCast(6, 0, fp16, WHY)]).steps[7].region == 1
    given = apply_edits(replace(two, body=replace(two.body, returns=(1,))), [CastReturn(6, 0, fp16, WHY)])
    assert given.steps[given.body.returns[0]].constants == ""  # fp64 is cast where a rule says so


def test_a_place_is_noted_as_far_as_it_is_known():
    """A module without a line; the root without a name."""
    step = call(5, 0)
    for site, note in (
        (Site("a"), "a"),
        (Site(file="/x/m.py", line=3), "(root), m.py:3"),
        (Site("a\nb"), "a?b"),
    ):
        text = print_program(program(replace(step, site=site)))
        assert f" at 0: {note}\n" in text
        assert parse_program(text).body.steps[0].site == site


@pytest.mark.parametrize("end", ["junk", "site 0: {}\njunk", "\njunk", "site 0: {}\njunk\nsite 1: {}"])
def test_what_follows_a_program_is_rejected(end):
    """Unless it is a place, or nothing."""
    with pytest.raises(ProgramError, match="the end, or a site in a program: found 'junk'"):
        parse_program(TWO + end)
    assert parse_program(TWO + "site 0: {}\n\nsite 1: {}\n") == parse_program(TWO)


def test_a_site_whose_note_is_blank_is_read_back():
    """A module may be registered under a name of one blank."""
    made = parse_program("program p\nblock main(%0: fp32) {\n  %1: fp32 = f(a=%0)\n  return %1\n}")
    (step,) = made.body.steps
    blank = replace(made, body=replace(made.body, steps=(replace(step, site=Site(" ")),)))
    assert parse_program(print_program(blank)) == blank
