"""Rules, precedence, merge, digest, diff."""

import pickle

import pytest

from narrowcast.core.policy import (
    DEVICE_TYPES,
    Action,
    Kind,
    Policy,
    Rule,
    Site,
    as_policy,
    find_allowance,
    parse_action,
)
from narrowcast.errors import FormatError, Origin, PolicyConflictError, PolicyError


def whole(policy, op, **facts):
    """The action that a policy takes for an op at a place."""
    site = Site(**facts)
    for rule in policy.table.candidates(op, True).whole:
        if rule.matches_site(site):
            return str(rule.action)
    return None


def test_native_lists_exist_for_every_device_type():
    """Each has rules, and names itself."""
    for device_type in DEVICE_TYPES:
        policy = Policy.native(device_type)
        assert len(policy.rules) > 90
        assert policy.name == f"native:{device_type}"
        assert policy.resolve(device_type) is policy


@pytest.mark.parametrize(
    ("device_type", "op", "action"),
    [
        ("cpu", "aten.linear.default", "lower"),
        ("cpu", "aten.softmax.int", None),
        ("cpu", "aten.cat.default", "promote"),
        ("cuda", "aten.softmax.int", "full_set_dtype"),
        ("cuda", "aten.norm.Scalar", "full_append_dtype"),
        ("cuda", "aten.binary_cross_entropy.default", "refuse"),
        ("cpu", "aten.binary_cross_entropy.default", "full"),
        ("mps", "aten.conv_transpose3d.input", "full"),
        ("cuda", "aten.add.Tensor", None),
    ],
)
def test_native_actions_differ_by_device(device_type, op, action):
    """Spot checks against autocast_mode.cpp."""
    assert whole(Policy.native(device_type), op) == action


def test_a_later_layer_wins_even_if_it_is_less_specific():
    """with_rules puts a layer on top: its patterns beat exact rows below."""
    policy = Policy.native("cpu").with_rules(Rule("aten.*", "full"))
    assert whole(policy, "aten.linear.default") == "full"


def test_in_one_layer_the_more_specific_rule_wins_in_any_order():
    """Place before op, exact before pattern."""
    rules = [Rule("aten.linear", "full"), Rule("aten.*", "lower", module="a.b"), Rule("aten.linear.default", "follow")]
    for ordered in (rules, rules[::-1]):
        policy = Policy("p", (tuple(ordered),))
        assert whole(policy, "aten.linear.default") == "follow"
        assert whole(policy, "aten.linear.default", module_path="a.b.c") == "lower"


def test_a_module_glob_holds_inside_the_modules_it_names():
    """`encoder.layer.3` covers what is inside; `encoder.layer.3.*` starts below it."""
    inside = Rule("aten.gelu", "full", module="encoder.layer.3")
    below = Rule("aten.gelu", "full", module="encoder.layer.3.*")
    assert inside.matches_site(Site("encoder.layer.3"))
    assert inside.matches_site(Site("encoder.layer.3.mlp.act"))
    assert not inside.matches_site(Site("encoder.layer.31"))
    assert below.matches_site(Site("encoder.layer.3.mlp"))
    assert not below.matches_site(Site("encoder.layer.3"))


def test_classes_and_functions_match_by_any_tail_of_their_name():
    """A short name is enough, a qualified one is possible."""
    site = Site(classes=("torch.nn.modules.linear.Linear",), functions=("models.bert.attend",))
    assert Rule("aten.mm", "full", module_class="Linear").matches_site(site)
    assert Rule("aten.mm", "full", module_class="torch.nn.*").matches_site(site)
    assert Rule("aten.mm", "full", function="bert.attend").matches_site(site)
    assert not Rule("aten.mm", "full", module_class="Linea").matches_site(site)


def test_equal_rows_that_disagree_are_an_error_that_names_both_lines():
    """As the design shows it."""
    first = Rule("aten.softmax.int", "full", origin=Origin("train.toml", 12))
    second = Rule("aten.softmax.int", "lower", origin=Origin("train.toml", 41))
    with pytest.raises(PolicyConflictError) as caught:
        Policy("p", ((first, second),))
    assert str(caught.value).splitlines() == [
        "rows of equal specificity disagree about aten.softmax.int",
        '  train.toml:41  action = "lower"',
        '  train.toml:12  action = "full"',
        "  Delete one, or set override = true on the later row.",
    ]


