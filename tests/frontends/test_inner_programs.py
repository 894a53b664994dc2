"""Conditions, loops and scans inside graphs, and integer weights: ruled as eager code rules them, without fallbacks."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import narrowcast as nc
from narrowcast.errors import CaptureError
from narrowcast.frontends.graphs.compiled import watch_graphs

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def anew():
    torch.manual_seed(0)
    torch._dynamo.reset()


IS_OLD = torch.__version__.startswith(("2.11.", "2.12."))


class Parts(nn.Module):
    """A layer, a weight, and an int8 weight with its scale."""

    def __init__(self):
        super().__init__()
        self.layer, self.weight = nn.Linear(64, 64), nn.Parameter(torch.randn(64, 64) / 8)
        self.register_buffer("whole", torch.randint(-127, 127, (64, 64), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(64, 1) / 64)


class Condition(Parts):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.layer(y) + self.layer(y * 2), lambda y: y @ self.weight, (x,))


class Loop(Parts):
    def forward(self, x):
        return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, self.layer(y).float()), (torch.tensor(0), x))[1]


class Scan(Parts):
    def forward(self, x):
        return scan(lambda c, y: ((c @ self.weight).float(), self.layer(y)), x[:1], x.unsqueeze(1), dim=0)[1]


class WeightOnly(Parts):
    def forward(self, x):
        y = self.layer(x)
        return F.linear(x, self.whole.to(x.dtype) * self.scale) + F.linear(y, self.whole.to(y.dtype) * self.scale)


class IntegerProduct(Parts):
    def forward(self, x):
        y = self.layer(x)
        step = y.abs().amax(1, keepdim=True) / 127
        return torch._int_mm((y / step).round().to(torch.int8), self.whole) * step * self.scale.t()


class Packed(Parts):
    def forward(self, x):
        y = self.layer(x)
        return torch.ops.aten._weight_int8pack_mm(y.detach(), self.whole, self.scale.flatten().to(y.dtype))


def run(call, owner, x, gradients):
    """The result, and the gradients of the owner's parameters."""
    owner.zero_grad()
    result = call(x)
    if gradients and result.requires_grad:
        (result.float() * torch.linspace(-1, 1, result.numel()).reshape(result.shape)).sum().backward()
    return [result.detach(), *(p.grad for p in owner.parameters())]


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype is b.dtype and torch.equal(a, b))


@pytest.mark.parametrize(
    ("kind", "gradients"),
    [
        pytest.param(kind, gradients, marks=[pytest.mark.slow] if (kind in (Loop, Packed, Scan)) == gradients else [])
        for kind in (Condition, Loop, Scan, WeightOnly, IntegerProduct, Packed)
        for gradients in (True, False)
    ],
)
def test_inner_programs_equal_eager(kind, gradients):
    """Compiled and exported; eager cond and loops are themselves code that Dynamo made."""
    if kind is Scan and gradients and IS_OLD:
        pytest.xfail("torch before 2.13 refuses to capture a scan a second time: might be aliasing")
    model, x = kind(), torch.randn(64, 64)

    def in_region(x):
        with nc.autocast("cpu"):
            return model(x)

    with torch.set_grad_enabled(gradients):
        expected = run(in_region, model, x, gradients)
        torch._dynamo.reset()
        with watch_graphs() as graphs:
            found = run(nc.compile(model, under="bf16", backend="aot_eager", fullgraph=True), model, x, gradients)
            exported = nc.export(model, (x,), under="bf16").module()
        assert len(graphs) == 2 and not any(graph.fallback for graph in graphs)
        assert_same(found, expected)
        assert_same(run(exported, exported, x, gradients), expected)


@pytest.mark.xfail(IS_OLD, reason="torch before 2.13 leaves a generic associative_scan to Python")
def test_a_generic_associative_scan_falls_back_with_a_warning():
    """It is a vmap of floating values, which graphs do not follow; the bits are eager's all the same."""

    class Scanned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return associative_scan(lambda a, b: torch.tanh(a * b), self.layer(x), dim=0, combine_mode="generic")

    model, x = Scanned(), torch.randn(16, 8)
    with nc.autocast("cpu"):
        expected = model(x)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="could not be given explicit casts"):
        found = nc.compile(model, under="bf16", backend="aot_eager")(x)
    assert found.dtype is expected.dtype and torch.equal(found, expected)
    with pytest.raises(CaptureError, match="lost sight"):
        nc.export(model, (x,), under="bf16")


class Quantized(torch.Tensor):
    """An int8 weight that says that it is fp32, as torchao's are."""

    @staticmethod
    def __new__(cls, whole, scale, dtype=torch.float32):
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=dtype, device=whole.device)

    def __init__(self, whole, scale, dtype=torch.float32):
        self.whole, self.scale = whole, scale

    def __repr__(self):
        return "Quantized"

    def __tensor_flatten__(self):
        return ["whole", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, parts, dtype, size, stride):
        return cls(parts["whole"], parts["scale"], dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op, types, args, kwargs=None):
        if op in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(op(args[0].whole), op(args[0].scale), args[0].dtype)
        if op is torch.ops.aten._to_copy.default:
            return cls(args[0].whole, args[0].scale, kwargs["dtype"])
        plain = [a.whole.to(a.dtype) * a.scale.to(a.dtype) if isinstance(a, cls) else a for a in args]
        return op(*plain, **(kwargs or {}))


class QuantizedFunction(Quantized):
    """One that takes F.linear into its own hands before it is dispatched."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            x, weight, bias = args
            return F.linear(x, weight.whole.to(weight.dtype) * weight.scale.to(weight.dtype), bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind, falls_back", [(Quantized, False), (QuantizedFunction, True)])
def test_quantized_weights_that_are_subclasses(kind, falls_back):
    """Eager's bits; one whose functions Dynamo follows inside falls back when compiled, and says so."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    weight = kind(torch.randint(-127, 127, (8, 8), dtype=torch.int8), torch.rand(8, 1) / 64)
    model[1].weight = nn.Parameter(weight, requires_grad=False)
    with nc.autocast("cpu"):
        expected = model(x)
    with watch_graphs() as graphs, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = nc.compile(model, under="bf16", backend="aot_eager", fullgraph=True)(x)
    assert [bool(graph.fallback) for graph in graphs] == [falls_back]
    assert falls_back == any("could not be given explicit casts" in str(w.message) for w in told)
    exported = nc.export(model, (x,), under="bf16").module()(x)
    for result in (found, exported):
        assert result.dtype is expected.dtype and torch.equal(result, expected)
