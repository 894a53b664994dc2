"""Rules and policies one at a time: what they match, what they say of themselves, and how they are put together."""

from importlib import metadata

import pytest

from narrowcast.core.policy import Lack, Policy, Rule, Site, as_policy, installed_torch, parse_action
from narrowcast.core.policy.lint import nearest_name
from narrowcast.errors import Origin, PolicyError
from narrowcast.formats import bf16, fp16, fp32
from narrowcast.output.words import did_you_mean


def test_what_rules_inside_is_inherited_unless_given():
    """A policy asked for the setting that it has is itself; another one is made once."""
    own = Policy("p")
    assert own.effective_inner == "native" and own.with_inner("native") is own
    other = own.with_inner("policy")
    assert other.effective_inner == "policy" and other.with_inner("policy") is other
    assert own.with_inner("policy") is other
    assert Policy("q", extends=(), inner="policy").effective_inner == "policy"
    assert Policy("q", extends=()).effective_inner == "native"


def test_the_low_format_is_inherited_unless_given():
    """None is left to the device type."""
    assert Policy("p", low="fp16").effective_low == "fp16"
    assert Policy("p", extends=(), low="bf16").effective_low == "bf16"
    assert Policy("p").effective_low is None
    assert Policy("p", extends=("ipex",)).effective_low == Policy.load("ipex").resolve("cpu").low


def test_a_policy_trains_in_what_it_names_and_in_fp32():
    """In any format, if it names none."""
    assert Policy("p").trains_in(fp16) and Policy("p", training=("bf16",)).trains_in(bf16)
    assert not Policy("p", training=("bf16",)).trains_in(fp16)
    assert Policy("p", training=("bf16",)).trains_in(fp32)


@pytest.mark.parametrize(
    "changed",
    [
        {"cache": "off"}, {"unsupported": "full"}, {"inner": "policy"}, {"low": "bf16"}, {"training": ("bf16",)},
        {"extends": ()}, {"extends": ("safe",)}, {"lacks": (Lack("aten.mm.default", bf16, "no mm"),)},
        {"layers": ((Rule("aten.mm", "full"),),)},
    ],
)  # fmt: skip
def test_native_is_torch_s_own_behaviour_neither_more_nor_less(changed):
    """Any setting that differs makes it another; one that says the same does not."""
    assert Policy("p").is_native
    assert Policy("p", cache="native", unsupported="raise", inner="native", lacks=()).is_native
    assert not Policy("p", **changed).is_native
    assert Policy("p", **changed).digest != Policy("p").digest


def test_a_policy_is_divided_into_forward_and_backward():
    """Layers that are left empty go; without rules about the backward it is the same policy."""
    forth, back = Rule("aten.mm", "full"), Rule("backward.aten.mm", "full")
    both = Policy("p", ((forth,), (back,), (Rule("aten.relu", "lower"), Rule("dgrad.aten.mm", "lower"))))
    assert both.has_backward_rules
    assert [[str(r) for r in layer] for layer in both.forward().layers] == [["aten.mm: full"], ["aten.relu: lower"]]
    assert [[str(r) for r in layer] for layer in both.backward().layers] == [
        ["backward.aten.mm: full"], ["dgrad.aten.mm: lower"],
    ]  # fmt: skip
    assert Policy.parse(both.forward().to_toml()) == both.forward()
    assert both.backward().extends == () and both.forward().extends == ("native",)
    plain = Policy("p", ((forth,),))
    assert not plain.has_backward_rules and plain.forward() is plain and plain.backward().layers == ()


def test_a_policy_knows_what_its_rules_ask_of_modules():
    """Of the calls of modules: whether there are such rules, and what they need to know besides the class."""
    ops = Policy("p", ((Rule("aten.mm", "full", module="a", function="f"),),))
    assert not ops.has_module_rules and ops.asked_of_modules == frozenset()
    by_class = Policy("p", ((Rule("module.call", "full", module_class="A"),),))
    assert by_class.has_module_rules and by_class.asked_of_modules == frozenset()
    asks = Policy("p", ((Rule("module.call", "full", module="a"), Rule("module.call", "lower", function="f")),))
    assert asks.asked_of_modules == {"module", "function"}


