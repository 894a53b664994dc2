"""The policy `ipex`, held against Intel's lists of op names as they stand in its documentation."""

from pathlib import Path

import pytest

import narrowcast.core.policy
from narrowcast.core.decide import Argument, Call, Region, decide
from narrowcast.core.policy import Policy, Rule, as_policy, known_ops
from narrowcast.errors import PolicyError
from narrowcast.formats import bf16, fp16, fp32, fp64

DEVICES = ["cpu", "cuda", "xpu"]
_LOWER = """
conv1d conv2d conv3d _convolution convolution conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu addmm
addmv addr linear matmul mm mv bmm baddbmm addbmm chain_matmul linalg_multi_dot _thnn_fused_gru_cell gru_cell
"""
_FULL = """
binary_cross_entropy binary_cross_entropy_with_logits log_softmax nll_loss nll_loss2d nll_loss_nd cross_entropy_loss
fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn
fft_hfft fft_ihfft acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus
group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss hinge_embedding_loss
kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
triplet_margin_loss multi_margin_loss dist pdist cdist renorm
"""
_WIDEST = """
cat stack addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put tensordot scatter_add
"""
LOWER, FULL, WIDEST = (names.split() for names in (_LOWER, _FULL, _WIDEST))
GONE = {"_convolution_nogroup"}
OVERLOADS = {
    "_convolution": ["default", "deprecated"], "conv_transpose2d": ["input"], "conv_transpose3d": ["input"],
    "log_softmax": ["int"], "pow": ["Tensor_Scalar", "Tensor_Tensor", "Scalar"], "frobenius_norm": ["dim"],
    "nuclear_norm": ["default", "dim"],
}  # fmt: skip


def overloads(names):
    """The ids of the ops of these names."""
    return [f"aten.{name}.{overload}" for name in names for overload in OVERLOADS.get(name, ["default"])]


def planned(op, *formats, device="cpu", low=bf16, on=None, **facts):
    """The plan for a call on tensors of these formats, all on one device."""
    arguments = tuple(Argument(f"a{n}", f, on or device) for n, f in enumerate(formats))
    return decide(Call(op, arguments, **facts), as_policy("ipex"), Region(device, low))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", [bf16, fp16], ids=str)
def test_each_op_on_the_lower_list_runs_in_the_low_format(device, low):
    """Whatever its floating inputs are."""
    for op in overloads(LOWER):
        assert planned(op, fp32, low, None, device=device, low=low).formats == (low, None, None), op
        assert planned(op, fp32, device=device, low=low).shields, op


@pytest.mark.parametrize("device", DEVICES)
def test_each_op_on_the_full_list_runs_in_fp32(device):
    """Losses, norms, transforms."""
    for op in overloads(FULL):
        assert planned(op, bf16, fp32, fp16, device=device).formats == (fp32, None, fp32), op


@pytest.mark.parametrize("device", DEVICES)
def test_each_op_on_the_widest_list_runs_in_the_widest_of_its_inputs(device):
    """In fp32 if one of them is, else in the low format."""
    for op in overloads(WIDEST):
        assert planned(op, bf16, fp32, device=device).formats == (fp32, None), op
        assert planned(op, bf16, bf16, device=device).formats == (None, None), op


def test_the_policy_names_what_the_lists_name_and_nothing_else():
    """But for what no supported torch has."""
    named = {rule.op.split(".")[1] for rule in as_policy("ipex").rules}
    assert named == {*LOWER, *FULL, *WIDEST}
    assert len(LOWER) + len(FULL) + len(WIDEST) == len(named)


def test_what_is_left_out_is_in_no_supported_torch():
    """A torch that has it again is found out here."""
    listed = Path(narrowcast.core.policy.__file__).with_name("builtin") / "aten_ops.txt"
    names = {line.split(".")[1] for line in listed.read_text().splitlines()[1:]}
    assert not names & GONE
    assert names >= {*LOWER, *FULL, *WIDEST}


@pytest.mark.parametrize("device", DEVICES)
def test_ops_that_native_lists_and_intel_does_not_run_as_their_inputs_are(device):
    """Nothing lies below the policy."""
    names = {*LOWER, *FULL, *WIDEST}
    unlisted = [rule.op for rule in Policy.native(device).rules if rule.op.split(".")[1] not in names]
    assert unlisted
    for op in unlisted:
        assert planned(op, fp32, bf16, device=device).changes_nothing, op


def test_in_place_and_out_forms_are_left_alone():
    """Of every op on the lists that has them."""
    names = {*LOWER, *FULL, *WIDEST}
    writing = [op for op in known_ops() if op.split(".")[1].removesuffix("_") in names and is_writing(op)]
    assert {"aten.addmm_.default", "aten.mm.out", "aten.exp_.default", "aten.cat.out"} <= set(writing)
    for op in writing:
        assert planned(op, fp32, bf16, computes=False).changes_nothing, op


