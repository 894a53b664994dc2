"""Rules about functions: the same functions in every front end, those without a name of their own, too."""

import pytest
import torch
from torch import nn

import narrowcast as nc

applied = lambda layer, x: layer(x)


def chosen(layer, x):
    return (lambda y: layer(y))(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(5)])

    def forward(self, x):
        by_lambda = applied(self.layers[0], x)
        inside = chosen(self.layers[1], x)
        listed = tuple(layer(x) for layer in self.layers[2:4])
        return by_lambda, inside, *listed, self.layers[4](x)


FORMS = {
    "compile": lambda model, x, policy: nc.compile(model, under=policy, backend="aot_eager"),
    "export": lambda model, x, policy: nc.export(model, (x,), under=policy).module(),
    "trace": lambda model, x, policy: nc.trace(model, (x,), under=policy),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "function", ["*<lambda>", "*chosen*", "*chosen.<locals>.<lambda>", "*<genexpr>", "*Model.forward"]
)
def test_lambdas_and_generators_have_the_names_of_eager_code(function, form, fresh_dynamo):
    """Which `forward` around them has, as well."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", function=function))
    model, x = Model(), torch.randn(2, 4)
    with nc.autocast("cpu", policy=policy):
        expected = [y.dtype for y in model(x)]
    assert torch.float32 in expected
    assert [y.dtype for y in FORMS[form](model, x, policy)(x)] == expected
