"""No warning of torch's is about what Narrowcast does by itself: each front end warns of no more than torch's own."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.randn(2, 4)


class Tied(nn.Module):
    """Reads one weight twice, and returns a dict."""

    def __init__(self):
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(4, 4)), Named()

    def forward(self, x):
        return self.inner(F.linear(F.linear(x, self.weight), self.weight))["logits"]


class Named(nn.Module):
    """Names what it returns."""

    def forward(self, x):
        return {"logits": x * 2, "hidden": x}


class Scaled(torch.autograd.Function):
    """A function with a forward and a backward of its own, for regions."""

    @staticmethod
    @nc.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    @nc.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        return grad * 2


RULES = {
    "native": (),
    "the place of an op": (nc.Rule("aten.linear", "to(fp16)", function="*Tied.forward"),),
    "a key of what a module returns": (nc.Rule("module.call", "full", module="inner", argument="result.logits"),),
}
FRONT_ENDS = {
    "trace": lambda policy: nc.trace(Tied(), X, under=policy, check_trace=False),
    "compile": lambda policy: nc.compile(Tied(), under=policy, backend="aot_eager")(X),
    "export": lambda policy: nc.export(Tied(), X, under=policy),
}


def said(call):
    """What torch warns of inside, all of TorchScript's deprecation and of the version of Python aside."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught if not str(one.message).startswith(("`torch.jit", "Guards may run"))]


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("rules", RULES)
def test_nothing_is_said_of_our_own_code(front_end, rules):
    """Not of the weight cache in a trace, of torch's copy of a program, or of a dict that a boundary copies."""
    assert said(lambda: FRONT_ENDS[front_end](nc.Policy.native().with_rules(RULES[rules]))) == []


def test_nothing_is_said_of_a_custom_function_under_torch_compile():
    """Dynamo looked into the region's policy, and asked users to report what it met there."""

    def call():
        x = X.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            torch.compile(lambda t: Scaled.apply(t), backend="aot_eager")(x).sum().backward()

    assert said(call) == []
