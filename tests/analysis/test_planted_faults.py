"""Faults that were planted: each is found at its line, with its culprit, in eager, compiled and exported code."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowcast as nc

sys.path.insert(0, str(Path(__file__).parent))

from kernels_to_judge import kernel

FORMS = ["eager", "compiled", "exported"]
HERE = __file__


class Block(nn.Module):
    """Two linear layers, and what a test puts between them."""

    def __init__(self, between=None, scale=1.0, width=64):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.between = between
        with torch.no_grad():
            self.up.weight.mul_(scale)

    def forward(self, x):
        y = self.up(x)
        if self.between is not None:
            y = self.between(y)
        return self.down(y)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        yield
    torch._dynamo.reset()


def in_form(form, model, x, dtype, backward=False):
    """The model in a region, as eager, compiled or exported code."""
    if form == "compiled":
        compiled = nc.compile(model, under=dtype, backend="aot_eager")
        compiled(x)
        return compiled
    if form == "exported":
        return nc.export(model, (x,), under=dtype).module()

    def eager(x):
        with nc.autocast("cpu", dtype=dtype):
            return model(x)

    return eager


def watched(form, model, x, dtype):
    run = in_form(form, model, x, dtype)
    with nc.watch() as w:
        run(x)
    return w


def test_the_rule_that_a_finding_names_moves_it_on_and_two_mend_it():
    """With `up` in fp32 the cast of what it gives overflows in `down`; with both there is nothing to find."""
    model, x = Block(scale=1e4), 40 * torch.randn(4, 64)
    policy, places = nc.Policy.native(), []
    for _ in range(2):
        with nc.watch() as w, nc.autocast("cpu", torch.float16, policy=policy):
            model(x)
        places.append((w.first.id.module_path, w.first.made_by))
        policy = policy.with_rules(nc.Rule(w.first.id.op, "full", module=w.first.id.module_path))
    assert places == [("up", "format"), ("down", "cast")]
    with nc.watch() as w, nc.autocast("cpu", torch.float16, policy=policy):
        model(x)
    assert w.first is None


@pytest.mark.parametrize("make", ["script", "trace", "convert"])
def test_in_a_script_it_is_found_at_the_line_inside(make):
    """Ours say where they are as they run."""
    model, x = Block(scale=1e4), 40 * torch.randn(4, 64)
    scripted = {
        "script": lambda: nc.script(model, under="fp16"),
        "trace": lambda: nc.trace(model, (x,), under="fp16"),
        "convert": lambda: nc.script(torch.jit.script(model), under="fp16"),
    }[make]()
    before = scripted(x)
    with nc.watch() as w:
        scripted(x)
    assert (w.first.id.module_path, w.first.id.op, w.first.made_by) == ("up", "aten.addmm.default", "format"), w
    assert w.first.file == HERE and "y = self.up(x)" in source_line(w.first.line)
    assert (
        torch.equal(
            scripted(x),
            before,
        )
        or before.isnan().any()
    )


def test_a_script_of_torchs_own_has_the_place_of_its_call():
    """It says nothing of where it is."""
    scripted = torch.jit.script(Block(scale=1e4))
    with nc.watch() as w, nc.autocast("cpu", torch.float16):
        scripted(40 * torch.randn(4, 64))
    assert w.first.made_by == "format" and "scripted(40" in source_line(w.first.line), w


def test_the_backward_of_a_script_has_the_lines_of_its_forward():
    """By the numbers of autograd's nodes."""
    scripted = nc.script(Block(), under="bf16")
    run = nc.capture(scripted, (torch.randn(4, 64),), backward=True)
    products = [c for c in run.calls if c.id.op == "aten.mm.default" and c.id.direction == "backward"]
    assert {c.id.module_path for c in products} == {"up", "down"} and all(c.file == HERE for c in products)


@pytest.mark.parametrize("form", FORMS)
class TestWatch:
    """The first value that is not finite."""

    def test_a_layer_scaled_up_overflows_in_its_cast(self, form):
        """Weights scaled by 1e7 exceed 65504, so the finding blames their cast to fp16 and states that limit."""
        w = watched(form, Block(scale=1e7), torch.randn(4, 64), "fp16")
        assert w.first.id.module_path == "up" and w.first.made_by == "cast", w
        assert w.first.file == HERE and "y = self.up(x)" in source_line(w.first.line)
        assert "65504" in w.first.sentence

    def test_a_layer_whose_products_are_large_overflows_in_the_op(self, form):
        """Inputs and weights fit fp16 but their product does not; propagating the infinity is no further finding."""
        w = watched(form, Block(scale=1e4), 40 * torch.randn(4, 64), "fp16")
        assert (w.first.id.module_path, w.first.id.op, w.first.made_by) == ("up", "aten.linear.default", "format"), w
        assert "in fp32, on the same inputs, it is finite" in w.first.sentence
        assert len(w.findings) == 1 and w.spread, "what passes it on is no finding"

    def test_zero_by_zero_in_the_backward_of_a_root_is_the_ops_own(self, form):
        """The square root's derivative is infinite at zero, so its backward makes NaN, found at the forward's line."""

        class Root(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.zeros(3))

            def forward(self, x):
                return (x * self.scale).square().sum(-1).sqrt().sum()

        model, x = Root(), torch.randn(5, 3)
        run = in_form(form, model, x, "bf16")
        with nc.watch() as w:
            run(x).backward()
        first = w.first
        assert (first.what, first.made_by, first.id.direction) == (
            "nan",
            "op",
            "backward",
        ) or "NaN" in first.sentence, w
        assert ".sqrt()" in source_line(first.line), w

    def test_a_mask_of_minus_infinity_is_meant_beside_a_real_infinity(self, form):
        """Masked attention has no finding; scaled by 1e6, its one finding is the multiplication that overflows."""

        class Masked(nn.Module):
            def __init__(self, scale):
                super().__init__()
                self.q = nn.Linear(64, 64)
                self.scale = scale

            def forward(self, x):
                q = self.q(x)
                scores = torch.matmul(q, q.transpose(-1, -2))
                mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
                weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
                return torch.matmul(weights, q) * self.scale

        x = torch.randn(2, 8, 64)
        assert watched(form, Masked(1.0), x, "fp16").first is None
        w = watched(form, Masked(1e6), x, "fp16")
        assert w.first.id.op.startswith("aten.mul") and len(w.findings) == 1, w
        assert w.intentional

    def test_an_additive_mask_of_the_lowest_value_is_meant(self, form):
        """The lowest fp32 value becomes -inf in fp16, which changes nothing for an attention mask."""

        class Added(nn.Module):
            def forward(self, x):
                mask = torch.full((8, 8), torch.finfo(torch.float32).min).triu(1)
                return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

        assert watched(form, Added(), torch.randn(1, 2, 8, 64), "fp16").first is None


