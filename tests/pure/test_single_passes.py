"""Passes one at a time: what is hoisted, what results are cast from, and what is recorded of an edit."""

import sys
from pathlib import Path

import pytest

import narrowcast as nc
from narrowcast.errors import RefusedError
from narrowcast.formats import bf16, fp16, fp32
from narrowcast.programs.passes import (
    assign_casts,
    call_of,
    drop_casts,
    fold_casts,
    hoist_casts,
    run_passes,
    share_casts,
)
from narrowcast.programs.passes.pipeline import before_autograd
from narrowcast.programs.passes.readers import count_readers
from narrowcast.programs.program import (
    CastResult,
    CastReturn,
    CastTogether,
    Follow,
    InsertCast,
    Remove,
    Reread,
    SetDtype,
    Share,
    Why,
    edit_records,
    print_program,
)  # fmt: skip

sys.path.insert(0, str(Path(__file__).parent))
from program_text import parse_program

NATIVE = nc.Policy.native("cpu")


def parse(body, policy="native"):
    return parse_program(f"program p\nregion 0: cpu bf16 enabled cached session 0 policy {policy}\n{body}")


MM = parse(
    """block main(%0: fp32[4, 8] cpu, %1: fp32[2, 4] cpu) {
  %2: none = region.enter()
  %3: bf16[2, 8] cpu = aten.mm.default(self=%1, mat2=%0) computes in 0
  %5: none = region.exit(region=%2)
  return %3
}
"""
)


def hoisted(body, sessions=None, regions="region 0: cpu bf16 enabled cached session 1 policy native"):
    """What `hoist` makes one cast of: (before, casts)."""
    program = parse_program(f"program p\n{regions}\nblock main({body}\n}}\n")
    edits = hoist_casts(program, {1: program.body.steps[0].id} if sessions is None else sessions)
    assert all(edit.step == edit.casts[0] for edit in edits)
    return [(edit.before, edit.casts) for edit in edits]


WEIGHTS = """%0: fp32[2] cpu grad weight, %1: fp32[2] cpu grad weight, %2: bool) {
  %3: fp32[2] cpu = aten.relu.default(self=%1)
  %4: bf16[2] cpu grad = cast(self=%0) in 0
  %5: bf16[2] cpu grad = cast(self=%1) in 0
  %6: bf16[2] cpu grad = cast(self=%0) in 0
  return %4, %5, %6"""
TENSORS = WEIGHTS.replace("fp32[2] cpu grad weight", "tensor[2] cpu")


def test_the_casts_of_a_weight_in_one_session_are_one_before_the_first():
    """One that stands alone stays; a session that begins elsewhere, or nowhere, is another matter."""
    assert hoisted(WEIGHTS) == [(4, (4, 6))]
    assert hoisted(TENSORS) == [(4, (4, 6))]
    assert hoisted(WEIGHTS, {}) == hoisted(WEIGHTS, {2: 3}) == hoisted(WEIGHTS, {1: 99}) == []
    assert hoisted(WEIGHTS.replace(" weight", "")) == []


def test_what_the_weight_cache_would_not_keep_is_not_hoisted():
    """Without a cache, or to the format of weights; any other format than the region's is kept, as a rule names it."""
    assert hoisted(WEIGHTS, regions="region 0: cpu bf16 enabled uncached session 1 policy native") == []
    assert hoisted(WEIGHTS.replace("bf16", "fp32")) == []
    assert hoisted(WEIGHTS, regions="region 0: cpu fp16 enabled cached session 1 policy native") == [(4, (4, 6))]
    user_s = WEIGHTS.replace(" in 0", "")
    assert hoisted(user_s) == []


def test_casts_to_two_formats_are_two():
    """And weights apart, each by itself."""
    two = WEIGHTS.replace("%6: bf16[2] cpu grad = cast(self=%0)", "%6: bf16[2] cpu grad = cast(self=%1)")
    assert hoisted(two) == [(5, (5, 6))]
    both = two.replace("  return", "  %7: bf16[2] cpu grad = cast(self=%0) in 0\n  return")
    assert hoisted(both) == [(4, (4, 7)), (5, (5, 6))]


