"""What `nc.diff` says of pairs of runs: nothing of sound ones; of faults the call or the module."""

import math
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.analysis.diff.aligned_values import Values
from narrowcast.analysis.diff.kept_tensors import KeptTensors
from narrowcast.analysis.diff.sides import Side

sys.path.insert(0, str(Path(__file__).parent))

from pairs_of_runs import FAULTS, SOUND, decoder, rotated, whole


@pytest.fixture(autouse=True)
def silence():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


QUICK_SOUND = (
    "one attention, cache, batch 2", "time first, in parts", "a module called twice, in parts", "two attentions",
    "a norm by hand in bf16", "post-norm encoder in bf16", "graph in bf16", "experts in bf16",
    "images in bf16, backward", "a cell by hand", "copies", "a cell in bf16, backward",
    "heads one by one in bf16, backward", "a transposed weight in bf16, backward", "folded norms in bf16",
    "a fused weight in bf16, backward", "a weight fused by head in bf16, backward", "attention by hand",
    "two decoders in bf16, backward", "rows in another order in bf16", "cosines in bf16",
    "two encoders in bf16, backward", "rows of all sizes",
    "tan in fp16", "sinc in fp16", "a quotient by what has two signs in fp16", "lgamma in fp16", "a floor in fp16",
    "hardshrink in fp16", "places in fp16",
)  # fmt: skip
QUICK_FAULTS = (
    "scale of attention", "a missing mask", "a softcap", "a temperature", "dropout left on", "tied weights broken",
    "the order of norms", "a stale row of the cache", "a rounding at the end", "a rounding between",
    "a softmax of columns", "halves of a projection", "keys for values", "another token", "a residual of the norm",
    "a state that is dropped", "an imaginary part", "a factor before a copy in bf16",
)  # fmt: skip


@pytest.mark.parametrize("name", QUICK_SOUND)
def test_sound_pairs_never_differ(name):
    """A cache, other formats, another implementation; all of them run in tests/conformance/trust."""
    found = nc.diff(*SOUND[name]())
    assert found.verdict != "values differ" and found.compared, str(found)


@pytest.mark.parametrize("name", QUICK_FAULTS)
def test_faults_are_named_where_they_are(name):
    """The first call that makes a difference, or one of five that one run alone makes."""
    pair, where = FAULTS[name]
    found = nc.diff(*pair())
    named = [str(row.b[0]) for row in found.producers[:1]] + [str(one.id) for one in found.alone[:5]]
    assert found.verdict == "values differ" and any(where in each for each in named), str(found)


def test_gradients_that_cancel_have_a_band_as_wide_as_that_makes_it():
    """A deviation does not move with the bias before it."""
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
    model.forward = lambda x: nn.Sequential.forward(model, x).std(1)
    run = nc.capture(model, (torch.randn(4, 9, 32),), under="fp16", backward=True)
    values = Values(Side([run]), Side([run]), KeptTensors(run, run), {})
    grown = {name: values.gradients((f"1.{name}",), (f"1.{name}",))[1] for name in ("weight", "bias")}
    assert grown["bias"] > 1e3 > grown["weight"] >= 1, grown


def test_a_sum_that_cancels_in_one_of_two_turns_has_a_band_of_its_own():
    """A bias that is added before a deviation has no gradient there, and one where it is added first."""
    layer, x = nn.Linear(24, 24), torch.randn(40, 24)
    model = nn.ModuleList([layer])
    model.forward = lambda x: layer(x + layer(x).tanh()).std(0) * 64
    found = nc.diff(*(nc.capture(model, (x,), backward=torch.sum, **low) for low in ({}, {"under": "fp16"})))
    assert found.verdict == "formats differ", str(found)


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.huber_loss])
def test_a_loss_near_its_target_is_as_wrong_as_rounding_beside_what_is_left(loss):
    """Cancellation makes the loss's relative error exceed 0.2, which bf16 alone explains."""
    layer, x, off = nn.Linear(24, 12), torch.randn(40, 24), 1e-3 * torch.randn(40, 12)
    goal = layer(x).detach() + off
    model = nn.ModuleList([layer])
    model.forward = lambda x: loss(layer(x).float(), goal)
    found = nc.diff(*(nc.capture(model, (x,), **low) for low in ({}, {"under": "bf16"})))
    assert found.verdict == "formats differ" and found.rows[-1].difference > 0.2, str(found)


