"""Ops and autograd functions that are not PyTorch's own, under rules by name and in ambient regions."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch.library import custom_op

import narrowcast as nc
from narrowcast.errors import PolicyError, RegionError

BF, HF, FP, DP = torch.bfloat16, torch.float16, torch.float32, torch.float64
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("fresh_dynamo")]


@custom_op("narrowcast_tests::attend", mutates_args=())
def attend(q: torch.Tensor, table: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Opaque: nobody sees what it calls. The second result is its statistics."""
    return q * scale + table.to(q.dtype), q.abs().amax(-1)


@attend.register_fake
def _(q, table, scale):
    return torch.empty_like(q), q.new_empty(q.shape[:-1])


def backward(ctx, grad, grad_statistics):
    """Of the first argument alone."""
    return grad * ctx.scale, None, None


def set_up(ctx, inputs, output):
    """What the backward needs."""
    ctx.scale = inputs[2]


attend.register_autograd(backward, setup_context=set_up)


class Model(torch.nn.Module):
    """A layer before the op, and one after."""

    def __init__(self):
        super().__init__()
        self.before = torch.nn.Linear(4, 4)
        self.after = torch.nn.Linear(4, 4)

    def forward(self, x, table):
        y, statistics = torch.ops.narrowcast_tests.attend(self.before(x), table, 0.5)
        return self.after(y), y, statistics


NAME = "narrowcast_tests.attend"
X, TABLE = torch.randn(3, 4), torch.randn(3, 4)
CASES = {
    "as the region": ([nc.Rule(NAME, "lower")], (BF, BF)),
    "fp32 in, fp32 out": ([nc.Rule(NAME, "full")], (FP, FP)),
    "fp32 inside": ([nc.Rule(NAME, "inside")], (BF, BF)),
    "one argument kept": ([nc.Rule(NAME, "lower"), nc.Rule(NAME, "follow", argument="table")], (BF, BF)),
    "each result its own": (
        [
            nc.Rule(NAME, "full"),
            nc.Rule(NAME, "to(fp16)", argument="result.0"),
            nc.Rule(NAME, "follow", argument="result.1"),
        ],
        (HF, BF),
    ),
}


