"""The TOML form: comments kept, errors with file and line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import narrowcast
from narrowcast.core.policy import Policy, Rule
from narrowcast.core.policy.known_ops import declared_ops, in_range, listed_ops, unknown_op
from narrowcast.core.policy.text import SCHEMA
from narrowcast.errors import Origin, PolicyConflictError, PolicyError, UnknownOpError, first_line

TEXT = """\
# Our training policy.
name = "train"
extends = "native"

[[rule]]
op = "aten.softmax"  # attention
action = "lower"
reason = "measured: no loss"

[[rule]]
op = [
    "aten.gelu.default",
    "aten.silu.default",
]
action = "full"
module = "encoder.layer.3.*"
"""


def test_a_policy_is_read_with_the_line_of_each_rule():
    """Also of each op in a list."""
    policy = Policy.parse(TEXT, "train.toml")
    assert policy.name == "train"
    assert [str(rule.origin) for rule in policy.rules] == ["train.toml:6", "train.toml:12", "train.toml:13"]


def test_saving_keeps_comments_and_adds_new_rules_as_a_layer(tmp_path):
    """What a person wrote stays as it was written."""
    policy = Policy.parse(TEXT).with_rules(Rule("aten.mm", "full"), name="train")
    file = tmp_path / "train.toml"
    policy.save(file)
    text = file.read_text()
    assert text.startswith(TEXT.rstrip())
    assert Policy.load(file) == policy
    assert len(Policy.load(file).layers) == 2


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    """Files are replaced at once, or not at all."""
    file = tmp_path / "train.toml"
    file.write_text(TEXT)
    monkeypatch.setattr(Path, "replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        Policy.native().save(file)
    assert file.read_text() == TEXT
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("old", "new", "error", "line", "said"),
    [
        ('"aten.softmax"', '"aten.sofmax"', UnknownOpError, 6, "did you mean 'aten.softmax'"),
        ('"aten.silu.default"', '"aten.silu.defalt"', UnknownOpError, 13, "no such op"),
        ('"lower"', '"lowr"', PolicyError, 7, "did you mean 'lower'"),
        ("module =", "modul =", PolicyError, 16, "did you mean 'module'"),
        ('extends = "native"', 'extends = "nativ"', PolicyError, 3, "no such built-in"),
        ('extends = "native"', 'extends = "native:tpu"', PolicyError, 3, "no autocast lists"),
        ('action = "full"', "action = 3", PolicyError, 15, "type int"),
        ('action = "full"\n', "", PolicyError, 10, "has no action"),
        ('action = "full"', 'action = "to(fp5)"', ValueError, 15, "no such format"),
        ('action = "full"', "action = ", PolicyError, 15, "not TOML"),
        ('extends = "native"', 'cache = "sometimes"', PolicyError, 3, "not a choice"),
        ('extends = "native"', "extends = [5]", PolicyError, 3, "strings"),
        ('extends = "native"', "extends = []", PolicyError, 3, "an empty list"),
        ('module = "encoder', 'torch = "newer"\nmodule = "encoder', PolicyError, 12, "no version range"),
        ('name = "train"', "layer = [1]", PolicyError, 2, "tables"),
        ('name = "train"', 'nam = "train"', PolicyError, 2, "did you mean 'name'"),
        ('"aten.softmax"  # attention', '"softmax"', PolicyError, 6, "namespace"),
    ],
)
def test_bad_text_is_refused_with_file_and_line(old, new, error, line, said):
    """Four parts: asked, found, where, what to do."""
    assert old in TEXT
    with pytest.raises(error) as caught:
        Policy.parse(TEXT.replace(old, new, 1), "train.toml")
    message = str(caught.value)
    assert f"train.toml:{line}" in message, message
    assert said in message
    assert len(message.splitlines()) >= 3, "asked and found, where, and what to do"


def test_a_contradiction_in_a_file_names_both_lines():
    """The lines, not only the op."""
    text = TEXT + '\n[[rule]]\nop = "aten.softmax"\naction = "full"\n'
    with pytest.raises(PolicyConflictError) as caught:
        Policy.parse(text, "train.toml")
    assert "train.toml:19" in str(caught.value) and "train.toml:6" in str(caught.value)


def test_a_multi_line_string_does_not_shift_the_lines():
    """A [[rule]] inside a string is no rule."""
    text = 'name = "x"\ndescription = """\n[[rule]]\n"""\n[[rule]]\nop = "aten.mm"\naction = "lowr"\n'
    with pytest.raises(PolicyError, match=r"p\.toml:7"):
        Policy.parse(text, "p.toml")


def test_a_file_may_extend_a_file(tmp_path):
    """Paths start at the file's folder."""
    (tmp_path / "base.toml").write_text(
        'name = "base"\nextends = "native"\n[[rule]]\nop = "aten.gelu"\naction = "full"\n'
    )
    (tmp_path / "top.toml").write_text(
        'name = "top"\nextends = "base.toml"\n[[rule]]\nop = "aten.gelu"\naction = "lower"\n'
    )
    top = Policy.load(tmp_path / "top.toml")
    assert top.extends == ("native",)
    assert [str(r.action) for r in top.rules] == ["full", "lower"]
    assert Policy.parse(top.to_toml()) == top


