"""Laws, on data that hypothesis invents."""

from collections import Counter
from dataclasses import replace

from hypothesis import example, given, settings, strategies as st

from narrowcast.core.decide import Argument, Call, Region, decide
from narrowcast.core.ledger.identity import CallId
from narrowcast.core.policy import Policy, Rule, Site
from narrowcast.formats import FORMATS, bf16, fp16, fp32, fp64, is_exact, widest
from narrowcast.testing.snapshot import CallFormats, Snapshot, Snapshots
from narrowcast.testing.snapshot_changes import CHANGED, GONE, NEW, compare_snapshots
from narrowcast.testing.snapshot_text import parse_snapshots, snapshots_text

promotable = st.sampled_from([bf16, fp16, fp32, fp64])
any_format = st.sampled_from([*FORMATS.values()])
stored = st.one_of(st.none(), st.sampled_from([f for f in FORMATS.values() if f.name != "tf32"]))
actions = st.sampled_from(
    [
        "lower",
        "full",
        "full_set_dtype",
        "full_append_dtype",
        "promote",
        "follow",
        "align",
        "inside",
        "to(fp16)",
        "refuse",
    ]
)
paths = st.sampled_from(["", "a", "a.b", "a.b.c", "d"])
arguments = st.builds(
    Argument,
    st.sampled_from(["x", "y", "z"]),
    stored,
    st.sampled_from(["cpu", "cuda"]),
    st.sampled_from([False, False, True]),
)
calls = st.builds(
    Call,
    st.sampled_from(
        ["aten.gelu.default", "aten.relu.default", "aten.linear.default", "aten.cat.default", "lib.op.default"]
    ),
    st.lists(arguments, max_size=5).map(tuple),
    st.builds(Site, paths),
    st.sampled_from([frozenset(), frozenset(["dtype"])]),
    st.booleans(),
)
rules = st.builds(
    Rule,
    st.sampled_from(["aten.gelu", "aten.gelu.default", "aten.*", "lib.op"]),
    actions,
    st.one_of(st.none(), st.sampled_from(["a", "a.*", "*"])),
)


def distinct(found):
    """One rule per set of conditions: equal ones are an error."""
    return tuple({r.conditions: r for r in found}.values())


policies = st.one_of(
    st.just(Policy.native("cpu")),
    st.just(Policy.safe("cpu")),
    st.lists(st.lists(rules, min_size=1, max_size=4).map(distinct), max_size=2).map(
        lambda ls: Policy("p", tuple(ls), ())
    ),
)
regions = st.builds(Region, st.just("cpu"), st.sampled_from([bf16, fp16, fp32]), st.booleans())


@given(st.lists(promotable, min_size=1), st.lists(promotable, min_size=1))
def test_widest_is_a_join(a, b):
    """Idempotent, commutative, associative, above its members, and the least such."""
    top = widest(a + b)
    assert top is widest(b + a) is widest([widest(a), widest(b)]) is widest([top, *a])
    assert all(is_exact(f, top) for f in a + b)
    assert all(is_exact(top, other) for other in (bf16, fp16, fp32, fp64) if all(is_exact(f, other) for f in a + b))


@given(any_format, any_format, any_format)
def test_exactness_is_an_order(a, b, c):
    """Reflexive, antisymmetric up to memory size, transitive."""
    assert is_exact(a, a)
    assert not (is_exact(a, b) and is_exact(b, a)) or a is b
    assert not (is_exact(a, b) and is_exact(b, c)) or is_exact(a, c)


@given(calls, policies, regions)
@settings(max_examples=200)
def test_decide_is_total_and_touches_only_what_is_eligible(call, policy, region):
    """Any call gives a plan; ineligible arguments stay; a planned cast changes the format."""
    plan = decide(call, policy, region)
    assert len(plan.formats) == len(call.arguments)
    for argument, dst in zip(call.arguments, plan.formats, strict=True):
        if dst is not None:
            assert argument.format not in (None, fp64)
            assert argument.device == region.device_type
            assert not argument.written
            assert dst is not argument.format
    if not region.enabled:
        assert plan.changes_nothing