def test_a_weight_that_something_writes_to_is_not_hoisted():
    """The next one still is."""
    more = "  %7: fp32[2] cpu = aten.add_.Tensor(self=%0!) ~0\n  %8: bf16[2] cpu grad = cast(self=%1) in 0\n  return"
    assert hoisted(WEIGHTS.replace("  return", more)) == [(5, (5, 8))]
    first = WEIGHTS.replace("aten.relu.default(self=%1)", "aten.relu_.default(self=%0!) ~0")
    assert hoisted(first) == []


def test_a_cast_that_would_stand_where_no_gradient_is_recorded_is_made_for_those_alone():
    """It carries none; casts that need one keep their own."""
    none = WEIGHTS.replace("%4: bf16[2] cpu grad = cast(self=%0)", "%4: bf16[2] cpu = cast(self=%0) nograd")
    assert hoisted(none) == []
    line = "  %7: bf16[2] cpu = cast(self=%0) nograd in 0\n  return"
    assert hoisted(none.replace("  return", line)) == [(4, (4, 7))]


LOOP = """{given}) {{
  %3: none = aten.noted.default()
  %4: other = prim.Loop(a=%2)
    block body(%9: {kind}) {{
      %5: bf16[2] cpu = cast(self=%{inside}) in 0
      return %5
    }}
  %6: bf16[2] cpu = cast(self=%0) in 0
  return %4, %6"""


def test_a_cast_in_a_loop_is_hoisted_out_of_it_if_what_it_reads_is_around_it():
    """Not what is made inside; and not where only the loop knows whether the region holds."""
    given = "%0: fp32[2] cpu grad weight, %2: bool"
    inside = LOOP.format(given=given, kind="fp32[2] cpu grad weight", inside=0)
    assert hoisted(inside) == [(4, (5, 6))]
    alone = inside.replace("  %6: bf16[2] cpu = cast(self=%0) in 0\n", "").replace("%4, %6", "%4")
    assert hoisted(alone) == [(4, (5,))]
    assert hoisted(LOOP.format(given=given, kind="fp32[2] cpu grad weight", inside=9)) == []
    opened = "region 0: cpu bf16 enabled cached session 1 policy native open {}"
    assert hoisted(inside, regions=opened.format("enabled")) == []
    assert hoisted(inside, regions=opened.format("device")) == [(4, (5, 6))]
    assert hoisted(WEIGHTS, regions=opened.format("enabled")) == [(4, (4, 6))]


@pytest.mark.parametrize(
    ("maker", "is_hoisted"),
    [
        ("aten.view.default(self=%0) ~0", True),
        ("aten.mm.default(self=%0) computes", False),
        ("cast.weight(self=%0)", False),
        ("prim.Uninitialized()", False),
    ],
)
def test_a_tensor_is_hoisted_that_may_be_a_weight(maker, is_hoisted):
    """What a call computed is none; what is passed on may be; and what a branch left out must not be read."""
    text = (
        f"%0: tensor[2] cpu) {{\n  %3: tensor[2] cpu = {maker}\n  %4: bf16[2] cpu = cast(self=%3) in 0\n"
        "  %5: bf16[2] cpu = cast(self=%3) in 0\n  return %4, %5"
    )
    assert hoisted(text) == ([(4, (4, 5))] if is_hoisted else [])
    tupled = (
        f"%0: tensor[2] cpu) {{\n  %3: tuple = {maker}\n"
        "  %6: tensor[2] cpu = getitem(a0=%3) ~0\n  %4: bf16[2] cpu = cast(self=%6) in 0\n"
        "  %5: bf16[2] cpu = cast(self=%6) in 0\n  return %4, %5"
    )
    assert hoisted(tupled) == ([(4, (4, 5))] if is_hoisted or "cast.weight" in maker else [])


def test_what_a_branch_that_was_left_early_gives_is_not_read():
    """Nor what is taken from it."""
    text = """%0: tensor[2] cpu, %1: bool) {
  %3: tensor[2] cpu = prim.If(a=%1)
    block yes() {
      return %0
    }
    block no() {
      %7: tensor[2] cpu = prim.Uninitialized()
      return %7
    }
  %4: bf16[2] cpu = cast(self=%3) in 0
  %5: bf16[2] cpu = cast(self=%3) in 0
  return %4, %5"""
    assert hoisted(text) == []
    assert hoisted(text.replace("prim.Uninitialized", "aten.noted.default")) == [(4, (4, 5))]


