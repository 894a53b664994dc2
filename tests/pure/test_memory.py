"""Memory as an objective: prices of bytes on energies small enough to see the answer."""

import itertools
import random

import pytest

from narrowcast.core.policy import NOWHERE
from narrowcast.errors import EnergyError
from narrowcast.formats import bf16, fp32
from narrowcast.programs.placement import FIXED, Choice, Energy, Flow, Reader, minimise
from narrowcast.programs.placement.memory import (
    KeptBytes,
    Smallest,
    _in_range as in_range,
    combine,
    energy_total,
    place_within,
)
from narrowcast.programs.placement.place import PlacedCall, Placement, as_given, as_high, as_the_policy
from narrowcast.programs.placement.question import Question
from narrowcast.programs.program import Operand, Step, Value

BOTH = (bf16, fp32)
# In bf16 each of three calls keeps 80 bytes less, and takes 1, 10 and 100 ns more.
TIME = Energy(tuple(Choice(BOTH, (slow, 0)) for slow in (1, 10, 100)), ())
KEPT = Energy((Choice(BOTH, (10, 20)),) * 3, (), unit=8.0)


def question(energy, fixed=0.0):
    return Question(None, energy, {}, [], {}, {}, fixed=fixed)


def lows(found):
    return "".join("l" if f is bf16 else "h" for f in found.chosen)


@pytest.mark.parametrize(
    ("limit", "expected"), [(480, "hhh"), (479, "lhh"), (400, "lhh"), (399, "llh"),
     (320, "llh"), (319, "lll"), (240, "lll")]
)  # fmt: skip
def test_a_limit_of_bytes_is_kept_at_the_least_time(limit, expected):
    """Where it is not reached, nothing is given up; the limit itself is allowed."""
    found = place_within(KEPT, limit)(question(TIME))
    assert lows(found) == expected and found.cost == TIME.evaluate(found.chosen)
    assert found.bound == 0
    free = expected == "hhh"
    assert (found.method == "minimum cut") == free


def test_a_limit_that_nothing_keeps_is_an_error():
    """It says what the smallest placement keeps."""
    with pytest.raises(EnergyError, match="the smallest placement keeps 240"):
        place_within(KEPT, 239)(question(TIME))


@pytest.mark.parametrize(
    ("slowdown", "fixed", "expected"),
    [(1.0, 0, "hhh"), (1.0, 100, "hhh"), (1.01, 100, "lhh"), (1.1, 100, "lhh"), (1.11, 100, "llh"), (2.0, 100, "llh"),
     (2.11, 100, "lll"), (3.0, 100, "lll"), (float("inf"), 0, "lll")],
)  # fmt: skip
def test_fewest_bytes_within_so_many_times_the_least_time(slowdown, fixed, expected):
    """What the calls without a choice take counts as well; the limit itself is allowed."""
    found = Smallest(KEPT, slowdown)(question(TIME, fixed))
    assert lows(found) == expected and found.cost == TIME.evaluate(found.chosen)


@pytest.mark.parametrize("unit", [1.0, 0.5, 2.0])
def test_a_unit_of_time_changes_nothing_of_what_is_within_a_limit(unit):
    """Fixed costs are in the prices' unit, the energy's in its own."""
    energy = Energy(TIME.choices, (), unit)
    assert lows(Smallest(KEPT, 1.11)(question(energy, 100 * unit))) == "llh"


def energies(seed, formats=BOTH):
    """Two energies about the same choices, with shared casts in time and kept copies in bytes."""
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    choices = [Choice(formats, (rng.randint(0, 40), rng.randint(0, 40))) for _ in range(count)]
    kept = [Choice(formats, (0, 0))] * count
    flows, copies = [], []
    for _ in range(rng.randint(1, 6)):
        maker = rng.randint(FIXED, count - 1)
        own = formats if maker != FIXED else (fp32,)
        readers = tuple(
            Reader(n, formats, stores=rng.random() < 0.5) for n in rng.sample(range(count), rng.randint(1, count))
        )
        casts = {(a, b): rng.randint(0, 30) for a in formats for b in formats if a is not b}
        flows.append(Flow(maker, own, readers, casts, {f: rng.randint(0, 9) for f in formats}))
        copies.append(Flow(maker, own, readers, dict.fromkeys(casts, 0), {}, {bf16: 2, fp32: 4}))
    return Energy(tuple(choices), tuple(flows)), Energy(tuple(kept), tuple(copies))


def placements(energy):
    return list(itertools.product(*(c.formats for c in energy.choices)))


