"""The passes on small programs: golden before and after, what they refuse, and that each is idempotent."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import narrowcast as nc
from narrowcast.errors import RefusedError
from narrowcast.formats import bf16, fp16, fp32
from narrowcast.programs.passes import (
    AFTER_AUTOGRAD,
    BEFORE_AUTOGRAD,
    assign_casts,
    drop_casts,
    fold_casts,
    run_passes,
    share_casts,
)
from narrowcast.programs.program import Block, Operand, Program, Step, Value, apply_edits, print_program, verify

sys.path.insert(0, str(Path(__file__).parent))
from program_text import parse_program

NATIVE = nc.Policy.native("cpu")
SAFE = nc.Policy.safe("cpu")


def parse(body, policy="native"):
    return parse_program(f"program p\nregion 0: cpu bf16 enabled cached session 0 policy {policy}\n{body}")


def lines(program):
    """The steps as text, without ids of regions."""
    text = print_program(program)
    return [line.strip() for line in text.splitlines() if line.startswith("  ") and "return" not in line]


MM = parse(
    """block main(%0: fp32[4, 8] cpu grad weight, %1: fp32[2, 4] cpu, %9: fp64[2, 4] cpu) {
  %2: none = region.enter()
  %3: bf16[2, 8] cpu grad = aten.mm.default(self=%1, mat2=%0) computes in 0
  %4: fp32[2, 8] cpu grad = aten.relu.default(self=%9) computes in 0
  %5: none = region.exit(region=%2)
  %6: fp32[2, 8] cpu grad = aten.mm.default(self=%1, mat2=%0) computes
  return %3, %4, %6
}
"""
)


def test_assign_makes_the_decision_explicit():
    """Casts in front of listed calls, none elsewhere; the region is gone."""
    made = run_passes(MM, (), {"native": NATIVE})
    assert lines(made.program) == [
        "%10: bf16[2, 4] cpu = cast(self=%1) in 0",
        "%11: bf16[4, 8] cpu grad = cast(self=%0) in 0",
        "%3: bf16[2, 8] cpu grad = aten.mm.default(self=%10, mat2=%11) computes in 0",
        "%4: fp32[2, 8] cpu grad = aten.relu.default(self=%9) computes in 0",
        "%6: fp32[2, 8] cpu grad = aten.mm.default(self=%1, mat2=%0) computes",
    ]
    kinds = [(e.kind, e.op, e.argument, e.src, e.dst) for e in made.edits]
    assert kinds == [
        ("remove", "region.enter", "", "", ""),
        ("insert", "aten.mm.default", "self", "fp32", "bf16"),
        ("insert", "aten.mm.default", "mat2", "fp32", "bf16"),
        ("remove", "region.exit", "", "", ""),
    ]
    assert made.edits[1].rule.startswith("aten.mm") and made.edits[1].reason and made.edits[1].moved_bytes == 8 * 6


def test_assign_does_what_is_not_a_cast_too():
    """A dtype that the policy sets, an overload that takes one, a result that is cast back."""
    policy = nc.Policy("p").with_rules(
        nc.Rule("aten.sum", "full_set_dtype"), nc.Rule("aten.norm.Scalar", "full_append_dtype"),
        nc.Rule("aten.exp", "inside"),
    )  # fmt: skip
    program = parse(
        """block main(%0: bf16[4] cpu) {
  %1: fp32[] cpu = aten.sum.default(self=%0) computes in 0
  %2: fp32[] cpu = aten.norm.Scalar(self=%0) computes in 0
  %3: bf16[4] cpu = aten.exp.default(self=%0) computes in 0
  return %1, %2, %3
}
"""
    )
    made = run_passes(program, (), {"native": policy}, lambda op: "aten.norm.ScalarOpt_dtype").program
    assert lines(made) == [
        "%1: fp32[] cpu = aten.sum.default(self=%0) given dtype=fp32 computes in 0",
        "%2: fp32[] cpu = aten.norm.ScalarOpt_dtype(self=%0) given dtype=fp32 computes in 0",
        "%4: fp32[4] cpu = cast(self=%0) in 0",
        "%3: fp32[4] cpu = aten.exp.default(self=%4) computes in 0",
        "%5: bf16[4] cpu = cast(result=%3) in 0",
    ]
    assert made.body.returns == (1, 2, 5)


def test_assign_says_where_a_call_is_refused():
    """With the program's line, and the rule's."""
    policy = nc.Policy("p").with_rules(nc.Rule("aten.mm", "refuse", reason="not here"))
    program = parse(
        "block main(%0: fp32[4] cpu) {\n  %1: fp32[4] cpu = aten.mm.default(self=%0) computes in 0 at 0: a, m.py:7\n"
        '  return %1\n}\nsite 0: {"file": "m.py", "line": 7, "module_path": "a"}'
    )
    with pytest.raises(RefusedError, match="not here") as caught:
        assign_casts(program, {"native": policy})
    assert str(caught.value.where[0]).startswith("m.py:7")


SHARED = """block main(%0: fp32[4, 8] cpu grad{weight}, %1: fp32[2, 4] cpu) {{
  %2: bf16[4, 8] cpu grad = cast(self=%0){session}
  %3: bf16[2, 8] cpu grad = aten.mm.default(self=%1, mat2=%2) computes
  {between}%4: bf16[4, 8] cpu grad = cast(self=%0){session}
  %5: bf16[2, 8] cpu grad = aten.mm.default(self=%1, mat2=%4) computes
  return %3, %5
}}
"""
WRITE = "%9: fp32[4, 8] cpu = aten.add_.Tensor(self=%0!) ~0\n  "


@pytest.mark.parametrize(
    "weight, session, between, after_autograd, shares",
    [
        (" weight", " in 0", "", False, True),
        ("", " in 0", "", False, False),
        (" weight", "", "", False, False),
        ("", "", "", True, True),
        (" weight", " in 0", WRITE, False, False),
        ("", "", WRITE, True, False),
    ],
    ids=["weight", "activation", "user's cast", "after autograd", "written weight", "written"],
)
def test_share(weight, session, between, after_autograd, shares):
    """What eager's weight cache shares; after autograd everything that is not written to in between."""
    program = parse(SHARED.format(weight=weight, session=session, between=between))
    edits = share_casts(program, after_autograd)
    assert [(e.step, e.keep) for e in edits] == ([(4, 2)] if shares else [])


