"""The decision, action by action."""

import sys

import pytest

from narrowcast.core.decide import Argument, Call, Output, Plan, Region, decide
from narrowcast.core.policy import Kind, Lack, Policy, Rule, Site
from narrowcast.formats import bf16, e4m3fn, e5m2, fp16, fp32, fp64

CPU = Region("cpu", bf16)


def call(op, *formats, **facts):
    """A call whose arguments are named a0, a1, ... on the cpu."""
    return Call(op, tuple(Argument(f"a{n}", f) for n, f in enumerate(formats)), **facts)


def policy(action, **conditions):
    return Policy("p", ((Rule("aten.op", action, **conditions),),))


def formats(action, *given, region=CPU, **facts):
    return decide(call("aten.op.default", *given, **facts), policy(action), region).formats


def test_lower_casts_every_eligible_argument():
    """Not fp64, not integers, not absent tensors."""
    assert formats("lower", fp32, bf16, fp64, None, fp16) == (bf16, None, None, None, bf16)


def test_full_casts_up():
    """To fp32, fp8 included."""
    assert formats("full", fp32, bf16, e4m3fn) == (None, fp32, fp32)


def test_to_casts_to_its_format():
    """Whatever the region's low format is."""
    assert formats("to(fp16)", fp32, bf16) == (fp16, fp16)


def test_tensors_on_another_device_type_are_left_alone():
    """A cpu scalar beside cuda tensors."""
    arguments = (Argument("x", fp32, "cuda"), Argument("s", fp32, "cpu"))
    plan = decide(Call("aten.op.default", arguments), policy("lower"), Region("cuda", fp16))
    assert plan.formats == (fp16, None)


def test_a_written_argument_is_never_cast():
    """The result would be written to a copy."""
    arguments = (Argument("self", fp32, written=True), Argument("x", fp32))
    rule = Policy("p", ((Rule("aten.op.default", "lower"),),))
    assert decide(Call("aten.op.default", arguments), rule, CPU).formats == (None, bf16)


def test_patterns_pass_in_place_ops_by():
    """Only an exact id reaches an op that writes."""
    arguments = (Argument("self", fp32, written=True), Argument("x", fp32))
    plan = decide(Call("aten.op.default", arguments, computes=False), policy("lower"), CPU)
    assert plan.rule is None


def test_patterns_pass_by_what_does_not_compute():
    """Views, copies and conversions."""
    plan = decide(call("aten.op.default", fp32, computes=False), policy("lower"), CPU)
    assert plan.rule is None and plan.changes_nothing


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((fp32, bf16), (None, fp32)),
        ((bf16, bf16), (None, None)),
        ((fp32, fp16), (None, fp32)),
        ((fp64, bf16, fp32), (None, fp32, None)),
    ],
)
def test_promote_takes_the_wider_of_low_and_fp32(given, expected):
    """fp64 is ignored; native stops looking at the first fp32."""
    assert formats("promote", *given) == expected


@pytest.mark.parametrize("given", [(fp16, fp16), (fp16, fp32), (bf16, fp16)])
def test_promote_refuses_a_third_format_as_native_does(given):
    """«Unexpected floating ScalarType in at::autocast::prioritize»."""
    plan = decide(call("aten.op.default", *given), policy("promote"), CPU)
    assert plan.refused is not None and "fp16" in plan.refused


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((bf16, fp16), (fp32, fp32)),
        ((bf16, bf16), (None, None)),
        ((fp32, bf16), (None, fp32)),
        ((fp64, bf16), (None, fp64)),
    ],
)
def test_align_takes_the_widest(given, expected):
    """Where nothing is written."""
    assert formats("align", *given) == expected


def test_align_follows_the_destination():
    """In-place forms keep their own format."""
    arguments = (Argument("self", bf16, written=True), Argument("x", fp32), Argument("y", fp16))
    rule = Policy("p", ((Rule("aten.op_.default", "align"),),))
    assert decide(Call("aten.op_.default", arguments), rule, CPU).formats == (None, bf16, bf16)