@pytest.mark.parametrize("step", [torch.round, torch.sign, torch.floor, lambda h: h % 0.5])
def test_steps_of_a_function_are_taken_by_what_lies_near_them(step):
    """One is as large as the values, however little an argument is off."""
    layer, x = nn.Linear(24, 24), torch.randn(40, 24)
    model = nn.ModuleList([layer])
    model.forward = lambda x: step(layer(x) * 8)
    found = nc.diff(*(nc.capture(model, (x,), **low) for low in ({}, {"under": "bf16"})))
    assert found.verdict == "formats differ", str(found)


def test_choices_that_fall_otherwise_in_rows_nobody_looked_at_explain_what_comes_of_them():
    """The runs keep some rows' sketches; in another row each value lies at the edge of a condition."""
    layer, x, signs = nn.Linear(24, 24), torch.randn(240, 24), torch.randn(240, 24)
    edge = layer(x)[2].detach()
    model = nn.ModuleList([layer])
    model.forward = lambda x: torch.where(layer(x) > edge, signs, -signs).cumsum(0)
    found = nc.diff(*(nc.capture(model, (x,), **low) for low in ({}, {"under": "fp16"})))
    assert found.verdict == "formats differ" and found.rows[-1].difference > 0.02, str(found)


def test_log_probabilities_that_no_call_explains_make_runs_differ():
    """What is done with logits after the block that is captured."""
    a, b = whole(decoder(), tokens=True), whole(decoder(), tokens=True)
    assert nc.diff(a, b).verdict == "alike"
    b.log_probabilities = [value * 1.1 for value in b.log_probabilities]
    found = nc.diff(a, b)
    assert (
        found.verdict == "values differ" and found.tokens.is_beyond and "a temperature" in " ".join(str(found).split())
    )


@pytest.mark.parametrize("value", [-1e4, -1e9, -math.inf, None])
def test_what_a_mask_is_filled_with_hides_no_scores(value):
    """Scores in bf16 are off by their rounding, which is little beside the mask and much in a softmax."""
    layer, x, near = nn.Linear(32, 32), torch.randn(2, 10, 32), -torch.rand(10, 10) * 5

    def attention(x):
        q = layer(x)
        scores = q @ q.transpose(-1, -2) / 8 + near
        lowest = torch.finfo(scores.dtype).min if value is None else value
        return scores.masked_fill(torch.ones(10, 10, dtype=torch.bool).triu(1), lowest).softmax(-1).to(q.dtype) @ q

    with torch.no_grad():
        runs = nc.capture(attention, (x,)), nc.capture(attention, (x,), under="bf16")
    found = nc.diff(*runs)
    assert found.verdict != "values differ", str(found)


