"""What `nc.compare` says of sound programs that are hard to judge, and of models that bring their formats with them."""

import math
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer import Typer
from typer.testing import CliRunner

import narrowcast as nc
from narrowcast.analysis.compare import bands
from narrowcast.analysis.compare.notes import about_underflow
from narrowcast.cli import runs as commands
from narrowcast.cli.options import with_groups
from narrowcast.core.ledger.identity import CallId
from narrowcast.formats import fp16
from narrowcast.observation.trial import noise
from narrowcast.reports.documents.comparisons import error_todos
from narrowcast.reports.results.differences import CallError, Differences
from narrowcast.reports.results.verdicts import EXACT, FAULT, KERNEL, NOT_COMPARED, NOT_FINITE, ROUND_OFF

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def is_sound(found):
    bad = [g for g in found.gradients if g.verdict not in (ROUND_OFF, EXACT)]
    return found.verdict in (ROUND_OFF, EXACT) and not found.faults and not bad


class Masked(nn.Module):
    """Attention whose masks are filled with the lowest value of the scores' format; padded rows see nothing."""

    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x, is_padded):
        q, k, v = self.project(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 6
        mask = (
            torch.ones(8, 8, dtype=torch.bool).tril()
            & torch.tensor([not is_padded or n < 5 for n in range(8)])[:, None]
        )
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return self.out(scores.softmax(-1) @ v)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_the_lowest_value_of_a_format_is_no_argument_that_differs_and_no_infinity(dtype, is_padded):
    """fp32's is rounded to bf16 in no run but one that is made up; with every result moved it stays."""
    found = nc.compare(Masked(), (torch.randn(2, 8, 32), is_padded), under=dtype, backward=True, isolate=0)
    assert is_sound(found) and found.round_off_bound < 0.1, found


def test_the_lowest_value_is_the_same_argument_beside_another_model():
    """And another epsilon is not."""
    model, x = Masked(), torch.randn(2, 8, 32)

    def low(x, is_padded):
        with nc.autocast("cpu", dtype="fp16"):
            return model(x, is_padded)

    found = nc.compare(low, (x, True), reference=model, isolate=0)
    assert not found.faults, found


def test_a_mask_that_has_a_number_of_its_own_in_each_format_is_the_same_argument():
    """-9e15 where fp32 holds scores, and the lowest value elsewhere: both are lower than any score."""

    class Contrast(Masked):
        def forward(self, x):
            z = F.normalize(self.out(x[0]), dim=-1)
            scores = z @ z.T / 0.1
            lowest = -9e15 if scores.dtype is torch.float32 else torch.finfo(scores.dtype).min
            return scores.masked_fill(torch.eye(8, dtype=torch.bool), lowest).float().logsumexp(-1)

    for dtype in ("bf16", "fp16"):
        found = nc.compare(Contrast(), (torch.randn(2, 8, 32),), under=dtype, isolate=0)
        assert is_sound(found), found


def test_what_underflows_is_said_and_is_no_fault():
    """In the forward with the call that makes the zeros; where the loss is small, that a scaler helps."""
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 64, bias=False))
    with torch.no_grad():
        model[0].weight.mul_(1e-6)
    found = nc.compare(model, (torch.randn(32, 64),), under="fp16", isolate=0)
    [note] = [note for note in found.notes if note.startswith("Underflow: ")]
    assert is_sound(found) and "first in 0 aten.linear.default" in note and "or use bf16" in note, found
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 4096))
    mean_square = lambda y: y.float().square().mean()
    found = nc.compare(model, (torch.randn(64, 64),), under="fp16", backward=mean_square, isolate=0)
    assert is_sound(found) and any("nc.Scaler" in note for note in found.notes), found


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_what_underflows_on_the_way_of_a_gradient_is_said_and_is_no_fault(size):
    """In sums of parts, or all of it: a scaled loss has the right gradients."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Conv2d(3, 24, 1), nn.Conv2d(24, 24, 3, groups=24), nn.Hardswish())
    loss = lambda y: size * y.float().square().mean()
    found = nc.compare(model, (torch.rand(2, 3, 32, 32),), under="fp16", backward=loss, isolate=0)
    assert is_sound(found), found
    assert size == 1.0 or any("nc.Scaler" in note for note in found.notes), found


class Steps(nn.Module):
    """Layers, of which one model lacks what another has."""

    def __init__(self, norm_first=False, rounded=False):
        super().__init__()
        self.layer, self.norm = nn.Linear(64, 32), nn.LayerNorm(32)
        self.norm_first, self.rounded = norm_first, rounded

    def forward(self, x):
        y = self.layer(x)
        y = y.to(torch.float8_e5m2).to(y.dtype) if self.rounded else y
        return self.norm(y).relu() if self.norm_first else self.norm(y.relu())


@pytest.mark.parametrize(("wrong", "is_reference"), [("rounded", False), ("norm_first", False), ("norm_first", True)])
def test_another_model_that_rounds_or_has_another_order_is_named_where_it_does(wrong, is_reference):
    """By the cast that it makes alone, or the first call whose result leaves its band."""
    models = Steps(), Steps(**{wrong: True})
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        nc.autocast("cpu", dtype="fp16")(model)
    low = [lambda x, m=m: m(x) for m in models]
    found = nc.compare(low[not is_reference], (X,), reference=low[is_reference], isolate=0)
    op = "_to_copy" if wrong == "rounded" else "native_layer_norm" if not is_reference else "relu"
    assert found.verdict == FAULT and op in found.faults[0].id.op, found


def test_a_layer_on_expanded_rows_is_judged_by_what_it_gives():
    """fp32 multiplies other rows in the backward than bf16 does."""

    class Expanded(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.linear = nn.Parameter(torch.randn(6, 32)), nn.Linear(32, 8)

        def forward(self, x):
            return self.linear(self.rows[None].expand(2, -1, -1)) + x

    assert is_sound(nc.compare(Expanded(), (torch.zeros(8),), under="bf16", backward=True, isolate=0))


def test_where_two_moved_runs_leave_a_doubt_more_decide(monkeypatch):
    """Of a scalar loss two may both be near zero, as they are here."""

    class Near(noise.Noise):
        def __init__(self, seed, *args):
            super().__init__(seed, *args)
            if seed in (11, 12):
                self._strip *= 1e-4

    monkeypatch.setattr(bands, "Noise", Near)
    found = nc.compare(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), (X,), under="bf16", isolate=0)
    assert is_sound(found) and found.runs == 12, found


def test_losses_of_chunks_are_sound():
    """A scalar, added up of eight."""

    class Chunked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

        def forward(self, ids):
            pairs = zip(self.table(ids).chunk(8), ids.roll(-1).chunk(8), strict=True)
            return sum(F.cross_entropy(self.head(x), y) for x, y in pairs) / 8

    found = nc.compare(Chunked(), (torch.randint(0, 50, (64,)),), under="bf16", backward=True, isolate=0)
    assert is_sound(found), found


@pytest.mark.parametrize("form", ["bf16", "nc.compile", "torch.compile", "compiled bf16"])
def test_a_model_that_is_low_itself_is_compared_with_fp32(form):
    """With a copy of its weights in fp32, or with what it was compiled of."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU()), X
    if "bf16" in form:
        model, x = model.bfloat16(), X.bfloat16()
    if form == "nc.compile":
        model = nc.compile(model, under="bf16", backend="aot_eager")
    elif "compile" in form:
        model = torch.compile(model, backend="aot_eager")
    found = nc.compare(model, (x,), isolate=0)
    assert found.verdict == (EXACT if form == "torch.compile" else ROUND_OFF), found
    assert all(row.reference == "fp32" for row in found.rows)


