"""The page of two runs: which boxes are pairs, what is listed, and what a saved comparison still knows."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from page_results import LINEAR, SCRIPT, a_pair, a_side, saved, two_runs

from narrowcast.analysis.diff.diff import diff
from narrowcast.reports.documents.model import OUTSIDE, Edge, Graph, Node
from narrowcast.reports.documents.of_results import document_of
from narrowcast.reports.documents.run_flow import merged_turns
from narrowcast.reports.results.mapping import RunMapping
from narrowcast.reports.results.saved import load


def page(found):
    return document_of(found)


def tables(made):
    return {table.name: table for table in made.tables}


@pytest.mark.parametrize("found", [a_pair(), saved(a_pair())], ids=["with runs", "saved"])
def test_a_pair_names_its_boxes_on_both_sides(found):
    """Whatever is known of what flows."""
    made = page(found)
    a, b = made.graph.nodes, made.pair.graph.nodes
    pairs = [([a[n].path for n in row.a], [b[n].path for n in row.b], row.verdict) for row in made.pair.rows]
    assert pairs == [
        (["embed"], ["embed"], "equal"), (["blocks.0.proj"], ["layers.0.proj"], "equal"),
        (["blocks.1.proj"], ["layers.1.proj"], "differs"), (["blocks.2.proj"], ["layers.2.proj"], "propagated"),
        ([SCRIPT], [SCRIPT], "propagated"),
    ]  # fmt: skip
    assert [node.path for node in a] == [
        "embed", "blocks.0.proj", "blocks.0.act", "blocks.1.proj", "blocks.1.act", "blocks.2.proj", "blocks.2.act",
        SCRIPT,
    ]  # fmt: skip
    assert [node.path for node in b if node.finding] == ["layers.1.proj"]
    assert made.graph.flow is made.pair.graph.flow is bool(found.compared_runs)
    assert all(node.computes for node in (*a, *b))


def test_turns_of_a_call_are_one_box_and_their_values_one_edge():
    """The engine makes each call twice."""
    made = page(a_pair())
    assert {node.times for node in made.graph.nodes} == {1} and {node.times for node in made.pair.graph.nodes} == {2}
    nodes = [Node("a", "aten.mm.default", f"#1{turn}", bytes=4) for turn in ("", " module call 2")]
    nodes.insert(1, Node("b", "aten.mm.default", "#1", direction="backward", bytes=4))
    edges = [Edge(OUTSIDE, n, "x", "fp32", "bf16", 6) for n in (0, 2)] + [Edge(0, 1, "x", "fp32", "fp32", 8)]
    merged = merged_turns(Graph(nodes, edges, flow=True))
    assert [(node.path, node.times, node.bytes) for node in merged.nodes] == [("a", 2, 8), ("b", 1, 4)]
    assert [(e.start, e.end, e.times, e.bytes) for e in merged.edges] == [(OUTSIDE, 0, 2, 12), (0, 1, 1, 8)]
    assert nodes[0].times == 1  # what was given is left alone


def test_the_first_screen_says_what_was_compared_and_what_differs():
    """In the words of the terminal; formats of both sides, and what came of it."""
    found = a_pair()
    made = page(found)
    assert (
        made.verdict in " ".join(str(found).split())
        and made.tone == "bad"
        and made.facts[:2] == [("a", SCRIPT), ("b", "engine")]
    )
    assert ("packages.layers", f"- / {SCRIPT}") in made.facts
    figures = {figure.name: (figure.value, figure.detail) for figure in made.figures}
    assert figures["without a partner"] == ("6", "3 of a, 3 of b")
    assert figures["make a difference"] == ("1", "2 pairs propagate one")
    assert made.todos[0].path == "blocks.1.proj" and "eps 1e-05 / 0.01" in made.todos[0].why
    bars = {bar.title: dict(bar.parts) for bar in made.bars}
    assert bars["Calls by format, a"] == {"fp32": 7, "bf16": 1}
    assert bars["Calls by format, b"] == {"fp32": 7, "bf16": 1}
    assert bars["Pairs by verdict"] == {"equal": 2, "propagated": 2, "differs": 1}
    lower = diff(a_side("x", "tanh"), a_side("x", "tanh", eps="1"))
    changed, advice = page(lower).bars[-2], page(lower).todos
    assert changed.parts == (("fp32 → bf16", 1),) and "the formats are not intended" in advice[0].what


def test_tables_have_pairs_differences_and_what_has_no_partner():
    """Calls by their identities, as a mapping names them."""
    made = tables(page(a_pair()))
    assert {name: len(table.rows) for name, table in made.items()} == {
        "differences": 1, "pairs": 5, "only in a": 3, "only in b": 3, "environment": 2,
    }  # fmt: skip
    assert made["differences"].rows[0][:2] == [f"blocks.1.proj {LINEAR} #1", f"layers.1.proj {LINEAR} #1"]
    assert [column.kind for column in made["only in b"].columns[:2]] == ["call_b", "call_b"]


def test_the_mapping_that_was_given_is_on_the_page_and_in_the_file(tmp_path):
    """Not the pairs that were found."""
    given = RunMapping.parse("blocks.*.proj = layers.*.proj\n")
    found = diff(*two_runs(), mapping=given)
    assert page(found).pair.mapping == str(given) and page(a_pair()).pair.mapping == str(RunMapping())
    found.save(tmp_path / "d.json")
    again = load(tmp_path / "d.json")
    assert [str(entry) for entry in again.by_hand.entries] == ["blocks.*.proj = layers.*.proj"]
    assert again.compared_runs == () and page(again).pair.mapping == str(given)


def test_a_text_of_many_rows_is_in_the_file_once():
    """Rows have its number, in the columns that say so."""
    made = page(a_pair())
    data = made.data()
    assert len(set(data["texts"])) == len(data["texts"]) and SCRIPT not in json.dumps(data["tables"])
    for table, packed in zip(made.tables, data["tables"], strict=True):
        assert packed["texts"]
        for row, numbers in zip(table.rows, packed["rows"], strict=True):
            assert [row[n] for n in packed["texts"]] == [data["texts"][numbers[n]] for n in packed["texts"]]
            assert all(not isinstance(value, str) for value in numbers)


def test_what_is_not_known_is_no_number():
    """A pair that could not be compared."""
    found = a_pair()
    found.rows[0] = replace(found.rows[0], verdict="not compared", measured_by="", difference=float("nan"))
    row = page(found).pair.rows[0]
    assert row.difference is None and row.round_off_bound is None
    json.dumps(page(found).data(), allow_nan=False)


def test_outputs_apart_without_a_pair_of_calls_name_the_calls_without_a_partner():
    """Advice never ends in a colon with nothing behind it."""
    found = replace(saved(a_pair()), rows=[], unaligned=[], front=[], outputs_apart=0.25)
    (todo,) = page(found).todos
    assert todo.why == "outputs are 2.5e-01 apart, and no call was found to make that"
    alone = a_pair().unaligned
    (todo,) = page(replace(found, unaligned=alone[:1])).todos
    assert todo.why.startswith(f"outputs are 2.5e-01 apart, and no call was found to make that: {alone[0].id} of ")
