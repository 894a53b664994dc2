"""What a device lacks, as data: what `decide` makes of it, and what is known of devices that are not here."""

from dataclasses import asdict

import pytest

from narrowcast import Policy, Rule
from narrowcast.core.decide import Argument, Call, Region, decide
from narrowcast.core.policy import Kind, Lack, known_ops
from narrowcast.core.policy.capabilities import (
    EMULATED,
    RAISES,
    RUNS,
    Ability,
    Capabilities,
    device_label,
    missing_kernels,
    one_format,
    shipped_capabilities,
    short_name,
    units_in_use,
)
from narrowcast.core.policy.settings import ONE_FORMAT
from narrowcast.errors import PolicyError
from narrowcast.formats import bf16, fp16, fp32, fp64

MM = "aten.mm.default"
NO_MM = Lack(MM, bf16, "cpu (toy) has no bf16 mm")
CPU = Region("cpu", bf16)


def product(*formats, site=None):
    names = ("self", "mat2")
    arguments = tuple(Argument(name, format) for name, format in zip(names, formats, strict=True))
    return Call(MM, arguments, *([site] if site else []))


def lacking(policy=None, *lacks):
    return (policy or Policy.safe("cpu")).without(lacks or (NO_MM,))


def test_what_the_device_lacks_runs_in_fp32_and_gives_what_was_promised():
    """On the inputs as they are: fp32 ones are not rounded first."""
    plan = decide(product(fp32, bf16), lacking(), CPU)
    assert plan.formats == (None, fp32) and plan.computes_in is fp32 and plan.output is bf16
    assert plan.rule.reason == NO_MM.reason and plan.shields


def test_formats_that_are_not_lacking_are_left_to_the_policy():
    """Another low format, and a policy that was fitted to no device."""
    policy = Policy.safe("cpu")
    assert decide(product(fp32, fp32), lacking(), Region("cpu", fp16)).formats == (fp16, fp16)
    assert decide(product(fp32, fp32), policy, CPU) == decide(product(fp32, fp32), policy.without(()), CPU)


def test_rules_that_do_not_compute_in_the_missing_format_hold():
    """fp32 by the user's rule stays fp32, result included; a refusal stays one."""
    full = lacking(Policy.safe("cpu").with_rules(Rule(MM, "full")))
    assert decide(product(bf16, fp32), full, CPU).results == ()
    refused = lacking(Policy.safe("cpu").with_rules(Rule(MM, "refuse", reason="never")))
    assert decide(product(bf16, fp32), refused, CPU).refused == "never"


def test_rules_about_the_result_hold():
    """They are what was promised then."""
    policy = lacking(Policy.safe("cpu").with_rules(Rule(MM, "to(fp16)", argument="result")))
    plan = decide(product(fp32, fp32), policy, CPU)
    assert [r.format for r in plan.results] == [fp16] and plan.rule.reason == NO_MM.reason


def test_an_op_that_no_rule_names_is_repaired_where_its_inputs_are_low():
    """It would run as its inputs are; fp32 ones are nothing to repair, and fp64 is never touched."""
    policy = lacking(None, Lack("aten._linalg_det.default", bf16, "no kernel"))
    det = lambda f: Call("aten._linalg_det.default", (Argument("A", f),))
    plan = decide(det(bf16), policy, CPU)
    assert plan.formats == (fp32,) and plan.output is bf16
    assert decide(det(fp32), policy, CPU).changes_nothing and decide(det(fp64), policy, CPU).changes_nothing


def test_an_op_is_repaired_as_a_whole_if_it_calls_what_is_missing():
    """Where the policy lowers the op inside; another op, or a rule that keeps the inside high, is left alone."""
    inner = "aten.mkldnn_rnn_layer.default"
    lack = Lack("aten.lstm.input", bf16, "cpu (toy) has no bf16 lstm", inside=inner)
    call = Call("aten.lstm.input", (Argument("input", fp32), Argument("hx", fp32)))
    plan = decide(call, lacking(None, lack), CPU)
    assert plan.formats == (None, None) and plan.output is bf16 and plan.shields
    high = lacking(Policy.safe("cpu").with_rules(Rule(inner, "full")), lack)
    assert decide(call, high, CPU).changes_nothing


def test_a_rule_with_a_place_about_the_inside_makes_the_whole_depend_on_the_place():
    """Such plans are not remembered by formats alone."""
    lack = Lack("aten.lstm.input", bf16, "no lstm", inside="aten.mkldnn_rnn_layer.default")
    plain = lacking(None, lack)
    placed = lacking(Policy.safe("cpu").with_rules(Rule("aten.mkldnn_rnn_layer", "full", module="tagger")), lack)
    assert not plain.asks_where("aten.lstm.input", True)
    assert placed.asks_where("aten.lstm.input", True)


def test_what_a_device_lacks_is_part_of_a_policy_s_identity():
    """Code that was compiled for one device is compiled again for another; the same lacks give the same policy."""
    assert lacking() == lacking() and lacking().digest == lacking().digest
    assert len({Policy.safe("cpu").digest, lacking().digest, lacking(None, Lack(MM, fp16, "")).digest}) == 3


def test_what_becomes_of_a_missing_kernel_is_written_in_the_policy():
    """`safe` repairs, `native` leaves the error to the device; files say it, and print it again."""
    assert Policy.safe("cpu").unsupported == "full" and Policy.native("cpu").unsupported is None
    policy = Policy.parse('name = "mine"\nextends = "native"\nunsupported = "full"\n')
    assert policy.unsupported == "full" and not policy.is_native
    assert Policy.parse(policy.to_toml()) == policy
    assert Policy.native().repairing().to_toml().count('unsupported = "full"') == 1
    assert Policy.native().repairing() is Policy.native().repairing()
    with pytest.raises(PolicyError, match=r"file\.toml:2"):
        Policy.parse('name = "mine"\nunsupported = "sometimes"\n', "file.toml")