@pytest.mark.parametrize("form", ["export", "script", "function"])
def test_what_brings_its_casts_with_it_is_not_compared_with_itself(form):
    """Beside its original it is."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())

    def function(x):
        with nc.autocast("cpu", dtype="bf16"):
            return model(x)

    made = {
        "export": lambda: nc.export(model, (X,), under="bf16").module(),
        "script": lambda: nc.script(model, under="bf16"),
        "function": lambda: function,
    }[form]()
    found = nc.compare(made, (X,), isolate=0)
    assert found.verdict == NOT_COMPARED and "reference=" in found.notes[0], found
    assert nc.compare(made, (X,), reference=model, isolate=0).verdict == ROUND_OFF


def test_what_only_passes_a_nan_on_is_at_no_fault():
    """The one call that makes the infinity is named."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight.mul_(1e4)
    found = nc.compare(model, (40 * X,), under="fp16", isolate=0)
    assert found.verdict == NOT_FINITE and [row.id.module_path for row in found.faults] == ["0"], found
    assert {row.verdict for row in found.rows[1:]} == {"passed on"}


@pytest.mark.parametrize(("verdict", "code"), [
    (EXACT, 0), (ROUND_OFF, 0), (FAULT, 1), (KERNEL, 1), (NOT_FINITE, 1), (NOT_COMPARED, 2), ("not judged", 0),
])  # fmt: skip
def test_the_command_says_it_with_its_exit_code(verdict, code, monkeypatch):
    """A kernel too; 2 where nothing was compared."""
    found = Differences("model", "cpu", "native", "bf16", "fp32", verdict=verdict)
    monkeypatch.setattr(commands, "load_case", lambda target: nc.Case(torch.abs, (X,)))
    monkeypatch.setattr(nc, "compare", lambda *args, **kwargs: found)
    app = Typer()
    app.command()(with_groups(commands.compare_command))
    assert CliRunner().invoke(app, ["model:make"]).exit_code == code


