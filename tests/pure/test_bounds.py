"""Bounds of kernels: the formulas at hand-made values, and of which ops they hold."""

import itertools
import math

import pytest

from narrowcast.core.ops import bounds, named
from narrowcast.formats import bf16, fp16, fp32, fp64
from narrowcast.reports.results.verdicts import EXACT, FAULT, KERNEL, NOT_FINITE, ROUND_OFF, verdict_of


def test_a_unit_is_half_the_distance_to_the_next_value():
    """2^-8, 2^-11 and 2^-24, as Higham's table 2.1 has them."""
    assert [bounds.unit(f) for f in (bf16, fp16, fp32)] == [2.0**-8, 2.0**-11, 2.0**-24]


def test_gamma_is_that_of_highams_lemma_3_1():
    """K u / (1 - K u): a half for a third of 1 / u terms; nothing is sure from 1 / u terms on."""
    assert bounds.gamma(1, 0.25) == pytest.approx(1 / 3) and bounds.gamma(2, 0.25) == 1
    assert bounds.gamma(4, 0.25) == math.inf == bounds.gamma(256, bounds.unit(bf16))


def test_the_probable_gamma_grows_as_the_root_of_the_length():
    """Theorem 2.4 of Higham and Mary; never above the sure one where it is of use, infinite beyond what floats hold."""
    u = bounds.unit(fp32)
    short, long = (bounds.probable_gamma(k, u) for k in (10_000, 1_000_000))
    assert long / short == pytest.approx(10, rel=1e-2) and long < bounds.gamma(1_000_000, u)
    assert bounds.probable_gamma(10_000, 0.25) == math.inf


def test_what_sums_are_off_grows_with_their_length():
    """Without a step down where the probable form takes over."""
    found = [bounds.accumulated(k) for k in (1, 128, 4096, 4097, 100_000, 10_000_000)]
    assert found == sorted(found) and found[0] == pytest.approx(2.0**-24) and found[-1] < bounds.unit(bf16)


def test_one_rounding_has_a_least_error():
    """Half the smallest subnormal of fp16; the smallest normal where that flushes, and near the end of fp32's range."""
    assert bounds.rounding(fp16, flushes=False) == (2.0**-11, 2.0**-25)
    assert bounds.rounding(fp16, flushes=True)[1] == 2.0**-14
    assert bounds.rounding(bf16, flushes=False)[1] == fp32.smallest_normal
    assert bounds.rounding(fp64, flushes=False)[1] < fp32.smallest


def test_weights_of_attention_are_off_as_their_scores_are():
    """exp(2 d) - 1, and not infinite for any d."""
    assert bounds.weights_error(0.0, 0.1) == 0.1 and bounds.weights_error(0.5, 0.0) == pytest.approx(math.e - 1)
    assert bounds.weights_error(1e6, 0.0) < math.inf


@pytest.mark.parametrize(("op", "kind"), [
    ("aten.mm.default", bounds.PRODUCT), ("aten.convolution_backward.default", bounds.PRODUCT),
    ("aten.sum.dim_IntList", bounds.SUM), ("aten.index_add.default", bounds.SCATTER),
    ("aten.scaled_dot_product_attention.default", bounds.WEIGHTS), ("aten.native_layer_norm.default", bounds.WIDE),
    ("aten.add_.Tensor", bounds.WIDE), ("aten.lstm.input", ""), ("aten.sigmoid_backward.default", bounds.STEPS),
    ("mine.mm.default", ""),
])  # fmt: skip
def test_what_bounds_an_op(op, kind):
    """By family or by name; nothing bounds another library's, nor what rounds in between."""
    assert bounds.bound_kind(op) == kind


def test_what_torch_says_is_pointwise_is_bounded_unless_it_is_known_to_round_in_between():
    """Of both kinds one."""
    assert bounds.bound_kind("aten.xlogy.Tensor", is_pointwise=True) == bounds.WIDE
    assert bounds.bound_kind("aten.erfc.default", is_pointwise=True) == ""


def test_nothing_is_bounded_in_two_ways_or_both_bounded_and_not():
    """The lists of the table."""
    lists = [
        named(f"bound.{name}")
        for name in ("products", "sums", "scatter", "steps", "attention_backward", "wide", "none")
    ]
    assert not any(a & b for a, b in itertools.combinations(lists, 2))


@pytest.mark.parametrize(("op", "given", "made", "terms"), [
    ("aten.mm.default", [(3, 128), (128, 5)], [(3, 5)], 128),
    ("aten.mean.dim", [(8, 300)], [(8,)], 300),
    ("aten._trilinear.default", [(9, 16), (9, 8), (4, 16, 8)], [(9, 4)], 16 * 8),
    ("aten.cumsum.default", [(8, 300)], [(8, 300)], 300),
    ("aten.convolution.default", [(2, 16, 8, 8), (4, 16, 3, 3)], [(2, 4, 6, 6)], 16 * 9),
    ("aten.convolution_backward.default", [(2, 4, 6, 6), (2, 16, 8, 8), (4, 16, 3, 3)], [(4, 16, 3, 3)], 16 * 9),
    ("aten.convolution_backward.default", [(64, 4, 6, 6), (64, 2, 8, 8), (4, 2, 3, 3)], [(4, 2, 3, 3)], 64 * 36),
])  # fmt: skip
def test_no_sum_is_longer(op, given, made, terms):
    """At least as many terms as there are, and not many more."""
    assert terms <= bounds.terms_of(op, given, made) <= terms + 1


def test_a_product_is_rounded_once_for_each_factor():
    """And once more for each that the op makes of one: (1 - y), and what the result is multiplied with."""
    assert bounds.terms_of("aten.prod.dim_int", [(8, 30)], [(8,)]) == 30 + 3
    assert bounds.terms_of("aten.sigmoid_backward.default", [(8,), (8,)], [(8,)]) == 1 + 3


@pytest.mark.parametrize(("op", "units"), [
    ("log_softmax", math.log(300)), ("logsumexp", 2 * math.log(300) + 4), ("erf", 2.0**-20 * 256), ("softmax", 0.0),
])  # fmt: skip
def test_what_is_off_whatever_the_result(op, units):
    """In units of the format; a polynomial's does not depend on that."""
    u = bounds.unit(bf16)
    assert bounds.absolute_error(f"aten.{op}.default", [(4, 300)], u) == pytest.approx(units * u)


@pytest.mark.parametrize("facts", list(itertools.product((False, True), repeat=4)))
def test_the_verdict_is_a_table_of_three_facts(facts):
    """All of it: what is not finite first, then outputs beyond their band, then a kernel; else whether it differs."""
    is_beyond, is_not_finite, has_kernel, differs = facts
    table = {
        (False, False, False): ROUND_OFF if differs else EXACT,
        (False, False, True): KERNEL,
        (False, True, False): NOT_FINITE,
        (False, True, True): NOT_FINITE,
        (True, False, False): FAULT,
        (True, False, True): FAULT,
        (True, True, False): NOT_FINITE,
        (True, True, True): NOT_FINITE,
    }
    assert verdict_of(*facts) == table[is_beyond, is_not_finite, has_kernel]