def test_rules_written_inline_have_the_line_of_their_list():
    """There are no headers to find them by."""
    with pytest.raises(PolicyError, match=r"p\.toml:2"):
        Policy.parse('name = "x"\nrule = [{op = "aten.mm", action = "ful"}]\n', "p.toml")


def test_files_that_extend_each_other_in_a_circle_are_refused(tmp_path):
    """With the files on the way."""
    (tmp_path / "a.toml").write_text('extends = "b.toml"\n')
    (tmp_path / "b.toml").write_text('extends = "a.toml"\n')
    with pytest.raises(PolicyError, match="extends itself"):
        Policy.load(tmp_path / "a.toml")


def test_a_missing_file_is_a_policy_error(tmp_path):
    """With its path."""
    with pytest.raises(PolicyError, match=r"nothing\.toml"):
        Policy.load(tmp_path / "nothing.toml")


def test_lint_finds_what_is_legal_and_probably_a_mistake():
    """Rules that never match, that change nothing, that overlap."""
    policy = Policy(
        "p",
        (
            (
                Rule("aten.gelu", "full", module="a"),
                Rule("aten.mm.default", "lower"),
                Rule("aten.silu", "full", module="en*"),
                Rule("aten.silu", "lower", module="*er"),
            ),
            (Rule("aten.gelu", "lower"),),
        ),
        extends=("native",),
    )
    kinds = {finding.kind: finding for finding in policy.lint()}
    assert set(kinds) == {"never matches", "changes nothing", "overlap"}
    assert "aten.gelu in a" in kinds["never matches"].message
    assert Policy.safe().lint() == ()


def test_unknown_ops_of_other_libraries_are_not_judged_here():
    """Only the dispatcher knows them."""
    assert Policy.parse('[[rule]]\nop = "mylib.roi_pool"\naction = "full"\n').rules[0].op == "mylib.roi_pool"


def test_a_policy_made_in_python_is_printed_in_full():
    """Whatever it says, and nothing that it does not say."""
    rule = Rule("aten.mm", "to(fp16)", module="", module_class="A", function="f", argument="x", reason="why",
                source="who", override=True, torch=">=2.11")  # fmt: skip
    policy = Policy("p", ((rule,), (Rule("aten.relu", "full"),)), ("native", "safe"), "about", "off", "full", "bf16",
                    ("bf16", "fp16"), "policy")  # fmt: skip
    text = policy.to_toml()
    assert (
        text.replace("\n\n", "\n")
        == """schema = "narrowcast.policy/1"
name = "p"
description = "about"
extends = ["native", "safe"]
cache = "off"
unsupported = "full"
low = "bf16"
training = ["bf16", "fp16"]
inner = "policy"
[[rule]]
op = "aten.mm"
module = ""
class = "A"
function = "f"
argument = "x"
action = "to(fp16)"
torch = ">=2.11"
override = true
reason = "why"
source = "who"
[[layer]]
[[layer.rule]]
op = "aten.relu"
action = "full"
"""
    )
    assert Policy.parse(text) == policy
    assert Policy("q", extends=()).to_toml() == 'schema = "narrowcast.policy/1"\nname = "q"\nextends = "nothing"\n'


