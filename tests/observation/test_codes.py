"""8- and 16-bit numerics, on every code."""

import math
from fractions import Fraction

import pytest
import torch

from narrowcast.formats import FORMATS, bf16, fp16, fp32, fp64, is_exact, tf32
from narrowcast.observation.statistics.rounding import round_to
from narrowcast.runtime.torch_bridge import DTYPES

SMALL = [f for f in FORMATS.values() if f.bits <= 16]


def every_value(f):
    """All values of a format of at most 16 bits, as float64, NaN included."""
    codes = torch.arange(2**f.bits, dtype=torch.int32)
    raw = codes.to(torch.int16).view(DTYPES[f]) if f.bits == 16 else codes.to(torch.uint8).view(DTYPES[f])
    return raw.to(torch.float64)


def finite(f):
    values = every_value(f)
    return values[torch.isfinite(values)].unique()


@pytest.mark.parametrize("f", SMALL, ids=str)
def test_the_facts_are_those_of_the_codes(f):
    """Largest, smallest, step above one, infinities, negative zero: read off every code."""
    values = every_value(f)
    positive = values[torch.isfinite(values) & (values > 0)]
    assert positive.max() == f.max
    assert positive.min() == f.smallest
    assert positive[positive > 1].min() - 1 == f.epsilon
    assert bool(torch.isinf(values).any()) == f.has_inf
    assert bool(((values == 0) & torch.signbit(values)).any()) == f.has_negative_zero


@pytest.mark.parametrize("src", SMALL, ids=str)
@pytest.mark.parametrize("dst", [f for f in FORMATS.values() if f is not tf32], ids=str)
def test_is_exact_says_what_casting_every_code_shows(src, dst):
    """A round trip through `dst` gives back every value, with its sign, exactly when is_exact says so."""
    values = every_value(src)
    values = values[~torch.isnan(values)]
    there = round_to(values, dst).to(torch.float64)
    survives = torch.equal(there, values) and torch.equal(torch.signbit(there), torch.signbit(values))
    assert survives == is_exact(src, dst)


def oracle(value: float, f) -> Fraction | float:
    """Round to nearest even by exact rational arithmetic."""
    if math.isnan(value) or math.isinf(value):
        return math.copysign(math.inf if f.has_inf else math.nan, value) if math.isinf(value) else value
    exact = Fraction(value)
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    step = Fraction(2) ** (max(exponent, f.min_exponent) - f.mantissa_bits)
    rounded = round(exact / step) * step  # Fraction rounds half to even
    if abs(rounded) > Fraction(f.max):
        return math.copysign(math.inf if f.has_inf else math.nan, value)
    return rounded


@pytest.mark.parametrize("f", [*SMALL, tf32], ids=str)
def test_round_to_is_right_at_and_beside_every_midpoint(f):
    """Each value, each midpoint of neighbours, and the fp64 numbers just beside it; beyond the largest; NaN."""
    values = finite(f) if f.bits <= 16 else finite(bf16)
    ends = torch.tensor(
        [f.max, f.max + 2.0 ** (f.max_exponent - f.mantissa_bits - 1), 1e300, math.inf, 5e-324, f.smallest / 2]
    )
    values = torch.cat([values, ends, -ends])
    middles = (values[1:] + values[:-1]) / 2
    middles = middles[torch.isfinite(middles)]
    points = torch.cat([values, middles, middles.nextafter(torch.tensor(math.inf).double()),
                        middles.nextafter(torch.tensor(-math.inf).double())])  # fmt: skip
    if len(points) > 20_000:
        points = points[torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:20_000]]
    found = round_to(points, f).to(torch.float64).tolist()
    for point, got in zip(points.tolist(), found, strict=True):
        expected = oracle(point, f)
        if isinstance(expected, float) and math.isnan(expected):
            assert math.isnan(got), point
        else:
            assert got == float(expected), (point, got, float(expected))


@pytest.mark.parametrize("f", [bf16, fp16], ids=str)
def test_torch_rounds_twice_where_we_round_once(f):
    """The fault that round_to exists for: when torch repairs it, this test says so."""
    halfway = 1 + f.epsilon / 2
    beside = torch.tensor([halfway + 2.0**-40], dtype=torch.float64)  # fp32 cannot tell it from the midpoint
    assert round_to(beside, f).item() == 1 + f.epsilon
    assert beside.to(DTYPES[f]).item() == 1.0


@pytest.mark.parametrize("f", [fp32, fp64], ids=str)
def test_round_to_wide_formats_is_torch_s(f):
    """One step there."""
    x = torch.randn(1000, dtype=torch.float64)
    assert torch.equal(round_to(x, f), x.to(DTYPES[f]))


def test_round_to_wants_float64():
    """Anything else has been rounded before."""
    with pytest.raises(TypeError, match="float64"):
        round_to(torch.ones(1), bf16)
