"""Kernels: sound ones are never named, planted faults are, by the inputs that the run really had."""

import random
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.analysis.compare import kernel_slacks
from narrowcast.core.ops import is_named, named
from narrowcast.observation.observer.observer import Observer
from narrowcast.observation.trial.rerun import planned_arguments
from narrowcast.reports.results.verdicts import KERNEL, NOT_FINITE
from narrowcast.runtime.torch_bridge import op_facts

sys.path.insert(0, str(Path(__file__).parent))

from kernels_to_judge import _back, cases, inspected, kernel


def test_no_sound_kernel_is_named():
    """Each fourth of the calls, with a seed of its own each time; all of them run in tests/conformance/trust."""
    seed = time.time_ns() % 100_000
    chosen = random.Random(seed)
    judged = 0
    for name, function in cases(seed):
        if chosen.random() < 0.25:
            for op, found in inspected(function):
                judged += found is not None
                assert found is None or not found.is_beyond, (seed, name, op, found)
    assert judged > 200


@pytest.mark.parametrize("every", [1, 8, 64])
def test_a_product_that_accumulates_in_bf16_is_named(every):
    """Partial sums of this many terms are rounded; the fp32 kernel is sound."""

    def addmm(bias, a, b, *, beta=1, alpha=1):
        total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
        for k in range(0, a.shape[1], every if a.dtype is torch.bfloat16 else a.shape[1]):
            part = slice(k, k + (every if a.dtype is torch.bfloat16 else a.shape[1]))
            total = total + torch.mm(a[:, part], b[part])
        return total + bias

    torch.manual_seed(0)  # a draw in some hundred lies within the bound by chance
    model, x = nn.Linear(512, 16), torch.randn(8, 512)
    with kernel("addmm", addmm):
        found = nc.compare(model, (x,), under="bf16", isolate=0)
    assert [(row.id.op, row.verdict) for row in found.faults] == [("aten.linear.default", KERNEL)], found
    assert found.faults[0].bound > 2 and "its kernel is off" in found.faults[0].why


def test_a_kernel_that_rounds_up_is_told_of_though_outputs_are_within_their_band():
    """The third fact alone: the word is `kernel`."""

    def silu(x):
        exact = x.double() * torch.sigmoid(x.double())
        if x.dtype is not torch.bfloat16:
            return exact.to(x.dtype)
        return torch.nextafter(exact.bfloat16(), torch.full_like(x, torch.inf))

    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8))
    with kernel("silu", silu):
        found = nc.compare(model, (torch.randn(32, 64),), under="bf16", isolate=0)
    assert found.verdict == KERNEL and [row.id.op for row in found.faults] == ["aten.silu.default"], found
    assert max(o.relative_error for o in found.outputs) < 4 * found.round_off_bound


def test_a_kernel_that_rounds_on_its_way_may_round_but_to_nearest():
    """Two roundings leave no element beyond the bound, and have a sign all the same."""
    x = torch.rand(4096).half() + 0.5
    sound = [found for _, found in inspected(lambda: x.rsqrt())]
    assert not sound[0].is_beyond
    with kernel("rsqrt", lambda x: torch.nextafter(1 / x.double().sqrt().half(), torch.full_like(x, torch.inf))):
        [(_, found)] = inspected(lambda: x.rsqrt())
    assert found.share < 2 and found.sign > 0.3 and found.is_beyond


def test_some_fifty_values_show_a_sign_and_a_rounded_number_is_none():
    """A number in a tensor without a dimension is read in the low format, and moves all results one way."""
    x = 1 + torch.arange(128).bfloat16() / 128
    for number in (0.3, 0.7, 3.3):
        for call in (torch.mul, torch.div, lambda x, n: torch.addcmul(x, x, n), lambda x, n: torch.lerp(x, -x, n)):
            sound = [found for _, found in inspected(lambda call=call, n=number: call(x.half(), torch.tensor(n)))]
            assert not any(found.is_beyond for found in sound if found is not None), sound
    with kernel("sqrt", lambda x: torch.nextafter(x.double().pow(0.5).bfloat16(), 9 * x)):
        assert [found.is_beyond for _, found in inspected(lambda: x.sqrt())] == [True]