@given(calls, policies, regions)
@settings(max_examples=200)
def test_decide_is_idempotent(call, policy, region):
    """Deciding about the call as the plan makes it casts nothing more."""
    plan = decide(call, policy, region)
    if plan.refused:
        return
    cast = tuple(
        replace(a, format=dst) if dst is not None else a for a, dst in zip(call.arguments, plan.formats, strict=True)
    )
    again = decide(replace(call, arguments=cast), policy, region)
    assert not any(again.formats)


@given(calls, policies, regions)
def test_decide_depends_on_its_arguments_alone(call, policy, region):
    """Twice the same question, twice the same answer, also for an equal policy built again."""
    rebuilt = Policy(policy.name, policy.layers, policy.extends, cache=policy.cache)
    assert decide(call, policy, region) == decide(call, policy, region) == decide(call, rebuilt, region)


@given(calls, regions)
def test_a_policy_without_rules_changes_nothing(call, region):
    """Nothing is done that no rule asks for."""
    assert decide(call, Policy("empty", extends=()), region).changes_nothing


@given(policies)
def test_the_text_form_gives_back_an_equal_policy(policy):
    """Print, parse, equal; and printing is stable."""
    text = policy.to_toml()
    parsed = Policy.parse(text)
    assert parsed == policy and parsed.digest == policy.digest
    assert parsed.to_toml() == text


@given(policies, policies)
def test_a_diff_is_empty_exactly_for_the_same_effective_rules(a, b):
    """And its mirror image is the diff the other way."""
    forth, back = a.diff(b), b.diff(a)
    assert {(c.conditions, c.before, c.after) for c in forth} == {(c.conditions, c.after, c.before) for c in back}
    assert a.diff(a) == ()


format_names = st.lists(st.sampled_from(["fp32", "bf16", "fp16"]), max_size=2, unique=True).map(",".join)
facts = st.tuples(
    format_names, format_names, format_names, st.sampled_from(["lower", "full", "no rule", "to(fp16)"]),
    st.lists(st.sampled_from(["input", "weight", "tensors"]), max_size=2, unique=True).map(tuple), st.integers(1, 3),
)  # fmt: skip
places = st.tuples(paths, st.sampled_from(["aten.mm.default", "aten.gelu.default"]))


def numbered(rows):
    """Calls of these places, numbered in each in order."""
    counts = Counter()
    for place, said in rows:
        counts[place] += 1
        yield CallFormats(CallId(*place, counts[place]), *said)


snapshots = st.lists(st.tuples(places, facts), max_size=8).map(
    lambda rows: Snapshot("cpu", "a net", "native", "01234567", "bf16", "2.13", False, tuple(numbered(rows)))
)


@given(snapshots)
def test_the_text_of_a_snapshot_gives_it_back(snapshot):
    """Whatever the calls, and as a section beside another."""
    both = Snapshots((snapshot, replace(snapshot, device_type="cuda", calls=())))
    assert parse_snapshots(snapshots_text(both)).sections == both.sections


def snapshot_of(*rows):
    """Calls of one op each: where, and in which format."""
    said = [((path, op), (dtype, dtype, dtype, "no rule", (), 1)) for path, op, dtype in rows]
    return Snapshot("cpu", "a net", "native", "01234567", "bf16", "2.13", False, tuple(numbered(said)))


MM, GELU = "aten.mm.default", "aten.gelu.default"


@given(snapshots, snapshots)
@example(snapshot_of(("", MM, "fp32"), ("a", GELU, "bf16")), snapshot_of(("a", MM, "fp32")))
def test_no_call_is_lost_when_snapshots_are_compared(was, now):
    """Each is as it was, changed, new, gone or moved; nothing is, where the calls are equal."""
    found = compare_snapshots(was, now)
    moved = sum(move.calls for move in found.moves)
    gone, new, changed = (sum(c.kind == kind for c in found.changes) for kind in (GONE, NEW, CHANGED))
    assert len(was.calls) - gone == len(now.calls) - new and changed + moved <= len(now.calls) - new
    assert found.is_same == (sorted(was.calls, key=lambda c: c.id) == sorted(now.calls, key=lambda c: c.id))
    assert compare_snapshots(was, was).is_same