def test_inside_computes_in_fp32_and_gives_back_the_input_format():
    """The first eligible argument is the input."""
    plan = decide(call("aten.op.default", bf16, fp32), policy("inside"), CPU)
    assert plan.formats == (fp32, None) and plan.output is bf16
    assert decide(call("aten.op.default", fp32), policy("inside"), CPU).output is None


def test_follow_casts_nothing_and_shields_what_is_inside():
    """Unlike an op without a rule, whose parts are autcast on their own."""
    plan = decide(call("aten.op.default", fp32, bf16), policy("follow"), CPU)
    assert plan.shields and not any(plan.formats)


def test_full_set_dtype_fills_in_a_dtype_that_was_left_open():
    """If the first argument is eligible."""
    assert decide(call("aten.op.default", bf16), policy("full_set_dtype"), CPU).set_dtype
    given = call("aten.op.default", bf16, given=frozenset(["dtype"]))
    assert not decide(given, policy("full_set_dtype"), CPU).set_dtype
    assert not decide(call("aten.op.default", fp64), policy("full_set_dtype"), CPU).set_dtype
    assert decide(call("aten.op.default", bf16), policy("full_append_dtype"), CPU).append_dtype


def test_refuse_gives_the_rule_s_reason():
    """The user's own words, if there are any."""
    rule = Policy("p", ((Rule("aten.op", "refuse", reason="it overflows"),),))
    assert decide(call("aten.op.default", fp32), rule, CPU).refused == "it overflows"


def test_one_argument_may_have_its_own_rule():
    """Cast this, keep that."""
    rules = (
        Rule("aten.op", "full"),
        Rule("aten.op", "follow", argument="a1"),
        Rule("aten.op", "to(fp16)", argument="a2"),
    )
    plan = decide(call("aten.op.default", bf16, bf16, bf16), Policy("p", (rules,)), CPU)
    assert plan.formats == (fp32, None, fp16)
    alone = Policy("p", ((Rule("aten.op", "lower", argument="a1"),),))
    assert decide(call("aten.op.default", fp32, fp32), alone, CPU).formats == (None, bf16)


def test_a_place_rule_holds_at_its_place_only():
    """And what it covers elsewhere falls to the next rule."""
    layered = Policy("p", ((Rule("aten.op", "lower"), Rule("aten.op", "full", module="enc.3.*")),))
    inside = decide(call("aten.op.default", bf16, site=Site("enc.3.mlp")), layered, CPU)
    outside = decide(call("aten.op.default", bf16, site=Site("enc.4.mlp")), layered, CPU)
    assert inside.formats == (fp32,) and outside.formats == (None,)


def test_a_disabled_region_decides_nothing():
    """enabled=False is no policy."""
    assert decide(call("aten.op.default", fp32), policy("lower"), Region("cpu", bf16, enabled=False)).changes_nothing


def test_an_unresolved_policy_is_resolved_for_the_region():
    """`native` means the region's own lists."""
    softmax = Call("aten.softmax.int", (Argument("self", fp16, "cuda"),))
    assert decide(softmax, Policy.native(), Region("cuda", fp16)).set_dtype
    on_cpu = Call("aten.softmax.int", (Argument("self", fp16),))
    assert decide(on_cpu, Policy.native(), CPU).rule is None


def test_a_decision_is_a_few_function_calls():
    """A bound on the code, whatever the machine; benchmarks/eager_overhead.py has the time (under ten microseconds)."""
    layered = Policy.native().with_rules(Rule("aten.linear", "full", module="encoder.layer.3.*"))
    linear = Call(
        "aten.linear.default", tuple(Argument(n, fp32) for n in ("input", "weight", "bias")), Site("encoder.layer.4")
    )
    decide(linear, layered, CPU)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        decide(linear, layered, CPU)
    finally:
        sys.setprofile(None)
    assert 5 < calls < 60


