"""The decision, action by action."""

import sys

import pytest

from narrowcast.decide import Argument, Call, Region, decide
from narrowcast.formats import bf16, e4m3fn, fp16, fp32, fp64
from narrowcast.policy import Policy, Rule, Site

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