def same(a, b):
    """Equal in dtype and bits."""
    return all(x.dtype is y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_rules_by_name_with_arguments_and_results(case):
    """In eager code and in graphs, bit for bit, gradients included."""
    rules, dtypes = CASES[case]
    policy = nc.Policy.native().with_rules(rules)
    torch.manual_seed(0)
    model = Model()

    def run(call, region):
        model.zero_grad()
        with region:
            out = call(X, TABLE)
        out[0].float().sum().backward()
        return [*out, *(p.grad for p in model.parameters())]

    expected = run(model, nc.autocast("cpu", policy=policy))
    assert (expected[1].dtype, expected[2].dtype) == dtypes
    compiled = nc.compile(model, under=nc.autocast("cpu", policy=policy), backend="aot_eager", fullgraph=True)
    assert same(run(compiled, nullcontext()), expected)
    exported = nc.export(model, (X, TABLE), under=policy)
    with torch.no_grad():
        assert same(exported.module()(X, TABLE), expected[:3])
    scripted = nc.script(model, under=nc.autocast("cpu", policy=policy))
    assert same(scripted(X, TABLE), expected[:3])


@pytest.mark.parametrize("dtype", [BF, HF])
def test_the_ambient_format_is_honoured(dtype):
    """`torch.library.register_autocast` pins one for ever; a rule takes that of the region."""
    policy = nc.Policy.native().with_rules(nc.Rule(NAME, "lower"))
    with nc.autocast("cpu", dtype=dtype, policy=policy):
        assert attend(X, TABLE, 1.0)[0].dtype is dtype
    assert attend(X, TABLE, 1.0)[0].dtype is FP


def test_rules_about_what_an_op_does_not_have():
    """An argument by a wrong name, a namespace that nobody registered."""
    with pytest.raises(PolicyError, match="did you mean 'table'"):
        nc.autocast("cpu", policy=nc.Policy.native().with_rules(nc.Rule(NAME, "full", argument="tabel")))
    with pytest.raises(PolicyError, match="no such op"):
        nc.autocast("cpu", policy=nc.Policy.native().with_rules(nc.Rule("narrowcast_tests.nothing", "full")))


def test_higher_order_ops_have_rules_inside():
    """A branch is code like any other: what it calls is decided by its own rules, in eager code and compiled."""

    def branch(x):
        return torch.cond(x.sum() > 0, lambda y: torch.mm(y, y), lambda y: y * 2.0, (x,))

    policy = nc.Policy.native().with_rules(nc.Rule("aten.mm", "full"))
    compiled = nc.compile(branch, under=nc.autocast("cpu", policy=policy), backend="aot_eager")
    for x in (torch.ones(4, 4), -torch.ones(4, 4)):
        with nc.autocast("cpu", policy=policy):
            expected = branch(x)
        assert expected.dtype is FP and same([compiled(x)], [expected])


# -- autograd functions ------------------------------------------------------------------------------------------------


def function(of_forward, of_backward):
    """A product whose forward and backward are decorated."""

    class Product(torch.autograd.Function):
        @staticmethod
        @of_forward
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a.mm(b)

        @staticmethod
        @of_backward
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return grad.mm(b.t()), a.t().mm(grad)

    return Product


REGIONS = {
    "none": nullcontext,
    "native": lambda: torch.autocast("cpu"),
    "native fp16": lambda: torch.autocast("cpu", HF),
    "ours": lambda: nc.autocast("cpu"),
    "safe": lambda: nc.autocast("cpu", policy="safe"),
}


@pytest.mark.parametrize(
    ("cast", "region"),
    [
        pytest.param(cast, region, marks=[] if number % 3 != 2 else [pytest.mark.slow])
        for number, (cast, region) in enumerate(itertools.product([None, FP, HF], REGIONS))
    ],
)
def test_custom_fwd_and_bwd_are_torchs_where_they_do_the_same(cast, region):
    """Results and gradients, bit for bit; ours are not told the device. Compiled, too."""
    theirs = function(
        torch.amp.custom_fwd(device_type="cpu", cast_inputs=cast), torch.amp.custom_bwd(device_type="cpu")
    )
    ours = function(nc.custom_fwd(cast_inputs=cast), nc.custom_bwd)
    torch.manual_seed(0)
    a, b = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def run(call):
        a.grad = b.grad = None
        with REGIONS[region]():
            out = call(a, b)
        out.float().pow(2).sum().backward()
        return out, a.grad, b.grad

    expected = run(theirs.apply)
    assert same(run(ours.apply), expected)
    assert same(run(torch.compile(lambda a, b: ours.apply(a, b), backend="aot_eager")), expected)
    assert same(run(nc.compile(lambda a, b: ours.apply(a, b), backend="aot_eager", fullgraph=True)), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_backward_runs_under_the_policy_of_the_forward(compiled):
    """torch's runs it under native's lists."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.mm", "to(fp16)"))
    formats = []

    class Watched(torch.autograd.Function):
        @staticmethod
        @nc.custom_fwd
        def forward(ctx, a):
            return a * 1

        @staticmethod
        @nc.custom_bwd
        def backward(ctx, grad):
            product = torch.mm(grad, grad)
            formats.append(product.dtype)
            return product.to(grad.dtype)

    a = torch.randn(4, 4, requires_grad=True)

    def call(x):
        return Watched.apply(x)

    run = nc.compile(call, under=nc.autocast("cpu", policy=policy), backend="aot_eager") if compiled else call
    with nc.autocast("cpu", policy=policy):
        out = run(a)
    out.sum().backward()
    assert torch.equal(a.grad, torch.full((4, 4), 4.0)) and (compiled or formats == [HF])


def test_devices_are_told_by_the_tensors():
    """A region of another device type does not matter."""
    doubled = function(nc.custom_fwd(cast_inputs="fp16"), nc.custom_bwd)
    a = torch.randn(2, 2, requires_grad=True)
    with nc.autocast("xpu"):
        assert doubled.apply(a, a).dtype is FP
    with nc.autocast("cpu"):
        assert doubled.apply(a, a).dtype is HF
        assert doubled.apply(a.double(), a.double()).dtype is DP


def test_a_backward_alone_is_an_error():
    """It does not know what the forward did."""
    half = function(lambda f: f, nc.custom_bwd)
    a = torch.randn(2, 2, requires_grad=True)
    out = half.apply(a, a)
    with pytest.raises(RegionError, match="did not say"):
        out.sum().backward()