def test_an_op_without_a_bound_is_not_judged_and_no_fault():
    """Another library's; its result is beyond what moved inputs make, and the output says so."""

    @torch.library.custom_op("narrowcast_tests::coarse", mutates_args=())
    def coarse(x: torch.Tensor) -> torch.Tensor:
        return (x * 4).round() / 4 if x.dtype is torch.bfloat16 else x.clone()

    found = nc.compare(nn.Sequential(nn.Linear(64, 64), Applied(coarse)), (X,), under="bf16", isolate=0)  # fmt: skip
    row = next(row for row in found.rows if row.id.op.startswith("narrowcast_tests"))
    assert isinstance(row, CallError) and row.verdict == "not judged" and found.verdict == FAULT, found


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, x):
        return self._function(x)


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_a_backend_whose_code_is_off_is_named(dtype, factor):
    """No call of the model is at fault then: looked on, it runs them one by one."""

    def backend(graph, inputs):
        return lambda *args: tuple(y * factor for y in graph(*args))

    model = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), backend=backend)
    with torch.no_grad():
        found = nc.compare(model, (X,), under=dtype, isolate=0)
    assert found.verdict == (FAULT if factor != 1 else EXACT if dtype is None else ROUND_OFF), found
    assert not found.faults and found.compiled == pytest.approx(factor - 1, abs=3e-3)
    assert ("the compiler " in str(found)) == (factor != 1)


class Angled(nn.Module):
    """A cosine near 1 that goes into a root: bf16 rounds it to where there is none."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        y = F.normalize(self.first(x).float(), dim=-1)
        return self.last((0.99995 - F.linear(0.9999 * y, y).diagonal().float()[:, None]).rsqrt() + x)


def test_the_rule_is_about_what_a_call_at_fault_was_given_where_it_is_not_low_itself():
    """Not about a call that is a little further off, nor one that passes the NaN on; and it was run."""
    found = nc.compare(Angled(), (X,), under="bf16")
    assert found.verdict == NOT_FINITE and [row.id.op for row in found.faults] == ["aten.rsqrt.default"], found
    assert 'op = "aten.linear.default"\naction' in str(found) and "run so, it is finite" in str(found)


def test_round_off_that_makes_a_nan_is_no_band():
    """Moved by one unit the cosine is above 1; what was given is finite, and nothing is said of it."""

    class Arc(Angled):
        def forward(self, x):
            y = F.normalize(x, dim=-1)
            return torch.acos(F.linear(0.9999 * y, y).diagonal().float())[:, None] * x

    found = nc.compare(Arc(), (X,), under="bf16", isolate=0)
    assert found.verdict in (ROUND_OFF, "not judged") and not found.faults, found


@pytest.mark.parametrize("is_masked", [True, False])
def test_a_limit_that_rounding_leads_to_is_named_where_something_comes_of_it(is_masked):
    """What fp16 makes zero has a logarithm of minus infinity, which is a fault where nobody takes it out again."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x):
            small = self.layer(x).abs() * 1e-7
            return torch.where(small > 1e-6, small.log(), 0.0) if is_masked else small.log()

    found = nc.compare(Model(), (torch.randn(8, 16),), under="fp16")
    rows = [row for row in found.rows if row.id.op == "aten.log.default"]
    assert found.verdict == ("round-off" if is_masked else "not finite"), str(found)
    assert [row.verdict for row in rows] == ["passed on" if is_masked else "not finite"], str(found)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_op_whose_kernel_calls_listed_ops_computes_in_their_format(dtype):
    """That of bilinear calls bmm, which autocast casts: a difference from fp32 is round-off of the low format."""
    model, x = nn.Bilinear(16, 16, 4), (torch.randn(6, 16), torch.randn(6, 16))
    low = nc.capture(model, x, under=dtype)
    (call,) = [call for call in low.calls if call.id.op == "aten._trilinear.default"]
    assert (call.input_formats, call.computes) == ("fp32", dtype)
    assert is_sound(nc.compare(model, x, under=dtype, backward=True))
    assert nc.diff(nc.capture(model, x), low).verdict == "formats differ"