def test_an_op_that_is_cast_by_what_it_calls_reads_no_weight():
    """Its operands are cast inside."""
    more = '  %7: fp32[2] cpu = aten.op.default(self=%4) with "cast by what it calls"\n  return'
    assert hoisted(WEIGHTS.replace("  return", more)) == []


TUPLES = """block main(%0: bf16[4] cpu, %1: {second}[4] cpu) {{
  %2: tuple = aten.op.default(x=%0, y=%1) computes in 0
  %3: {result}[4] cpu = getitem(a0=%2) with "0"
  %4: {result}[4] cpu = getitem(a0=%2) with "1"
  %5: i64[4] cpu = getitem(a0=%2) with "2"
  %6: tuple = aten.op.default(x=%0) computes
  %7: fp16[4] cpu = getitem(a0=%6) with "1"
  return %3, %4, %5, %7
}}
"""


@pytest.mark.parametrize(
    ("second", "result", "rule", "expected"),
    [
        ("bf16", "fp16", ("to(fp16)", "result"), [(3, bf16, fp16), (4, bf16, fp16)]),
        ("bf16", "fp16", ("to(fp16)", "result.1"), [(4, bf16, fp16)]),
        ("fp32", "fp16", ("to(fp16)", "result.1"), [(4, fp32, fp16)]),
        ("bf16", "bf16", ("to(bf16)", "result"), []),
        ("bf16", "tensor", ("to(fp16)", "result.0"), [(3, None, fp16)]),
    ],
)
def test_the_elements_of_a_tuple_are_cast_as_results_are(second, result, rule, expected):
    """From the format that the op computes in, as far as that is known; those of other ops are left."""
    action, argument = rule
    policy = nc.Policy("p", extends=()).with_rules(nc.Rule("aten.op", action, argument=argument))
    edits = assign_casts(parse(TUPLES.format(second=second, result=result)), {"native": policy})
    assert [(e.step, e.src, e.dst) for e in edits] == expected


def test_a_result_is_cast_from_the_format_that_the_casts_before_give():
    """Of those that the policy asks for, and those that came."""
    rules = (nc.Rule("aten.op", "to(fp16)", argument="result"), nc.Rule("aten.op", "full", argument="x"))
    text = """block main(%0: bf16[4] cpu, %1: i64[4] cpu) {{
  %2: {0}[4] cpu = aten.op.default(x={1}) computes in 0
  return %2
}}
"""
    policy = nc.Policy("p", (rules,), ())
    edits = assign_casts(parse(text.format("fp16", "%0")), {"native": policy})
    assert [(type(e).__name__, getattr(e, "src", None)) for e in edits] == [("InsertCast", None), ("CastResult", fp32)]
    (edit,) = assign_casts(parse(text.format("fp16", "%1")), {"native": policy})
    assert edit.src is None and edit.dst is fp16


def test_a_result_that_nobody_knows_the_format_of_is_refused():
    """With the program's line, and the rule's."""
    rule = nc.Rule("aten.op", "follow", argument="result", origin=nc.errors.Origin("my.toml", 4))
    text = """block main(%0: tensor[4] cpu) {
  %2: tensor[4] cpu = aten.op.default(x=%0) computes in 0 at 0: a, m.py:7
  return %2
}
site 0: {"file": "m.py", "line": 7, "module_path": "a"}"""
    with pytest.raises(RefusedError, match="does not say what format comes in") as caught:
        assign_casts(parse(text), {"native": nc.Policy("p", extends=()).with_rules(rule)})
    assert [w.file for w in caught.value.where] == ["m.py", "my.toml"]