def test_patterns_about_other_libraries_are_open():
    """What they cover depends on what is loaded; a name that is exact, or aten's, does not."""
    assert Policy("p", ((Rule("lib.*", "full"),),)).has_open_patterns
    assert Policy("p", ((Rule("lib.op", "full"),),)).has_open_patterns
    assert not Policy("p", ((Rule("lib.op.default", "full"), Rule("aten.*", "full")),)).has_open_patterns


def test_policies_and_places_say_what_they_are():
    """A name with eight digits; and in a debugger the rules, too."""
    policy = Policy("mine", ((Rule("aten.mm", "full"),),))
    assert str(policy) == f"mine ({policy.digest[:8]})"
    assert repr(policy) == f"<Policy 'mine', 1 rule of its own, extends native, {policy.digest[:8]}>"
    assert str(Site(file="a.py", line=3)) == "a.py:3" and str(Site()) == "?"


def test_a_rule_says_where_it_is_written():
    """If it is written anywhere; a built-in policy's file is known by its folder."""
    rule = Rule("aten.mm", "full", origin=Origin("my.toml", 4))
    assert rule.label == "aten.mm: full (my.toml:4)" and not rule.is_builtin
    assert Rule("aten.mm", "full").label == "aten.mm: full" and not Rule("aten.mm", "full").is_builtin
    assert Rule("aten.mm", "full", origin=Origin("builtin/safe.toml", 4)).is_builtin
    conditions = {"module": "a", "module_class": "B", "function": "f"}
    assert str(Rule("aten.mm", "full", argument="x", **conditions)) == (
        "aten.mm argument x in a in class B in function f: full"
    )
    assert str(Rule("aten.mm", "full", module="")) == "aten.mm in the root module: full"


@pytest.mark.parametrize(
    "wrong",
    [
        {"op": "mm"}, {"torch": "new"}, {"op": "module.call", "action": "promote"},
        {"argument": "x", "action": "promote"},
    ],
)  # fmt: skip
def test_a_wrong_rule_is_refused_with_its_place(wrong):
    """If it stands in a file; without one the error names none."""
    facts = {"op": "aten.mm", "action": "full", **wrong}
    with pytest.raises(PolicyError) as caught:
        Rule(**facts, origin=Origin("my.toml", 4))
    assert caught.value.where == (Origin("my.toml", 4),)
    with pytest.raises(PolicyError) as caught:
        Rule(**facts)
    assert caught.value.where == ()


def test_an_op_is_given_by_name():
    """An object that prints as an op is told how to write itself; others by their own name."""

    class Packet:
        def __str__(self):
            return "aten.gelu.default"

    with pytest.raises(PolicyError, match=r'Rule\("aten.gelu.default", "full"\)'):
        Rule(Packet(), "full")
    with pytest.raises(PolicyError, match=r'Rule\("aten.parse_action", "full"\)'):
        Rule(parse_action, "full")
    with pytest.raises(PolicyError, match=r'Rule\("aten.gelu", "full"\)'):
        Rule(3, "full")


@pytest.mark.parametrize(
    ("action", "is_right"), [("to(bf16)", True), ("to(bf16", False), ("bf16)", False), ("to", False), (" full ", True)]
)
def test_only_to_takes_a_format(action, is_right):
    """In brackets, both of them."""
    if is_right:
        assert str(parse_action(action)) == action.strip()
    else:
        with pytest.raises(PolicyError):
            parse_action(action)