def test_results_on_a_few_numbers_have_no_sign_however_many_they_are():
    """All of a softmax of nearly equal scores are rounded to two or three numbers of fp16, the same way each."""
    torch.manual_seed(1)
    scores = (torch.randn(80, 9, 1) * 5e-5).half()
    assert scores.softmax(1).unique().numel() < 5
    assert not any(found.is_beyond for _, found in inspected(lambda: scores.softmax(1)) if found is not None)


def test_an_infinity_that_a_kernel_makes_inside_is_made_there():
    """Squares of fp16 added up in fp16 overflow; the same inputs are fine in fp64. What reads it passes it on."""

    def norm(x, p, dim, keepdim=False, *, dtype=None):
        return x.square().sum(dim, keepdim=keepdim, dtype=x.dtype).sqrt()

    class Normed(nn.Module):
        def forward(self, x):
            return torch.linalg.vector_norm(x.half(), dim=-1, keepdim=True).float() * torch.ones(3)

    with kernel("linalg_vector_norm", norm):
        found = nc.compare(Normed(), (300 * torch.ones(4, 8),), reference=lambda x: x.norm(dim=-1, keepdim=True) * 1,
                           isolate=0)  # fmt: skip
    assert found.verdict == NOT_FINITE, found


def test_a_call_that_writes_is_judged_by_what_it_read():
    """`addmm_` reads what it writes to."""
    x, w, b = (torch.randn(8, 8).bfloat16() for _ in range(3))
    [(op, found)] = [each for each in inspected(lambda: b.addmm_(x, w)) if each[1] is not None]
    assert op == "aten.addmm_.default" and found.share < 1.01


def test_attention_without_dropout_is_judged_and_with_it_not():
    """torch says of both that they draw."""
    q = torch.randn(1, 1, 8, 16).bfloat16()
    found = [j for _, j in inspected(lambda: F.scaled_dot_product_attention(q, q, q)) if j is not None]
    assert found and found[0].share < 1
    drawn = inspected(lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5))
    assert all(j is None for op, j in drawn if "attention" in op)


def test_values_that_flush_to_zero_are_no_fault_where_a_mode_says_so():
    """Subnormals of bf16."""
    x = torch.full((64,), 1e-39).bfloat16()
    if not torch.set_flush_denormal(True):
        pytest.fail("this cpu has no such mode")
    try:
        [(_, found)] = inspected(lambda: x * 0.5)
    finally:
        torch.set_flush_denormal(False)
    assert not found.is_beyond


def _attention_backward(grad, q, k, v, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
    weights = (q @ k.mT / q.shape[-1] ** 0.5 - logsumexp[..., None]).exp()
    scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    return scores @ k, scores.mT @ q, weights.mT @ grad


def _norm_backward(grad, x, shape, mean, rstd, weight, bias, mask):
    y = (x - mean) * rstd
    inner = grad * weight
    inner = (inner - inner.mean(-1, keepdim=True) - y * (inner * y).mean(-1, keepdim=True)) * rstd
    return inner, (grad * y).sum(0), grad.sum(0)


def _batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    mean, var = x.mean((0, 2)), x.var((0, 2), correction=0)
    y = (x - mean[:, None]) * (var[:, None] + eps).rsqrt()
    return y * weight[:, None] + bias[:, None], mean, (var + eps).rsqrt()


def _nll(x, target, weight, reduction, ignore_index):
    return -x.gather(-1, target[:, None]).mean(), torch.tensor(float(len(x)), dtype=x.dtype)


PLANTED = {
    "sigmoid_backward": (lambda g, y: g * y * (1 - y), lambda x, w: _back(torch.sigmoid, x)),
    "prod.dim_int": (lambda x, dim, keepdim=False, dtype=None: x.log2().sum(dim, keepdim).exp2(),
                     lambda x, w: x.abs().prod(-1)),
    "logsumexp": (lambda x, dim, keepdim=False: x.exp().sum(dim, keepdim).log(), lambda x, w: (x + 3).logsumexp(-1)),
    "erf": (lambda x: torch.special.erfcx(-x) * (-x * x).exp() - 1, lambda x, w: torch.erf(x)),
    "nll_loss_forward": (_nll, lambda x, w: F.nll_loss(x.abs(), torch.zeros(12, dtype=torch.int64))),
    "native_batch_norm": (_batch_norm, lambda x, w: F.batch_norm(x[None].mT, None, None, w, w, training=True)),
    "native_layer_norm_backward": (_norm_backward, lambda x, w: _back(lambda x, w: F.layer_norm(x, (8,), w, w), x, w)),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        _attention_backward, lambda x, w: _back(F.scaled_dot_product_attention, *[x[None, None]] * 3)),
}  # fmt: skip