def test_the_record_of_an_edit_says_what_is_cast_and_what_it_moves():
    """Formats, bytes, rule and argument, as far as there are any."""
    rule = nc.Rule("aten.mul", "to(fp16)", reason="why")
    why, plain = Why("test", "why", rule, "p"), Why("test", "because")
    program = parse(
        """block main(%0: fp32[5] cpu, %1: fp32["n"] cpu) {
  %2: bf16[5] cpu = cast(self=%0)
  %3: bf16[5] cpu = aten.mul.Tensor(self=%2, other=%2, out=%1) computes
  %4: bf16["n"] cpu = cast(self=%1)
  return %3, %4
}
"""
    )
    edits = [
        InsertCast(3, 1, fp16, why), CastResult(3, fp32, fp16, plain), CastResult(3, None, None, plain),
        SetDtype(3, fp32, plain), Follow(3, fp32, plain), CastReturn(3, 0, fp32, plain), Reread(3, 0, 0, plain),
        CastTogether(3, (0, 1), plain), Remove(2, plain), Share(4, 2, plain), Remove(3, plain),
    ]  # fmt: skip
    rows = edit_records(program, edits)
    assert [(r.kind, r.argument, r.src, r.dst, r.moved_bytes) for r in rows] == [
        ("insert", "other", "bf16", "fp16", 20), ("insert", "result", "fp32", "fp16", 30),
        ("insert", "result", "tensor", "tensor", 0), ("set dtype", "", "", "fp32", 0), ("follow", "", "", "fp32", 0),
        ("insert", "returned", "fp32", "fp32", 40), ("remove", "self", "fp32", "", 0),
        ("insert", "self, other", "", "", 0), ("remove", "", "fp32", "bf16", 30), ("share", "", "fp32", "bf16", 0),
        ("remove", "", "", "", 0),
    ]  # fmt: skip
    assert all(isinstance(row.moved_bytes, int) for row in rows)
    assert (rows[0].action, rows[0].rule, rows[0].reason, rows[0].policy) == ("to(fp16)", str(rule), "why", "p")
    assert (rows[1].action, rows[1].rule) == ("", "")


def test_a_program_is_verified_with_and_without_policies():
    """Only assigned ones have no region's edge left."""
    assert "region.enter" in print_program(run_passes(MM, ()).program)
    assert "region.enter" not in print_program(run_passes(MM, (), {"native": NATIVE}).program)


def test_casts_move_before_autograd_only_where_they_keep_strides():
    """The pipeline before autograd, with what may be moved named; sharing and dropping follow."""
    assert [p for p in before_autograd(frozenset()) if p in (share_casts, drop_casts)] == [
        share_casts, drop_casts, share_casts, drop_casts,
    ]  # fmt: skip


def block(parameters, *steps, returns):
    """A program of these lines, and what it returns."""
    body = "\n".join(f"  {step}" for step in steps)
    return parse(f"block main({parameters}) {{\n{body}\n  return {returns}\n}}\n")


def shared(*steps, returns="%0", after_autograd=False, parameters="%0: fp32[4] cpu, %1: fp32[4] cpu"):
    program = block(parameters, *steps, returns=returns)
    return [(e.step, e.keep) for e in share_casts(program, after_autograd)]


def low(number, source=0, more=""):
    return f"%{number}: bf16[4] cpu{more} = cast(self=%{source})"


def test_share_goes_on_after_what_it_does_not_share():
    """Other steps, casts of one kind alone, casts that may not be shared, and results that would be one."""
    relu = "%9: fp32[4] cpu = aten.relu.default(self=%1)"
    assert shared(relu, low(2), relu.replace("9", "8"), low(3, 1), low(4), low(5, 1)) == [(4, 2), (5, 3)]
    gradient = "%0: fp32[4] cpu grad, %1: fp32[4] cpu"
    assert shared(low(2, 0, " grad"), low(3, 1), low(4, 0, " grad"), low(5, 1), parameters=gradient) == [(5, 3)]
    assert shared(low(2), low(3), low(4, 1), low(5, 1), returns="%2, %3") == [(5, 4)]
    assert shared(low(2), low(3, 0).replace("bf16", "fp16"), low(4)) == [(4, 2)]
    assert shared(low(2), low(3, 0) + ' with "exactly"', low(4)) == [(4, 2)]


def test_share_keeps_apart_what_is_written_to():
    """The one that stays, or the one that goes; one after that may be shared with it again."""
    write = "%9: bf16[4] cpu = aten.relu_.default(self=%{}!) ~0"
    assert shared(low(2), low(3), write.format(2), low(4), low(5)) == [(4, 3), (5, 3)]
    assert shared(low(2), low(3), write.format(3)) == []
    source = write.format(0).replace("bf16", "fp32")
    assert shared(low(2), low(3), source, low(4), low(5)) == [(3, 2), (5, 4)]


