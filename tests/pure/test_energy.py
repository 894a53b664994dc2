"""The optimum of the energy: both solvers against brute force on random programs of calls, casts and pins."""

import itertools
import random
from dataclasses import replace

import pytest

from narrowcast.errors import EnergyError
from narrowcast.formats import bf16, fp16, fp32
from narrowcast.programs.placement import (
    FIXED,
    Choice,
    Energy,
    Flow,
    Optimum,
    Reader,
    minimise,
    minimise_by_cut,
    minimise_by_integer_program,
)


def brute_force(energy):
    """The least energy over all placements; None if all are forbidden."""
    costs = [energy.evaluate(chosen) for chosen in itertools.product(*(c.formats for c in energy.choices))]
    return min((c for c in costs if c is not None), default=None)


def random_energy(seed, formats, free):
    """`free` calls that read each other's values, some given and some pinned, with shared casts."""
    rng = random.Random(seed)
    choices = []
    for _ in range(free):
        own = rng.sample(formats, rng.randint(1, len(formats)))
        choices.append(Choice(tuple(own), tuple(rng.randint(0, 40) for _ in own)))
    flows = []
    for _ in range(rng.randint(1, 2 * free)):
        maker = rng.randint(FIXED, free - 1)
        own = choices[maker].formats if maker != FIXED else (rng.choice(formats),)
        readers = []
        for _ in range(rng.randint(1, 4)):
            choice = rng.randint(FIXED, free - 1)
            needs = choices[choice].formats if choice != FIXED else (rng.choice(formats),)
            if rng.random() < 0.15:
                needs = (None,) * len(needs)
            readers.append(Reader(choice, needs, rng.random() < 0.4, rng.random() < 0.3))
        casts = {(a, b): rng.randint(0, 30) for a in formats for b in formats if a is not b}
        stores = {f: rng.randint(0, 10) for f in formats}
        reads = {f: rng.randint(0, 10) for f in formats}
        rounded = frozenset([rng.choice(formats)] if rng.random() < 0.25 else [])
        if rng.random() < 0.2:  # a value that costs nothing but its casts
            reads, stores = {}, {}
        flows.append(Flow(maker, own, tuple(readers), casts, reads, stores, rounded))
    return Energy(tuple(choices), tuple(flows))


@pytest.mark.parametrize("block", range(8))
def test_the_cut_is_what_brute_force_finds(block):
    """Two formats, up to 12 free calls: 2,000 random energies, with casts that many readers share, and pins."""
    for seed in range(block * 250, block * 250 + 250):
        energy = random_energy(seed, [bf16, fp32], 1 + seed % 12 if seed % 10 == 0 else 1 + seed % 7)
        best = brute_force(energy)
        if best is None:
            with pytest.raises(EnergyError):
                minimise_by_cut(energy)
            continue
        found = minimise_by_cut(energy)
        assert found.cost == found.bound == best, seed
        assert energy.evaluate(found.chosen) == best


def test_the_integer_program_is_what_brute_force_finds():
    """Three formats, up to 6 free calls; and on two formats both methods agree."""
    for seed in range(150):
        formats = [bf16, fp16, fp32] if seed % 3 else [bf16, fp32]
        energy = random_energy(seed, formats, 1 + seed % 6)
        best = brute_force(energy)
        if best is None:
            with pytest.raises(EnergyError):
                minimise_by_integer_program(energy)
            continue
        found = minimise_by_integer_program(energy)
        assert found.cost == found.bound == best, seed
        assert found.cost == found.bound
        assert minimise(energy).cost == best


def test_the_same_energy_gives_the_same_placement():
    """Of several optima always the same one, in which the fewest calls are low."""
    tie = Energy((Choice((bf16, fp32), (5, 5)),), ())
    assert minimise(tie).chosen == (fp32,)
    for seed in range(30):
        energy = random_energy(seed, [bf16, fp32], 9)
        if brute_force(energy) is not None:
            assert minimise(energy).chosen == minimise(energy).chosen


def test_a_cast_is_paid_once_for_all_its_readers():
    """Three low readers of one fp32 value pay one cast between them."""
    low = Choice((bf16, fp32), (0, 10))
    readers = tuple(Reader(n, (bf16, fp32)) for n in range(3))
    flow = Flow(FIXED, (fp32,), readers, {(fp32, bf16): 20, (bf16, fp32): 20})
    found = minimise(Energy((low, low, low), (flow,)))
    assert found.chosen == (bf16, bf16, bf16)
    assert found.cost == 20
    alone = minimise(Energy((low,), (Flow(FIXED, (fp32,), readers[:1], flow.casts),)))
    assert alone.chosen == (fp32,)


def test_costs_that_make_no_sense_are_errors():
    """Negative ones, and more than 32 bits hold."""
    for costs in ((-1, 3), (2**31, 0)):
        with pytest.raises(EnergyError):
            flow = Flow(FIXED, (fp32,), (Reader(0, (bf16, fp32)),), {(fp32, bf16): costs[0]})
            minimise(Energy((Choice((bf16, fp32), (0, 2**31)),), (flow,)))