@pytest.mark.parametrize("op", PLANTED)
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_kernel_whose_results_are_too_large_is_named(op, factor):
    """Of ops that are bounded by what they do inside: the last of their results, which a backward of a norm adds up."""
    exact, call = PLANTED[op]

    def planted(*args, **kwargs):
        low = next(a.dtype for a in args if isinstance(a, torch.Tensor))
        found = exact(
            *(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args), **kwargs
        )
        found = found if isinstance(found, tuple) else (found,)
        wrong = factor if low is torch.bfloat16 else 1.0
        position = -1 if "backward" in op else 0
        found = tuple((t * wrong if n == position % len(found) else t).to(low) for n, t in enumerate(found))
        return found if len(found) > 1 else found[0]

    torch.manual_seed(0)
    x, w = torch.randn(12, 8).bfloat16(), torch.rand(8).bfloat16()
    with kernel(op, planted):
        judged = [j for name, j in inspected(lambda: call(x, w)) if op.partition(".")[0] in name]
    assert len(judged) == 1 and judged[0] is not None and judged[0].is_beyond == (factor != 1), judged


def test_a_batch_norm_whose_gradient_is_what_is_left_of_a_projection_is_sound_in_fp16():
    """The cpu holds what it takes away in the gradient's format, and what is left may be far smaller."""
    torch.manual_seed(0)
    norm, x = nn.BatchNorm1d(24), torch.randn(2, 24, 20).half().requires_grad_()
    grad = (torch.randn(2, 24, 20) + 3 * x.detach()).half().mT.contiguous().mT
    [(_, found)] = [row for row in inspected(lambda: norm(x).backward(grad)) if "batch_norm_backward" in row[0]]
    assert found is not None and not found.is_beyond, found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layouts", [(torch.channels_last, torch.contiguous_format), (torch.contiguous_format, None)])
def test_a_batch_norm_whose_gradient_has_other_strides_rounds_each_step(dtype, layouts):
    """The cpu's kernel for these computes the formula op by op in the low format."""
    torch.manual_seed(0)
    of_input, of_gradient = layouts
    norm, x = nn.BatchNorm2d(24), torch.randn(12, 24, 6, 6).to(dtype).contiguous(memory_format=of_input)
    grad = torch.randn(12, 24, 1, 1).to(dtype).expand(12, 24, 6, 6)
    if of_gradient is not None:
        grad = torch.randn(12, 24, 6, 6).to(dtype).contiguous(memory_format=of_gradient)
    [(_, found)] = [
        row for row in inspected(lambda: norm(x.requires_grad_()).backward(grad)) if "batch_norm_backward" in row[0]
    ]
    assert found is not None and not found.is_beyond, found


def test_indices_with_gaps_are_run_again_as_they_are():
    """None among indices has no format: the index after it keeps its own."""
    layer, at = nn.Linear(6, 6), torch.tensor([1, 3])
    model = nn.ModuleList([layer])
    model.forward = lambda x: layer(x)[:, at]
    found = nc.compare(model, (torch.randn(4, 6),), under="fp16", backward=lambda y: y.float().square().sum())
    assert any("index_put" in row.id.op for row in found.rows)
    assert not [note for note in found.notes if "not inspected" in note] and not found.faults, found