def test_share_keeps_to_one_session_and_to_grad_mode():
    """Another outermost region has another cache; a cast made without gradient is none for what needs one."""
    text = SHARED.format(weight=" weight", session=" in 0", between="")
    two = text.replace("region 0", "region 0").replace("%4: bf16[4, 8] cpu grad = cast(self=%0) in 0",
                                                       "%4: bf16[4, 8] cpu grad = cast(self=%0) in 1")  # fmt: skip
    program = parse_program(
        "program p\nregion 0: cpu bf16 enabled cached session 0 policy x\n"
        "region 1: cpu bf16 enabled cached session 1 policy x\n" + two
    )
    assert share_casts(program) == []
    for device_type, shares in (("cpu", 1), ("cuda", 0)):  # one casts what lies on the one device, one on the other
        regions = [f"region {n}: {device} bf16 enabled cached session 0 policy x open device\n"
                   for n, device in enumerate(("cpu", device_type))]  # fmt: skip
        program = parse_program("program p\n" + "".join(regions) + two.replace("] cpu", "]"))
        assert len(share_casts(program)) == shares, device_type
    first = text.replace("%2: bf16[4, 8] cpu grad = cast(self=%0)", "%2: bf16[4, 8] cpu = cast(self=%0) nograd")
    assert share_casts(parse(first)) == []
    second = text.replace("%4: bf16[4, 8] cpu grad = cast(self=%0)", "%4: bf16[4, 8] cpu = cast(self=%0) nograd")
    assert len(share_casts(parse(second))) == 0, "a session's cache and what has no gradient are kept apart"


def test_share_leaves_a_cast_that_is_returned():
    """Two results of one memory are not two results."""
    text = SHARED.format(weight=" weight", session=" in 0", between="").replace("return %3, %5", "return %3, %4")
    assert share_casts(parse(text)) == []


def test_share_sees_through_what_it_has_shared():
    """Casts of two casts that become one are equal, too."""
    program = parse("""block main(%0: fp32[4] cpu) {
  %1: fp16[4] cpu = cast(self=%0)
  %2: fp32[4] cpu = cast(self=%1)
  %3: fp16[4] cpu = cast(self=%0)
  %4: fp32[4] cpu = cast(self=%3)
  %5: fp32[4] cpu = aten.add.Tensor(self=%2, other=%4) computes
  return %5
}
""")
    assert [(e.step, e.keep) for e in share_casts(program)] == [(3, 1), (4, 2)]


