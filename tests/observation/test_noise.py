"""Noise of one unit in the last place: how far it moves values, that it goes on, that it can be had again."""

import pytest
import torch

from narrowcast.observation.trial.noise import Noise

UNIT = 2.0**-8


@pytest.mark.parametrize("elements", [1, 1000, 600_000])
def test_each_value_moves_by_at_most_one_unit_and_on_average_by_none(elements):
    """600,000 elements read the strip more than twice."""
    x = torch.linspace(1, 2, elements, dtype=torch.float64)
    shares = (Noise(1).moved(x, UNIT) - x) / x / UNIT
    assert shares.abs().max() <= 1 + 2**-15 and x[0] == 1  # factors are in fp32; a copy moves
    if elements > 1:
        assert abs(shares.mean()) < 4 / (3 * elements) ** 0.5 + 0.01 and abs(shares.var() - 1 / 3) < 0.05


def test_what_is_read_next_is_other_noise():
    """And another seed gives another, the same one the same."""
    noise, x = Noise(1), torch.ones(8)
    first, second = noise.moved(x, UNIT), noise.moved(x, UNIT)
    assert not torch.equal(first, second) and torch.equal(Noise(1).moved(x, UNIT), first)
    assert not torch.equal(Noise(2).moved(x, UNIT), first)


def test_what_masks_are_filled_with_stays_and_nothing_overflows():
    """The lowest values of formats, beside one that moves; the largest value of fp32 would leave it."""
    x = torch.tensor([torch.finfo(torch.float32).min, -65504.0, torch.finfo(torch.bfloat16).min, 1.0] * 50)
    moved = Noise(1).moved(x, UNIT)
    assert torch.equal(moved[x != 1], x[x != 1]) and not torch.equal(moved, x)
    largest = torch.full((100,), torch.finfo(torch.float32).max)
    assert Noise(1).moved(largest, UNIT).isfinite().all()


def test_what_underflows_moves_by_the_smallest_value():
    """Zeros stay; a value near the end of fp16 moves by up to its last step there."""
    x = torch.tensor([1e-7, 0.0] * 500)
    off = (Noise(1).moved(x, 0.0, least=2.0**-24) - x).abs()
    assert off[1::2].max() == 0 and 0.5 * 2.0**-24 < off.max() <= 2.0**-24


def test_a_tensor_keeps_how_it_lies_in_memory():
    """Channels last stay so: kernels and views ask for it."""
    x = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert Noise(1).moved(x, UNIT).stride() == x.stride()
    assert Noise(1).moved(torch.ones(3, 1).expand(3, 4), UNIT).unique().numel() > 3  # which shares its memory


def test_infinities_and_zeros_stay():
    """Of masks."""
    x = torch.tensor([-torch.inf, torch.inf, 0.0] * 100)
    assert torch.equal(Noise(1).moved(x, UNIT), x)
