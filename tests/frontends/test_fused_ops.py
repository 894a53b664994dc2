"""Ops whose kernels call others: graphs have the casts that eager autocast makes inside them."""

import warnings

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.frontends.graphs.compiled import watch_graphs

MASKS = {
    "none": {},
    "causal": {"src_mask": torch.ones(5, 5).triu(1).bool()},
    "padding": {"src_key_padding_mask": torch.tensor([[0, 0, 0, 1, 1], [0] * 5]).bool()},
    "additive": {"src_mask": torch.full((5, 5), -torch.inf).triu(1)},
}


@pytest.fixture(autouse=True)
def anew():
    torch.manual_seed(0)
    torch._dynamo.reset()


class Masked(nn.Module):
    """A layer with its mask, so that all front ends call it alike."""

    def __init__(self, layer, masks):
        super().__init__()
        self.layer, self.masks = layer, masks

    def forward(self, x):
        return self.layer(x, **self.masks)


def both(model, inputs, under):
    """What compiled and exported code gives; no graph falls back, and nothing is warned about."""
    with watch_graphs() as graphs, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="narrowcast")
        compiled = nc.compile(model, backend="aot_eager", fullgraph=True, under=under)
        found = [(compiled, model)]
        for strict in (False, True):
            exported = nc.export(model, inputs, strict=strict, under=under).module()
            found.append((exported, exported))
        results = [(run(*inputs), owner) for run, owner in found]
    assert graphs and not any(graph.fallback for graph in graphs)
    return results


def assert_same(found, expected):
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("norm_first, activation", [(False, "relu"), (True, "gelu")])
def test_the_fused_encoder_layer_equals_eager(norm_first, activation, masks, dtype):
    """The fast path of nn.TransformerEncoderLayer, in evaluation and without gradients."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first, activation=activation)
    model, x = Masked(layer, masks).eval(), torch.randn(2, 5, 16)
    with torch.no_grad():
        with nc.autocast("cpu", dtype):
            expected = model(x)
        for found, _ in both(model, (x,), dtype):
            assert_same(found, expected)


@pytest.mark.parametrize(
    "policy",
    [
        "safe",
        nc.Policy.native().with_rules(nc.Rule("aten._transformer_encoder_layer_fwd", "full")),
        nc.Policy.native().with_rules(nc.Rule("aten.addmm", "full")),
        nc.Policy.native().with_rules(nc.Rule("aten._native_multi_head_attention", "full")),
    ],
    ids=["safe", "the layer", "a call inside", "the attention inside"],
)
def test_rules_about_the_encoder_layer_and_what_it_calls(policy):
    """A rule about the layer keeps it one call; rules about calls inside hold inside."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        with nc.autocast("cpu", policy=policy):
            expected = model(x)
        for found, _ in both(model, (x,), policy):
            assert_same(found, expected)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("sizes", [(8, 5, 3), (64, 33, 7), (1, 1, 1)])
def test_bilinear_equals_eager(sizes, gradients):
    """Its products are cast; its gradients are those of the op, as in eager code."""
    first, second, out = sizes
    model = nn.Bilinear(first, second, out)
    inputs = (torch.randn(4, first), torch.randn(4, second))
    weights = torch.randn(4, out)

    def gradients_of(owner, result):
        if gradients:
            owner.zero_grad()
            (result * weights).sum().backward()
        return [p.grad.clone() for p in owner.parameters() if p.grad is not None]

    with torch.set_grad_enabled(gradients):
        with nc.autocast("cpu"):
            expected = model(*inputs)
        assert not torch.equal(expected, model(*inputs))
        expected_gradients = gradients_of(model, expected)
        assert len(expected_gradients) == 2 * gradients
        for found, owner in both(model, inputs, "bf16"):
            assert_same(found, expected)
            assert all(map(torch.equal, gradients_of(owner, found), expected_gradients))


