"""Faults that were planted: found in eager, compiled, exported and scripted code alike, forward and backward."""

import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowcast as nc

FORMS = ("eager", "compiled", "exported", "scripted")
FP32 = nc.Policy("fp32", extends=())
HERE = __file__


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        yield
    torch._dynamo.reset()


def in_form(form, model, x, dtype, policy="native"):
    """The model under a policy, as eager, compiled, exported or scripted code."""
    if form == "compiled":
        compiled = nc.compile(model, under=nc.autocast("cpu", dtype, policy=policy), backend="aot_eager")
        compiled(x)
        return compiled
    if form == "exported":
        return nc.export(model, (x,), under=nc.autocast("cpu", dtype, policy=policy)).module()
    if form == "scripted":
        return nc.script(model, under=nc.autocast("cpu", dtype, policy=policy))

    def eager(x):
        with nc.autocast("cpu", dtype=dtype, policy=policy):
            return model(x)

    return eager


def source_line(number):
    return Path(HERE).read_text(encoding="utf-8").splitlines()[number - 1]


@contextmanager
def kernels(**functions):
    """Ops' cpu kernels replaced."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op, function in functions.items():
            library.impl(op, function, "CPU")
    try:
        yield
    finally:
        library._destroy()


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024, 16))

    def forward(self, x):
        return torch.mm(x, self.weight)


class Norm(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.up = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32, eps=eps)

    def forward(self, x):
        return self.norm(self.up(x))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.last(torch.relu(self.first(x))).float() * 1e-9


@pytest.mark.parametrize("form", FORMS)
class TestInEveryForm:
    """The op, its module and its line."""

    def test_a_wrong_epsilon(self, form):
        """A layer norm with `eps=1e-12` instead of 1e-5 is the worst fault, with both values and the call's line."""
        right, wrong, x = Norm(1e-5), Norm(1e-12), torch.randn(8, 32)
        wrong.load_state_dict(right.state_dict())
        found = nc.compare(in_form(form, wrong, x, "bf16"), (x,), reference=in_form(form, right, x, "bf16"))
        worst = found.faults[0]
        assert "1e-12" in worst.why and "1e-05" in worst.why and "layer_norm" in worst.id.op, found
        assert worst.id.module_path == "norm" and source_line(worst.line).strip() == "return self.norm(self.up(x))"

    def test_a_product_that_accumulates_in_bf16(self, form):
        """A sound kernel shows no fault; one with a bf16 accumulator shows one, at the line of `torch.mm`."""

        def mm(a, b):
            if a.dtype is not torch.bfloat16:
                return (a[:, :, None] * b).sum(1)
            total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
            for k in range(a.shape[1]):
                total = total + a[:, k : k + 1] * b[k : k + 1]
            return total

        model, x = Product(), torch.randn(8, 1024)
        reference, low = in_form(form, model, x, "bf16", FP32), in_form(form, model, x, "bf16")
        assert not nc.compare(low, (x,), reference=reference).faults
        with kernels(mm=mm):
            found = nc.compare(low, (x,), reference=reference)
        assert [row.id.op for row in found.faults] == ["aten.mm.default"], found
        assert "its kernel is off" in found.faults[0].why
        assert "torch.mm(x, self.weight)" in source_line(found.faults[0].line)

    def test_underflow_in_the_backward(self, form):
        """A factor of 1e-9 after the last layer makes fp16 gradients vanish, in parameters as in calls."""
        model, x = Small(), torch.randn(8, 32)
        run = in_form(form, model, x, "fp16")
        reference = in_form(form, model, x, "fp16", FP32)
        found = nc.compare(run, (x,), reference=reference, backward=True)
        lost = [g.parameter for g in found.gradients if g.underflow > 0.5]
        assert "first.weight" in lost, found
        rows = [row for row in found.rows if row.id.direction == "backward" and row.underflow > 0.5]
        assert rows and all(row.file == HERE for row in rows), found
