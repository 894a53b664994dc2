"""A region that casts nothing, as captures and references open one, is none to a program that asks for one."""

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.runtime.torch_surface.patches import standing

pytestmark = pytest.mark.filterwarnings("ignore:torch.is_autocast_cpu_enabled")
answers = []  # not the model's: its own attributes are restored


class Asks(nn.Module):
    """Converts its input where autocast is on, as models do that cast by themselves."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        answers.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cpu_enabled()))
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        with torch.autocast("cpu", torch.float16):
            answers.append((torch.is_autocast_enabled("cpu"),) * 2)
        return self.layer(x)


class Square(torch.autograd.Function):
    """Computes in fp16 in a region."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float16)
    def forward(ctx, x):
        return x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        return gradient


class Squared(nn.Module):
    def forward(self, x):
        return Square.apply(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        q = self.inner(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return self.outer(nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2)).values()


def test_a_capture_without_a_region_is_the_program_without_one():
    """It is asked for the device, and by the older name; in the program's own region autocast is on."""
    model, x = Asks(), torch.randn(4, 8)
    answers.clear()
    run = nc.capture(model, x)
    assert answers == [(False, False), (True, True)]
    assert {call.computes for call in run.calls} == {"fp32"} and run.calls[-1].id.op == "aten.linear.default"
    assert not any(line.what.endswith("is_autocast_enabled") for line in standing())
    nc.capture(model, x, under="bf16")
    assert answers[2:] == [(True, True), (True, True)]


def test_a_reference_casts_nothing_that_the_model_would_cast_in_a_region():
    """The reference of a comparison is in fp32; a capture of a function that torch's custom_fwd casts, too."""
    compared = nc.compare(Asks(), torch.randn(4, 8), under="bf16")
    assert {row.reference for row in compared.rows} == {"fp32"}
    run = nc.capture(Squared(), torch.randn(4, 8))
    assert [call.computes for call in run.calls] == ["fp32"]


def test_attention_of_jagged_tensors_casts_nothing_in_a_reference():
    """torch asks there, and casts before any op runs."""
    jagged = torch.nested.nested_tensor([torch.randn(n, 8) for n in (3, 5)], layout=torch.jagged)
    compared = nc.compare(Attention(), (jagged,), under="bf16")
    assert compared.outputs and "bf16" not in {row.reference for row in compared.rows}


def test_what_asks_in_order_to_restore_the_state_gets_the_state():
    """torch.autocast and checkpoint: what runs after an inner region, or again, has the identity that it had."""
    layer = nn.Linear(8, 8)

    def block(x):
        with torch.autocast("cpu", enabled=False):
            x = x * 2
        return layer(layer(x).relu())

    run = nc.capture(
        lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False),
        torch.randn(4, 8, requires_grad=True), backward=lambda out: out.sum(),
    )  # fmt: skip
    linear = [call.id.direction for call in run.calls if call.id.op == "aten.linear.default"]
    assert linear == ["forward", "forward", "recomputation"]


REGIONS = {
    "torch": lambda: torch.autocast("cpu", torch.bfloat16),
    "ours": lambda: nc.autocast("cpu", torch.bfloat16),
    "a policy": lambda: nc.autocast("cpu", policy=nc.Policy.native().with_rules(nc.Rule("aten.exp", "full"))),
    "checked": lambda: nc.autocast("cpu", torch.bfloat16, cache_enabled="checked"),
}


@pytest.mark.parametrize("look", [nc.capture, nc.compare], ids=["capture", "compare"])
@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
def test_regions_of_a_program_forget_their_casts_of_weights(region, look):
    """Where nobody asked for a region around it: the program changes its weights between two of its own, as a sharpness
    aware step does, and no kernel is at fault.
    """
    torch.manual_seed(0)
    linear, x, found = nn.Linear(16, 16), torch.randn(4, 16), []

    def program():
        before = linear.weight.detach().clone()
        with region():
            first = linear(x)
        with torch.no_grad():
            linear.weight.add_(0.1)
        with region():
            second = linear(x)
        with torch.no_grad():
            linear.weight.copy_(before)
        found.append((first - second).detach())
        return found[-1]

    program()
    assert look(program).verdict in ("finite", "not compared")
    assert torch.equal(found[0], found[1]) and found[0].abs().max() > 0.1