def test_what_is_left_out_shifts_no_format():
    """The weight of this loss is not there: what comes after it is cast as planned when the call runs again."""
    read = []

    class Look(Observer):
        def after(self, call):
            read.extend([getattr(a, "dtype", None) for a in planned_arguments(call)[0]] if call.plan else ())

    policy = nc.Policy.native().with_rules(nc.Rule("aten.binary_cross_entropy_with_logits", "lower"), name="low")
    look = Look()
    with look.observing(), nc.autocast("cpu", torch.bfloat16, policy=policy):
        x, y = torch.rand(2, 4, 3)
        nn.functional.binary_cross_entropy_with_logits(x, y, pos_weight=torch.ones(3))
    assert read == [torch.bfloat16, torch.bfloat16, None, torch.bfloat16], look.door.notes


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a_softmax_that_is_off_in_fp32_too_is_named(low):
    """Its sum is too large in every format but fp64: what fp32 is off by serves as no bound then."""

    def softmax(x, dim, half_to_float=False):
        wide = x.double() if x.dtype is torch.float64 else x.float()
        powers = (wide - wide.amax(dim, keepdim=True)).exp()
        return (powers / (powers.sum(dim, keepdim=True) + 0.2 * (wide.dtype is torch.float32))).to(x.dtype)

    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)).to(getattr(torch, {"bf16": "bfloat16", "fp16": "half"}[low]))
    with kernel("_softmax", softmax):
        found = nc.compare(model, (torch.randn(12, 8, dtype=model[0].weight.dtype),), under="fp16", isolate=0)
    assert KERNEL in {row.verdict for row in found.rows if "softmax" in row.id.op}


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a_function_that_is_off_in_fp32_too_is_named(low):
    """Its tails are 5 % too small in every format but fp64."""

    def silu(x):
        wide = x.double() if x.dtype is torch.float64 else x.float()
        off = torch.where(wide.abs() > 1, 0.05, 0.0) * (x.dtype is not torch.float64)
        return (wide * wide.sigmoid() * (1 - off)).to(x.dtype)

    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU()).to(getattr(torch, {"bf16": "bfloat16", "fp16": "half"}[low]))
    with kernel("silu", silu):
        found = nc.compare(model, (3 * torch.randn(12, 8, dtype=model[0].weight.dtype),), under="fp16", isolate=0)
    assert KERNEL in {row.verdict for row in found.rows if "silu" in row.id.op}, str(found)