def test_a_changed_policy_keeps_the_comments_of_what_did_not_change():
    """Also behind a name or a setting; rules that come to a text without any are its own."""
    text = 'name = "a"  # mine\ncache = "off"  # costs\n'
    policy = Policy.parse(text)
    assert policy.to_toml() == text
    renamed = replace(policy, name="b").to_toml()
    assert renamed.startswith('name = "b"') and renamed.endswith('cache = "off"  # costs\n')
    more = policy.with_rules(Rule("aten.mm", "full"), name="a").to_toml()
    assert more.startswith(text) and "[[rule]]" in more and "layer" not in more
    layered = text + '[[layer]]\n[[layer.rule]]\nop = "aten.mm"\naction = "full"\n'
    twice = Policy.parse(layered).with_rules(Rule("aten.relu", "full"), name="a")
    assert twice.to_toml().startswith(layered) and twice.to_toml().count("[[layer]]") == 2
    assert Policy.parse(twice.to_toml()) == twice


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    """The system's words, or the decoder's."""
    file = tmp_path / "bad.toml"
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(PolicyError, match="codec can't decode"):
        Policy.load(file)
    with pytest.raises(PolicyError, match="No such file"):
        Policy.load(tmp_path / "none.toml")


def found(*rules, extends=()):
    return [(f.kind, str(f.rule)) for f in Policy("p", (rules,), extends).lint()]


def test_lint_goes_on_after_what_it_finds():
    """Each rule by itself; the error says where the stronger one stands, or that no file is known."""
    unknown, weak = Rule("aten.mmm", "full"), Rule("aten.mm", "lower", override=True)
    assert found(unknown, Rule("aten.mmmm", "full")) == [
        ("unknown op", "aten.mmm: full"), ("unknown op", "aten.mmmm: full"),
    ]  # fmt: skip
    for origin, where in ((None, "no file"), (Origin("my.toml", 3), "my.toml:3")):
        strong = replace(weak, op="aten.mm.default", action="full", origin=origin)
        never, other = Policy("p", ((Rule("aten.mm.default", "lower"),), (strong,)), ()), "(no file): never matches: "
        (finding,) = never.lint()
        assert str(finding) == f"{other}aten.mm.default: lower can never apply: {strong} ({where}) always comes first"


@pytest.mark.parametrize("op", ["backward.aten.mm", "dgrad.aten.mm.default", "wgrad.aten.*"])
def test_lint_knows_rules_about_the_backward(op):
    """They win over rules about the backward alone."""
    weak, strong = Rule(op, "lower"), Rule(op, "full")
    assert found(weak, extends=("native",)) == found(weak, Rule("aten.mm", "full")) == []
    (finding,) = Policy("p", ((weak,), (strong,)), ()).lint()
    assert (finding.kind, finding.rule) == ("never matches", weak)


def test_lint_knows_rules_about_modules_and_other_libraries():
    """Also where nothing lists their ops."""
    for op in ("module.call", "lib.op.default", "lib.op"):
        weak, strong = Rule(op, "lower"), Rule(op, "full")
        (finding,) = Policy("p", ((weak,), (strong,)), ()).lint()
        assert (finding.kind, finding.rule) == ("never matches", weak)
        assert found(weak) == []
        assert found(weak, extends=("native",)) == []


def test_lint_finds_what_a_base_says_anyway():
    """On every device, for every op of a pattern; not for an argument, a place, or another action."""
    assert found(Rule("aten.mm.default", "lower"), extends=("native",)) == [
        ("changes nothing", "aten.mm.default: lower")
    ]
    assert found(Rule("aten.mm.default", "lower")) == []
    for rule in (
        Rule("aten.mm.default", "full"), Rule("aten.mm.default", "lower", module="a"), Rule("aten.relu", "lower"),
        Rule("aten.mm.default", "lower", argument="self"), Rule("aten.mm.default", "refuse"), Rule("aten.*", "lower"),
    ):  # fmt: skip
        assert found(rule, extends=("native",)) == [], rule
    base = Rule("aten.binary_cross_entropy", "refuse")
    assert ("changes nothing", str(base)) not in found(base, extends=("native:cuda",))


