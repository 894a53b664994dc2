"""What pages of repairs, profiles, placements and saved explanations say; casts along a run; backwards of graphs."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from page_results import (
    ADD,
    LINEAR,
    a_comparison,
    a_failure,
    a_ledger,
    a_placed,
    a_profile,
    a_repair,
    a_run,
    explained,
    not_finite,
    not_repaired,
)
from program_text import parse_program

from narrowcast.analysis.explain.flow import graph_flow
from narrowcast.core.policy import Rule
from narrowcast.reports.documents.ledgers import cast_series, format_bars, shares
from narrowcast.reports.documents.model import OUTSIDE, Edge, Graph, Node
from narrowcast.reports.documents.of_results import document_of
from narrowcast.reports.documents.words import in_count, in_time
from narrowcast.reports.render.notebook import colours_of
from narrowcast.reports.results.graphs import CompiledGraph
from narrowcast.reports.results.repair import Repair, RepairRule
from narrowcast.reports.results.run import TensorFacts
from narrowcast.reports.results.saved import load, parse


def page(result):
    return document_of(result)


def table(made, name):
    (found,) = [each for each in made.tables if each.name == name]
    return found


def figures(made):
    return {figure.name: figure.value for figure in made.figures}


class TestRepair:
    """Rules of the repaired policy, and the runs that led there."""

    def test_each_rule_can_be_copied_with_what_it_is_worth(self):
        """The todo of a rule says what fails without it, and a price that was not measured is left empty."""
        made = page(a_repair())
        assert made.tone == "good" and made.verdict.startswith("Repaired: raises")
        use, first, second = made.todos
        assert not use.rule and (first.rule["action"], second.rule["action"]) == ("full", "align")
        assert first.what == f"Keep {LINEAR} in layer.1 in fp32" and "without it: infinity" in first.why
        rules = table(made, "rules")
        assert [row[5:9] for row in rules.rows] == [["raised", 0.75, 2, 2e6], ["raised", 0.25, 0, None]]
        assert rules.rules[0]["module"] == "layer.1" and rules.rules[1]["op"] == ADD

    def test_rules_about_two_calls_of_an_op_are_told_apart(self):
        """In words, and in the table: each names the call that it is about."""
        rows = [RepairRule(Rule(ADD, "full", "layer.1", call=call), "not finite", 0.5) for call in (1, 2)]
        made = page(replace(a_repair(), rules=rows))
        assert [todo.what for todo in made.todos[1:]] == [f"Keep call {n} of {ADD} in layer.1 in fp32" for n in (1, 2)]
        assert [row[2] for row in table(made, "rules").rows] == ["#1", "#2"]

    def test_the_search_is_a_table_and_two_plots(self):
        """Each run is a row with its error and its low products; what a run did not measure is a gap in a plot."""
        made = page(a_repair())
        assert [row[:6] for row in table(made, "steps").rows] == [
            [1, "under native", a_repair().before.found, 0.5, 8, 8],
            [2, "in fp32", "clean", None, None, None], [3, "under native", "clean", 0.01, 6, 8],
        ]  # fmt: skip
        errors, low = made.series
        assert errors.lines == [("output error", [0.5, None, 0.01])] and errors.log
        assert low.lines == [("matrix multiplications in fp16", [100.0, None, 75.0])]
        assert figures(made)["still in fp16"] == "6" and figures(made)["auc"] == "0.5"
        assert [bar.parts for bar in made.bars] == [(("fp16", 8.0),), (("fp16", 6.0), ("fp32", 2.0))]
        assert len(table(made, "other rules").rows) == 2

    def test_what_was_not_repaired_is_no_good_news(self):
        """A search that is out of ideas has a bad tone, and points to its notes in place of rules."""
        made = page(not_repaired())
        assert made.tone == "bad" and made.verdict == "Out of ideas: raises; with no rule, raises"
        assert [todo.what for todo in made.todos] == ["See the notes and each run"]

    def test_files_from_before_products_were_kept_have_no_such_plot(self):
        """Without counts of matrix multiplications only the error is plotted."""
        data = a_repair().data()
        for step in data["steps"]:
            del step["products"]
        assert [series.title for series in page(Repair.of_data(data)).series] == ["Error by run"]


class TestProfile:
    """Where lines cross, and where they only seem to."""

    def test_the_point_where_lines_cross_is_marked_and_tabled(self):
        """bf16 overtakes fp32 between two measured sizes: one mark, and one row with the same size."""
        made = page(a_profile())
        (series,) = made.series
        assert series.title == "gemm: time over size" and series.xs == pytest.approx([64**3, 256**3, 1024**3])
        assert [name for name, _ in series.lines] == ["fp32", "bf16", "fp16"] and series.log_x
        ((size, ns, said),) = series.marks
        assert 256.0**3 < size < 1024.0**3 and 1e5 < ns < 1e7 and said.startswith("bf16 faster above")
        (row,) = table(made, "crossings").rows
        assert row[:3] == ["gemm", "forward", "bf16"] and row[3] == size and row[6:] == ["fp32", "bf16"]

    def test_a_busy_machine_is_said_on_the_page(self):
        """More processes than threads: times are too long. Saved, it is still known."""
        profile = a_profile()
        assert page(profile).notes == []
        profile.load = 3.25
        (note,) = page(type(profile).from_json(profile.to_json())).notes
        assert note == "The machine was busy (load 3.2): times are too long, and spread"

    def test_at_the_point_both_lines_have_the_same_time(self):
        """Between two sizes both are straight where both axes are logarithmic: 2.0 there falls to 0.25 here."""
        ((size, ns, _),) = page(a_profile()).series[0].marks
        assert size == pytest.approx(256.0**3 * 64 ** (1 / 3)) and ns == pytest.approx(1e5 * 100 ** (1 / 3))

    def test_a_matrix_and_a_vector_are_a_family_of_their_own(self):
        """Matmuls of one row are bound by memory, and say nothing about which format is faster for square ones."""
        rows = table(page(a_profile()), "faster").rows
        assert [(row[0], row[2], row[3]) for row in rows] == [
            ("gemm", "bf16", 3), ("gemm", "fp16", 3), ("gemm, one row", "bf16", 1), ("conv", "fp16", 1),
        ]  # fmt: skip
        assert page(a_profile()).verdict == "Against fp32, bf16 is faster in gemm, one row and slower in gemm; " + (
            "fp16 is slower in conv"
        )

    def test_what_the_device_refuses_or_emulates_comes_first(self):
        """Formats that raise are counted in a figure, and a todo names the convolution that is only emulated."""
        made = page(a_profile())
        assert [row[3] for row in table(made, "capabilities").rows] == ["raises", "runs"]
        assert figures(made)["refused"] == "1" and figures(made)["fp16 conv"] == "emulated"
        assert "goal" in made.todos[0].what and "conv in fp16" in made.todos[0].why

    def test_an_empty_one_has_a_page_too(self):
        """A profile without samples has a verdict, and neither plots nor advice."""
        made = page(replace(a_profile(), samples={}, abilities={}))
        assert made.verdict == "No call was measured in two formats" and made.series == [] and made.todos == []


class TestPlacement:
    """What did the placement choose?"""

    def test_the_first_screen_says_it(self):
        """The verdict gives the goal, the calls moved and the times; tables show what was asked, chosen and tried."""
        made = page(a_placed())
        assert made.verdict == (
            "Goal fast: 1 of 2 calls run higher than the policy asks; predicted 4 ms, against 6 ms as the policy says; "
            "measured 4.5 ms"
        )
        assert figures(made)["predicted"] == "4 ms" and figures(made)["measured"] == "4.5 ms"
        assert made.bars[0].parts == (("bf16", 6e6),)
        assert [row[2:4] for row in table(made, "placement").rows] == [["bf16", "fp32"], ["bf16", "bf16"]]
        assert [row[1:3] for row in table(made, "candidates").rows] == [["placed", True], ["policy", False]]

    def test_where_a_graph_ends_is_worth_a_look(self):
        """A graph break is advice of its own, since the calls beyond it are not on this page."""
        (todo,) = [todo for todo in page(a_placed()).todos if "graphs end" in todo.what]
        assert "1 break" in todo.what and "not on this page" in todo.why


class TestSavedExplanation:
    """Read back, it says the same; what is no explanation is refused."""

    @pytest.mark.parametrize(
        "found",
        [explained(), explained(comparison=a_comparison()), explained(failure=a_failure()), a_placed(),
         explained(comparison=replace(a_comparison(), differences=not_finite()))],
    )  # fmt: skip
    def test_its_text_its_page_and_its_json_are_those_of_the_object(self, found, tmp_path):
        """A loaded explanation prints, renders and serializes exactly as the one that was saved."""
        found.save(tmp_path / "e.json")
        again = load(tmp_path / "e.json")
        assert str(again) == str(found)
        assert again.to_html() == found.to_html() and again._repr_html_() == found._repr_html_()
        assert again.to_json() == found.to_json() and "Explanation" in repr(type(again))

    @pytest.mark.parametrize(
        "changed, said",
        [({"schema": "narrowcast.explanation/0"}, "explanation/0"), ({"graphs": [{}]}, "a record lacks"),
         ({"ledger": {"casts": [{}]}}, "a record lacks")],
    )  # fmt: skip
    def test_other_schemas_and_broken_records_are_refused(self, changed, said, tmp_path):
        """An unknown schema or a record with missing entries raises a RunError that names the file."""
        (tmp_path / "e.json").write_text(json.dumps({**explained().data(), **changed}))
        with pytest.raises(Exception, match=said) as refused:
            load(tmp_path / "e.json")
        assert refused.type.__name__ in ("RunError",) and str(tmp_path) in str(refused.value)

    def test_its_page_is_not_made_by_way_of_a_text(self, monkeypatch):
        """Neither that in a notebook."""
        monkeypatch.setattr("json.dumps", lambda *_, **__: pytest.fail("JSON of the whole"))
        for result in (explained(comparison=a_comparison()), a_run(), a_repair(), a_ledger()):
            assert result._repr_html_()


def a_chain(times=(None, None, None)):
    """Three calls one after the other; the second and the third are given casts."""
    nodes = [Node("", ADD, ns=ns) for ns in times]
    edges = [
        Edge(0, 1, "self", "fp32", "bf16", 100), Edge(OUTSIDE, 1, "other", "fp32", "bf16", 50),
        Edge(1, 2, "self", "bf16", "fp32", 70), Edge(0, 2, "other", "fp32", "fp32", 999),
    ]  # fmt: skip
    return Graph(nodes, edges, flow=True)


class TestCastsAlongTheRun:
    """By the order of calls, or by their times."""

    def test_they_stand_at_their_calls(self):
        """Bytes are summed for each call and pair of formats; edges that change no format are left out."""
        (series,) = cast_series(a_chain())
        assert (series.x, series.xs, series.nodes) == ("call, in order", [2.0, 3.0], [1, 2])
        assert series.lines == [("fp32 to bf16", [150, None]), ("bf16 to fp32", [None, 70])]
        assert series.kind == "stems" and series.log

    def test_where_times_are_known_they_stand_at_the_time_at_which_their_calls_begin(self):
        """A call begins when those before it have ended, even if its own time is unknown."""
        (series,) = cast_series(a_chain((10.0, 20.0, None)))
        assert (series.x, series.xs) == ("time", [10.0, 30.0]) and series.note

    def test_one_call_with_casts_is_no_line(self):
        """A series needs two points, so a run whose casts are all at one call gets no plot."""
        graph = a_chain()
        assert cast_series(Graph(graph.nodes, graph.edges[:2])) == []

    def test_a_run_has_them(self):
        """The page of a recorded run plots its casts, and nothing else."""
        assert [series.title for series in page(a_run()).series] == ["Casts along the run"]


def test_the_bar_of_multiplications_is_beside_calls_and_bytes():
    """From the shapes of a run; calls of which nobody knows it are counted in its title."""
    bars = page(a_run()).bars
    assert [bar.unit for bar in bars] == ["calls", "bytes", "multiplications"]
    assert bars[2].parts == (("bf16", 2 * 2 * 8 * 8.0),) and bars[2].title == "Multiplications by format"
    assert [bar.unit for bar in page(a_ledger()).bars] == ["calls", "bytes"]  # it has no shapes
    bars = format_bars(
        [Node("", LINEAR, computes="bf16", multiplications=30), Node("", "aten.einsum.default", times=2)]
    )
    assert bars[1].title.endswith("; 2 calls are not counted")
    nodes = [Node("", LINEAR, computes="bf16", multiplications=30), Node("", ADD, computes="fp32,bf16")]
    nodes += [Node("", ADD, computes="bf16,fp32", multiplications=2)]
    assert shares(nodes, "multiplications", "")[0].parts == (("bf16", 30.0), ("bf16,fp32", 2.0))


def test_a_ledger_keeps_its_multiplications():
    """Also that nobody knows them."""
    ledger = a_ledger()
    assert {tally.multiplications for tally in parse(ledger.to_json()).calls.values()} == {None}
    kind = next(iter(ledger.calls))
    ledger.calls.clear()
    for _ in range(2):
        ledger.count_call(kind, 1, 0, 21)
    assert parse(ledger.to_json()).calls[kind].multiplications == 42


def test_a_slice_comes_from_the_call_in_whose_memory_it_lies():
    """Also a slice of a slice; a tensor of other memory does not."""
    run = a_run(1)
    first = run.calls[0].outputs[0][1]
    slices = [replace(run.tensors[first], shape=(2,), elements=2, low=0.1 * n) for n in range(3)]
    at = len(run.tensors)
    run.tensors += [replace(slices[0], lies_in=first), replace(slices[1], lies_in=at), slices[2]]
    reader = run.calls[1]
    run.calls = [run.calls[0]] + [
        replace(reader, inputs=(("self", at + n),), outputs=(("result", run.calls[1].outputs[0][1]),)) for n in range(3)
    ]
    edges = page(run).graph.edges
    assert [(edge.start, edge.end) for edge in edges][2:] == [(0, 1), (0, 2), (OUTSIDE, 3)]
    assert parse(run.to_json()).tensors[at].lies_in == first


def test_a_tensor_that_lies_in_a_later_one_is_nobody_s_view():
    """A file may say anything: the way back ends."""
    run = a_run(1)
    run.tensors = [replace(t, lies_in=n) if isinstance(t, TensorFacts) else t for n, t in enumerate(run.tensors)]
    assert len(page(run).graph.nodes) == 2


JOINT = """
program joint
block main(%0: fp32[2, 4] cpu, %1: fp32[8, 4] cpu, %2: bf16[2, 8] cpu) {
  %3: bf16[2, 4] cpu = cast(self=%0) at 0: layer, model.py:3
  %4: bf16[8, 4] cpu = cast(self=%1) at 0: layer, model.py:3
  %5: bf16[4, 8] cpu = aten.t.default(self=%4) ~0 at 0: layer, model.py:3
  %6: bf16[2, 8] cpu = aten.mm.default(self=%3, mat2=%5) computes at 0: layer, model.py:3
  %7: bf16[8, 2] cpu = aten.t.default(self=%2) backward ~0 at 0: layer, model.py:3
  %8: bf16[8, 4] cpu = aten.mm.default(self=%7, mat2=%3) computes wgrad at 0: layer, model.py:3
  %9: bf16[8, 4] cpu = aten.mul.Tensor(self=%8, other=%6) computes dgrad at 0: layer, model.py:3
  %10: fp32[8, 4] cpu = cast(self=%9) backward at 0: layer, model.py:3
  %11: fp32[8, 4] cpu = aten.neg.default(self=%10) computes dgrad at 0: layer, model.py:3
  return %6, %11
}
site 0: {"file": "model.py", "line": 3}
"""
FORWARD = """
program forward
region 0: cpu bf16 enabled cached session 0 policy -
block main(%0: fp32[2, 4] cpu, %1: fp32[8, 4] cpu weight) {
  %3: bf16[2, 4] cpu = cast(self=%0) in 0 #1 at 0: layer, model.py:3
  %4: bf16[8, 4] cpu = cast(self=%1) in 0 #1 at 0: layer, model.py:3
  %2: bf16[2, 8] cpu = aten.linear.default(input=%3, weight=%4) computes in 0 #1 at 0: layer, model.py:3
  return %2
}
site 0: {"file": "model.py", "line": 3, "module_path": "layer"}
"""


def test_the_backward_of_a_graph_follows_its_forward():
    """At the forward's places, reading what its calls gave; casts lie on its edges."""
    forward, joint = (parse_program(text.lstrip()) for text in (FORWARD, JOINT))
    graph = CompiledGraph(0, before=forward, after=forward, joint_before=joint, joint_after=joint)
    graph.forward_steps = {6: 2, 8: 2, 9: 2, 3: 3}
    flow = graph_flow(graph)
    rows = [step._asdict() for step in flow.steps]
    assert [(r["module_path"], r["op"], r["direction"], r["multiplications"]) for r in rows] == [
        ("layer", "aten.linear.default", "forward", 64), ("layer", "aten.mm.default", "wgrad", 64),
        ("layer", "aten.mul.Tensor", "dgrad", 0), ("", "aten.neg.default", "dgrad", 0),
    ]  # fmt: skip
    assert [edge[:5] for edge in map(list, flow.edges)][2:] == [
        [OUTSIDE, 1, "self", "bf16", "bf16"], [OUTSIDE, 1, "mat2", "fp32", "bf16"], [1, 2, "self", "bf16", "bf16"],
        [0, 2, "other", "bf16", "bf16"], [2, 3, "self", "bf16", "fp32"],
    ]  # fmt: skip
    made = page(explained(graphs=(graph,), front_end="compile"))
    assert [node.direction for node in made.graph.nodes] == ["forward", "backward", "backward", "backward"]
    assert made.graph.nodes[1].facts == (("makes", "the gradient of a weight"),)
    assert [row[1:3] for row in table(made, "backward casts").rows] == [["aten.mm.default", "mat2"],
                                                                       ["aten.neg.default", "self"]]  # fmt: skip
    assert figures(made)["casts of the backward"] == "1"


@pytest.mark.parametrize(
    "said, expected",
    [(in_time(35_000), "35 us"), (in_time(2.5e9), "2.5 s"), (in_time(7), "7 ns"), (in_count(950), "950"),
     (in_time(999_600), "1 ms"), (in_time(-117_492), "-117 us"),
     (in_count(16_777_216), "16.8 M"), (in_count(2e12), "2 T")],
)  # fmt: skip
def test_numbers_are_said_in_units_that_fit(said, expected):
    """As the figures and the marks of a page have them."""
    assert said == expected


def luminance(colour):
    """Relative luminance after WCAG 2.1 of `#rrggbb`."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", ["fp64", "fp32", "bf16", "fp16", "e4m3fn"])
def test_labels_in_notebooks_are_read_on_their_colours(name):
    """A contrast of at least 4.5, as on the page."""
    bright, dark = sorted(map(luminance, colours_of(name)), reverse=True)
    assert (bright + 0.05) / (dark + 0.05) >= 4.5