class ConstantRows(nn.Module):
    """A layer norm of rows of one value: what fp32 gives is 0, and what is computed is the error of the mean."""

    def __init__(self, width):
        super().__init__()
        self.a, self.norm, self.width = nn.Linear(64, 1), nn.LayerNorm(width), width

    def forward(self, x):
        return self.norm(self.a(x).expand(-1, self.width))


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("width", [1, 8])
def test_what_is_zero_but_for_rounding_is_no_fault(low, width):
    """An error of a result that is zero has no size relative to it."""
    found = nc.compare(ConstantRows(width), X, under=low)
    assert is_sound(found) and max(output.relative_error for output in found.outputs) < 1e-4


@pytest.mark.parametrize("verb", ["compare", "explain", "repair", "capture"])
def test_a_part_that_is_compiled_as_one_graph_runs_and_is_not_compiled_again_by_each_call(verb):
    """torch.compile(fullgraph=True) raises where a hook cannot be traced, and where it has compiled too often."""
    part = torch.compile(nn.Sequential(nn.Linear(64, 32), nn.GELU()), backend="eager", fullgraph=True)
    model = nn.Sequential(part, nn.Linear(32, 8))
    options = {"run": True} if verb == "explain" else {}
    for _ in range(6):
        found = getattr(nc, verb)(model, X, under="bf16", **options)
    assert found.verdict in (ROUND_OFF, EXACT, NOT_COMPARED, "repaired", "nothing to repair", "finite")


class Queries(nn.Module):
    """Learned queries that are expanded over a batch: eager autograd reduces them by another formula than a graph."""

    def __init__(self):
        super().__init__()
        self.q, self.z = nn.Linear(64, 64), nn.Parameter(torch.randn(3, 64))

    def forward(self, x):
        return self.q(self.z.expand(len(x), -1, -1)) + x[:, None]


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_the_backward_of_compiled_code_may_have_other_shapes_and_arguments(low):
    """Its gradients are compared."""
    found = nc.compare(nc.compile(Queries(), under=low, backend="aot_eager"), X, backward=True)
    assert is_sound(found) and len(found.gradients) == 3


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_arguments_that_a_graph_casts_are_perturbed_as_those_that_a_policy_casts(low):
    """Else the bounds of compiled code are narrower than those of the same model in eager mode."""
    model = nn.Linear(64, 1024, bias=False)
    eager, compiled = nc.compare(model, X, under=low), nc.compare(nc.compile(model, under=low, backend="aot_eager"), X)
    assert compiled.rows[0].round_off_bound == pytest.approx(eager.rows[0].round_off_bound, rel=0.15)


class Noisy(nn.Module):
    """Noise in the format of what it is added to."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 16)

    def forward(self, x):
        return self.layer(x + torch.randn_like(x))


def test_other_random_numbers_in_fp64_are_no_fault():
    """`randn_like` draws others there: nothing is said, and why; with the reference in fp32 they are the same."""
    found = nc.compare(Noisy(), X, under="bf16", reference="fp64")
    assert found.verdict == "not judged" and any("draws other random numbers in fp64" in note for note in found.notes)
    assert is_sound(nc.compare(Noisy(), X, under="bf16"))
    dropout = nn.Sequential(nn.Dropout(), nn.Linear(64, 16))
    assert is_sound(nc.compare(dropout, X, under="bf16", reference="fp64"))


class Picky(nn.Module):
    """It raises on other numbers than those which it computes itself, in fp32 and in a region."""

    def __init__(self):
        super().__init__()
        self.layer, self.known = nn.Linear(64, 16), set()

    def forward(self, x):
        h = self.layer(x)
        if self.known and float(h.double().sum()) not in self.known:
            raise ValueError("of another model")
        return h.square()


def test_nothing_is_to_do_about_the_round_off_of_what_is_not_judged():
    """A trial with moved numbers raises, so no run says how far round-off carries; explain named an op to keep high."""
    model = Picky()
    regions = nc.autocast("cpu", enabled=False), nc.autocast("cpu", torch.float16)
    with torch.no_grad():
        for region in regions:
            with region:
                model.known.add(float(model.layer(X).double().sum()))
    found = nc.explain(model, (X,), under="fp16", run=True)
    assert found.verdict == "not judged" and not any("Keep" in todo.what for todo in found.todos), found.todos


class Spoiling(torch.autograd.Function):
    """Its gradient is infinite in fp32, and NaN in a low format."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[:, 0].fill_(torch.inf if gradient.dtype == torch.float32 else torch.nan)  # a number, as in torch 2.15
        return gradient


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_gradient_that_is_infinite_in_one_format_and_nan_in_another_is_lost_in_both(dtype):
    """No format mends it: it is not the low one that makes it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 8))
    found = nc.compare(model, X, under=dtype, backward=lambda y: Spoiling.apply(y).float().square().sum())
    verdicts = {row.parameter: row.verdict for row in found.gradients}
    assert verdicts["1.bias"] != NOT_FINITE and found.verdict == NOT_COMPARED, (verdicts, found)


class Classifying(nn.Module):
    """Its loss is a module made in the forward; gradients of two classes cancel in the bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x, labels):
        return nn.CrossEntropyLoss()(self.head(torch.tanh(self.inner(x)) * 0.02), labels)


