"""Ledgers: totals, merge, diff, JSON."""

import json
from dataclasses import replace

import pytest

from narrowcast.errors import LedgerError
from narrowcast.ledger import CallKind, Cast, Ledger, Refusal
from narrowcast.report import Explanation

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
    loaded = Ledger.load(tmp_path / "l.json")
    assert loaded.casts == made.casts and loaded.refusals == made.refusals
    assert {k: (t.calls, t.moved_bytes) for k, t in loaded.calls.items()} == {CALL: (2, 2000)}
    assert json.loads(made.to_json())["schema"] == "narrowcast.ledger/1"


@pytest.mark.parametrize(
    ("text", "said"), [("{", "not JSON"), ("[]", "schema"), ('{"schema": "narrowcast.ledger/9"}', "/9"),
                       ('{"schema": "narrowcast.ledger/1", "casts": [{}]}', "lacks")]
)  # fmt: skip
def test_other_files_are_refused(text, said):
    """With what was found."""
    with pytest.raises(LedgerError, match=said):
        Ledger.from_json(text, "l.json")


def test_an_explanation_groups_and_sorts():
    """Ops by bytes, casts by module, repeats by place."""
    big = replace(CAST, moved_bytes=9000, argument="input", kind="activation", repeated=True)
    found = Explanation("m", "cpu", "bf16", "native", "d" * 64, "fake tensors", "", ledger(CAST, big, big))
    assert [(r.op, r.calls, r.moved_bytes) for r in found.op_rows()] == [("aten.linear.default", 2, 2000)]
    assert [(m.module_path, m.casts, m.kinds) for m in found.module_rows()] == [("encoder.0", 3, "3 fp32 -> bf16")]
    assert [c.moved_bytes for c in found.largest_casts(2)] == [9000, 9000]
    assert [(r.times, r.wasted_bytes) for r in found.repeats()] == [(3, 18000)]
    assert json.loads(found.to_json())["ledger"]["schema"] == "narrowcast.ledger/1"


def test_the_text_of_a_ledger_names_op_place_and_rule():
    """What a stranger reads."""
    text = str(ledger(CAST))
    for word in (
        "aten.linear",
        "weight",
        "encoder.0",
        "model.py:7",
        "fp32 -> bf16",
        "600 B",
        "copied",
        "lower",
        "unsafe",
    ):
        assert word in text


def many(count, **facts):
    """A ledger with so many casts, of three modules."""
    ledger = Ledger()
    for n in range(count):
        ledger.add(replace(CAST, module_path=f"layer.{n % 3}", **facts))
    return ledger


def test_a_ledger_of_many_casts_counts_them(monkeypatch):
    """What is beyond the list is kept by kind; sums, files, merges and differences know it."""
    monkeypatch.setattr("narrowcast.ledger.ledger.LISTED", 10)
    ledger, listed = many(1000), Ledger([replace(CAST, module_path=f"layer.{n % 3}") for n in range(1000)])
    assert len(ledger.casts) == 10 and len(ledger.counted) == 3
    assert ledger.totals() == listed.totals() and ledger.totals().casts == 1000
    assert ledger.diff(listed) == () and len(ledger.diff(Ledger())) == 3
    again = Ledger.from_json(ledger.to_json())
    assert again == ledger
    assert ledger.merge(again).totals().casts == 2000 and len(ledger.merge(again).casts) == 10


def test_many_casts_are_printed_by_kind():
    """One line each with their number, those that move most; few are printed one by one."""
    text = str(many(3000))
    assert "3000 casts, alike ones together" in text and text.count("layer.") == 3
    assert str(many(9)).count("layer.") == 9


def test_the_representation_is_one_line_and_html_a_small_table():
    """However long the ledger is; and names of modules are no markup."""
    ledger = many(500)
    ledger.add(replace(CAST, module_path="<b>"))
    assert "\n" not in repr(ledger) and len(repr(ledger)) < 120 and "501 casts" in repr(ledger)
    html = ledger._repr_html_()
    assert html.count("<tr>") == 5 and "&lt;b&gt;" in html and "<b>" not in html and len(html) < 3000
