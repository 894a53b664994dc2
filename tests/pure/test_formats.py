"""Facts of the formats, exactness, promotion."""

import math
import pickle

import pytest

from narrowcast.errors import FormatError
from narrowcast.formats import (
    FORMATS,
    bf16,
    e4m3fn,
    e4m3fnuz,
    e5m2,
    e5m2fnuz,
    fp16,
    fp32,
    fp64,
    is_exact,
    parse_format,
    tf32,
    widest,
)


@pytest.mark.parametrize(
    ("found", "largest", "normal", "subnormal"),
    [
        (fp64, 1.7976931348623157e308, 2.0**-1022, 5e-324),
        (fp32, 3.4028234663852886e38, 2.0**-126, 2.0**-149),
        (tf32, (2 - 2**-10) * 2.0**127, 2.0**-126, 2.0**-136),
        (bf16, 3.3895313892515355e38, 2.0**-126, 2.0**-133),
        (fp16, 65504.0, 2.0**-14, 2.0**-24),
        (e4m3fn, 448.0, 2.0**-6, 2.0**-9),
        (e5m2, 57344.0, 2.0**-14, 2.0**-16),
        (e4m3fnuz, 240.0, 2.0**-7, 2.0**-10),
        (e5m2fnuz, 57344.0, 2.0**-15, 2.0**-17),
    ],
)
def test_facts_are_those_of_the_standards(found, largest, normal, subnormal):
    """Largest, smallest normal and smallest values as published."""
    assert (found.max, found.smallest_normal, found.smallest) == (largest, normal, subnormal)


def test_exactness_between_all_pairs():
    """The exact casts are these and no others."""
    exact = {(a.name, b.name) for a in FORMATS.values() for b in FORMATS.values() if a is not b and is_exact(a, b)}
    wide = {(a, b) for a, b in exact if b in ("fp64", "fp32", "tf32", "bf16", "fp16")}
    small = ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"]
    expected = {(s, w) for s in small for w in ("fp64", "fp32", "tf32", "bf16", "fp16")}
    expected |= {("bf16", w) for w in ("tf32", "fp32", "fp64")} | {("fp16", w) for w in ("tf32", "fp32", "fp64")}
    expected |= {("tf32", "fp32"), ("tf32", "fp64"), ("fp32", "fp64")}
    assert wide == expected
    assert exact - wide == set()  # no fp8 format holds another: they differ in range, precision or zeros


def test_widest_is_that_of_torch_promotion():
    """Including bf16 with fp16, which is fp32."""
    assert widest([bf16]) is bf16
    assert widest([bf16, fp16]) is fp32
    assert widest([fp16, fp32]) is fp32
    assert widest([bf16, fp64]) is fp64


@pytest.mark.parametrize("formats", [[], [tf32], [e4m3fn, e5m2], [bf16, e4m3fn]])
def test_widest_refuses_what_torch_does_not_promote(formats):
    """fp8, tf32 and nothing at all have no widest format."""
    with pytest.raises(FormatError):
        widest(formats)


@pytest.mark.parametrize(
    ("text", "expected"), [("bf16", bf16), ("torch.float16", fp16), ("half", fp16), ("e4m3", e4m3fn)]
)
def test_formats_are_known_by_torch_names_too(text, expected):
    """A dtype's name is as good as a format's."""
    assert parse_format(text) is expected


def test_an_unknown_format_says_which_there_are():
    """The error lists the formats."""
    with pytest.raises(FormatError, match="fp7") as caught:
        parse_format("fp7")
    assert "bf16" in str(caught.value)


def test_a_pickled_format_is_the_same_object():
    """Formats compare by identity, so pickling must keep it."""
    for f in FORMATS.values():
        assert pickle.loads(pickle.dumps(f)) is f


def test_epsilon_is_the_step_above_one():
    """Two to the minus mantissa bits."""
    assert fp32.epsilon == 2.0**-23
    assert math.isclose(bf16.epsilon, 0.0078125)


def test_a_format_says_its_name_in_a_debugger():
    """And in a text."""
    assert repr(FORMATS["bf16"]) == "Format(bf16)" and str(FORMATS["bf16"]) == "bf16"


def test_the_widest_of_nothing_is_nothing():
    """And what takes no part in promotion is named."""
    with pytest.raises(FormatError, match="no formats"):
        widest([])
    with pytest.raises(FormatError, match="e5m2 takes no part in promotion"):
        widest([FORMATS["fp32"], FORMATS["e5m2"]])
