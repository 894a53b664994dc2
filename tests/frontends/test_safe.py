"""The policy `safe`: each native fault shown, and repaired."""

import pytest
import torch
import torch.nn.functional as F

import narrowcast as nc

BF, FP, HF = torch.bfloat16, torch.float32, torch.float16
INDEX = torch.tensor([0, 1])
ROWS = torch.zeros(2, 3, dtype=torch.long)
MASK = torch.tensor([True, False, True])


def r(*shape, dtype=FP):
    return torch.randn(*shape).to(dtype)


# name: (the call, the dtype that safe gives)
MIXED = {
    "index_put": (lambda: torch.index_put(r(4, 3), (INDEX,), r(2, 3, dtype=BF)), FP),
    "index_put_": (lambda: r(4, 3, dtype=BF).index_put_((INDEX,), r(2, 3)), BF),
    "scatter_add": (lambda: torch.scatter_add(r(4, 3), 0, ROWS, r(2, 3, dtype=BF)), FP),
    "scatter_add_": (lambda: r(4, 3, dtype=BF).scatter_add_(0, ROWS, r(2, 3)), BF),
    "scatter": (lambda: torch.scatter(r(4, 3), 0, ROWS, r(2, 3, dtype=BF)), FP),
    "scatter_reduce_": (lambda: r(4, 3, dtype=BF).scatter_reduce_(0, ROWS, r(2, 3), "sum"), BF),
    "index_add": (lambda: torch.index_add(r(4, 3), 0, INDEX, r(2, 3, dtype=BF)), FP),
    "index_add_": (lambda: r(4, 3).index_add_(0, INDEX, r(2, 3, dtype=BF)), FP),
    "index_copy_": (lambda: r(4, 3).index_copy_(0, INDEX, r(2, 3, dtype=BF)), FP),
    "lerp": (lambda: torch.lerp(r(3), r(3, dtype=BF), 0.5), FP),
    "lerp, tensor": (lambda: torch.lerp(r(3), r(3, dtype=BF), r(3)), FP),
    "lerp_": (lambda: r(3).lerp_(r(3, dtype=BF), 0.5), FP),
    "addmm_": (lambda: r(3, 3).addmm_(r(3, 3, dtype=BF), r(3, 3, dtype=BF)), FP),
    "addmm_, low": (lambda: r(3, 3, dtype=BF).addmm_(r(3, 3), r(3, 3)), BF),
    "addmv_": (lambda: r(3).addmv_(r(3, 3, dtype=BF), r(3)), FP),
    "addbmm_": (lambda: r(3, 3).addbmm_(r(2, 3, 3, dtype=BF), r(2, 3, 3)), FP),
    "baddbmm_": (lambda: r(2, 3, 3).baddbmm_(r(2, 3, 3, dtype=BF), r(2, 3, 3)), FP),
    "_grouped_mm": (
        lambda: torch._grouped_mm(r(16, 16), r(2, 16, 16, dtype=BF), offs=torch.tensor([8, 16], dtype=torch.int32)), BF,
    ),
    "cat": (lambda: torch.cat([r(3, dtype=BF), r(3, dtype=HF)]), FP),
    "stack": (lambda: torch.stack([r(3, dtype=BF), r(3, dtype=HF)]), FP),
    "masked_scatter": (lambda: torch.masked_scatter(r(3), MASK, r(3, dtype=BF)), FP),
    "masked_scatter_": (lambda: r(3).masked_scatter_(MASK, r(3, dtype=BF)), FP),
    "dot": (lambda: torch.dot(r(3), r(3, dtype=BF)), FP),
    "linalg.cross": (lambda: torch.linalg.cross(r(3), r(3, dtype=BF)), FP),
    "bilinear": (lambda: F.bilinear(r(2, 3), r(2, 3, dtype=BF), r(4, 3, 3)), FP),
    "tensordot": (lambda: torch.tensordot(r(3, 3), r(3, 3, dtype=BF)), FP),
    "put_": (lambda: r(4).put_(INDEX, r(2, dtype=BF)), FP),
    "pdist": (lambda: torch.pdist(r(3, 4, dtype=BF)), FP),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_mixed_formats_raise_natively_and_not_under_safe(name):
    """If torch repairs one, the first half of this test says so."""
    call, dtype = MIXED[name]
    with pytest.raises((RuntimeError, NotImplementedError)), torch.autocast("cpu"):
        call()
    with nc.autocast("cpu", policy="safe"):
        assert call().dtype is dtype


def test_assignment_through_an_index():
    """x[i] = y."""
    with nc.autocast("cpu", policy="safe"):
        x = r(4, 3)
        x[INDEX] = r(2, 3, dtype=BF)
        x[MASK.new_tensor([True, False, True, False])] = r(2, 3, dtype=BF)
    assert x.dtype is FP


def test_a_weight_changed_in_place_is_not_stale():
    """Native keeps the first cast until the region ends."""
    lin, x = torch.nn.Linear(8, 8), r(2, 8)

    def twice(region):
        with region:
            first = lin(x)
            with torch.no_grad():
                lin.weight.mul_(2)
            return torch.equal(first, lin(x))

    assert twice(torch.autocast("cpu")), "torch has repaired its stale weight cache"
    assert not twice(nc.autocast("cpu", policy="safe"))


def test_nested_regions_of_different_low_formats_over_one_weight():
    """Native mixes the two casts up and raises."""
    lin, x = torch.nn.Linear(8, 8), r(2, 8)

    def nested(make):
        with make("cpu", BF):
            lin(x)
            with make("cpu", HF):
                return lin(x).dtype

    with pytest.raises(RuntimeError):
        nested(torch.autocast)
    assert nested(lambda *a: nc.autocast(*a, policy="safe")) is HF


def test_binary_cross_entropy_runs_where_cuda_refuses():
    """Decided on data: native:cuda refuses, safe:cuda computes in fp32."""
    p, t = torch.rand(3, dtype=HF), torch.rand(3)
    with pytest.raises(RuntimeError), nc.autocast("cpu", HF, policy=nc.Policy.native("cuda")):
        F.binary_cross_entropy(p, t)
    with nc.autocast("cpu", HF, policy=nc.Policy.safe("cuda")):
        assert F.binary_cross_entropy(p, t).dtype is FP


def test_an_fp32_region_is_one_on_the_cpu():
    """Native warns and switches itself off, so that bf16 inputs are not cast up."""
    low = r(3, 3, dtype=BF)
    with pytest.warns(UserWarning, match="Disabling autocast"), torch.autocast("cpu", FP):
        assert torch.mm(low, low).dtype is BF
    with nc.autocast("cpu", FP, policy="safe"):
        assert torch.is_autocast_enabled("cpu")
        assert torch.mm(low, low).dtype is FP


@pytest.mark.parametrize("masked", [False, True])
def test_the_fused_transformer_encoder_layer(masked):
    """Its fast path does not know cpu autocast; safe gives the formats of the unfused layer."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = r(2, 5, 16)
    mask = torch.tensor([[False] * 3 + [True] * 2, [False] * 5]) if masked else None
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=mask)
        with nc.autocast("cpu", policy="safe"):
            out = encoder(x, src_key_padding_mask=mask)
    assert out.dtype is FP
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)  # fp32 inside: only the order of sums may differ


def test_safe_is_native_for_what_native_does_right():
    """Same dtypes and bits for linear, softmax and layer_norm."""
    lin, x = torch.nn.Linear(8, 8), r(2, 8)
    with torch.autocast("cpu"):
        native = [lin(x), torch.softmax(lin(x), -1), F.layer_norm(x, (8,)), torch.cat([x, lin(x)])]
    with nc.autocast("cpu", policy="safe"):
        safe = [lin(x), torch.softmax(lin(x), -1), F.layer_norm(x, (8,)), torch.cat([x, lin(x)])]
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(native, safe, strict=True))
