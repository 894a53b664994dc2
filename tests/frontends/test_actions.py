"""Every action on ATen ops and on custom ops, carried out."""

import pytest
import torch
import torch.nn.functional as F

import narrowcast as nc
from narrowcast.errors import RefusedError

BF, FP, HF, DP = torch.bfloat16, torch.float32, torch.float16, torch.float64
x = torch.randn(4, 8)


def under(*rules, dtype=BF, base=True):
    policy = nc.Policy("test", (tuple(rules),), extends=("native",) if base else ())
    return nc.autocast("cpu", dtype, policy=policy)


def test_lower_full_and_to():
    """Results follow their inputs."""
    for action, dtype in (("lower", BF), ("full", FP), ("to(fp16)", HF)):
        with under(nc.Rule("aten.mul.Tensor", action)):
            assert torch.mul(x, x).dtype is dtype
            assert torch.mul(x.double(), x.double()).dtype is DP
            assert torch.mul(torch.ones(2, dtype=torch.int64), 2).dtype is torch.int64


def test_full_set_dtype():
    """softmax accumulates and returns in fp32 unless the caller says otherwise."""
    with under(nc.Rule("aten.softmax.int", "full_set_dtype"), nc.Rule("aten.sum.dim_IntList", "full_set_dtype")):
        assert torch.softmax(x.bfloat16(), -1).dtype is FP
        assert torch.softmax(x.bfloat16(), -1, dtype=DP).dtype is DP
        assert torch.sum(x.bfloat16(), 1).dtype is FP
        assert torch.softmax(x.double(), -1).dtype is DP
        assert torch.equal(torch.softmax(x.bfloat16(), -1), torch.softmax(x.bfloat16(), -1, dtype=FP))


def test_full_append_dtype():
    """norm has an overload that takes a dtype; left-out arguments keep their defaults."""
    with under(
        nc.Rule("aten.norm.Scalar", "full_append_dtype"), nc.Rule("aten.norm.ScalarOpt_dim", "full_append_dtype")
    ):
        low = x.bfloat16()
        norm, norm_dim = torch.ops.aten.norm.Scalar, torch.ops.aten.norm.ScalarOpt_dim
        assert norm(low).dtype is FP
        assert norm(low, 1).dtype is FP
        assert norm_dim(low, 2, [1]).dtype is FP
        assert norm(x.double()).dtype is DP
        expected = torch.ops.aten.norm.ScalarOpt_dtype(low, 2, dtype=FP)
        assert torch.equal(norm(low), expected)


def test_promote_and_align():
    """A list counts element by element."""
    with under(nc.Rule("aten.cat", "align")):
        assert torch.cat([x.bfloat16(), x.half()]).dtype is FP
    with under(nc.Rule("aten.dot", "promote")):
        assert torch.dot(x[0], x[0].bfloat16()).dtype is FP
        with pytest.raises(RefusedError, match="promotion met fp16"):
            torch.dot(x[0].half(), x[0].half())


def test_inside_gives_back_the_input_format():
    """Also of several results."""
    with under(nc.Rule("aten.exp", "inside"), nc.Rule("aten.topk", "inside")):
        low = x.bfloat16()
        assert torch.exp(low).dtype is BF
        assert torch.equal(torch.exp(low), torch.exp(low.float()).bfloat16())
        values, indices = torch.topk(low, 2)
        assert values.dtype is BF and indices.dtype is torch.int64


class Branches(torch.nn.Module):
    """What a method returns is added, and the sum is read beside it, where a script does not know its format."""

    def both(self, x):
        return torch.mm(x, x), torch.mm(x, x)

    def forward(self, x):
        a, b = self.both(x)
        return a + b, 1 + b - a


def test_a_script_casts_what_an_op_gave_back_in_the_input_format():
    """It promoted what the op had computed."""
    x = torch.randn(4, 4)
    region = under(nc.Rule("aten.add", "inside"), nc.Rule("aten.sub", "promote"))
    with region:
        expected = Branches()(x)
    found = nc.script(Branches(), under=region)(x)
    assert [t.dtype for t in found] == [BF, BF] and all(map(torch.equal, found, expected))


def test_follow_switches_autocasting_off_inside_the_op():
    """A composite op whose parts are listed."""
    with under(nc.Rule("aten.linear", "follow")):
        assert F.linear(x, x).dtype is FP
        assert torch.mm(x, x.t()).dtype is BF