def test_matrix_exp_of_a_low_format_is_warned_about():
    """Its kernel goes by the values; in fp32 it has eager's bits."""

    class Exp(nn.Module):
        def forward(self, x):
            return torch.matrix_exp(x)

    x = torch.randn(6, 6)
    with nc.autocast("cpu"):
        expected = Exp()(x)
    for found, _ in both(Exp(), (x,), "bf16"):
        assert_same(found, expected)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="matrix_exp of a matrix in bfloat16"):
        nc.compile(Exp(), under="bf16", backend="aot_eager")(x.bfloat16())
    with pytest.warns(UserWarning, match="matrix_exp of a matrix in bfloat16"):
        nc.export(Exp(), (x.bfloat16(),), under="bf16")


class Attention(nn.Module):
    """nn.MultiheadAttention of one tensor, or of two."""

    def __init__(self, **options):
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True, **options)

    def forward(self, x, y=None):
        y = x if y is None else y
        return self.inner(x, y, y, need_weights=False)[0]


def test_attention_that_asks_whether_it_is_traced_is_warned_about():
    """Eager code fuses it, traced code never: torch's choice, in compiled and in exported code."""
    model, x = Attention().eval(), torch.randn(2, 5, 16)
    with torch.no_grad():
        for run in (
            lambda: nc.compile(model, under="bf16", backend="aot_eager")(x),
            lambda: nc.export(model, (x,), under="bf16"),
        ):
            with pytest.warns(UserWarning, match="unfused path when it is traced: inner"):
                run()
        with nc.autocast("cpu"):
            fused = model(x)
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            with nc.autocast("cpu"):
                expected = model(x)
            for found, _ in both(model, (x,), "bf16"):
                assert_same(found, expected)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        assert not torch.equal(fused, expected)


@pytest.mark.parametrize("case", ["training", "gradients", "two tensors", "a low input", "no bias"])
def test_attention_that_eager_code_does_not_fuse_is_not(case):
    """No warning, and eager's bits."""
    model = Attention(bias=case != "no bias").train(case == "training")
    inputs = (torch.randn(2, 5, 16),)
    if case == "two tensors":
        inputs += (torch.randn(2, 5, 16),)
    if case == "a low input":
        inputs = (inputs[0].bfloat16(),)
    with torch.set_grad_enabled(case == "gradients"):
        with nc.autocast("cpu"):
            expected = model(*inputs)
        for found, _ in both(model, inputs, "bf16"):
            assert_same(found, expected)


@pytest.mark.parametrize("hermitian", [False, True])
def test_pinv_is_what_it_is_in_eager_code(hermitian):
    """Its product is cast, so it gives the low format; with gradients, it says that it does not."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    x = x + x.t() if hermitian else x[:3]

    def program(x):
        return torch.linalg.pinv(x, hermitian=hermitian)

    with nc.autocast("cpu", torch.bfloat16):
        expected = program(x)
    found = nc.compile(program, under=nc.autocast("cpu", "bf16"), backend="aot_eager")(x)
    assert found.dtype is torch.bfloat16 and torch.equal(found, expected)
    with pytest.warns(UserWarning, match="pinv with gradients casts inside"):
        nc.compile(program, under=nc.autocast("cpu", "bf16"), backend="aot_eager")(x.clone().requires_grad_())


@pytest.mark.parametrize("has_mask", [False, True])
def test_a_scripted_encoder_is_that_of_eager_code_under_safe(has_mask):
    """Its mask may be None as it runs: the casts that an op's arguments need together pass over that."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    inputs = (torch.randn(2, 5, 16), None, torch.tensor([[0] * 5, [0, 0, 0, 1, 1]]).bool() if has_mask else None)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with nc.autocast("cpu", torch.bfloat16, policy="safe"):
            expected = model(*inputs)
        found = nc.script(model, under="safe")(*inputs)
    assert torch.equal(found, expected)