def test_lint_finds_overlaps_that_order_decides():
    """Equally specific rules about places that may both hold; fixed paths that differ are apart."""

    def overlap(a, b, **second):
        rules = Rule("aten.mm", "full", **a), Rule("aten.mm", second.pop("action", "lower"), **b, **second)
        return [f.message for f in Policy("p", (rules,), ()).lint()]

    assert overlap({"module": "a.b"}, {"module": "a.c"}) == []
    assert len(overlap({"module": "a.*"}, {"module": "*.b"})) == 1
    assert len(overlap({"module": "a?"}, {"module": "ab", "module_class": None})) == 0
    assert len(overlap({"function": "f"}, {"function": "g"})) == 1
    assert len(overlap({"module": "a", "function": "f"}, {"module": "a", "function": "g"})) == 1
    assert overlap({"module": "a", "function": "f"}, {"module": "b", "function": "f"}) == []
    assert overlap({"function": "f"}, {"function": "g"}, action="full") == []
    assert overlap({"function": "f"}, {"function": "g"}, override=True) == []
    (message,) = overlap({"function": "f", "origin": Origin("my.toml", 3)}, {"function": "g"})
    assert "(my.toml:3)" in message
    assert "(no file)" in overlap({"function": "f"}, {"function": "g"})[0]


NO_OP = "PyTorch has no such op"


@pytest.mark.parametrize(
    ("op", "said"),
    [
        ("aten.mmm", f"{NO_OP} (did you mean 'aten.mm'?)"), ("aten.zzzzzzzzzzzz", NO_OP), ("aten.mm", None),
        ("aten.mm.defaul", f"{NO_OP} (did you mean 'aten.mm.default'?)"), ("aten.mm.default", None),
        ("aten.[m]m.*", None), ("aten.m?.*", None), ("aten.mm*", None), ("lib.mmm", None), ("backward.aten.mm", None),
        ("backward.aten.mmm", f"{NO_OP} (did you mean 'aten.mm'?)"),
        ("aten.*softmax", "PyTorch has no op that it matches (did you mean 'aten.*softmax*'?)"),
    ],
)  # fmt: skip
def test_an_unknown_op_is_told_the_nearest(op, said):
    """Overloads for overloads, ops for ops; other libraries are not judged, nor rules for some torch."""
    assert unknown_op(Rule(op, "full")) == said
    assert unknown_op(Rule(op, "full", torch=">=2.11")) is None


@pytest.mark.parametrize("op", ["aten.zz?", "aten.zz*", "aten.zz[ab]", "aten.zz?*", "aten.zz.*"])
def test_a_pattern_that_names_no_op_is_unknown(op):
    """Whichever wildcards it has."""
    assert unknown_op(Rule(op, "full")) is not None


def test_ops_are_those_that_torch_declares_and_those_that_are_listed():
    """Also the overloads that it generates; by version, where an op came or went."""
    declared, listed = declared_ops(), {v: listed_ops(v) for v in ("2.11.0", "2.13.0", "2.15.0")}
    assert {"aten.mm.default", "aten.mm.out", "aten.rms_norm.default"} <= declared
    assert {"aten.mul.Tensor", "aten.abs.out"} <= declared and not any(op.count(".") != 2 for op in declared)
    assert "aten.zeros_like.out" in declared and "aten.ones_like.out" in declared  # generated ones
    assert all("aten.mm.default" in ops for ops in listed.values())
    assert listed["2.11.0"] != listed["2.15.0"]
    lines = (
        (Path(narrowcast.__file__).parent / "core/policy/builtin/aten_ops.txt").read_text(encoding="utf-8").splitlines()
    )
    assert all(lines[1].split()[0] in ops for ops in listed.values()) and len(listed["2.13.0"]) > 0.9 * len(lines)


def test_a_version_is_in_a_range_whatever_its_build():
    """Of a release that is still to come, too."""
    assert in_range(">=2.12", "2.13.0+cpu") and not in_range(">=2.14", "2.13.0+cpu")
    assert in_range(">=2.12", "2.13.0.dev20260101") and in_range("", "2.13.0")


def test_a_contradiction_in_python_names_no_line():
    """`rule` represents both; the subject is what both are about."""
    with pytest.raises(PolicyConflictError, match=r"disagree about aten\.mm in a\b") as caught:
        Policy("p", ((Rule("aten.mm", "full", module="a"), Rule("aten.mm", "to(bf16)", module="a")),))
    assert [(o.file, o.line) for o in caught.value.where] == [("rule", 0), ("rule", 0)]