@pytest.mark.usefixtures("fresh_dynamo")
def test_casts_that_policies_insert_into_compiled_code_are_roundings_as_in_eager_code():
    """The bias's gradient is rounded where the loss's reaches the logits, and little is left of it."""
    model, inputs = Classifying(), (torch.randn(8, 16), torch.tensor([0, 1] * 4))
    made = nc.compile(model, under="bf16", backend="aot_eager")
    in_eager, found = nc.compare(model, inputs, under="bf16", backward=True), nc.compare(made, inputs, backward=True)
    assert in_eager.verdict == found.verdict == "round-off" and not found.unmatched, found
    bounds = [{g.parameter: g.round_off_bound for g in each.gradients}["head.bias"] for each in (in_eager, found)]
    assert bounds[1] > bounds[0] / 4, bounds


def test_a_gradient_is_as_far_off_as_the_kernel_that_makes_it_may_be():
    """Layer norm adds up the gradient of its bias in bf16: of equal rows, as a mean gives them, rounding does not
    average out. That is within what bounds the kernel, and no fault of the gradient.
    """
    torch.manual_seed(0)
    inner, head, labels = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32)), nn.Linear(32, 5), torch.arange(8) % 5
    model = nn.Sequential(inner, Mean(), head)
    found = nc.compare(
        model,
        torch.randn(8, 32, 12),
        under="bf16",
        backward=lambda out: nn.functional.cross_entropy(out.float(), labels),
    )
    error = next(g.relative_error for g in found.gradients if g.parameter == "0.1.bias")
    assert is_sound(found) and error > 0.02, found


class Mean(nn.Module):
    """The mean over tokens."""

    def forward(self, x):
        return x.mean(1)


@pytest.mark.parametrize("form", ["tril", "diag_embed", "triu"])
def test_a_matrix_that_is_compared_with_a_part_of_itself_is_judged(form):
    """As torch.distributions checks its arguments: zeros in their places are rounded by nothing."""
    layer = nn.Linear(5, 4)

    def run(x):
        z = layer(x).float()
        size = z.exp()[:, :, None] * torch.eye(4) * 0.1
        if form == "tril":
            return torch.distributions.MultivariateNormal(z, scale_tril=size.tril()).log_prob(torch.zeros(4))
        part = torch.diag_embed(size.diagonal(dim1=-2, dim2=-1)) if form == "diag_embed" else size.triu()
        if not torch.equal(part, size):
            raise ValueError("no diagonal matrix")
        return z + part.sum(-1)

    found = nc.compare(run, (torch.randn(6, 5),), under="bf16")
    assert found.verdict == "round-off", str(found)


def test_a_number_that_is_complex_may_be_viewed_in_a_backward():
    """Torch conjugates Python's, too, which no memory holds."""
    weight = torch.randn(4, requires_grad=True)
    run = nc.capture(lambda x: (1j * weight * x).abs().sum(), (torch.randn(4),), under="bf16", backward=True)
    assert not run.notes


def test_whole_numbers_that_torch_promotes_to_a_low_format_are_no_fault_of_a_kernel():
    """798 is 800 in bf16, which the line asks for that makes the positions."""
    layer = nn.Linear(8, 16)

    def resampled(x):
        h = layer(x)
        places = torch.linspace(0, 799, 50, dtype=h.dtype)
        index = places.floor().long().clamp(max=799)
        return h[:, index] * (places - (index - 1))[None, :, None]

    found = nc.compare(resampled, (torch.randn(2, 800, 8),), under="bf16")
    assert found.verdict != "kernel" and found.remedy is not None and found.remedy.asked, str(found)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("under", [None, "bf16", "fp16"])