def test_share_returns_one_of_two_views():
    """Of two casts whose memory leaves only one may; if the first does not leave yet, it does then."""
    view = "%{}: bf16[2, 2] cpu = aten.view.default(self=%{}) ~0"
    two = (low(2), low(3), view.format(8, 2), view.format(9, 3))
    assert shared(*two, returns="%8, %9") == []
    assert shared(*two, returns="%9") == shared(*two, returns="%8") == [(3, 2)]
    three = (low(2), low(3), low(4), view.format(8, 3), view.format(9, 4))
    assert shared(*three, returns="%8, %9") == [(3, 2)]
    assert shared(low(2), low(3), low(4), returns="%3") == [(4, 2)]


def test_share_after_autograd_keeps_what_records_apart_from_what_does_not():
    """A cast made without gradient is none for what needs one; the other way round it is."""
    gradient = "%0: fp32[4] cpu grad, %1: fp32[4] cpu"
    quiet, loud = low(2, 0) + " nograd", low(3, 0, " grad")
    assert shared(quiet, loud, after_autograd=True, parameters=gradient) == []
    assert shared(quiet, loud.replace(" grad ", " "), after_autograd=True, parameters=gradient) == [(3, 2)]
    assert shared(loud, quiet, after_autograd=True, parameters=gradient) == [(2, 3)]
    assert shared(low(2, 0, " grad"), loud, after_autograd=True, parameters=gradient) == [(3, 2)]
    assert shared(low(2, 0, " grad"), loud, parameters=gradient) == []
    assert shared(quiet, low(3, 0) + " nograd", parameters=gradient) == [(3, 2)]


INNER = """block main(%0: {0}[4] cpu, %1: bool) {{
  %2: other = prim.If(a=%1)
    block yes() {{
      {1}
      return %{2}
    }}
    block no() {{
      return %0
    }}
  {3}
  return %2, %9
}}
"""


def test_each_block_is_done_by_itself():
    """What is found in an inner block is added to what is found in the others."""
    text = INNER.format("fp32", f"{low(3)}\n      {low(4)}\n      %5: bf16[4] cpu = aten.add.Tensor(a=%3, b=%4)", 5,
                        f"{low(6)}\n  {low(7)}\n  %9: bf16[4] cpu = aten.add.Tensor(a=%6, b=%7)")  # fmt: skip
    assert [(e.step, e.keep) for e in share_casts(parse(text))] == [(4, 3), (7, 6)]
    chain = "%{0}: fp32[4] cpu = cast(self=%0)\n%{1}: fp16[4] cpu = cast(self=%{0})"
    text = INNER.format("bf16", chain.format(3, 4), 4, chain.format(6, 9))
    assert [(e.step, e.source) for e in fold_casts(parse(text))] == [(4, 0), (9, 0)]
    unread = low(3) + "\n      %4: fp32[4] cpu = aten.relu.default(self=%0)"
    text = INNER.format("fp32", unread, 4, low(6) + "\n  %9: fp32[4] cpu = aten.relu.default(self=%0)")
    assert [e.step for e in drop_casts(parse(text))] == [3, 6]


def folded(*steps, parameters="%0: bf16[4] cpu, %1: bf16[4] cpu", returns="%0", **more):
    return [(e.step, e.source) for e in fold_casts(block(parameters, *steps, returns=returns), **more)]


def chain(first, second, source=0, more=""):
    return (
        f"%{first}: fp32[4] cpu{more} = cast(self=%{source})", f"%{second}: fp16[4] cpu{more} = cast(self=%{first})"
    )  # fmt: skip


def test_fold_goes_on_after_what_it_does_not_fold():
    """Chains that round first, that carry a gradient, and that something writes to."""
    fine = chain(8, 9, 1)
    assert folded(*fine) == [(9, 1)]
    rounds = ("%2: e4m3fn[4] cpu = cast(self=%0)", "%3: fp16[4] cpu = cast(self=%2)")
    assert folded(*rounds, *fine) == [(9, 1)]
    gradient = ("%0: fp16[4] cpu grad, %1: bf16[4] cpu", chain(2, 3, 0, " grad"))
    back = "%4: fp32[4] cpu = aten.relu.default(self=%2)"
    assert folded(*gradient[1], back, *fine, parameters=gradient[0]) == [(9, 1)]
    for written in (0, 2):
        kind = "fp32" if written else "bf16"
        write = f"%5: {kind}[4] cpu = aten.relu_.default(self=%{written}!) ~0"
        first, second = chain(2, 3)
        assert folded(first, write, second, *fine) == [(9, 1)]
        assert folded(first, second, write, *fine) == [(3, 0), (9, 1)]