FOLD = """block main(%0: {a}[4] cpu{grad}) {{
  %1: {b}[4] cpu{grad} = cast(self=%0)
  %2: {c}[4] cpu{grad} = cast(self=%1)
  %3: fp32[4] cpu = aten.exp.default(self=%2) computes
  {other}return %3
}}
"""
OTHER = "%4: fp32[4] cpu = aten.exp.default(self=%1) computes\n  "


@pytest.mark.parametrize(
    "a, b, c, grad, other, after_autograd, folds",
    [
        ("bf16", "fp32", "fp16", "", "", False, True),
        ("fp32", "bf16", "fp16", "", "", True, False),
        ("bf16", "fp32", "fp64", " grad", "", False, False),
        ("bf16", "fp32", "fp64", " grad", "", True, True),
        ("bf16", "fp32", "fp16", " grad", "", False, True),
        ("bf16", "fp32", "fp16", " grad", OTHER, False, False),
        ("bf16", "fp32", "bf16", "", "", False, True),
    ],
)
def test_fold(a, b, c, grad, other, after_autograd, folds):
    """Only where nothing is lost: there, and on the gradient's way back while there is one."""
    program = parse(FOLD.format(a=a, b=b, c=c, grad=grad, other=other))
    assert [(e.step, e.source) for e in fold_casts(program, after_autograd)] == ([(2, 0)] if folds else [])


def test_fold_and_drop_take_a_way_there_and_back_away():
    """bf16 -> fp32 -> bf16 is nothing."""
    program = parse(FOLD.format(a="bf16", b="fp32", c="bf16", grad="", other=""))
    made = run_passes(program, BEFORE_AUTOGRAD)
    assert lines(made.program) == ["%3: fp32[4] cpu = aten.exp.default(self=%0) computes"]
    assert [(e.by, e.kind) for e in made.edits] == [("fold", "fold"), ("drop", "remove"), ("drop", "remove")]


IDLE = """block main(%0: fp32[4] cpu{grad}) {{
  %1: fp32[4] cpu{grad} = cast(self=%0)
  %2: fp32[4] cpu = aten.exp.default(self=%1) computes
  {more}return {returned}
}}
"""


@pytest.mark.parametrize(
    "grad, more, returned, after_autograd, drops",
    [
        ("", "", "%2", False, True),
        (" grad", "", "%2", False, True),
        (" grad", "%3: fp32[4] cpu = aten.exp.default(self=%0)\n  ", "%2", False, False),
        (" grad", "%3: fp32[4] cpu = aten.exp.default(self=%0)\n  ", "%2", True, True),
        ("", "", "%1", False, False),
        ("", "%3: fp32[4] cpu = aten.exp_.default(self=%0!) ~0\n  ", "%2", False, False),
        ("", "%3: fp32[4] cpu = aten.exp_.default(self=%1!) ~0\n  ", "%2", False, False),
    ],
)
def test_drop(grad, more, returned, after_autograd, drops):
    """A cast to itself goes where nobody can tell."""
    program = parse(IDLE.format(grad=grad, more=more, returned=returned))
    assert [e.step for e in drop_casts(program, after_autograd)] == ([1] if drops else [])


FORMATS = ("fp32", "bf16", "fp16", "fp64")


@st.composite
def chains(draw):
    """Casts of casts, calls, in-place ops and views in any order."""
    parameters = tuple(
        Value(n, draw(st.sampled_from(FORMATS)), (4,), "cpu", draw(st.booleans()), draw(st.booleans()))
        for n in range(2)
    )
    values = {v.id: v for v in parameters}
    steps = []
    for number in range(2, 2 + draw(st.integers(1, 12))):
        source = values[draw(st.sampled_from(list(values)))]
        what = draw(st.sampled_from(["cast", "cast", "cast", "call", "write", "view"]))
        kind = draw(st.sampled_from(FORMATS)) if what == "cast" else source.type
        made = Value(number, kind, (4,), "cpu", source.gradient)
        operand = Operand("self", source.id, written=what == "write")
        op = {"cast": "cast", "call": "aten.exp.default", "write": "aten.exp_.default", "view": "aten.t.default"}[what]
        aliases = (0,) if what in ("write", "view") else ()
        steps.append(Step(made, op, (operand,), computes=what == "call", region=0, aliases=aliases))
        values[number] = made
    returns = tuple(draw(st.lists(st.sampled_from(list(values)), min_size=1, max_size=2, unique=True)))
    region = parse("block m(%0: fp32[4] cpu) {\n  return %0\n}\n").regions
    return Program("p", Block("main", parameters, tuple(steps), returns), region)