MIXED = Lack("aten.op.default", None, "takes one format")
LOW_FIRST = Lack("aten.op.default", None, "takes one format, or a low first one", low_first=True)
UNKNOWN = Argument("u", None, unknown=True)


def mixed(*given, lack=MIXED, rules=(), op="aten.op.default"):
    """The plan for an op that takes one format, under a policy that repairs."""
    arguments = tuple(g if isinstance(g, Argument) else Argument(f"a{n}", g) for n, g in enumerate(given))
    repairing = Policy("p", (rules,) if rules else (), (), unsupported="full").without((lack,))
    return decide(Call(op, arguments), repairing, CPU)


@pytest.mark.parametrize(
    ("given", "lack", "expected"),
    [
        ((bf16, fp32), MIXED, (fp32, None)),
        ((bf16, fp16), MIXED, (fp32, fp32)),
        ((bf16, bf16), MIXED, (None, None)),
        ((fp32, None), MIXED, (None, None)),
        ((None, None), MIXED, (None, None)),
        ((bf16, fp16, fp32), MIXED, (fp32, fp32, None)),
        ((bf16, fp32), LOW_FIRST, (None, None)),
        ((bf16, fp32, fp32), LOW_FIRST, (None, None, None)),
        ((fp32, bf16), LOW_FIRST, (None, fp32)),
        ((bf16, fp16), LOW_FIRST, (fp32, fp32)),
        ((bf16, fp32, bf16), LOW_FIRST, (fp32, None, fp32)),
        ((bf16,), LOW_FIRST, (None,)),
    ],
)
def test_an_op_that_takes_one_format_is_given_one(given, lack, expected):
    """Where several come that are not such as it takes."""
    plan = mixed(*given, lack=lack)
    assert plan.formats == expected
    assert (plan.rule is not None) == any(expected)


def test_formats_that_nothing_holds_are_left_to_the_op():
    """What could not be aligned runs, or raises, as it came."""
    plan = mixed(e4m3fn, e5m2)
    assert plan.refused is None and plan.changes_nothing


def test_an_op_that_takes_one_format_is_decided_when_unknown_ones_are_there():
    """Unless the policy casts already, or they are not eligible."""
    assert mixed(fp32, UNKNOWN).undecided is Kind.ALIGN
    assert mixed(fp32, Argument("u", None, "cuda", unknown=True)).undecided is None
    lower = Rule("aten.op", "lower", argument="a0")
    assert mixed(fp32, UNKNOWN, rules=(lower,)).formats == (bf16, None)
    assert mixed(fp32, UNKNOWN, rules=(lower,)).undecided is None
    assert mixed(fp32, bf16, rules=(Rule("aten.op", "refuse"),)).refused is not None
    assert mixed(fp32, UNKNOWN, rules=(Rule("aten.op", "promote"),)).undecided is None
    assert mixed(bf16, UNKNOWN, rules=(Rule("aten.op", "promote"),)).undecided is Kind.PROMOTE


def test_what_was_promised_of_results_holds_for_an_op_that_takes_one_format():
    """The rules about results stay, those about arguments go."""
    rules = (Rule("aten.op", "full", argument="result"), Rule("aten.op", "lower", argument="a0"))
    plan = mixed(fp32, fp16, rules=rules)
    assert plan.formats == (fp32, fp32) or plan.formats == (None, fp32)
    assert [name for name, _ in plan.argument_rules] == ["result"]
    assert [(r.part, r.format) for r in plan.results] == [("", fp32)]