def test_abilities_become_lacks_with_the_words_of_a_reader():
    """One per op and format, whatever the direction; an LSTM as a whole besides."""
    found = Capabilities(
        "cpu (avx2)",
        (
            Ability("aten.mkldnn_rnn_layer.default", "bf16", "forward", RAISES),
            Ability("aten.mkldnn_rnn_layer.default", "bf16", "backward", RAISES),
            Ability(MM, "bf16", "forward", RUNS),
        ),
    )
    assert [(lack.op, lack.inside) for lack in found.lacks] == [
        ("aten.mkldnn_rnn_layer.default", ""),
        ("aten.lstm.input", "aten.mkldnn_rnn_layer.default"),
    ]
    assert {lack.reason for lack in found.lacks} == {"cpu (avx2) has no bf16 lstm"}
    with pytest.raises(ValueError):
        Ability(MM, "bf16", "forward", "perhaps")


AVX2 = ("avx2",)
AVX512 = ("avx2", "avx512f", "avx512_bf16")


@pytest.mark.parametrize(
    ("units", "label", "lacks_bf16_lstm", "bf16_is_slow"),
    [
        (AVX2, "cpu (avx2)", True, True),
        (("avx2", "avx512f"), "cpu (avx512f)", False, True),
        (AVX512, "cpu (avx512_bf16)", False, False),
        ((*AVX512, "ONEDNN_MAX_CPU_ISA=AVX2"), "cpu (avx2)", True, True),
        ((*AVX512, "ONEDNN_MAX_CPU_ISA=avx512_core"), "cpu (avx512f)", False, True),
        ((), "cpu", True, True),
    ],
)
def test_what_is_known_of_processors_that_are_not_here(units, label, lacks_bf16_lstm, bf16_is_slow):
    """By their units, without those that a variable keeps libraries from."""
    found = shipped_capabilities("cpu", units)
    assert found.device == label == device_label("cpu", units)
    assert (("aten.lstm.input", bf16) in {(lack.op, lack.format) for lack in found.lacks}) is lacks_bf16_lstm
    assert bool(found.emulated(bf16)) is bf16_is_slow
    assert "gemm" in found.emulated(fp16)


def test_a_limit_that_nobody_knows_limits_nothing():
    """A variable may hold anything."""
    assert units_in_use((*AVX512, "ONEDNN_MAX_CPU_ISA=everything")) == AVX512


def test_missing_kernels_are_ops_that_exist():
    """Every name in the data; each can be named in a rule."""
    lacks = missing_kernels("cpu")
    assert len(lacks) > 100 and missing_kernels("cuda") == ()
    assert {lack.op for lack in lacks} <= set(known_ops())


def test_an_ability_says_what_it_is_about():
    """As a key, and as JSON has it."""
    ability = Ability("aten.mm.default", "bf16", "forward", EMULATED, 4.0)
    assert ability.key == "aten.mm.default|bf16|forward"
    assert asdict(ability) == {
        "op": "aten.mm.default", "format": "bf16", "direction": "forward", "state": EMULATED, "ratio": 4.0, "error": "",
    }  # fmt: skip


def test_ops_that_take_one_format_are_ops_that_exist():
    """Each with its reason; few of them run where the first tensor alone is low."""
    found = one_format()
    assert found and {lack.op for lack in found} <= set(known_ops())
    assert all(lack.format is None and lack.reason and lack.rule.action.kind is Kind.ALIGN for lack in found)
    assert 0 < sum(lack.low_first for lack in found) < len(found) / 2


def test_what_stands_for_a_lack_is_a_rule():
    """fp32 for a format, one format for several; it says why, and that no policy wrote it."""
    full, align = NO_MM.rule, Lack(MM, None, "takes one").rule
    assert (full.action.kind, full.reason, full.source) == (Kind.FULL, NO_MM.reason, "capabilities of the device")
    assert (align.action.kind, align.reason, align.source) == (Kind.ALIGN, "takes one", ONE_FORMAT)


def test_a_device_that_nobody_has_tried_lacks_nothing_known():
    """It has its label all the same."""
    assert shipped_capabilities("toaster", ("fast",)) == Capabilities("toaster (fast)")


def test_names_are_short_for_ops_and_families():
    """`mm`, and `lstm` for what runs it."""
    assert [short_name(op) for op in ("aten.mm.default", "gemm", "aten.mkldnn_rnn_layer.default", "a.b")] == [
        "mm", "gemm", "lstm", "b",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("limit", "used"),
    [
        ("ONEDNN_MAX_CPU_ISA=AVX2", ("avx2", "fma")), ("DNNL_MAX_CPU_ISA=avx512_core", ("avx512f", "avx2", "fma")),
        ("ONEDNN_MAX_CPU_ISA=SSE41", ("fma",)), ("ATEN_CPU_CAPABILITY=avx2", ("avx512_bf16", "avx512f", "avx2", "fma")),
        ("ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16=x", ("avx512_bf16", "avx512f", "avx2", "fma")),
    ],
)  # fmt: skip
def test_a_limit_keeps_libraries_from_what_is_above_it(limit, used):
    """Units that no limit is about stay."""
    assert units_in_use(("avx512_bf16", "avx512f", "avx2", "fma", limit)) == used


def test_what_was_not_measured_has_no_ratio():
    """Of what a device raises nothing is."""
    ratios = {a.state: a.ratio for a in shipped_capabilities("cpu", ("avx2",)).abilities}
    assert ratios[RAISES] == 0.0 and ratios[EMULATED] > 1