def test_directions_order_rules_and_choose_calls():
    """One about gradients of inputs is stronger than one about the backward; no other call is theirs."""
    backward, dgrad = Rule("backward.aten.mm", "full"), Rule("dgrad.aten.mm", "lower")
    assert dgrad.specificity > backward.specificity
    assert Rule("wgrad.aten.*", "full").specificity > Rule("backward.aten.mm.default", "full").specificity
    told = {d: (backward.matches_direction(d), dgrad.matches_direction(d)) for d in ("forward", "backward", "dgrad")}
    assert told == {"forward": (False, False), "backward": (True, False), "dgrad": (True, True)}
    assert Rule("aten.mm", "full").matches_direction("forward")
    assert not Rule("aten.mm", "full").matches_direction("backward")


def test_a_table_gives_the_rules_of_an_op_and_a_direction():
    """A glob that is about other ops is none of them, nor is a rule about gradients; and it says who asks for what."""
    rules = Rule("aten.a*", "lower"), Rule("dgrad.aten.mm.default", "full"), Rule("aten.mm", "full", module="m")
    table = Policy("p", (rules,), extends=()).table
    found = table.candidates("aten.mm.default")
    assert (found.whole, found.per_argument, found.depends_on_site) == (rules[2:], (), True)
    assert table.candidates("aten.mm.default", direction="dgrad").whole == rules[1:2]
    added = table.candidates("aten.add.Tensor")
    assert (added.whole, added.depends_on_site) == (rules[:1], False)
    for asked, names in ({"module_class": "C"}, True), ({"function": "f"}, True), ({"module": "m"}, True), ({}, False):
        assert Policy("p", ((Rule("aten.mm", "full", **asked),),), extends=()).table.asks_for_names is names


def test_the_order_of_rules_is_place_then_how_exactly_the_op_is_named():
    """A glob, a name, an overload; among equals the longer text; and any place before all of that."""
    ops = ["aten.*", "aten.m*", "aten.mm.default*", "aten.mm", "aten.addmm", "aten.mm.default"]
    assert sorted(set(ops), key=lambda op: Rule(op, "full").specificity) == ops
    assert Rule("aten.?m*", "full").specificity == Rule("aten.m*", "full").specificity
    assert Rule("aten.*", "full", function="*").specificity > Rule("aten.mm.default", "full").specificity
    assert Rule("aten.*", "full", module="a*").specificity < Rule("aten.*", "full", module="ab*").specificity
    assert Rule("aten.[a-c]", "full").is_glob and Rule("aten.?", "full").is_glob and not Rule("aten.mm", "full").is_glob


def test_rules_about_modules_calls_look_at_the_module_itself():
    """Its path, its own class, and any function around it; what is inside is another call."""
    site = Site("a.b", ("lib.B", "lib.A"), ("lib.run", "lib.main"))
    holds = lambda **conditions: Rule("module.call", "full", **conditions).matches_site(site)
    assert holds() and holds(module="a.b") and holds(module_class="B") and holds(function="main")
    assert not holds(module="a") and not holds(module_class="A") and not holds(function="other")
    assert not holds(module="a.b", function="other") and not holds(module="a.b", module_class="A")
    inside = lambda **conditions: Rule("aten.mm", "full", **conditions).matches_site(site)
    assert inside(module="a") and inside(module_class="A") and inside(function="main")
    assert not inside(module="a", module_class="C") and not inside(module="c", module_class="A")
    assert not inside(module="a", function="other")


def test_a_pattern_means_ops_and_not_modules():
    """`*` reaches no module's call; a name reaches its overloads alone."""
    assert Rule("*.*", "full").matches_op("aten.mm.default")
    assert not Rule("*.*", "full").matches_op("module.call.default")
    assert Rule("aten.mm", "full").matches_op("aten.mm.out") and not Rule("aten.mm", "full").matches_op("aten.mmm.out")
    assert not Rule("aten.mm.default", "full").matches_op("aten.mm.out")


def test_a_module_of_a_larger_one_has_two_paths():
    """Its own, and that in the larger one."""
    assert Site("a", around="net").paths == ("a", "net.a") and Site("", around="net").paths == ("", "net")
    assert Site("a").paths == ("a",)