def test_no_choice_is_an_optimum_too():
    """Only pins: the energy is what they cost."""
    flow = Flow(FIXED, (fp32,), (Reader(FIXED, (bf16,)),), {(fp32, bf16): 7})
    found = minimise(Energy((), (flow,)))
    assert (found.cost, found.bound, found.method) == (7, 7, "nothing to choose")
    assert minimise(Energy((), ())) == Optimum((), 0, 0, "nothing to choose")


def test_an_integer_program_may_have_nothing_to_choose():
    """Its cost is what is fixed."""
    flow = Flow(FIXED, (fp32,), (Reader(FIXED, (bf16,)),), {(fp32, bf16): 7}, {fp32: 2})
    found = minimise_by_integer_program(Energy((), (flow,)))
    assert (found.chosen, found.cost, found.bound, found.method) == ((), 9, 9, "integer program")


@pytest.mark.parametrize(("total", "fits"), [(2**30, True), (2**30 + 1, False)])
def test_costs_may_fill_what_the_solver_holds(total, fits):
    """Together, to the last one."""
    energy = Energy((Choice((bf16, fp32), (total - 3, 3)),) , (Flow(0, (bf16, fp32), (Reader(FIXED, (bf16,)),),
                    {(fp32, bf16): 6, (bf16, fp32): 0}),))  # fmt: skip
    if fits:
        assert minimise_by_cut(energy).chosen == (fp32,) and minimise_by_cut(energy).cost == 9
    else:
        with pytest.raises(EnergyError, match="costs of"):
            minimise_by_cut(energy)


def test_what_a_cut_cannot_say_is_refused():
    """A result, or a need, in the other format than the call has itself; and a cost below nothing."""
    both, casts = (bf16, fp32), {(bf16, fp32): 1, (fp32, bf16): 1}
    choice = Choice(both, (1, 2))
    with pytest.raises(EnergyError, match="whose result has the other format"):
        minimise_by_cut(Energy((choice,), (Flow(0, both[::-1], (Reader(FIXED, (bf16,)),), casts),)))
    with pytest.raises(EnergyError, match="needs the other format"):
        minimise_by_cut(Energy((choice,), (Flow(FIXED, (fp32,), (Reader(0, both[::-1]),), casts),)))
    with pytest.raises(EnergyError, match="a cost of -1"):
        minimise_by_cut(Energy((choice,), (Flow(FIXED, (fp32,), (Reader(0, both),), {**casts, (fp32, bf16): -1}),)))


def test_a_placement_that_is_forbidden_has_no_energy():
    """A reader that keeps every bit must not be given what was rounded, unless it takes that as it is."""
    both, casts = (bf16, fp32), {(bf16, fp32): 1, (fp32, bf16): 1}
    flow = Flow(0, both, (Reader(FIXED, (fp32,), keeps=True),), casts, rounded=frozenset([bf16]))
    energy = Energy((Choice(both, (0, 9)),), (flow,))
    assert energy.evaluate((bf16,)) is None and energy.evaluate((fp32,)) == 9
    assert minimise(energy).chosen == (fp32,)
    tied = Energy((Choice((bf16,), (0,)),), (replace(flow, formats=(bf16,)),))
    with pytest.raises(EnergyError, match="every placement is forbidden"):
        minimise_by_cut(tied)
    with pytest.raises(EnergyError):
        minimise_by_integer_program(tied)
    lenient = replace(flow, readers=(Reader(FIXED, (bf16,), keeps=True),))
    assert Energy(energy.choices, (lenient,)).evaluate((bf16,)) == 0


@pytest.mark.parametrize(("format", "costs"), [(bf16, (5, 0)), (fp32, (0, 5))])
def test_what_is_forbidden_costs_more_than_everything_else_together(format, costs):
    """Also where the placement that is left is the dearest."""
    both = (bf16, fp32)
    (other,) = {*both} - {format}
    pin = Flow(0, both, (Reader(FIXED, (format,), keeps=True),), {}, rounded=frozenset([other]))
    found = minimise_by_cut(Energy((Choice(both, costs),), (pin,)))
    assert (found.chosen, found.cost, found.bound) == ((format,), 5, 5)


def test_memory_is_paid_once_per_format_if_one_reader_needs_it_there():
    """Whichever of them it is."""
    readers = [Reader(FIXED, (bf16,)), Reader(FIXED, (bf16,), stores=True), Reader(FIXED, (bf16,))]
    for order in itertools.permutations(readers):
        energy = Energy((), (Flow(FIXED, (fp32,), order, {(fp32, bf16): 3}, {fp32: 5}, {bf16: 7, fp32: 11}),))
        assert energy.evaluate(()) == 15
    assert Energy((), (Flow(FIXED, (fp32,), tuple(readers[::2]), {(fp32, bf16): 3}),)).evaluate(()) == 3


@pytest.mark.parametrize("solver", [minimise_by_cut, minimise_by_integer_program])
def test_what_no_cost_is_given_for_costs_nothing(solver):
    """Reading in a format, having it in memory."""
    both = (bf16, fp32)
    flow = Flow(0, both, (), {}, {fp32: 1})
    assert solver(Energy((Choice(both, (1, 0)),), (flow, flow))).chosen == (bf16,)
    stored = Flow(FIXED, (fp32,), (Reader(0, both, stores=True),), {(fp32, bf16): 0}, {}, {fp32: 1})
    assert solver(Energy((Choice(both, (1, 0)),), (stored, stored))).chosen == (bf16,)