def test_override_lets_the_later_of_two_equal_rows_win():
    """The way out that the error names."""
    policy = Policy("p", ((Rule("aten.mm", "full"), Rule("aten.mm", "lower", override=True)),))
    assert whole(policy, "aten.mm.default") == "lower"


def test_a_duplicate_is_an_error():
    """Two rows that say the same are one too many."""
    with pytest.raises(PolicyError, match="duplicate"):
        Policy("p", ((Rule("aten.mm", "full"), Rule("aten.mm", "full")),))


def test_merge_puts_the_other_on_top():
    """And takes a common base once."""
    a = Policy.native().with_rules(Rule("aten.gelu", "full"))
    b = Policy.native().with_rules(Rule("aten.gelu", "lower"))
    merged = a.merge(b)
    assert merged.extends == ("native",)
    assert whole(merged.resolve("cpu"), "aten.gelu.default") == "lower"
    assert whole(b.merge(a).resolve("cpu"), "aten.gelu.default") == "full"


def test_a_merge_that_would_bury_rules_is_refused():
    """What `other` extends cannot go below rules that are already there."""
    with pytest.raises(PolicyError, match="Merge the other way round"):
        Policy("a", ((Rule("aten.mm", "full"),),), extends=("nothing",)).merge(Policy.native())


def test_files_and_built_in_policies_are_extended_in_the_order_given(tmp_path):
    """Safe is native and more: a team's rules over native go on top of it; what would bury them is refused there."""
    rule = '[[rule]]\nop = "aten.gelu"\naction = "{}"\n'
    (tmp_path / "team.toml").write_text(rule.format("full"))
    (tmp_path / "strict.toml").write_text('extends = "safe"\n' + rule.format("to(fp64)"))
    of = lambda *names: f"extends = {list(names)}\n"
    mine = tmp_path / "mine.toml"
    for *names, gelu in [
        ("safe", "team.toml", "full"),
        ("strict.toml", "team.toml", "full"),
        ("strict.toml", "to(fp64)"),
    ]:
        mine.write_text(of(*names))
        policy = Policy.load(mine)
        assert policy.extends == ("safe",) and whole(policy.resolve("cpu"), "aten.gelu.default") == gelu
        assert policy.effective_cache == "off" and Policy.parse(policy.to_toml()) == policy
    mine.write_text("# ours\n" + of("team.toml", "safe"))
    with pytest.raises(PolicyError, match="name safe first") as refused:
        Policy.load(mine)
    assert (refused.value.where[0].file, refused.value.where[0].line) == (str(mine), 2)


def test_the_digest_changes_with_the_rules_and_with_nothing_else():
    """Names, reasons and places in files take no part."""
    rule = Rule("aten.mm", "full", reason="because", origin=Origin("x", 1))
    same = Rule("aten.mm", "full", reason="another", origin=Origin("y", 2))
    a, b = Policy("a", ((rule,),)), Policy("b", ((same,),))
    assert a == b and a.digest == b.digest and hash(a) == hash(b)
    for other in (
        Policy("a", ((Rule("aten.mm", "lower"),),)),
        Policy("a", ((rule,),), cache="off"),
        Policy("a", ((rule,),), extends=("nothing",)),
        Policy("a", ((rule,), (Rule("aten.mm", "lower"),))),
        Policy("a", ((Rule("aten.mm", "full", module="x"),),)),
    ):
        assert other.digest != a.digest and other != a


def test_native_digests_are_stable():
    """A digest may be written down: the same rules give it in another process, too."""
    assert len({Policy.native(d).digest for d in DEVICE_TYPES}) >= 4
    assert Policy.native("cpu").digest == Policy.parse(Policy.native("cpu").to_toml()).digest


def test_diff_lists_what_changes():
    """Rule by rule, with before and after."""
    native = Policy.native("cpu")
    changed = native.with_rules(Rule("aten.gelu.default", "full"), Rule("aten.mm.default", "follow"))
    lines = [str(change) for change in native.diff(changed)]
    assert lines == ["aten.mm.default: lower -> follow", "aten.gelu.default: - -> full"]
    assert native.diff(native) == ()


def test_safe_extends_native_with_reasons_and_issue_numbers():
    """Each repair says why, and where it was reported."""
    safe = Policy.safe()
    assert safe.extends == ("native",)
    assert safe.cache == "off"
    for rule in safe.rules:
        assert rule.reason
        assert "#" in rule.source, rule
    assert Policy.safe("cpu").cache == "off"