class Cached(nn.Module):
    """A memory as long as it will be, into which each step writes its part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x, memory=None, at=None):
        y = self.first(x)
        keys = y if memory is None else memory.index_copy_(1, at, y)
        seen = torch.arange(keys.shape[1]) <= (torch.arange(x.shape[1]) if at is None else at)[:, None]
        weights = (y @ keys.transpose(1, 2)).masked_fill(~seen, float("-inf")).softmax(-1)
        return self.last(weights @ keys)

    def by_step(self, x):
        memory = torch.zeros(1, 9, 16)
        for n in range(x.shape[1]):
            self(x[:, n : n + 1], memory, torch.tensor([n]))


@torch.no_grad()
def test_programs_that_go_other_ways_to_the_same_outputs_do_not_differ():
    """A cache as long as it will be, against the whole; and a weight that is cut in two, against one that is not."""
    model, x = Cached(), torch.randn(1, 6, 16)
    with nc.capture() as one:
        kept = model(x)
    with nc.capture() as other:
        model.by_step(x)
    found = nc.diff(one, other)
    assert kept is not None and found.verdict in ("alike", "round-off") and not found.alone, str(found)
    scaled = nn.ModuleList([model.first])
    scaled.forward = lambda x: torch.nn.functional.linear(x, model.first.weight * 4) / 4
    plain = nn.ModuleList([model.first])
    plain.forward = lambda x: torch.nn.functional.linear(x, model.first.weight)
    found = nc.diff(nc.capture(plain, (x,)), nc.capture(scaled, (x,)))
    assert found.verdict in ("alike", "round-off"), str(found)
    scaled.forward = lambda x: torch.nn.functional.linear(x, model.first.weight * 4) / 3.9
    assert nc.diff(nc.capture(plain, (x,)), nc.capture(scaled, (x,))).verdict == "values differ"


def steps_of(dtype, of):
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 24), torch.randn(40, 24)
    model = nn.ModuleList([layer])
    model.forward = lambda x: of(layer(x))
    return nc.diff(*(nc.capture(model, (x,), **low) for low in ({}, {"under": dtype})))


def gamma_near_its_zero(y):
    return torch.lgamma((1 + 1e-2 * y).float())


def small_ones_of_large(y):
    is_small = (torch.arange(24) == 3).float()
    return ((y + 30).float() - 30 * is_small) * is_small


def a_likelihood_of_large_scores(y):
    scores = (400 * y).float() + 1000 * torch.eye(40, 24)
    return torch.nn.functional.cross_entropy(scores[:24], torch.arange(24))


def a_product_below_the_format(y):
    return (y * 1e-5) @ (y * 1e-5).T


@pytest.mark.parametrize("of", [gamma_near_its_zero, small_ones_of_large, a_likelihood_of_large_scores])
def test_what_comes_of_a_rounding_is_as_large_as_its_function_makes_it(of):
    """Near a zero, after cancellation or at large scores, rounding is amplified, yet only formats differ."""
    found = steps_of("bf16", of)
    assert found.verdict == "formats differ", str(found)


def test_what_lies_below_the_end_of_a_format_is_round_off_though_nothing_is_left_of_it():
    """Matmuls near 1e-10 underflow in fp16, a total loss that the format explains."""
    found = steps_of("fp16", a_product_below_the_format)
    assert found.verdict == "formats differ", str(found)


def test_a_weight_that_an_inner_step_has_made_is_no_weight_of_the_run():
    """The same module runs twice: with its own weight, and with one that a gradient has moved."""
    layer, x = nn.Linear(8, 8), torch.randn(6, 8)
    model = nn.ModuleList([layer])

    def forward(x):
        with torch.enable_grad():
            (moved,) = torch.autograd.grad(layer(x).float().square().mean(), [layer.weight])
        return torch.func.functional_call(layer, {"weight": layer.weight - 0.1 * moved}, (x,))

    model.forward = forward
    found = nc.diff(*(nc.capture(model, (x,), **low) for low in ({}, {"under": "bf16"})))
    assert found.verdict == "formats differ", str(found)


def test_factors_of_a_product_that_lie_elsewhere_are_no_difference_where_outputs_agree():
    """Attention that scales queries and keys, queries alone, or scores; and one whose factors make something else."""
    q, k, x = nn.Linear(32, 32), nn.Linear(32, 32), torch.randn(2, 12, 32)

    def run(of_q, of_k, of_scores):
        model = nn.ModuleList([q, k])
        model.forward = lambda x: ((q(x) * of_q) @ (k(x) * of_k).mT * of_scores).softmax(-1) @ x
        return nc.capture(model, (x,))

    right = run(1.0, 1.0, 32**-0.5)
    for others in ((32**-0.5, 1.0, 1.0), (32**-0.25, 32**-0.25, 1.0), (0.5, 2.0, 32**-0.5)):
        assert nc.diff(right, run(*others)).verdict in ("alike", "round-off"), others
    assert nc.diff(right, run(32**-0.5, 32**-0.5, 1.0)).verdict == "values differ"


def test_what_a_later_step_chooses_comes_of_the_first_one():
    """A beam search in bf16 looks up other tokens than one in fp32, in a call that comes first in both."""
    torch.manual_seed(0)
    tokens, layer, head = nn.Embedding(50, 24), nn.Linear(24, 24), nn.Linear(24, 50)

    def beam(ids):
        h, score = tokens(ids), torch.zeros(3)
        for _ in range(6):
            score, best = (head(layer(h).tanh()).log_softmax(-1) + score[:, None]).flatten().topk(3)
            h = tokens(best % 50) + h[best // 50]
        return score, h

    model = nn.ModuleList([tokens, layer, head])
    model.forward = beam
    found = nc.diff(*(nc.capture(model, (torch.tensor([3, 1, 4]),), **low) for low in ({}, {"under": "bf16"})))
    assert found.verdict == "formats differ", str(found)
    assert any(row.why == "it chooses by values that differ" for row in found.rows)


@pytest.mark.parametrize("of", [
    lambda a, b: torch.linalg.solve_triangular(a.tril(), b, upper=False), torch.linalg.solve,
    lambda a, b: torch.linalg.eigh(a.mT @ a).eigenvectors @ b, lambda a, b: torch.linalg.inv(a) @ b,
    lambda a, b: torch.linalg.svd(a).U @ b,
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_matrices_near_singular_ones_make_errors_large(of, dtype):
    """Solves, inverses and decompositions amplify rounding by the condition number, which is no fault."""
    torch.manual_seed(0)
    layer, x, b = nn.Linear(24, 24), torch.randn(40, 24), torch.randn(24, 3)
    model = nn.ModuleList([layer])
    model.forward = lambda x: of((layer(x).mT @ x / 40).float() + 0.3 * torch.eye(24), b)
    found = nc.diff(*(nc.capture(model, (x,), **low) for low in ({}, {"under": dtype})))
    assert found.verdict == "formats differ", str(found)


def test_gradients_are_paired_by_their_forwards_in_whichever_order_they_come():
    """Two losses share one layer, and running their backwards in the other order is no difference."""
    torch.manual_seed(0)
    first, one, other, x = (torch.randn(24, 24) for _ in range(4))
    first.requires_grad_()

    def run(order):
        with nc.capture() as kept:
            h = (x @ first).tanh()
            losses = [(h @ one).square().mean(), (h @ other).sin().mean()]
            for n in order:
                losses[n].backward(retain_graph=True)
        return kept

    found = nc.diff(run((0, 1)), run((1, 0)))
    assert found.verdict in ("alike", "round-off"), str(found)


def cached(weights, ids, memory, start, window=4, shift=0.0):
    """A decoder in functions alone: rotated queries, keys of half as many heads, a window, a memory."""
    q, k, v, out, embedding, head = weights
    x = embedding[ids]
    for n in range(2):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        heads = [(y @ w[n]).unflatten(-1, (-1, 8)).transpose(1, 2) for w in (q, k, v)]
        heads[0], heads[1] = rotated(heads[0], start), rotated(heads[1], start + shift * (start > 0))
        keys, values = (torch.cat([memory[n, m], heads[m]], 2) if start else heads[m] for m in (1, 2))
        memory[n, 1], memory[n, 2] = keys, values
        at, of = torch.arange(ids.shape[1])[:, None] + start, torch.arange(keys.shape[2])
        scores = heads[0] @ keys.repeat_interleave(2, 1).mT / 8**0.5
        scores = scores.masked_fill((of > at) | (of <= at - window), -math.inf)
        y = scores.softmax(-1).to(values.dtype) @ values.repeat_interleave(2, 1)
        x = x + y.transpose(1, 2).flatten(2) @ out[n]
    return x @ head


@pytest.mark.parametrize(("dtype", "prompt"), [pytest.param(None, 5, marks=pytest.mark.slow), ("bf16", 1)])
@torch.no_grad()
def test_steps_of_functions_are_turns_of_them(dtype, prompt):
    """Calls outside of modules are numbered on and on: each step's are compared with those of that token."""
    torch.manual_seed(0)
    weights = [[torch.randn(32, n) / 32**0.5 for _ in range(2)] for n in (32, 16, 16, 32)]
    weights += [torch.randn(40, 32), torch.randn(32, 40) / 32**0.5]
    ids, low = torch.randint(40, (2, 11)), nc.autocast("cpu", dtype or "fp32", enabled=dtype is not None)

    def run(*ends, **more):
        memory = {}
        with nc.capture() as found, low:
            for start, end in zip((0, *ends), (*ends, 11), strict=True):
                assert cached(weights, ids[:, start:end], memory, start, **more) is not None
        return found

    whole = run()
    found = nc.diff(whole, run(*range(prompt, 11)))
    assert found.verdict in ("alike", "round-off") and not found.alone, str(found)
    found = nc.diff(whole, run(*range(prompt, 11), shift=1.0))
    assert found.verdict == "values differ", str(found)


