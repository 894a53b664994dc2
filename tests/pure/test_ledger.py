"""Ledgers: totals, merge, diff, JSON."""

import json
from dataclasses import replace

import pytest

from narrowcast.core.ledger import Advice, CallKind, Cast, EditRecord, HidingBlock, Refusal, Tally
from narrowcast.core.policy import Rule, Site
from narrowcast.errors import RunError
from narrowcast.reports.results.explanation import Explanation
from narrowcast.reports.results.ledger import Ledger
from narrowcast.reports.results.saved import load, parse

CAST = Cast(
    op="aten.linear.default", argument="weight", module_path="encoder.0", file="/x/model.py", line=7, src="fp32",
    dst="bf16", elements=100, moved_bytes=600, how="copied", direction="forward", kind="weight", action="lower",
    rule="aten.linear.default: lower", reason="fast", source="torch", policy="native",
)  # fmt: skip
CALL = CallKind("aten.linear.default", "encoder.0", "/x/model.py", 7, "fp32", "bf16", "bf16", "lower", "fast", "native")


def ledger(*casts):
    made = Ledger(list(casts), [Refusal("aten.bce.default", "", "/x/model.py", 9, "native", "unsafe")])
    made.count_call(CALL, 1000)
    made.count_call(CALL, 1000)
    return made


def test_totals_add_up():
    """Copied casts move bytes; cached ones do not."""
    t = ledger(
        CAST, replace(CAST, how="cached", moved_bytes=0), replace(CAST, direction="backward", repeated=True)
    ).totals()
    assert (t.casts, t.copied, t.cached, t.forward, t.backward, t.repeated) == (3, 2, 1, 2, 1, 1)
    assert (t.cast_bytes, t.op_bytes, t.calls, t.refusals) == (1200, 2000, 2, 1)
    assert t.share_of_casts == pytest.approx(1200 / 3200)
    assert Ledger().totals().share_of_casts == 0


def test_op_formats_counts_calls():
    """Op by format."""
    assert ledger().op_formats() == {"aten.linear.default": {"bf16": 2}}


def test_merge_keeps_both():
    """And changes neither."""
    a, b = ledger(CAST), ledger(CAST, CAST)
    merged = a.merge(b)
    assert len(merged.casts) == 3 and merged.calls[CALL].calls == 4
    assert len(a.casts) == 1 and a.calls[CALL].calls == 2


def test_diff_groups_casts_that_are_alike():
    """Lines may have moved; numbers are compared."""
    moved = replace(CAST, line=99)
    other = replace(CAST, argument="bias")
    assert [str(c) for c in ledger(CAST).diff(ledger(moved, moved, other))] == [
        "aten.linear.default weight in encoder.0: fp32 -> bf16: 1 -> 2",
        "aten.linear.default bias in encoder.0: fp32 -> bf16: 0 -> 1",
    ]
    assert ledger(CAST).diff(ledger(moved)) == ()


def test_json_round_trip(tmp_path):
    """Loaded equals saved."""
    made = ledger(CAST)
    made.save(tmp_path / "l.json")
    loaded = load(tmp_path / "l.json")
    assert loaded.casts == made.casts and loaded.refusals == made.refusals
    assert {k: (t.calls, t.moved_bytes) for k, t in loaded.calls.items()} == {CALL: (2, 2000)}
    assert json.loads(made.to_json())["schema"] == "narrowcast.ledger/2"


@pytest.mark.parametrize(
    ("text", "said"), [("{", "not JSON"), ("[]", "it holds no result"), ('{"schema": "narrowcast.ledger/9"}', "/9"),
                       ('{"schema": "narrowcast.ledger/2", "casts": [{}]}', "lacks")]
)  # fmt: skip
def test_other_files_are_refused(text, said):
    """With what was found."""
    with pytest.raises(RunError, match=said):
        parse(text, "l.json")


def test_an_explanation_groups_and_sorts():
    """Ops by bytes."""
    big = replace(CAST, moved_bytes=9000, argument="input", kind="activation", repeated=True)
    found = Explanation("m", "cpu", "bf16", "native", "d" * 64, "fake tensors", "", ledger(CAST, big, big))
    assert [(r.op, r.calls, r.moved_bytes) for r in found.op_rows()] == [("aten.linear.default", 2, 2000)]
    assert len(json.loads(found.to_json())["ledger"]["casts"]) == 3


def test_the_text_of_a_ledger_names_op_place_and_rule():
    """What a stranger reads."""
    text = str(ledger(CAST))
    for word in (
        "linear weight",
        "weight",
        "encoder.0",
        "model.py:7",
        "fp32 -> bf16",
        "600 B",
        "1 copied",
        "refusals",
    ):
        assert word in text


def many(count, **facts):
    """A ledger with this many casts, of three modules."""
    ledger = Ledger()
    for n in range(count):
        ledger.add(replace(CAST, module_path=f"layer.{n % 3}", **facts))
    return ledger