@pytest.mark.parametrize("seed", range(40))
def test_the_smallest_keeps_fewest_bytes_and_among_these_takes_least_time(seed):
    """Brute force over all placements says so; one under a limit is the best of those that a price gives."""
    time, kept = energies(seed)
    every = [(kept.evaluate(c), time.evaluate(c)) for c in placements(time)]
    found = Smallest(kept)(question(time))
    assert (kept.evaluate(found.chosen), found.cost) == min(every)
    assert (found.cost, found.bound) == (time.evaluate(found.chosen), 0)
    limited = Smallest(kept, 1.5)(question(time))
    least = min(t for _, t in every)
    assert limited.cost <= 1.5 * least
    size = kept.evaluate(limited.chosen)
    cheaper = [(k, t) for k, t in every if k < size and t <= 1.5 * least]
    for k, t in cheaper:  # only such as no price would give: above a line between two others
        assert any((k1 - k) * (t2 - t1) >= (t1 - t) * (k2 - k1) for k1, t1 in every for k2, t2 in every if k1 < k < k2)


@pytest.mark.parametrize("seed", range(20))
def test_two_energies_are_added_with_a_price(seed):
    """For every placement; what any of them can cost is below the total."""
    time, kept = energies(seed)
    for price in (0.0, 1.0, 3.0):
        both = combine(time, kept, price)
        for chosen in placements(time):
            assert both.evaluate(chosen) == time.evaluate(chosen) + price * kept.evaluate(chosen)
            assert both.evaluate(chosen) <= energy_total(both)
    assert energy_total(Energy((Choice(BOTH, (3, 7)), Choice((), ())), ())) == 7


def test_an_energy_that_is_too_large_for_the_solver_is_scaled():
    """Its unit grows as its costs shrink; one that fits is left as it is."""
    flow = Flow(
        0, BOTH, (Reader(FIXED, (fp32,)),), {(bf16, fp32): 2**28, (fp32, bf16): 0}, {fp32: 2**27}, {bf16: 2**26}
    )
    large = Energy((Choice(BOTH, (2**29, 2**28)),), (flow,), 3.0)
    small = in_range(large)
    scale = energy_total(large) / 2**28
    assert scale > 1 and small.unit == pytest.approx(3.0 * scale)
    for chosen in placements(large):
        assert small.evaluate(chosen) * small.unit == pytest.approx(large.evaluate(chosen) * 3.0, rel=1e-6)
    assert small.flows[0].stores[bf16] == pytest.approx(2**26 / scale, rel=1e-6)
    assert energy_total(small) == pytest.approx(2**28, rel=1e-6)
    assert in_range(TIME) is TIME
    just = Energy((Choice(BOTH, (2**28, 0)),), ())
    assert in_range(just) is just
    assert minimise(small).chosen == (fp32,)


def step(op, gradient=True, grad_mode=True, operands=2):
    read = tuple(Operand(f"a{n}", n) for n in range(operands))
    return Step(Value(9, "fp32", (4,), "cpu", gradient), op, read, grad_mode=grad_mode)


def test_what_autograd_follows_keeps_a_copy_per_format_and_anything_else_makes_one():
    """What the caller gave is there anyway, in its own format."""
    value, maker, kept = Value(1, "fp32", (4,)), step("aten.mm.default"), KeptBytes(False)
    pairs = {(bf16, fp32), (fp32, bf16)}
    followed = kept.value(value, maker, [step("aten.mm.default")], BOTH)
    assert kept.call(maker, [], bf16) == 0.0
    assert set(followed.casts) == pairs and not any(followed.casts.values()) and not followed.reads
    assert followed.stores == {bf16: 8.0, fp32: 16.0}
    assert kept.value(value, None, [None, step("aten.mm.default")], BOTH).stores == {bf16: 8.0, fp32: 0.0}
    for reader in (None, step("aten.mm.default", gradient=False), step("aten.mm.default", grad_mode=False)):
        made = kept.value(value, maker, [reader], BOTH)
        assert made.casts == {(bf16, fp32): 16.0, (fp32, bf16): 8.0} and made.reads == {bf16: 8.0, fp32: 16.0}
        assert not made.stores
        assert not kept.value(value, None, [reader], BOTH).reads


