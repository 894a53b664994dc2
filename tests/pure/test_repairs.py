"""The search for the rules that repair a policy: which, how few, in how many runs. Nothing runs here."""

import json
import math

import pytest

from narrowcast.analysis.compare.rules import rule_about, rule_about_result
from narrowcast.analysis.repair.rules import folded, rule_about_module, with_repairs
from narrowcast.analysis.repair.search import Dropping, choose, may_run
from narrowcast.core.policy import MODULE_CALL, Kind, Policy, Rule
from narrowcast.reports.results.repair import ERROR, RAISED, Matmuls, Repair, RepairRule, RepairStep
from narrowcast.reports.results.verdicts import BEYOND, CLEAN, OUT_OF_IDEAS, REPAIRED

LINEAR = "aten.linear.default"


class TestRules:
    """What a repair may add."""

    def test_name_an_op_in_a_module_and_at_the_root_the_op_alone(self):
        """At the root, a rule about an op names no module; one about the root module's own call does."""
        assert str(rule_about(LINEAR, "layer.3")) == "aten.linear.default in layer.3: full"
        assert rule_about(LINEAR, "").module is None
        assert str(rule_about("aten.add.Tensor", "a", Kind.ALIGN)) == "aten.add.Tensor in a: align"
        assert str(rule_about_result(MODULE_CALL, "")).startswith("module.call argument result in the root module")
        assert rule_about_result(LINEAR, "").module is None and rule_about_module("a").is_module_call

    def test_are_a_layer_of_their_own_over_a_user_s_policy(self):
        """The user's layers stay below as they are, comments included, and TOML restores the whole policy."""
        mine = Policy.parse('name = "mine"\n[[rule]]\nop = "aten.gelu"\naction = "full"  # because\n')
        fixed = with_repairs(mine, (rule_about(LINEAR, "a"),))
        assert fixed.layers == (*mine.layers, (rule_about(LINEAR, "a"),)) and "# because" in fixed.to_toml()
        assert Policy.parse(fixed.to_toml()) == fixed

    @pytest.mark.parametrize("name", ["native", "safe", "ipex"])
    def test_extend_a_built_in_policy_by_name(self, name):
        """The policy names the built-in that it extends in place of a copy of its rules."""
        fixed = with_repairs(Policy.load(name), (rule_about(LINEAR, "a"),))
        assert fixed.extends == (name,) and fixed.rules == (rule_about(LINEAR, "a"),)
        assert Policy.parse(fixed.to_toml()) == fixed

    def test_none_leaves_the_policy(self):
        """Without repairs the very same policy object is returned."""
        assert with_repairs(Policy.native(), ()) is Policy.native()

    def test_are_folded_where_all_inside_a_module_are_chosen(self):
        """Two of two calls in `a` fold, one of two in `b` does not, and all four fold into a rule for the op."""
        known = [rule_about(LINEAR, path) for path in ("a.0", "a.1", "b.0", "b.1")]
        found = folded([known[1], known[2], known[0]], known)
        assert {str(r): len(c) for r, c in found.items()} == {
            "aten.linear.default in a: full": 2, "aten.linear.default in b.0: full": 1}  # fmt: skip
        assert list(folded(known, known)) == [rule_about(LINEAR, "")]

    def test_are_not_folded_over_another_op_or_a_name_that_begins_alike(self):
        """Neither another op in module `a` nor a module called `ab` turns a single rule into a group."""
        known = [rule_about(LINEAR, "a.0"), rule_about("aten.mm.default", "a.1"), rule_about(LINEAR, "ab.0")]
        assert list(folded(known[:1], known)) == [rule_about(LINEAR, "a.0")]


class TestChoose:
    """The fewest, the most worthy first."""

    def test_takes_no_more_than_the_error_asks_for(self):
        """Worth is a part of the squared error: rules are taken until what is left is small enough."""
        worth = {"a": 64.0, "b": 16.0, "c": 16.0, "d": 4.0}
        assert choose(worth, 0.7) == ["a"]
        assert choose(worth, 0.5) == ["a", "b"]
        assert choose(worth, 0.0) == ["a", "b", "c", "d"]

    def test_takes_first_what_has_no_value_and_never_what_is_worth_nothing(self):
        """NaN and infinity come before any number, and zero is left out even where no error is allowed."""
        assert choose({"a": 1.0, "b": math.inf, "c": math.nan}, 0.99) == ["b", "c", "a"]
        assert choose({"a": 0.0}, 0.0) == [] and choose({}, 0.5) == []


def dropping(needed, runs=2, **options):
    """Dropping in which those rules are needed; and the sets that were tried."""
    tried = []

    def clean(rules):
        tried.append(rules)
        missing = sorted(needed - set(rules))
        return not missing, f"without {missing}"

    return Dropping(clean, lambda: runs + len(tried), **options), tried