def test_refuse_says_what_where_and_which_rule():
    """Four parts, with the user's line."""
    with under(nc.Rule("aten.exp", "refuse", reason="it overflows in fp16")), pytest.raises(RefusedError) as caught:
        torch.exp(x)
    message = str(caught.value)
    assert "aten.exp.default" in message and "it overflows in fp16" in message and "test_actions.py:" in message


def test_in_place_forms_can_be_ruled_by_name():
    """The other arguments follow the destination."""
    with under(nc.Rule("aten.add_.Tensor", "align")):
        y = x.bfloat16().clone()
        y.add_(x)
        assert y.dtype is BF


def test_a_glob_covers_ops_that_compute_and_spares_the_rest():
    """`aten.*`: every functional op in fp32; conversions and views stay what they are."""
    with under(nc.Rule("aten.*", "full")):
        low = x.bfloat16()
        assert (low + low).dtype is FP
        assert torch.mm(low, low.t()).dtype is FP
        assert low.to(HF).dtype is HF
        assert low.view(-1).dtype is BF
        assert torch.empty_like(low).dtype is BF
        assert low.add_(1).dtype is BF
    assert torch.mm(x.bfloat16(), x.bfloat16().t()).dtype is BF


def test_a_policy_without_native_runs_everything_as_its_inputs_are():
    """An op that native lists and the policy does not is left alone."""
    with under(base=False):
        assert torch.mm(x, x.t()).dtype is FP
    with under(nc.Rule("aten.exp", "lower"), base=False):
        assert torch.mm(x, x.t()).dtype is FP
        assert torch.exp(x).dtype is BF


def test_per_argument_rules():
    """bias in fp32, weight and input lowered: torch then refuses the mix, so: input follows, both others lowered."""
    rules = (nc.Rule("aten.where.self", "lower", argument="self"), nc.Rule("aten.where.self", "full", argument="other"))
    with under(*rules), nc.record() as ledger:
        torch.where(x > 0, x, x.bfloat16())
    assert [(c.argument, c.dst) for c in ledger.casts] == [("self", "bf16"), ("other", "fp32")]


@pytest.fixture(scope="module")
def custom_op():
    """roi_pool(x, rois, scale) -> x's dtype; refuses rois that are not fp32."""

    @torch.library.custom_op("nctest::roi_pool", mutates_args=())
    def roi_pool(x: torch.Tensor, rois: torch.Tensor, scale: float) -> torch.Tensor:
        if rois.dtype is not torch.float32:
            raise TypeError("rois must be float32")
        return x * scale + rois.to(x.dtype)

    @roi_pool.register_fake
    def _(x, rois, scale):
        return torch.empty_like(x)

    return roi_pool


def test_custom_ops_per_argument_and_inside(custom_op):
    """x cast up and the result cast back; rois never cast."""
    rules = (nc.Rule("nctest.roi_pool", "inside"), nc.Rule("nctest.roi_pool", "follow", argument="rois"))
    with under(*rules), nc.record() as ledger:
        out = custom_op(x.bfloat16(), x, 2.0)
    assert out.dtype is BF
    assert [(c.argument, c.src, c.dst) for c in ledger.casts] == [
        ("x", "bf16", "fp32"),
        ("result", "fp32", "bf16"),
    ]
    assert torch.equal(out, (x.bfloat16().float() * 2.0 + x).bfloat16())


def test_custom_ops_take_the_ambient_format(custom_op):
    """lower means the region's dtype, not one pinned at registration."""
    rules = (nc.Rule("nctest.roi_pool", "lower"), nc.Rule("nctest.roi_pool", "full", argument="rois"))
    for dtype in (BF, HF):
        with under(*rules, dtype=dtype):
            assert custom_op(x, x, 1.0).dtype is dtype
    assert custom_op(x, x, 1.0).dtype is FP


def test_a_namespace_glob_covers_a_library(custom_op):
    """nctest.*"""
    with under(nc.Rule("nctest.*", "to(fp16)", argument="x")):
        assert custom_op(x, x, 1.0).dtype is HF


def test_an_op_with_optional_tensors_and_lists():
    """Absent ones stay absent; None inside a list too."""
    with under(nc.Rule("aten.index.Tensor", "lower"), nc.Rule("aten.layer_norm", "full")):
        assert torch.ops.aten.index.Tensor(x, [None, torch.tensor([0])]).dtype is BF
        assert F.layer_norm(x.bfloat16(), (8,)).dtype is FP
