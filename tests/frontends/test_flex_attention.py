"""flex_attention: eager casts q, k and v only, and the bodies run without autocast; graphs do the same."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import narrowcast as nc
from narrowcast.frontends.graphs.compiled import watch_graphs

pytestmark = pytest.mark.filterwarnings("ignore")


class Attention(nn.Module):
    """Causal attention with a learned bias, whose q comes in fp32."""

    def __init__(self, masked):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.bias = nn.Parameter(torch.randn(2))
        self.masked = masked

    def forward(self, x):
        def score(score, batch, head, i, j):
            return torch.where(i >= j, score + self.bias[head].exp(), -float("inf"))

        q, k = (t.view(1, -1, 2, 16).transpose(1, 2) for t in (self.norm(self.q(x).float()), self.k(x)))
        mask = None
        if self.masked:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
        return self.out(flex_attention(q, k, k, score_mod=score, block_mask=mask).transpose(1, 2).reshape(1, -1, 32))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("policy", ["native", pytest.param("safe", marks=pytest.mark.slow)])
def test_flex_attention_equals_eager(masked, policy):
    """Compiled and exported, block masks made inside included, which go through vmap."""
    torch.manual_seed(0)
    model, x = Attention(masked), torch.randn(1, 128, 32)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        with nc.autocast("cpu", policy=policy):
            expected = model(x)
        torch._dynamo.reset()
        with watch_graphs() as graphs:
            found = nc.compile(model, under=policy, backend="aot_eager")(x)
        exported = nc.export(model, (x,), under=policy).module()(x)
    (graph,) = graphs
    assert graph.fallback == "" and graph.broken_by == ""
    (step,) = [s for s in graph.after.steps.values() if s.op == "higher_order.flex_attention"]
    assert [graph.after.values[o.value].type for o in step.operands[:2]] == ["bf16"] * 2  # k is v
    assert torch.equal(found, expected) and torch.equal(exported, expected)
    assert found.dtype is exported.dtype is expected.dtype


def test_a_vmap_over_floats_falls_back_and_changes_nothing():
    """Its calls cannot be seen: the graph runs as eager autocast would run it, with a warning."""

    def batched(x, w):
        return torch.vmap(lambda row: torch.mm(row, w).exp())(x)

    x, w = torch.randn(3, 4, 4), torch.randn(4, 4)
    with nc.autocast("cpu"):
        expected = batched(x, w)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="could not be given explicit casts"):
        found = nc.compile(batched, under="bf16", backend="aot_eager")(x, w)
    assert found.dtype is expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("look", [nc.compare, nc.explain, nc.capture, partial(nc.explain, run=True)])
def test_eager_flex_attention_runs_under_whatever_looks_at_it(look):
    """Torch raises under a dispatch mode that does not know ops of higher order; and in the reference q, k, v stay."""
    model, x = Attention(masked=True).requires_grad_(False), torch.randn(1, 128, 32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    found = look(model, x, under="bf16")
    assert found.verdict in ("round-off", "explained", "finite", "within round-off"), str(found)
    with torch.autocast("cpu", torch.bfloat16), nc.watch() as watched, nc.record():
        assert torch.equal(model(x), expected)
    assert watched.verdict == "finite"


def test_what_is_not_finite_goes_through_flex_attention_to_who_made_it():
    """Its parts are not seen, and its results have the causes of its arguments."""
    with nc.watch() as watched:
        q = (torch.randn(1, 2, 128, 16) * 1e5).half()
        flex_attention(q.float(), *[torch.randn(1, 2, 128, 16)] * 2).sum()
    assert [finding.id.op for finding in watched.findings] == ["aten._to_copy.default"], str(watched)