def test_a_step_with_regions_of_its_own_is_not_compared_with_fp32(low, under):
    """Both runs have them; all that a region around the step changes is the backward that the step calls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(4, 8)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", low):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    found = nc.compare(step, under=under)
    assert found.verdict == "not compared" and not found.todos, str(found)


def test_gradients_that_are_not_finite_in_fp32_either_are_still_to_be_fixed():
    """Nothing is compared there, for another reason."""
    layer = nn.Linear(4, 4)

    def rooted(x):
        y = layer(x)
        return ((y * 0).abs().sqrt() * y).sum()

    found = nc.compare(rooted, (torch.randn(3, 4),), under="bf16", backward=True)
    assert found.verdict == "not compared" and "makes infinity" in found.todos[0].why, str(found)


class Trainer:
    """A step that writes to its weights between two forwards, and restores them (sharpness-aware minimization)."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))

    def gradients(self):
        self.model.zero_grad()
        loss = self.model(X).float().square().mean()
        loss.backward()
        return loss

    def step(self):
        loss = self.gradients()
        with torch.no_grad():
            before = [weight.clone() for weight in self.model.parameters()]
            for weight in self.model.parameters():
                weight.add_(weight.grad, alpha=1.0)
        self.gradients()
        with torch.no_grad():
            for weight, value in zip(self.model.parameters(), before, strict=True):
                weight.copy_(value)
        return loss.detach()


@pytest.mark.parametrize("kind", ["method", "function", "function of a method"])
def test_weights_that_a_step_writes_to_and_restores_are_cast_again(kind):
    """torch's cache has the first forward's casts in the second: that was a fault of gradients, or of a kernel."""
    trainer = Trainer()
    method = trainer.step

    def step():
        return method() if kind == "function of a method" else trainer.step()

    found = nc.compare(trainer.step if kind == "method" else step, under="bf16")
    assert is_sound(found) and len(found.gradients) == len(list(trainer.model.parameters())), found
    assert any("casts them again here" in note for note in found.notes), found.notes


def test_what_is_computed_of_gradients_between_two_backwards_makes_no_errors_grow():
    """Gradients of the first one are divided by a scale: their errors are the backward's, not the division's."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
    model.extend([nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 5)])
    x, y = torch.randn(8, 3, 8, 8), torch.randint(0, 5, (8,))

    def step():
        for _ in range(2):
            model.zero_grad()
            loss = F.cross_entropy(model(x), y)
            (loss * 512).backward()
            for weight in model.parameters():
                weight.grad.div_(512)
        return loss.detach()

    found = nc.compare(step, under="bf16")
    assert is_sound(found) and found.growth is None and not found.todos, (found.growth, found.todos)


def scaled_step(init_scale):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer, scaler = torch.optim.Adam(net.parameters()), torch.amp.GradScaler("cpu", init_scale=init_scale)
    x, y = torch.randn(16, 8), torch.randn(16) * 20

    def step():
        optimizer.zero_grad()
        loss = (net(x).float().squeeze(-1) - y).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def test_a_step_that_a_scaler_skips_is_not_compared():
    """Its gradients overflow as they are meant to: that was "not finite", with advice about layers."""
    skipped = nc.compare(scaled_step(65536.0), under="fp16")
    assert skipped.verdict == NOT_COMPARED and not skipped.todos, skipped
    assert any("A scaler skips this step" in note for note in skipped.notes), skipped.notes
    assert is_sound(nc.compare(scaled_step(64.0), under="fp16"))
    found = nc.explain(contrasted_step(), under="fp16", run=True)
    assert not found.comparison.differences.faults and not any("at fault" in todo.why for todo in found.todos)
    assert "VERDICT: A scaler skips this step, so that it is not compared with fp32" in str(found)


def contrasted_step():
    """Pairs of images and texts; its products give infinities in the backward that fp32 does not have."""
    torch.manual_seed(7)
    image, text = (nn.Sequential(nn.Linear(n, 32), nn.ReLU(), nn.Linear(32, 8)) for n in (16, 12))
    by = nn.Parameter(torch.tensor(2.6593))
    optimizer = torch.optim.AdamW([*image.parameters(), *text.parameters(), by], 1e-3)
    scaler, x, y = torch.amp.GradScaler("cpu"), torch.randn(24, 16), torch.randn(24, 12)

    def step():
        optimizer.zero_grad()
        logits = by.exp() * F.normalize(image(x), dim=-1) @ F.normalize(text(y), dim=-1).T
        loss = (F.cross_entropy(logits, torch.arange(24)) + F.cross_entropy(logits.T, torch.arange(24))) / 2
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def test_a_function_over_weights_in_a_coarser_format_is_within_their_round_off():
    """Its reference computes in bf16, where a unit of fp16 moves nothing: the bound was 0, and the verdict a fault."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).bfloat16().eval()
    x = torch.randn(32, 16).bfloat16()
    with torch.no_grad():
        found = nc.compare(lambda x: model(x), (x,), under="fp16")
    assert found.verdict == ROUND_OFF and found.round_off_bound > 1e-3, found