SITES = [Site("encoder.layer.0", ("lib.Layer", "lib.parts.Encoder")), Site("", ("lib.Net",), around="model")]


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({"module": "encoder.layer.*"}, ""),
        ({"module": "encoder"}, ""),
        ({"module": "encoder.layers.*"}, "no call was made in module \"encoder.layers.*\""
                                         " (did you mean 'encoder.layer.*'?)"),
        ({"module": "encoder.layer.00"}, "no call was made in module \"encoder.layer.00\""
                                         " (did you mean 'encoder.layer.0'?)"),
        ({"module": "modell"}, "no call was made in module \"modell\" (did you mean 'model'?)"),
        ({"module": "zzz"}, 'no call was made in module "zzz"'),
        ({"module": "encoder.layr"}, 'no call was made in module "encoder.layr"'
         ' (did you mean \'encoder.layer\'?)'),
        ({"module_class": "Encoders"}, "no call was made in a module of class \"Encoders\""
         " (did you mean 'Encoder'?)"),
        ({"module_class": "Layer"}, ""),
        ({"module_class": "Layers"}, "no call was made in a module of class \"Layers\" (did you mean 'Layer'?)"),
        ({"module_class": "lib.Laye"}, "no call was made in a module of class \"lib.Laye\""
                                       " (did you mean 'lib.Layer'?)"),
        ({"module": "encoder", "module_class": "Nothing"}, "no call was made in a module of class \"Nothing\""),
        ({}, ""),
    ],
)  # fmt: skip
def test_a_rule_that_matches_no_module_is_told_the_nearest_name(conditions, expected):
    """For rules about ops and about the calls of modules alike; numbers may be stars."""
    assert nearest_name(Rule("aten.mm", "full", **conditions), SITES) == expected
    assert nearest_name(Rule("module.call", "full", **conditions), SITES) == expected


def test_a_rule_about_a_module_s_call_is_met_by_what_runs_inside():
    """A call inside a module tells that the module is there."""
    rule = Rule("module.call", "full", module="encoder")
    assert nearest_name(rule, [Site("encoder.layer.0")]) == ""
    assert "no call was made" in nearest_name(rule, [Site("decoder")])


def test_a_merge_takes_settings_from_whichever_has_them():
    """The other one's first; descriptions the other way round."""
    a = Policy("a", extends=(), description="one", cache="off", unsupported="full", low="bf16", training=("bf16",),
               inner="policy")  # fmt: skip
    b = Policy("b", extends=(), description="two", cache="native", unsupported="raise", low="fp16",
               training=("fp16",), inner="native")  # fmt: skip
    empty = Policy("c", extends=())
    settings = lambda p: (p.description, p.cache, p.unsupported, p.low, p.training, p.inner)
    assert settings(a.merge(b)) == ("one", *settings(b)[1:])
    assert settings(a.merge(empty)) == settings(empty.merge(a)) == settings(a)
    with pytest.raises(PolicyError, match="would have to come below"):
        a.with_rules(Rule("aten.mm", "full")).merge(Policy("d"))
    assert empty.merge(Policy("d")).extends == ("native",)


@pytest.mark.parametrize(
    "wrong",
    [{"cache": "on"}, {"unsupported": "maybe"}, {"inner": "outer"}, {"low": "fp32"}, {"training": ("bf16", "fp64")}],
)
def test_a_setting_that_is_none_is_refused(wrong):
    """With those that there are."""
    with pytest.raises(PolicyError, match="Write one of"):
        Policy("p", **wrong)


def test_a_policy_is_found_by_its_digest_while_it_is_in_use():
    """And by nothing else that is as long."""
    policy = Policy("p", ((Rule("aten.mm", "full"),),))
    assert as_policy(policy.digest).digest == policy.digest
    with pytest.raises(PolicyError):
        as_policy("0" * 64)
    assert as_policy(None).is_native and as_policy("native") is Policy.native()
    with pytest.raises(PolicyError, match="no autocast lists"):
        as_policy("native:toaster")
    with pytest.raises(PolicyError, match="no such built-in"):
        as_policy("safe:cpu")