def test_a_ledger_of_many_casts_counts_them(monkeypatch):
    """What is beyond the list is kept by kind; sums, files, merges and differences know it."""
    monkeypatch.setattr("narrowcast.reports.results.ledger.LISTED", 10)
    ledger, listed = many(1000), Ledger([replace(CAST, module_path=f"layer.{n % 3}") for n in range(1000)])
    assert len(ledger.casts) == 10 and len(ledger.counted) == 3
    assert ledger.totals() == listed.totals() and ledger.totals().casts == 1000
    assert ledger.diff(listed) == () and len(ledger.diff(Ledger())) == 3
    again = parse(ledger.to_json())
    assert again == ledger
    assert ledger.merge(again).totals().casts == 2000 and len(ledger.merge(again).casts) == 10


def test_many_casts_are_printed_by_kind():
    """One line each with their number, those that move most."""
    text = str(many(3000))
    assert "VERDICT: 3000 casts moved" in text and "layer.* aten.linear weight" in text and "times 3000" in text
    assert many(3000).to_text(every=True).partition("Each module")[0].count("layer.*") == 1


def test_the_representation_is_one_line_and_a_notebook_s_a_small_table():
    """However long the ledger is; and names of modules are no markup."""
    ledger = many(500)
    ledger.add(replace(CAST, module_path="<b>"))
    assert "\n" not in repr(ledger) and len(repr(ledger)) < 120 and "501 casts" in repr(ledger)
    html = ledger._repr_html_()
    assert html.count("<tr>") == 4 and "<td>&lt;b&gt;</td>" in html and "<td><b></td>" not in html and len(html) < 5000


def everything():
    """A ledger in which there is one of each."""
    made = ledger(
        CAST, replace(CAST, how="shared", moved_bytes=0, argument="input", kind="input"),
        replace(CAST, repeated=True, direction="backward", argument="bias", kind="activation"),
        replace(CAST, how="cached", moved_bytes=0, repeated=True, module_path="", file=""),
    )  # fmt: skip
    made.calls[replace(CALL, computes="")] = Tally(3, 50)
    made.refusals.append(Refusal("aten.mm.default", "head", "", 0, "native", "no [mm]"))
    made.advice[Advice("no casts", "nothing [was] cast", "Cast.", "encoder", "/x/model.py", 3)] = 2
    made.advice[Advice("switched off", "it is off", "Leave it.", "", "", 0)] = 1
    made.note("slow here")
    made.count_match("aten.mm: full", "a")
    made.edits.append(EditRecord("insert", "assign", "o", "a", "m", "f", 1, "fp32", "bf16", 6, "forward", "lower",
                                 "r", "why", "p"))  # fmt: skip
    return made


def test_the_text_of_a_ledger_says_each_thing_once_in_its_place():
    """Sums, casts, refusals and advice, with what is not known left out."""
    lines = [" ".join(line.split()) for line in everything().to_text(every=True).splitlines()]
    for line in (
        "note: slow here",
        "VERDICT: 4 casts moved 1.2 KiB, 37% of all bytes",
        "casts 4 2 copied, 1 cached, 1 shared; 1 redundant",
        "refusals 2 calls that were not run",
        "all: op aten.linear, from fp32, to bf16, times 1, rule aten.linear.default: lower, reason fast",
        "encoder.0 weight weight copied forward 600 B model.py:7",
        "encoder.0 input input shared forward 0 B model.py:7",
        "encoder.0 bias activation again backward 600 B model.py:7",
        "(root) weight weight cached forward 0 B",
        "(root) aten.bce unsafe model.py:9",
        "head aten.mm no [mm]",
        "no casts nothing [was] cast Cast. 2 encoder model.py:3",
        "switched off it is off Leave it. 1 (root)",
    ):
        assert lines.count(line) == 1, line
    plain = ledger(CAST).to_text(every=True)
    assert "shared" not in plain and "Advice" not in plain


def test_casts_that_are_alike_are_one_row_those_that_move_most_first():
    """And how many they are."""
    casts = [replace(CAST, line=n, moved_bytes=10 * n + 10) for n in range(4)]
    text = Ledger([*casts, replace(CAST, line=3, moved_bytes=100)]).to_text(every=True)
    rows = [" ".join(line.split()) for line in text.splitlines() if "model.py" in line]
    assert rows == ["2 140 B model.py:3", "1 30 B model.py:2", "1 20 B model.py:1", "1 10 B model.py:0"]


def test_a_notebook_shows_twelve_kinds_and_says_how_many_are_left():
    """Those that move most first; what is equal in all is said once, above."""
    kinds = [replace(CAST, line=n, moved_bytes=100 - n) for n in range(14)]
    assert "rows more" not in Ledger(kinds[:12])._repr_html_()
    html = Ledger(kinds)._repr_html_()
    assert "<p>and 2 more rows</p>" in html and html.count("<tr>") == 14
    assert "<tr><td>100 B</td><td>model.py:0</td></tr>" in html
    assert "all: module encoder.0, op aten.linear, argument weight, kind weight, from fp32, to bf16, how copied" in html


