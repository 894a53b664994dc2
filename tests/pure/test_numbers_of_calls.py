"""Rules about the n-th call of an op: as data, decided, refused, in programs' text and in ledgers."""

import itertools
import sys
from pathlib import Path

import pytest

import narrowcast as nc
from narrowcast.core.decide import Argument, Call, Region, decide
from narrowcast.core.ledger import CallKind, Cast
from narrowcast.core.policy import Policy, Rule, Site, find_allowance
from narrowcast.core.policy.table import RuleTable
from narrowcast.core.refusals import check_counted
from narrowcast.errors import Origin, PolicyError, RefusedError
from narrowcast.formats import bf16, fp32
from narrowcast.programs.passes import BEFORE_AUTOGRAD, run_passes
from narrowcast.programs.program import print_program
from narrowcast.reports.results.ledger import Ledger
from narrowcast.reports.results.saved import parse

sys.path.insert(0, str(Path(__file__).parent))
from program_text import parse_program

MM = "aten.mm.default"
LOW = Region("cpu", bf16)
IN_A, IN_B = Site("a", file="model.py", line=3), Site("b")


def policy(*rules):
    return Policy("p", extends=("native:cpu",)).with_rules(rules).resolve("cpu")


def formats(number, site, *rules):
    call = Call(MM, (Argument("self", fp32), Argument("mat2", fp32)), site, number=number)
    return decide(call, policy(*rules), LOW).formats


def test_only_the_call_of_that_number_is_decided():
    """Nobody's number, 0, is no rule's; and the place counts, too."""
    rule = Rule("aten.mm", "full", call=2)
    low, full = (bf16, bf16), (None, None)
    assert [formats(n, IN_A, rule) for n in (0, 1, 2, 3)] == [low, low, full, low]
    there = Rule("aten.mm", "full", module="a", call=2)
    assert formats(2, IN_A, there) == full and formats(2, IN_B, there) == formats(1, IN_A, there) == low
    assert rule.matches_call(IN_B, 2) and not rule.matches_call(IN_B, 1) and rule.matches_site(IN_B)
    assert Rule("aten.mm", "full").matches_call(IN_A, 0) and not there.matches_call(IN_B, 2)


def test_an_argument_of_one_call():
    """With both an argument and a number, only that argument of that call is kept out of the low format."""
    one = Rule("aten.mm", "full", argument="mat2", call=2)
    assert formats(2, IN_A, one) == (bf16, None) and formats(1, IN_A, one) == (bf16, bf16)


def test_a_call_that_says_nothing_has_no_number():
    """The default is zero, which no rule can name because calls are counted from 1."""
    assert Call(MM, ()).number == 0


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"call": 0}, "counted from 1"),
        ({"call": -1}, "counted from 1"),
        ({"call": True}, "counted from 1"),
        ({"call": 1.0}, "counted from 1"),
        ({"op": "aten.m*", "call": 1}, "each op"),
        ({"op": "module.call", "call": 1}, "calls of ops"),
        ({"op": "dgrad.aten.mm", "call": 1}, "of the forward"),
    ],
)
def test_a_number_that_nobody_counts_is_refused(wrong, found):
    """Only integers from 1 on pass, and only for ops whose calls are counted; the error names the rule's line."""
    facts = {"op": "aten.mm", "action": "full", **wrong}
    with pytest.raises(PolicyError, match=found) as error:
        Rule(**facts, origin=Origin("my.toml", 4))
    assert error.value.where == (Origin("my.toml", 4),) and f"call = {wrong['call']!r}" in error.value.asked
    with pytest.raises(PolicyError) as error:
        Rule(**facts)
    assert error.value.where == () and error.value.advice


def test_the_first_call_has_a_number():
    """The smallest number that a rule accepts is 1."""
    assert Rule("aten.mm", "full", call=1).call == 1


def test_a_number_is_a_condition_between_a_function_and_the_op():
    """A numbered rule is more specific than any op and less than a function, whatever its number is."""
    one, plain = Rule("aten.mm", "full", call=2), Rule("aten.mm", "full")
    assert plain.is_unconditional and not one.is_unconditional
    assert str(one) == "aten.mm call 2: full" and str(plain) == "aten.mm: full"
    assert one.conditions == (*plain.conditions, 2) and len({one, plain, Rule("aten.mm", "full", call=3)}) == 3
    assert one.specificity > Rule(MM, "full").specificity
    assert one.specificity < Rule("aten.*", "full", function="f").specificity
    assert one.specificity == Rule("aten.mm", "full", call=7).specificity


def test_numbers_are_part_of_the_digest_and_of_the_text():
    """Rules that differ in their number alone make different policies, and TOML keeps the number."""
    made = [Policy("p").with_rules(Rule("aten.mm", "full", call=n)) for n in (None, 1, 2)]
    assert len({each.digest for each in made}) == 3
    assert [each.counts_calls for each in made] == [False, True, True]
    text = made[2].to_toml()
    assert "call = 2" in text and Policy.parse(text) == made[2] and "call" not in made[0].to_toml()


def test_two_numbers_do_not_overlap():
    """Where one of the rules has none, the later wins: lint says so."""
    apart = (Rule(MM, "full", module="a*", call=1), Rule(MM, "lower", module="b*", call=2))
    assert not [f for f in Policy("p").with_rules(apart).lint() if f.kind == "overlap"]
    alike = (Rule(MM, "full", module="a*", call=2), Rule(MM, "lower", module="b*", call=2))
    assert [f for f in Policy("p").with_rules(alike).lint() if f.kind == "overlap"]