@pytest.mark.parametrize(
    ("op", "operands", "plain", "fused"),
    [
        ("aten.mm.default", 2, True, True), ("aten.softmax.int", 1, True, True),
        ("aten.sum.default", 1, False, False),
        ("aten.gelu.default", 1, True, False), ("aten.add.Tensor", 2, False, False),
        ("aten.mul.Tensor", 2, True, False),
        ("aten.mul.Tensor", 1, False, False), ("lib.op.default", 1, False, False),
    ],
)  # fmt: skip
def test_who_keeps_what_it_reads_for_its_backward(op, operands, plain, fused):
    """A compiler makes pointwise calls again; those that are linear keep nothing, nor does what no gradient follows."""
    assert KeptBytes(False).stores(step(op, operands=operands)) is plain
    assert KeptBytes(True).stores(step(op, operands=operands)) is fused
    assert not KeptBytes(False).stores(step(op, gradient=False)) and not KeptBytes(False).stores(None)


def test_a_placement_that_was_chosen_earlier_is_taken_if_it_fits():
    """As many choices, formats that each may have, and none that is forbidden."""
    ask = question(TIME)
    found = as_given(("fp32", "bf16", "fp32"))(ask)
    assert found.chosen == (fp32, bf16, fp32) and (found.cost, found.bound, found.method) == (10, 0, "given")
    for wrong in ((), ("fp32",) * 2, ("fp32",) * 4, ("fp32", "fp16", "fp32"), ("fp16", "fp32", "fp32", "fp32")):
        with pytest.raises(EnergyError, match="other choices now"):
            as_given(wrong)(ask)
    tied = Flow(0, BOTH, (Reader(FIXED, (fp32,), keeps=True),), {(bf16, fp32): 0}, rounded=frozenset([bf16]))
    with pytest.raises(EnergyError, match="other choices now"):
        as_given(("bf16",))(question(Energy((Choice(BOTH, (0, 0)),), (tied,))))
    assert as_high(ask).chosen == (fp32,) * 3 and as_the_policy(ask).chosen == (bf16,) * 3
    assert as_high(ask).cost == 0 and as_the_policy(ask).cost == 111


def test_a_placement_says_what_it_saves_and_how_far_it_is_from_its_bound():
    """A call costs the policy's less the chosen; nothing is no distance."""
    calls = [PlacedCall(n, "o", NOWHERE, None, BOTH, (7.0, 3.0), chosen) for n, chosen in enumerate((bf16, fp32, fp32))]
    placed = Placement(tuple(calls), "ns", 10.0, 12.0, 8.0, "m")
    assert [call.saved for call in calls] == [0.0, 4.0, 4.0]
    assert (placed.gap, placed.raised) == (0.2, 2)
    assert Placement((), "ns", 0.0, 0.0, 0.0, "m").gap == 0.0


@pytest.mark.parametrize(("slower", "larger"), [(1000, 1), (1, 1000), (1000, 1000), (1, 1)])
def test_prices_are_found_however_time_and_bytes_compare(slower, larger):
    """A nanosecond may be worth a thousandth of a byte, or thousands of them."""
    time = Energy(tuple(Choice(BOTH, (slower * slow, 0)) for slow in (1, 10, 100)), ())
    kept = Energy((Choice(BOTH, (10 * larger, 20 * larger)),) * 3, (), unit=8.0)
    for limit, expected in ((400, "lhh"), (320, "llh"), (240, "lll")):
        assert lows(place_within(kept, limit * larger)(question(time))) == expected
    for slowdown, expected in ((1.005, "hhh"), (1.01, "lhh"), (1.11, "llh"), (3.0, "lll")):
        assert lows(Smallest(kept, slowdown)(question(time, 100.0 * slower))) == expected


def test_nothing_kept_is_within_any_limit():
    """Also of no bytes."""
    free = Energy((Choice(BOTH, (0, 0)),) * 3, ())
    assert lows(place_within(free, 0)(question(TIME))) == "hhh"


def test_a_price_is_found_among_a_hundred_that_are_nearly_one():
    """The half that is cheapest to lower is low."""
    time = Energy(tuple(Choice(BOTH, (1000 + n, 0)) for n in range(100)), ())
    kept = Energy((Choice(BOTH, (10, 20)),) * 100, (), unit=8.0)
    assert lows(place_within(kept, 150 * 10 * 8)(question(time))) == "l" * 50 + "h" * 50


def test_a_lower_price_that_is_rounded_worse_is_no_answer():
    """At 5/8 of a price, ten copies of 2 and 3 seem to be worth what they are at 1; at 6/8, nothing."""
    time = Energy((Choice(BOTH, (5, 0)), Choice(BOTH, (55, 0))), ())
    copies = (Flow(0, BOTH, (Reader(0, BOTH, stores=True),), {}, {}, {bf16: 2, fp32: 3}),) * 10
    kept = Energy((Choice(BOTH, (0, 0)), Choice(BOTH, (0, 100))), copies)
    found = place_within(kept, 30)(question(time))
    assert (lows(found), found.cost) == ("hl", 55)