class TestDrop:
    """What turns out not to be needed."""

    def test_leaves_out_what_is_not_needed_the_lightest_first_in_growing_groups(self):
        """Groups double in size while the run stays clean, so that six rules are dropped in five runs."""
        found, tried = dropping({"g"})
        worth = {rule: float(n) for n, rule in enumerate("abcdefg")}
        assert found.run(tuple("abcdefg"), worth) == ("g",)
        assert found.dropped == list("abcdef") and len(tried) == 5 and found.needed == {"g": "without ['g']"}

    def test_halves_a_group_of_which_one_is_needed(self):
        """A group that cannot be dropped is split until the one rule that matters is alone."""
        found, _ = dropping({"c"}, runs=0)
        assert found.run(tuple("abcd"), dict.fromkeys("abcd", 1.0)) == ("c",)
        assert sorted(found.dropped) == ["a", "b", "d"]

    def test_asks_nothing_that_is_known(self):
        """A set that has failed already is not run again, and what was wrong then is kept as the reason."""
        found, tried = dropping({"a", "b"}, wrong=[(frozenset("a"), "before b was there"), (frozenset(), "")])
        assert found.run(("a", "b"), {"a": 2.0, "b": 1.0}) == ("a", "b")
        assert found.needed["b"] == "before b was there" and tried == [("b",)]

    def test_of_ranked_rules_the_heavier_ones_are_needed_if_a_lighter_one_is(self):
        """One failed run without the lightest of three settles the other two as well."""
        found, tried = dropping(set("abc"), ranked=frozenset("abc"))
        assert found.run(tuple("abc"), {"a": 3.0, "b": 2.0, "c": 1.0}) == ("a", "b", "c")
        assert tried == [("a", "b")] and set(found.needed) == set("abc")

    @pytest.mark.parametrize("runs", [2, 4, 5, 7, 9, 12])
    @pytest.mark.parametrize("needed", ["", "a", "ce", "abcdef"])
    def test_keeps_the_bound_whatever_is_needed(self, runs, needed):
        """Twice for each rule that is left, and five beside; or as often as before."""
        found, tried = dropping(set(needed), runs)
        left = found.run(tuple("abcdef"), {rule: float(n) for n, rule in enumerate("abcdef")})
        assert set(needed) <= set(left) and set(left) | set(found.dropped) == set("abcdef")
        assert runs + len(tried) <= max(runs, 2 * len(left) + 5)
        assert set(found.untried) <= set(left)

    def test_the_bound_is_two_for_each_rule_and_five_beside(self):
        """With no rule left the fifth run is the last, and with one rule the seventh."""
        assert may_run(4, 0) and not may_run(5, 0) and may_run(6, 1) and not may_run(7, 1)


def repaired(rules=2, verdict=REPAIRED, **options):
    """A repair with rules of long paths and reasons."""
    found = Repair(
        "model", "cpu", "bf16", "native", Policy.native(), "it runs", verdict,
        [RepairRule(rule_about(LINEAR, f"{'encoder.layer.' * 3}{n}", reason="why " * 40), ERROR, 0.5, 3, 1e3 * n, "off")
         for n in range(rules)], **options)  # fmt: skip
    found.policy = with_repairs(found.policy, tuple(rule.rule for rule in found.rules))
    return found


class TestResult:
    """What is shown, and saved."""

    @pytest.mark.parametrize("verdict", [CLEAN, REPAIRED, OUT_OF_IDEAS, BEYOND])
    @pytest.mark.parametrize("rules", [0, 1, 3, 40])
    def test_the_first_screen_has_25_lines_at_most(self, verdict, rules):
        """Long errors, notes and forty rules are cut to 80 columns, lines to copy are not, and the verdict is kept."""
        found = repaired(
            rules, verdict, before=RepairStep("", "raises " + "long " * 30), dropped=["a"], untried=["b", "c"],
            notes=["a note of some length " * 5] * 5)  # fmt: skip
        text = str(found)
        lines = text.splitlines()  # a rule to copy stays whole
        assert len(lines) <= 25 and max(len(line) for line in lines if not line.startswith("reason = ")) <= 80
        assert f"VERDICT: {verdict.capitalize()}" in text and len(found.to_text(every=True)) >= len(text)

    def test_the_figures_are_those_of_the_runs(self):
        """Errors, metrics and counts of products are given before and after the repair, with fp32's metric beside."""
        found = repaired(
            1, before=RepairStep("", "off", error=0.1, metric={"auc": 0.5}), after=RepairStep("", "", error=0.001),
            reference={"auc": 0.75}, matmuls_before=Matmuls(4, 4), matmuls_after=Matmuls(3, 4), runs=4)  # fmt: skip
        text = " ".join(str(found).split())
        assert "off (output error 1.0e-01; auc 0.5, fp32 0.75); with 1 rule, what was asked for holds (output" in text
        assert "holds (output error 1.0e-03)" in text
        assert "still in bf16 3 of 4 matrix multiplications; before: 4" in text and "runs 4 of the model" in text
        assert "share 50%" in text

    def test_a_saved_one_says_the_same(self, tmp_path):
        """JSON restores the policy, the steps and the reasons of rules, infinite errors included."""
        found = repaired(
            2, steps=[RepairStep("in fp32", "clean", ("a",), ("b",), math.inf, {"auc": 0.5})], runs=6, dropped=["x"],
            notes=["n"], environment={"torch": "2"})  # fmt: skip
        again = Repair.of_data(json.loads(found.to_json()))
        assert str(again) == str(found) and again.policy == found.policy and again.steps == found.steps
        assert again.rules == found.rules and again.rules[0].rule.reason == found.rules[0].rule.reason
        assert again.to_json() == found.to_json()

    def test_a_rule_without_a_price_says_so_in_json_as_text(self):
        """JSON has no number for NaN, so the price is written as text and read back as NaN."""
        found = Repair("m", "cpu", "bf16", "native", Policy.native(),
                       rules=[RepairRule(Rule(MODULE_CALL, "full", module=""), RAISED, 1.0)])  # fmt: skip
        assert json.loads(found.to_json())["rules"][0]["cost_ns"] == "nan"
        assert math.isnan(Repair.of_data(json.loads(found.to_json())).rules[0].cost_ns)
