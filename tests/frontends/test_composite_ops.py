"""Ops that are made of others, in scripts and conversions: the casts of eager code inside them, bit for bit."""

import contextlib
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowcast as nc

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning"
)
BF16 = torch.bfloat16
GENERATOR = torch.Generator().manual_seed(0)
X, Y, Z, C, SQUARE = (torch.randn(s, generator=GENERATOR) for s in ((3, 4), (4, 5), (5, 2), (2, 3, 4), (3, 3)))
CUBE = torch.randn(4, 4, 4, generator=GENERATOR)
SQUARE = SQUARE / 3 + torch.eye(3)
WAVES = torch.arange(64.0).sin().view(8, 8)

OPS = {
    "tensordot": lambda: torch.tensordot(C, Y, dims=([2], [0])),
    "tensordot of sizes 1": lambda: torch.tensordot(torch.ones(2, 1), X, dims=([1], [0])),
    "tensordot to a number": lambda: torch.tensordot(X, X, dims=([0, 1], [0, 1])),
    "tensordot to a number, turned": lambda: torch.tensordot(WAVES, WAVES, dims=([0, 1], [1, 0])),
    "inner": lambda: torch.inner(C, torch.ones(5, 4)),
    "inner of vectors": lambda: torch.inner(X[0], X[1]),
    "inner of a number": lambda: torch.inner(X[0, 0], X[1]),
    "two matrices": lambda: torch.linalg.multi_dot([X, Y]),
    "three matrices": lambda: torch.linalg.multi_dot([X, Y, Z]),
    "vectors at both ends": lambda: torch.linalg.multi_dot([X[0], Y, Z[:, 0]]),
    "six matrices": lambda: torch.linalg.multi_dot([X, Y, Z, Z.t(), Y.t(), X.t()]),
    "chain_matmul": lambda: torch.chain_matmul(X, Y, Z),
    **{f"power {n}": lambda n=n: torch.linalg.matrix_power(SQUARE, n) for n in (-3, -1, 0, 1, 2, 3, 5, 12)},
    "cov": lambda: torch.cov(X),
    "cov of a vector": lambda: torch.cov(X[0]),
    "cov with weights": lambda: torch.cov(X, fweights=torch.tensor([1, 2, 3, 4]), aweights=torch.ones(4) / 3),
    "corrcoef": lambda: torch.corrcoef(X),
    "einsum that sums": lambda: torch.einsum("ij,jk->ik", X, Y),
    "einsum that multiplies": lambda: torch.einsum("bi,bj->bij", X, X),
    "einsum of labels that one has alone": lambda: torch.einsum("ij,jkl->il", X, CUBE),
    "einsum of such labels around others": lambda: torch.einsum("a...b,...cb->...a", CUBE, CUBE),
    "einsum of a diagonal that one has alone": lambda: torch.einsum("ij,kkj->i", X, CUBE),
    "einsum of one": lambda: torch.einsum("ij->ji", X),
    "einsum without arrow": lambda: torch.einsum("ij,jk", X, Y),
    "pad reflect": lambda: F.pad(C.to(BF16), (1, 1), mode="reflect"),
    "pad replicate": lambda: F.pad(C.to(BF16), (1, 1, 1, 1), mode="replicate"),
    "pad circular": lambda: F.pad(C.to(BF16), (1, 1), mode="circular"),
    "pad with a number": lambda: F.pad(C.to(BF16), (1, 1), value=1.0),
    "nll_loss": lambda: F.nll_loss(X.to(BF16), torch.tensor([0, 1, 2])),
    "cross_entropy": lambda: F.cross_entropy(X.to(BF16), torch.tensor([0, 1, 2])),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("form", ["convert", "trace"])
def test_a_composite_op_computes_as_in_eager_code(name, form):
    """Converted from a plain trace, and traced in a region."""
    op = OPS[name]
    with nc.autocast("cpu", BF16):
        expected = op()

    def program(x):
        return op() + x

    zero = torch.zeros((), dtype=expected.dtype)
    if form == "convert":
        made = nc.script(torch.jit.trace(program, zero, check_trace=False), under=BF16)
    else:
        made = nc.trace(program, zero, under=nc.autocast("cpu", BF16), check_trace=False)
    found = made(zero)
    assert found.dtype is expected.dtype and torch.equal(found, expected)


def products(x: torch.Tensor, w: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = torch.tensordot(x, w, dims=1)
        b = torch.inner(x, w)
        return a + b, torch.linalg.multi_dot([x * 2, w * 2, x * 3]), torch.linalg.matrix_power(w, 3), torch.corrcoef(x)


def views(x: torch.Tensor, w: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.einsum("ij,jk->ik", x, w) + torch.einsum("ij,kj->ik", x, w)
        return y, torch.linalg.multi_dot([x, w, x]), torch.mm(x, w)


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 3) / 3)

    def forward(self, x: torch.Tensor, w: torch.Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.einsum("ij,jk->ik", x, self.w) + torch.einsum("ij,kj->ik", w, self.w)
            return y.sin() @ self.w, w @ self.w, self.w


@pytest.mark.parametrize("program", [products, views, Views()], ids=["products", "views", "parameter"])
def test_gradients_of_composite_ops_are_those_of_eager_code(program):
    """In a script; a weight is cast once for those that take it as it is, and for views of it each time."""
    made = nc.script(program)
    found = []
    for function in (program, made):
        torch.manual_seed(0)
        x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
        results = function(x, w)
        sum(r.float().square().sum() for r in results).backward()
        found.append([*results, x.grad, w.grad, *(p.grad for p in getattr(function, "parameters", list)())])
        getattr(function, "zero_grad", list)()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_rule_about_a_composite_op_holds():
    """It is then cast as one call, in eager code and in scripts."""

    def program(x: torch.Tensor):
        return torch.tensordot(x, x, dims=1)

    policy = nc.Policy.native().with_rules(nc.Rule("aten.tensordot", "full"))
    assert nc.script(program, under=policy)(SQUARE).dtype is torch.float32
    assert nc.script(program, under="bf16")(SQUARE).dtype is BF16


@pytest.mark.parametrize(("op", "inside"), [(torch.inner, "aten.tensordot"), (torch.corrcoef, "aten.cov")])
def test_a_rule_about_an_op_inside_a_composite_op_holds(op, inside):
    """`inner` calls `tensordot`, about which `safe` has a rule."""
    policy = nc.Policy.native().with_rules(nc.Rule(inside, "full"))
    arguments = (X, X) if op is torch.inner else (X,)
    with nc.autocast("cpu", BF16, policy=policy):
        expected = op(*arguments)
    made = nc.script(torch.jit.trace(lambda *given: op(*given), arguments, check_trace=False), under=policy)
    found = made(*arguments)
    assert found.dtype is expected.dtype is torch.float32 and torch.equal(found, expected)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.RNNCell(4, 4)

    def forward(self, x: torch.Tensor):
        return self.cell(x)


WHERE = (
    {"module": "cell"},
    {"module": "other"},
    {"module_class": "Other"},
    {"module_class": "Cell"},
    {"function": "*.forward"},
)


@pytest.mark.parametrize("where", WHERE, ids=str)
@pytest.mark.parametrize("op", ["aten.*", "aten.rnn_tanh_cell"])
def test_a_rule_about_other_places_leaves_a_composite_op_open(op, where):
    policy = nc.Policy.native().with_rules(nc.Rule(op, "full", **where))
    model = Cell()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with nc.autocast("cpu", BF16, policy=policy):
            expected = model(X)
        found = nc.script(model, under=policy)(X)
        compiled = nc.compile(model, under=policy, backend="aot_eager")(X)
    assert found.dtype is expected.dtype and torch.equal(found, expected)
    assert compiled.dtype is expected.dtype and torch.equal(compiled, expected)


class Recurrent(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.GRU(4, 3, **options)

    def forward(self, x: torch.Tensor):
        y, h = self.layer(x)
        return y, h


GRUS = [
    {"bidirectional": ways, "batch_first": first, "num_layers": layers, "bias": bias, "dropout": 0.5 * (layers > 1)}
    for ways, first, layers, bias in itertools.product((False, True), (False, True), (1, 2), (True, False))
]


@pytest.mark.parametrize(
    ("options", "training"),
    [  # each option with each other one in these eight; all in `make conformance`
        pytest.param(options, training, marks=[] if (number + 5 * training) % 4 == 0 else [pytest.mark.slow])
        for number, options in enumerate(GRUS)
        for training in (True, False)
    ],
    ids=str,
)
def test_a_gru_keeps_its_state_as_it_came(options, training):
    """Matmuls are cast, the state is not: results and every gradient, bit for bit."""
    model = Recurrent(**options).train(training)
    x = torch.randn(5, 2, 4, requires_grad=True)

    def run(call, module):
        torch.manual_seed(1)
        with nc.autocast("cpu", BF16):
            y, h = call(x)
        (y.float().square().sum() + h.float().sum()).backward()
        found = [y, h, x.grad, *(p.grad for p in module.parameters())]
        x.grad = None
        module.zero_grad()
        return found

    expected = run(model, model)
    for made in (nc.script(model), nc.script(torch.jit.script(model), under=BF16)):
        found = run(made, made)
        assert [t.dtype for t in found[:2]] == [torch.float32] * 2
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_an_op_whose_inside_is_not_written_down_says_so():
    """With its line; where a rule names it, or the region is off, there is nothing to say."""

    def program(x: torch.Tensor):
        return torch.linalg.pinv(x)

    with pytest.warns(nc.errors.ScriptWarning, match=r"aten.linalg_pinv \(.*test_composite_ops.py:\d+\) calls ops"):
        nc.script(program, under="bf16")


LSTM = nn.LSTM(3, 3).requires_grad_(False)


@pytest.mark.parametrize("name", ["tensordot", "three matrices", "cov", "einsum that sums", "pad reflect", "sparse"])
def test_a_trace_records_what_regions_inside_cast_in_composite_ops(name):
    """A product that needs no gradient of what is sparse, too."""
    op = OPS.get(name, lambda: torch.sparse.mm(SQUARE.to_sparse(), SQUARE))

    def program(x):
        with nc.autocast("cpu", BF16):
            return op() * x

    expected, one = program(torch.ones(())), torch.ones(())
    found = nc.trace(program, one, check_trace=False)(one)
    assert found.dtype is expected.dtype and torch.equal(found, expected)


def test_a_region_inside_traced_code_says_what_it_does_not_record():
    """With the line; not where that region is off, nor for a region around the trace."""

    def program(x, enabled=True):
        with nc.autocast("cpu", BF16, enabled=enabled), torch.backends.mkldnn.flags(enabled=False):
            return LSTM(x)[0]

    with pytest.warns(nc.errors.ScriptWarning, match=r"aten.lstm \(.*\d+\) is in a region inside the traced"):
        nc.trace(program, SQUARE, check_trace=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", nc.errors.ScriptWarning)
        nc.trace(lambda x: program(x, enabled=False), SQUARE, check_trace=False)
        with torch.backends.mkldnn.flags(enabled=False):
            nc.trace(lambda x: LSTM(x)[0], SQUARE, under=BF16, check_trace=False)


class Chained(nn.Module):
    """A product of three matrices, of which the first is in the format that a layer computes in."""

    def __init__(self):
        super().__init__()
        self.layer, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return torch.linalg.multi_dot([self.layer(x) * 1.5, self.weight, self.weight])


def test_a_chain_of_products_of_several_formats_is_decided_as_itself_in_a_script():
    """`safe` gives all one format, and torch refuses them; products of one format are lowered one by one."""
    torch.manual_seed(0)
    model, x = Chained(), torch.randn(4, 8)
    script = nc.script(model)
    for _ in range(2):
        with nc.autocast("cpu", torch.bfloat16, policy="safe"):
            expected, found = model(x), script(x)
        assert expected.dtype is found.dtype is torch.float32
        assert torch.equal(expected, found)
        with pytest.raises(RuntimeError, match="same dtype"), nc.autocast("cpu", torch.bfloat16):
            script(x)


class PadsBy(nn.Module):
    """A low result is padded in a mode that is an attribute, an argument, or a convolution's own."""

    def __init__(self, mode, rank):
        super().__init__()
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        self.first, self.mode = kind(3, 4, 3), mode
        self.second = kind(4, 4, 3, padding=1, padding_mode="zeros" if mode == "constant" else mode)
        self.amounts = [1] * 2 * rank

    def forward(self, x, mode: str, value: float):
        y = self.first(x)
        by_attribute = F.pad(y, self.amounts, mode=self.mode)
        by_argument = F.pad(y, self.amounts, mode=mode, value=value if mode == "constant" else None)
        return by_attribute, by_argument, self.second(y)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "constant"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_padding_in_a_mode_that_is_no_literal_is_that_of_eager_code(mode, rank):
    """`reflect` and `replicate` are ops that autocast lists (in two dimensions in fp32); it was taken for none."""
    torch.manual_seed(0)
    model, x = PadsBy(mode, rank), torch.randn(2, 3, *[7] * rank)
    outcomes = []
    for run in (model, nc.script(model, under="bf16")):
        model.zero_grad()
        with nc.autocast("cpu", BF16) if run is model else contextlib.nullcontext():
            results = run(x, mode, 2.0)
        torch.cat([result.float().sin().flatten() for result in results]).sum().backward()
        outcomes.append([*(result.detach() for result in results), model.first.weight.grad.clone()])
    assert [t.dtype for t in outcomes[0]] == [t.dtype for t in outcomes[1]]
    assert all(map(torch.equal, *outcomes))
