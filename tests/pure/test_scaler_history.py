"""The scale of a loss as data: when a run is stuck, what its history holds and says."""

import json

import pytest

from narrowcast.errors import RunError
from narrowcast.reports.documents.training import scaler_document
from narrowcast.reports.results.saved import load
from narrowcast.reports.results.scaler_history import KEPT, History, ScaledStep
from narrowcast.training.scaler.stuck import AT_FLOOR, Streak, advice_text, found_text, why_skipped


def streaks(rows, floor=1.0, patience=6):
    """After which rows something is said."""
    streak, said = Streak(), []
    for number, (skipped, scale) in enumerate(rows):
        streak = streak.after(ScaledStep(number, scale, skipped), floor)
        if streak.is_stuck(patience):
            streak = streak.told()
            said.append(number)
    return said


def test_a_run_is_stuck_after_so_many_skipped_steps_in_a_row_and_again_when_they_have_doubled():
    """A clean step begins again."""
    assert streaks([(True, 8.0)] * 30) == [5, 11, 23]
    assert streaks([(True, 8.0)] * 5 + [(False, 8.0)] + [(True, 8.0)] * 6) == [11]


def test_a_run_is_stuck_sooner_where_the_scale_cannot_fall():
    """Skipped steps above it do not count for that."""
    assert streaks([(True, 2.0)] + [(True, 1.0)] * 5, patience=99) == [AT_FLOOR]
    assert streaks([(True, 0.5)] * AT_FLOOR, patience=99) == [AT_FLOOR - 1]


def test_why_names_three_parameters_at_most():
    """And the op, if somebody watched; else it says why no name is known."""
    found = tuple((f"layer.{n}", "infinite") for n in range(5))
    assert why_skipped(found, "") == (
        "the gradient of layer.0 is infinite, layer.1 is infinite, layer.2 is infinite and 2 more"
    )
    assert why_skipped(found[:1], "infinity made by mm (a.py:1)").endswith("infinite; infinity made by mm (a.py:1)")
    assert why_skipped((), "", "on another rank") == "a gradient was not finite (on another rank)"
    assert why_skipped((), "") == "a gradient was not finite"


def test_what_is_said_of_a_stuck_run_depends_on_the_scale_and_on_who_watched():
    """At the lowest scale the scale is not to blame."""
    row = ScaledStep(9, 1.0, True, "the gradient of a is NaN", "style")
    stuck = Streak(7, 4)
    assert found_text(stuck, row) == (
        "7 steps were skipped in a row, 4 of them at the lowest scale, 1 (loss style). Step 9: the gradient of a is NaN"
    )
    assert "at the lowest" not in found_text(Streak(7, 0), row)
    assert "by themselves" in advice_text(stuck, True) and "by themselves" not in advice_text(Streak(7, 0), True)
    assert "nc.watch" in advice_text(stuck, False) and "nc.watch" not in advice_text(stuck, True)


def history():
    found = History()
    found.add(ScaledStep(1, 8.0, False))
    found.add(ScaledStep(2, 8.0, True, "the gradient of a is NaN", "", ("a",)))
    found.add(ScaledStep(2, 4.0, False, loss="style"))
    return found


def test_a_history_is_data_that_json_can_hold():
    """All rows, and how many were skipped."""
    found = history()
    data = found.data()
    assert data == json.loads(found.to_json()) and data["schema"] == "narrowcast.scaler/1"
    assert (data["steps"], data["skipped"], len(data["rows"]), len(found)) == (2, 1, 3, 3)
    assert data["rows"][1] == {
        "step": 2, "scale": 8.0, "skipped": True, "why": "the gradient of a is NaN", "loss": "", "parameters": ["a"],
    }  # fmt: skip
    assert [row.step for row in found] == [1, 2, 2]


def test_a_history_prints_the_last_steps_that_were_skipped():
    """Five at most."""
    found = history()
    assert "VERDICT: 1 of 2 steps were skipped" in str(found) and "the gradient of a is NaN" in str(found)
    assert repr(found) == "<History: skipped steps; print shows it>"
    for number in range(3, 10):
        found.add(ScaledStep(number, 2.0, True, "why", "style"))
    text = str(found)
    assert text.count("    why\n") == 5 and "style  step 9  scale 2" in text and "step 4 " not in text


def test_a_history_keeps_the_latest_rows_and_counts_all():
    """Its memory has an end."""
    found = History()
    for number in range(1, KEPT + 3):
        found.add(ScaledStep(number, 1.0, number == 1))
    assert len(found) == KEPT and found.rows[0].step == 3 and (found.steps, found.skipped) == (KEPT + 2, 1)


def test_a_history_is_saved_or_says_why_not(tmp_path):
    """And read again, with no more than it may hold."""
    again = load(history().save(tmp_path / "a.json"))
    assert again == history() and again.rows.maxlen == history().rows.maxlen
    with pytest.raises(RunError, match="history"):
        history().save(tmp_path / "no" / "a.json")


def test_scalars_go_to_any_writer_once_each():
    """Under the loss's name, from a step on."""

    class Writer(list):
        def add_scalar(self, tag, value, step):
            self.append((tag, value, step))

    writer = Writer()
    history().to_tensorboard(writer, prefix="amp", since=1)
    assert writer == [
        ("amp/scale", 8.0, 2), ("amp/skipped", 1.0, 2), ("amp/style/scale", 4.0, 2), ("amp/style/skipped", 0.0, 2),
    ]  # fmt: skip


def test_the_page_draws_the_scale_and_names_what_was_skipped():
    """One line for each loss, a row for each skipped step."""
    history = History()
    history.add(ScaledStep(1, 65536.0, True, "the gradient of <b>w</b> is infinite", parameters=("<b>w</b>",)))
    history.add(ScaledStep(2, 32768.0, False))
    page = scaler_document(history)
    assert page.verdict == "1 of 2 steps were skipped"
    (series,) = page.series
    assert series.xs == [1, 2] and series.lines == [("scale", [65536.0, 32768.0])]
    (skipped,) = page.tables
    assert skipped.rows == [[1, "", 65536.0, "<b>w</b>", "the gradient of <b>w</b> is infinite"]]
    html = history.to_html()
    assert "narrowcast.page/1" in html and "<b>w</b>" not in html
    assert scaler_document(History()).tone == "good" and "No step was made" in History()._repr_html_()
