"""The TOML form: comments kept, errors with file and line."""

from dataclasses import replace
from pathlib import Path

import pytest

from narrowcast.errors import PolicyConflictError, PolicyError, UnknownOpError
from narrowcast.policy import Policy, Rule, lint_policy

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
        ('extends = "native"', 'cache = "sometimes"', PolicyError, 3, "no such cache"),
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
    kinds = {finding.kind: finding for finding in lint_policy(policy)}
    assert set(kinds) == {"never matches", "changes nothing", "overlap"}
    assert "aten.gelu in a" in kinds["never matches"].message
    assert lint_policy(Policy.safe()) == ()


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
        == """name = "p"
description = "about"
extends = ["native", "safe"]
cache = "off"
unsupported = "full"
low = "bf16"
training = ["bf16", "fp16"]
inner = "policy"
[[rule]]
op = "aten.mm"
action = "to(fp16)"
module = ""
class = "A"
function = "f"
argument = "x"
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
    assert Policy("q", extends=()).to_toml() == 'name = "q"\nextends = "nothing"\n'


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
