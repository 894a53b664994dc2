"""Which calls draw random numbers, by their arguments."""

import pytest
import torch

from narrowcast.observation.statistics.arguments import draws_numbers
from narrowcast.runtime.torch_bridge import op_facts

aten, X = torch.ops.aten, torch.ones(2, 2, 4, 4)
RNN = (X[0], [X[0, 0]], 4, None, X[0], None, 3, 4, 0, 1, False)


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "draws"),
    [
        (aten.scaled_dot_product_attention.default, (X, X, X), {}, False),
        (aten.scaled_dot_product_attention.default, (X, X, X, None, 0.1), {}, True),
        (aten._scaled_dot_product_efficient_attention.default, (X, X, X, None, False), {"dropout_p": 0.5}, True),
        (aten._cudnn_rnn.default, (*RNN, 0.0, True, False, [], None), {}, False),
        (aten._cudnn_rnn.default, (*RNN, 0.5, False, False, [], None), {}, False),
        (aten._cudnn_rnn.default, (*RNN, 0.5, True, False, [], None), {}, True),
        (aten.native_dropout.default, (X, 0.5, False), {}, False),
        (aten.native_dropout.default, (X, 0.5, True), {}, True),
        (aten.bernoulli.default, (X,), {}, True),
        (aten.relu.default, (X,), {}, False),
    ],
)
def test_draws_numbers(op, args, kwargs, draws):
    """Attention and recurrent layers do with dropout alone, and that where it is on."""
    assert draws_numbers(op_facts(op), args, kwargs) == draws