def test_a_chain_of_three_is_folded_to_its_beginning():
    """As far as nothing is lost."""
    first, second = chain(2, 3)
    assert folded(first, "%3: fp64[4] cpu = cast(self=%2)", "%4: fp16[4] cpu = cast(self=%3)") == [(3, 0), (4, 0)]
    assert folded(first, second, "%4: fp32[4] cpu = cast(self=%3)") == [(3, 0)]


def test_a_chain_in_a_region_that_may_be_off_is_left():
    """One of the two casts may do nothing."""
    opened = "program p\nregion 0: cpu bf16 enabled cached session 0 policy p{}\nblock main(%0: bf16[4] cpu) {{\n"
    opened += "  {}{}\n  {}{}\n  return %3\n}}\n"
    for left_open, first, second, expected in (
        ("", " in 0", " in 0", [3]), (" open enabled", " in 0", "", []), (" open enabled", "", " in 0", []),
        (" open enabled", "", "", [3]),
    ):  # fmt: skip
        one, two = chain(2, 3)
        program = parse_program(opened.format(left_open, one, first, two, second))
        assert [e.step for e in fold_casts(program)] == expected
        idle = parse_program(opened.format(left_open, "%2: bf16[4] cpu = cast(self=%0)", first,
                                           "%3: bf16[4] cpu = aten.relu.default(self=%2)", ""))  # fmt: skip
        assert [e.step for e in drop_casts(idle)] == ([] if first and left_open else [2])


def dropped(*steps, returns="%0", parameters="%0: fp32[4] cpu, %1: fp32[4] cpu", **more):
    return [e.step for e in drop_casts(block(parameters, *steps, returns=returns), **more)]


def test_a_cast_of_a_cast_that_nobody_reads_goes_with_it():
    """Both at once; one that something else reads stays."""
    second = "%3: fp16[4] cpu = cast(self=%2)"
    assert dropped(low(2), second) == [3, 2]
    assert dropped(low(2), second, "%4: fp32[4] cpu = cast(self=%2)") == [4, 3, 2]
    assert dropped(low(2), second, "%4: bf16[4] cpu = aten.relu.default(self=%2)") == [3]
    assert dropped(low(2), second, returns="%3") == []


def test_an_idle_cast_that_is_returned_stays_where_its_source_leaves_too():
    """As itself, as a view, or as what the caller gave; another one goes."""
    idle, made = "%3: fp32[4] cpu = cast(self=%2)", "%2: fp32[4] cpu = aten.relu.default(self=%0)"
    assert dropped(made, idle, returns="%3") == [3]
    assert dropped(made, idle, returns="%3, %2") == []
    view = "%4: fp32[2, 2] cpu = aten.view.default(self=%2) ~0"
    assert dropped(made, view, idle, returns="%3, %4") == []
    assert dropped(made, view, idle, returns="%3") == [3]
    assert dropped("%2: fp32[4] cpu = aten.view.default(self=%0) ~0", idle, returns="%3") == []
    assert dropped(made, idle, returns="%3, %0") == [3]
    again = "%4: fp32[4] cpu = cast(self=%2)"  # of two copies that leave one stays: they would be one tensor
    assert dropped(made, idle, again, returns="%3, %4") == [3]
    assert dropped(made, idle, again, returns="%3, %3, %0") == [4, 3]


def test_an_idle_cast_with_a_gradient_goes_if_it_is_its_source_s_one_reader():
    """Gradients add up where they did."""
    grad = "%0: fp32[4] cpu grad"
    idle, read = "%3: fp32[4] cpu grad = cast(self=%0)", "%4: fp32[4] cpu = aten.relu.default(self=%3)"
    assert dropped(idle, read, parameters=grad, returns="%4") == [3]
    assert dropped(idle, read, parameters=grad, returns="%4, %0") == []
    assert dropped(idle, read, parameters=grad, returns="%4, %0", after_autograd=True) == [3]


BOUND = """block main(%0: {x}[4] cpu, %1: {y}[4] cpu, %2: {z}[4] cpu) {{
  %3: {z}[4] cpu = module.call.default(x=%0, y=%1, result=%2) with "result" computes in 0
  return %3
}}
"""