def is_writing(op):
    """Whether the op's name says that it writes to an argument."""
    _, name, overload = op.split(".")
    return name.endswith("_") or overload.endswith("out")


@pytest.mark.parametrize("device", DEVICES)
def test_fp64_and_tensors_on_other_devices_pass_untouched(device):
    """Through every op on the lists."""
    for op in overloads([*LOWER, *FULL, *WIDEST]):
        assert planned(op, fp64, None, device=device).formats == (None, None), op
        assert planned(op, fp32, device=device, on="mps").formats == (None,), op


def test_the_low_format_is_bf16_and_so_is_the_one_to_train_in():
    """Data, which a policy over it inherits or sets again."""
    ipex = Policy.load("ipex")
    assert (ipex.effective_low, ipex.training) == ("bf16", ("bf16",))
    assert ipex.trains_in(bf16) and ipex.trains_in(fp32) and not ipex.trains_in(fp16)
    over = Policy("over", ((Rule("aten.softmax", "full"),),), extends=("ipex",))
    assert over.effective_low == "bf16" and over.resolve("xpu").training == ("bf16",)
    changed = Policy("over", extends=("ipex",), low="fp16", training=("bf16", "fp16"))
    assert changed.effective_low == "fp16" and changed.resolve("cpu").trains_in(fp16)
    assert Policy.native().effective_low is None and Policy.native("cuda").trains_in(fp16)


def test_each_way_to_name_a_policy_knows_it():
    """Its name, what extends it, its own text."""
    ipex = as_policy("ipex")
    assert Policy.load("ipex") == ipex == as_policy(ipex.digest) == Policy.parse(ipex.to_toml())
    assert Policy.parse('extends = "ipex"').resolve("cuda").rules == ipex.rules
    assert Policy.load("safe") == Policy.safe() and Policy.load("native").is_native
    assert Policy.load("native:xpu") == Policy.native("xpu")
    with pytest.raises(PolicyError, match="ipex"):
        Policy.load("ipxe")


def test_formats_in_the_head_count_and_are_kept(tmp_path):
    """In equality, in merges and in files."""
    text = '# ours\nextends = "native"\nlow = "fp16"\ntraining = ["bf16", "fp16"]\n'
    policy = Policy.parse(text)
    assert (policy.low, policy.training) == ("fp16", ("bf16", "fp16")) and not policy.is_native
    assert len({policy, Policy.parse('extends = "native"'), Policy.parse('extends = "native"\nlow = "fp16"')}) == 3
    policy.save(tmp_path / "p.toml")
    assert Policy.load(tmp_path / "p.toml") == policy == Policy.parse(Policy("p").merge(policy).to_toml())
    assert Policy.native().merge(policy).merge(Policy("bf16", low="bf16")).low == "bf16"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('low = "fp32"', "low 'fp32': not a low format of regions"),
        ('training = ["bf16", "half"]', "training 'half': not a low format of regions"),
        ("training = []", "an empty list"),
        ('training = "bf16"', "a value of type str"),
    ],
)
def test_other_formats_in_the_head_are_refused_with_their_line(line, said):
    """As every mistake in a file."""
    with pytest.raises(PolicyError) as caught:
        Policy.parse(f'extends = "native"\n{line}\n', "p.toml")
    assert said in str(caught.value) and "p.toml:2" in str(caught.value)


def test_the_difference_from_native_on_xpu_is_told_op_by_op():
    """One of each kind; docs/reference/ops/ipex.md has them all."""
    lines = {str(change) for change in as_policy("native").resolve("xpu").diff(as_policy("ipex").resolve("xpu"))}
    assert lines >= {
        "aten.layer_norm.default: full -> -",
        "aten.scaled_dot_product_attention.default: lower -> -",
        "aten.softmax.int: full_set_dtype -> -",
        "aten.norm.Scalar: full_append_dtype -> -",
        "aten.binary_cross_entropy.default: refuse -> full",
        "aten.log_softmax.int: full_set_dtype -> full",
        "aten.fft_fft.default: - -> full",
        "aten.cat.default: - -> promote",
    }
    assert not any("aten.conv2d" in line or "aten.index_put" in line for line in lines)


def test_each_rule_has_a_reason_and_a_source_and_lint_finds_nothing():
    """As in every built-in policy."""
    ipex = as_policy("ipex")
    assert all(rule.reason and "Intel" in rule.source for rule in ipex.rules)
    assert ipex.lint() == ()