def test_the_cache_setting_is_inherited_unless_given():
    """safe switches it off; a policy over safe may switch it on."""
    over = Policy("p", ((Rule("aten.gelu", "full"),),), extends=("safe",))
    assert over.effective_cache == "off" == over.resolve("cpu").effective_cache
    assert Policy("p", extends=("safe",), cache="native").effective_cache == "native"
    assert Policy.native().effective_cache == "native"


def test_rules_may_hold_for_some_torch_versions():
    """rms_norm came with 2.12: for an older torch the rule is not there."""
    from narrowcast.core.policy.known_ops import in_range

    rule = Rule("aten.rms_norm.default", "full", torch=">=2.12")
    assert not in_range(rule.torch, "2.11.0+cu128")
    assert in_range(rule.torch, "2.13.0+cpu")
    past = Rule("aten.mm.default", "full", torch="<2.0")
    assert Policy("p", ((past,),), extends=()).resolve("cpu").rules == ()


def test_actions_are_parsed_and_printed():
    """`to` carries its format; a typo names the nearest."""
    assert str(parse_action("to(e4m3fn)")) == "to(e4m3fn)"
    assert parse_action("lower") == Action(Kind.LOWER)
    with pytest.raises(PolicyError, match="did you mean 'promote'"):
        parse_action("promot")
    with pytest.raises(FormatError):
        parse_action("to(fp12)")
    with pytest.raises(PolicyError):
        Action(Kind.TO)
    with pytest.raises(PolicyError, match="tf32 is no storage format"):
        parse_action("to(tf32)")


@pytest.mark.parametrize("op", ["mm", "aten.", ".mm", ""])
def test_an_op_needs_its_namespace(op):
    """aten.mm, not mm."""
    with pytest.raises(PolicyError, match="namespace"):
        Rule(op, "full")


def test_only_actions_about_single_tensors_go_with_an_argument():
    """promote for one argument means nothing."""
    with pytest.raises(PolicyError, match="all arguments together"):
        Rule("aten.mm", "promote", argument="self")


def test_as_policy_takes_names_files_and_policies(tmp_path):
    """What the region accepts."""
    assert as_policy(None).is_native
    assert as_policy("safe").name == "safe"
    assert as_policy("native:cuda") == Policy.native("cuda")
    file = tmp_path / "p.toml"
    Policy.native().with_rules(Rule("aten.gelu", "full")).save(file)
    assert as_policy(str(file)).rules[0].op == "aten.gelu"
    with pytest.raises(PolicyError, match="no such built-in"):
        as_policy("fast")
    with pytest.raises(PolicyError, match="no autocast lists"):
        Policy.native("tpu")


def test_policies_can_be_pickled():
    """For worker processes."""
    policy = Policy.native().with_rules(Rule("aten.gelu", "to(fp16)"))
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_a_policy_stands_on_native_unless_it_says_otherwise(tmp_path):
    """Built in Python or read from a file: what it does not name is native's, and `nothing` says that nothing is."""
    rule = Rule("aten.softmax", "full")
    for policy in (
        Policy("mine", ((rule,),)),
        Policy.parse('[[rule]]\nop = "aten.softmax"\naction = "full"\n'),
        Policy.parse('extends = "native"\n[[rule]]\nop = "aten.softmax"\naction = "full"\n'),
    ):
        assert policy == Policy.native().with_rules(rule) and policy.resolve("cpu").rules[0].source
    alone = Policy("mine", ((rule,),), extends=("nothing",))
    assert alone.resolve("cpu").rules == (rule,) and alone.extends == ()
    assert 'extends = "nothing"' in alone.to_toml() and Policy.parse(alone.to_toml()) == alone
    (tmp_path / "below.toml").write_text('extends = "nothing"\n[[rule]]\nop = "aten.mm"\naction = "full"\n')
    (tmp_path / "above.toml").write_text('extends = "below.toml"\n')
    assert [r.op for r in Policy.load(tmp_path / "above.toml").resolve("cpu").rules] == ["aten.mm"]
    with pytest.raises(PolicyError, match="nothing else"):
        Policy("mine", extends=("native", "nothing"))


@pytest.mark.parametrize("name", ["my.toml", "safe", "ipex"])
def test_a_name_does_not_load_a_policy(name):
    """`Policy("my.toml")` would be an empty policy of that name; what was meant is named."""
    with pytest.raises(PolicyError, match=rf"Policy.load\('{name}'\)"):
        Policy(name)