def test_a_changed_setting_is_written_and_others_are_left():
    """Lists, too."""
    text = 'name = "a"\ncache = "off"\ntraining = ["bf16"]  # mine\n'
    changed = replace(Policy.parse(text), cache="native", low="fp16").to_toml()
    assert 'cache = "native"' in changed and 'training = ["bf16"]  # mine' in changed and 'low = "fp16"' in changed


def test_without_torch_nothing_is_declared(monkeypatch):
    """The list that comes with Narrowcast is all there is then."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert declared_ops.__wrapped__() == frozenset()


LAYERS = """[[rule]]
op = "aten.mm"
action = "full"
[[layer]]
[[layer.rule]]
op = "aten.add"
action = "full"
[[layer.rule]]
action = "full"
op = 'aten.relu'
[[layer]]
[[layer.rule]]
op = ["aten.exp", "aten.mul"]
action = "full"
[[layer]]
[[layer.rule]]
reason = "not aten.sub"
op = "aten.sub"
action = "full"
"""


def test_rules_of_layers_have_their_lines():
    """Each layer's rows follow those of the layers before it; quotes may be single ones."""
    assert [r.origin.line for r in Policy.parse(LAYERS, "x.toml").rules] == [2, 6, 10, 13, 13, 18]


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('name = "a"\n\nlow = "bf16', 3, "not TOML"), ('name = "a"\nlow = = 3\n', 2, "not TOML"),
        ('[[rule]]\nop = []\naction = "full"\n', 2, "an empty list"),
        ('[[rule]]\nop = [3]\naction = "full"\n', 2, "a list of other things than strings"),
        ('[[rule]]\nop = 3\naction = "full"\n', 2, "Give a value of type str or list"),
        ('name = 3\n', 1, "Give a value of type str."), ("rule = [3]\n", 1, "a list of other things than tables"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_value_is_said_with_its_line(text, line, said):
    """Also where the text ends too early."""
    with pytest.raises(PolicyError) as caught:
        Policy.parse(text, "x.toml")
    assert said in str(caught.value) and caught.value.where[0].line == line


def test_a_policy_over_a_file_is_printed_with_its_rules(tmp_path):
    """It stands by itself then."""
    (tmp_path / "base.toml").write_text('[[rule]]\nop = "aten.mm"\naction = "full"\n')
    (tmp_path / "top.toml").write_text('extends = "base.toml"\n[[rule]]\nop = "aten.relu"\naction = "full"\n')
    policy = Policy.load(tmp_path / "top.toml")
    assert Policy.parse(policy.to_toml()) == policy and len(policy.rules) == 2


def test_a_built_in_policy_is_printed_whole():
    """It has no text of its own any more: all its layers are written, and read as the same policy."""
    for name in ("safe", "native:cpu"):
        built_in = Policy.load(name)
        assert Policy.parse(built_in.to_toml()) == built_in


@pytest.mark.parametrize(
    ("schema", "advice"),
    [
        ("narrowcast.policy/2", "Read it with the release that wrote it"),
        ("narrowcast.run/2", "or omit it"),
        (3, "or omit it"),
    ],
)
def test_another_schema_is_refused_before_its_keys(schema, advice):
    """With the line; a newer file may have keys that nobody knows yet."""
    text = f'name = "p"\nschema = {json.dumps(schema)}\nnovelty = 1\n'
    with pytest.raises(PolicyError, match=advice) as raised:
        Policy.parse(text, "p.toml")
    assert str(raised.value.where[0]) == "p.toml:2"


def test_a_policy_without_a_schema_is_of_this_one():
    """What is written names it, and is read again."""
    policy = Policy.parse('[[rule]]\nop = "aten.mm"\naction = "full"\n', "p.toml")
    written = Policy("p", policy.layers).to_toml()
    assert written.startswith(f'schema = "{SCHEMA}"') and Policy.parse(written, "p.toml").layers == policy.layers


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("two\nlines"), "ValueError: two"),
        (AssertionError(), "AssertionError"),
        (RuntimeError(" \n"), "RuntimeError"),
        (KeyError("x" * 300), "KeyError: " + repr("x" * 300)[:160]),
    ],
)
def test_the_first_line_of_an_error_may_be_empty(error, expected):
    """`assert` without a message, kernels without one."""
    assert first_line(error) == expected