def bound(rules, **types):
    return assign_casts(parse(BOUND.format(**types)), {"native": nc.Policy("p", (rules,), ())})


def test_a_module_s_result_comes_in_its_own_format():
    """Not in that of an argument; and a part is no whole, whatever it is called."""
    lower = (nc.Rule("module.call", "lower", argument="result"),)
    assert bound(lower, x="fp32", y="fp16", z="bf16") == []
    (edit,) = bound(lower, x="bf16", y="bf16", z="fp32")
    assert edit.src is fp32
    assert bound((nc.Rule("module.call", "lower", argument="result.result"),), x="fp32", y="fp32", z="fp32") == []


def test_a_result_follows_arguments_that_no_rule_keeps():
    """Those that have a rule of their own are left out."""
    rules = (nc.Rule("module.call", "follow", argument="result"), nc.Rule("module.call", "follow", argument="x"))
    (edit,) = bound(rules, x="tensor", y="tensor", z="tensor")
    assert edit.like == (1,)


def test_the_reason_of_the_first_cast_is_that_of_what_follows():
    """The operands' rules may differ; and what makes a copy is no view."""
    text = """block main(%0: fp32[4, 4] cpu, %1: bf16[4, 4] cpu) {
  %2: bf16[4, 4] cpu = aten.mm.default(self=%1, mat2=%1) computes backward in 0
  %4: bf16[4, 4] cpu = aten.clone.default(self=%2)
  %5: bf16[4, 4] cpu = aten.relu.default(self=%2) computes ~0
  %6: bf16[4, 4] cpu = lib.view.default(self=%2) ~0
  return %4, %5, %6
}
"""
    rules = tuple(nc.Rule("backward.aten.mm", "full", argument=a, reason=a) for a in ("self", "mat2"))
    edits = assign_casts(parse(text), {"native": nc.Policy("p", (rules,), ())})
    assert [(type(e).__name__, e.step, e.why.reason) for e in edits[2:]] == [
        ("Follow", 2, "self"), *(("InsertCast", n, "its other operands have this format") for n in (4, 5, 6)),
    ]  # fmt: skip


def test_a_refusal_without_a_place_names_the_rule_alone():
    """And without a rule's file nothing."""
    text = "block main(%0: fp32[4] cpu) {\n  %1: fp32[4] cpu = aten.mm.default(self=%0) computes in 0\n  return %1\n}\n"
    for origin, where in ((nc.errors.Origin("my.toml", 4), ["my.toml"]), (None, [])):
        policy = nc.Policy("p", ((nc.Rule("aten.mm", "refuse", origin=origin),),), ())
        with pytest.raises(RefusedError) as caught:
            assign_casts(parse(text), {"native": policy})
        assert [w.file for w in caught.value.where] == where


TWO_SESSIONS = "\n".join(
    f"region {n}: cpu bf16 enabled cached session {n + 1} policy p{more}" for n, more in ((0, "{}"), (1, ""))
)


def test_hoist_goes_on_after_what_it_leaves():
    """A session that begins nowhere here, and a region that may be off."""
    body = WEIGHTS.replace("cast(self=%1) in 0", "cast(self=%1) in 1")
    body = body.replace("  return", "  %7: bf16[2] cpu grad = cast(self=%1) in 1\n  return")
    both = TWO_SESSIONS.format("")
    assert hoisted(body, {1: 3, 2: 3}, both) == [(4, (4, 6)), (5, (5, 7))]
    assert hoisted(body, {1: 99, 2: 3}, both) == [(5, (5, 7))]
    loop = body.replace(
        "  %6: bf16[2] cpu grad = cast(self=%0) in 0\n",
        "  %8: other = prim.Loop(a=%2)\n    block body() {\n      %6: bf16[2] cpu grad = cast(self=%0) in 0\n"
        "      return %6\n    }\n",
    ).replace("%4, %5, %6", "%4, %5, %8")
    assert hoisted(loop, {1: 3, 2: 3}, both) == [(4, (4, 6)), (5, (5, 7))]
    assert hoisted(loop, {1: 3, 2: 3}, TWO_SESSIONS.format(" open enabled")) == [(5, (5, 7))]


