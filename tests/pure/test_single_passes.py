"""Passes one at a time: what is hoisted, what results are cast from, and what is recorded of an edit."""

import pytest

import narrowcast as nc
from narrowcast.errors import RefusedError
from narrowcast.formats import bf16, fp16, fp32
from narrowcast.passes import assign_casts, drop_casts, hoist_casts, run_passes, share_casts
from narrowcast.passes.pipeline import _record, before_autograd
from narrowcast.program import (
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
    parse_program,
    print_program,
)  # fmt: skip

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


@pytest.mark.parametrize("facts", ["cpu bf16 enabled uncached", "cpu fp16 enabled cached"])
def test_what_the_weight_cache_would_not_keep_is_not_hoisted(facts):
    """Without a cache, or to another format than the region's."""
    assert hoisted(WEIGHTS, regions=f"region 0: {facts} session 1 policy native") == []
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
place 0: {"file": "m.py", "line": 7, "module_path": "a"}"""
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
    rows = [_record(program, edit) for edit in edits]
    assert [(r.kind, r.argument, r.src, r.dst, r.moved_bytes) for r in rows] == [
        ("insert", "other", "bf16", "fp16", 20), ("insert", "result", "fp32", "fp16", 30),
        ("insert", "result", "tensor", "tensor", 0), ("set dtype", "", "", "fp32", 0), ("follow", "", "", "fp32", 0),
        ("insert", "returned", "bf16", "fp32", 30), ("remove", "self", "fp32", "", 0),
        ("insert", "self, other", "", "", 0), ("remove", "", "fp32", "bf16", 30), ("share", "", "fp32", "bf16", 0),
        ("remove", "", "", "", 0),
    ]  # fmt: skip
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