def test_a_remedy_of_an_explanation_names_the_lines_that_it_puts_into_fp32():
    """Also where a rule is about the result that these follow, at a line of torch."""

    class Drifting(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.out = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)

        def forward(self, x):
            z = self.b(self.a(x))
            d = torch.tanh(z) * 2e-3
            for _ in range(100):
                z = z + d  # HERE
            return self.out(z)

    torch.manual_seed(3)
    model, x = Drifting().eval(), torch.randn(16, 16)
    with torch.no_grad():
        found = nc.explain(model, (x,), under="bf16", run=True)
    line = 1 + next(
        n for n, text in enumerate(Path(__file__).read_text().splitlines()) if text.endswith("z + d  # HERE")
    )
    assert any(f"test_sound_comparisons.py:{line}" in todo.why for todo in found.todos), found.todos


class AsksForLow(nn.Module):
    """Positions in bf16 on an offset, whatever region is open."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 16)

    def forward(self, x):
        positions = (torch.arange(16) * 0.37).to(torch.bfloat16) + 100
        return self.last(self.first(x).float() + positions.float() - 100)


def test_low_formats_that_the_code_asks_for_are_said_to_be_in_the_reference():
    """Their error is in both runs, so that none is seen: that was round-off without a word."""
    found = nc.compare(AsksForLow(), X, under="bf16")
    assert any("1 call is in bf16 in the reference, too" in note for note in found.notes), found.notes
    assert not any("in the reference, too" in note for note in nc.compare(nn.Linear(64, 16), X, under="bf16").notes)


def row_of(op, computes="bf16", reference="fp32", **others):
    return CallError(CallId("", op), "model.py", 7, computes, reference, ROUND_OFF, **others)


def test_a_note_of_underflow_names_a_call_in_another_format():
    """One in fp32 has its zeros from before: it was named, with the advice to keep it in fp32."""
    rows = [row_of("aten.topk.default", "fp32", underflow=0.04), row_of("aten.mm.default", "fp16", underflow=0.02)]
    note = about_underflow(rows, fp16)
    assert "aten.mm.default" in note and "topk" not in note


def test_a_call_that_moves_the_output_by_nothing_is_no_advice():
    """Six of these stood before a note that has the line."""
    found = error_todos([row_of("aten.conv2d.default", alone=0.0, local=1e-3), row_of("aten.bmm.default", alone=1e-2)])
    assert ["aten.bmm.default" in todo.what for todo in found] == [True], found


class Rounding(nn.Module):
    """Logits rounded to whole numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 12)

    def forward(self, x):
        return torch.round(self.layer(x))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_op_that_rounds_to_whole_numbers_is_nothing_to_look_at(dtype):
    """What is rounded by it was rounded before: the rule about that helps, and stands alone; or it is a near tie."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) * 2
    found = nc.compare(Rounding(), (x,), under=dtype)
    assert all("aten.linear" in todo.what for todo in found.todos), found.todos
    assert found.todos or any("near tie" in note for note in found.notes)


class Rewritten(nn.Module):
    """Two layers, and a function between them."""

    def __init__(self, between):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between, self.last = nn.Linear(8, 16), between, nn.LazyLinear(4)
        with torch.no_grad():
            self(torch.randn(2, 8))

    def forward(self, x):
        return self.last(self.between(torch.tanh(self.first(x)).float() * 4))


REWRITTEN = {
    "norm or its square": (
        lambda z: z / z.norm(dim=-1, keepdim=True).clamp_min(1e-6),
        lambda z: z * torch.rsqrt(z.square().sum(-1, keepdim=True).clamp_min(1e-12)),
    ),
    "probability or its log": (
        lambda z: z.softmax(-1).clamp_min(1e-8).log(),
        lambda z: z.log_softmax(-1).clamp_min(-18.420681),
    ),
    "clamp before or after": (lambda z: z.clamp(-3, 3) * 2, lambda z: (z * 2).clamp(-6, 6)),
    "from the end": (lambda z: z[:, 2:-4].exp(), lambda z: z[:, 2:12].exp()),
    "groups": (
        lambda z: F.conv1d(z.reshape(1, -1, 16), torch.ones(2 * len(z), 1, 3) / 3, groups=len(z)).reshape(len(z), -1),
        lambda z: F.conv1d(z[:, None], torch.ones(2, 1, 3) / 3).reshape(len(z), -1),
    ),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_numbers_of_calls_that_read_something_else_are_no_fault(name):
    """As where one program limits a norm, and the other its square."""
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    for between, other in (REWRITTEN[name], REWRITTEN[name][::-1]):
        found = nc.compare(Rewritten(between), (x,), under="bf16", reference=Rewritten(other), isolate=0)
        assert found.verdict in ("round-off", "exact"), found


def test_a_number_of_a_call_that_reads_the_same_is_a_fault():
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    pairs = [
        (lambda z: z.clamp(-3, 3), lambda z: z.clamp(-2, 2)),
        (lambda z: z[:, 2:12].exp(), lambda z: z[:, 3:13].exp()),
        (lambda z: z[:, 2:12].exp(), lambda z: z[:, -13:-3].exp()),
    ]
    for between, other in pairs:
        found = nc.compare(Rewritten(between), (x,), under="bf16", reference=Rewritten(other), isolate=0)
        assert found.verdict == "fault", found


class Divergence(nn.Module):
    """A divergence of a normal distribution, with either sign before the sum."""

    def __init__(self, encoder, sign):
        super().__init__()
        self.encoder, self.sign = encoder, sign

    def forward(self, x):
        mean, log = self.encoder(x).float().chunk(2, -1)
        if self.sign < 0:
            return (-0.5 * (1 + log - mean**2 - log.exp())).sum(1).mean()
        return (0.5 * (mean**2 + log.exp() - 1 - log)).sum(1).mean()


def test_numbers_that_other_factors_undo_are_no_faults():
    """Results of the calls that read them are equal, or what comes of them is."""
    torch.manual_seed(0)
    encoder, x = nn.Linear(10, 8), torch.randn(12, 10)
    found = nc.compare(Divergence(encoder, -1), (x,), under="bf16", reference=Divergence(encoder, 1))
    assert found.verdict in ("exact", "round-off"), found

    def unbiased(x):
        return encoder(x).float().var(0)

    def biased(x):
        return encoder(x).float().var(0, correction=0) * 12 / 11

    found = nc.compare(biased, (x,), under="bf16", reference=unbiased)
    assert found.verdict in ("exact", "round-off", "not judged"), found


def test_a_function_is_compared_with_itself_and_leaves_what_both_write_to():
    """A tensor that it closes over begins each run as it was."""
    torch.manual_seed(0)
    encoder, average, x = nn.Linear(4, 8), torch.zeros(8), torch.randn(5, 4)

    def centred(x):
        h = encoder(x)
        average.mul_(0.9).add_(h.detach().float().mean(0), alpha=0.1)
        return h.float() - average.clone()

    assert nc.compare(centred, (x,), under="bf16", reference=centred).verdict == "exact"
    assert not average.any()


def test_an_op_that_is_low_in_some_calls_alone_is_not_tried_as_a_whole():
    """A rule about a module holds for all calls of the op in it: what it shows would be those in fp32, too."""
    torch.manual_seed(0)
    layer, places = nn.Linear(16, 16), torch.arange(600.0)[:, None] * torch.rand(16)

    def turned(x):
        h = layer(x) * 0.5
        return h.float() * (places * 3.0).cos()

    found = nc.compare(turned, (torch.randn(600, 16),), under="bf16")
    rows = [row for row in found.rows if row.id.op == "aten.mul.Tensor" and row.is_low]
    assert rows and all(row.alone is None or math.isnan(row.alone) for row in rows), rows


def test_outputs_of_other_shapes_are_not_compared():
    """Nothing of them was, and that was exact."""
    found = nc.compare(nn.Linear(8, 4), (torch.randn(4, 8),), under="bf16", reference=nn.Linear(8, 3))
    assert found.verdict == NOT_COMPARED and any("is of shape [4, 3]" in note for note in found.notes), found