@pytest.mark.parametrize("format", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [None, "fp16"])
def test_modules_of_one_name_are_kept_apart_and_a_rounding_after_the_last_is_found(format, dtype):
    """Modules outside of the model are called by their class alone."""
    torch.manual_seed(0)
    first, last, x = nn.Linear(32, 32), nn.Linear(32, 16), torch.randn(20, 32)

    def run(rounded):
        def forward(x):
            y = last(first(x).tanh())
            return y.to(format).to(y.dtype) if rounded else y

        return nc.capture(forward, (x,), **({"under": dtype} if dtype else {}))

    assert nc.diff(run(False), run(False)).verdict == "alike"
    found = nc.diff(run(False), run(True))
    assert found.verdict == "values differ" and "_to_copy" in str(found), str(found)


class Scored(nn.Module):
    """Attention with a factor on the queries, on the scores, or on the queries and off by some of it."""

    def __init__(self, way="queries", factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.way, self.factor = way, factor

    def forward(self, x):
        if self.way == "queries":
            return ((self.q(x) * (self.factor * 32**-0.5)) @ self.k(x).mT).softmax(-1) @ self.v(x)
        return ((self.q(x) @ self.k(x).mT) * (self.factor * 32**-0.5)).softmax(-1) @ self.v(x)


class Stepwise(nn.Module):
    """A batch at once, or one by one; `wrong`: of how much the gradient in the middle is off."""

    def __init__(self, is_batched=True, wrong=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.is_batched, self.wrong = nn.Linear(24, 48), nn.Linear(48, 6), is_batched, wrong

    def _one(self, x):
        h = self.a(x)
        if self.wrong:
            h = h * (1 + self.wrong) - h.detach() * self.wrong
        return self.b(torch.relu(h))

    def forward(self, x):
        return self._one(x) if self.is_batched else torch.cat([self._one(i[None]) for i in x])


@pytest.mark.parametrize("dtype", [None, "bf16", "fp16"])
def test_a_factor_that_stands_elsewhere_is_no_fault_where_outputs_agree(dtype):
    """Scaling the queries equals scaling the scores, until the factor itself differs."""
    x = torch.randn(2, 9, 32)
    a, b = (nc.capture(Scored(way), (x,), under=dtype) for way in ("queries", "scores"))
    assert nc.diff(a, b).verdict != "values differ"
    wrong = nc.capture(Scored("scores", 1.5), (x,), under=dtype)
    assert nc.diff(a, wrong).verdict == "values differ"


@pytest.mark.parametrize("dtype", [None, "bf16", "fp16"])
def test_a_batch_and_its_rows_one_by_one_have_one_backward(dtype):
    """Inside there are other quantities; the gradients are the same. A gradient that is not is found."""
    x, goal = torch.randn(5, 24), torch.randn(5, 6)
    loss = lambda y: F.mse_loss(y.float(), goal)
    runs = [nc.capture(m, (x,), under=dtype, backward=loss) for m in (Stepwise(), Stepwise(False))]
    assert nc.diff(*runs).verdict != "values differ"
    wrong = nc.capture(Stepwise(False, 0.5), (x,), under=dtype, backward=loss)
    assert nc.diff(runs[0], wrong).verdict == "values differ"


def test_an_output_is_told_from_what_nobody_reads():
    """The last of two results has no reader in one program; the other never makes it."""

    class Waste(nn.Module):
        def __init__(self, wastes):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.wastes = nn.Linear(8, 8), wastes

        def forward(self, x):
            y = self.layer(x).sigmoid()
            out = torch.stack([y[0], y[1]]) if not self.wastes else torch.cat([y[:1], y[1:2]])
            if self.wastes:
                y = y[:2] * y[2:4]
            return out

    x = torch.randn(4, 8)
    found = nc.diff(*(nc.capture(Waste(wastes), (x,)) for wastes in (False, True)))
    assert found.verdict in ("alike", "round-off"), str(found)


def test_what_a_model_returns_is_an_output_though_a_call_reads_it():
    """A state of all tokens, of which a pooled one is taken that the fault does not reach."""

    class Pooled(nn.Module):
        def __init__(self, is_wrong):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.is_wrong = nn.Linear(8, 8), is_wrong

        def forward(self, x):
            state = self.layer(x).tanh()
            if self.is_wrong:
                state = torch.cat([state[:1], state[1:].flip(-1)])
            return state, state[0] * 1.0

    x = torch.randn(4, 8)
    right, wrong = (nc.capture(Pooled(is_wrong), (x,)) for is_wrong in (False, True))
    assert len(right.returned) == 2 and nc.diff(right, right).verdict == "alike"
    assert nc.diff(right, wrong).verdict == "values differ"