def test_what_is_allowed_of_one_call():
    """An allowance with a number holds for that call alone, and for none whose number is unknown."""
    rules = (Rule("aten.log", "follow", call=2),)
    found = [find_allowance(rules, "aten.log.default", IN_A, number=n) for n in (0, 1, 2)]
    assert found == [None, None, rules[0]] and find_allowance(rules, "aten.log.default", IN_A) is None


def test_a_table_knows_whether_rules_hold_in_some_versions_alone():
    """A range of torch versions on a rule sets the flag, and rules without one leave it unset."""
    assert RuleTable(((Rule("aten.mm", "full", torch=">=2.12"),),)).has_versions
    assert not RuleTable(((Rule("aten.mm", "full"),),)).has_versions


TEXT = """program p
region 0: cpu bf16 enabled cached session 0 policy native
block main(%0: fp32[4, 4] cpu) {
  %1: bf16[4, 4] cpu = aten.mm.default(self=%0, mat2=%0) computes in 0NOTE
  return %1
}
"""


@pytest.mark.parametrize(("note", "number"), [("", 1), (" #2", 2), (" #0", 0)])
def test_a_program_says_which_call_a_step_is(note, number):
    """The text leaves out a 1; other numbers, and 0 for an unknown one, are written and read back."""
    text = TEXT.replace("NOTE", note)
    program = parse_program(text)
    assert program.steps[1].number == number and print_program(program) == text


def test_a_step_is_decided_by_its_number():
    """A rule about the second call leaves its input in fp32, while the first and the third are cast as usual."""
    rules = policy(Rule("aten.mm", "full", call=2))
    for note, casts in (("", 1), (" #2", 0), (" #3", 1)):
        made = run_passes(parse_program(TEXT.replace("NOTE", note)), BEFORE_AUTOGRAD[:1], {"native": rules})
        assert len(made.program.casts()) == casts


def test_a_step_whose_number_nobody_knows_is_refused_where_a_rule_asks():
    """With the line of the call, and that of the rule; and where none asks it is decided."""
    asking = policy(Rule("aten.mm", "full", call=2, origin=Origin("my.toml", 4)))
    with pytest.raises(RefusedError, match=r"call 2 of aten\.mm\.default") as error:
        run_passes(parse_program(TEXT.replace("NOTE", " #0")), BEFORE_AUTOGRAD[:1], {"native": asking})
    assert error.value.where[-1].file == "my.toml"
    others = policy(Rule("aten.bmm", "full", call=2), Rule("aten.mm", "full", module="a", call=2))
    made = run_passes(parse_program(TEXT.replace("NOTE", " #0")), BEFORE_AUTOGRAD[:1], {"native": others})
    assert len(made.program.casts()) == 1


def test_who_asks_for_a_number_is_found_among_all_rules_that_hold_there():
    """Of one argument, too; not by a pattern's name where the op takes none."""
    about = Rule("aten.mm", "full", argument="mat2", call=1)
    with pytest.raises(RefusedError):
        check_counted(policy(about), MM, IN_A)
    check_counted(policy(about), MM, IN_A, computes=False)
    check_counted(policy(Rule("aten.mm", "full", module="b", call=1)), MM, IN_A)
    check_counted(policy(), MM, IN_A)
    with pytest.raises(RefusedError) as error:
        check_counted(policy(Rule(MM, "full", call=1)), MM, IN_A)
    assert [(o.file, o.line) for o in error.value.where] == [("model.py", 3)] and error.value.advice


KIND = CallKind(MM, "a", "model.py", 3, "fp32", "bf16", "bf16", "lower", "fast", "native")


def test_a_ledger_keeps_the_numbers_of_calls_that_are_alike():
    """Calls of one kind share a record, whose known numbers survive both JSON and a merge."""
    ledger = Ledger()
    for number in (2, 0, 5, 2):
        ledger.count_call(KIND, 10, number)
    ledger.count_call(KIND, 10)
    assert ledger.calls[KIND].numbers == {2, 5} and ledger.calls[KIND].calls == 5
    assert '"numbers": [2, 5]' in ledger.to_json()
    again = parse(ledger.to_json())
    assert again.calls == ledger.calls
    assert ledger.merge(again).calls[KIND].numbers == {2, 5} and ledger.merge(again).calls[KIND].calls == 10


def test_a_ledger_that_was_saved_without_numbers_is_read():
    """In older files the numbers are unknown; any other missing entry is still an error."""
    facts = {"src": "fp32", "dst": "bf16", "elements": 1, "moved_bytes": 6, "how": "copied", "direction": "forward"}
    cast = Cast.of(MM, "self", IN_A, Rule(MM, "lower"), **facts, kind="input", policy="native", number=3)
    ledger = Ledger([cast])
    ledger.count_call(KIND, 10, 3)
    text = ledger.to_json()
    assert parse(text).casts[0].number == 3
    old = text.replace(', "number": 3', "").replace(', "numbers": [3]', "")
    assert old != text
    read = parse(old)
    assert read.casts[0].number == 0 and read.calls[KIND].numbers == set()
    with pytest.raises(nc.errors.RunError, match="lacks 'argument'"):
        parse(text.replace('"argument": "self", ', ""))


def test_a_rule_in_any_place_among_others_keeps_its_number():
    """All six orders of two numbered rules and one without a number decide the three calls alike."""
    rules = [Rule("aten.mm", "full", call=1), Rule("aten.mm", "lower", call=2), Rule("aten.mm", "follow")]
    for order in itertools.permutations(rules):
        assert formats(1, IN_A, *order) == (None, None) and formats(2, IN_A, *order) == (bf16, bf16)
        assert formats(3, IN_A, *order) == (None, None)