@given(chains(), st.booleans())
def test_each_pass_is_idempotent_and_leaves_a_valid_program(program, after_autograd):
    """A second run finds nothing to do."""
    for one in (share_casts, fold_casts, drop_casts):
        once = apply_edits(program, one(program, after_autograd))
        verify(once)
        if one is not drop_casts:
            assert one(once, after_autograd) == []
        else:  # what a dropped cast read may be a cast that nobody reads now
            for _ in range(len(program.steps)):
                once = apply_edits(once, drop_casts(once, after_autograd))
            assert drop_casts(once, after_autograd) == []


@given(chains())
def test_all_passes_together_end(program):
    """Running them again changes nothing."""
    made = run_passes(program, AFTER_AUTOGRAD * 3).program
    assert run_passes(made, AFTER_AUTOGRAD).program == made


def boundary(rule, line, types="fp32[4] cpu", policy=None):
    """The edits that `assign` makes for one value at the edge of a module's call."""
    given = policy or nc.Policy("p", extends=()).with_rules(rule)
    program = parse(f"block main(%0: {types}, %1: {types}) {{\n  {line}\n  return %2\n}}\n")
    return assign_casts(program, {"native": given})


ARGUMENT = '%2: fp32[4] cpu = module.call.default(x=%0) with "argument" computes in 0'
RESULT_LINE = '%2: {type} cpu = module.call.default(x=%0, result=%1) with "result{part}" computes in 0'


def test_a_value_that_goes_into_a_module_is_cast_by_the_rule_of_its_argument():
    """By that of the whole call otherwise, and exactly where the rule says so."""
    (edit,) = boundary(nc.Rule("module.call", "lower", argument="x", reason="narrow"), ARGUMENT)
    assert (edit.step, edit.operand, edit.dst, edit.exactly) == (2, 0, bf16, False)
    assert edit.why.reason == "narrow" and edit.why.policy == "p+" and edit.region == 0
    (edit,) = boundary(nc.Rule("module.call", "to(fp16)"), ARGUMENT)
    assert edit.dst is fp16 and edit.exactly
    assert boundary(nc.Rule("module.call", "lower", argument="y"), ARGUMENT) == []
    assert boundary(nc.Rule("module.call", "full"), ARGUMENT) == []


def test_what_comes_out_of_a_module_is_cast_by_the_rule_of_its_result():
    """The part that the rule names, or all; nothing where it has the format, or is no float."""
    whole = RESULT_LINE.format(type="fp32[4]", part="")
    second = RESULT_LINE.format(type="fp32[4]", part=" 1")
    (edit,) = boundary(nc.Rule("module.call", "lower", argument="result", reason="out"), whole)
    assert (edit.step, edit.src, edit.dst, edit.exactly, edit.like) == (2, fp32, bf16, False, ())
    assert edit.why.reason == "out"
    (edit,) = boundary(nc.Rule("module.call", "to(fp16)", argument="result.1"), second)
    assert edit.dst is fp16 and edit.exactly
    assert boundary(nc.Rule("module.call", "lower", argument="result.1"), whole) == []
    first = RESULT_LINE.format(type="fp32[4]", part=" 0")
    assert boundary(nc.Rule("module.call", "lower", argument="result.1"), first) == []
    assert boundary(nc.Rule("module.call", "full", argument="result"), whole) == []
    integers = RESULT_LINE.format(type="i64[4]", part="")
    assert boundary(nc.Rule("module.call", "lower", argument="result"), integers, "i64[4] cpu") == []
    assert boundary(nc.Rule("module.call", "lower", argument="x"), whole) == []