def test_hoist_stays_in_the_block_where_the_session_begins():
    """Casts outside that block are none of it; a step that records nothing holds no cast that does."""
    given = "%0: fp32[2] cpu grad weight, %2: bool"
    inside = LOOP.format(given=given, kind="fp32[2] cpu grad weight", inside=0)
    assert hoisted(inside, {1: 5}) == []
    quiet = inside.replace("prim.Loop(a=%2)", "prim.Loop(a=%2) nograd")
    assert hoisted(quiet) == []


def test_what_is_taken_from_what_a_branch_left_out_is_not_read():
    """Elements of its tuple."""
    text = """%0: tensor[2] cpu, %1: bool, %2: tuple) {
  %8: tuple = prim.If(a=%1)
    block yes() {
      return %2
    }
    block no() {
      %7: tuple = prim.Uninitialized()
      %9: tensor[2] cpu = getitem(a0=%7) ~0
      return %9
    }
  %3: tensor[2] cpu = prim.Pass(a=%8)
    block body() {
      %10: tensor[2] cpu = getitem(a0=%8) ~0
      return %10
    }
  %4: bf16[2] cpu = cast(self=%3) in 0
  %5: bf16[2] cpu = cast(self=%3) in 0
  return %4, %5"""
    assert hoisted(text) == []
    assert hoisted(text.replace("prim.Uninitialized", "lib.op")) == [(4, (4, 5))]


def test_a_weight_that_the_first_step_writes_to_is_not_hoisted():
    """Whatever that step's number is."""
    text = """%0: fp32[2] cpu grad weight) {
  %1: fp32[2] cpu = aten.relu_.default(self=%0!) ~0
  %4: bf16[2] cpu grad = cast(self=%0) in 0
  %5: bf16[2] cpu grad = cast(self=%0) in 0
  return %4, %5"""
    assert hoisted(text) == []
    assert hoisted(text.replace("relu_.default(self=%0!) ~0", "relu.default(self=%0)")) == [(4, (4, 5))]


def test_a_call_outside_of_regions_is_on_no_device_that_a_region_says():
    """Its tensors' own device is asked for; where that is unknown there is none."""
    program = parse_program(
        "program p\nblock main(%0: fp32[2]) {\n  %1: fp32[2] = aten.relu.default(self=%0)\n  return %1\n}"
    )
    assert [a.device for a in call_of(program, program.steps[1]).arguments] == [""]
    inside = parse("block main(%0: fp32[2]) {\n  %1: fp32[2] = aten.relu.default(self=%0) in 0\n  return %1\n}")
    assert [a.device for a in call_of(inside, inside.steps[1]).arguments] == ["cpu"]


def test_readers_are_operands_and_returns():
    """Each as often as it names the value, in all blocks."""
    program = parse(
        """block main(%0: fp32[2] cpu, %1: i64 cpu, %2: fp32[2] cpu) {
  %3: fp32[2] cpu = prim.Loop(a=%1)
    block body(%4: fp32[2] cpu) {
      %5: fp32[2] cpu = aten.add.Tensor(self=%0, other=%0)
      return %5, %0
    }
  return %2, %3, %2
}
"""
    )
    assert count_readers(program) == {0: 3, 1: 1, 5: 1, 2: 2, 3: 1}


def test_casts_in_regions_that_differ_in_the_device_alone_are_shared():
    """Whether a tensor is on the device is the same for both."""
    text = """program p
region 0: cpu bf16 enabled cached session 0 policy native open device
region 1: cpu bf16 enabled cached session 0 policy native open device
block main(%0: fp32[2] cpu) {
  %1: bf16[2] cpu = cast(self=%0) in 0
  %2: bf16[2] cpu = cast(self=%0) in 1
  return
}
"""
    assert [(e.step, e.keep) for e in share_casts(parse_program(text))] == [(2, 1)]
    assert share_casts(parse_program(text.replace("open device", "open enabled"))) == []


def test_what_is_cast_together_floats_and_is_not_written_to():
    """An index is not, nor is a result that is there already."""
    program = parse(
        """block main(%0: tensor["?"], %1: i64[2] cpu, %2: tensor["?"], %3: tensor["?"]) {
  %4: tensor["?"] = aten.index_copy.default(self=%0, index=%1, source=%2, out=%3!) computes in 0
  return %4
}
"""
    )
    assert [edit.operands for edit in assign_casts(program, {"native": NATIVE})] == [(0, 2)]