class TestCompare:
    """What is off by more than round-off, and what is not."""

    def test_a_sound_model_has_no_fault(self):
        """Under bf16 the outputs and every gradient differ by round-off at most."""
        found = nc.compare(Block(nn.GELU()), (torch.randn(32, 64),), under="bf16", backward=True)
        assert found.verdict == "round-off" and not found.faults, found
        assert {g.verdict for g in found.gradients} <= {"round-off", "exact"}

    def test_a_layer_scaled_down_underflows(self):
        """Weights near 1e-7 are subnormal in fp16, and that layer's own error is over fifty times any other's."""
        model = Block(scale=1e-6)
        nn.init.zeros_(model.up.bias)
        found = nc.compare(model, (torch.randn(32, 64),), under="fp16")
        row = next(row for row in found.rows if row.id.module_path == "up")
        assert row.local > 0.1 and row.underflow > 0, found
        assert row.local > 50 * max(r.local for r in found.rows if r is not row)

    @pytest.mark.parametrize("form", ["compiled", "exported"])
    def test_compiled_and_exported_code_differs_nowhere_from_eager(self, form):
        """The same casts are made at the same calls, so every value matches bit for bit."""
        model, x = Block(nn.GELU()), torch.randn(32, 64)
        found = nc.compare(in_form(form, model, x, "bf16"), (x,), reference=in_form("eager", model, x, "bf16"),
                           backward=form == "compiled")  # fmt: skip
        assert found.verdict == "exact" and not found.differing and not found.unmatched, found


def source_line(number):
    return Path(HERE).read_text(encoding="utf-8").splitlines()[number - 1]


class TestFaults:
    """Kernels that are wrong, and arguments that differ."""

    def test_a_kernel_that_accumulates_in_bf16_is_a_fault(self):
        """Sequential sums in bf16 exceed the round-off of `addmm`, while torch's own kernel stays within it."""

        def accumulates(bias, a, b, *, beta=1, alpha=1):
            total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
            for k in range(a.shape[1]):
                total = total + a[:, k : k + 1] * b[k : k + 1]
            return total + bias

        def addmm(bias, a, b, *, beta=1, alpha=1):
            if a.dtype is not torch.bfloat16:
                return torch.mm(a, b) + bias
            return accumulates(bias, a, b)

        model = nn.Linear(1024, 32)
        x = torch.randn(16, 1024)
        assert not nc.compare(model, (x,), under="bf16").faults
        with kernel("addmm", addmm):
            found = nc.compare(model, (x,), under="bf16")
        assert [row.id.op for row in found.faults] == ["aten.linear.default"], found
        assert found.verdict == "fault" and "its kernel is off" in found.faults[0].why

    def test_roundings_that_go_up_at_ties_are_a_fault(self):
        """Rounding half up instead of half to even is a small bias, but its errors share a sign."""

        def half_up(x):
            bits = x.contiguous().view(torch.int32)
            return ((bits + 0x8000) & ~0xFFFF).view(torch.float32).bfloat16()

        def addcmul(x, a, b, *, value=1):
            exact = x.double() + value * (a.double() * b.double())
            return half_up(exact.float()) if x.dtype is torch.bfloat16 else exact.to(x.dtype)

        class Ties(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(64, 64)

            def forward(self, x):
                y = self.linear(x)
                return torch.addcmul(torch.zeros_like(y), y, torch.full_like(y, 1.5))

        x = torch.randn(64, 64)
        assert not nc.compare(Ties(), (x,), under="bf16").faults
        with kernel("addcmul", addcmul):
            found = nc.compare(Ties(), (x,), under="bf16")
        assert any("have a sign" in row.why for row in found.faults), found

    @pytest.mark.parametrize("form", FORMS)
    def test_a_wrong_epsilon_is_an_argument_that_differs(self, form):
        """The layer norm's kernel is sound, so the fault gives both values of `eps` instead."""
        right, wrong = nn.LayerNorm(64, eps=1e-5), nn.LayerNorm(64, eps=1e-12)
        x = torch.randn(8, 64)
        reference, other = Block(right, width=32), Block(wrong, width=32)
        other.load_state_dict(reference.state_dict())
        x = torch.randn(8, 32)
        found = nc.compare(
            in_form(form, other, x, "bf16"),
            (x,),
            under="bf16" if form == "eager" else None,
            reference=reference if form == "eager" else in_form("compiled", reference, x, "bf16"),
        )
        assert [row.id.op for row in found.faults[:1]] == ["aten.native_layer_norm.default"], found
        assert "1e-12" in found.faults[0].why and "1e-05" in found.faults[0].why