def test_a_rule_about_all_of_a_result_reaches_the_parts_that_have_none():
    """And what the region's format is for one, another one may be for its neighbour."""
    rules = (nc.Rule("module.call", "lower", argument="result", reason="all"),
             nc.Rule("module.call", "to(fp16)", argument="result.1"))  # fmt: skip
    (edit,) = boundary(None, RESULT_LINE.format(type="fp32[4]", part=" 0"), policy=nc.Policy("p", (rules,), ()))
    assert edit.dst is bf16 and edit.why.reason == "all"


def test_a_result_that_follows_what_only_the_running_program_knows_is_cast_like_the_arguments():
    """Except those that rules of their own let follow, unless these are all."""
    line = '%2: tensor[4] cpu = module.call.default(x=%0, y=%0, result=%1) with "result" computes in 0'
    follow = nc.Rule("module.call", "follow", argument="result")
    (edit,) = boundary(follow, line, "tensor[4] cpu")
    assert edit.src is None and edit.dst is None and edit.like == (0, 0)
    kept = nc.Policy("p", ((follow, nc.Rule("module.call", "follow", argument="x")),), ())
    (edit,) = boundary(None, line, "tensor[4] cpu", kept)
    assert edit.like == (0,)
    both = nc.Policy("p", ((follow, *(nc.Rule("module.call", "follow", argument=a) for a in "xy")),), ())
    (edit,) = boundary(None, line, "tensor[4] cpu", both)
    assert edit.like == (0, 0)


def test_a_module_s_call_may_be_refused():
    """As an op may."""
    with pytest.raises(RefusedError, match="keep out"):
        boundary(nc.Rule("module.call", "refuse", reason="keep out"), ARGUMENT)


BACKWARD = """block main(%0: fp32[4, 4] cpu, %1: bf16[4, 4] cpu) {{
  %2: bf16[4, 4] cpu = aten.mm.default(self=%1, mat2=%1) computes backward in 0
  {between}%3: fp32[4, 4] cpu = cast(self=%{last})
  %4: bf16[4, 4] cpu = aten.mul.Tensor(self=%{last}, other=%1) computes
  return {returns}
}}
"""


@pytest.mark.parametrize(
    ("between", "last", "returns", "expected"),
    [
        ("", 2, "%3, %4", ["Follow 2", "InsertCast 4"]),
        ("%9: bf16[4, 4] cpu = aten.t.default(self=%2) ~0\n  ", 9, "%3, %4", ["Follow 2", "Follow 9", "InsertCast 4"]),
        ("", 2, "%2, %3, %4", ["CastResult 2"]),
        ("%9: bf16[4, 4] cpu = aten.t.default(self=%2) ~0\n  ", 9, "%9, %3, %4", ["CastResult 2"]),
    ],
    ids=["read", "read through a view", "returned", "returned through a view"],
)
def test_the_result_of_a_raised_backward_op_keeps_its_format_for_all_but_casts(between, last, returns, expected):
    """Nobody captured it in the new format: casts take it, other readers get what they had."""
    program = parse(BACKWARD.format(between=between, last=last, returns=returns))
    policy = nc.Policy("p", extends=()).with_rules(nc.Rule("backward.aten.mm", "full"))
    edits = assign_casts(program, {"native": policy})
    assert [f"{type(e).__name__} {e.step}" for e in edits] == ["InsertCast 2", "InsertCast 2", *expected]
    assert verify(apply_edits(program, edits)) is None


def test_the_elements_of_a_raised_backward_op_s_tuple_follow():
    """Each by itself; what is no float, or has the format, stays."""
    program = parse(
        """block main(%0: fp32[4, 4] cpu, %1: bf16[4, 4] cpu) {
  %2: tuple = aten.linear_backward.default(self=%1, grad_output=%1, weight=%1) computes backward in 0
  %3: bf16[4, 4] cpu = getitem(a0=%2) with "0" ~0
  %4: fp32[4, 4] cpu = getitem(a0=%2) with "1" ~0
  %5: i64[4] cpu = getitem(a0=%2) with "2" ~0
  %6: bf16[4, 4] cpu = aten.relu.default(self=%3) computes
  return %4, %5, %6
}
"""
    )
    policy = nc.Policy("p", extends=()).with_rules(nc.Rule("backward.aten.linear_backward", "full"))
    edits = assign_casts(program, {"native": policy})
    assert [f"{type(e).__name__} {e.step}" for e in edits] == [*["InsertCast 2"] * 3, "Follow 3", "InsertCast 6"]