def test_with_rules_names_the_new_policy_once():
    """One plus, however often; a name of its own if one is given; nothing new without rules."""
    policy, rule = Policy("p"), Rule("aten.mm", "full")
    assert policy.with_rules(rule).with_rules(rule).name == "p+"
    assert policy.with_rules(rule, name="q").name == "q"
    assert policy.with_rules().layers == () and policy.with_rules([rule]).layers == ((rule,),)


def test_a_change_says_what_was_and_what_is():
    """A rule that comes, or goes, has a dash on the other side."""
    a, b = Policy("a", ((Rule("aten.mm", "full"),),)), Policy("b", ((Rule("aten.mm", "lower"),),))
    empty = Policy("c")
    assert [str(c) for c in a.diff(b)] == ["aten.mm: full -> lower"]
    (odd,) = empty.diff(Policy("d", ((Rule("aten.mm", "full", module="a:b"),),)))
    assert str(odd) == "aten.mm in a:b: - -> full"
    assert [str(c) for c in empty.diff(b)] == ["aten.mm: - -> lower"]
    assert [str(c) for c in a.diff(empty)] == ["aten.mm: full -> -"]


def test_a_finding_says_where_it_is():
    """Or that no file is known."""
    (finding,) = Policy("p", ((Rule("aten.mmm", "full"),),), ()).lint()
    assert str(finding).startswith("(no file): unknown op: aten.mmm: PyTorch has no such op")


@pytest.mark.parametrize("op", ["mm", "aten.", ".mm", ".mm.x", "", "aten", "backward.aten", "backward.aten."])
def test_an_op_is_a_namespace_and_a_name(op):
    """Both; after a direction, too."""
    with pytest.raises(PolicyError, match=r"namespace\.name") as caught:
        Rule(op, "full")
    assert caught.value.advice == f"Write aten.{op.strip('.') or 'mm'}, for example."


@pytest.mark.parametrize("action", ["lower", "full", "inside", "follow", "to(bf16)", "refuse"])
def test_a_module_s_call_takes_what_a_module_can_do(action):
    """For the whole call; of one argument only what is about single tensors."""
    assert Rule("module.call", action).action == parse_action(action)
    if action in ("inside", "refuse"):
        with pytest.raises(PolicyError, match="looks at all arguments"):
            Rule("module.call", action, argument="x")
    else:
        assert Rule("module.call", action, argument="x").argument == "x"


def test_a_rule_about_a_result_is_known_by_its_first_word():
    """Of ops and of modules' calls; to a format is exact for the latter alone."""
    assert Rule("aten.mm", "full", argument="result.1").is_about_result
    assert not Rule("aten.mm", "full", argument="results").is_about_result
    assert not Rule("aten.mm", "full").is_about_result
    assert Rule("module.call", "to(bf16)").is_exact and not Rule("module.call", "full").is_exact
    assert not Rule("aten.mm", "to(bf16)").is_exact


def test_a_rule_is_unconditional_without_any_condition():
    """One of a place is enough."""
    assert Rule("aten.mm", "full").is_unconditional
    for condition in ("module", "module_class", "function"):
        assert not Rule("aten.mm", "full", **{condition: "a"}).is_unconditional


def test_a_word_that_is_near_to_several_is_told_the_nearest():
    """One only, or none."""
    assert did_you_mean("fulll", ["full", "fuller", "lower"]) == " (did you mean 'full'?)"
    assert did_you_mean("xyz", ["full"]) == ""