class Padded(nn.Module):
    """Attention over sequences of which one is padded on the left, and a head."""

    def __init__(self, as_numbers):
        super().__init__()
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 8)
        seen = torch.ones(6, 6, dtype=torch.bool).tril() & torch.tensor([[1] * 6, [0] * 3 + [1] * 3]).bool()[:, None]
        seen = seen[:, None]
        self.mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf) if as_numbers else seen

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mask = self.mask if self.mask.dtype is torch.bool else self.mask.to(q.dtype)
        return self.head(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("as_numbers", [False, True])
def test_queries_that_see_no_key_are_compared_as_zeros(as_numbers):
    """cuDNN's kernel, which torch takes in 16 bits alone, gives them the mean of all values; that is no fault, and one
    beside them is found.
    """
    op = "_scaled_dot_product_flash_attention_for_cpu"
    factor = 1.0

    def attention(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
        gives, sums = torch.ops.aten._scaled_dot_product_attention_math(query, key, value, attn_mask, scale=scale)
        if query.dtype is not torch.bfloat16:
            return gives, sums.sum(-1)
        blind = (attn_mask == -torch.inf).all(-1, keepdim=True)
        return torch.where(blind, value.mean(-2, keepdim=True), factor * gives), sums.sum(-1)

    torch.manual_seed(0)
    model, x = Padded(as_numbers), torch.randn(2, 6, 16)
    with torch.no_grad(), kernel(op, attention):
        sound = nc.compare(model, (x,), under="bf16")
        with nc.autocast("cpu", torch.bfloat16):
            assert model(x)[1, :3].abs().min() > 0
        factor = 1.06
        faulty = nc.compare(model, (x,), under="bf16")
    assert sound.verdict == "round-off" and not sound.faults, str(sound)
    assert any("see no key" in note for note in sound.notes)
    assert [row.verdict for row in faulty.rows if "attention" in row.id.op] == [KERNEL], str(faulty)
    assert not any("see no key" in note for note in nc.compare(model, (x,), under="bf16").notes)


def _calls_rounded_in_between(x):
    """Calls of ops whose kernels on an accelerator round on their way."""
    weight, bias = torch.rand(8).to(x.dtype), torch.randn(8).to(x.dtype)
    y, *_ = torch.ops.aten.native_group_norm(x, weight, bias, 4, 8, 25, 2, 1e-5)
    x.cumsum(-1)
    torch.ops.aten._softmax_backward_data(x, x.softmax(-1), -1, x.dtype)
    torch.ops.aten.tanh_backward(x, x.tanh())
    moments = x.mean((0, 2, 3)).float(), x.var((0, 2, 3)).float().rsqrt()
    torch.ops.aten.native_batch_norm_backward(
        x, y, weight.float(), None, None, *moments, True, 1e-5, [True, True, True]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_accelerators_round_in_between_has_a_larger_bound(monkeypatch, dtype):
    """Every op that is listed; the tensors are the cpu's here."""
    torch.manual_seed(0)
    x = (torch.randn(4, 8, 5, 5) + 2).to(dtype)

    def rounds(inputs, results):
        return is_named(inputs.facts.id, "bound.on_accelerators") * torch.finfo(results[0].dtype).eps / 2

    here = dict(inspected(lambda: _calls_rounded_in_between(x)))
    monkeypatch.setattr(kernel_slacks, "_rounding_in_between", rounds)
    there = dict(inspected(lambda: _calls_rounded_in_between(x)))
    listed = {op for op in there if op.split(".")[1] in named("bound.on_accelerators")}
    assert all(there[op].share < here[op].share for op in listed)
    assert {op.split(".")[1] for op in listed} == named("bound.on_accelerators") - {"group_norm"}


def test_a_group_norm_has_one_bound_by_either_name():
    """In a region on cuda it is seen as one op, elsewhere as what that calls."""
    x, weight, bias = torch.randn(4, 8, 5, 5) + 2, torch.rand(8), torch.randn(8)
    whole, inside = torch.ops.aten.group_norm.default, torch.ops.aten.native_group_norm.default
    sizes = [
        kernel_slacks._SIZE_IN_BETWEEN[name](kernel_slacks.Inputs(op_facts(op), args, {}))
        for name, op, args in (
            ("group_norm", whole, (x, 2, weight, bias)),
            ("native_group_norm", inside, (x, weight, bias, 4, 8, 25, 2, 1e-5)),
        )
    ]
    groups = x.double().view(4, 2, 4, 5, 5)
    mean, deviation = groups.mean((2, 3, 4)), (groups.var((2, 3, 4), correction=0) + 1e-5).sqrt()
    least = (mean / deviation).abs().repeat_interleave(4, 1)[..., None, None] * weight.view(1, 8, 1, 1)
    assert torch.equal(*sizes) and bool((sizes[0] > 2 * least).all())


class Numbered(nn.Module):
    """A low result, and a whole number that neither bf16 nor fp16 holds."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(8, 4), function
        with torch.no_grad():
            self.layer.bias.add_(3004.0)

    def forward(self, x):
        return self.function(self.layer(x))


WHOLE = {
    "sub": lambda y: y - 3001,
    "rsub": lambda y: 3001 - y,
    "in place": lambda y: y.sub_(3001),
    "alpha": lambda y: torch.sub(y / 3001, y / 3001, alpha=3001),
    "mean": lambda y: y.mean() - 3001,
    "dimension": lambda y: y.unsqueeze(0).sum(0) - 3001,
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_whole_numbers_are_rounded_to_a_low_format_as_others_are(name, dtype):
    """torch rounds 3001 as it rounds 3001.0; it was taken as exact, and the kernel was blamed."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    found = nc.compare(Numbered(WHOLE[name]), (x,), under=dtype)
    assert not any(row.verdict in ("kernel", "fault") for row in found.rows), [r for r in found.rows if r.why]
