"""The optimum of the energy: both solvers against brute force on random programs of calls, casts and pins."""

import itertools
import random

import pytest

from narrowcast.errors import EnergyError
from narrowcast.formats import bf16, fp16, fp32
from narrowcast.placement import (
    FIXED,
    Choice,
    Energy,
    Flow,
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
        rounded = frozenset([formats[0]] if rng.random() < 0.25 else [])
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
        assert found.cost == best, seed
        assert found.gap == 0
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
    assert (found.cost, found.gap, found.method) == (7, 0, "nothing to choose")