def test_merge_adds_up_whatever_both_have():
    """Records follow each other, numbers are added, and a note is said once."""
    one = everything()
    both, alone = one.merge(one), Ledger().merge(one)
    assert alone == one
    assert both.refusals == one.refusals * 2 and both.edits == one.edits * 2 and both.notes == one.notes
    assert both.advice == {advice: 2 * times for advice, times in one.advice.items()}
    assert both.matches == {"aten.mm: full": {"a": 2}}
    assert {k: (t.calls, t.moved_bytes) for k, t in both.calls.items()} == {
        k: (2 * t.calls, 2 * t.moved_bytes) for k, t in one.calls.items()
    }
    assert one.op_formats() == {"aten.linear.default": {"bf16": 2, "-": 3}}
    totals = both.totals()
    assert (totals.repeated, totals.copied, totals.cached, totals.shared, totals.inside) == (2, 4, 2, 2, 0)


def test_notes_are_said_once_and_matches_counted():
    """Nothing is no note."""
    made = Ledger()
    for sentence in ("a", "", "b", "a"):
        made.note(sentence)
    for path in ("x", "y", "x"):
        made.count_match("r", path)
    assert made.notes == ["a", "b"] and made.matches == {"r": {"x": 2, "y": 1}}
    assert [c for c in everything().casts if c.how == "shared"] == [everything().casts[1]]


def test_a_ledger_of_casts_that_are_counted_knows_no_sizes(monkeypatch):
    """Of one kind there are many; the file is indented by one."""
    monkeypatch.setattr("narrowcast.reports.results.ledger.LISTED", 0)
    made = Ledger()
    made.add(CAST)
    ((kind, tally),) = made.counted.items()
    assert (kind.elements, kind.moved_bytes, tally.calls, tally.moved_bytes) == (0, 0, 1, 600)


def test_a_saved_ledger_is_text_of_many_lines(tmp_path):
    """Indented by one; what is loaded is equal, with each of its records."""
    file = tmp_path / "ledger.json"
    everything().save(file)
    text = file.read_text(encoding="utf-8")
    assert text.startswith('{\n "schema"') and text.endswith("}\n")
    assert load(file) == everything()


def test_a_change_of_casts_is_a_line():
    """The direction and the module are said where there is something to say."""
    (change,) = Ledger().diff(Ledger([CAST]))
    assert str(change) == "aten.linear.default weight in encoder.0: fp32 -> bf16: 0 -> 1"
    (change,) = Ledger().diff(Ledger([replace(CAST, direction="backward", module_path="")]))
    assert str(change) == "aten.linear.default weight: fp32 -> bf16 (backward): 0 -> 1"


def test_a_cast_has_the_words_of_the_rule_that_asked_for_it():
    """Its text where it gives no reason; none where no rule asked."""
    facts = {"src": "fp32", "dst": "bf16", "elements": 1, "moved_bytes": 6, "how": "copied", "direction": "forward",
             "kind": "input", "policy": "p"}  # fmt: skip
    site = Site("encoder", file="a.py", line=3)
    made = Cast.of("aten.mm.default", "self", site, Rule("aten.mm", "full", reason="why", source="who"), **facts)
    assert (made.action, made.rule, made.reason, made.source) == ("full", "aten.mm: full", "why", "who")
    assert (made.module_path, made.site) == ("encoder", "a.py:3")
    assert Cast.of("o", "a", site, Rule("aten.mm", "full"), **facts).reason == "aten.mm: full"
    none = Cast.of("o", "a", Site(), None, **facts)
    assert (none.action, none.rule, none.reason, none.source, none.site) == ("", "", "", "", "?")


@pytest.mark.parametrize(("policy", "kind"), [("mine", "hidden policy"), ("", "switched off")])
def test_a_block_that_hides_the_policy_is_advised_about(policy, kind):
    """With its place, and how many calls ran in it."""
    advice = HidingBlock(policy, "cpu", Site("net", file="a.py", line=3)).advice(7)
    assert (advice.kind, advice.module_path, advice.file, advice.line) == (kind, "net", "a.py", 3)
    assert "for 7 calls" in advice.what and "a.py:3" in advice.what and policy in advice.what


def test_calls_of_one_op_in_one_format_are_added_up():
    """Whatever else is different about them."""
    made = ledger()
    for n, computes in enumerate(("bf16", "", "")):
        made.calls[replace(CALL, line=n, computes=computes)] = Tally(1, 0)
    assert made.op_formats() == {"aten.linear.default": {"bf16": 3, "-": 2}}


def test_modules_and_ops_have_the_room_in_a_table():
    """At 80 columns, whole: what does not fit goes on to the next line."""
    made = Ledger([replace(CAST, module_path="encoder." * 9 + "query", argument="weight"), CAST])
    for text in (made.to_text(every=True, width=80), str(made)):
        assert "encoder." * 9 + "query" in text and "600 B" in text
        assert max(map(len, text.splitlines())) <= 80
    assert "query aten.linear weight" in " ".join(str(made).split())