def test_a_plan_names_the_rules_that_decided():
    """One about a part of a result will do for the whole; the call's own otherwise."""
    whole, part = Rule("aten.op", "lower"), Rule("aten.op", "full", argument="result.logits")
    plan = decide(call("aten.op.default", fp32), Policy("p", ((whole, part),), ()), CPU)
    assert plan.rules == (part, whole)
    assert plan.rule_about("result") is part and plan.rule_about("a0") is whole
    assert plan.rule_for("result") is whole and plan.rule_for("result.logits") is part
    plan = decide(call("aten.op.default", fp32), Policy("p", ((part,),), ()), CPU)
    assert plan.rules == (part,) and plan.rule_for("a0") is None
    assert decide(call("aten.op.default", fp32), Policy("p", extends=()), CPU).rules == ()


def test_a_rule_about_an_argument_that_the_call_lacks_decides_nothing():
    """And the next one still does."""
    rules = (Rule("aten.op", "full", argument="zz"), Rule("aten.op", "lower", argument="a0"))
    plan = decide(call("aten.op.default", fp32), Policy("p", (rules,), ()), CPU)
    assert plan.argument_rules == (("a0", rules[1]),) and plan.formats == (bf16,)


def module_call(*given, rules):
    arguments = tuple(g if isinstance(g, Argument) else Argument(f"a{n}", g) for n, g in enumerate(given))
    return decide(Call("module.call.default", arguments), Policy("p", (rules,), ()), CPU)


def test_to_of_a_module_s_call_casts_fp64_too():
    """Exactly that format is meant; but no other device's tensors, nothing that is written, and no integers."""
    given = (fp64, None, Argument("c", fp64, "cuda"), Argument("w", fp64, written=True), UNKNOWN)
    exact = module_call(*given, rules=(Rule("module.call", "to(bf16)"),))
    assert exact.formats == (bf16, None, None, None, bf16)
    plan = module_call(*given, fp64, rules=(Rule("module.call", "to(bf16)", argument="a0"),))
    assert plan.formats == (bf16, None, None, None, None, None)
    lower = (Rule("module.call", "lower", argument="a0"), Rule("module.call", "to(fp16)", argument="a1"))
    assert module_call(fp64, fp64, rules=lower).formats == (None, fp16)
    assert module_call(fp32, fp32, rules=lower).formats == (bf16, fp16)
    assert module_call(bf16, fp16, rules=lower).formats == (None, None)


def test_a_result_that_follows_has_the_format_of_the_first_argument_that_is_cast():
    """Those that rules of their own keep do not count, unless these are all; nothing floats: nothing follows."""
    follow = Rule("module.call", "follow", argument="result")
    assert [r.format for r in module_call(None, fp16, rules=(follow,)).results] == [fp16]
    assert module_call(None, None, rules=(follow,)).results == ()
    assert [r.format for r in module_call(None, UNKNOWN, rules=(follow,)).results] == [None]
    kept = (follow, Rule("module.call", "follow", argument="a0"))
    assert [r.format for r in module_call(bf16, fp16, rules=kept).results] == [fp16]
    assert [r.format for r in module_call(bf16, None, rules=kept).results] == [bf16]
    more = (follow, Rule("module.call", "lower", argument="result.1"))
    assert {r.part: r.format for r in module_call(fp32, rules=more).results} == {"": fp32, "1": bf16}
    after = (Rule("module.call", "full", argument="result"), Rule("module.call", "follow", argument="result.1"))
    assert {r.part: r.format for r in module_call(bf16, rules=after).results} == {"": fp32, "1": bf16}


def test_what_unknown_formats_decide_together_is_left_open():
    """The plan shields what is inside, as the rule does; one fp32 decides a promotion, and nothing else."""
    for action, kind in (("promote", Kind.PROMOTE), ("align", Kind.ALIGN), ("inside", Kind.INSIDE)):
        plan = decide(Call("aten.op.default", (Argument("a", bf16), UNKNOWN)), policy(action), CPU)
        assert plan.undecided is kind and plan.shields and plan.formats == (None, None)
        plan = decide(Call("aten.op.default", (Argument("a", fp32), UNKNOWN)), policy(action), CPU)
        assert plan.undecided is (None if kind is Kind.PROMOTE else kind) and plan.shields
        assert plan.formats == ((None, fp32) if kind is Kind.PROMOTE else (None, None))
    other = (Argument("a", fp32, "cuda"), UNKNOWN)
    assert decide(Call("aten.op.default", other), policy("promote"), CPU).undecided is Kind.PROMOTE