def test_a_built_in_policy_is_resolved_with_what_it_extends():
    """Layers that two of them share are there once; settings come from the first that has them."""
    safe = Policy.load("safe")
    both = Policy("p", extends=("safe", "ipex")).resolve("cpu")
    assert len(both.layers) == len(set(both.layers)) > len(safe.resolve("cpu").layers)
    assert both.cache == safe.cache and both.unsupported == safe.unsupported and both.extends == ()
    assert Policy("p", extends=("safe",), cache="native").resolve("cpu").cache == "native"
    fixed = Policy("p", extends=("native:cuda",)).resolve("cpu")
    assert fixed.layers == Policy.native("cuda").layers != Policy("p").resolve("cpu").layers
    assert all(rule.torch is None for rule in both.rules)
    plain = Policy("p", extends=())
    assert plain.resolve("cpu") is plain and Policy("p").resolve("cpu") is Policy("p").resolve("cpu")


def test_a_policy_that_repairs_is_itself():
    """Another one is made once."""
    safe, native = Policy.load("safe"), Policy("p")
    assert safe.repairing() is safe and native.repairing().unsupported == "full"
    assert native.repairing() is native.repairing()


def test_each_setting_is_part_of_a_digest():
    """Whichever value it has; names and reasons are of the wording alone."""
    digests = {
        Policy("p", **{key: value}).digest
        for key, values in {
            "cache": (None, "off", "native"), "unsupported": ("full", "raise"), "low": ("bf16", "fp16"),
            "inner": ("policy", "native"), "training": (("bf16",), ("fp16",)), "extends": ((), ("safe",)),
        }.items()
        for value in values
    }  # fmt: skip
    assert len(digests) == 13
    plain, said = Rule("aten.mm", "full"), Rule("aten.mm", "full", reason="r")
    worded = [Policy("p"), Policy("q"), Policy("p", description="d")]
    worded += [Policy("p", ((rule,),)) for rule in (plain, said)]
    assert len({p.wording for p in worded}) == 5 and len({p.digest for p in worded}) == 2


def test_a_policy_is_taken_as_itself():
    """A name with two colons is none; a resolved one has what it extends."""
    policy = Policy("p")
    assert as_policy(policy) is policy
    with pytest.raises(PolicyError, match="no autocast lists are known"):
        as_policy("native:cuda:0")
    assert Policy.safe("cpu").extends == () and Policy.safe().extends == ("native",)
    for builtin in (Policy.safe(), Policy.native("cpu"), Policy.safe("cpu")):
        assert len(Policy.parse(builtin.to_toml()).rules) == len(builtin.rules)


def test_duplicates_are_named_with_their_place():
    """Whatever is in it."""
    with pytest.raises(PolicyError, match=r"duplicate rows about aten\.mm in a:b"):
        Policy("p", ((Rule("aten.mm", "full", module="a:b"),) * 2,))


def test_without_torch_a_version_is_assumed(monkeypatch):
    """The one that Narrowcast is developed on."""

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert installed_torch.__wrapped__() == "2.13.0"


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        (lambda: Rule("aten.linear", fp16), 'Write Rule("aten.linear", "full"), for example; "to(fp16)"'),
        (lambda: Rule("aten.linear", "full", module=Policy("p")), 'Write module="encoder.layer.3"'),
        (lambda: Rule("aten.linear", "full", module_class=Policy), 'Write module_class="Policy"'),
        (lambda: Rule("aten.linear", "full", function=test_a_finding_says_where_it_is), 'Write function="test_a_find'),
        (lambda: Rule("aten::linear", "full"), "Write aten.linear, for example."),
        (lambda: Rule("backward.module.call", "full"), "Write module.call, or name an op"),
        (lambda: Policy("p").with_rules("aten.linear"), "Write with_rules(nc.Rule("),
        (lambda: Policy("p").with_rules([1]), "Write with_rules(nc.Rule("),
        (lambda: Policy("p").merge("safe"), 'Write merge(Policy.load("safe"))'),
    ],
    ids=["format", "module", "class", "function", "::", "module call", "text", "number", "name"],
)
def test_what_is_given_as_an_object_is_refused_with_what_to_write(wrong, advice):
    """Where the user gives it: it failed later, in the first call."""
    with pytest.raises(PolicyError) as caught:
        wrong()
    assert advice in caught.value.advice