@pytest.mark.parametrize(("version", "expected"), [
    ("2.13.0+cpu", "torch 2.13.0+cpu, kernels"), ("2.15.1", "torch 2.15.1, kernels"),
    ("2.16.0", "torch 2.11 to 2.15, kernels"), ("2.10.0", "torch 2.11 to 2.15, kernels"),
])  # fmt: skip
def test_a_source_cites_the_torch_that_runs(version, expected):
    """Where it was read off that one, too; other sources stay as they are."""
    from narrowcast.core.policy.known_ops import cited

    assert cited("torch 2.11 to 2.15, kernels", version) == expected
    assert cited("issue 12", version) == "issue 12"


class TestAllowances:
    """Where what is not finite is meant; nothing else of the policy changes by it."""

    TEXT = (
        'name = "p"\n\n[[rule]]\nop = ["aten.log", "aten.sqrt"]\nallow_nonfinite = true\nmodule = "loss"\n'
        'argument = "self"\nreason = "masked by hand"\n\n[[rule]]\nop = "aten.exp"\naction = "full"\n'
        "allow_nonfinite = true\n"
    )

    def test_are_read_beside_rules_and_are_none(self):
        """An entry without an action is no rule, and the digest is that of the policy without allowances."""
        policy = Policy.parse(self.TEXT)
        assert [r.op for r in policy.allowances] == ["aten.log", "aten.sqrt", "aten.exp"]
        assert [(r.op, str(r.action)) for r in policy.rules] == [("aten.exp", "full")]
        assert policy.digest == Policy.parse('name = "q"\n[[rule]]\nop = "aten.exp"\naction = "full"\n').digest

    def test_hold_for_their_op_module_and_argument(self):
        """One that names an argument says nothing about results; one that does not holds for both."""
        policy = Policy.parse(self.TEXT)
        inside, outside = Site(module_path="loss.part"), Site(module_path="encoder")
        assert find_allowance(policy.allowances, "aten.log.default", inside, "self") is policy.allowances[0]
        assert find_allowance(policy.allowances, "aten.log.default", inside, "other") is None
        assert find_allowance(policy.allowances, "aten.log.default", inside) is None, "it is about an argument alone"
        assert find_allowance(policy.allowances, "aten.log.default", outside, "self") is None
        assert find_allowance(policy.allowances, "aten.exp.default", outside) is policy.allowances[2]
        assert find_allowance(policy.allowances, "aten.exp.default", outside, "self") is policy.allowances[2]
        assert find_allowance(policy.allowances, "aten.expm1.default", outside) is None

    def test_are_written_and_read_again(self):
        """TOML reproduces the text that they were parsed from, and gives no action to those without one."""
        policy = Policy.parse(self.TEXT)
        assert policy.to_toml() == self.TEXT
        made = Policy("made", policy.layers, allowances=policy.allowances)
        again = Policy.parse(made.to_toml())
        assert again.allowances == policy.allowances and again.digest == policy.digest
        alone = Policy("alone", allowances=policy.allowances[:1])
        assert Policy.parse(alone.to_toml()).allowances == policy.allowances[:1]
        assert "action" not in alone.to_toml()

    def test_stay_with_new_policies_from_old_and_on_a_device(self):
        """Merging, resolving and adding rules keep every allowance, and the policy's wording includes them."""
        policy = Policy.parse(self.TEXT)
        other = Policy("other", ((Rule("aten.mm", "full"),),), allowances=(Rule("aten.div", "follow"),))
        assert [r.op for r in policy.merge(other).allowances] == ["aten.log", "aten.sqrt", "aten.exp", "aten.div"]
        assert policy.resolve("cpu").allowances == policy.allowances
        assert policy.with_rules(Rule("aten.mm", "full")).allowances == policy.allowances
        assert policy.wording != Policy.parse('name = "p"\n[[rule]]\nop = "aten.exp"\naction = "full"\n').wording

    def test_that_are_false_allow_nothing_and_need_an_action(self):
        """`allow_nonfinite = false` does not excuse a missing action, and only a boolean is accepted."""
        with pytest.raises(PolicyError, match="no action"):
            Policy.parse('[[rule]]\nop = "aten.log"\nallow_nonfinite = false\n')
        with pytest.raises(PolicyError, match="type str"):
            Policy.parse('[[rule]]\nop = "aten.log"\nallow_nonfinite = "yes"\n')
