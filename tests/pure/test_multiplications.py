"""How many multiplications a call makes, from its shapes."""

import pytest

from narrowcast.core.ops import multiplications

PRODUCTS = [
    ("aten.mm.default", [(2, 3), (3, 5)], [(2, 5)], 30),
    ("aten.linear.default", [(7, 2, 3), (5, 3), (5,)], [(7, 2, 5)], 7 * 30),
    ("aten.addmm.default", [(5,), (2, 3), (3, 5)], [(2, 5)], 30),
    ("aten.addmm_.default", [(2, 5), (2, 3), (3, 5)], [(2, 5)], 30),
    ("aten.addbmm.default", [(2, 5), (7, 2, 3), (7, 3, 5)], [(2, 5)], 7 * 30),
    ("aten.outer.default", [(3,), (5,)], [(3, 5)], 15),
    ("aten.dot.default", [(3,), (3,)], [()], 3),
    ("aten.conv2d.default", [(2, 4, 9, 9), (6, 2, 3, 3)], [(2, 6, 7, 7)], 2 * 6 * 49 * 2 * 9),
    ("aten.conv_transpose2d.input", [(2, 4, 7, 7), (4, 6, 3, 3)], [(2, 6, 9, 9)], 2 * 4 * 49 * 6 * 9),
    ("aten.convolution_backward.default", [(2, 6, 7, 7), (2, 4, 9, 9), (6, 2, 3, 3)],
     [(2, 4, 9, 9), (6, 2, 3, 3), (6,)], 2 * 2 * 6 * 49 * 2 * 9),
    ("aten.scaled_dot_product_attention.default", [(2, 8, 5, 4), (2, 8, 7, 4), (2, 8, 7, 3)], [(2, 8, 5, 3)],
     16 * 5 * 7 * (4 + 3)),
    ("aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
     [(2, 8, 5, 4), (2, 8, 5, 4), (2, 8, 7, 4), (2, 8, 7, 4)], [(2, 8, 5, 4), (2, 8, 7, 4), (2, 8, 7, 4)],
     16 * 5 * 7 * 5 * 4),
    ("aten.lstm.input", [(6, 2, 3), (1, 2, 5), (1, 2, 5), (20, 3), (20, 5), (20,), (20,)], [(6, 2, 5)],
     6 * 2 * (60 + 100)),
    ("aten.mkldnn_rnn_layer.default", [(6, 2, 3), (20, 3), (20, 5), (20,), (20,), (2, 5), (2, 5)], [(6, 2, 5)],
     6 * 2 * (60 + 100)),
    ("aten.relu.default", [(2, 3)], [(2, 3)], 0),
    ("aten.einsum.default", [(2, 3), (3, 5)], [(2, 5)], None),
    ("aten.mm.default", [("s0", 3), (3, 5)], [("s0", 5)], None),
    ("aten.mm.default", [], [], None),
]  # fmt: skip


@pytest.mark.parametrize("op, shapes, results, expected", PRODUCTS)
def test_multiplications_follow_from_shapes(op, shapes, results, expected):
    """None where shapes do not say it; 0 of what makes none."""
    assert multiplications(op, shapes, results) == expected


def test_a_convolution_may_be_transposed_by_an_argument():
    """Then its input says how many, not its result."""
    shapes, results = [(2, 4, 7, 7), (4, 6, 3, 3)], [(2, 6, 15, 15)]
    assert multiplications("aten.convolution.default", shapes, results, transposed=True) == 2 * 4 * 49 * 6 * 9
    assert multiplications("aten.convolution.default", shapes, results) == 2 * 6 * 225 * 6 * 9