@pytest.mark.parametrize(
    ("action", "given", "shields", "computes_in"),
    [
        ("lower", (fp32,), True, bf16), ("full", (bf16,), True, fp32), ("to(fp16)", (fp32,), True, fp16),
        ("follow", (fp32,), True, None), ("refuse", (fp32,), False, None), ("inside", (bf16,), True, fp32),
        ("align", (bf16, fp32), True, fp32), ("promote", (bf16,), True, bf16), ("promote", (fp32, bf16), True, fp32),
        ("promote", (fp16,), True, None), ("align", (e4m3fn, e5m2), True, None),
        ("full_set_dtype", (bf16,), True, fp32), ("full_set_dtype", (fp64,), True, None),
        ("full_append_dtype", (bf16,), True, fp32), ("full_append_dtype", (fp64,), True, None),
        ("full_append_dtype", (), True, None),
    ],
)  # fmt: skip
def test_a_plan_says_what_the_call_computes_in_and_what_it_shields(action, given, shields, computes_in):
    """Whatever a rule decides shields the ops inside, except a refusal."""
    plan = decide(call("aten.op.default", *given), policy(action), CPU)
    assert (plan.shields, plan.computes_in) == (shields, computes_in)
    assert plan.append_dtype == (action == "full_append_dtype" and computes_in is fp32)
    assert plan.set_dtype == (action == "full_set_dtype" and computes_in is fp32)


def test_a_dtype_that_the_caller_gave_is_left():
    """And nothing is said then of what the call computes in."""
    plan = decide(call("aten.op.default", bf16, given=frozenset({"dtype"})), policy("full_set_dtype"), CPU)
    assert not plan.set_dtype and plan.computes_in is None


@pytest.mark.parametrize(
    ("given", "said"),
    [((e4m3fn, e5m2), "no format holds all of e4m3fn, e5m2"), ((e5m2, e5m2), None), ((), None), ((None,), None)],
)
def test_align_refuses_formats_that_nothing_holds(given, said):
    """Nothing to align is no fault."""
    assert decide(call("aten.op.default", *given), policy("align"), CPU).refused == said


def test_a_rule_about_an_argument_is_found_by_its_name():
    """Before the call's own."""
    rules = (Rule("aten.op", "lower"), Rule("aten.op", "full", argument="a0"))
    plan = decide(call("aten.op.default", bf16), Policy("p", (rules,), ()), CPU)
    assert plan.rule_about("a0") is rules[1] and plan.rule_for("a0") is rules[1]


@pytest.mark.parametrize(
    "told", [{}, {"set_dtype": True}, {"append_dtype": True}, {"results": (Output("", bf16),)}, {"refused": "no"},
             {"undecided": Kind.ALIGN}, {"shields": True}, {"formats": (bf16,)}],
)  # fmt: skip
def test_a_plan_that_says_anything_changes_something(told):
    """Each by itself."""
    assert Plan(**{"formats": (None,), **told}).changes_nothing is (not told)


def test_a_pattern_about_what_the_op_is_made_of_counts():
    """For an op that no rule names, and that lacks what it calls."""
    lack = Lack("aten.op.default", bf16, "no inner", inside="aten.inner.default")
    for action, repaired in (("lower", True), ("full", False), ("to(bf16)", True), ("to(fp16)", False)):
        made = Policy("p", ((Rule("aten.inner", action),),), (), unsupported="full").without((lack,))
        plan = decide(call("aten.op.default", fp32), made, CPU)
        assert (plan.rule is not None) is repaired
        assert [r.format for r in plan.results] == ([bf16] if repaired else [])
